"""Gradients on their way from a GPU to the host: downloads beside backward, straight to where they rest, or into pinned
staging where the host has something to do with them.

The calls: `place` or `stage` for each gradient of a section, `seal` when the section is complete, `land` where it is
wanted now, `drain` at the end of backward. Of what is placed the GPU makes the sums, which are entered in the section
when they are there. What is staged and complete is handed to `land`, gradient by gradient in the order in which they
were staged. Then `rest` ends the section. There is room for the `STAGED_SECTIONS` largest sections, as the plan counts
them, and for a larger gradient when one comes: one rank's own of a section that ranks have cut (`no_sync`), or one that
`Tensor.grad_dtype` makes wider than its parameter. What is placed has room for sums only, a few of them, 8 bytes per
16384 elements, which no plan counts: so gradients that wait for their download do not fill up a GPU's memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from zero_offload.device import Device, Handoff
from zero_offload.host import host_empty
from zero_offload.kernels.device_grads import CHUNK, launch_sum, total
from zero_offload.memory.arena import Arena, Region
from zero_offload.memory.pool import SpanPool
from zero_offload.plan.layout import ALIGN_NUMEL
from zero_offload.plan.memory import STAGED_SECTIONS
from zero_offload.runtime.grads.ledger import SectionGrads
from zero_offload.types import whole_sectors

Land = Callable[[SectionGrads, int, torch.Tensor, bool], None]
"""land(grads, index, gradient on the host, adds)."""


class Room(NamedTuple):
    """What a section may take."""

    nbytes: int
    """Of gradients that are staged."""
    num_sums: int
    """Of chunks of gradients that are placed."""

    @property
    def sum_bytes(self) -> int:
        """As leases are rounded."""
        return whole_sectors(self.num_sums * torch.float64.itemsize)


class _Placed(NamedTuple):
    """A gradient, or several side by side, under way to where they rest."""

    there: Handoff
    sums: Handoff | None
    """Of chunks, (chunks,) fp64."""
    num_chunks: Mapping[int, int]
    """Of each gradient, by the parameter's index."""

    def land(self, grads: SectionGrads) -> None:
        self.there.take_on_host()
        chunks = host_empty(0, torch.float64) if self.sums is None else self.sums.take_on_host()
        for index, part in zip(self.num_chunks, chunks.split(list(self.num_chunks.values())), strict=True):
            grads.sums[index] = total(part)


@dataclass
class _Batch:
    """The gradients of one section that are under way."""

    grads: SectionGrads
    region: Region | None = None
    """Of those that are staged."""
    used_bytes: int = 0
    sums: Region | None = None
    """Of those that are placed."""
    used_sum_bytes: int = 0
    placed: list[_Placed] = field(default_factory=list)
    staged: list[tuple[int, bool, Handoff]] = field(default_factory=list)

    def handoffs(self) -> Iterator[Handoff]:
        for placed in self.placed:
            yield placed.there
            if placed.sums is not None:
                yield placed.sums
        for _, _, handoff in self.staged:
            yield handoff


