"""A bounded set of equal regions that are leased and come back: landing places for bytes on their way."""

from __future__ import annotations

from zero_offload.memory.arena import Arena, Region


class RegionPool:
    """`count` regions of `nbytes`, taken from the arena on first use, all at once, and kept.

    One by one, when they are needed, the last would be registered with the device in the middle of some later step.
    """

    def __init__(self, arena: Arena, count: int, nbytes: int) -> None:
        self._arena = arena
        self._count = count
        self._nbytes = nbytes
        self._free: list[Region] | None = None

    @property
    def available(self) -> bool:
        return self._free is None or bool(self._free)

    def lease(self) -> Region:
        """A region; the caller makes sure that one is `available`."""
        if self._free is None:
            self._free = [self._arena.allocate(self._nbytes) for _ in range(self._count)]
        return self._free.pop()

    def release(self, region: Region) -> None:
        assert self._free is not None
        self._free.append(region)


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
