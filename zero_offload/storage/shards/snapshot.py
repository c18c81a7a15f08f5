"""The states of one step on their way into a generation, while the next step runs.

Owns what an update must wait for. These are chunks in memory that a commit has not written yet, and slots that are not
free before it is complete. Knows no manifest. States on disk are in their slot already. States in memory are written
from there, without a copy, a few chunks at a time. The order is that in which the next update comes to them. An update
that comes to a chunk which is not launched launches it, and waits for that one alone. States in a device's memory are
copied to host memory first, and the next update waits for that copy alone. The calls: `take` when an update is
complete, on its thread. `write`, and `end` when the generation is named, on the commit's thread. Meanwhile the next
update's thread calls `ask` before a chunk in memory changes, and `wait_for_slots` before a slot is written.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from zero_offload.base.events import Counters
from zero_offload.base.spans import Cause
from zero_offload.base.threads import Monitor
from zero_offload.base.types import whole_sectors
from zero_offload.hardware.device import Device, Event
from zero_offload.plan.memory import SNAPSHOT_CHUNKS_IN_FLIGHT
from zero_offload.storage.files.swap_file import SwapFile, Transfer
from zero_offload.storage.memory.arena import Arena, Region
from zero_offload.storage.memory.staging import Staging
from zero_offload.storage.shards.shard import Shard


@dataclass
class ChunkCopy:
    """A chunk in memory and the slot it goes to; None until it is launched."""

    shard: Shard
    row: int
    slot: int
    writes: list[Transfer] | None = None
    staging: Region | None = None
    """Staging for states in a device's memory."""

    def arrays(self) -> list[torch.Tensor]:
        return [self.shard.array(component, self.row) for component in self.shard.components]

    def launch(self, swap: SwapFile, addresses: Sequence[int]) -> None:
        """Write what stands there, component by component."""
        rows, slot = slice(self.row, self.row + 1), self.shard.slots[self.slot]
        extents = [slot[component] for component in self.shard.components]
        self.writes = [swap.launch_write(each, rows, at) for each, at in zip(extents, addresses, strict=True)]

    def wait(self) -> None:
        for write in self.writes or ():
            write.wait()

    def done(self) -> bool:
        return all(write.done() for write in self.writes or ())


@dataclass(frozen=True)
class Snapshot:
    """The states that one generation is made of."""

    slots: tuple[int, ...]
    """For each shard, the slot that has the states when `write` is over."""
    copies: list[ChunkCopy] = field(default_factory=list)


class DeviceStaging:
    """Host memory through which states in a device's memory pass on their way to a drive.

    Keeps the moment after which the device's states are those of the last update. The calls: `updated` when an update,
    or whatever else changes states, is launched, on its thread; `download` and `release` on the commit's. A copy from
    pageable memory counts too: it returns when the host's memory may change, and the device may have it later.
    """

    def __init__(self, device: Device, arena: Arena) -> None:
        self._device = device
        self._memory = Staging(arena)
        self._newest: Event | None = None if device.is_host else device.mark()

    def updated(self) -> None:
        """A change of states is launched on this thread's stream; it comes after the changes before."""
        if self._newest is not None:
            self._newest.let_wait(self._device.stream())
        self._newest = self._device.mark()

    def download(self, arrays: Sequence[torch.Tensor]) -> tuple[Region, list[int]]:
        """Copies of the arrays, each on sectors of its own, and their addresses; the arrays may change then."""
        region = self._memory.lease(sum(map(_room, arrays)))
        addresses, copies, offset = [], [], 0
        for array in arrays:
            addresses.append(region.address + offset)
            target = region.tensor(array.dtype, array.numel(), offset)
            copies.append(self._device.download(target, array, after=self._newest))
            offset += _room(array)
        for copy in copies:
            copy.take_on_host()
        return region, addresses

    def release(self, region: Region) -> None:
        self._memory.release(region)


