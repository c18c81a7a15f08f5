"""Memory that gradients pass through where the update runs inside of backward: of a few units, never of all.

Owns a pool that shards of gradients lease parts of, and knows whose update still reads its part. Control thread only.
The calls: `open` when a backward begins that updates; `lease` for a shard's first gradient, which waits for the oldest
update while there is no room; `passing` when an update has taken a unit's shards; `collect` gives back what updates
have used; `close` when backward ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from zero_offload.plan.memory import GRAD_RING_UNITS
from zero_offload.storage.memory.arena import Arena, Region
from zero_offload.storage.memory.pool import SpanPool
from zero_offload.storage.shards.unit_update import UnitUpdate

LAUNCHED_MAX = GRAD_RING_UNITS - 3
"""Units whose update is launched and not computed, beside those that backward fills."""


class Passing(Protocol):
    """A shard of gradients."""

    def leave_ring(self) -> None:
        """Give back what was leased; gradients that are still held move to memory of their own."""


class GradRing:
    """Of one model."""

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._pool = SpanPool(arena, nbytes)
        self._launched: deque[tuple[UnitUpdate, Sequence[Passing]]] = deque()
        self._is_open = False

    def open(self) -> None:
        """Gradients that come from now on are used by this backward."""
        self._is_open = True

    def close(self) -> None:
        """Gradients that come from now on are held until later."""
        self._is_open = False

    def lease(self, nbytes: int) -> Region | None:
        """Memory until `release`; None where gradients are to be held elsewhere."""
        if not self._is_open:
            return None
        while not self._pool.fits(nbytes) and self._launched:
            self._await_oldest()
        # Units that backward completes only at its end, such as those with unused parameters, may fill the ring.
        return self._pool.lease(nbytes) if self._pool.fits(nbytes) else None

    def release(self, region: Region) -> None:
        self._pool.release(region)

    def passing(self, update: UnitUpdate, shards: Sequence[Passing]) -> None:
        """An update is launched that uses these; waits while too many are."""
        self._launched.append((update, shards))
        while self._is_open and len(self._launched) > LAUNCHED_MAX:
            self._await_oldest()

    def collect(self) -> None:
        """Give back what updates that are computed have used."""
        for _ in range(len(self._launched)):
            update, shards = self._launched.popleft()
            if not update.is_done:
                self._launched.append((update, shards))
                continue
            for shard in shards:
                shard.leave_ring()

    def _await_oldest(self) -> None:
        update, shards = self._launched.popleft()
        update.wait()
        for shard in shards:
            shard.leave_ring()
