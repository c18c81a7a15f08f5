"""What the gradient stores of one model share: pages on the way to drives, the way down from a GPU, sums."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zero_offload.base.events import Counters
from zero_offload.base.spans import Cause
from zero_offload.hardware.device import Device
from zero_offload.plan.memory import GRADS_IN_FLIGHT
from zero_offload.storage.memory.arena import MovableBuffer
from zero_offload.storage.shards.device_sums import DeviceSums
from zero_offload.storage.shards.grad_downloads import GradDownloads
from zero_offload.storage.shards.grad_store import GradStore
from zero_offload.storage.shards.store import ShardStore

AttachBuffer = Callable[[MovableBuffer], None]
"""Puts pages under a buffer, evicting others if need be. Raises CapacityError."""


class DriveRoom:
    """Which sections whose gradients rest on a drive have pages, and which give theirs back first.

    Backward fills the pages of a section while those of the unit before are written; sections that wait for their last
    gradients (some never come) rest on their drive until those arrive. The calls: `open` before a gradient is put in
    its place, `leave` when the section is complete or `drop`, `settle` when the pages are wanted elsewhere. What
    happens depends on the order of the calls alone, never on what is complete, so that it is the same on all ranks.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        # Weak: stores hold this object, and a cycle would outlive a dropped model.
        self._stores: dict[int, list[weakref.ref[GradStore]]] = {}
        """By the section's index: with several ranks it has two, which leave together."""
        self._units: dict[int, int] = {}
        """The unit of each section."""
        self._open: list[int] = []
        """Sections with pages, the longest unused first."""
        self._leaving: list[int] = []
        """The oldest first."""

    def add(self, store: GradStore) -> None:
        self._stores.setdefault(store.layout.index, []).append(weakref.ref(store))
        self._units[store.layout.index] = store.layout.unit

    def open(self, section: int) -> None:
        """There is room for this section's pages."""
        if self._open and self._open[-1] == section and len(self._leaving) < GRADS_IN_FLIGHT:
            return  # the next gradient of the same section
        self._forget(section)
        while self._num_units([*self._open, section]) > GRADS_IN_FLIGHT:
            self.leave(self._open[0])
        while self._num_units(self._leaving) >= GRADS_IN_FLIGHT:
            self._settle_oldest()
        self._open.append(section)

    def leave(self, section: int) -> None:
        """Launch its writes."""
        self._forget(section)
        for store in self._of(section):
            store.leave()
        self._leaving.append(section)

    def drop(self) -> None:
        """Drop what has not left."""
        while self._open:
            for store in self._of(self._open[-1]):
                store.close(changed=False)
            self._open.pop()

    def settle(self) -> bool:
        """Wait for what was launched; says whether anything was."""
        found = bool(self._leaving)
        while self._leaving:
            self._settle_oldest()
        return found

    def _settle_oldest(self) -> None:
        stores = self._of(self._leaving[0])
        with self._counters.waiting(Cause.GRADS, stores[0].unit):
            for store in stores:
                store.settle()
        self._leaving.pop(0)

    def _forget(self, section: int) -> None:
        self._open = [each for each in self._open if each != section]
        self._leaving = [each for each in self._leaving if each != section]

    def _num_units(self, sections: Iterable[int]) -> int:
        return len({self._units[each] for each in sections})

    def _of(self, section: int) -> list[GradStore]:
        return [store for store in (each() for each in self._stores[section]) if store is not None]


@dataclass
class DevicePath:
    """From a GPU to where gradients rest."""

    downloads: GradDownloads
    sums: DeviceSums

    def drop(self) -> None:
        """What is under way is not wanted; when this returns nothing is, and memory that copies use may go."""
        self.downloads.drop()
        self.sums.drop()


@dataclass
class GradMemory:
    """Of one model."""

    store: ShardStore
    device: Device
    attach: AttachBuffer
    shard_index: int
    room: DriveRoom
    path: DevicePath | None
    """None where a CPU computes."""
    keeps_small: bool = False
    """True where nothing of the model leaves memory: gradients may leave holes in the heap, for the next forward."""

    def settle(self) -> bool:
        """Pages of gradients that leave for drives are there for others; says whether there were any."""
        if self.path is not None:
            self.path.downloads.advance()
        return self.room.settle()
