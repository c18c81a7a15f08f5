"""Memory of the sums that go over ranks: a section's gradients whole, in fp32, on the compute device.

In host memory large ones have pages only while they are filled and reduced, as many at once as the plan counts.
The calls: `make` when a section's first gradient arrives, after `has_room`; `drop` when the sum is at rest.
"""

from __future__ import annotations

import torch

from zero_offload.device import Device
from zero_offload.memory.arena import Arena, MovableBuffer
from zero_offload.plan.memory import GRADS_IN_FLIGHT
from zero_offload.runtime.grads.ledger import SectionGrads
from zero_offload.runtime.grads.reductions import is_small
from zero_offload.shards.grad_shard import AttachBuffer


class Partials:
    """`SectionGrads.partial` comes and goes here."""

    def __init__(self, device: Device, arena: Arena, attach: AttachBuffer) -> None:
        self._device = device
        self._arena = arena
        self._attach = attach
        self._num_attached = 0

    def has_room(self, grads: SectionGrads) -> bool:
        """Whether one more may be made for this section, or another must be dropped first."""
        return not self._moves(grads) or self._num_attached < GRADS_IN_FLIGHT

    def make(self, grads: SectionGrads) -> torch.Tensor:
        """(numel,) fp32, zero at first: what has no gradient takes part as zeros. Raises CapacityError."""
        numel = grads.layout.numel
        if self._moves(grads):
            grads.pages = grads.pages or MovableBuffer(self._arena, numel * 4)
            self._attach(grads.pages)
            self._num_attached += 1
            grads.partial = grads.pages.region.tensor(torch.float32, numel).zero_()
        else:
            grads.partial = torch.zeros(numel, dtype=torch.float32, device=self._device.torch_device)
        return grads.partial

    def drop(self, grads: SectionGrads) -> None:
        """The sum is of no use any more, if there is one."""
        grads.partial = None
        if grads.pages is not None and grads.pages.attached:
            grads.pages.detach()
            self._num_attached -= 1

    def _moves(self, grads: SectionGrads) -> bool:
        return self._device.is_host and not is_small(grads)
