"""A shard's gradients on a drive, and the pages under them on their way there and back.

Owns their extents, one for each dtype, and what is attached while an array is open or its write is under way. The
calls: `bring` the array, write to it, `leave`; or `stream` one that lies elsewhere; then `settle`, when the pages are
wanted back. `read` waits for what was launched before, on any thread; everything else is the control thread's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zero_offload.memory.arena import MovableBuffer
from zero_offload.plan.layout import CHUNK_NUMEL, SectionLayout
from zero_offload.shards.disk import ALL_ROWS
from zero_offload.shards.store import ShardStore
from zero_offload.storage.extents import Extent
from zero_offload.storage.swap_file import Transfer

AttachBuffer = Callable[[MovableBuffer], None]
"""Puts pages under a buffer, evicting others if need be. Raises CapacityError."""
STREAM_CHUNKS = 4
"""Chunks of memory that a gradient is streamed through."""


class GradPages:
    """Of one shard on the NVMe tier."""

    def __init__(self, store: ShardStore, layout: SectionLayout, attach: AttachBuffer) -> None:
        self._store = store
        self._layout = layout
        self._attach = attach
        self._whole: MovableBuffer | None = None
        self._stream: MovableBuffer | None = None
        self._writes: tuple[Transfer, ...] = ()
        """Those out of attached pages which may be under way."""
        self._extents: dict[torch.dtype, Extent] = {}

    def bring(self, dtype: torch.dtype, *, held: bool) -> torch.Tensor:
        """(shard_numel,) `dtype`, host, with the values that are `held`. Before another dtype comes `settle`."""
        numel = self._layout.shard_numel
        if self._whole is not None and self._whole.attached and self._writes:
            self._await_writes()  # what they write must not change
            self._writes = ()
            return self._whole.region.tensor(dtype, numel)
        self.settle()
        self._whole = self._buffer(self._whole, numel * dtype.itemsize)
        array = self._whole.region.tensor(dtype, numel)
        if held:
            self._store.disk.read_array(self._extent(dtype), array)
        return array

    def leave(self, array: torch.Tensor) -> None:
        """Launch the write of what `bring` has given."""
        self._await_writes()
        self._writes = (self._store.disk.launch_write(self._extent(array.dtype), ALL_ROWS, array.data_ptr()),)

    def write(self, array: torch.Tensor) -> None:
        """Write an array that lies elsewhere, (shard_numel,), in sector-aligned host memory, and wait."""
        self._await_writes()
        self._store.disk.write_array(self._extent(array.dtype), array)

    def stream(self, grad: torch.Tensor) -> None:
        """Write `grad`, the shard's elements from the first on, chunk after chunk; the last few are under way then."""
        self.settle()
        nbytes = CHUNK_NUMEL * grad.itemsize
        self._stream = self._buffer(self._stream, nbytes * STREAM_CHUNKS)
        for row, (begin, end) in enumerate(self._layout.chunks()):
            if len(self._writes) == STREAM_CHUNKS:
                self._writes[0].wait()
            part = self._stream.region.tensor(grad.dtype, end - begin, row % STREAM_CHUNKS * nbytes)
            piece = grad[begin:end]
            part[: len(piece)].copy_(piece)
            write = self._store.disk.launch_write(self._extent(grad.dtype), slice(row, row + 1), part.data_ptr())
            self._writes = (*self._writes[1 - STREAM_CHUNKS :], write)

    def read(self, dtype: torch.dtype, rows: range, address: int) -> Transfer:
        """Launch the read of chunks to consecutive memory."""
        self._await_writes()
        return self._store.disk.launch_read(self._extent(dtype), slice(rows.start, rows.stop), address)

    def settle(self) -> None:
        """What is under way is on its drive, and no pages are attached."""
        self._await_writes()
        for buffer in (self._whole, self._stream):
            if buffer is not None and buffer.attached:
                buffer.detach()
        self._writes = ()

    def _await_writes(self) -> None:
        for write in self._writes:
            write.wait()

    def _buffer(self, buffer: MovableBuffer | None, nbytes: int) -> MovableBuffer:
        """With pages attached; its addresses are reserved once for each size."""
        if buffer is None or buffer.region.nbytes != nbytes:
            buffer = MovableBuffer(self._store.arena, nbytes, claims=True)
        self._attach(buffer)
        return buffer

    def _extent(self, dtype: torch.dtype) -> Extent:
        if dtype not in self._extents:
            name = f"grads {self._layout.index} of {self._layout.num_shards}"
            self._extents[dtype] = self._store.disk.allocate(name, self._layout.block_sizes(dtype))
        return self._extents[dtype]
