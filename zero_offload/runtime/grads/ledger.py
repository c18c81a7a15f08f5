"""Which gradients the current step holds, where, what they add up to, and what they are to be multiplied by.

Owns that knowledge for every trainable section; `GradReducer` enters what arrives, the step asks and consumes. What is
still on its way from a device comes to rest before anything here looks at it.
[Note: factors]
Clipping by norm moves no gradient: each gets a factor that the update multiplies by. What must see the product before
(a gradient added to it, clipping by value, a look at `.grad`) multiplies where the gradient rests, and the factor ends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence

import torch
from torch import nn

from zero_offload.errors import ConfigError, ZeroOffloadError
from zero_offload.kernels.grads import GradSum
from zero_offload.plan.layout import SectionLayout
from zero_offload.plan.tensor_parallel import is_dtensor
from zero_offload.runtime.grads.keeper import GradKeeper
from zero_offload.runtime.grads.sections import SectionGrads
from zero_offload.runtime.ranks.collectives import Collectives
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.shards.grad_shard import GradShard
from zero_offload.types import Tier


class GradLedger:
    """The gradients of one model between backward and step."""

    def __init__(
        self,
        units: Sequence[Unit],
        new_shard: Callable[[Section, SectionLayout], GradShard],
        collectives: Collectives,
        keeper: GradKeeper,
    ) -> None:
        self._collectives = collectives
        self._keeper = keeper
        self._places: dict[int, tuple[SectionGrads, int]] = {}
        self.loss_scale = 1.0
        """What the gradients held now are multiplied by and the step divides out; it ends with them."""
        self.overflowed = False
        """Whether a loss scaler has found that this step must not be taken; it ends with the gradients."""
        self.updated: set[nn.Parameter] = set()
        """Parameters that a backward has updated (overlap="backward"), until their optimizer's step."""
        self.zeroed: set[nn.Parameter] = set()
        """Parameters whose gradient the program has set to zeros, and that no backward has added to."""
        self.sections: list[SectionGrads] = []
        self.grow(units, new_shard)

    def grow(self, units: Sequence[Unit], new_shard: Callable[[Section, SectionLayout], GradShard]) -> None:
        """Hold gradients of further units."""
        for unit in units:
            by_section = {id(s): self._section(unit, s, new_shard) for s in unit.sections}
            for section, _, param in unit.placed_params:
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

    def norm(self, params: Collection[nn.Parameter] | None) -> tuple[float, bool]:
        """2-norm of the gradients held of `params` (None: of all), and whether all of them are finite. Collective."""
        total, finite = self.squares(params)
        return math.sqrt(total), finite

    def squares(self, params: Collection[nn.Parameter] | None) -> tuple[float, bool]:
        """The same, but the sum of squares."""
        total, bad = 0.0, 0.0
        self._complete_sums(self.sections)
        for grads, indices in self._chosen(params):
            squares = math.fsum(self.factor(grads, index) ** 2 * grads.sums[index].sumsq for index in indices)
            # Tensor-parallel ranks that hold the same count it once between them.
            total += squares / grads.layout.num_copies
            bad += sum(not grads.sums[index].finite for index in indices)
        total, bad = self._collectives.sum_over_shards([total, bad])
        return total, bad == 0

    def finite(self, units: Sequence[Sequence[SectionGrads]], params: Container[nn.Parameter]) -> list[bool]:
        """For each unit's sections, whether the gradients held of `params` are finite, on every rank. Collective."""
        for grads in itertools.chain(*units):
            self._complete_sums([grads])
        fine = [all(each.finite for grads in unit for each in _sums_of(grads, params)) for unit in units]
        return [not bad for bad in self._collectives.any_rank([not each for each in fine])]

    def non_finite(self, params: Collection[nn.Parameter] | None) -> list[str]:
        """Names of those of `params` whose gradient, or this rank's part of it, `norm` has found not to be finite."""
        return [
            grads.layout.params[index].spec.name
            for grads, indices in self._chosen(params)
            for index in indices
            if not grads.sums[index].finite
        ]

    def factor(self, grads: SectionGrads, index: int) -> float:
        """What a gradient held now is to be multiplied by."""
        return grads.factors.get(index, 1.0) / self.loss_scale

    def unscale(self, loss_scale: float, overflowed: bool) -> bool:
        """Divide the loss scale out of all factors, once; says whether the step must not be taken. Collective.

        `overflowed` is what this rank knows of gradients that are elsewhere.
        """
        finite = self.norm(None)[1]
        (bad,) = self._collectives.any_rank([overflowed or not finite])
        if self.any_held(None):
            self.loss_scale = loss_scale
            self.overflowed |= bad
        return bad or self.overflowed

    def multiply(self, factor: float, params: Collection[nn.Parameter]) -> None:
        """Let the gradients held of `params` count `factor` times."""
        for grads, indices in self._chosen(params) if factor != 1.0 else ():
            for index in indices:
                grads.factors[index] = grads.factors.get(index, 1.0) * factor

    def clamp(self, limit: float, params: Collection[nn.Parameter]) -> None:
        """Clip the elements of the gradients held of `params` to [-limit, limit], where they rest."""
        for grads, indices in self._chosen(params):
            for index in indices:
                view = self._apply_factor(grads, index)
                # The loss scale is still to be divided out: the bound grows with it, as far as the dtype goes.
                bound = min(limit * self.loss_scale, torch.finfo(view.dtype).max)
                view.clamp_(-bound, bound)
            self._keeper.measure(grads, indices)
            if indices:
                grads.shard.close()

    def _chosen(self, params: Collection[nn.Parameter] | None) -> Iterator[tuple[SectionGrads, list[int]]]:
        """Sections, each with those of `params` (None: of all) in it whose gradients are held."""
        wanted = None if params is None else set(map(id, params))
        for grads in self.sections:
            self._keeper.land(grads)
            held = sorted(grads.holding)
            yield grads, [index for index in held if wanted is None or id(grads.params[index]) in wanted]

    def _apply_factor(self, grads: SectionGrads, index: int) -> torch.Tensor:
        """The gradient where it rests, clipped there; its sum is made again by the caller."""
        view, factor = grads.shard.view(index), grads.factors.pop(index, 1.0)
        return view if factor == 1.0 else view.mul_(factor)

    def held(self, param: nn.Parameter) -> bool:
        """Whether a gradient waits for a step."""
        grads, index = self._places[id(param)]
        return index in grads.holding

    def any_held(self, params: Collection[nn.Parameter] | None) -> bool:
        return any(indices for _, indices in self._chosen(params))

    def view(self, param: nn.Parameter) -> torch.Tensor | None:
        """The gradient itself, in the parameter's shape, where it rests on the compute device; else None."""
        grads, index = self._places[id(param)]
        if grads.shard.tier is not Tier.DEVICE or self._collectives.world_size > 1 or is_dtensor(param):
            return None
        grads.exposed.add(index)
        return self._apply_factor(grads, index).view(grads.layout.params[index].spec.shape)

    def read(self, params: Collection[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Copies of the gradients held of `params` as a step would use them, fp32, host; one rank only."""
        found = {}
        for grads, indices in self._chosen(params):
            brought = grads.shard.on_disk
            for index in indices:
                copy = grads.shard.view(index).to("cpu", torch.float32, copy=True).mul_(self.factor(grads, index))
                found[grads.params[index]] = copy.view(grads.layout.params[index].spec.shape)
            if indices:
                grads.shard.close(changed=not brought)
        return found

    def _complete_sums(self, sections: Sequence[SectionGrads]) -> None:
        """Fill `sums` of these with what is on its way, and of what may have changed since."""
        for grads in sections:
            self._keeper.land(grads)
            self._keeper.measure(grads, grads.exposed & grads.holding)  # the user may have changed it through `.grad`
        self._keeper.read_sums(sections)

    def forget(self, params: Iterable[nn.Parameter]) -> None:
        """A step has taken these parameters' gradients, or nobody wants them: the next backward starts afresh."""
        for param in params:
            self._forget(*self._places[id(param)])
            self.zeroed.discard(param)

    def drop(self, params: Collection[nn.Parameter] | None = None) -> bool:
        """Nobody wants the gradients (of `params`; by default all); says whether there were any."""
        found = False
        self.zeroed.difference_update(list(self.zeroed) if params is None else params)
        for grads, indices in self._chosen(params):
            found = found or bool(indices)
            for index in indices:
                self._forget(grads, index)
            if grads.local is not None and not grads.waiting:
                grads.local.held = False
                grads.local.drop()
        return found

    def _forget(self, grads: SectionGrads, index: int) -> None:
        if index not in grads.holding:
            return
        self._keeper.land(grads)
        grads.holding.discard(index)
        grads.shard.shown |= index in grads.exposed
        grads.exposed.discard(index)
        grads.waiting.discard(index)
        grads.reduced.discard(index)
        grads.sums.pop(index, None)
        grads.coming.pop(index, None)
        grads.factors.pop(index, None)
        forget_zeros(grads)
        if not any(each.holding for each in self.sections):
            self.loss_scale, self.overflowed = 1.0, False


def forget_zeros(grads: SectionGrads) -> None:
    """Of a section without gradients nothing is kept: not what a reduction has made of none either."""
    if not grads.holding:
        grads.sums.clear()
        grads.reduced.clear()
        grads.shard.held = False
        grads.shard.drop()


def _sums_of(grads: SectionGrads, params: Container[nn.Parameter]) -> Iterator[GradSum]:
    return (grads.sums[index] for index in grads.holding if grads.params[index] in params)


def check_closed(ledger: GradLedger, call: str) -> None:
    """Raise if a backward has updated parameters, and not every optimizer of theirs has been stepped."""
    if ledger.updated:
        grads, index = ledger.place(next(iter(ledger.updated)))
        raise ZeroOffloadError(
            f"{call} follows a backward that has updated {grads.layout.params[index].spec.name} (overlap='backward'), "
            "and no step() of its optimizer. Call step() after each backward; to add up the gradients of several, run "
            "all but the last in 'with zo.no_sync(model):'"
        )


def check_not_updated(ledger: GradLedger, param: nn.Parameter, name: str) -> None:
    """Raise if a backward has used the gradient, and the step that it belongs to has not been made."""
    if param in ledger.updated:
        raise ConfigError(
            f"the gradient of {name} is used up: with overlap='backward' backward has updated the parameter, and "
            "optimizer.step() closes the step. What looks at gradients before that (clipping, a loss scaler, a step "
            "that is left out by zero_grad()) needs overlap='forward'"
        )
