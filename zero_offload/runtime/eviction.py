"""Which unit leaves the compute device when another one needs its memory, and how it leaves.

First units that are not in use leave, the one with the furthest next use before others; then units that have not
arrived; then, on one rank, units between two uses. A unit under a view that the program holds stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero_offload.plan.schedule import FetchSchedule
from zero_offload.runtime.held_views import HeldViews
from zero_offload.runtime.units.gather import Gatherer
from zero_offload.runtime.units.param_loader import ParamLoader
from zero_offload.runtime.units.unit import Unit
from zero_offload.storage.shards.state import UnitState

_ARRIVING = (UnitState.FETCHING, UnitState.AWAITING)


class Evictor:
    """Of one model's units. Counts those that are not here."""

    def __init__(
        self,
        units: Sequence[Unit],
        schedule: FetchSchedule,
        held_views: HeldViews,
        gatherer: Gatherer,
        loader: ParamLoader,
        world_size: int,
    ) -> None:
        self._units = units
        self._schedule = schedule
        self._held_views = held_views
        self._gatherer = gatherer
        self._loader = loader
        self._world_size = world_size
        self.num_evictions = 0
        self.num_absent = 0
        """Units that are not PRESENT."""
        self.count()

    def count(self) -> None:
        """The list of units has become longer."""
        self.num_absent = sum(unit.state is not UnitState.PRESENT for unit in self._units)

    def advance(self, unit: Unit, to: UnitState) -> None:
        """Move a unit to another state."""
        self.num_absent += (to is not UnitState.PRESENT) - (unit.state is not UnitState.PRESENT)
        unit.advance(to)

    def unused(self) -> list[int]:
        """Units that are here, may leave, and are not in use."""
        # Looks at all units at most uses: attributes, no properties.
        return [
            u.index
            for u in self._units
            if u.state is UnitState.PRESENT
            and not (u.forward_uses or u.backward_uses or u.gathered_uses)
            and not (u.resident or u.kept)
        ]

    def choose(self, later_than: int = -1) -> Unit | None:
        """The unused unit whose next use is the furthest, if that is later than `later_than`."""
        while (index := self._schedule.victim(self.unused(), later_than)) is not None:
            if not self._held_views.keep_if_viewed(self._units[index]):
                return self._units[index]
        return None

    def evict_one(self) -> bool:
        """Evict one unit, whatever comes next. False if all that are here are in use or kept."""
        victim = self.choose() or self._last_resort()
        if victim is None:
            return False
        if victim.state is UnitState.PRESENT:
            victim.break_off()  # a use that is being fetched for goes on: it attaches the unit anew
        self.evict(victim)
        return True

    def evict(self, unit: Unit) -> None:
        """Give the unit's memory back; an update that was to deliver into it no longer does."""
        if unit.state is UnitState.AWAITING and unit.update is not None and not unit.update.withdraw():
            unit.wait_for_update()
        self._gatherer.abandon(unit)
        # First: a Ctrl-C in the midst must not leave a unit that seems to be here.
        self.advance(unit, UnitState.AWAY)
        self._loader.leave(unit)
        unit.detach()
        self.num_evictions += 1

    def _last_resort(self) -> Unit | None:
        """For a use that cannot wait, when all that is here is in use or kept."""
        candidates = [u.index for u in self._units if u.state in _ARRIVING and u.may_be_evicted]
        if not candidates and self._world_size == 1:
            # With several ranks a unit must go on all of them, and views are held on some.
            candidates = [u.index for u in self._units if u.state is UnitState.PRESENT and u.may_pass]
        index = self._schedule.victim(candidates)
        return None if index is None else self._units[index]
