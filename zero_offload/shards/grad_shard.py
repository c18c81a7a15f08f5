"""Where gradients rest between backward and update: a shard's, or a whole section's that no rank has reduced yet.

Owns one buffer per trainable section: (shard_numel,) in the compute dtype while a step has one micro-batch on
one rank, fp32 from the first accumulation on (compute dtype -> fp32 is exact, so the switch changes no bit).
On the NVMe tier it is `GradPages`', whose pages are attached only while backward writes it, and until they are on the
drive. The calls: `open`, writes to the array, `leave`, later `settle` (or both, `close`); `lend` to an update, which
takes `open_chunks`, then calls `release`; or `drop`. `held` is cleared by whoever consumed the gradients. A large
gradient that autograd has computed in host memory is not copied: `adopt` keeps its tensor, `stream` writes it out. In
the memory of a GPU gradients rest in a `DeviceGradShard`. Where the update runs inside of backward, the buffer is
leased from the `GradRing` of the store, whatever the tier, as far as nothing is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from zero_offload.device import Event, Handoff
from zero_offload.memory.arena import Region
from zero_offload.plan.layout import SectionLayout
from zero_offload.shards.grad_pages import AttachBuffer, GradPages
from zero_offload.shards.store import ShardStore
from zero_offload.types import Tier


class Arrival(Protocol):
    """Gradients on their way to host memory."""

    def wait(self) -> None:
        """Return when they are there."""


@dataclass(frozen=True)
class Downloads:
    """Gradients that a device sends to the host's memory."""

    handoffs: Sequence[Handoff]

    def wait(self) -> None:
        for handoff in self.handoffs:
            handoff.take_on_host()


class GradSource(NamedTuple):
    """Elements [begin, end) of opened chunks have their gradients at `address`, which is that of element 0 of them."""

    begin: int
    end: int
    address: int


class GradPiece(NamedTuple):
    """The gradients of elements [begin, end) of a chunk, or of several, (end - begin,)."""

    begin: int
    end: int
    grad: torch.Tensor


