"""Gradients from backward to their shard: store or add, norm and finiteness in the same pass.

Owns which gradients the current step holds. One rank: each gradient is written to its place as autograd
delivers it, in the compute dtype at first, added in fp32 when a second one arrives. Several ranks: a unit's
gradients are gathered in a flat fp32 buffer and reduced when all are there, in the same order on every rank.
The calls: `arrive` per parameter, `finish_backward`, then `norm` / `sums`, and `consume` by the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zero_offload.device import Device
from zero_offload.errors import ZeroOffloadError
from zero_offload.kernels.grads import GradSum, accumulate_grad, store_grad, sum_of_squares
from zero_offload.memory.arena import MovableBuffer
from zero_offload.plan.layout import ParamSlice, SectionLayout
from zero_offload.runtime.collectives import Collectives
from zero_offload.runtime.grad_staging import GradStaging
from zero_offload.runtime.residency import Residency
from zero_offload.runtime.unit import Section, Unit
from zero_offload.shards.grad_shard import GradShard
from zero_offload.shards.store import ShardStore
from zero_offload.shards.update_board import UpdateBoard
from zero_offload.types import Tier

REDUCED = -1
"""In place of a parameter's index: a whole shard's gradients after a reduction."""
OPEN_GRADS = 2
"""Gradient buffers of the NVMe tier that have pages at once: the one backward fills, and one it leaves."""


@dataclass
class SectionGrads:
    """One section's gradients in this step."""

    unit: Unit
    section: Section
    shard: GradShard
    params: list[nn.Parameter] = field(default_factory=list)
    sums: dict[int, GradSum] = field(default_factory=dict)
    """Per parameter that has a gradient; several ranks: the shard's under REDUCED."""
    arrived: set[int] = field(default_factory=set)
    """Parameters that this backward has delivered."""
    holding: set[int] = field(default_factory=set)
    """Parameters with a gradient that no step has consumed."""
    exposed: set[int] = field(default_factory=set)
    """Parameters whose gradient the user has in hand, and may have changed."""
    partial: torch.Tensor | None = None
    """Several ranks: (numel,) fp32 of this rank alone, until reduced."""
    pages: MovableBuffer | None = None
    """On a CPU, the memory of `partial`."""

    @property
    def layout(self) -> SectionLayout:
        return self.section.layout


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
        self._staging = GradStaging(device, store.arena, _largest_grad(units), self._land, self._rest)
        self._residency = residency
        self._board = board
        self._collectives = collectives
        self._store = store
        self._places: dict[int, tuple[SectionGrads, int]] = {}
        self._open: list[SectionGrads] = []
        """With pages, the longest unused first."""
        self.sections: list[SectionGrads] = []
        for unit in units:
            by_section = {
                id(section): SectionGrads(unit, section, GradShard(store, section.shard, residency.attach))
                for section in unit.sections
            }
            for section, _, param in unit.placed_params():
                grads = by_section[id(section)]
                self._places[id(param)] = (grads, len(grads.params))
                grads.params.append(param)
            self.sections += [grads for grads in by_section.values() if grads.layout.trainable]

    def arrive(self, param: nn.Parameter) -> None:
        """Autograd has accumulated `param.grad`: take it."""
        with torch._C.DisableTorchFunctionSubclass():
            grad, param.grad = param.grad, None
        assert grad is not None
        grads, index = self._places[id(param)]
        if grad.layout is not torch.strided:
            raise ZeroOffloadError(
                f"the gradient of {grads.layout.params[index].spec.name} is sparse; "
                "build the embedding with sparse=False"
            )
        self._board.wait(grads.unit.index)
        if self._collectives.world_size > 1:
            piece = grads.layout.params[index]
            self._partial(grads)[piece.begin : piece.end].add_(grad.reshape(-1))
        elif self._device.is_host:
            self._store_one(grads, index, grad.contiguous(), adds=index in grads.holding)
        else:
            self._staging.stage(grads, index, grad.reshape(-1), adds=index in grads.holding)
        grads.arrived.add(index)
        grads.holding.add(index)
        if len(grads.arrived) == len(grads.layout.params):
            self._complete(grads)

    def finish_backward(self) -> None:
        """Complete what parameters without a gradient left open."""
        for grads in self.sections:
            if grads.arrived:
                self._complete(grads)
        self._staging.drain()

    def _store_one(self, grads: SectionGrads, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Bring one gradient, host, to rest."""
        piece, shard = grads.layout.params[index], grads.shard
        self._keep_open(grads)
        array = shard.widen() if adds else shard.open()
        address = array.data_ptr() + piece.begin * array.dtype.itemsize
        grads.sums[index] = _write(adds, address, array.dtype, grad)
        shard.held = True

    def _keep_open(self, grads: SectionGrads) -> None:
        """Sections that wait for their last gradients (some never come) rest on disk until those arrive."""
        self._open = [each for each in self._open if each is not grads]
        while len(self._open) >= OPEN_GRADS:
            self._open.pop(0).shard.close()
        self._open.append(grads)

    def _partial(self, grads: SectionGrads) -> torch.Tensor:
        """(numel,) fp32 on the compute device, zero at first: what has no gradient takes part as zeros."""
        if grads.partial is None and not self._device.is_host:
            grads.partial = torch.zeros(grads.layout.numel, dtype=torch.float32, device=self._device.torch_device)
        elif grads.partial is None:
            grads.pages = grads.pages or MovableBuffer(self._store.arena, grads.layout.numel * 4)
            self._residency.attach(grads.pages)
            grads.partial = grads.pages.region.tensor(torch.float32, grads.layout.numel).zero_()
        return grads.partial

    def _complete(self, grads: SectionGrads) -> None:
        """All of this backward's gradients of a section are here."""
        grads.arrived.clear()
        if grads.partial is not None:
            reduced = self._collectives.reduce_grads(grads.partial)
            if self._device.is_host:
                self._store_reduced(grads, reduced)
            else:
                self._staging.stage(grads, REDUCED, reduced, adds=False)
            self._drop_partial(grads)
        if self._device.is_host:
            self._rest(grads)
        else:
            self._staging.seal(grads)

    def _store_reduced(self, grads: SectionGrads, reduced: torch.Tensor) -> None:
        array = grads.shard.widen()
        grads.sums = {REDUCED: _write(grads.shard.held, array.data_ptr(), array.dtype, reduced)}
        grads.shard.held = True

    def _land(self, grads: SectionGrads, index: int, grad: torch.Tensor, adds: bool) -> None:
        """A download is complete: `grad` is in staging."""
        if index == REDUCED:
            self._store_reduced(grads, grad)
        else:
            self._store_one(grads, index, grad, adds=adds)

    def _rest(self, grads: SectionGrads) -> None:
        grads.shard.close()
        self._open = [each for each in self._open if each is not grads]

    def _drop_partial(self, grads: SectionGrads) -> None:
        grads.partial = None
        if grads.pages is not None and grads.pages.attached:
            grads.pages.detach()

    # What the step asks

    def norm(self) -> tuple[float, bool]:
        """Global 2-norm of the held gradients, and whether all are finite. Collective."""
        total, bad = 0.0, 0.0
        for grads in self.sections:
            self._refresh(grads)
            total += math.fsum(grads.sums[index].sumsq for index in sorted(grads.sums))
            bad += sum(not entry.finite for entry in grads.sums.values())
        total, bad = self._collectives.sum_over_shards([total, bad])
        return math.sqrt(total), bad == 0

    def _refresh(self, grads: SectionGrads) -> None:
        """Sum again what the user may have changed through `.grad`."""
        for index in grads.exposed & grads.holding:
            view = self._view(grads, grads.layout.params[index])
            grads.sums[index] = sum_of_squares(view.data_ptr(), view.dtype, view.numel())

    def held(self, param: nn.Parameter) -> bool:
        """Whether a gradient waits for a step."""
        grads, index = self._places[id(param)]
        return index in grads.holding

    @property
    def any_held(self) -> bool:
        return any(grads.holding for grads in self.sections)

    def view(self, param: nn.Parameter) -> torch.Tensor | None:
        """The gradient itself, in the parameter's shape, where it rests on the compute device; else None."""
        grads, index = self._places[id(param)]
        if grads.shard.tier is not Tier.DEVICE or self._collectives.world_size > 1:
            return None
        grads.exposed.add(index)
        return self._view(grads, grads.layout.params[index])

    def _view(self, grads: SectionGrads, piece: ParamSlice) -> torch.Tensor:
        return grads.shard.open()[piece.begin : piece.end].view(piece.spec.shape)

    def read(self, param: nn.Parameter) -> torch.Tensor | None:
        """A copy of the gradient, fp32, or None; one rank only."""
        grads, index = self._places[id(param)]
        if index not in grads.holding:
            return None
        copy = self._view(grads, grads.layout.params[index]).float().clone()
        grads.shard.close()
        return copy

    def forget(self, param: nn.Parameter) -> None:
        """Drop one parameter's gradient."""
        self._forget(*self._places[id(param)])

    def consume(self, params: Iterable[nn.Parameter]) -> None:
        """A step has taken these parameters' gradients: the next backward starts afresh."""
        for param in params:
            self.forget(param)

    def drop(self) -> None:
        """Nobody wants the gradients, not even those of a backward that broke off."""
        self._staging.drain()
        for grads in self.sections:
            for index in list(grads.holding):
                self._forget(grads, index)
            grads.arrived.clear()
            self._drop_partial(grads)

    def _forget(self, grads: SectionGrads, index: int) -> None:
        grads.holding.discard(index)
        grads.exposed.discard(index)
        grads.sums.pop(index, None)
        if not grads.holding:
            grads.sums.clear()
            grads.shard.held = False


def _largest_grad(units: Sequence[Unit]) -> int:
    """Bytes of the largest section in fp32."""
    return max(section.layout.numel * 4 for unit in units for section in unit.sections)


def _write(adds: bool, address: int, dtype: torch.dtype, grad: torch.Tensor) -> GradSum:
    """Store `grad` at `address`, or add it to the fp32 values there; the sums are of what stands there then."""
    threads = torch.get_num_threads()
    if adds:
        assert dtype == torch.float32
        return accumulate_grad(address, grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads)
    return store_grad(address, dtype, grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads)
