"""What goes over ranks: a section's gradients whole, on the compute device, with zeros where there are none.

`HostPartials` copies each gradient as it comes. Large sections have pages only while they are filled and reduced, as
many at once as the plan counts. A section keeps the dtype in which backward makes it, and is added up in fp32 all the
same; what is a sum already is fp32. `DevicePartials` holds gradients until the section is complete, and copies them
together: launches cost the host more than memory. All is fp32 there, since collectives of a GPU add in the dtype that
they are given. The calls: `open` before a section's first gradient, after `has_room`; `put` for each; `add_local`
for sums of earlier backwards; `fill` when no more come; `drop` when the sum is at rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from zero_offload.base.types import Tier
from zero_offload.hardware.device import Device
from zero_offload.plan.memory import GRADS_IN_FLIGHT
from zero_offload.runtime.grads.fresh import Fresh, side_by_side, use
from zero_offload.runtime.grads.reductions import is_small
from zero_offload.runtime.grads.section import GradSection
from zero_offload.storage.memory.arena import Arena, MovableBuffer
from zero_offload.storage.shards.device_sums import neighbours
from zero_offload.storage.shards.grad_memory import AttachBuffer
from zero_offload.storage.shards.grad_store import GradStore


class Partials(Protocol):
    """`GradSection.partial` comes and goes here."""

    attached: list[GradSection]
    """Sections whose sum has pages, in the order in which they got them."""

    def has_room(self, section: GradSection) -> bool:
        """True if one more may be opened for this section; else another must be dropped first."""

    def open(self, section: GradSection) -> None:
        """Gradients of this section are gathered from now on. Raises CapacityError."""

    def here(self, section: GradSection) -> torch.Tensor:
        """The sum, (numel,), for what is launched from now on: gradients may be made on several streams."""

    def put(self, section: GradSection, index: int, grad: torch.Tensor) -> None:
        """A parameter's gradient has arrived, or one more of them in the same backward."""

    def add_local(self, section: GradSection, local: GradStore) -> None:
        """Add the gradients of `waiting`, which are in `local`."""

    def fill(self, section: GradSection) -> None:
        """No more come: what has no gradient takes part as zeros."""

    def widen(self, section: GradSection) -> torch.Tensor | None:
        """Switch to fp32, keeping the values, which is exact."""

    def is_wide(self, section: GradSection) -> bool:
        """True if the sum has another dtype than the section."""

    def drop(self, section: GradSection) -> None:
        """The sum is of no use any more, if there is one."""


class HostPartials:
    """Sums in host memory."""

    def __init__(self, arena: Arena, attach: AttachBuffer) -> None:
        self._arena = arena
        self._attach = attach
        self.attached: list[GradSection] = []

    def has_room(self, section: GradSection) -> bool:
        return is_small(section) or len(self.attached) < GRADS_IN_FLIGHT

    def open(self, section: GradSection) -> None:
        numel, dtype = section.layout.numel, section.layout.dtype
        if is_small(section):
            section.partial = torch.empty(numel, dtype=dtype, device="cpu")
        else:
            section.pages = section.pages or MovableBuffer(self._arena, numel * 4, claims=True)
            self._attach(section.pages)
            self.attached.append(section)
            section.partial = section.pages.region.tensor(dtype, numel)
        section.is_gathered = True

    def here(self, section: GradSection) -> torch.Tensor:
        assert section.partial is not None
        return section.partial

    def put(self, section: GradSection, index: int, grad: torch.Tensor) -> None:
        partial, piece, again = self.here(section), section.layout.params[index], index in section.arrived
        wide = self.widen(section) if again or grad.dtype != partial.dtype else partial
        place = wide[piece.begin : piece.end]
        place.add_(grad.reshape(-1)) if again else place.copy_(grad.reshape(-1))

    def add_local(self, section: GradSection, local: GradStore) -> None:
        partial = self.widen(section)
        for index in sorted(section.waiting):
            piece = section.layout.params[index]
            place = partial[piece.begin : piece.end]
            place.add_(local.view(index)) if index in section.arrived else place.copy_(local.view(index))

    def fill(self, section: GradSection) -> None:
        partial = self.here(section)
        for begin, end in _holes(section, section.arrived):
            partial[begin:end].zero_()

    def widen(self, section: GradSection) -> torch.Tensor:
        partial = self.here(section)
        if partial.dtype == torch.float32:
            return partial
        if section.pages is None:
            section.partial = partial.float()
        else:
            narrow = partial.clone()  # both begin at the same page
            section.partial = section.pages.region.tensor(torch.float32, section.layout.numel).copy_(narrow)
        return section.partial

    def is_wide(self, section: GradSection) -> bool:
        return self.here(section).dtype != section.layout.dtype

    def drop(self, section: GradSection) -> None:
        section.partial, section.is_gathered = None, False
        if section.pages is not None and section.pages.attached:
            section.pages.detach()
            self.attached = [each for each in self.attached if each is not section]


@dataclass
class _Open:
    """What a section's backward has made so far, on a GPU."""

    fresh: dict[int, Fresh] = field(default_factory=dict)
    """Gradients that are not in the sum yet."""
    summed: set[int] = field(default_factory=set)
    """Parameters with a gradient in the sum; others have zeros there."""
    home: Any = None
    """The stream whose memory the sum is."""
    last: Any = None
    """The stream that used it last."""


