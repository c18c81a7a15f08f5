"""Where a shard's gradients rest between backward and update.

Owns one buffer per trainable shard: (shard_numel,) in the compute dtype while a step has one micro-batch on
one rank, fp32 from the first accumulation on (compute dtype -> fp32 is exact, so the switch changes no bit).
On the NVMe tier the buffer's pages are attached only while backward writes it. The calls: `open`, writes to
the array, `close`; the update takes `open_chunk`; `held` is cleared by whoever consumed the gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zero_offload.memory.arena import MovableBuffer
from zero_offload.plan.layout import SectionLayout
from zero_offload.shards.shard import Shard, block_sizes
from zero_offload.shards.store import ShardStore
from zero_offload.storage.swap_file import Extent, Transfer
from zero_offload.types import Tier

AttachBuffer = Callable[[MovableBuffer], None]
"""Puts pages under a buffer, evicting others if need be. Raises CapacityError."""


class GradShard:
    """The gradients of one shard; `held` says whether a step's gradients are inside."""

    def __init__(self, store: ShardStore, shard: Shard, attach: AttachBuffer) -> None:
        self._store = store
        self._shard = shard
        self._attach = attach
        self._array: torch.Tensor | None = None
        self._buffer: MovableBuffer | None = None
        self._extents: dict[torch.dtype, Extent] = {}
        self.dtype = shard.layout.dtype
        self.held = False

    @property
    def layout(self) -> SectionLayout:
        return self._shard.layout

    @property
    def tier(self) -> Tier:
        return self._shard.placement.grads

    @property
    def on_disk(self) -> bool:
        return self._array is None and self.tier is Tier.NVME

    def open(self) -> torch.Tensor:
        """The buffer, (shard_numel,) `dtype`, host, with the gradients it holds; valid until `close`."""
        if self._array is None and self.tier is not Tier.NVME:
            self._array = self._store.arena.array(self.dtype, self.layout.shard_numel)
        elif self._array is None:
            # Reserved once per dtype; only its pages come and go.
            self._buffer = self._buffer or MovableBuffer(
                self._store.arena, self.layout.shard_numel * self.dtype.itemsize
            )
            self._attach(self._buffer)
            self._array = self._buffer.region.tensor(self.dtype, self.layout.shard_numel)
            if self.held:
                self._store.disk.read_array(self._extent(), self._array)
        return self._array

    def close(self) -> None:
        """Bring the buffer to rest; on NVMe it is written and its pages go back."""
        if self._buffer is None or self._array is None:
            return
        self._store.disk.write_array(self._extent(), self._array)
        self._buffer.detach()
        self._array = None

    def widen(self) -> torch.Tensor:
        """Switch to fp32, keeping the values, which is exact; returns the open buffer."""
        if self.dtype == torch.float32:
            return self.open()
        narrow = self.open().float() if self.held else None
        if self._buffer is not None and self._buffer.attached:
            self._buffer.detach()
        self._array = self._buffer = None
        self.dtype, held, self.held = torch.float32, self.held, False
        wide = self.open()
        self.held = held
        if narrow is not None:
            wide.copy_(narrow)
        return wide

    def open_chunk(self, row: int, staging: int) -> tuple[int, list[Transfer]]:
        """Address of a chunk's gradients for the update, and the transfers to wait for before using it."""
        begin, _ = self.layout.chunks()[row]
        if not self.on_disk:
            return self.open().data_ptr() + begin * self.dtype.itemsize, []
        return staging, [self._store.disk.launch_read(self._extent(), slice(row, row + 1), staging)]

    def _extent(self) -> Extent:
        if self.dtype not in self._extents:
            assert self._store.swap is not None
            sizes = block_sizes(self.layout, self.dtype)
            self._extents[self.dtype] = self._store.swap.allocate(f"grads {self.layout.index}", sizes)
        return self._extents[self.dtype]
