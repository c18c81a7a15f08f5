"""When to fetch and what to evict, from a trace: pure questions, no clock, no memory.

`FetchSchedule` follows a cycle as it happens against the trace of the last cycle of its kind. While the two
agree, the next use of every unit is known: fetch what comes next, evict what comes last (Belady 1966). A
use that was not predicted moves nothing; the position catches up at the next agreement.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

NEVER = 1 << 62
"""`next_use` of a unit that the rest of the cycle does not need."""


@dataclass(frozen=True)
class AccessTrace:
    """Unit indices, one per use, in order."""

    uses: tuple[int, ...] = ()

    @cached_property
    def _positions(self) -> dict[int, list[int]]:
        positions: dict[int, list[int]] = {}
        for position, unit in enumerate(self.uses):
            positions.setdefault(unit, []).append(position)
        return positions

    def next_use(self, unit: int, position: int) -> int:
        """First position >= `position` that uses `unit`, or `NEVER`."""
        positions = self._positions.get(unit, [])
        i = bisect_left(positions, position)
        return positions[i] if i < len(positions) else NEVER

    def upcoming(self, position: int) -> Iterator[int]:
        """Units used from `position` on, each once, in order of next use."""
        seen: set[int] = set()
        for unit in self.uses[position:]:
            if unit not in seen:
                seen.add(unit)
                yield unit

    def first_uses(self, num_units: int) -> tuple[int, ...]:
        """All units in order of first use; those never used follow."""
        return tuple(dict.fromkeys((*self.uses, *range(num_units))))


class FetchSchedule:
    """Position in the predicted cycle, and the cycle recorded so far."""

    def __init__(self) -> None:
        self.trace = AccessTrace()
        self.position = 0
        self.num_departures = 0
        """Uses in this cycle that the trace did not predict."""
        self._recorded: list[int] = []
        self._known: dict[str, AccessTrace] = {}
        self._kind = ""

    @property
    def has_departed(self) -> bool:
        """True if this cycle was predicted, and went another way."""
        return bool(self.trace.uses) and self.num_departures > 0

    def begin_cycle(self, kind: str) -> None:
        """A cycle of this kind starts; the previous one becomes the prediction for its own kind."""
        if self._recorded:
            self._known[self._kind] = AccessTrace(tuple(self._recorded))
        self._kind, self._recorded = kind, []
        self.trace = self._known.get(kind, AccessTrace())
        self.position = self.num_departures = 0

    def used(self, unit: int) -> None:
        """Record a use and move on to behind it."""
        self._recorded.append(unit)
        found = self.trace.next_use(unit, self.position)
        if found == NEVER:
            self.num_departures += 1
        else:
            self.position = found + 1

    def next_use(self, unit: int) -> int:
        return self.trace.next_use(unit, self.position)

    def upcoming(self) -> Iterator[int]:
        """Units of the rest of the cycle, each once, in order of next use."""
        return self.trace.upcoming(self.position)

    def victim(self, candidates: Iterable[int], later_than: int = -1) -> int | None:
        """The candidate whose next use is the furthest, if that is later than `later_than`."""
        trace, position = self.trace, self.position
        best, furthest = None, later_than
        for unit in candidates:
            if (next_use := trace.next_use(unit, position)) > furthest:
                best, furthest = unit, next_use
        return best

    def first_uses(self, kind: str, num_units: int) -> tuple[int, ...]:
        """Units in the order in which a cycle of this kind first needs them."""
        trace = self._known.get(kind, AccessTrace())
        if self._kind == kind and not trace.uses:
            trace = AccessTrace(tuple(self._recorded))
        return trace.first_uses(num_units)
