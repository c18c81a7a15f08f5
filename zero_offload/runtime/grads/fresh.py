"""Gradients as backward has made them on a GPU: held until their section is complete, and leaves in few copies."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from zero_offload.hardware.device import Device
from zero_offload.storage.shards.device_sums import neighbours
from zero_offload.storage.shards.grad_memory import DevicePath
from zero_offload.storage.shards.grad_store import Gathered, GradStore


class Fresh(NamedTuple):
    """A gradient that backward has made on a GPU, and that has not left with its section."""

    grad: torch.Tensor
    stream: Any
    """The one on which it is valid."""
    adds: bool = False
    """True if it adds to what the step holds."""
    is_sum: bool = False
    """True if it is a sum in fp32, in memory of its own."""


class FreshGrads:
    """The way of one section's gradients from a GPU's backward to their store, which takes them together.

    A parameter that gets a second gradient before its section leaves has their sum, in fp32.
    """

    def __init__(self, store: GradStore, device: Device, path: DevicePath) -> None:
        self._store = store
        self._device = device
        self._path = path
        self._fresh: dict[int, Fresh] = {}

    def add(self, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Hold a parameter's gradient: it `adds` to the one at rest, or is the first."""
        stream, before = self._device.stream(), self._fresh.get(index)
        if before is not None and before.adds:
            self._leave()  # its store adds one gradient after the other
            before = None
        if before is None:
            self._fresh[index] = Fresh(grad, stream, adds)
            return
        use(self._device, [before])
        wide = before.grad.to(torch.float32, copy=not before.is_sum).add_(grad)
        self._fresh[index] = Fresh(wide, stream, is_sum=True)

    def flush(self) -> None:
        """The section is complete: what has arrived goes to rest."""
        self._leave()
        self._path.downloads.advance()

    def land(self) -> None:
        """Return when all that has arrived is where it rests."""
        self._leave()
        self._path.downloads.land(self._store.layout.index)

    def cancel(self) -> None:
        """What has arrived is not wanted."""
        self._fresh.clear()

    def _leave(self) -> None:
        fresh, self._fresh = self._fresh, {}
        for indices in neighbours(fresh):
            self._store.add_shard(self._gathered({index: fresh.pop(index) for index in indices}))

    def _gathered(self, fresh: Mapping[int, Fresh]) -> Gathered:
        """Gradients of neighbours, in the widest of their dtypes and the section's."""
        use(self._device, fresh.values())
        store, layout = self._store, self._store.layout
        dtypes = (store.dtype if store.on_device else layout.dtype, *(each.grad.dtype for each in fresh.values()))
        dtype = functools.reduce(torch.promote_types, dtypes)
        pieces = {index: layout.params[index] for index in fresh}
        origin = next(iter(pieces.values())).begin
        parts = {index: slice(piece.begin - origin, piece.end - origin) for index, piece in pieces.items()}
        numel = max(part.stop for part in parts.values())
        adds = frozenset(index for index, each in fresh.items() if each.adds)
        if not store.on_device:
            self._path.downloads.make_room(numel * dtype.itemsize)
        first, *more = fresh.values()
        if more:
            flat = side_by_side({index: each.grad for index, each in fresh.items()}, parts, numel).to(dtype)
        elif store.on_device and not adds:
            flat = own(first.grad, dtype)
        else:
            flat = first.grad.reshape(-1).to(dtype)
        return Gathered(flat, origin, parts, adds)


def use(device: Device, fresh: Iterable[Fresh]) -> None:
    """This thread's stream computes with these."""
    here = device.stream()
    for each in fresh:
        if each.stream != here:
            device.join([each.stream])
            device.use_here(each.grad)


def side_by_side(grads: Mapping[int, torch.Tensor], parts: Mapping[int, slice], numel: int) -> torch.Tensor:
    """One tensor, (numel,), in the widest of the gradients' dtypes: each lies at its part, with zeros between them.

    `parts` are in order. This is one launch, and one for the zeros: on a GPU a copy of each gradient by itself would
    cost the host more than the bytes cost the device.
    """
    found, gaps, at = list[torch.Tensor | int](), [0], 0
    for index, part in [*parts.items(), (-1, slice(numel, numel))]:
        if at < part.start:
            gaps.append(part.start - at)
            found.append(gaps[-1])
        if index >= 0:
            found.append(grads[index].reshape(-1))
        at = part.stop
    narrowest = min(grads.values(), key=lambda grad: grad.dtype.itemsize)
    zeros = narrowest.new_zeros(max(gaps)) if max(gaps) else narrowest
    return torch.cat([zeros[:each] if isinstance(each, int) else each for each in found])


def own(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient that autograd has made, (numel,) `dtype`: itself if nothing else is in its memory, else a copy."""
    alone = grad.nbytes == grad.untyped_storage().nbytes() and not _is_shared(grad)
    return grad.detach().reshape(-1).to(dtype, copy=not alone)


def _is_shared(grad: torch.Tensor) -> bool:
    """True if another tensor is in its memory."""
    storage = grad.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # the gradient and `storage`
