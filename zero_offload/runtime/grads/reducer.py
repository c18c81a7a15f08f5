"""Gradients from backward to their shard: store or add, norm and finiteness in the same pass.

Owns their way. One rank: each gradient is written to its place as autograd delivers it (a large one is kept as it is),
in the compute dtype at first, added in fp32 when a second one arrives. Several ranks: a section's gradients are
gathered in a flat buffer and, when all are there, handed to `Reductions`, whose results come to `_reduced`. From a GPU
they are downloaded first, unless they rest in its memory. What has arrived is in `ledger`. The calls: `arrive` per
parameter, `finish_backward`; then `clip_norm`, `clip_value`; or `drop`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from zero_offload.device import Device
from zero_offload.errors import ZeroOffloadError
from zero_offload.kernels.grads import GradSum, accumulate_grad, store_grad
from zero_offload.plan.layout import SectionLayout
from zero_offload.plan.memory import GRADS_IN_FLIGHT
from zero_offload.runtime.grads.dtensors import local_grad
from zero_offload.runtime.grads.ledger import REDUCED, GradLedger, SectionGrads
from zero_offload.runtime.grads.partials import Partials
from zero_offload.runtime.grads.reductions import Reductions
from zero_offload.runtime.grads.staging import GradStaging
from zero_offload.runtime.ranks.collectives import Collectives
from zero_offload.runtime.residency import Residency
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.shards.device_grad_shard import DeviceGradShard
from zero_offload.shards.grad_shard import GradShard
from zero_offload.shards.store import ShardStore
from zero_offload.shards.update_board import UpdateBoard
from zero_offload.types import MIB, Tier

ADOPT_BYTES = 32 * MIB
"""From this size on malloc gives a tensor pages of its own: keeping a gradient is then cheaper than a copy, and leaves
no hole in the heap when it goes."""


class GradReducer:
    """Takes gradients off autograd's hands."""

    def __init__(
        self,
        units: Sequence[Unit],
        store: ShardStore,
        residency: Residency,
        board: UpdateBoard,
        collectives: Collectives,
        device: Device,
    ) -> None:
        self._device = device
        sections = [section for unit in units for section in unit.sections]
        layouts = [section.layout for section in sections if not _rests_on(device, section)]
        self._staging = GradStaging(device, store.arena, layouts, self._land, self._rest)
        self._partials = Partials(device, store.arena, residency.attach)
        self._reductions = Reductions(collectives, self._reduced)
        self._residency = residency
        self._board = board
        self._collectives = collectives
        self._store = store
        self._spans = store.counters.spans
        self._open: list[SectionGrads] = []
        """With pages, the longest unused first."""
        self.ledger = GradLedger(units, self._new_shard, collectives)
        self.defers = collectives.partition.defers_reduction
        """Whether backward only adds up on this rank; what it leaves is reduced by `reduce_waiting`."""
        self._deferred = False

    def _new_shard(self, section: Section, layout: SectionLayout) -> GradShard:
        index = self._collectives.shard_index if layout.num_shards > 1 else 0
        if _rests_on(self._device, section):
            return DeviceGradShard(self._store, layout, self._device, index)
        return GradShard(self._store, layout, section.shard.placement.grads, self._residency.attach, index)

    def arrive(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        """Autograd has accumulated a gradient. Parameters may be asked about, even those at rest."""
        grads, index = self.ledger.place(param)
        if not grads.arrived:
            grads.num_expected = sum(each.requires_grad for each in grads.params)
        grad = local_grad(param, grad)
        if grad.layout is not torch.strided:
            raise ZeroOffloadError(
                f"the gradient of {grads.layout.params[index].spec.name} is sparse; "
                "build the embedding with sparse=False"
            )
        if self.ledger.loss_scale != 1.0:
            raise ZeroOffloadError(
                "a backward adds to gradients that a scaler has unscaled and no step has used; unscale once, after the "
                "last backward of a step, or drop them with optimizer.zero_grad(), or where no optimizer has the "
                "parameter with param.grad = None"
            )
        self._board.wait(grads.unit.index)
        if self._collectives.world_size == 1:
            self._keep(grads, index, grad, adds=index in grads.holding)
        elif self.defers:
            self._keep(grads, index, grad, adds=index in grads.waiting)
            grads.waiting.add(index)
            self._deferred = True
        else:
            self._open_partial(grads)
            self._partials.put(grads, index, grad)
        grads.arrived.add(index)
        grads.holding.add(index)
        if self._spans.on:
            self._spans.backward.made(grads.unit.name)
        if len(grads.arrived) == grads.num_expected:
            self._complete(grads)

    def finish_backward(self) -> None:
        """Complete what parameters without a gradient left open."""
        for grads in self.ledger.sections:
            if grads.arrived:
                self._complete(grads)
        self._reductions.finish()
        self._staging.drain()
        if not self.defers:
            self.reduce_waiting()

    def reduce_waiting(self) -> None:
        """Reduce what earlier backwards have left on each rank. Collective; the same sections on every rank."""
        # What one rank has not, another may have.
        if not self._deferred and not self._collectives.partition.any_branches:
            return
        self._deferred = False
        sections = self.ledger.sections
        flags = [index in grads.waiting for grads in sections for index in range(len(grads.params))]
        found = iter(self._collectives.any_rank(flags))
        for grads in sections:
            anywhere = {index for index in range(len(grads.params)) if next(found)}
            if anywhere:
                grads.holding |= anywhere
                self._open_partial(grads)
                self._partials.widen(grads)
                self._complete(grads)
        self._reductions.finish()
        self._staging.drain()

    def clip_norm(self, params: Collection[nn.Parameter], max_norm: float) -> float:
        """Let the next update multiply as torch.nn.utils.clip_grad_norm_ would; returns the norm. Collective."""
        self.reduce_waiting()
        return self.ledger.clip_norm(max_norm, params)

    def clip_value(self, params: Collection[nn.Parameter], clip_value: float) -> None:
        """Clip elements where they rest, as torch.nn.utils.clip_grad_value_ would. Collective."""
        self.reduce_waiting()
        for grads in self.ledger.sections:
            if grads.holding:
                # Other parameters of the section may have had a step, whose update reads it still.
                self._board.wait(grads.unit.index)
        self.ledger.clamp(clip_value, params)

    def _keep(self, grads: SectionGrads, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Bring one gradient to rest on this rank."""
        shard = grads.local or grads.shard
        if self._device.is_host:
            self._keep_one(grads, index, grad.contiguous(), adds=adds)
        elif shard.on_device:
            self._store_one(grads, index, grad.reshape(-1) if adds else _own(grad, shard.dtype), adds=adds)
        else:
            self._staging.stage(grads, index, grad.reshape(-1), adds=adds)

    def _keep_one(self, grads: SectionGrads, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Bring one gradient that autograd has made in host memory to rest: copied, unless it can be kept."""
        shard = grads.local or grads.shard
        alone = grad.nbytes >= ADOPT_BYTES and grad.nbytes == grad.untyped_storage().nbytes()
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
        self._keep_open(grads)
        if adds:
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
        else:
            grads.sums[index] = _write(adds, shard.place(index), grad)

    def _keep_open(self, grads: SectionGrads) -> None:
        """Sections that wait for their last gradients (some never come) rest on disk until those arrive."""
        if grads.shard.tier is not Tier.NVME:
            return
        self._open = [each for each in self._open if each is not grads]
        while len(self._open) >= GRADS_IN_FLIGHT:
            _close(self._open.pop(0))
        self._open.append(grads)

    def _open_partial(self, grads: SectionGrads) -> None:
        """This rank's sum of a section is there to be filled, and nobody else's to read."""
        if grads.partial is not None:
            if not self._reductions.has(grads):
                return
            self._reductions.finish()
        if not self._partials.has_room(grads):
            self._reductions.finish_oldest()
        self._partials.make(grads)

    def _complete(self, grads: SectionGrads) -> None:
        """All of this backward's gradients of a section are here."""
        if grads.partial is not None:
            self._partials.fill(grads)
            if self._deferred:
                # Some ranks add sums of earlier backwards, which are fp32; all send what one of them sends.
                self._partials.widen(grads)
            what = _describe(grads)
            grads.arrived.clear()
            self._collectives.agreement.same(f"the reduction of gradients of {what}")
            self._add_waiting(grads)
            self._reductions.add(grads)
            return
        grads.arrived.clear()
        if self._device.is_host or (grads.local or grads.shard).on_device:
            self._rest(grads)
        else:
            self._staging.seal(grads)

    def _reduced(self, grads: SectionGrads, shard: torch.Tensor) -> None:
        """A section's reduction is over: `shard`, (shard_numel,) fp32 on the device, ours, goes to rest."""
        if self._device.is_host or grads.shard.on_device:
            self._store_reduced(grads, shard)
            self._rest(grads)
        else:
            self._staging.stage(grads, REDUCED, shard, adds=False)
            self._staging.seal(grads)
        self._partials.drop(grads)

    def _add_waiting(self, grads: SectionGrads) -> None:
        """Add this rank's own sums of earlier backwards to the partial one."""
        local = grads.local
        if local is None or not grads.waiting:
            return
        partial = self._partials.widen(grads)
        for index in sorted(grads.waiting):
            piece, grad = grads.layout.params[index], local.view(index)
            if local.tier is Tier.NVME:
                grad = grad.to(partial.device)  # Pages that come and go are not pinned: no asynchronous copy.
            elif not self._device.is_host and not local.on_device:
                grad = self._device.upload(torch.empty_like(grad, device=partial.device), grad).take()
            partial[piece.begin : piece.end].add_(grad)
        grads.waiting.clear()
        local.held = False
        local.drop()
        local.close()

    def _store_reduced(self, grads: SectionGrads, reduced: torch.Tensor) -> None:
        grads.shard.widen()
        for index, piece in enumerate(grads.layout.params):
            begin, end = grads.layout.in_shard(piece, self._collectives.shard_index)
            self._put(grads, index, reduced[begin:end], adds=index in grads.reduced)
            grads.reduced.add(index)
        grads.shard.held = True

    def _land(self, grads: SectionGrads, index: int, grad: torch.Tensor, adds: bool) -> None:
        """A download is complete: `grad` is in staging."""
        if index == REDUCED:
            self._store_reduced(grads, grad)
        else:
            self._store_one(grads, index, grad, adds=adds)

    def _rest(self, grads: SectionGrads) -> None:
        _close(grads)
        self._open = [each for each in self._open if each is not grads]

    def drop(self) -> bool:
        """Forget all gradients, those of a backward that broke off included; says whether there were any."""
        self._reductions.drop()
        self._staging.drain()
        for grads in self.ledger.sections:
            grads.arrived.clear()
            self._partials.drop(grads)
        self._deferred = False
        return self.ledger.drop()


# For backwards that run beside each other


def has_waiting(reducer: GradReducer) -> bool:
    """Whether the next backward reduces what earlier ones have left on each rank."""
    return reducer._deferred and not reducer.defers


def arrive_together(reducer: GradReducer, param: nn.Parameter) -> int:
    """A number that is the same for parameters whose gradients must not arrive among those of another backward: a
    reduction is of a whole section."""
    reduces = reducer._collectives.world_size > 1 and not reducer.defers
    return id(reducer.ledger.place(param)[0] if reduces else param)


def finish_section(reducer: GradReducer, param: nn.Parameter) -> None:
    """One backward's gradients that arrive together with this parameter's are here."""
    grads = reducer.ledger.place(param)[0]
    if grads.arrived and grads.partial is not None:
        reducer._complete(grads)


def _close(grads: SectionGrads) -> None:
    grads.shard.close()
    if grads.local is not None:
        grads.local.close()


def _describe(grads: SectionGrads) -> str:
    """What is reduced. Ranks must agree too in which parameters have a gradient, if not all, and in the dtype."""
    some = 0 < len(grads.arrived) < len(grads.layout.params)
    names = [grads.layout.params[index].spec.name for index in sorted(grads.arrived)]
    wide = ", in fp32" if grads.partial is not None and grads.partial.dtype != grads.layout.dtype else ""
    return f"{grads.unit.name}{', of ' + ', '.join(names) if some else ''}{wide}"


def _rests_on(device: Device, section: Section) -> bool:
    """Whether a section's gradients rest in the device's own memory."""
    return section.shard.placement.grads is Tier.DEVICE and not device.is_host


def _own(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient that autograd has made, (numel,) `dtype`: itself if nothing else is in its memory, else a copy."""
    storage = grad.untyped_storage()
    # Counted are the gradient and `storage`.
    alone = grad.nbytes == storage.nbytes() and torch._C._storage_Use_Count(storage._cdata) <= 2
    return grad.detach().reshape(-1).to(dtype, copy=not alone)


def _keep_there(adds: bool, shard: GradShard, index: int, grad: torch.Tensor) -> None:
    """Keep a gradient in the device's memory, or add it to the fp32 one there; nothing waits for it."""
    if adds:
        assert shard.dtype == torch.float32
        shard.view(index).add_(grad)
    else:
        shard.adopt(index, grad)


def _write(adds: bool, place: torch.Tensor, grad: torch.Tensor) -> GradSum:
    """Store `grad` at `place`, or add it to the fp32 values there; the sums are of what stands there then."""
    threads = torch.get_num_threads()
    if adds:
        assert place.dtype == torch.float32
        return accumulate_grad(place.data_ptr(), grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads)
    return store_grad(place.data_ptr(), place.dtype, grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads)
