"""Gradients at rest in host memory.

Owns one array per section. A large gradient that autograd has computed in host memory is kept as it is, others are
copied to their places. Where nothing leaves memory most are kept, and what they leave in the heap serves the next
forward. Where the update runs inside of backward, the array is leased from the `GradRing` of the store.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial

import torch

from zero_offload.base.types import KIB, MIB, Tier
from zero_offload.hardware.device import Event, Handoff
from zero_offload.hardware.kernels.grads import accumulate_grad, store_grad, sum_of_squares
from zero_offload.hardware.probe import kernel_threads
from zero_offload.plan.layout import SectionLayout
from zero_offload.storage.memory.arena import Region
from zero_offload.storage.shards.grad_memory import GradMemory
from zero_offload.storage.shards.grad_store import (
    Arrival,
    Downloads,
    Gathered,
    GradPiece,
    GradSource,
    GradStore,
    is_wider,
)

LARGE_BYTES = 32 * MIB
"""From this size on malloc gives a tensor pages of its own: keeping a gradient is then cheaper than a copy, and leaves
no hole in the heap when it goes."""

KEPT_MEAN_BYTES = 256 * KIB
"""Each gradient that is kept is an update by itself: a section of many small ones is updated faster as one."""


class HostGrads(GradStore):
    """The gradients of one shard, in host memory."""

    def __init__(self, memory: GradMemory, layout: SectionLayout, tier: Tier, unit: str, *, sums_up: bool) -> None:
        super().__init__(layout, tier, unit, memory.shard_index, sums_up=sums_up)
        self._memory = memory
        self._store = memory.store
        self._array: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}
        """Views of the open array, by the parameter's index: making one takes longer than writing a small gradient."""
        self._span: Region | None = None
        """Of the ring, under the array."""
        self._arriving: Handoff | None = None
        """The last download into the array: when it is over, all are. The host waits where it reads or writes."""
        self._mean_bytes = layout.nbytes // len(layout.params)

    # From backward

    def add(self, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        grad = grad.contiguous()
        large = grad.nbytes >= LARGE_BYTES or (self._memory.keeps_small and self._mean_bytes >= KEPT_MEAN_BYTES)
        if adds or not large or not self._keeps(grad):
            self._write(index, grad, adds=adds)
            return
        self._adopted[index] = grad.detach().view(-1)
        self.held = True
        if self._sums_up:
            self.measure([index])

    def add_shard(self, new: Gathered) -> None:
        path = self._memory.path
        if path is None:
            self._take(new.parts, new.adds, new.flat)
            return
        if is_wider(new.flat.dtype, self.dtype) and not self.held:
            self.widen()  # nothing moves
        if new.adds or new.flat.dtype != self.dtype:
            self._stage(new)
            return
        if self._sums_up:
            views = {index: new.flat[part] for index, part in new.parts.items()}
            sums, made = path.sums.launch(self.layout.index, self.parts(), views)
            self.sums |= sums
        else:
            made = self._memory.device.mark()
        target = self.open()[new.begin : new.begin + new.flat.numel()]
        self._arriving, self.held = path.downloads.place(target, new.flat, made), True

    def _stage(self, new: Gathered) -> None:
        """By way of staging: the host adds these gradients, converts them or writes them to a drive."""
        path = self._memory.path
        assert path is not None
        land = partial(self._take, new.parts, new.adds)
        path.downloads.stage(self.layout.index, new.flat, self._memory.device.mark(), land)

    def _take(self, parts: Mapping[int, slice], adds: Container[int], flat: torch.Tensor) -> None:
        """Write gradients that lie in one tensor of the host to their places, or add them."""
        for index, part in parts.items():
            self._write(index, flat[part], adds=index in adds)
        self.flush()

    def await_arrival(self) -> None:
        """What a device sends is there."""
        if self._arriving is not None:
            self._arriving.take_on_host()
            self._arriving = None

    def _keeps(self, grad: torch.Tensor) -> bool:
        """True if a gradient may stay as autograd has made it. The ring bounds what there is, and so has all of it."""
        alone = grad.nbytes == grad.untyped_storage().nbytes() and self._store.grad_ring is None
        return alone and grad.dtype == self.dtype

    def _write(self, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Write a gradient to its place, or add it to what a step would make of the one there."""
        if adds or grad.dtype.itemsize > self.dtype.itemsize:
            self.widen()
        factor = self.factors.pop(index, 1.0)
        if adds and factor != 1.0:
            self.view(index).mul_(factor)
        place, threads = self.place(index), kernel_threads()
        if adds:
            assert place.dtype == torch.float32
            found = accumulate_grad(place.data_ptr(), grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads)
        else:
            found = store_grad(
                place.data_ptr(), place.dtype, grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads
            )
        if self._sums_up:
            self.sums[index] = found
        self.held = True

    def measure(self, indices: Iterable[int]) -> None:
        for index in indices:
            view, threads = self.view(index), kernel_threads()
            self.sums[index] = sum_of_squares(view.data_ptr(), view.dtype, view.numel(), num_threads=threads)

    # The array

    def open(self) -> torch.Tensor:
        """The buffer, (shard_numel,) `dtype`, with the gradients it holds; valid until `close`.

        What a device sends to it is there after `await_arrival`.
        """
        if self._array is None and not self.held and self._store.grad_ring is not None:
            self._span = self._store.grad_ring.lease(self.layout.shard_numel * self.dtype.itemsize)
            if self._span is not None:
                self._array = self._span.tensor(self.dtype, self.layout.shard_numel)
        if self._array is None:
            self._array = self._bring()
        return self._array

    def _bring(self) -> torch.Tensor:
        """An array of its own, with the gradients that are held."""
        return self._store.arena.array(self.dtype, self.layout.shard_numel)

    def place(self, index: int) -> torch.Tensor:
        """Where this shard's part of a parameter's gradient is to be written, in the open array; `dtype`."""
        self._adopted.pop(index, None)
        if self.shown and not self.held:
            self.shown = False
            if self._array is not None and self._span is None and _is_kept(self._array, len(self._parts)):
                self._forget_array()  # it stays what it is
        return self.view(index)

    def view(self, index: int) -> torch.Tensor:
        if index in self._adopted:
            return self._adopted[index]
        array = self._array if self._array is not None else self.open()
        if self._arriving is not None:
            self.await_arrival()
        if index not in self._parts:
            begin, end = self.layout.in_shard(self.layout.params[index], self._shard_index)
            self._parts[index] = array[begin:end]
        return self._parts[index]

    def widen(self) -> None:
        """Switch to fp32, keeping the values, which is exact; the open buffer then has all of them."""
        for index, grad in list(self._adopted.items()):
            self.place(index).copy_(grad)
        if self.dtype == torch.float32:
            return
        self.await_arrival()
        narrow = self.open().float() if self.held else None
        self._forget_array()
        self.settle()
        self.dtype, held, self.held = torch.float32, self.held, False
        wide = self.open()
        self.held = held
        if narrow is not None:
            wide.copy_(narrow)

    def _forget_array(self) -> None:
        self.await_arrival()
        self._array = None
        self._parts.clear()
        if self._span is not None and self._store.grad_ring is not None:
            self._store.grad_ring.release(self._span)
        self._span = None

    def leave_ring(self) -> None:
        if self._lent or self._span is None or self._array is None:
            return
        self.await_arrival()
        own = self._kept(self._array) if self.held else None
        self._forget_array()
        self._array = own

    def _kept(self, array: torch.Tensor) -> torch.Tensor | None:
        """Bring gradients that lie in the ring to memory of their own."""
        return self._store.arena.array(self.dtype, self.layout.shard_numel).copy_(array)

    # To the update

    def lend(self, made: Event | None) -> None:
        if self._store.grad_ring is not None and not self.on_disk:
            self.open()  # the ring is not for the update's thread, which may want to see what is between gradients
        super().lend(made)

    def chunks(self, rows: range, staging: int) -> tuple[list[GradSource], Sequence[Arrival]]:
        size, arriving = self.dtype.itemsize, self._arriving
        found = [GradSource(first, last, grad.data_ptr() - first * size) for first, last, grad in self._pieces(rows)]
        return found, [] if arriving is None else [Downloads([arriving])]

    def pieces(self, rows: range) -> list[GradPiece]:
        self.await_arrival()
        return self._pieces(rows)

    def _pieces(self, rows: range) -> list[GradPiece]:
        """The same, on their way maybe."""
        begin, end = self.layout.elements(rows)

        def in_array(first: int, last: int) -> list[GradPiece]:
            """Where there are no elements, no array is made for them."""
            return [GradPiece(first - begin, last - begin, self.open()[first:last])] if first < last else []

        found, at = list[GradPiece](), begin
        for index, grad in sorted(self._adopted.items()):
            piece = self.layout.params[index]
            first, last = max(piece.begin, at), min(piece.end, end)
            if first < last:
                kept = GradPiece(first - begin, last - begin, grad[first - piece.begin : last - piece.begin])
                found += [*in_array(at, first), kept]
                at = last
        return [*found, *in_array(at, end)]


def _is_kept(array: torch.Tensor, num_views: int) -> bool:
    """True if there are views of the array beside our own."""
    storage = array.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > num_views + 2  # with the array and `storage`
