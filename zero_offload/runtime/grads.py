"""Gradients from backward to their shard: store or add, norm and finiteness in the same pass.

Owns which gradients the current step holds. One rank: each gradient is written to its place as autograd
delivers it, in the compute dtype at first, added in fp32 when a second one arrives. Several ranks: a unit's
gradients are gathered in a flat fp32 buffer and reduced when all are there, in the same order on every rank.
The calls: `arrive` per parameter, `finish_backward`, then `norm` / `sums`, and `consume` by the step.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zero_offload.errors import ZeroOffloadError
from zero_offload.kernels.grads import GradSum, accumulate_grad, store_grad, sum_of_squares
from zero_offload.memory.arena import MovableBuffer
from zero_offload.plan.layout import ParamSlice, SectionLayout
from zero_offload.runtime.collectives import Collectives
from zero_offload.runtime.residency import Residency
from zero_offload.runtime.unit import Section, Unit
from zero_offload.shards.grad_shard import GradShard
from zero_offload.shards.store import ShardStore
from zero_offload.shards.update_board import UpdateBoard
from zero_offload.types import Tier


@dataclass
class SectionGrads:
    """One section's gradients in this step."""

    unit: Unit
    section: Section
    shard: GradShard
    params: list[nn.Parameter] = field(default_factory=list)
    sums: dict[int, GradSum] = field(default_factory=dict)
    """Per parameter that has a gradient; several ranks: the shard's under -1."""
    arrived: set[int] = field(default_factory=set)
    """Parameters that this backward has delivered."""
    holding: set[int] = field(default_factory=set)
    """Parameters with a gradient that no step has consumed."""
    exposed: set[int] = field(default_factory=set)
    """Parameters whose gradient the user has in hand, and may have changed."""
    partial: MovableBuffer | None = None
    """Several ranks: (numel,) fp32 of this rank alone, until reduced."""

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
    ) -> None:
        self._residency = residency
        self._board = board
        self._collectives = collectives
        self._store = store
        self._places: dict[int, tuple[SectionGrads, int]] = {}
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
        if self._collectives.world_size == 1:
            self._store_one(grads, index, grad.contiguous())
        else:
            self._store_partial(grads, index, grad.contiguous())
        grads.arrived.add(index)
        grads.holding.add(index)
        if len(grads.arrived) == len(grads.layout.params):
            self._complete(grads)

    def finish_backward(self) -> None:
        """Complete what parameters without a gradient left open."""
        for grads in self.sections:
            if grads.arrived:
                self._complete(grads)

    def _store_one(self, grads: SectionGrads, index: int, grad: torch.Tensor) -> None:
        piece, shard = grads.layout.params[index], grads.shard
        adds = index in grads.holding
        array = shard.widen() if adds else shard.open()
        address = array.data_ptr() + piece.begin * array.dtype.itemsize
        grads.sums[index] = _write(adds, address, array.dtype, grad)
        shard.held = True

    def _store_partial(self, grads: SectionGrads, index: int, grad: torch.Tensor) -> None:
        grads.partial = grads.partial or MovableBuffer(self._store.arena, grads.layout.numel * 4)
        if not grads.partial.attached:
            self._residency.attach(grads.partial)
            # Parameters without a gradient and the padding take part in the reduction as zeros.
            ctypes.memset(grads.partial.region.address, 0, grads.layout.numel * 4)
        piece = grads.layout.params[index]
        address = grads.partial.region.address + piece.begin * 4
        _write(index in grads.arrived, address, torch.float32, grad)

    def _complete(self, grads: SectionGrads) -> None:
        """All of this backward's gradients of a section are here."""
        grads.arrived.clear()
        if grads.partial is not None and grads.partial.attached:
            self._reduce(grads, grads.partial)
            grads.partial.detach()
        grads.shard.close()

    def _reduce(self, grads: SectionGrads, partial: MovableBuffer) -> None:
        flat = partial.region.tensor(torch.float32, grads.layout.numel)
        reduced = self._collectives.reduce_grads(flat)
        array = grads.shard.widen()
        grads.sums = {-1: _write(grads.shard.held, array.data_ptr(), array.dtype, reduced)}
        grads.shard.held = True

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
        for grads in self.sections:
            for index in list(grads.holding):
                self._forget(grads, index)
            grads.arrived.clear()
            if grads.partial is not None and grads.partial.attached:
                grads.partial.detach()

    def _forget(self, grads: SectionGrads, index: int) -> None:
        grads.holding.discard(index)
        grads.exposed.discard(index)
        grads.sums.pop(index, None)
        if not grads.holding:
            grads.sums.clear()
            grads.shard.held = False


def _write(adds: bool, address: int, dtype: torch.dtype, grad: torch.Tensor) -> GradSum:
    """Store `grad` at `address`, or add it to the fp32 values there; the sums are of what stands there then."""
    threads = torch.get_num_threads()
    if adds:
        assert dtype == torch.float32
        return accumulate_grad(address, grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads)
    return store_grad(address, dtype, grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads)