class DevicePartials:
    """Sums in the memory of a GPU: made when the section is complete, or when a parameter's second gradient comes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: dict[int, _Open] = {}
        """By `id` of the section."""
        self.attached: list[GradSection] = []

    def has_room(self, section: GradSection) -> bool:
        return True

    def open(self, section: GradSection) -> None:
        self._open[id(section)], section.is_gathered = _Open(), True

    def here(self, section: GradSection) -> torch.Tensor:
        assert section.partial is not None
        open_ = self._open[id(section)]
        self._device.join([open_.last])
        open_.last = self._device.stream()
        return section.partial

    def put(self, section: GradSection, index: int, grad: torch.Tensor) -> None:
        fresh = self._open[id(section)].fresh
        if index in fresh:
            self._sum_up(section)  # one after the other, as in a loop over backwards
        fresh[index] = Fresh(grad, self._device.stream())

    def add_local(self, section: GradSection, local: GradStore) -> None:
        brought = self._brought(section, local)
        if section.partial is not None:
            self._sum_up(section)
            self._merge(section, {index: brought[_place(section, index)] for index in section.waiting})
            return
        if holes := [brought[begin:end] for begin, end in _holes(section, section.waiting)]:
            torch._foreach_zero_(holes)
        self._adopt(section, brought, section.waiting)
        self._sum_up(section)

    def fill(self, section: GradSection) -> None:
        self._sum_up(section)
        if section.partial is None:
            device = self._device.torch_device
            self._adopt(section, torch.zeros(section.layout.numel, dtype=torch.float32, device=device), ())

    def widen(self, section: GradSection) -> None:
        """It is fp32."""

    def is_wide(self, section: GradSection) -> bool:
        return section.layout.dtype != torch.float32

    def drop(self, section: GradSection) -> None:
        open_ = self._open.pop(id(section), None)
        if open_ is not None and section.partial is not None:
            self._device.join([open_.last, self._device.stream()], into=open_.home)
        section.partial, section.is_gathered = None, False

    def _sum_up(self, section: GradSection) -> None:
        """Bring what has arrived since the last call into the sum."""
        fresh = self._open[id(section)].fresh
        if not fresh:
            return
        use(self._device, fresh.values())
        new = {index: each.grad for index, each in fresh.items()}
        fresh.clear()
        if section.partial is not None:
            self._merge(section, new)
            return
        indices = set(new)
        flat = side_by_side(new, {index: _place(section, index) for index in sorted(new)}, section.layout.numel)
        new.clear()  # this memory is there for the wide sum
        self._adopt(section, flat.float(), indices)

    def _merge(self, section: GradSection, new: Mapping[int, torch.Tensor]) -> None:
        """Add these to the sum, or copy them to where it has zeros: one launch for all neighbours of a kind."""
        partial, summed = self.here(section), self._open[id(section)].summed
        for indices in (*neighbours(new.keys() & summed), *neighbours(new.keys() - summed)):
            first, last = _place(section, indices[0]).start, _place(section, indices[-1]).stop
            place, parts = partial[first:last], {index: _place(section, index, first) for index in indices}
            flat = side_by_side({index: new[index] for index in indices}, parts, last - first)
            place.add_(flat) if indices[0] in summed else place.copy_(flat)
        summed |= new.keys()

    def _brought(self, section: GradSection, local: GradStore) -> torch.Tensor:
        """What `local` holds, (numel,) fp32, on the device; between gradients it has any values."""
        flat = torch.empty(section.layout.numel, dtype=local.dtype, device=self._device.torch_device)
        for begin, end, held in local.pieces(range(len(local.layout.chunks()))):
            if local.tier is Tier.NVME or local.on_device:
                flat[begin:end].copy_(held)  # pages that come and go are not pinned: no asynchronous copy
            else:
                self._device.upload(flat[begin:end], held).take()
        return flat.float()

    def _adopt(self, section: GradSection, flat: torch.Tensor, indices: Collection[int]) -> None:
        """`flat`, (numel,) fp32, of this thread's stream, is the sum, and has the gradients of `indices`."""
        open_ = self._open[id(section)]
        section.partial = flat
        open_.home = open_.last = self._device.stream()
        open_.summed.update(indices)


def _place(section: GradSection, index: int, origin: int = 0) -> slice:
    """Of a parameter in the section, counted from element `origin`."""
    piece = section.layout.params[index]
    return slice(piece.begin - origin, piece.end - origin)


def make_partials(device: Device, arena: Arena, attach: AttachBuffer) -> Partials:
    """Of one model."""
    return HostPartials(arena, attach) if device.is_host else DevicePartials(device)


def _holes(section: GradSection, present: Collection[int]) -> Iterator[tuple[int, int]]:
    """Elements [begin, end) of a section that are of none of these parameters."""
    pieces = [section.layout.params[index] for index in sorted(present)]
    begins: Iterable[int] = [0, *(piece.end for piece in pieces)]
    ends: Iterable[int] = [*(piece.begin for piece in pieces), section.layout.numel]
    return ((begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end)
