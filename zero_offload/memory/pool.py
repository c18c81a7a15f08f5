"""A bounded set of equal regions that are leased and come back: landing places for bytes on their way."""

from __future__ import annotations

from zero_offload.memory.arena import Arena, Region


class RegionPool:
    """At most `count` regions of `nbytes`, taken from the arena on first use and kept."""

    def __init__(self, arena: Arena, count: int, nbytes: int) -> None:
        self._arena = arena
        self._left = count
        self._nbytes = nbytes
        self._free: list[Region] = []

    @property
    def available(self) -> bool:
        return bool(self._free) or self._left > 0

    def lease(self) -> Region:
        """A region; the caller makes sure that one is `available`."""
        if self._free:
            return self._free.pop()
        assert self._left > 0
        self._left -= 1
        return self._arena.allocate(self._nbytes)

    def release(self, region: Region) -> None:
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
