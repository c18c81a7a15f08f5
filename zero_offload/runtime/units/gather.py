"""Units gathered from all ranks that hold a part of them: when that is needed, and that all do it together.

Owns what is said to `Agreement` about parameters. A section whose whole values this rank keeps (`Replica`) needs no
other rank. Replicas are made and outdated on all ranks at once, so all find the same units in need. Which gathers are
launched before their unit is used follows from the plan and from calls, never from what happens to be complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from zero_offload.runtime.ranks.agreement import Said
from zero_offload.runtime.ranks.collectives import Collectives
from zero_offload.runtime.units.param_loader import ParamLoader
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.storage.shards.shard import Component


class Gatherer:
    """Gathers units into their flat buffers, this rank's part of which is in place."""

    def __init__(self, collectives: Collectives, loader: ParamLoader) -> None:
        self._collectives = collectives
        self._loader = loader
        self.agreement = collectives.agreement
        self.agrees_per_unit = collectives.partition.any_branches and collectives.num_shards > 1
        """True if ranks use different units, and so agree which is next before each gather."""
        self._flying: dict[int, tuple[Said, list[tuple[Section, Callable[[], None]]]]] = {}
        """Gathers that are under way, by unit, and when they were launched."""
        self._updating: set[int] = set()
        """Units whose update some rank may still be computing."""

    def needs(self, unit: Unit) -> bool:
        """True if a fetch of it takes all ranks."""
        return self._collectives.num_shards > 1 and any(_spread(unit.sections))

    def begin_update(self, order: Iterable[int]) -> None:
        self._updating.update(order)

    def end_update(self) -> None:
        """The update that was begun is over, on every rank: it ran on the control thread."""
        self._updating.clear()

    def waited_for(self, unit: Unit) -> None:
        """The unit's update is over, on every rank: each has waited for it at this point."""
        self._updating.discard(unit.index)

    def may_run_ahead(self, unit: Unit) -> bool:
        """True if every rank knows that its part is in memory: no drive and no update to wait for."""
        return (
            self._collectives.num_shards > 1
            and not self.agrees_per_unit
            and unit.index not in self._updating
            and not self.has(unit)
            and all(s.shard.replica is None and Component.VALUE in s.shard.memory for s in unit.sections)
        )

    def has(self, unit: Unit) -> bool:
        """True if its gathers are under way."""
        flying = self._flying.get(unit.index)
        if flying is not None and self.agreement.is_void(flying[0]):
            del self._flying[unit.index]
            return False
        return flying is not None

    def launch(self, unit: Unit) -> None:
        """This rank's parts are in place: exchange them with the others'.

        Those of the sections to read; of all, where another rank may lack what is valid here.
        """
        sections: list[Section] = []
        if self._collectives.num_shards > 1:
            sections = list(_spread(unit.sections if self.agrees_per_unit else unit.to_read))
        if sections and not self.agrees_per_unit:
            self.agreement.announce(f"the gather of parameters of {unit.name}")
        launched = [(s, self._collectives.launch_gather(s.flat, unit.name)) for s in sections]
        self._flying[unit.index] = self.agreement.said, launched

    def finish(self, unit: Unit) -> None:
        """Return when the unit's whole values are valid for compute."""
        if not self.has(unit):
            self.launch(unit)
        for section, wait in self._flying.pop(unit.index)[1]:
            wait()
            self._loader.launch_replica(unit, section)

    def cancel(self, unit: Unit) -> None:
        """End the unit's gathers."""
        if self.has(unit):
            for _, wait in self._flying.pop(unit.index)[1]:
                wait()

    def meet(self, place: str) -> None:
        """All ranks have gathered the same so far, or all raise."""
        self.agreement.hear_all(place)

    def wanted_units(self, place: str) -> Iterator[int]:
        """Where ranks use different units: those that other ranks want, until all have come to `place`."""
        while (index := self.agreement.next_unit_at(place)) is not None:
            yield index


def _spread(sections: Sequence[Section]) -> Iterator[Section]:
    return (section for section in sections if section.shard.fresh_replica is None)
