"""Gradients to where they rest on this rank: stored, or added in fp32, with their sums in the same pass.

Owns the way there in the host's memory, which is all of it where the CPU computes; `DeviceGradKeeper` brings them down
from a GPU. A large gradient is kept as autograd made it, others are copied to their places; where nothing leaves memory
most are kept, and what they leave in the heap serves the next forward. Knows no other rank. The calls: `keep` for each
of autograd's gradients, or `keep_reduced` for a section's sum over ranks; `end` when a section is complete;
`end_backward`; `land` where a section is wanted; `settle` when the next forward begins; or `drop`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from zero_offload.device import Device
from zero_offload.kernels.grads import GradSum, accumulate_grad, store_grad, sum_of_squares
from zero_offload.probe import kernel_threads
from zero_offload.runtime.grads.drives import GradsToDrives
from zero_offload.runtime.grads.sections import SectionGrads
from zero_offload.runtime.units.unit import Section
from zero_offload.shards.grad_shard import GradShard
from zero_offload.shards.store import ShardStore
from zero_offload.telemetry.spans import Cause
from zero_offload.types import KIB, MIB, Tier

LARGE_BYTES = 32 * MIB
"""From this size on malloc gives a tensor pages of its own: keeping a gradient is then cheaper than a copy, and leaves
no hole in the heap when it goes."""

KEPT_MEAN_BYTES = 256 * KIB
"""Each gradient that is kept is an update by itself: a section of many small ones is updated faster as one."""


class GradKeeper:
    """Brings gradients that are made in the host's memory to rest."""

    def __init__(self, store: ShardStore, shard_index: int) -> None:
        self._shard_index = shard_index
        self._passes = store.grad_ring is not None
        self.keeps_small = False
        """Where nothing of the model leaves memory: gradients may leave holes in the heap, for the next forward."""
        self._counters = store.counters
        self._drives = GradsToDrives(store.counters)

    def grow(self) -> None:
        """The list of units has become longer."""

    def keep(self, grads: SectionGrads, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Bring one gradient of autograd's to rest on this rank: `adds` to the one there, or is the first."""
        grad, shard = plain(grad).contiguous(), grads.local or grads.shard
        large = grad.nbytes >= LARGE_BYTES or (self.keeps_small and _mean_bytes(grads) >= KEPT_MEAN_BYTES)
        alone = large and grad.nbytes == grad.untyped_storage().nbytes()
        alone = alone and not self._passes  # the ring bounds what there is, and so has all of it
        if adds or not alone or shard.tier is Tier.NVME or grad.dtype != shard.dtype:
            self._store(grads, shard, index, grad, adds=adds)
            return
        shard.adopt(index, grad.detach().view(-1))
        shard.held = True
        if shard is grads.shard:
            self.measure(grads, [index])

    def begin_waiting(self, grads: SectionGrads) -> None:
        """Sums of this rank alone are about to be kept, if it has any: all ranks have the pages of wide ones."""
        if grads.local is not None and grads.local.tier is Tier.NVME:
            self._drives.open(grads)
            grads.local.widen()
            grads.local.open()

    def keep_reduced(self, grads: SectionGrads, shard: torch.Tensor) -> None:
        """Bring a section's sum over ranks to rest: `shard`, (shard_numel,) fp32 on the device, this rank's part."""
        for index, part in self._reduced_parts(grads).items():
            self._store(grads, grads.shard, index, shard[part], adds=index in grads.reduced)
            grads.reduced.add(index)
        self.end(grads)

    def end(self, grads: SectionGrads) -> None:
        """All of a section has been kept."""
        self._drives.leave(grads)

    def end_backward(self) -> None:
        """No more gradients come, of sections that are not complete either."""

    def land(self, grads: SectionGrads) -> None:
        """Return when what was kept of this section is where it rests."""

    def measure(self, grads: SectionGrads, indices: Iterable[int]) -> None:
        """Sum up gradients where they rest."""
        for index in indices:
            view, threads = grads.shard.view(index), kernel_threads()
            grads.set_sum(index, sum_of_squares(view.data_ptr(), view.dtype, view.numel(), num_threads=threads))

    def read_sums(self, sections: Sequence[SectionGrads]) -> None:
        """Fill `sums` of these with what a GPU has summed up."""

    def drop(self) -> None:
        """What has been kept is not wanted."""
        self._drives.drop()

    def close(self) -> None:
        """Nothing is on its way when this returns: memory that copies use may go."""

    def settle(self) -> bool:
        """Pages of gradients that leave for drives are there for others; says whether there were any."""
        return self._drives.settle()

    def _reduced_parts(self, grads: SectionGrads) -> dict[int, slice]:
        """This rank's part of each parameter, in its shard."""
        pieces = enumerate(grads.layout.params)
        return {index: slice(*grads.layout.in_shard(piece, self._shard_index)) for index, piece in pieces}

    def _store(self, grads: SectionGrads, shard: GradShard, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Write one gradient, in the host's memory, to its place in one of the section's shards, or add it to what a
        step would make of the one there."""
        self._drives.open(grads)
        if adds or is_wider(grad.dtype, shard.dtype):
            shard.widen()
        factor = grads.factors.pop(index, 1.0) if shard is grads.shard else 1.0
        if adds and factor != 1.0:
            shard.view(index).mul_(factor)
        if shard is not grads.shard:
            _write(adds, shard.place(index), grad)
        elif not adds and grad.nbytes >= LARGE_BYTES and self._streamed(grads, grad.reshape(-1)):
            threads = kernel_threads()
            grads.set_sum(index, sum_of_squares(grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads))
        else:
            grads.set_sum(index, _write(adds, shard.place(index), grad))
        shard.held = True

    def _streamed(self, grads: SectionGrads, grad: torch.Tensor) -> bool:
        """Whether a gradient is on its drive now, but for its end."""
        with self._counters.waiting(Cause.GRADS, grads.unit.name):
            return grads.shard.stream(grad)


def rests_on(device: Device, section: Section) -> bool:
    """Whether a section's gradients rest in the device's own memory."""
    return section.shard.placement.grads is Tier.DEVICE and not device.is_host


def plain(grad: torch.Tensor) -> torch.Tensor:
    """A gradient as its values lie in memory, part of no graph."""
    grad = grad.resolve_neg()  # a kernel sees memory, which has the other sign there
    return grad.detach() if grad.requires_grad else grad  # create_graph=True


def is_wider(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Of a sum, or of what hooks or `Tensor.grad_dtype` have made: the section has to follow, to lose nothing."""
    return dtype.itemsize > than.itemsize


def _mean_bytes(grads: SectionGrads) -> int:
    """Of a section's gradients."""
    return grads.layout.nbytes // len(grads.layout.params)


def _write(adds: bool, place: torch.Tensor, grad: torch.Tensor) -> GradSum:
    """Store `grad` at `place`, or add it to the fp32 values there; the sums are of what stands there then."""
    threads = kernel_threads()
    if adds:
        assert place.dtype == torch.float32
        return accumulate_grad(place.data_ptr(), grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads)
    return store_grad(place.data_ptr(), place.dtype, grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads)
