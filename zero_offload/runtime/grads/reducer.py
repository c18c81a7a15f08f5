"""Gradients from backward to their shard: each is kept as it comes, or reduced over ranks first.

Owns their way. One rank: each goes to rest as autograd delivers it (`GradKeeper`), in the compute dtype at first, added
in fp32 when a second one arrives. Several ranks: a section's gradients are gathered in a flat buffer and, when all are
there, handed to `Reductions`, whose results come to `_reduced`. What has arrived is in `ledger`. The calls: `arrive`
per parameter, `finish_backward`, `begin_forward` of the next one; then `clip_norm`, `clip_value`; or `drop`.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from zero_offload.device import Device
from zero_offload.errors import ZeroOffloadError
from zero_offload.plan.layout import SectionLayout
from zero_offload.runtime.grads.device_keeper import DeviceGradKeeper
from zero_offload.runtime.grads.dtensors import local_grad
from zero_offload.runtime.grads.keeper import GradKeeper, plain, rests_on
from zero_offload.runtime.grads.ledger import GradLedger, forget_zeros
from zero_offload.runtime.grads.partials import make_partials
from zero_offload.runtime.grads.reductions import Reductions
from zero_offload.runtime.grads.sections import SectionGrads
from zero_offload.runtime.ranks.collectives import Collectives
from zero_offload.runtime.residency import Residency
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.shards.device_grad_shard import DeviceGradShard
from zero_offload.shards.grad_shard import GradShard
from zero_offload.shards.store import ShardStore
from zero_offload.telemetry.spans import Lane


class GradReducer:
    """Takes gradients off autograd's hands."""

    def __init__(
        self,
        units: Sequence[Unit],
        store: ShardStore,
        residency: Residency,
        collectives: Collectives,
        device: Device,
    ) -> None:
        self._device = device
        self._units = units
        self._partials = make_partials(device, store.arena, residency.pool.attach)
        self._reductions = Reductions(collectives, self._partials.here, self._reduced)
        self._residency = residency
        self._collectives = collectives
        self._store = store
        self._spans = store.counters.spans
        self.keeper = self._new_keeper()
        # Weak: the keeper knows what leaves, and a cycle would outlive a dropped model.
        residency.pool.flush_grads = partial(_settle, weakref.ref(self.keeper))
        self.ledger = GradLedger(units, self._new_shard, collectives, self.keeper)
        self.passing = store.grad_ring is not None
        """Whether gradients are used by the backward that makes them, unless it defers."""
        self.defers = collectives.partition.defers_reduction and not self.passing
        """Whether backward only adds up on this rank; what it leaves is reduced by `reduce_waiting`."""
        self._deferred = False
        self.coming: Mapping[int, Sized] = {}
        """What this backward has still to bring, by the numbers of `arrive_together`; empty where nobody knows."""

    def grow(self, added: Sequence[Unit]) -> None:
        """The list of units has become longer by `added`."""
        self.keeper.grow()
        self.ledger.grow(added, self._new_shard)

    def _new_keeper(self) -> GradKeeper:
        index = self._collectives.shard_index
        if self._device.is_host:
            return GradKeeper(self._store, index)
        return DeviceGradKeeper(self._device, self._store, self._units, self._collectives.partition, index)

    def _new_shard(self, section: Section, layout: SectionLayout) -> GradShard:
        index = self._collectives.shard_index if layout.num_shards > 1 else 0
        if rests_on(self._device, section):
            return DeviceGradShard(self._store, layout, self._device, index)
        return GradShard(self._store, layout, section.shard.placement.grads, self._residency.pool.attach, index)

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
        grads.unit.wait_for_update()
        opened = self._spans.open(Lane.GRADS, grads.unit.name)
        takes_turns = self.reduces and bool(self.coming)
        if self._collectives.world_size == 1:
            self.keeper.keep(grads, index, grad, adds=index in grads.holding)
        elif self.defers:
            self.keeper.keep(grads, index, grad, adds=index in grads.waiting)
            grads.waiting.add(index)
            self._deferred = True
        else:
            self._open_partial(grads)
            self._partials.put(grads, index, plain(grad))
            self._deferred |= takes_turns  # on all ranks, though one alone may have something to leave for the end
        self._spans.close(opened)
        grads.arrived.add(index)
        grads.holding.add(index)
        self.ledger.zeroed.discard(param)
        if self._spans.on:
            self._spans.backward.made(grads.unit.name)
        # Of micro-batches that take turns, `finish_section` knows which is the last.
        if len(grads.arrived) == grads.num_expected and not takes_turns:
            self._complete(grads)

    def finish_backward(self) -> None:
        """Complete what parameters without a gradient left open."""
        for grads in self.ledger.sections:
            if grads.arrived or grads.awaits_more:
                self._complete(grads)
        self._reductions.finish()
        self.keeper.end_backward()
        if not self.defers:
            self.reduce_waiting()

    def begin_forward(self) -> None:
        """Memory that the last backward's gradients still leave is there for parameters."""
        self.keeper.settle()

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Backwards inside leave what they add up on this rank to be reduced by a later one."""
        before, self.defers = self.defers, True
        try:
            yield
        finally:
            self.defers = before

    @property
    def reduces(self) -> bool:
        """Whether a backward's gradients are added up over ranks at its end, and not later."""
        return self._collectives.world_size > 1 and not self.defers

    def arrive_together(self, param: nn.Parameter) -> int:
        """A number that is the same for parameters whose gradients must be of the same micro-batches: a reduction is of
        a whole section."""
        return id(self.ledger.place(param)[0] if self.reduces else param)

    def begin_section(self, param: nn.Parameter) -> None:
        """One micro-batch comes to this parameter's section, and may have gradients for it: what has pages follows
        these calls, which are the same on all ranks."""
        if self.reduces:
            self._open_partial(self.ledger.place(param)[0])

    def finish_section(self, param: nn.Parameter) -> None:
        """What one micro-batch adds to this parameter's section is here, if it adds anything.

        After the last one the section is reduced on all ranks: what one has no gradient of, another may have.
        """
        if not self.reduces:
            return
        grads, self._deferred = self.ledger.place(param)[0], True
        if grads.aside or grads.waiting & grads.arrived:
            # Before those of other micro-batches, as in a loop.
            grads.joined = (grads.joined or set()) | grads.waiting
            self._add_waiting(grads)
        if not self._awaits_more(grads):
            self._complete(grads, of_one=False)

    def reduce_waiting(self) -> None:
        """Reduce what earlier backwards have left on each rank. Collective; the same sections on every rank."""
        # What one rank has not, another may have.
        if not self._deferred and not self._collectives.partition.any_branches:
            return
        self._deferred = False
        sections = self.ledger.sections
        left = [grads.waiting if grads.joined is None else grads.joined for grads in sections]
        flags = [
            index in each for grads, each in zip(sections, left, strict=True) for index in range(len(grads.params))
        ]
        found = iter(self._collectives.any_rank(flags))
        for grads in sections:
            anywhere = {index for index in range(len(grads.params)) if next(found)}
            grads.holding |= anywhere
            if grads.joined is not None:  # on all ranks: these gradients have crossed with others
                grads.joined, grads.whole = None, True
                forget_zeros(grads)
            elif anywhere:
                self._open_partial(grads)
                self._partials.widen(grads)
                self._complete(grads)
        self._reductions.finish()

    def squares(self, params: Collection[nn.Parameter]) -> float:
        """The sum of squares of these gradients, as the next update would use them. Collective."""
        self.reduce_waiting()
        return self.ledger.squares(params)[0]

    def clip_value(self, params: Collection[nn.Parameter], clip_value: float) -> None:
        """Clip elements where they rest, as torch.nn.utils.clip_grad_value_ would. Collective."""
        self.reduce_waiting()
        for grads in self.ledger.sections:
            if grads.holding:
                # Other parameters of the section may have had a step, whose update reads it still.
                grads.unit.wait_for_update()
        self.ledger.clamp(clip_value, params)

    def _open_partial(self, grads: SectionGrads) -> None:
        """This rank's sum of a section is there to be filled, and nobody else's to read."""
        if grads.is_gathered:
            if not self._reductions.has(grads):
                return
            self._reductions.finish()
        if not self._partials.has_room(grads):
            self._reductions.finish_oldest()
        if not self._partials.has_room(grads):
            self._set_aside()
        self._partials.open(grads)

    def _set_aside(self) -> None:
        """The oldest sum that lacks some, which other micro-batches or parameters that get none leave out, waits for
        them as those of earlier backwards do."""
        open_ = (each for each in self._partials.attached if not self._reductions.has(each))
        # An update inside of backward takes whole sections.
        chosen = (each for each in open_ if not self.passing or self._awaits_more(each))
        if (grads := next(chosen, None)) is None:
            return
        partial = self._partials.here(grads)
        self._deferred = True
        self.keeper.begin_waiting(grads)
        grads.aside = True
        for index in sorted(grads.arrived):
            piece = grads.layout.params[index]
            grad = partial[piece.begin : piece.end].clone()
            self.keeper.keep(grads, index, grad, adds=index in grads.waiting)
            grads.waiting.add(index)
        grads.arrived.clear()
        grads.joined = None  # what had joined this sum waits again with the rest
        self._partials.drop(grads)
        self.keeper.end(grads)

    def _complete(self, grads: SectionGrads, *, of_one: bool = True) -> None:
        """All of this backward's gradients of a section are here; `of_one` micro-batch, whose ranks have the same."""
        if grads.is_gathered:
            if self._deferred:
                # Some ranks add sums of earlier backwards, which are fp32; all send what one of them sends.
                self._partials.widen(grads)
            wide = ", in fp32" if self._partials.is_wide(grads) else ""
            self._collectives.agreement.same(f"the reduction of gradients of {_describe(grads, of_one)}{wide}")
            taken = grads.arrived | grads.waiting
            if self._deferred and self.passing:  # its update follows at once
                flags = [index in taken for index in range(len(grads.params))]
                grads.holding |= {index for index, any_ in enumerate(self._collectives.any_rank(flags)) if any_}
            elif self._deferred:
                grads.joined = (grads.joined or set()) | taken
            self._add_waiting(grads)
            self._partials.fill(grads)
            grads.arrived.clear()
            self._reductions.add(grads)
            return
        grads.arrived.clear()
        grads.awaits_more = self._awaits_more(grads)
        if grads.awaits_more:
            return  # what comes adds to them where they lie
        grads.whole = True
        self.keeper.end(grads)

    def _is_coming(self, param: nn.Parameter) -> bool:
        """Whether other micro-batches add to this gradient, or to one that is reduced with it."""
        return bool(self.coming) and bool(self.coming.get(self.arrive_together(param)))

    def _awaits_more(self, grads: SectionGrads) -> bool:
        return any(map(self._is_coming, grads.params))

    def _reduced(self, grads: SectionGrads, shard: torch.Tensor) -> None:
        """A section's reduction is over: `shard`, (shard_numel,) fp32 on the device, ours, goes to rest."""
        # The gradients may be another rank's alone: then this rank has not waited for the last step's update of them.
        grads.unit.wait_for_update()
        self.keeper.keep_reduced(grads, shard)
        self._partials.drop(grads)
        grads.whole = grads.joined is None
        if grads.whole and not grads.holding:
            self.keeper.land(grads)
            forget_zeros(grads)

    def _add_waiting(self, grads: SectionGrads) -> None:
        """Add this rank's own sums of earlier backwards, and of what was set aside, to the partial one."""
        local = grads.local
        if local is None or not (grads.waiting or grads.aside):
            return
        self.keeper.land(grads)
        if grads.aside:
            local.open()  # on all ranks
        self._partials.widen(grads)  # likewise
        if grads.waiting:
            self._partials.add_local(grads, local)
        grads.arrived |= grads.waiting
        grads.waiting.clear()
        local.held = grads.aside = False
        local.drop()
        local.close()

    def drop(self) -> bool:
        """Forget all gradients, those of a backward that broke off included; says whether there were any."""
        self._reductions.drop()
        self.keeper.drop()
        for grads in self.ledger.sections:
            grads.arrived.clear()
            grads.awaits_more, grads.aside, grads.joined = False, False, None
            self._partials.drop(grads)
        self._deferred = False
        return self.ledger.drop()


def _settle(keeper: weakref.ref[GradKeeper]) -> bool:
    found = keeper()
    return found is not None and found.settle()


def _describe(grads: SectionGrads, of_one: bool) -> str:
    """What is reduced. Ranks must agree too in which parameters have a gradient, if not all."""
    some = of_one and 0 < len(grads.arrived) < len(grads.layout.params)
    names = [grads.layout.params[index].spec.name for index in sorted(grads.arrived)]
    return f"{grads.unit.name}{', of ' + ', '.join(names) if some else ''}"
