"""Which gradients the current step holds, where, and what they add up to.

Owns that knowledge for every trainable section; `GradReducer` enters what arrives, the step asks and consumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zero_offload.kernels.grads import GradSum, sum_of_squares
from zero_offload.memory.arena import MovableBuffer
from zero_offload.plan.layout import SectionLayout
from zero_offload.plan.tensor_parallel import is_dtensor
from zero_offload.runtime.collectives import Collectives
from zero_offload.runtime.unit import Section, Unit
from zero_offload.shards.grad_shard import GradShard
from zero_offload.types import Tier

CLIP_EPS = 1e-6
"""As torch.nn.utils.clip_grad_norm_ adds it to the norm."""
REDUCED = -1
"""In place of a parameter's index: a whole shard's gradients after a reduction."""


@dataclass
class SectionGrads:
    """One section's gradients in this step."""

    unit: Unit
    section: Section
    shard: GradShard
    local: GradShard | None = None
    """Several ranks: this rank's own sums of backwards that were not reduced, over the whole section."""
    waiting: set[int] = field(default_factory=set)
    """Parameters with a gradient in `local`."""
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


class GradLedger:
    """The gradients of one model between backward and step."""

    def __init__(
        self,
        units: Sequence[Unit],
        new_shard: Callable[[Section, SectionLayout], GradShard],
        collectives: Collectives,
    ) -> None:
        self._collectives = collectives
        self._places: dict[int, tuple[SectionGrads, int]] = {}
        self._clip_factor = 1.0
        self.loss_scale = 1.0
        """What the gradients held now are multiplied by and the step divides out; it ends with them."""
        self.overflowed = False
        """Whether a loss scaler has found that this step must not be taken; it ends with the gradients."""
        self.sections: list[SectionGrads] = []
        for unit in units:
            by_section = {id(s): self._section(unit, s, new_shard) for s in unit.sections}
            for section, _, param in unit.placed_params():
                grads = by_section[id(section)]
                self._places[id(param)] = (grads, len(grads.params))
                grads.params.append(param)
            self.sections += [grads for grads in by_section.values() if grads.layout.trainable]

    def _section(
        self, unit: Unit, section: Section, new_shard: Callable[[Section, SectionLayout], GradShard]
    ) -> SectionGrads:
        shard = new_shard(section, section.layout)
        if self._collectives.world_size == 1:
            return SectionGrads(unit, section, shard)
        return SectionGrads(unit, section, shard, new_shard(section, section.layout.whole()))

    def place(self, param: nn.Parameter) -> tuple[SectionGrads, int]:
        """A parameter's section and its index there."""
        return self._places[id(param)]

    def norm(self) -> tuple[float, bool]:
        """Global 2-norm of the held gradients, and whether all are finite. Collective."""
        total, bad = 0.0, 0.0
        for grads in self.sections:
            self._refresh(grads)
            # Tensor-parallel ranks that hold the same count it once between them.
            total += math.fsum(grads.sums[index].sumsq for index in sorted(grads.sums)) / grads.layout.num_copies
            bad += sum(not entry.finite for entry in grads.sums.values())
        total, bad = self._collectives.sum_over_shards([total, bad])
        return math.sqrt(total), bad == 0

    @property
    def factor(self) -> float:
        """What the gradients held now are to be multiplied by; it ends with them."""
        return self._clip_factor / self.loss_scale

    def unscale(self, loss_scale: float, overflowed: bool) -> bool:
        """Divide the loss scale out of the factor, once; says whether the step must not be taken. Collective.

        `overflowed` is what this rank knows of gradients that are elsewhere.
        """
        finite = self.norm()[1]
        (bad,) = self._collectives.any_rank([overflowed or not finite])
        if self.any_held:
            self.loss_scale = loss_scale
            self.overflowed |= bad
        return bad or self.overflowed

    def clip(self, max_norm: float) -> float:
        """Set the factor as torch.nn.utils.clip_grad_norm_ scales; returns the norm before. Collective."""
        norm = self.norm()[0] * self.factor
        if math.isfinite(norm):
            self._clip_factor *= min(1.0, max_norm / (norm + CLIP_EPS))
        return norm

    def _refresh(self, grads: SectionGrads) -> None:
        """Sum again what the user may have changed through `.grad`."""
        for index in grads.exposed & grads.holding:
            view = grads.shard.view(index)
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
        if grads.shard.tier is not Tier.DEVICE or self._collectives.world_size > 1 or is_dtensor(param):
            return None
        grads.exposed.add(index)
        return grads.shard.view(index).view(grads.layout.params[index].spec.shape)

    def read(self, param: nn.Parameter) -> torch.Tensor | None:
        """A copy of the gradient, fp32, without the loss scale once that is divided out, or None; one rank only."""
        grads, index = self._places[id(param)]
        if index not in grads.holding:
            return None
        copy = grads.shard.view(index).view(grads.layout.params[index].spec.shape).float().clone()
        grads.shard.close()
        return copy.div_(self.loss_scale)

    def forget(self, param: nn.Parameter) -> None:
        """Drop one parameter's gradient."""
        self._forget(*self._places[id(param)])

    def consume(self, params: Iterable[nn.Parameter]) -> None:
        """A step has taken these parameters' gradients: the next backward starts afresh."""
        for param in params:
            self.forget(param)

    def drop(self) -> None:
        """Nobody wants the gradients."""
        for grads in self.sections:
            for index in list(grads.holding):
                self._forget(grads, index)
            grads.shard.release()
            if grads.local is not None:
                grads.local.held = False
                grads.local.release()

    def _forget(self, grads: SectionGrads, index: int) -> None:
        if index not in grads.holding:
            return
        grads.holding.discard(index)
        grads.exposed.discard(index)
        grads.waiting.discard(index)
        grads.sums.pop(index, None)
        if not grads.holding:
            grads.sums.clear()
            grads.shard.held = False
            if not self.any_held:
                self._clip_factor, self.loss_scale, self.overflowed = 1.0, 1.0, False
