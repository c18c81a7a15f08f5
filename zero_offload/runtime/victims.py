"""Which unit leaves the compute device when another one needs its memory.

Owns the order of preference; never moves bytes. First what nobody uses, by next use; then what has not arrived; then,
on one rank, what is between two uses. A unit under a view that somebody holds stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero_offload.plan.schedule import FetchSchedule
from zero_offload.runtime.loans import Loans
from zero_offload.runtime.units.unit import Unit
from zero_offload.shards.state import UnitState

_ARRIVING = (UnitState.FETCHING, UnitState.AWAITING)


class Victims:
    """Chooses among the units of one model."""

    def __init__(self, units: Sequence[Unit], schedule: FetchSchedule, loans: Loans, world_size: int) -> None:
        self._units = units
        self._schedule = schedule
        self._loans = loans
        self._world_size = world_size

    def unused(self) -> list[int]:
        """Units that are here and that nobody uses."""
        # All units, at most uses: attributes, no properties.
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
            if not self._loans.keeps(self._units[index]):
                return self._units[index]
        return None

    def last_resort(self) -> Unit | None:
        """For a use that cannot wait, when all that is here is in use or kept."""
        candidates = [u.index for u in self._units if u.state in _ARRIVING and u.may_be_evicted]
        if not candidates and self._world_size == 1:
            # With several ranks a unit must go on all of them, and who holds views is this rank's affair.
            candidates = [u.index for u in self._units if u.state is UnitState.PRESENT and u.may_pass]
        index = self._schedule.victim(candidates)
        return None if index is None else self._units[index]
