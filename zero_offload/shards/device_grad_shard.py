"""Where gradients rest in the memory of a GPU, between backward and update.

Owns a tensor for each parameter that has a gradient: a part of one that has those of its neighbours too, so that a
section is widened, sent and used as one. They are in the compute dtype while a step has one micro-batch, and fp32 from
the first accumulation on. None outlives the update that uses it, so forward has the memory for activations. There is
no array and no `place`: gradients are adopted, and added to where they are. An update on the host takes a chunk by way
of staging memory, beside whatever the device computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

from zero_offload.device import Device
from zero_offload.memory.arena import MovableBuffer
from zero_offload.plan.layout import SectionLayout
from zero_offload.shards.grad_shard import Arrival, Downloads, GradPiece, GradShard, GradSource
from zero_offload.shards.store import ShardStore
from zero_offload.types import Tier


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
        for indices in self._neighbours():
            whole = _together([self._adopted[index] for index in indices])
            wide, origin = whole.float(), whole.storage_offset()
            for index in indices:
                begin = self._adopted[index].storage_offset() - origin
                self._adopted[index] = wide[begin : begin + self._adopted[index].numel()]
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
        for indices in self._neighbours():
            whole, first = _together([self._adopted[index] for index in indices]), self._begin(indices[0])
            inside = slice(max(begin - first, 0), max(min(first + whole.numel(), end) - first, 0))
            if inside.start < inside.stop:
                found.append(GradPiece(first + inside.start - begin, first + inside.stop - begin, whole[inside]))
        return found

    def _neighbours(self) -> Iterator[list[int]]:
        """Parameters in order; together those whose gradients lie in one memory as they do in the section."""
        run = list[int]()
        for index, grad in sorted(self._adopted.items()):
            if run:
                last = self._adopted[run[-1]]
                apart = self._begin(index) - self._begin(run[-1])
                same = grad.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
                if not same or grad.storage_offset() - last.storage_offset() != apart:
                    yield run
                    run = []
            run.append(index)
        if run:
            yield run

    def _begin(self, index: int) -> int:
        """The first element of a parameter's gradient in the shard."""
        return self.layout.in_shard(self.layout.params[index], self._shard_index)[0]


def _together(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Neighbours in one memory, and what is between them, as one; (numel,)."""
    begin, last = grads[0].storage_offset(), grads[-1]
    return grads[0].as_strided((last.storage_offset() + last.numel() - begin,), (1,), begin)


def _host_tensor(address: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """(numel,) of memory that somebody else keeps."""
    return torch.frombuffer((ctypes.c_char * (numel * dtype.itemsize)).from_address(address), dtype=dtype)


def _has_no_pages(buffer: MovableBuffer) -> None:
    raise AssertionError("no pages of the host are under gradients on a device")
