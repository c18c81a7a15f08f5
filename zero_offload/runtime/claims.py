"""Frames that gradients on their way to drives have of the units', where one rank computes on a CPU.

Owns how many: as many as they had at once in the backwards before. In forward units have them all; in backward, which
has less need of units fetched far ahead, those are kept. Where they would be more than half, they come on top.
"""

from __future__ import annotations

from zero_offload.memory.arena import Arena
from zero_offload.memory.resizable import Budget


class Claims:
    """The calls: `note` after each claim, `keep` as a backward begins, `release` as an update or a forward does."""

    def __init__(self, arena: Arena, units: Budget) -> None:
        """Where the units' frames are another memory's, or `arena` keeps some at all times, nothing is done."""
        self._arena = arena
        self._shared = units is arena and arena.kept_frames == 0
        self._for_units = units.frame_limit
        self._most = 0

    def note(self) -> None:
        """Frames were claimed."""
        if self._shared:
            self._most = max(self._most, self._arena.claimed_frames)

    def grow(self, count: int) -> bool:
        """Allow `count` frames more for a claim, before the gradients that leave are waited for; False where they are
        not shared, or a budget ends."""
        return self._shared and self._arena.raise_limit(count, claimed=True)

    def keep(self) -> None:
        """Units that are fetched ahead leave what was claimed before."""
        limit = self._arena.frame_limit
        if 2 * self._most > limit:
            self._arena.raise_limit(max(self._for_units + self._most - limit, 0))
        if self._most:
            self._arena.keep(self._most)

    def release(self) -> None:
        """Units have all of it."""
        if self._most:
            self._arena.keep(0)
