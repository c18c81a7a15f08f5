"""The memory through which chunks of an update pass, and states that are read into it before there is an update.

Owns `CHUNKS_IN_FLIGHT` regions. Between two updates they would lie idle: while backward computes, what the next update
begins with is read into them, where the last two began alike. No more memory is taken for that: as many bytes of states
that rest in memory gain about as much, and are never moved. What was read is given up where an update begins otherwise,
or states are replaced; it stays where a step is skipped. The calls: `read_ahead` while nothing is under way; in an
update `fit`, and for each chunk `take`, `free` where it has brought none, and back to `free`; `drop` before states are
replaced.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from zero_offload.memory.arena import Arena, Region
from zero_offload.plan.memory import CHUNKS_IN_FLIGHT
from zero_offload.shards.disk import DiskArrays
from zero_offload.shards.shard import Shard, array_bytes
from zero_offload.storage.swap_file import Transfer
from zero_offload.types import Tier


@dataclass
class ChunkAhead:
    """A chunk whose states on disk are read."""

    shard: Shard
    rows: range
    region: Region
    reads: list[Transfer] | None = None
    """None while they are launched: whether they are is not known where a Ctrl-C strikes."""


Beginning = dict[tuple[int, range], Shard]
"""Chunks in the order in which an update comes to them: by the section's number, and which they are."""


class UpdateStaging:
    """One store's. An update calls it, and the control thread between two of them; `drop` may come at any time."""

    def __init__(self, arena: Arena, disk: DiskArrays) -> None:
        self._arena = arena
        self._disk = disk
        self._nbytes = 0
        """Of each region: what the largest chunk of any update so far needed."""
        self.free: list[Region] = []
        self._first: Beginning = {}
        """The chunks that have come first since states were last to be read ahead."""
        self._first_before: Beginning = {}
        """Those of the time before."""
        self._is_noted = False
        """Whether what comes now is none of them."""
        self._ahead: deque[ChunkAhead] = deque()
        self._lock = threading.Lock()
        self._lost: list[Region] = []
        """To which a read may be on its way that nobody can wait for."""

    def fit(self, nbytes: int) -> None:
        """Have regions of so many bytes, if any. No chunk is under way."""
        with self._lock:
            if nbytes > self._nbytes:
                self._drop()
                self.free.clear()
                self._nbytes = nbytes
            for _ in range((CHUNKS_IN_FLIGHT - len(self.free) - len(self._ahead)) * (self._nbytes > 0)):
                self.free.append(self._arena.allocate(self._nbytes))
                self._disk.add_memory(self.free[-1])

    def read_ahead(self) -> None:
        """Launch the reads of what the next update begins with, if the last two began alike. None is under way."""
        with self._lock:
            first, is_usual = self._first, list(self._first) == list(self._first_before)
            self._first, self._first_before, self._is_noted = {}, first, False
            if self._ahead or not is_usual:
                return  # some is left where an optimizer was not stepped
            for (_, rows), shard in first.items():
                # States may have been added since.
                if not self.free or not 0 < bytes_on_disk(shard, rows) <= self._nbytes:
                    return
                shard.settle()
                self._ahead.append(ChunkAhead(shard, rows, self.free.pop()))
                self._ahead[-1].reads = launch_states(self._disk, shard, rows, self._ahead[-1].region.address)

    def take(self, shard: Shard, rows: range) -> ChunkAhead | None:
        """The update comes to a chunk that needs a region: what was read of it ahead, if it was. Whoever takes it
        counts it."""
        with self._lock:
            self._note(shard, rows)
            if self._ahead and self._ahead[0].shard is shard and self._ahead[0].rows == rows and self._ahead[0].reads:
                return self._ahead.popleft()
            self._drop()
            return None

    def _note(self, shard: Shard, rows: range) -> None:
        key = shard.layout.index, rows
        # What comes again, by another optimizer, has been updated in between.
        self._is_noted = self._is_noted or key in self._first or len(self._first) == CHUNKS_IN_FLIGHT
        if not self._is_noted:
            self._first[key] = shard

    def drop(self) -> None:
        """States are about to be replaced: return when nothing is read ahead. Raises StorageError or IntegrityError
        where that has failed."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        while self._ahead:
            chunk = self._ahead[0]
            for read in chunk.reads or ():
                read.wait()
            if chunk.reads is not None:
                self._disk.counters.read(Tier.NVME, bytes_on_disk(chunk.shard, chunk.rows))
            (self._lost if chunk.reads is None else self.free).append(self._ahead.popleft().region)


def launch_states(disk: DiskArrays, shard: Shard, rows: range, address: int) -> list[Transfer]:
    """Read what of neighbouring chunks rests on disk to memory from `address` on, component by component. Not counted:
    bytes are those of the step whose update takes them."""
    reads = []
    begin, end = shard.layout.elements(rows)
    for component in shard.components_on_disk:
        extent = shard.slots[shard.current][component]
        reads.append(disk.launch_read(extent, slice(rows.start, rows.stop), address, counts=False))
        address += array_bytes(shard.layout, [component], end - begin)
    return reads


def bytes_on_disk(shard: Shard, rows: range) -> int:
    """What `launch_states` reads."""
    begin, end = shard.layout.elements(rows)
    return array_bytes(shard.layout, shard.components_on_disk, end - begin)
