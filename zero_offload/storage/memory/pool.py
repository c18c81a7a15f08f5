"""Bounded memory whose parts are leased in exact sizes and come back: landing places for bytes on their way."""

from __future__ import annotations

from typing import Protocol

from zero_offload.base.types import SECTOR, whole_sectors
from zero_offload.storage.memory.arena import A_BUFFER, Arena, Need, Region


class ByteRange(Protocol):
    """Where a lease is: its `Region`, or an object that knows this alone."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class SpanPool:
    """`nbytes` of memory, taken from the arena on first use, all at once, and kept.

    A lease takes what it needs, rounded up to a sector. With one size for all, that of the largest unit, an embedding
    beside small blocks would make most of every lease a waste. Piece by piece, when it is needed, the last would be
    registered with the device in the middle of some later step.
    """

    def __init__(self, arena: Arena, nbytes: int, need: Need = A_BUFFER) -> None:
        self._arena = arena
        self._need = need
        self.nbytes = _round_up(nbytes)
        self._region: Region | None = None
        self._free = [(0, self.nbytes)]
        """Spans (begin, end), in order, no two of them neighbours."""

    def fits(self, nbytes: int) -> bool:
        """True if a lease of so many bytes can be had now."""
        return nbytes == 0 or any(end - begin >= nbytes for begin, end in self._free)

    def lease(self, nbytes: int) -> Region:
        """A sector-aligned region; the caller makes sure that it `fits`."""
        if self._region is None:
            self._region = self._arena.allocate(self.nbytes, self._need)
        size = _round_up(nbytes)
        index, (begin, end) = next((i, span) for i, span in enumerate(self._free) if span[1] - span[0] >= size)
        self._free[index : index + 1] = [(begin + size, end)] if begin + size < end else []
        return self._region.part(begin, size)

    @property
    def in_use(self) -> bool:
        return self._free != [(0, self.nbytes)]

    def holds(self, lease: ByteRange) -> bool:
        """True if the lease is a part of this memory."""
        return self._region is not None and 0 <= lease.address - self._region.address < self.nbytes

    def release(self, lease: ByteRange) -> None:
        """Give a lease back."""
        assert self._region is not None
        begin = lease.address - self._region.address
        assert begin >= 0 and begin + lease.nbytes <= self.nbytes, "a lease of other memory comes back"
        assert begin % SECTOR == 0 and lease.nbytes % SECTOR == 0, "less comes back than was leased"
        merged: list[tuple[int, int]] = []
        for span in sorted([*self._free, (begin, begin + lease.nbytes)]):
            assert not merged or merged[-1][1] <= span[0], "a lease comes back twice"
            if merged and merged[-1][1] == span[0]:
                merged[-1] = (merged[-1][0], span[1])
            else:
                merged.append(span)
        self._free = merged


def _round_up(nbytes: int) -> int:
    return max(whole_sectors(nbytes), SECTOR)


class LazyRegion:
    """One region, taken on first use, and again after a `drop`."""

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._arena = arena
        self._nbytes = nbytes
        self._region: Region | None = None

    @property
    def region(self) -> Region:
        if self._region is None:
            self._region = self._arena.allocate(self._nbytes)
        return self._region

    def drop(self) -> None:
        """Give the memory back once no view of it is left."""
        self._region = None