class Snapshots:
    """One snapshot at a time, of all shards of a store."""

    def __init__(
        self, shards: Sequence[Shard], swap: SwapFile | None, counters: Counters, staging: DeviceStaging
    ) -> None:
        self._shards = shards
        self._swap = swap
        self._counters = counters
        self.staging = staging
        self._copies: dict[tuple[int, int], ChunkCopy] = {}
        """The copies of the snapshot under way, by section and chunk."""
        self._changed = Monitor()
        """Its lock is also held to launch a copy, which two threads may want to."""
        self._active = False
        self.num_ended = 0
        """Snapshots whose commit is complete."""
        self._held: int | None = None
        """Their number once the generation that is held is complete."""
        self._error: BaseException | None = None

    # The thread of the commit

    def take(self, unit_order: Sequence[int] = ()) -> Snapshot:
        """The states as they are now; waits until the snapshot before has ended.

        `unit_order` is that of the next update. No other update may run before this returns.
        """
        for shard in self._shards:
            shard.wait_for_writes()
            shard.writes.clear()
        self._wait_until(lambda: not (self._active or self._needs_slots))
        assert not self._copies, "copies of the snapshot before are left"
        self._active = True
        place = {unit: number for number, unit in enumerate(unit_order)}
        copies = [
            copy
            for shard in sorted(self._shards, key=lambda each: place.get(each.layout.unit, len(place)))
            for copy in _copies_of(shard)
        ]
        self._copies = {(copy.shard.layout.index, copy.row): copy for copy in copies}
        return Snapshot(tuple(shard.current for shard in self._shards), copies)

    def write(self, snapshot: Snapshot) -> None:
        """Bring everything into its slot. Raises StorageError."""
        in_flight: deque[ChunkCopy] = deque()
        for copy in snapshot.copies:
            if len(in_flight) == SNAPSHOT_CHUNKS_IN_FLIGHT:
                self._finish(in_flight.popleft())
            if copy.shard.on_device:
                self._download(copy)
            else:
                self._launch(copy)
            in_flight.append(copy)
        for copy in in_flight:
            self._finish(copy)

    def end(self) -> None:
        """The generation is complete: memory may change, and slots that it does not name may be written."""
        with self._changed.lock:
            assert self._active, "a snapshot ends once"
            self._copies = {}
            self._active = False  # the next one may begin
            self.num_ended += 1
            self._changed.notify()

    def hold(self) -> None:
        """The generation whose commit is under way is read until `release`. Its slots stay until then: they would be
        written after the next commit."""
        assert self._active, "a commit is under way"
        self._wait_until(lambda: self._held is None)
        self._held = self.num_ended + 1

    def release(self) -> None:
        """The generation that was held has been read."""
        with self._changed.lock:
            self._held = None
            self._changed.notify()

    @property
    def _needs_slots(self) -> bool:
        """True if the slots that the next update writes are those of the generation that is held."""
        held = self._held
        return held is not None and self.num_ended > held

    @property
    def holds(self) -> bool:
        """True if a generation is held."""
        return self._held is not None

    def fail(self, error: BaseException) -> None:
        """No commit comes to its end any more: every wait raises this."""
        with self._changed.lock:
            self._error = self._error or error
            self._changed.notify()

    # Threads that would change what is being written

    def needs(self, shard: Shard) -> bool:
        """True if a commit under way is made of what the shard has in memory."""
        return (shard.layout.index, 0) in self._copies

    def ask(self, shard: Shard, row: int) -> Callable[[], None] | None:
        """An update comes to a chunk in memory: the wait that comes before its first change, if there is one."""
        copy = self._copies.get((shard.layout.index, row))
        if copy is None:
            return None
        if shard.on_device:
            return lambda: self._wait_until(lambda: copy.staging is not None)
        self._launch(copy)
        return functools.partial(self._wait_for, copy)

    def wait_for_slots(self) -> None:
        """Return when no commit is under way, so that `Shard.writable_slot` is not a slot that a generation needs, or
        is held."""
        self._wait_until(lambda: not (self._active or self._needs_slots))

    def _launch(self, copy: ChunkCopy) -> None:
        assert self._swap is not None
        with self._changed.lock:
            if copy.writes is None:
                copy.launch(self._swap, [array.data_ptr() for array in copy.arrays()])

    def _download(self, copy: ChunkCopy) -> None:
        """Copy what is in a device's memory; on the commit's thread alone."""
        assert self._swap is not None
        region, addresses = self.staging.download(copy.arrays())
        copy.staging = region
        self._changed.notify()
        copy.launch(self._swap, addresses)

    def _finish(self, copy: ChunkCopy) -> None:
        copy.wait()
        if copy.staging is not None:
            self.staging.release(copy.staging)

    def _wait_for(self, copy: ChunkCopy) -> None:
        if not copy.done():
            with self._counters.timed("commit_wait_s"), self._counters.hindering(Cause.COMMIT):
                copy.wait()
        copy.wait()  # of what is done: its error

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        if self._error is None and not is_so():
            with self._counters.timed("commit_wait_s"), self._counters.hindering(Cause.COMMIT):
                self._changed.wait_for(lambda: self._error is not None or is_so())
        if self._error is not None:
            raise self._error


def _copies_of(shard: Shard) -> list[ChunkCopy]:
    """A shard's chunks, if they changed in memory since they were last written; its newest slot is theirs from now."""
    if not shard.dirty or shard.base is not None:
        return []
    shard.dirty = False
    if shard.on_disk:
        return []
    shard.current = shard.writable_slot()
    return [ChunkCopy(shard, row, shard.current) for row in range(len(shard.layout.chunks()))]


def _room(array: torch.Tensor) -> int:
    return whole_sectors(array.nbytes)
