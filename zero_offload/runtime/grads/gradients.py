"""Gradients of one model from backward to their update.

`Gradients` owns their way from autograd to where they rest, and their reduction over ranks. One rank: a gradient goes
to its section's store, on a GPU when the section is complete. Several ranks: a section's gradients are gathered
(`GradSection.partial`), reduced when all are there (`Reductions`), and this rank's part of the sum goes to the store.
The calls: `arrive` per parameter, `finish_backward`, then `begin_forward` of the next one. `clear` follows when a step
has taken them, `drop` where they are not wanted, and `reset` after a backward that broke off. `ledger` says what is
held, `norms` how large it is, and `GradAccess` lets the program look at it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.base.spans import Track
from zero_offload.hardware.device import Device
from zero_offload.hardware.probe import kernel_threads
from zero_offload.plan.memory import (
    GRADS_IN_FLIGHT,
)
from zero_offload.plan.tensor_parallel import is_dtensor, local_part
from zero_offload.runtime.grads.ledger import GradLedger
from zero_offload.runtime.grads.norms import GradNorms
from zero_offload.runtime.grads.reductions import Reductions
from zero_offload.runtime.grads.section import (
    GradSection,
    GradState,
    HostPartial,
    StagedPartial,
)
from zero_offload.runtime.grads.sections import GradSections
from zero_offload.runtime.prefetcher import MemoryPool
from zero_offload.runtime.ranks.collectives import Collectives
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.standins.grad_hooks import has_hooks
from zero_offload.standins.sliced_grad import GradSlices, WholeGrad
from zero_offload.storage.shards.grad_store import Gathered, GradMemory
from zero_offload.storage.shards.ring_grads import GradRing
from zero_offload.storage.shards.shard import Shard
from zero_offload.storage.shards.store import ShardStore


class Gradients:
    """The gradients of one model."""

    def __init__(
        self,
        units: Sequence[Unit],
        store: ShardStore,
        pool: MemoryPool,
        collectives: Collectives,
        device: Device,
        *,
        ring: GradRing | None,
        stay_in_memory: bool,
    ) -> None:
        """`ring`: with overlap="backward". `stay_in_memory`: a CPU computes, and nothing of the model leaves its
        memory."""
        self.device = device
        self._collectives = collectives
        self._spans = store.counters.spans
        self._drive_room = pool.drive_room
        self._downloads = self._drive_room.downloads
        self._memory = GradMemory(store, device, collectives.shard_index, self._downloads)
        self._made = GradSections(self._memory, pool, collectives, device, ring)
        self._reductions = Reductions(collectives, self._reduced)
        self._with_pages: list[GradSection] = []
        """Sections whose partial sum has pages, in the order in which they got them."""
        self.updates_in_backward = ring is not None
        """True if gradients are used by the backward that makes them, unless it defers."""
        self.defers_reduction = collectives.partition.defers_reduction and not self.updates_in_backward
        """True if backward only adds up on this rank; what it leaves is reduced by `reduce_waiting`."""
        self.has_deferred = False
        """True if earlier backwards have left sums on a rank, perhaps on another one."""
        self.expected: Mapping[int, Sized] = {}
        """Gradients that this backward has still to deliver, by the numbers of `arrive_together`; empty where they are
        unknown.
        """
        self.num_deferring = 0
        """How many `deferring_reduction` blocks the program is in."""
        self.updated: set[nn.Parameter] = set()
        """Parameters that a backward has updated (overlap="backward"), until their optimizer's step."""
        self.ledger = GradLedger(device, is_alone=collectives.world_size == 1)
        self.norms = GradNorms(
            self.ledger, collectives, device, self._downloads, updates_in_backward=self.updates_in_backward
        )
        self.grow(units, stay_in_memory=stay_in_memory)

    def grow(self, added: Sequence[Unit], *, stay_in_memory: bool) -> None:
        """Hold gradients of these too."""
        self._memory.keeps_small = stay_in_memory
        for unit in added:
            self.ledger.add([self._made.section(unit, section) for section in unit.sections], unit.placed_params)
        self._made.resize_staging(self.ledger.sections)

    def thaw(self, unit: Unit, section: Section) -> None:
        """Hold gradients of a section that had none."""
        self.ledger.add([self._made.section(unit, section)], unit.placed_params)
        self._made.resize_staging(self.ledger.sections)

    def freeze(self, section: Section) -> None:
        """Hold none of a section whose parameters are frozen again."""
        self._drop_room(self.ledger.freeze(section))
        self._made.resize_staging(self.ledger.sections)

    def lay_out(self, empty: Sequence[Shard]) -> None:
        """Sections have other layouts. Those of `empty` have no parameter any more, and no gradient."""
        gone = {shard.layout.index for shard in empty}
        for section in self.ledger.sections:
            if section.layout.index in gone:
                self._drop_room(section)
        self.ledger.lay_out(gone)
        self._made.resize_staging(self.ledger.sections)

    def rest(self, param: nn.Parameter) -> None:
        """No gradient of the section of `param` is held, and none will come for long."""
        self._drop_room(self.ledger.place(param)[0])

    def _drop_room(self, section: GradSection) -> None:
        section.store.drop_room()
        if section.local is not None:
            section.local.drop_room()

    # Backward

    def receive_slices(self, param: nn.Parameter, like: torch.Tensor, *, accumulates: bool) -> WholeGrad | GradSlices:
        """Takes a gradient of `param` that backward makes slice by slice, each of the shape of `like`, (1, ...).

        It is for autograd. Slices leave a GPU one by one if autograd only `accumulates` it, and the program has no hook
        that sees it."""
        section, index = self.ledger.place(param)
        downloads = self._downloads if accumulates and self._made.in_slices(section) else None
        if section.fresh is None or downloads is None or has_hooks(param):
            return WholeGrad(param.shape[0], like)
        if self.reduces_in_backward and isinstance(section.partial, StagedPartial):
            section.partial.free_slices(index)
        else:
            section.fresh.free_slices(index)
        return GradSlices(param.shape[0], like, downloads)

    def are_elsewhere(self, unit: Unit, *, here: bool) -> bool:
        """True if this backward makes gradients of the unit on other ranks, and none `here`. Collective, and asked only
        where it reduces those of one micro-batch: then all ranks must have the same."""
        if not self.reduces_in_backward or self.expected:
            return False
        what = f"gradients of {unit.name}, which one rank has or more"
        return self._collectives.agreement.least(0 if here else 1, what) == 0 and not here

    def arrive(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        """Autograd has accumulated a gradient. Parameters may be asked about, even those at rest."""
        section, index = self.ledger.places[id(param)]
        if not section.arrived:
            section.begin()
            if section.factors:
                self.ledger.read_factors()
        if type(grad) is not torch.Tensor:
            grad = _local_grad(param, grad)
        if grad.layout is not torch.strided or self.ledger.loss_scale != 1.0:
            self._refuse(section, index, grad)
        if grad.requires_grad or grad.is_neg():
            grad = _plain(grad)
        if section.unit.update is not None:
            section.unit.wait_for_update()  # it may still read the last step's gradients
        opened = self._spans.open(Track.GRADS, section.store.unit)
        takes_turns = bool(self.expected) and self.reduces_in_backward
        if self._collectives.world_size == 1:
            section.unreduced.add(index, grad, adds=index in section.holding)
        elif self.defers_reduction:
            section.unreduced.add(index, grad, adds=index in section.waiting)
            section.waiting.add(index)
            self.has_deferred = True
        else:
            self._begin_partial(section)
            section.partial.put(index, grad, again=index in section.arrived)
            self.has_deferred |= takes_turns  # on all ranks, though one alone may have something to leave for the end
        if opened is not None:
            self._spans.close(opened)
        section.arrived.add(index)  # here, not by a call: this runs for each gradient
        section.holding.add(index)
        self.ledger.zeroed.discard(param)
        if self._spans.on:
            self._spans.backward.made(section.store.unit)
        # Of micro-batches that take turns, `finish_section` knows which is the last.
        if len(section.arrived) == section.num_expected and not takes_turns:
            self._complete(section)

    def _refuse(self, section: GradSection, index: int, grad: torch.Tensor) -> None:
        """Raise for a gradient that cannot be taken."""
        if grad.layout is not torch.strided:
            raise ZeroOffloadError(
                f"the gradient of {section.layout.params[index].spec.name} is sparse; "
                "build the embedding with sparse=False"
            )
        raise ZeroOffloadError(
            "a backward adds to gradients that a scaler has unscaled and no step has used. Unscale once, after the "
            "last backward of a step, or drop them with optimizer.zero_grad(). Where no optimizer has the parameter, "
            "param.grad = None drops its gradient"
        )

    def finish_backward(self) -> None:
        """Complete what parameters without a gradient left open."""
        for section in self.ledger.sections:
            if section.state is GradState.ARRIVING:
                self._complete(section)
            if section.exposed:
                section.land()
                section.follow_exposed()
        if self._collectives.world_size > 1:
            self._reductions.finish()
        if self._downloads is not None:
            for section in self.ledger.sections:
                section.unreduced.complete()
            self._downloads.drop_untaken()
        self.norms.clear()
        if not self.defers_reduction:
            self.reduce_waiting()
            self.norms.know()
        elif self._collectives.world_size > 1:
            self.has_deferred = True  # another rank may have what this one has not

    def begin_forward(self) -> None:
        """Memory that the last backward's gradients still leave is there for parameters."""
        self.ledger.save_changed()
        self._memory.num_threads = kernel_threads()
        self._drive_room.detach_pages()

    @contextmanager
    def deferring_reduction(self) -> Iterator[None]:
        """Backwards inside leave what they add up on this rank to be reduced by a later one."""
        before, self.defers_reduction = self.defers_reduction, True
        self.num_deferring += 1
        try:
            yield
        finally:
            self.num_deferring -= 1
            assert self.num_deferring >= 0
            self.defers_reduction = before

    @property
    def num_ranks(self) -> int:
        """How many add up their gradients."""
        return self._collectives.world_size

    @property
    def reduces_in_backward(self) -> bool:
        """True if a backward's gradients are added up over ranks at its end, and not later."""
        return self._collectives.world_size > 1 and not self.defers_reduction

    def arrive_together(self, param: nn.Parameter) -> int:
        """A number that is the same for parameters whose gradients must be of the same micro-batches: a reduction is of
        a whole section."""
        return id(self.ledger.place(param)[0] if self.reduces_in_backward else param)

    def begin_section(self, param: nn.Parameter) -> None:
        """One micro-batch comes to this parameter's section, and may have gradients for it. Memory with pages is taken
        in the order of these calls, which is the same on all ranks.
        """
        if self.reduces_in_backward:
            self._begin_partial(self.ledger.place(param)[0])

    def finish_section(self, param: nn.Parameter) -> None:
        """One micro-batch has added its gradients, if any, to this parameter's section.

        After the last one the section is reduced on all ranks: what one has no gradient of, another may have.
        """
        if not self.reduces_in_backward:
            return
        section, self.has_deferred = self.ledger.place(param)[0], True
        if section.aside or section.waiting & section.arrived:
            # Before those of other micro-batches, as in a loop.
            section.joined = (section.joined or set()) | section.waiting
            self._add_waiting(section)
        if not self._awaits_more(section):
            self._complete(section, of_one=False)

    def _complete(self, section: GradSection, *, of_one: bool = True) -> None:
        """All of this backward's gradients of a section are here; `of_one` micro-batch, whose ranks have the same."""
        if section.partial.has_begun:
            self._reduce(section, of_one)
            return
        if self.expected and self._awaits_more(section):
            section.end_micro_batch()
            return
        section.complete(defers=self.defers_reduction)
        section.unreduced.complete()

    def _is_expected(self, param: nn.Parameter) -> bool:
        """True if other micro-batches add to this gradient, or to another gradient that is reduced with it."""
        return bool(self.expected) and bool(self.expected.get(self.arrive_together(param)))

    def _awaits_more(self, section: GradSection) -> bool:
        return any(map(self._is_expected, section.params))

    @property
    def _may_wait(self) -> bool:
        """True if earlier backwards may have left something on a rank; this one may lack it."""
        return self.has_deferred or self._collectives.partition.any_branches

    def waiting(self) -> list[bool]:
        """For each parameter, section by section, whether earlier backwards have left something of it on this rank;
        empty where no rank has anything."""
        if not self._may_wait:
            return []
        left = [each.waiting if each.joined is None else each.joined for each in self.ledger.sections]
        return [
            index in each
            for section, each in zip(self.ledger.sections, left, strict=True)
            for index in range(len(section.params))
        ]

    def reduce_waiting(self, told: Sequence[bool] = ()) -> None:
        """Reduce what earlier backwards have left on each rank. Collective; the same sections on every rank.

        `told`: what is `waiting` on one rank or more, if ranks have told each other already.
        """
        if not self._may_wait:
            return
        found = iter(told or self._collectives.any_rank(self.waiting()))
        self.has_deferred = False
        self.norms.clear()
        for section in self.ledger.sections:
            anywhere = {index for index in range(len(section.params)) if next(found)}
            self.ledger.hold(section, anywhere)
            if section.joined is not None:  # on all ranks: these gradients have crossed with others
                section.agree()
                self._drop_zeros(section)
            elif anywhere:
                self._begin_partial(section)
                section.partial.widen()
                self._complete(section)
        self._reductions.finish()

    def _begin_partial(self, section: GradSection) -> None:
        """This rank's sum of a section may be filled: no collective reads it."""
        if section.partial.has_begun:
            if not self._reductions.has(section):
                return
            self._reductions.finish()
        if section.partial.takes_pages:
            if len(self._with_pages) >= GRADS_IN_FLIGHT:
                self._reductions.finish_oldest()
            if len(self._with_pages) >= GRADS_IN_FLIGHT:
                self._set_aside()
        section.partial.begin()
        if section.partial.takes_pages:
            self._with_pages.append(section)

    def _drop_partial(self, section: GradSection) -> None:
        section.partial.drop()
        self._with_pages = [each for each in self._with_pages if each is not section]

    def _set_aside(self) -> None:
        """The oldest sum that lacks some, which other micro-batches or parameters that get none leave out, waits for
        them as those of earlier backwards do."""
        open_ = (each for each in self._with_pages if not self._reductions.has(each))
        # An update inside of backward takes whole sections.
        chosen = (each for each in open_ if not self.updates_in_backward or self._awaits_more(each))
        if (section := next(chosen, None)) is None:
            return
        assert isinstance(section.partial, HostPartial)
        gathered, local = section.partial.here(), section.local
        assert local is not None
        self.has_deferred = True
        local.take_pages()
        for index in sorted(section.arrived):
            piece = section.layout.params[index]
            grad = gathered[piece.begin : piece.end].clone()
            local.add(index, grad, adds=index in section.waiting)
        section.set_aside()
        self._drop_partial(section)
        local.complete()

    def _reduce(self, section: GradSection, of_one: bool) -> None:
        """Launch the reduction of what was gathered."""
        if self.has_deferred:
            # Some ranks add sums of earlier backwards, which are fp32; all send what one of them sends.
            section.partial.widen()
        wide = ", in fp32" if section.partial.is_wide else ""
        self._collectives.agreement.announce(f"the reduction of gradients of {_describe(section, of_one)}{wide}")
        taken = section.arrived | section.waiting
        if self.has_deferred and self.updates_in_backward:  # its update follows at once
            flags = [index in taken for index in range(len(section.params))]
            self.ledger.hold(section, {index for index, any_ in enumerate(self._collectives.any_rank(flags)) if any_})
        elif self.has_deferred:
            section.joined = (section.joined or set()) | taken
        self._add_waiting(section)
        section.partial.fill(section.arrived)
        section.reduce()
        self._reductions.add(section)

    def _reduced(self, section: GradSection, begin: int, shard: torch.Tensor) -> None:
        """A section's reduction is over, or a part of it: `shard`, which begins there of (shard_numel,) fp32 on the
        device, ours, goes to rest."""
        # The gradients may be another rank's alone. Then nothing has arrived here since the last step, whose update may
        # still read the store, or since these gradients were scaled.
        section.unit.wait_for_update()
        if section.factors:
            self.ledger.read_factors()
        store, downloads = section.store, self._downloads
        if downloads is not None and not store.on_device:
            downloads.make_room(shard.nbytes)
        if shard.numel() == section.layout.shard_numel:
            store.add_shard(Gathered(shard, 0, store.parts, frozenset(section.reduced)))
        else:
            store.add_part(begin, shard, frozenset(section.reduced))
        if downloads is not None:
            downloads.advance()
        if begin + shard.numel() < section.layout.shard_numel:
            return
        section.reduced_all(store.parts)
        self._drop_partial(section)
        if section.joined is None and not section.holding:
            section.land()
            self._drop_zeros(section)

    def _add_waiting(self, section: GradSection) -> None:
        """Add this rank's own sums of earlier backwards, and of what was set aside, to the partial one."""
        local = section.local
        if local is None or not (section.waiting or section.aside):
            return
        section.land()
        if section.aside:
            local.take_pages()  # on all ranks
        section.partial.widen()  # likewise
        if section.waiting:
            section.partial.add_local(local, section.waiting, section.arrived)
        section.join_waiting()
        local.drop()
        local.end_view()

    def clear(self, params: Iterable[nn.Parameter], *, by_program: bool = False) -> None:
        """A step has taken these parameters' gradients, or the program drops them: the next backward starts afresh."""
        params = list(params)
        if self.ledger.zeroed:
            self.ledger.zeroed.difference_update(params)
        for section, indices in self.ledger.by_section(params):
            if by_program:
                self.ledger.note_change("dropped", section, indices)
            self._remove(section, indices, GradState.EMPTY if by_program else GradState.TAKEN)
        self._end_removal()

    def end_exposed(self, params: Iterable[nn.Parameter]) -> None:
        """A step is about to take these parameters' gradients, of which the program may have some in hand."""
        if any(section.exposed for section in self.ledger.sections):
            for section, indices in self.ledger.by_section(params):
                section.end_exposed(indices, keeps=True)

    def drop(self, params: Collection[nn.Parameter] | None = None, *, to: GradState = GradState.EMPTY) -> bool:
        """Drop the gradients (of `params`; by default all). True if there were any. `to`: as `GradSection.remove`."""
        found = False
        self.ledger.zeroed.difference_update(list(self.ledger.zeroed) if params is None else params)
        for section, indices in self.ledger.chosen(params):
            found = found or bool(indices)
            self._remove(section, indices, to)
            if section.local is not None and not section.waiting:
                section.local.drop()
        self._end_removal()
        return found

    def reset(self) -> bool:
        """Drop all gradients, those of a backward that broke off included. True if there were any."""
        self._reductions.drop()
        self.cancel()
        self._drive_room.drop()
        for section in self.ledger.sections:
            section.reset()
            self._drop_partial(section)
        self.has_deferred = False
        self.ledger.reset()
        return self.drop()

    def cancel(self) -> None:
        """Nothing is on its way from a GPU when this returns: memory that copies use may go."""
        for section in self.ledger.sections:
            if section.fresh is not None:
                section.fresh.drop()
        if self._downloads is not None:
            self._downloads.drop()

    def _remove(self, section: GradSection, indices: Collection[int], to: GradState) -> None:
        """Hold these parameters' gradients no longer."""
        if not section.exposed.keys().isdisjoint(indices):
            section.unit.wait_for_update()  # of other parameters of the section, which reads the store
            section.end_exposed(indices, keeps=False)
        if section.fresh is not None and not section.holding.isdisjoint(indices):
            section.fresh.land()
        if not (gone := section.remove(indices, to)):
            return
        section.store.drop(gone)
        self._drop_zeros(section)

    def _drop_zeros(self, section: GradSection) -> None:
        """Drop what a reduction has made for a section without gradients: nothing is kept of it."""
        if not section.holding:
            section.store.drop()
            section.reduced.clear()

    def _end_removal(self) -> None:
        """Gradients are gone, maybe all of them."""
        if self.ledger.end_if_none():
            self.norms.clear()
        self.norms.end_total()


def _local_grad(param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient, plain, divided as its parameter is: sums that are due are made. Collective over
    a DTensor's mesh, whose ranks run the same operations in the same order."""
    if not is_dtensor(grad):
        return grad
    # Late: the import takes half a second, and a program that has a DTensor has made it.
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    whole: Any = grad
    dtensor: Any = param
    with torch.no_grad():
        part = local_part(whole.redistribute(placements=dtensor.placements))
        waited: torch.Tensor = part.wait() if isinstance(part, AsyncCollectiveTensor) else part
    return waited


def _plain(grad: torch.Tensor) -> torch.Tensor:
    """A gradient as its values lie in memory, part of no graph."""
    grad = grad.resolve_neg()  # a kernel sees memory, which has the other sign there
    return grad.detach() if grad.requires_grad else grad  # create_graph=True


def _describe(section: GradSection, of_one: bool) -> str:
    """The section's name for the reduction. Ranks must agree too in which parameters have a gradient, if not all."""
    some = of_one and 0 < len(section.arrived) < len(section.layout.params)
    names = [section.layout.params[index].spec.name for index in sorted(section.arrived)]
    return f"{section.unit.name}{', of ' + ', '.join(names) if some else ''}"


def check_closed(grads: Gradients, call: str) -> None:
    """Raise if a backward has updated parameters, and not every optimizer of theirs has been stepped."""
    if grads.updated:
        section, index = grads.ledger.place(next(iter(grads.updated)))
        raise ZeroOffloadError(
            f"{call} follows a backward that has updated {section.layout.params[index].spec.name} "
            "(overlap='backward'), and no step() of its optimizer. Call step() after each backward; to add up the "
            "gradients of several, run all but the last in 'with zo.no_sync(model):'"
        )


def check_not_updated(grads: Gradients, param: nn.Parameter, name: str) -> None:
    """Raise if a backward has used the gradient, and the step that it belongs to has not been made."""
    if param in grads.updated:
        raise ConfigError(
            f"the gradient of {name} is used up: with overlap='backward' backward has updated the parameter, and "
            "optimizer.step() closes the step. What looks at gradients before that (clipping, a loss scaler, a step "
            "that is left out by zero_grad()) needs overlap='forward'"
        )
