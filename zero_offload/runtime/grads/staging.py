"""Gradients on their way from a GPU to the host: downloads into pinned staging, a section at a time.

The calls: `stage` for each gradient of a section, `seal` when the section is complete, `drain` at the end of backward.
Downloads run beside backward; what is complete is handed to `land`, gradient by gradient in the order in which they
were staged, then `rest` ends the section. There is room for the `STAGED_SECTIONS` largest sections, as the plan counts
them, and for a larger gradient when one comes: one rank's own of a section that ranks have cut (`no_sync`), or one that
`Tensor.grad_dtype` makes wider than its parameter.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from zero_offload.device import Device, Handoff
from zero_offload.memory.arena import Arena, Region
from zero_offload.memory.pool import SpanPool
from zero_offload.plan.layout import ALIGN_NUMEL
from zero_offload.plan.memory import STAGED_SECTIONS
from zero_offload.runtime.grads.ledger import SectionGrads

Land = Callable[[SectionGrads, int, torch.Tensor, bool], None]
"""land(grads, index, gradient on the host, adds)."""


@dataclass
class _Batch:
    """The staged gradients of one section."""

    grads: SectionGrads
    region: Region
    used_bytes: int = 0
    downloads: list[tuple[int, bool, Handoff]] = field(default_factory=list)


class GradStaging:
    """Idle on a CPU, where gradients are on the host already."""

    def __init__(
        self,
        device: Device,
        arena: Arena,
        room: Mapping[int, int],
        land: Land,
        rest: Callable[[SectionGrads], None],
    ) -> None:
        """`room` has the bytes of each section that may be staged, by the section's index."""
        self._device = device
        self._arena = arena
        self._room = room
        self._pool = SpanPool(arena, sum(sorted(room.values())[-STAGED_SECTIONS:]))
        # Weak: whoever lands the gradients holds this object, and a cycle would outlive a dropped model.
        self._land = weakref.WeakMethod(land)
        self._rest = weakref.WeakMethod(rest)
        self._filling: dict[int, _Batch] = {}
        self._sealed: deque[_Batch] = deque()

    def stage(self, grads: SectionGrads, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Launch the download of `grad`, (numel,) on the device; `adds` to what the step holds already."""
        # Spaced as in the section, so that every gradient starts where any dtype may, and they take what it takes.
        nbytes = -(-grad.numel() // ALIGN_NUMEL) * ALIGN_NUMEL * grad.itemsize
        batch = self._filling.get(id(grads))
        if batch is None or batch.used_bytes + nbytes > batch.region.nbytes:
            if batch is not None:
                self.seal(grads)
            batch = self._filling[id(grads)] = _Batch(grads, self._lease(max(self._room[grads.layout.index], nbytes)))
        target = batch.region.tensor(grad.dtype, grad.numel(), batch.used_bytes)
        batch.used_bytes += nbytes
        batch.downloads.append((index, adds, self._device.download(target, grad)))

    def seal(self, grads: SectionGrads) -> None:
        """The section is complete; land what has arrived."""
        batch = self._filling.pop(id(grads), None)
        if batch is not None:
            self._sealed.append(batch)
        while self._sealed and all(handoff.ready.done() for _, _, handoff in self._sealed[0].downloads):
            self._finish(self._sealed.popleft())

    def land(self, grads: SectionGrads) -> None:
        """Wait for what was staged of this section, and for what was sealed before."""
        self.seal(grads)
        while any(batch.grads is grads for batch in self._sealed):
            self._finish(self._sealed.popleft())

    def drain(self) -> None:
        """Wait for everything."""
        for batch in list(self._filling.values()):
            self.seal(batch.grads)
        while self._sealed:
            self._finish(self._sealed.popleft())

    def _lease(self, nbytes: int) -> Region:
        if nbytes > self._pool.nbytes:
            self.drain()
            self._pool = SpanPool(self._arena, nbytes)
        while not self._pool.fits(nbytes):
            if not self._sealed:
                self.seal(next(iter(self._filling.values())).grads)
            else:
                self._finish(self._sealed.popleft())
        return self._pool.lease(nbytes)

    def _finish(self, batch: _Batch) -> None:
        land, rest = self._land(), self._rest()
        assert land is not None and rest is not None
        for index, adds, handoff in batch.downloads:
            land(batch.grads, index, handoff.take_on_host(), adds)
        rest(batch.grads)
        self._pool.release(batch.region)
