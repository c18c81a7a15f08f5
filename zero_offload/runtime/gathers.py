"""Gathers of units' parameters: which are under way, and which may be launched before their unit is used.

With several ranks every decision here is the same on all of them: it looks at the plan and at calls, never at what
happens to be complete. The calls: `launch` or not, then `finish` or `abandon`; `begin_update` and `end_update` around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zero_offload.runtime.carrier import Carrier
from zero_offload.runtime.collectives import Collectives
from zero_offload.runtime.unit import Section, Unit
from zero_offload.shards.shard import Component


class Gathers:
    """Exchanges units' parts between ranks; with one shard there is nothing to exchange."""

    def __init__(self, collectives: Collectives, carrier: Carrier) -> None:
        self._collectives = collectives
        self._carrier = carrier
        self._flying: dict[int, list[tuple[Section, Callable[[], None]]]] = {}
        self._updating: set[int] = set()
        """Units whose update some rank may still be computing."""

    def begin_update(self, order: Iterable[int]) -> None:
        self._updating.update(order)

    def end_update(self) -> None:
        """The update that was begun is over, on every rank: it ran on the control thread."""
        self._updating.clear()

    def waited_for(self, unit: Unit) -> None:
        """The unit's update is over, on every rank: each has waited for it at this point."""
        self._updating.discard(unit.index)

    def may_run_ahead(self, unit: Unit) -> bool:
        """Whether every rank knows that its part is in memory: no drive and no update to wait for."""
        return (
            self._collectives.num_shards > 1
            and unit.index not in self._updating
            and unit.index not in self._flying
            and all(s.shard.replica is None and Component.VALUE in s.shard.memory for s in unit.sections)
        )

    def launch(self, unit: Unit) -> None:
        """This rank's parts are here, or as good as here: exchange them with the others'."""
        self._carrier.finish(unit)
        self._flying[unit.index] = [
            (section, self._collectives.launch_gather(section.flat, unit.name))
            for section in unit.to_read
            if section.shard.fresh_replica is None
        ]

    def finish(self, unit: Unit) -> None:
        """Return when the unit's whole values are valid for compute."""
        if unit.index not in self._flying:
            self.launch(unit)
        for section, wait in self._flying.pop(unit.index):
            wait()
            self._carrier.keep(unit, section)

    def abandon(self, unit: Unit) -> None:
        """End what brings the unit's values, so that its buffers may go or be filled anew."""
        for _, wait in self._flying.pop(unit.index, ()):
            wait()
        self._carrier.abandon(unit)
