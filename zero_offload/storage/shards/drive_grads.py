"""Gradients at rest on a drive.

They have pages in host memory only while backward writes the array, and until that is on the drive; `DriveRoom` says
who has them. A large gradient that is its section's only one is written through four chunks, without a copy of all of
it. `chunks` runs on any thread, and waits for what was launched before; everything else is the control thread's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_offload.base.spans import Cause
from zero_offload.base.types import Tier
from zero_offload.hardware.kernels.grads import sum_of_squares
from zero_offload.hardware.probe import kernel_threads
from zero_offload.plan.layout import CHUNK_NUMEL, SectionLayout
from zero_offload.storage.files.swap_file import ALL_ROWS, Extent, Transfer
from zero_offload.storage.memory.arena import MovableBuffer
from zero_offload.storage.shards import host_grads
from zero_offload.storage.shards.grad_memory import GradMemory
from zero_offload.storage.shards.grad_store import Arrival, Gathered, GradSource
from zero_offload.storage.shards.host_grads import HostGrads

STREAM_CHUNKS = 4
"""Chunks of memory that a gradient is streamed through."""


class DriveGrads(HostGrads):
    """The gradients of one shard, on a drive."""

    comes_by_staging = True

    def __init__(self, memory: GradMemory, layout: SectionLayout, unit: str, *, sums_up: bool) -> None:
        super().__init__(memory, layout, Tier.NVME, unit, sums_up=sums_up)
        self._pages: MovableBuffer | None = None
        """Under the array."""
        self._stream_pages: MovableBuffer | None = None
        self._writes: tuple[Transfer, ...] = ()
        """Those out of attached pages which may be under way."""
        self._extents: dict[torch.dtype, Extent] = {}
        memory.room.add(self)

    # From backward

    def add_shard(self, new: Gathered) -> None:
        if self._memory.path is None:
            super().add_shard(new)
        else:
            self._stage(new)

    def make_wide(self) -> None:
        self._memory.room.open(self.layout.index)
        self.widen()
        self.open()

    def open_pages(self) -> None:
        self.open()

    def flush(self) -> None:
        self._memory.room.leave(self.layout.index)

    def _keeps(self, grad: torch.Tensor) -> bool:
        return False

    def _write(self, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        self._memory.room.open(self.layout.index)
        if adds or not self._may_stream(grad):
            super()._write(index, grad, adds=adds)
            return
        self.factors.pop(index, None)
        with self._store.counters.waiting(Cause.GRADS, self.unit):
            self.stream(grad.reshape(-1))
        threads = kernel_threads()
        self.sums[index] = sum_of_squares(grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads)
        self.held = True

    def _may_stream(self, grad: torch.Tensor) -> bool:
        """True if a gradient is large, and rests on a drive as it is, and alone."""
        alone = len(self.layout.params) == 1 and self._array is None and self._store.grad_ring is None
        return self._sums_up and alone and grad.nbytes >= host_grads.LARGE_BYTES and grad.dtype == self.dtype

    def stream(self, grad: torch.Tensor) -> None:
        """Write `grad`, the shard's elements from the first on, chunk after chunk; the last few are under way then."""
        self._settle()
        nbytes = CHUNK_NUMEL * grad.itemsize
        self._stream_pages = self._attached(self._stream_pages, nbytes * STREAM_CHUNKS)
        for row, (begin, end) in enumerate(self.layout.chunks()):
            if len(self._writes) == STREAM_CHUNKS:
                self._writes[0].wait()
            part = self._stream_pages.region.tensor(grad.dtype, end - begin, row % STREAM_CHUNKS * nbytes)
            piece = grad[begin:end]
            part[: len(piece)].copy_(piece)
            write = self._store.disk.launch_write(self._extent(grad.dtype), slice(row, row + 1), part.data_ptr())
            self._writes = (*self._writes[1 - STREAM_CHUNKS :], write)

    # Pages

    @property
    def on_disk(self) -> bool:
        return self._array is None

    def _bring(self) -> torch.Tensor:
        numel = self.layout.shard_numel
        if self._pages is not None and self._pages.attached and self._writes:
            self._await_writes()  # what they write must not change
            self._writes = ()
            return self._pages.region.tensor(self.dtype, numel)
        self._settle()
        self._pages = self._attached(self._pages, numel * self.dtype.itemsize)
        array = self._pages.region.tensor(self.dtype, numel)
        if self.held:
            self._store.disk.read_array(self._extent(self.dtype), array)
        return array

    def leave(self) -> None:
        """Launch the write of the open array."""
        if self._array is not None and self._span is None:
            self._await_writes()
            write = self._store.disk.launch_write(self._extent(self.dtype), ALL_ROWS, self._array.data_ptr())
            self._writes = (write,)
            self._forget_array()

    def settle(self) -> None:
        if self._array is None:
            self._settle()

    def _settle(self) -> None:
        """What is under way is on its drive, and no pages are attached."""
        self._await_writes()
        for pages in (self._pages, self._stream_pages):
            if pages is not None and pages.attached:
                pages.detach()
        self._writes = ()

    def close(self, *, changed: bool = True) -> None:
        if changed:
            self.leave()
        elif self._span is None:
            self._forget_array()
        self.settle()

    def _kept(self, array: torch.Tensor) -> None:
        self._await_writes()
        self._store.disk.write_array(self._extent(array.dtype), array)

    def _await_writes(self) -> None:
        for write in self._writes:
            write.wait()

    def _attached(self, pages: MovableBuffer | None, nbytes: int) -> MovableBuffer:
        """With pages attached; its addresses are reserved once for each size."""
        if pages is None or pages.region.nbytes != nbytes:
            pages = MovableBuffer(self._store.arena, nbytes, claims=True)
        self._memory.attach(pages)
        return pages

    def _extent(self, dtype: torch.dtype) -> Extent:
        if dtype not in self._extents:
            name = f"grads {self.layout.index} of {self.layout.num_shards}"
            self._extents[dtype] = self._store.disk.allocate(name, self.layout.block_sizes(dtype))
        return self._extents[dtype]

    # To the update

    def chunks(self, rows: range, staging: int) -> tuple[list[GradSource], Sequence[Arrival]]:
        if not self.on_disk:
            return super().chunks(rows, staging)
        begin, end = self.layout.elements(rows)
        self._await_writes()
        read = self._store.disk.launch_read(self._extent(self.dtype), slice(rows.start, rows.stop), staging)
        return [GradSource(0, end - begin, staging)], [read]
