"""What goes over ranks: a section's gradients whole, on the compute device.

In host memory large ones have pages only while they are filled and reduced, as many at once as the plan counts. They
keep the dtype in which backward makes them, and are added up in fp32 all the same. What is a sum already is fp32, and
so is everything on a GPU, whose collectives add in the dtype they are given. The calls: `make` when a section's first
gradient arrives, after `has_room`; `put` for each; `fill` when no more come; `drop` when the sum is at rest.
"""

from __future__ import annotations

from typing import Any

import torch

from zero_offload.device import Device
from zero_offload.memory.arena import Arena, MovableBuffer
from zero_offload.plan.memory import GRADS_IN_FLIGHT
from zero_offload.runtime.grads.reductions import is_small
from zero_offload.runtime.grads.sections import SectionGrads
from zero_offload.shards.grad_pages import AttachBuffer


class Partials:
    """`SectionGrads.partial` comes and goes here."""

    def __init__(self, device: Device, arena: Arena, attach: AttachBuffer) -> None:
        self._device = device
        self._arena = arena
        self._attach = attach
        self.attached: list[SectionGrads] = []
        """Sections whose sum has pages, in the order in which they got them."""
        self._streams: dict[int, tuple[Any, Any]] = {}
        """On a GPU, by `id` of a section with a sum: whose memory that is, and the stream that used it last."""

    def has_room(self, grads: SectionGrads) -> bool:
        """Whether one more may be made for this section, or another must be dropped first."""
        return not self._moves(grads) or len(self.attached) < GRADS_IN_FLIGHT

    def make(self, grads: SectionGrads) -> torch.Tensor:
        """(numel,), of any values. Raises CapacityError."""
        numel, dtype = grads.layout.numel, grads.layout.dtype if self._device.is_host else torch.float32
        if self._moves(grads):
            grads.pages = grads.pages or MovableBuffer(self._arena, numel * 4, claims=True)
            self._attach(grads.pages)
            self.attached.append(grads)
            grads.partial = grads.pages.region.tensor(dtype, numel)
        else:
            grads.partial = torch.empty(numel, dtype=dtype, device=self._device.torch_device)
        if not self._device.is_host:
            self._streams[id(grads)] = (self._device.stream(),) * 2
        return grads.partial

    def here(self, grads: SectionGrads) -> torch.Tensor:
        """The sum, for what is launched from now on: gradients may be made on several streams."""
        assert grads.partial is not None
        if not self._device.is_host:
            home, last = self._streams[id(grads)]
            self._device.join([last])
            self._streams[id(grads)] = home, self._device.stream()
        return grads.partial

    def put(self, grads: SectionGrads, index: int, grad: torch.Tensor) -> None:
        """A parameter's gradient has arrived, or one more of them in the same backward."""
        partial, piece, again = self.here(grads), grads.layout.params[index], index in grads.arrived
        wide = self.widen(grads) if again or grad.dtype != partial.dtype else partial
        place = wide[piece.begin : piece.end]
        place.add_(grad.reshape(-1)) if again else place.copy_(grad.reshape(-1))

    def fill(self, grads: SectionGrads) -> None:
        """What has no gradient takes part as zeros."""
        partial, end = self.here(grads), 0
        for index, piece in enumerate(grads.layout.params):
            if index in grads.arrived:
                partial[end : piece.begin].zero_()
                end = piece.end
        partial[end:].zero_()

    def widen(self, grads: SectionGrads) -> torch.Tensor:
        """Switch to fp32, keeping the values, which is exact."""
        partial = self.here(grads)
        if partial.dtype == torch.float32:
            return partial
        if grads.pages is None:
            grads.partial = partial.float()
        else:
            narrow = partial.clone()  # both begin at the same page
            grads.partial = grads.pages.region.tensor(torch.float32, grads.layout.numel).copy_(narrow)
        return grads.partial

    def drop(self, grads: SectionGrads) -> None:
        """The sum is of no use any more, if there is one."""
        grads.partial = None
        if (streams := self._streams.pop(id(grads), None)) is not None:
            home, last = streams
            self._device.join([last, self._device.stream()], into=home)
        if grads.pages is not None and grads.pages.attached:
            grads.pages.detach()
            self.attached = [each for each in self.attached if each is not grads]

    def _moves(self, grads: SectionGrads) -> bool:
        return self._device.is_host and not is_small(grads)