class GradStaging:
    """Idle on a CPU, where gradients are on the host already."""

    def __init__(
        self,
        device: Device,
        arena: Arena,
        room: Mapping[int, Room],
        land: Land,
        rest: Callable[[SectionGrads], None],
    ) -> None:
        """`room` by the section's index."""
        self._device = device
        self._arena = arena
        self._room = room
        self._pool = SpanPool(arena, _largest([each.nbytes for each in room.values()]))
        self._sums = SpanPool(arena, _largest([each.sum_bytes for each in room.values()]))
        # Weak: whoever lands the gradients holds this object, and a cycle would outlive a dropped model.
        self._land = weakref.WeakMethod(land)
        self._rest = weakref.WeakMethod(rest)
        self._filling: dict[int, _Batch] = {}
        self._sealed: deque[_Batch] = deque()

    def place(
        self, grads: SectionGrads, target: torch.Tensor, source: torch.Tensor, parts: Mapping[int, slice]
    ) -> None:
        """Launch the download of `source`, (numel,) on the device, to where it rests: `target`, alike.

        `parts` of it are gradients whose sums are wanted, by the parameter's index.
        """
        sums = [launch_sum(source[part]) for part in parts.values()]
        num_chunks = {index: len(each) for index, each in zip(parts, sums, strict=True)}
        nbytes = sum(num_chunks.values()) * torch.float64.itemsize
        batch = self._filling.get(id(grads))
        if batch is None or batch.sums is None or batch.used_sum_bytes + nbytes > batch.sums.nbytes:
            if batch is not None and batch.sums is not None:
                self.seal(grads)
            sums_region = self._lease(self._sums, self._room[grads.layout.index].sum_bytes)
            batch = self._batch(grads)
            batch.sums = sums_region
        there, down = self._device.download(target, source), None
        if nbytes:
            slot = batch.sums.tensor(torch.float64, sum(num_chunks.values()), batch.used_sum_bytes)
            down = self._device.download(slot, sums[0] if len(sums) == 1 else torch.cat(sums))
            batch.used_sum_bytes += nbytes
        batch.placed.append(_Placed(there, down, num_chunks))

    def stage(self, grads: SectionGrads, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Launch the download of `grad`, (numel,) on the device; `adds` to what the step holds already."""
        # Spaced as in the section, so that every gradient starts where any dtype may, and they take what it takes.
        nbytes = -(-grad.numel() // ALIGN_NUMEL) * ALIGN_NUMEL * grad.itemsize
        batch = self._filling.get(id(grads))
        if batch is None or batch.region is None or batch.used_bytes + nbytes > batch.region.nbytes:
            if batch is not None and batch.region is not None:
                self.seal(grads)
            region = self._lease_staging(max(self._room[grads.layout.index].nbytes, nbytes))
            batch = self._batch(grads)
            batch.region = region
        target = batch.region.tensor(grad.dtype, grad.numel(), batch.used_bytes)
        batch.used_bytes += nbytes
        batch.staged.append((index, adds, self._device.download(target, grad)))

    def seal(self, grads: SectionGrads) -> None:
        """The section is complete; land what has arrived."""
        batch = self._filling.pop(id(grads), None)
        if batch is not None:
            self._sealed.append(batch)
        while self._sealed and all(handoff.ready.done() for handoff in self._sealed[0].handoffs()):
            self._finish(self._sealed.popleft())

    def land(self, grads: SectionGrads) -> None:
        """Wait for what is under way of this section, and for what was sealed before."""
        self.seal(grads)
        while any(batch.grads is grads for batch in self._sealed):
            self._finish(self._sealed.popleft())

    def drain(self) -> None:
        """Wait for everything."""
        for batch in list(self._filling.values()):
            self.seal(batch.grads)
        while self._sealed:
            self._finish(self._sealed.popleft())

    def await_placed(self, grads: SectionGrads) -> None:
        """What is placed of this section is there: its gradients may be moved to wider memory."""
        for batch in (*self._sealed, *self._filling.values()):
            for placed in batch.placed if batch.grads is grads else ():
                placed.there.take_on_host()

    def _batch(self, grads: SectionGrads) -> _Batch:
        """The one being filled. What makes room may have sealed the one before."""
        return self._filling.setdefault(id(grads), _Batch(grads))

    def _lease_staging(self, nbytes: int) -> Region:
        if nbytes > self._pool.nbytes:
            self.drain()
            self._pool = SpanPool(self._arena, nbytes)
        return self._lease(self._pool, nbytes)

    def _lease(self, pool: SpanPool, nbytes: int) -> Region:
        while not pool.fits(nbytes):
            if self._sealed:
                self._finish(self._sealed.popleft())
            else:
                self.seal(next(iter(self._filling.values())).grads)
        return pool.lease(nbytes)

    def _finish(self, batch: _Batch) -> None:
        land, rest = self._land(), self._rest()
        assert land is not None and rest is not None
        for placed in batch.placed:
            placed.land(batch.grads)
        if batch.staged:
            self.await_placed(batch.grads)
        for index, adds, handoff in batch.staged:
            land(batch.grads, index, handoff.take_on_host(), adds)
        rest(batch.grads)
        if batch.region is not None:
            self._pool.release(batch.region)
        if batch.sums is not None:
            self._sums.release(batch.sums)


def num_sums(numel: int, num_params: int) -> int:
    """The most chunks that so many gradients of so many elements have."""
    return numel // CHUNK + num_params


def _largest(sizes: Sequence[int]) -> int:
    """What the sections that may be under way at once take."""
    return sum(sorted(sizes)[-STAGED_SECTIONS:])
