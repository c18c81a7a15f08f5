"""The order in which one cycle (a forward and its backward) uses units; a frozen value with fast questions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
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
