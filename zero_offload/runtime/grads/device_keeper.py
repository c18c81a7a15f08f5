"""Gradients that a GPU makes: gathered section by section, summed up, and kept there or sent to the host as one.

Owns what has arrived of sections that are not complete. When one is, its gradients are copied into one tensor as they
lie in the shard, and their sums are launched. Where they rest on the GPU that is all. Else one download brings them
down, straight to their places where the host neither adds nor converts. The host waits for nothing in backward, but for
staging that is full. A parameter that gets a second gradient before its section leaves has their sum, in fp32.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch

from zero_offload.device import Device, Event, Handoff
from zero_offload.kernels.device_grads import launch_sums, total
from zero_offload.kernels.grads import GradSum
from zero_offload.kernels.words import CHUNK
from zero_offload.plan.memory import staged_grad_bytes
from zero_offload.plan.partition import Partition
from zero_offload.runtime.grads.downloads import Gathered, GradDownloads
from zero_offload.runtime.grads.fresh import Fresh, neighbours, side_by_side, use
from zero_offload.runtime.grads.keeper import GradKeeper, is_wider, plain, rests_on
from zero_offload.runtime.grads.sections import ComingSum, SectionGrads
from zero_offload.runtime.units.unit import Unit
from zero_offload.shards.grad_shard import GradShard
from zero_offload.shards.store import ShardStore
from zero_offload.telemetry.spans import Cause
from zero_offload.types import Tier


class DeviceGradKeeper(GradKeeper):
    """Brings gradients that are made in a GPU's memory to rest."""

    def __init__(
        self, device: Device, store: ShardStore, units: Iterable[Unit], partition: Partition, shard_index: int
    ) -> None:
        super().__init__(store, shard_index)
        self._device = device
        self._units = units
        self._partition = partition
        self._arena = store.arena
        self._fresh: dict[int, SectionGrads] = {}
        """Sections with gradients that have not left, by `id`."""
        self._downloads = GradDownloads(device, store.arena, self._room(), self._land)
        self._host_sums: dict[int, tuple[torch.Tensor, list[slice]]] = {}
        """Where sums of a section's chunks come down, by the section's index: (chunks,) fp64, and each gradient's."""
        self._num_sums = 0
        """Downloads of them."""
        self._last_sums: Handoff | None = None

    def _room(self) -> list[int]:
        """Bytes of staging that each section takes."""
        return [
            staged_grad_bytes(section.layout.numel, section.layout.nbytes, self._partition)
            for unit in self._units
            for section in unit.sections
            if section.layout.trainable and not rests_on(self._device, section)
        ]

    def grow(self) -> None:
        self._downloads.resize(self._room())

    def keep(self, grads: SectionGrads, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        grad, stream, before = plain(grad), self._device.stream(), grads.fresh.get(index)
        if before is not None and before.adds:
            self._leave(grads)  # what is held gets one after the other
            before = None
        if before is None:
            grads.fresh[index] = Fresh(grad, stream, adds)
            self._fresh[id(grads)] = grads
            return
        use(self._device, [before])
        wide = before.grad.to(torch.float32, copy=not before.is_sum).add_(grad)
        grads.fresh[index] = Fresh(wide, stream, adds=False, is_sum=True)

    def begin_waiting(self, grads: SectionGrads) -> None:
        """Pages come when gradients land."""

    def keep_reduced(self, grads: SectionGrads, shard: torch.Tensor) -> None:
        if not grads.shard.on_device:
            self._downloads.make_room(shard.nbytes)
        reduced = Gathered(shard, 0, self._reduced_parts(grads), frozenset(grads.reduced))
        self._bring(grads, grads.shard, reduced)
        grads.reduced.update(reduced.parts)
        self._downloads.advance()

    def end(self, grads: SectionGrads) -> None:
        self._leave(grads)
        self._downloads.advance()

    def end_backward(self) -> None:
        for grads in list(self._fresh.values()):
            self._leave(grads)

    def land(self, grads: SectionGrads) -> None:
        self._leave(grads)
        self._downloads.land(grads)

    def drop(self) -> None:
        self.close()
        super().drop()

    def close(self) -> None:
        for grads in self._fresh.values():
            grads.fresh.clear()
        self._fresh.clear()
        self._downloads.drop()
        if self._last_sums is not None:
            self._last_sums.take_on_host()
            self._last_sums = None

    def settle(self) -> bool:
        self._downloads.advance()
        return super().settle()

    # From arrival to rest

    def _leave(self, grads: SectionGrads) -> None:
        """What has arrived of a section goes to rest."""
        fresh, grads.fresh = grads.fresh, {}
        self._fresh.pop(id(grads), None)
        for indices in neighbours(fresh):
            shard = grads.local or grads.shard
            gathered = self._gather(grads, shard, {index: fresh.pop(index) for index in indices})
            self._bring(grads, shard, gathered)

    def _gather(self, grads: SectionGrads, shard: GradShard, fresh: Mapping[int, Fresh]) -> Gathered:
        """Gradients of neighbours, in the widest of their dtypes and the section's."""
        use(self._device, fresh.values())
        dtypes = (shard.dtype if shard.on_device else grads.layout.dtype, *(each.grad.dtype for each in fresh.values()))
        dtype = functools.reduce(torch.promote_types, dtypes)
        pieces = {index: grads.layout.params[index] for index in fresh}
        origin = next(iter(pieces.values())).begin
        parts = {index: slice(piece.begin - origin, piece.end - origin) for index, piece in pieces.items()}
        adds = frozenset(index for index, each in fresh.items() if each.adds)
        if not shard.on_device:
            self._downloads.make_room(max(part.stop for part in parts.values()) * dtype.itemsize)
        first, *more = fresh.values()
        if more:
            numel = max(part.stop for part in parts.values())
            flat = side_by_side({index: each.grad for index, each in fresh.items()}, parts, numel).to(dtype)
        elif shard.on_device and not adds:
            flat = own(first.grad, dtype)
        else:
            flat = first.grad.reshape(-1).to(dtype)
        return Gathered(flat, origin, parts, adds)

    def _bring(self, grads: SectionGrads, shard: GradShard, new: Gathered) -> None:
        """Let gradients on the GPU rest in one of the section's shards."""
        sums_up = shard is grads.shard
        if shard.on_device:
            self._keep_there(grads, shard, new)
            if sums_up:
                self._sum_up(grads, {index: shard.view(index) for index in new.parts})
            return
        if is_wider(new.flat.dtype, shard.dtype) and not shard.held and shard.tier is not Tier.NVME:
            shard.widen()  # nothing moves
        if new.adds or shard.tier is Tier.NVME or new.flat.dtype != shard.dtype:
            self._downloads.stage(grads, shard, new, self._device.mark())
            return
        views = {index: new.flat[part] for index, part in new.parts.items()}
        made = self._sum_up(grads, views) if sums_up else self._device.mark()
        self._downloads.place(shard, new, made)

    @staticmethod
    def _keep_there(grads: SectionGrads, shard: GradShard, new: Gathered) -> None:
        """Keep gradients in the GPU's memory, or add them to the fp32 ones there."""
        if new.adds or is_wider(new.flat.dtype, shard.dtype):
            shard.widen()
        for index in new.adds:
            if shard is grads.shard and (factor := grads.factors.pop(index, 1.0)) != 1.0:
                shard.view(index).mul_(factor)
        flat = new.flat.to(shard.dtype)
        if new.adds:
            held, more = zip(*((shard.view(index), flat[new.parts[index]]) for index in new.adds), strict=True)
            torch._foreach_add_(list(held), list(more))
        for index, part in new.parts.items():
            if index not in new.adds:
                shard.adopt(index, flat[part])
        shard.held = True

    def _land(self, grads: SectionGrads, shard: GradShard, staged: Gathered, flat: torch.Tensor) -> None:
        """A download is complete: `flat` is in staging."""
        for index, part in staged.parts.items():
            self._store(grads, shard, index, flat[part], adds=index in staged.adds)
        self._drives.leave(grads)

    # Sums

    def measure(self, grads: SectionGrads, indices: Iterable[int]) -> None:
        if not grads.shard.on_device:
            super().measure(grads, indices)
        elif views := {index: grads.shard.view(index) for index in sorted(indices)}:
            self._sum_up(grads, views)

    def _sum_up(self, grads: SectionGrads, views: Mapping[int, torch.Tensor]) -> Event:
        """Launch the sums of gradients on the GPU, in order, and their download. Returns when they are made."""
        chunks, parts = launch_sums(list(views.values()))
        made, part_of = self._device.mark(), dict(zip(views, parts, strict=True))
        host, places = self._places_of_sums(grads)
        for run in neighbours(views):
            source = chunks[part_of[run[0]].start : part_of[run[-1]].stop]
            if not len(source):  # another rank has all of them
                for index in run:
                    grads.set_sum(index, GradSum(0.0, True))
                continue
            target = host[places[run[0]].start : places[run[-1]].stop]
            arrival, self._num_sums = self._device.download(target, source, after=made), self._num_sums + 1
            self._last_sums = arrival
            for index in run:
                grads.coming[index] = ComingSum(host[places[index]], arrival, self._num_sums)
        return made

    def _places_of_sums(self, grads: SectionGrads) -> tuple[torch.Tensor, list[slice]]:
        key = grads.layout.index
        if key not in self._host_sums:
            parts = self._reduced_parts(grads).values()
            ends = list(itertools.accumulate(-(-(part.stop - part.start) // CHUNK) for part in parts))
            places = [slice(begin, end) for begin, end in itertools.pairwise([0, *ends])]
            self._host_sums[key] = self._arena.array(torch.float64, max(ends[-1], 1)), places
        return self._host_sums[key]

    def read_sums(self, sections: Sequence[SectionGrads]) -> None:
        coming = [(grads, index, each) for grads in sections for index, each in grads.coming.items()]
        if coming:
            last = max((each for _, _, each in coming), key=lambda each: each.number)
            with self._counters.waiting(Cause.GRADS, sections[0].unit.name):
                last.arrival.take_on_host()
        for grads, index, each in coming:
            grads.set_sum(index, total(each.chunks))


def own(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient that autograd has made, (numel,) `dtype`: itself if nothing else is in its memory, else a copy."""
    alone = grad.nbytes == grad.untyped_storage().nbytes() and not _is_shared(grad)
    return grad.detach().reshape(-1).to(dtype, copy=not alone)


def _is_shared(grad: torch.Tensor) -> bool:
    """Whether another tensor is in its memory."""
    storage = grad.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # the gradient and `storage`
