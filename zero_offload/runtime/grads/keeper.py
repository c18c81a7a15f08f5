"""Gradients to where they rest on this rank: stored, or added in fp32, with their sums in the same pass.

Owns the way there. In host memory a large gradient is kept as autograd made it, others are copied to their places;
where nothing leaves memory most are kept, and what they leave in the heap serves the next forward. From a GPU they are
downloaded, straight to their places where the host neither adds nor converts, unless they rest in its memory; those of
micro-batches that take turns are added up there first. Knows no other rank. The calls: `keep` for each of autograd's
gradients, or `keep_reduced` for a section's sum over ranks; `end` when a section is complete; `land` where a section is
wanted now; `drain` at the end of backward; `settle` when the next forward begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_offload.device import Device
from zero_offload.kernels.device_grads import sums_in_few_launches
from zero_offload.kernels.grads import GradSum, accumulate_grad, store_grad, sum_of_squares
from zero_offload.plan.memory import staged_grad_bytes
from zero_offload.plan.partition import Partition
from zero_offload.probe import kernel_threads
from zero_offload.runtime.grads.drives import GradsToDrives
from zero_offload.runtime.grads.ledger import REDUCED, SectionGrads
from zero_offload.runtime.grads.staging import GradStaging, Room, num_sums
from zero_offload.runtime.units.unit import Section, Unit
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
    """Brings gradients to rest."""

    def __init__(
        self, device: Device, store: ShardStore, units: Sequence[Unit], partition: Partition, shard_index: int
    ) -> None:
        self._device = device
        self._shard_index = shard_index
        self._passes = store.grad_ring is not None
        self.keeps_small = False
        """Where nothing of the model leaves memory: gradients may leave holes in the heap, for the next forward."""
        room = {
            section.layout.index: Room(
                staged_grad_bytes(section.layout.numel, section.layout.nbytes, partition),
                num_sums(section.layout.shard_numel, len(section.layout.params)),
            )
            for unit in units
            for section in unit.sections
            if section.layout.trainable and not rests_on(device, section)
        }
        self._counters = store.counters
        self._drives = GradsToDrives(store.counters)
        self._staging = GradStaging(device, store.arena, room, self._land, self._drives.leave)
        self._adding: list[SectionGrads] = []
        """What has had sums in `adding` in this backward."""

    def keep(self, grads: SectionGrads, index: int, grad: torch.Tensor, *, adds: bool, more: bool = False) -> None:
        """Bring one gradient of autograd's to rest on this rank: `adds` to the one there, or is the first.

        With `more` of the same backward's to come, a GPU adds them up before they leave.
        """
        shard = grads.local or grads.shard
        grad = grad.resolve_neg()  # a kernel sees memory, which has the other sign there
        if grad.requires_grad:  # create_graph=True; where it rests it is no part of a graph
            grad = grad.detach()
        if self._device.is_host:
            self._keep_one(grads, index, grad.contiguous(), adds=adds)
        elif shard.on_device:
            dtype = grad.dtype if _is_wider(grad, shard) else shard.dtype
            self._store_one(grads, index, grad.reshape(-1) if adds else _own(grad, dtype), adds=adds)
        elif index in grads.adding:
            grads.adding[index] = grads.adding[index].float().add_(grad.reshape(-1))
            if not more:
                self._send_sum(grads, index)
        elif more and not adds:
            grads.adding[index] = _own(grad, grad.dtype)
            self._adding.append(grads)
        else:
            # A lane reads it later. Gradients in the same memory would be added to in place once ours is let go of.
            self._send(grads, index, (grad.clone() if _is_shared(grad) else grad).reshape(-1), adds=adds)

    def begin_waiting(self, grads: SectionGrads) -> None:
        """Sums of this rank alone are about to be kept, if it has any: all ranks have the pages of wide ones."""
        if self._device.is_host and grads.local is not None and grads.local.tier is Tier.NVME:
            self._drives.open(grads)
            grads.local.widen()
            grads.local.open()

    def keep_reduced(self, grads: SectionGrads, shard: torch.Tensor) -> None:
        """Bring a section's sum over ranks to rest: `shard`, (shard_numel,) fp32 on the device, this rank's part."""
        if self._is_there(grads):
            self._store_reduced(grads, shard)
        elif not grads.reduced and self._goes_straight(grads.shard, shard, widens=True):
            self._place_reduced(grads, shard)
        else:
            self._staging.stage(grads, REDUCED, shard, adds=False)
        self.end(grads)

    def end(self, grads: SectionGrads) -> None:
        """All of a section has been kept."""
        if self._is_there(grads):
            self._drives.leave(grads)
        else:
            self._staging.seal(grads)

    def land(self, grads: SectionGrads) -> None:
        """Wait until what was kept of this section is where it rests."""
        for index in list(grads.adding):
            self._send_sum(grads, index)
        self._staging.land(grads)

    def drain(self) -> None:
        """The same of everything."""
        for grads in self._adding:
            for index in list(grads.adding):
                self._send_sum(grads, index)
        self._adding.clear()
        self._staging.drain()

    def drop(self) -> None:
        """Nobody wants what has been kept."""
        self.drain()
        self._drives.drop()

    def settle(self) -> bool:
        """Pages of gradients that leave for drives are there for others; says whether there were any."""
        return self._drives.settle()

    def _is_there(self, grads: SectionGrads) -> bool:
        """Whether gradients rest in the memory in which they are made."""
        return self._device.is_host or (grads.local or grads.shard).on_device

    def _send_sum(self, grads: SectionGrads, index: int) -> None:
        """A sum is complete."""
        shard = grads.local or grads.shard
        # On a drive it lands in wider memory. Where it is wide already nothing moves, and nobody waits for the device.
        if shard.tier is not Tier.NVME and shard.dtype != torch.float32:
            self._staging.await_placed(grads)
            shard.widen()
        self._send(grads, index, grads.adding.pop(index).float(), adds=False)

    def _send(self, grads: SectionGrads, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Launch the download of a gradient, (numel,) on a GPU, to its place or by way of staging."""
        shard = grads.local or grads.shard
        if adds or not self._goes_straight(shard, grad):
            self._staging.stage(grads, index, grad, adds=adds)
            return
        self._staging.place(grads, shard.place(index), grad, {index: slice(None)} if grads.local is None else {})
        shard.held = True

    @staticmethod
    def _goes_straight(shard: GradShard, grad: torch.Tensor, *, widens: bool = False) -> bool:
        """Whether a gradient on a GPU may be downloaded to its place, which has been made wide if it `widens`."""
        dtype = torch.float32 if widens else shard.dtype
        return shard.tier is not Tier.NVME and grad.dtype == dtype and sums_in_few_launches(grad)

    def _keep_one(self, grads: SectionGrads, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Bring one gradient that autograd has made in host memory to rest: copied, unless it can be kept."""
        shard = grads.local or grads.shard
        large = grad.nbytes >= LARGE_BYTES or (self.keeps_small and _mean_bytes(grads) >= KEPT_MEAN_BYTES)
        alone = large and grad.nbytes == grad.untyped_storage().nbytes()
        alone = alone and not self._passes  # the ring bounds what there is, and so has all of it
        if adds or not alone or shard.tier is Tier.NVME or grad.dtype != shard.dtype:
            self._store_one(grads, index, grad, adds=adds)
            return
        shard.adopt(index, grad.detach().view(-1))
        shard.held = True
        if grads.local is None:
            grads.measure(index)

    def _store_one(self, grads: SectionGrads, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Write one gradient, host or where it rests, to its place there."""
        shard = grads.local or grads.shard
        self._drives.open(grads)
        if adds or _is_wider(grad, shard):
            shard.widen()
        if grads.local is None:
            self._put(grads, index, grad, adds=adds)
        elif shard.on_device:
            _keep_there(adds, shard, index, grad)
        else:
            _write(adds, shard.place(index), grad)
        shard.held = True

    def _put(self, grads: SectionGrads, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Write a shard's part of one gradient, or add it to what a step would make of the one there."""
        shard, factor = grads.shard, grads.factors.pop(index, 1.0)
        if adds and factor != 1.0:
            shard.view(index).mul_(factor)
        if shard.on_device:
            _keep_there(adds, shard, index, grad)
            grads.measure(index)
        elif not adds and grad.nbytes >= LARGE_BYTES and self._streamed(grads, grad.reshape(-1)):
            grads.sums[index] = sum_of_squares(grad.data_ptr(), grad.dtype, grad.numel(), num_threads=kernel_threads())
        else:
            grads.sums[index] = _write(adds, shard.place(index), grad)

    def _streamed(self, grads: SectionGrads, grad: torch.Tensor) -> bool:
        """Whether a gradient is on its drive now, but for its end."""
        with self._counters.waiting(Cause.GRADS, grads.unit.name):
            return grads.shard.stream(grad)

    def _store_reduced(self, grads: SectionGrads, reduced: torch.Tensor) -> None:
        self._drives.open(grads)
        grads.shard.widen()
        for index, piece in enumerate(grads.layout.params):
            begin, end = grads.layout.in_shard(piece, self._shard_index)
            self._put(grads, index, reduced[begin:end], adds=index in grads.reduced)
            grads.reduced.add(index)
        grads.shard.held = True

    def _place_reduced(self, grads: SectionGrads, reduced: torch.Tensor) -> None:
        """The first sum over ranks of a step: nothing is added to it on the host."""
        grads.shard.widen()
        ranges = [grads.layout.in_shard(piece, self._shard_index) for piece in grads.layout.params]
        self._staging.place(grads, grads.shard.open(), reduced, {i: slice(*ends) for i, ends in enumerate(ranges)})
        grads.reduced.update(range(len(ranges)))
        grads.shard.held = True

    def _land(self, grads: SectionGrads, index: int, grad: torch.Tensor, adds: bool) -> None:
        """A download is complete: `grad` is in staging."""
        if index == REDUCED:
            self._store_reduced(grads, grad)
        else:
            self._store_one(grads, index, grad, adds=adds)


def rests_on(device: Device, section: Section) -> bool:
    """Whether a section's gradients rest in the device's own memory."""
    return section.shard.placement.grads is Tier.DEVICE and not device.is_host


def _mean_bytes(grads: SectionGrads) -> int:
    """Of a section's gradients."""
    return grads.layout.nbytes // len(grads.layout.params)


def _is_wider(grad: torch.Tensor, shard: GradShard) -> bool:
    """A sum, or what hooks or `Tensor.grad_dtype` have made: the section has to follow, to lose nothing."""
    return grad.dtype.itemsize > shard.dtype.itemsize


def _own(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient that autograd has made, (numel,) `dtype`: itself if nothing else is in its memory, else a copy."""
    alone = grad.nbytes == grad.untyped_storage().nbytes() and not _is_shared(grad)
    return grad.detach().reshape(-1).to(dtype, copy=not alone)


def _is_shared(grad: torch.Tensor) -> bool:
    """Whether another tensor is in its memory."""
    storage = grad.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # the gradient and `storage`


def _keep_there(adds: bool, shard: GradShard, index: int, grad: torch.Tensor) -> None:
    """Keep a gradient in the device's memory, or add it to the fp32 one there; nothing waits for it."""
    if adds:
        assert shard.dtype == torch.float32
        shard.view(index).add_(grad)
    else:
        shard.adopt(index, grad)


def _write(adds: bool, place: torch.Tensor, grad: torch.Tensor) -> GradSum:
    """Store `grad` at `place`, or add it to the fp32 values there; the sums are of what stands there then."""
    threads = kernel_threads()
    if adds:
        assert place.dtype == torch.float32
        return accumulate_grad(place.data_ptr(), grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads)
    return store_grad(place.data_ptr(), place.dtype, grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads)