class GradShard:
    """The gradients of one shard; `held` says whether a step's gradients are inside."""

    on_device = False
    """Whether they are in the compute device's own memory."""

    def __init__(
        self, store: ShardStore, layout: SectionLayout, tier: Tier, attach: AttachBuffer, shard_index: int = 0
    ) -> None:
        """`layout` says how long the array is: a section cut into one shard has it whole."""
        self._shard_index = shard_index
        self._store = store
        self.layout = layout
        self.tier = tier
        self._pages = GradPages(store, layout, attach) if tier is Tier.NVME else None
        self._array: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}
        """Views of the open array, by the parameter's index: making one takes longer than writing a small gradient."""
        self._span: Region | None = None
        """Of the ring, under the array."""
        self._adopted: dict[int, torch.Tensor] = {}
        """By the parameter's index: (numel,) `dtype`, instead of its part of the array."""
        self.shown = False
        """Whether the user has seen gradients that are over, and may have kept them."""
        self.dtype = layout.dtype
        self.held = False
        self._lent = False
        self._made: Event | None = None
        self._arriving: Handoff | None = None
        """The last download into the array: when it is over, all are. The host waits where it reads or writes."""

    @property
    def on_disk(self) -> bool:
        return self._array is None and self.tier is Tier.NVME

    @property
    def comes_by_staging(self) -> bool:
        """Whether `open_chunks` may have to bring gradients to staging memory."""
        return self.tier is Tier.NVME

    @property
    def device_bytes(self) -> int:
        """What they take of the compute device's own memory."""
        return 0

    def open(self) -> torch.Tensor:
        """The buffer, (shard_numel,) `dtype`, host, with the gradients it holds; valid until `close`.

        What a device sends to it is there after `await_arrival`.
        """
        if self._array is None and not self.held and self._store.grad_ring is not None:
            self._span = self._store.grad_ring.lease(self.layout.shard_numel * self.dtype.itemsize)
            if self._span is not None:
                self._array = self._span.tensor(self.dtype, self.layout.shard_numel)
        if self._array is None and self._pages is not None:
            self._array = self._pages.bring(self.dtype, held=self.held)
        elif self._array is None:
            self._array = self._store.arena.array(self.dtype, self.layout.shard_numel)
        return self._array

    def arrives(self, handoff: Handoff) -> None:
        """A device sends gradients to a part of the open array."""
        self._arriving, self.held = handoff, True

    def await_arrival(self) -> None:
        """What a device sends is there."""
        if self._arriving is not None:
            self._arriving.take_on_host()
            self._arriving = None

    def adopt(self, index: int, grad: torch.Tensor) -> None:
        """Keep a parameter's gradient where it is; (numel,) `dtype`, host, nobody else's."""
        self._adopted[index] = grad

    def place(self, index: int) -> torch.Tensor:
        """Where this shard's part of a parameter's gradient is to be written, in the open array; `dtype`."""
        self._adopted.pop(index, None)
        if self.shown and not self.held:
            self.shown = False
            if self._array is not None and self._span is None and _is_kept(self._array, len(self._parts)):
                self._forget_array()  # it stays what it is
        return self.view(index)

    def view(self, index: int) -> torch.Tensor:
        """This shard's part of a parameter's gradient (one shard: all of it) where it is; `dtype`, maybe empty."""
        if index in self._adopted:
            return self._adopted[index]
        array = self.open()
        self.await_arrival()
        if index not in self._parts:
            begin, end = self.layout.in_shard(self.layout.params[index], self._shard_index)
            self._parts[index] = array[begin:end]
        return self._parts[index]

    def _forget_array(self) -> None:
        self.await_arrival()
        self._array = None
        self._parts.clear()
        if self._span is not None and self._store.grad_ring is not None:
            self._store.grad_ring.release(self._span)
        self._span = None

    def leave_ring(self) -> None:
        """Give back what was leased, unless an update reads it; gradients that are still held move to memory of their
        own. The ring asks again for what an update has used."""
        if self._lent or self._span is None or self._array is None:
            return
        self.await_arrival()
        own = None
        if self.held and self._pages is not None:
            self._pages.write(self._array)
        elif self.held:
            own = self._store.arena.array(self.dtype, self.layout.shard_numel).copy_(self._array)
        self._forget_array()
        self._array = own

    def lend(self, made: Event | None) -> None:
        """An update is launched that takes gradients. On a GPU they are valid at the mark `made`."""
        if self._store.grad_ring is not None and not self.on_device and not self.on_disk:
            self.open()  # the ring is not for the update's thread, which may want to see what is between gradients
        self._made, self._lent = made, True

    def release(self) -> None:
        """The update has used them: what is kept here goes, unless some are still held."""
        self._lent = False
        self.drop()

    def drop(self) -> None:
        """What nobody holds goes; what an update takes, when it calls `release`."""
        # In this order it goes whichever thread comes last: the one that stops holding, or the one that releases.
        if not self.held and not self._lent:
            self._adopted.clear()

    def stream(self, grad: torch.Tensor) -> bool:
        """Write `grad`, (numel,) on the host, where the section has no other and it rests on a drive as it is; says
        whether it did. No copy is made of all of it; all but its end is written then."""
        alone = len(self.layout.params) == 1 and self._array is None and self._store.grad_ring is None
        if self._pages is None or not alone or grad.dtype != self.dtype:
            return False
        self._pages.stream(grad)
        return True

    def leave(self) -> None:
        """Bring the buffer to rest: on NVMe its write is launched."""
        if self._pages is not None and self._array is not None and self._span is None:
            self._pages.leave(self._array)
            self._forget_array()

    def settle(self) -> None:
        """What leaves is on its drive, and its pages go back."""
        if self._pages is not None and self._array is None:
            self._pages.settle()

    def close(self, *, changed: bool = True) -> None:
        """Bring the buffer to rest and its pages back; on NVMe it is written only if it has `changed`."""
        if changed:
            self.leave()
        elif self._pages is not None and self._span is None:
            self._forget_array()
        self.settle()

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

    def open_chunks(self, rows: range, staging: int) -> tuple[list[GradSource], Sequence[Arrival]]:
        """Where the update finds the gradients of neighbouring chunks, and what to wait for before using them; one
        chunk where they are not in the host's memory."""
        if self._pages is not None and self.on_disk:
            begin, end = self.layout.elements(rows)
            return [GradSource(0, end - begin, staging)], [self._pages.read(self.dtype, rows, staging)]
        size, arriving = self.dtype.itemsize, self._arriving
        found = [GradSource(first, last, grad.data_ptr() - first * size) for first, last, grad in self._pieces(rows)]
        return found, [] if arriving is None else [Downloads([arriving])]

    def pieces(self, rows: range) -> list[GradPiece]:
        """The gradients of neighbouring chunks where they are in memory, in order, none of them twice."""
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
    """Whether there are views of the array beside our own."""
    storage = array.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > num_views + 2  # with the array and `storage`
