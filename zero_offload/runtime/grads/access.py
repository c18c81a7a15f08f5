"""The program's access to gradients that are held: clipping, loss scale, `.grad`, `zo.gathered(kind="grads")`.

`GradAccess` is above `Gradients`: it reduces what earlier backwards have left before it answers. Elements are read and
changed where they rest.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import nn

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.types import Tier
from zero_offload.hardware.device import aliased
from zero_offload.plan.tensor_parallel import is_dtensor
from zero_offload.runtime.grads.gradients import Gradients
from zero_offload.runtime.ranks.collectives import Collectives
from zero_offload.standins.sources import GradSource


class GradAccess(GradSource):
    """The gradients of one model, as its program sees them."""

    def __init__(self, grads: Gradients, collectives: Collectives) -> None:
        self.arriving, self.ledger, self.norms = grads, grads.ledger, grads.norms
        self._collectives = collectives

    def share(self, param: nn.Parameter) -> None:
        """Before `param` is asked for its gradient: reduce what earlier backwards have left. Collective where a
        reduction waits: then all ranks ask, or all raise."""
        if not self.arriving.has_deferred or self.arriving.num_ranks == 1 or _in_backward():
            return
        if self.arriving.num_deferring:
            raise ZeroOffloadError(
                f"the gradient of {self.ledger.name_of(param)} is not reduced inside of zo.no_sync, where "
                "each rank has a part of its own. Read it on all ranks after the backward that follows the block; in "
                "accelerate's accumulate clip and look under 'if accelerator.sync_gradients:'"
            )
        self._collectives.agreement.same("a look at .grad, which reduces gradients: all ranks look, or none")
        self.arriving.reduce_waiting()
        self.norms.know()

    def name_of(self, param: nn.Parameter) -> str:
        return self.ledger.name_of(param)

    def norm(self, param: nn.Parameter, order: float) -> torch.Tensor:
        return self.norms.norm(param, order)

    def is_finite(self, param: nn.Parameter) -> bool:
        return self.norms.is_finite(param)

    def is_zeroed(self, param: nn.Parameter) -> bool:
        return param in self.ledger.zeroed

    def scale(self, param: nn.Parameter, factor: float | torch.Tensor, *, divides: bool = False) -> None:
        self.ledger.scale(param, factor, divides=divides)

    def life_of(self, param: nn.Parameter) -> object:
        """An object that stays the same until the gradient held of `param` ends."""
        section, index = self.ledger.place(param)
        return section.lives.setdefault(index, object())

    def check_held(self, param: nn.Parameter, life: object) -> None:
        """Raise where this gradient is over, or is not complete."""
        section, index = self.ledger.place(param)
        name = self.ledger.name_of(param)
        is_there = index in section.holding or param in self.ledger.zeroed
        if section.lives.get(index) is not life or not is_there:
            raise ZeroOffloadError(
                f"this gradient of {name} is over: a step has used it, or it was dropped. Read {name}.grad again"
            )
        if _in_backward():
            raise ZeroOffloadError(
                f"the gradient of {name} is not complete while backward runs. Read it after backward. A hook that "
                f"register_post_accumulate_grad_hook puts on {name} finds what its backward adds in .grad"
            )

    def refuse(self, param: nn.Parameter, what: str) -> ZeroOffloadError:
        """The error for `what`, which needs the elements of a gradient."""
        name, where = self.ledger.name_of(param), self.ledger.place(param)[0].section.shard.placement.grads.value
        return ZeroOffloadError(
            f"{what} needs the elements of the gradient of {name}, which rests on {where} until the optimizer's step. "
            "Its .grad answers norms, is scaled and clipped; zo.AdamW, zo.SGD, ... step with it. "
            f'A copy is read by \'with zo.gathered(model, kind="grads") as grads: grads["{name}"]\', on one rank'
        )

    def view(self, param: nn.Parameter) -> torch.Tensor | None:
        """The gradient itself, in the parameter's shape, where it rests on the compute device; else None. Its storage
        has no other gradient."""
        section, index = self.ledger.place(param)
        if section.store.tier is not Tier.DEVICE or self._collectives.world_size > 1 or is_dtensor(param):
            return None
        self.ledger.read_factors()
        section.exposed.add(index)
        return aliased(section.store.view(index, multiplied=True)).view(section.layout.params[index].spec.shape)

    def read(self, params: Collection[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Copies of the gradients held of `params` as a step would use them, fp32, host; one rank only."""
        found = {}
        self.ledger.read_factors()
        for section, indices in self.ledger.chosen(params):
            brought = section.store.on_disk
            for index, count in zip(indices, section.counts(indices), strict=True):
                copy = (
                    section.store.view(index).to("cpu", torch.float32, copy=True).mul_(count / self.ledger.loss_scale)
                )
                found[section.params[index]] = copy.view(section.layout.params[index].spec.shape)
            if indices:
                if brought:
                    section.store.end_view()
                else:
                    section.store.complete()
        return found

    def squares(self, params: Collection[nn.Parameter]) -> float:
        """The sum of squares of these gradients, as the next update would use them. Collective."""
        self.arriving.reduce_waiting()
        return self.norms.squares(params)[0]

    def unscale(self, loss_scale: float, overflowed: bool) -> bool:
        """Divide the loss scale out of all factors, once. True if the step must not be taken. Collective.

        `overflowed` is what this rank knows of gradients that are elsewhere.
        """
        finite = self.norms.all_finite(None)
        (bad,) = self._collectives.any_rank([overflowed or not finite])
        if self.ledger.any_held(None):
            self.ledger.loss_scale = loss_scale
            self.ledger.overflowed |= bad
        return bad or self.ledger.overflowed

    def clamp(self, params: Collection[nn.Parameter], low: float | None, high: float | None) -> None:
        """Clip the elements of the gradients held of `params` to [low, high], where they rest. None sets no limit on
        that side. Collective where a reduction waits.
        """
        self.arriving.reduce_waiting()
        self.ledger.read_factors()
        for section, indices in self.ledger.by_section(params):
            section.land()
            chosen = sorted(section.holding.intersection(indices))
            if not chosen:
                continue
            self.ledger.note_change(f"clamped to {low} and {high}", section, chosen)
            self.ledger.change(section, chosen)
            for index in chosen:
                power = _power_of_two(section.store.factors, index)
                view = section.store.view(index, multiplied=True)
                if power != 1.0:
                    section.store.factors[index] = power
                # A factor that is still to be multiplied, such as the loss scale, divides the bounds, as far as the
                # dtype goes.
                most, left = torch.finfo(view.dtype).max, power / self.ledger.loss_scale
                view.clamp_(
                    None if low is None else max(-most, low / left),
                    None if high is None else min(most, high / left),
                )
            self.norms.clear()

    def zero(self, param: nn.Parameter) -> None:
        """Let a gradient be zeros, to which the next backward adds."""
        section, index = self.ledger.place(param)
        life = section.lives.get(index, object())
        self.arriving.clear([param], by_program=True)
        section.lives[index] = life
        self.ledger.zeroed.add(param)


def _power_of_two(factors: dict[int, float], index: int) -> float:
    """Take a power of two out of a gradient's factor, which is near 1 then: 16 bits have no room for a loss scale."""
    mantissa, exponent = math.frexp(factors.get(index, 1.0))
    if not math.isfinite(mantissa) or not mantissa:
        return 1.0
    if abs(mantissa) == 0.5:
        mantissa, exponent = 2 * mantissa, exponent - 1
    factors[index] = mantissa
    return math.ldexp(1.0, exponent)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
