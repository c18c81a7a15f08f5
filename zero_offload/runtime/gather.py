"""Units gathered from all ranks that hold a part of them: when that is needed, and that all do it together.

Owns what is said to `Agreement` about parameters. A section whose whole values this rank keeps (`Replica`) needs no
other rank; replicas are made and outdated on all ranks at once, so all find the same units in need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zero_offload.runtime.carrier import Carrier
from zero_offload.runtime.collectives import Collectives
from zero_offload.runtime.unit import Section, Unit


class Gatherer:
    """Gathers units into their flat buffers, this rank's part of which is in place."""

    def __init__(self, collectives: Collectives, carrier: Carrier) -> None:
        self._collectives = collectives
        self._carrier = carrier
        self.agreement = collectives.agreement
        self.is_agreed = collectives.partition.any_branches and collectives.num_shards > 1
        """Whether ranks use different units, and so agree which is next before each gather."""

    def needs(self, unit: Unit) -> bool:
        """Whether bringing it takes all ranks."""
        return self._collectives.num_shards > 1 and any(_spread(unit.sections))

    def gather(self, unit: Unit, to_read: Sequence[Section]) -> None:
        """Gather the sections `to_read`; all, where another rank may lack what is valid here."""
        if self._collectives.num_shards == 1:
            return
        sections = list(_spread(unit.sections if self.is_agreed else to_read))
        if sections and not self.is_agreed:
            self.agreement.same(f"the gather of parameters of {unit.name}")
        for section in sections:
            self._collectives.all_gather(section.flat)
            self._carrier.keep(unit, section)

    def wanted_units(self, place: str) -> Iterator[int]:
        """Units that other ranks want, until all have come to `place`."""
        while self.is_agreed and (index := self.agreement.next_unit_at(place)) is not None:
            yield index


def _spread(sections: Sequence[Section]) -> Iterator[Section]:
    return (section for section in sections if section.shard.fresh_replica is None)
