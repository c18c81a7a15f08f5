"""Where gradients rest in the memory of a GPU, between backward and update.

Owns a tensor for each parameter that has a gradient: the one that autograd has made, where it is nobody else's, in the
compute dtype while a step has one micro-batch, fp32 from the first accumulation on. None outlives the update that uses
it, so forward has the memory for activations. There is no array and no `place`: gradients are adopted, and added to
where they are. An update on the host takes a chunk by way of staging memory, beside whatever the device computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_offload.device import Device, Handoff
from zero_offload.memory.arena import MovableBuffer
from zero_offload.plan.layout import SectionLayout
from zero_offload.shards.grad_shard import Arrival, GradPiece, GradShard, GradSource
from zero_offload.shards.store import ShardStore
from zero_offload.types import Tier


@dataclass(frozen=True)
class Downloads:
    """Parts of a chunk on their way."""

    handoffs: Sequence[Handoff]

    def wait(self) -> None:
        for handoff in self.handoffs:
            handoff.take_on_host()


class DeviceGradShard(GradShard):
    """The gradients of one shard, on `device`."""

    on_device = True

    def __init__(self, store: ShardStore, layout: SectionLayout, device: Device, shard_index: int = 0) -> None:
        super().__init__(store, layout, Tier.DEVICE, _has_no_pages, shard_index)
        self._device = device

    @property
    def comes_by_staging(self) -> bool:
        return True

    @property
    def device_bytes(self) -> int:
        return sum(grad.nbytes for grad in list(self._adopted.values()))

    def open(self) -> torch.Tensor:
        raise AssertionError("gradients on a device are adopted one by one")

    def view(self, index: int) -> torch.Tensor:
        return self._adopted[index]

    def widen(self) -> None:
        for index in list(self._adopted):
            self._adopted[index] = self._adopted[index].float()  # one by one: each frees the one that it replaces
        self.dtype = torch.float32

    def open_chunks(self, rows: range, staging: int) -> tuple[list[GradSource], Sequence[Arrival]]:
        begin, end = self.layout.elements(rows)
        found, size = [], self.dtype.itemsize
        for piece in self.pieces(rows):
            target = _host_tensor(staging + piece.begin * size, self.dtype, piece.end - piece.begin)
            found.append(self._device.download(target, piece.grad, after=self._made))
            self._store.counters.read(Tier.DEVICE, target.nbytes)
        return [GradSource(0, end - begin, staging)], [Downloads(found)]

    def pieces(self, rows: range) -> list[GradPiece]:
        begin, end = self.layout.elements(rows)
        found = []
        for index, grad in sorted(self._adopted.items()):
            first, last = self.layout.in_shard(self.layout.params[index], self._shard_index)
            inside = slice(max(begin - first, 0), max(min(last, end) - first, 0))
            if inside.start < inside.stop:
                found.append(GradPiece(first + inside.start - begin, first + inside.stop - begin, grad[inside]))
        return found


def _host_tensor(address: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """(numel,) of memory that somebody else keeps."""
    return torch.frombuffer((ctypes.c_char * (numel * dtype.itemsize)).from_address(address), dtype=dtype)


def _has_no_pages(buffer: MovableBuffer) -> None:
    raise AssertionError("no pages of the host are under gradients on a device")
