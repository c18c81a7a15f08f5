"""Gradients of one model from backward to their update.

`Gradients` owns what the current step holds, its reduction over ranks, its norm and its clipping. One rank: a gradient
goes to its section's store, on a GPU when the section is complete. Several ranks: a section's gradients are gathered
(`GradSection.partial`), reduced when all are there (`Reductions`), and this rank's part of the sum goes to the store.
The calls: `arrive` per parameter, `finish_backward`, `begin_forward` of the next one; then `all_finite`, `squares`,
`unscale`, `multiply`, `clamp`, and what handles of `.grad` ask; `clear` when a step has taken them; `drop` where they
are not wanted, `reset` after a backward that broke off.

[Note: factors]
Clipping by norm moves no gradient: each gets a factor that the update multiplies by. Some code must see the product
before: a gradient added to it, clipping by value, a look at `.grad`. It multiplies where the gradient rests, and the
factor ends.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.base.spans import Lane
from zero_offload.base.types import Tier, whole_sectors
from zero_offload.hardware.device import Device
from zero_offload.hardware.probe import kernel_threads
from zero_offload.plan.layout import SectionLayout
from zero_offload.plan.memory import (
    GRADS_IN_FLIGHT,
    REDUCED_PIECE_BYTES,
    grad_staging_bytes,
    reduced_grad_bytes,
    sliced_grad_bytes,
    staged_grad_bytes,
)
from zero_offload.plan.model_spec import Experts
from zero_offload.plan.tensor_parallel import is_dtensor, local_part
from zero_offload.runtime.grads.reductions import Reductions
from zero_offload.runtime.grads.section import (
    DevicePartial,
    Factor,
    FreshGrads,
    GradSection,
    HostPartial,
    StagedPartial,
)
from zero_offload.runtime.grads.sliced import GradSlices, WholeGrad
from zero_offload.runtime.prefetcher import ParamPrefetcher
from zero_offload.runtime.ranks.collectives import Collectives
from zero_offload.runtime.units.guard import has_hooks
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.storage.shards.device_grads import DeviceGrads
from zero_offload.storage.shards.drive_grads import DriveGrads
from zero_offload.storage.shards.grad_store import Gathered, GradMemory, GradStore, HostGrads
from zero_offload.storage.shards.ring_grads import GradRing, RingDriveGrads, RingGrads
from zero_offload.storage.shards.store import ShardStore


@dataclass
class Norms:
    """Norms of one order of all gradients held, without factors and loss scale, by the parameter's id."""

    of: dict[int, float]
    at: dict[int, int]
    """Their places in `rows`."""
    rows: torch.Tensor | None = None
    """(norms,) fp32 on the compute device, once a handle is asked."""
    stream: Any = None
    """The one on which `rows` was made."""


class Gradients:
    """The gradients of one model."""

    def __init__(
        self,
        units: Sequence[Unit],
        store: ShardStore,
        prefetcher: ParamPrefetcher,
        collectives: Collectives,
        device: Device,
        *,
        ring: GradRing | None,
        stay_in_memory: bool,
    ) -> None:
        """`ring`: with overlap="backward". `stay_in_memory`: a CPU computes, and nothing of the model leaves its
        memory."""
        self._device = device
        self._units = units
        self._collectives = collectives
        self._spans = store.counters.spans
        self._drive_room = prefetcher.pool.drive_room
        self._downloads = self._drive_room.downloads
        self._memory = GradMemory(store, device, collectives.shard_index, self._downloads)
        self._ring = ring
        self._attach = prefetcher.pool.attach
        self._reductions = Reductions(collectives, self._reduced)
        self._with_pages: list[GradSection] = []
        """Sections whose partial sum has pages, in the order in which they got them."""
        self.updates_in_backward = ring is not None
        """True if gradients are used by the backward that makes them, unless it defers."""
        self.defers = collectives.partition.defers_reduction and not self.updates_in_backward
        """True if backward only adds up on this rank; what it leaves is reduced by `reduce_waiting`."""
        self._deferred = False
        self.coming: Mapping[int, Sized] = {}
        """What this backward has still to deliver, by the numbers of `arrive_together`; empty where that is unknown."""
        self._norms: dict[float, Norms] = {}
        """By the order: of all gradients held. Known until one of them changes."""
        self._captured: Factor | None = None
        """The last factor in a device's memory; the next parameter mostly has the same."""
        self._changed: tuple[GradSection, set[int]] | None = None
        """A section in which these gradients were changed where they rest, and that has not left for its drive."""
        self._no_sync = 0
        """How many `deferring` blocks the program is in."""
        self.loss_scale = 1.0
        """What the gradients held now are multiplied by and the step divides out; it ends with them."""
        self._is_scaled = False
        """True if the program has scaled gradients held by their handles."""
        self._changes = 0
        """A word for what else the program has done to gradients that all ranks hold, in any order."""
        self.overflowed = False
        """True if a loss scaler has found that this step must not be taken; it ends with the gradients."""
        self.updated: set[nn.Parameter] = set()
        """Parameters that a backward has updated (overlap="backward"), until their optimizer's step."""
        self.zeroed: set[nn.Parameter] = set()
        """Parameters whose gradient the program has set to zeros, and that no backward has added to."""
        self.sections: list[GradSection] = []
        self._places: dict[int, tuple[GradSection, int]] = {}
        self.grow(units, stay_in_memory=stay_in_memory)

    def grow(self, added: Sequence[Unit], *, stay_in_memory: bool) -> None:
        """Hold gradients of `added`, which the list of units has already."""
        self._memory.keeps_small = stay_in_memory
        for unit in added:
            by_section = {id(section): self._new_section(unit, section) for section in unit.sections}
            for section, _, param in unit.placed_params:
                found = by_section[id(section)]
                self._places[id(param)] = (found, len(found.params))
                found.params.append(param)
            self.sections += [section for section in by_section.values() if section.layout.trainable]
        if self._downloads is not None:
            leaving = [section for section in self.sections if not self._rest_on_device(section.section)]
            self._downloads.resize(self._staging_bytes(leaving), [self._sent_bytes(each) for each in leaving])

    # Where they rest

    def _new_section(self, unit: Unit, section: Section) -> GradSection:
        store, local = self._new_store(section, section.layout, unit.name, self._ring, sums_up=True), None
        if self._collectives.world_size > 1:
            local = self._new_store(section, section.layout.whole(), unit.name, None, sums_up=False)
        downloads = self._downloads
        fresh = None if downloads is None else FreshGrads(local or store, self._device, downloads)
        return GradSection(unit, section, store, local, fresh, self._new_partial(section, unit.layout.experts))

    def _new_partial(self, section: Section, experts: Experts | None) -> HostPartial | DevicePartial | StagedPartial:
        layout, downloads = section.layout, self._downloads
        if self._device.is_host or downloads is None:
            return HostPartial(layout, self._memory.store.arena, self._attach)
        if experts is None or self._rest_on_device(section):
            return DevicePartial(layout, self._device)
        of_group = layout.numel // experts.num_experts * experts.size
        return StagedPartial(layout, self._device, downloads, min(of_group, REDUCED_PIECE_BYTES // 4))

    def _new_store(
        self, section: Section, layout: SectionLayout, unit: str, ring: GradRing | None, *, sums_up: bool
    ) -> GradStore:
        """`sums_up` where sums of squares of what rests there are wanted."""
        memory, tier = self._memory, section.shard.placement.grads
        if self._rest_on_device(section):
            return DeviceGrads(memory, layout, unit, sums_up=sums_up)
        if tier is Tier.NVME:
            if ring is not None:
                return RingDriveGrads(ring, self._drive_room, self._attach, memory, layout, unit, sums_up=sums_up)
            return DriveGrads(self._drive_room, self._attach, memory, layout, unit, sums_up=sums_up)
        if ring is not None:
            return RingGrads(ring, memory, layout, tier, unit, sums_up=sums_up)
        return HostGrads(memory, layout, tier, unit, sums_up=sums_up)

    def _rest_on_device(self, section: Section) -> bool:
        return section.shard.placement.grads is Tier.DEVICE and not self._device.is_host

    def _staging_bytes(self, leaving: Sequence[GradSection]) -> int:
        """Staging for these sections."""
        whole, sliced, partition = list[int](), dict[int, int](), self._collectives.partition
        for section in leaving:
            if self._in_slices(section):
                sizes = (
                    whole_sectors(sliced_grad_bytes(numel, numel * section.layout.dtype.itemsize, partition))
                    for numel in (each.spec.numel for each in section.layout.params)
                )
                sliced[section.unit.index] = sliced.get(section.unit.index, 0) + sum(sizes)
                whole.append(reduced_grad_bytes(section.layout.numel, partition))
            else:
                whole.append(self._staged_bytes(section.layout))
        return grad_staging_bytes(whole, sliced.values())

    def _staged_bytes(self, section: SectionLayout) -> int:
        """What a section's gradients take of staging on their way from a GPU."""
        return staged_grad_bytes(section.numel, section.nbytes, self._collectives.partition)

    def _sent_bytes(self, section: GradSection) -> int:
        """What they take of the GPU meanwhile."""
        experts = section.unit.layout.experts
        if experts is None or not self._in_slices(section):
            return self._staged_bytes(section.layout)
        return section.layout.nbytes // experts.num_experts * experts.size

    def _in_slices(self, section: GradSection) -> bool:
        """True if gradients leave a GPU before they are whole: experts', which rest elsewhere."""
        return isinstance(section.partial, StagedPartial)

    # Backward

    def begin(self, param: nn.Parameter, like: torch.Tensor, *, accumulates: bool) -> WholeGrad | GradSlices:
        """Takes a gradient of `param` that backward makes slice by slice, each of the shape of `like`, (1, ...).

        It is for autograd. Slices leave a GPU one by one if autograd only `accumulates` it, and the program has no hook
        that sees it."""
        section, index = self.place(param)
        downloads = self._downloads if accumulates and self._in_slices(section) else None
        if section.fresh is None or downloads is None or has_hooks(param):
            return WholeGrad(param.shape[0], like)
        if self.reduces and isinstance(section.partial, StagedPartial):
            section.partial.free_slices(index)
        else:
            section.fresh.free_slices(index)
        return GradSlices(param.shape[0], like, downloads)

    def are_elsewhere(self, unit: Unit, *, here: bool) -> bool:
        """True if this backward makes gradients of the unit on other ranks, and none `here`. Collective, and asked only
        where it reduces those of one micro-batch: then all ranks must have the same."""
        if not self.reduces or self.coming:
            return False
        what = f"gradients of {unit.name}, which one rank has or more"
        return self._collectives.agreement.least(0 if here else 1, what) == 0 and not here

    def arrive(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        """Autograd has accumulated a gradient. Parameters may be asked about, even those at rest."""
        section, index = self._places[id(param)]
        if not section.arrived:
            section.num_expected = sum(each.requires_grad for each in section.params)
            if section.factors:
                self._read_factors()
        if type(grad) is not torch.Tensor:
            grad = _local_grad(param, grad)
        if grad.layout is not torch.strided or self.loss_scale != 1.0:
            self._refuse(section, index, grad)
        if grad.requires_grad or grad.is_neg():
            grad = _plain(grad)
        if section.unit.update is not None:
            section.unit.wait_for_update()  # it may still read the last step's gradients
        opened = self._spans.open(Lane.GRADS, section.store.unit)
        takes_turns = bool(self.coming) and self.reduces
        if self._collectives.world_size == 1:
            section.entry.add(index, grad, adds=index in section.holding)
        elif self.defers:
            section.entry.add(index, grad, adds=index in section.waiting)
            section.waiting.add(index)
            self._deferred = True
        else:
            self._open_partial(section)
            section.partial.put(index, grad, again=index in section.arrived)
            self._deferred |= takes_turns  # on all ranks, though one alone may have something to leave for the end
        if opened is not None:
            self._spans.close(opened)
        section.arrived.add(index)
        section.holding.add(index)
        self.zeroed.discard(param)
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
            "a backward adds to gradients that a scaler has unscaled and no step has used; unscale once, after the "
            "last backward of a step, or drop them with optimizer.zero_grad(), or where no optimizer has the "
            "parameter with param.grad = None"
        )

    def finish_backward(self) -> None:
        """Complete what parameters without a gradient left open."""
        for section in self.sections:
            if section.arrived or section.awaits_more:
                self._complete(section)
        if self._collectives.world_size > 1:
            self._reductions.finish()
        if self._downloads is not None:
            for section in self.sections:
                section.entry.flush()
            self._downloads.close_open()
        self._norms.clear()
        if not self.defers:
            self.reduce_waiting()
            self._know_norms()
        elif self._collectives.world_size > 1:
            self._deferred = True  # another rank may have what this one has not

    def begin_forward(self) -> None:
        """Memory that the last backward's gradients still leave is there for parameters."""
        self._save_changed()
        self._memory.num_threads = kernel_threads()
        self._drive_room.detach_pages()

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Backwards inside leave what they add up on this rank to be reduced by a later one."""
        before, self.defers = self.defers, True
        self._no_sync += 1
        try:
            yield
        finally:
            self._no_sync -= 1
            self.defers = before

    @property
    def num_ranks(self) -> int:
        """How many add up their gradients."""
        return self._collectives.world_size

    @property
    def reduces(self) -> bool:
        """True if a backward's gradients are added up over ranks at its end, and not later."""
        return self._collectives.world_size > 1 and not self.defers

    def arrive_together(self, param: nn.Parameter) -> int:
        """A number that is the same for parameters whose gradients must be of the same micro-batches: a reduction is of
        a whole section."""
        return id(self.place(param)[0] if self.reduces else param)

    def begin_section(self, param: nn.Parameter) -> None:
        """One micro-batch comes to this parameter's section, and may have gradients for it. What has pages follows
        these calls, which are the same on all ranks."""
        if self.reduces:
            self._open_partial(self.place(param)[0])

    def finish_section(self, param: nn.Parameter) -> None:
        """What one micro-batch adds to this parameter's section is here, if it adds anything.

        After the last one the section is reduced on all ranks: what one has no gradient of, another may have.
        """
        if not self.reduces:
            return
        section, self._deferred = self.place(param)[0], True
        if section.aside or section.waiting & section.arrived:
            # Before those of other micro-batches, as in a loop.
            section.joined = (section.joined or set()) | section.waiting
            self._add_waiting(section)
        if not self._awaits_more(section):
            self._complete(section, of_one=False)

    def _complete(self, section: GradSection, *, of_one: bool = True) -> None:
        """All of this backward's gradients of a section are here; `of_one` micro-batch, whose ranks have the same."""
        if section.partial.is_open:
            self._reduce(section, of_one)
            return
        section.arrived.clear()
        section.awaits_more = bool(self.coming) and self._awaits_more(section)
        if section.awaits_more:
            return  # what comes adds to them where they lie
        section.whole = True
        section.entry.flush()

    def _is_coming(self, param: nn.Parameter) -> bool:
        """True if other micro-batches add to this gradient, or to one that is reduced with it."""
        return bool(self.coming) and bool(self.coming.get(self.arrive_together(param)))

    def _awaits_more(self, section: GradSection) -> bool:
        return any(map(self._is_coming, section.params))

    # Reduction over ranks

    def reduce_waiting(self) -> None:
        """Reduce what earlier backwards have left on each rank. Collective; the same sections on every rank."""
        # What one rank has not, another may have.
        if not self._deferred and not self._collectives.partition.any_branches:
            return
        self._deferred = False
        self._norms.clear()
        left = [each.waiting if each.joined is None else each.joined for each in self.sections]
        flags = [
            index in each
            for section, each in zip(self.sections, left, strict=True)
            for index in range(len(section.params))
        ]
        found = iter(self._collectives.any_rank(flags))
        for section in self.sections:
            anywhere = {index for index in range(len(section.params)) if next(found)}
            self._hold(section, anywhere)
            if section.joined is not None:  # on all ranks: these gradients have crossed with others
                section.joined, section.whole = None, True
                self._drop_zeros(section)
            elif anywhere:
                self._open_partial(section)
                section.partial.widen()
                self._complete(section)
        self._reductions.finish()

    def _hold(self, section: GradSection, indices: set[int]) -> None:
        """Some rank has a gradient of these parameters, so all ranks hold one."""
        section.holding |= indices
        self.zeroed.difference_update(section.params[index] for index in indices)

    def _open_partial(self, section: GradSection) -> None:
        """This rank's sum of a section may be filled: no collective reads it."""
        if section.partial.is_open:
            if not self._reductions.has(section):
                return
            self._reductions.finish()
        if section.partial.takes_pages:
            if len(self._with_pages) >= GRADS_IN_FLIGHT:
                self._reductions.finish_oldest()
            if len(self._with_pages) >= GRADS_IN_FLIGHT:
                self._set_aside()
        section.partial.open()
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
        self._deferred = True
        local.open_pages()
        section.aside = True
        for index in sorted(section.arrived):
            piece = section.layout.params[index]
            grad = gathered[piece.begin : piece.end].clone()
            local.add(index, grad, adds=index in section.waiting)
            section.waiting.add(index)
        section.arrived.clear()
        section.joined = None  # what had joined this sum waits again with the rest
        self._drop_partial(section)
        local.flush()

    def _reduce(self, section: GradSection, of_one: bool) -> None:
        """Launch the reduction of what was gathered."""
        if self._deferred:
            # Some ranks add sums of earlier backwards, which are fp32; all send what one of them sends.
            section.partial.widen()
        wide = ", in fp32" if section.partial.is_wide else ""
        self._collectives.agreement.same(f"the reduction of gradients of {_describe(section, of_one)}{wide}")
        taken = section.arrived | section.waiting
        if self._deferred and self.updates_in_backward:  # its update follows at once
            flags = [index in taken for index in range(len(section.params))]
            self._hold(section, {index for index, any_ in enumerate(self._collectives.any_rank(flags)) if any_})
        elif self._deferred:
            section.joined = (section.joined or set()) | taken
        self._add_waiting(section)
        section.partial.fill(section.arrived)
        section.arrived.clear()
        self._reductions.add(section)

    def _reduced(self, section: GradSection, begin: int, shard: torch.Tensor) -> None:
        """A section's reduction is over, or a part of it: `shard`, which begins there of (shard_numel,) fp32 on the
        device, ours, goes to rest."""
        # The gradients may be another rank's alone. Then nothing has arrived here since the last step, whose update may
        # still read the store, or since these gradients were scaled.
        section.unit.wait_for_update()
        if section.factors:
            self._read_factors()
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
        section.reduced.update(store.parts)
        self._drop_partial(section)
        section.whole = section.joined is None
        if section.whole and not section.holding:
            section.land()
            self._drop_zeros(section)

    def _add_waiting(self, section: GradSection) -> None:
        """Add this rank's own sums of earlier backwards, and of what was set aside, to the partial one."""
        local = section.local
        if local is None or not (section.waiting or section.aside):
            return
        section.land()
        if section.aside:
            local.open_pages()  # on all ranks
        section.partial.widen()  # likewise
        if section.waiting:
            section.partial.add_local(local, section.waiting, section.arrived)
        section.arrived |= section.waiting
        section.waiting.clear()
        section.aside = False
        local.drop()
        local.flush(())

    # What is held

    def place(self, param: nn.Parameter) -> tuple[GradSection, int]:
        """A parameter's section and its index there."""
        return self._places[id(param)]

    def held(self, param: nn.Parameter) -> bool:
        """True if a gradient waits for a step."""
        section, index = self._places[id(param)]
        return index in section.holding

    def any_held(self, params: Collection[nn.Parameter] | None) -> bool:
        """True if a gradient of `params` (None: of any parameter) waits for a step."""
        return any(indices for _, indices in self._chosen(params))

    def view(self, param: nn.Parameter) -> torch.Tensor | None:
        """The gradient itself, in the parameter's shape, where it rests on the compute device; else None."""
        section, index = self._places[id(param)]
        if section.store.tier is not Tier.DEVICE or self._collectives.world_size > 1 or is_dtensor(param):
            return None
        self._read_factors()
        section.exposed.add(index)
        return section.store.view(index, multiplied=True).view(section.layout.params[index].spec.shape)

    def read(self, params: Collection[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Copies of the gradients held of `params` as a step would use them, fp32, host; one rank only."""
        found = {}
        self._read_factors()
        for section, indices in self._chosen(params):
            brought = section.store.on_disk
            for index in indices:
                factor = section.store.factors.get(index, 1.0) / self.loss_scale
                copy = section.store.view(index).to("cpu", torch.float32, copy=True).mul_(factor)
                found[section.params[index]] = copy.view(section.layout.params[index].spec.shape)
            if indices:
                section.store.flush(() if brought else None)
        return found

    def _chosen(self, params: Collection[nn.Parameter] | None) -> Iterator[tuple[GradSection, list[int]]]:
        """Sections, each with those of `params` (None: of all) in it whose gradients are held."""
        wanted = None if params is None else set(map(id, params))
        self._save_changed()
        for section in self.sections:
            if section.fresh is not None:
                section.fresh.land()
            held = sorted(section.holding)
            yield section, [index for index in held if wanted is None or id(section.params[index]) in wanted]

    # Norm, loss scale and clipping

    def all_finite(self, params: Collection[nn.Parameter] | None) -> bool:
        """True if all gradients held of `params` (None: of all) are finite, on every rank. Collective."""
        self._read_factors()
        if (known := self._norms.get(2.0)) is None or not self._collectives.divides:
            return self._squares(params)[1]
        return all(
            math.isfinite(known.of[id(section.params[index])] * section.store.factors.get(index, 1.0))
            for section, indices in self._chosen(params)
            for index in indices
        )

    def squares(self, params: Collection[nn.Parameter]) -> float:
        """The sum of squares of these gradients, as the next update would use them. Collective."""
        self.reduce_waiting()
        return self._squares(params)[0]

    def _squares(self, params: Collection[nn.Parameter] | None) -> tuple[float, bool]:
        total, bad = 0.0, 0.0
        self._read_factors()
        self._complete_sums(self.sections)
        for section, indices in self._chosen(params):
            sums, factors = section.sums(indices), section.store.factors
            squares = math.fsum(
                (factors.get(index, 1.0) / self.loss_scale) ** 2 * each.sumsq
                for index, each in zip(indices, sums, strict=True)
            )
            # Tensor-parallel ranks that hold the same count it once between them.
            total += squares / section.layout.num_copies
            bad += sum(
                not (each.finite and math.isfinite(factors.get(index, 1.0)))
                for index, each in zip(indices, sums, strict=True)
            )
        total, bad = self._collectives.sum_over_shards([total, bad])
        return total, bad == 0

    def finite(self, units: Sequence[Sequence[GradSection]], params: Container[nn.Parameter]) -> list[bool]:
        """For each unit's sections, whether the gradients held of `params` are finite, on every rank. Collective."""
        for section in itertools.chain(*units):
            self._complete_sums([section])
        bad = [
            not all(
                each.finite
                for section in unit
                for each in section.sums(i for i in section.holding if section.params[i] in params)
            )
            for unit in units
        ]
        return [not each for each in self._collectives.any_rank(bad)]

    def non_finite(self, params: Collection[nn.Parameter] | None) -> list[str]:
        """Names of those of `params` whose gradient, or this rank's part of it, `all_finite` has found not to be."""
        return [
            section.layout.params[index].spec.name
            for section, indices in self._chosen(params)
            for index, each in zip(indices, section.sums(indices), strict=True)
            if not (each.finite and math.isfinite(section.store.factors.get(index, 1.0)))
        ]

    def _complete_sums(self, sections: Sequence[GradSection]) -> None:
        """Complete the sums of these, those on their way too, and sums that may have changed since."""
        self._save_changed()
        for section in sections:
            section.land()
            if section.exposed:  # the user may have changed it through `.grad`
                section.store.flush(section.exposed & section.holding)
        if self._downloads is not None and sections:
            self._downloads.sums.read([each.store.sums for each in sections], sections[0].store.unit)

    def unscale(self, loss_scale: float, overflowed: bool) -> bool:
        """Divide the loss scale out of all factors, once. True if the step must not be taken. Collective.

        `overflowed` is what this rank knows of gradients that are elsewhere.
        """
        finite = self.all_finite(None)
        (bad,) = self._collectives.any_rank([overflowed or not finite])
        if self.any_held(None):
            self.loss_scale = loss_scale
            self.overflowed |= bad
        return bad or self.overflowed

    def multiply(self, factor: float, params: Collection[nn.Parameter]) -> None:
        """Let the gradients held of `params` count `factor` times. See [Note: factors]."""
        for section, indices in self._chosen(params) if factor != 1.0 else ():
            for index in indices:
                section.store.factors[index] = section.store.factors.get(index, 1.0) * factor

    def clamp(self, params: Collection[nn.Parameter], low: float | None, high: float | None) -> None:
        """Clip the elements of the gradients held of `params` to [low, high], where they rest. None is no bound.
        Collective where a reduction waits."""
        self.reduce_waiting()
        self._read_factors()
        for section, indices in self._by_section(params):
            section.land()
            chosen = sorted(section.holding.intersection(indices))
            if not chosen:
                continue
            self._note_change(f"clamped to {low} and {high}", section, chosen)
            if self._changed is not None and self._changed[0] is not section:
                self._save_changed()
            # Other parameters of the section may have had a step, whose update reads it still.
            section.unit.wait_for_update()
            self._changed = self._changed or (section, set())
            self._changed[1].update(chosen)
            for index in chosen:
                power = _power_of_two(section.store.factors, index)
                view = section.store.view(index, multiplied=True)
                if power != 1.0:
                    section.store.factors[index] = power
                # What is still to be multiplied, as by the loss scale: bounds follow it, as far as the dtype goes.
                most, left = torch.finfo(view.dtype).max, power / self.loss_scale
                view.clamp_(
                    None if low is None else max(-most, low / left),
                    None if high is None else min(most, high / left),
                )
            self._norms.clear()

    def _save_changed(self) -> None:
        """Sum up what was changed where it rests, and let it leave for where it was."""
        if self._changed is not None:
            (section, indices), self._changed = self._changed, None
            section.store.flush(indices)

    # What handles of `.grad` ask

    def share(self, param: nn.Parameter) -> None:
        """Before `param` is asked for its gradient: reduce what earlier backwards have left. Collective where a
        reduction waits: then all ranks ask, or all raise."""
        if not self._deferred or self._collectives.world_size == 1 or _in_backward():
            return
        if self._no_sync:
            raise ZeroOffloadError(
                f"the gradient of {self.name_of(param)} is not reduced inside of zo.no_sync, where "
                "each rank has a part of its own. Read it on all ranks after the backward that follows the block; in "
                "accelerate's accumulate clip and look under 'if accelerator.sync_gradients:'"
            )
        self._collectives.agreement.same("a look at .grad, which reduces gradients: all ranks look, or none")
        self.reduce_waiting()
        self._know_norms()

    def life_of(self, param: nn.Parameter) -> object:
        """What is the same object until the gradient held of `param` ends."""
        section, index = self._places[id(param)]
        return section.lives.setdefault(index, object())

    def check_held(self, param: nn.Parameter, life: object) -> None:
        """Raise where this gradient is over, or is not complete."""
        section, index = self._places[id(param)]
        name = self.name_of(param)
        is_there = index in section.holding or param in self.zeroed
        if section.lives.get(index) is not life or not is_there:
            raise ZeroOffloadError(
                f"this gradient of {name} is over: a step has used it, or it was dropped. Read {name}.grad again"
            )
        if _in_backward():
            raise ZeroOffloadError(
                f"the gradient of {name} is not complete while backward runs. Read it after backward. A hook that "
                f"register_post_accumulate_grad_hook puts on {name} finds what its backward adds in .grad"
            )

    def name_of(self, param: nn.Parameter) -> str:
        section, index = self._places[id(param)]
        return section.layout.params[index].spec.name

    def refuse(self, param: nn.Parameter, what: str) -> ZeroOffloadError:
        """The error for `what`, which needs the elements of a gradient."""
        name, where = self.name_of(param), self.place(param)[0].section.shard.placement.grads.value
        return ZeroOffloadError(
            f"{what} needs the elements of the gradient of {name}, which rests on {where} until the optimizer's step. "
            "Its .grad answers norms, is scaled and clipped; zo.AdamW, zo.SGD, ... step with it. "
            f'A copy is read by \'with zo.gathered(model, kind="grads") as grads: grads["{name}"]\', on one rank'
        )

    def norm(self, param: nn.Parameter, order: float) -> torch.Tensor:
        """The norm of a gradient held, as the next update would use it; () fp32 on the compute device, not shared.

        Of order 2 it is known. The first of another order since a gradient has changed takes one pass over all
        gradients, where they rest, and is collective. So is that of order 2 where a GPU's ranks have sums under way.
        """
        if param in self.zeroed:
            return torch.zeros((), dtype=torch.float32, device=self._device.torch_device)
        section, index = self._places[id(param)]
        if order not in self._norms:
            if self._collectives.divides:
                self._collectives.agreement.same(f"a norm of order {order:g} of .grad: all ranks ask for it, or none")
            self._norms[order] = self._find_norms(order)
        found = self._norms[order]
        if found.rows is None:
            values = torch.tensor([*found.of.values()], dtype=torch.float64, device="cpu")
            found.rows, found.stream = values.to(self._device.torch_device, torch.float32), self._stream()
        self._use(found.rows, found.stream)
        factor = 1.0 if order == 0 else abs(section.store.factors.get(index, 1.0)) / self.loss_scale
        norm = found.rows[found.at[id(param)]] * factor
        for each in section.factors.get(index, ()) if order else ():
            self._use(each.value, each.stream)
            norm = norm * each.value.abs()
        return norm.float()

    def is_finite(self, param: nn.Parameter) -> bool:
        """True if a gradient held is finite, on every rank. Collective as `norm`."""
        if param in self.zeroed:
            return True
        self.norm(param, 2.0)
        section, index = self._places[id(param)]
        return math.isfinite(self._norms[2.0].of[id(param)] * section.store.factors.get(index, 1.0))

    def scale(self, param: nn.Parameter, factor: float | torch.Tensor, *, divides: bool = False) -> None:
        """Let a gradient held count `factor` times, or its inverse. A tensor, one element, in a device's memory, stays
        there until a step reads it. See [Note: factors]."""
        if param in self.zeroed:
            return
        section, index = self._places[id(param)]
        section.land()
        self._is_scaled = True
        if not self._device.is_host and isinstance(factor, torch.Tensor) and factor.device == self._device.torch_device:
            section.factors.setdefault(index, []).append(self._capture(factor, divides))
            return
        factor = float(factor)
        if divides:
            factor = 1.0 / factor if factor else math.copysign(math.inf, factor)
        section.store.factors[index] = section.store.factors.get(index, 1.0) * factor

    def _capture(self, factor: torch.Tensor, divides: bool) -> Factor:
        """The factor as it is now: the program may change the tensor."""
        version = object() if factor.is_inference() else factor._version  # tensors of inference mode count no changes
        last = self._captured
        if last is None or last.given is not factor or (last.version, last.divides) != (version, divides):
            value = factor.detach().reshape(()).to(torch.float64, copy=True)
            last = Factor(value.reciprocal_() if divides else value, self._stream(), factor, version, divides)
            self._captured = last
        return last

    def _stream(self) -> Any:
        return None if self._device.is_host else self._device.stream()

    def _use(self, tensor: torch.Tensor, stream: Any) -> None:
        """This thread's stream computes with a tensor of ours that was made on `stream`."""
        if stream != self._stream():
            self._device.join([stream])
            self._device.use_here(tensor)

    def _read_factors(self) -> None:
        """Bring factors in a device's memory to where the step finds them; one wait for all."""
        if self._captured is None:
            return
        self._captured = None
        scaled = [(section, index, each) for section in self.sections for index, each in section.factors.items()]
        factors = {id(factor): factor.value for _, _, each in scaled for factor in each}
        for factor in (factor for _, _, each in scaled for factor in each):
            self._use(factor.value, factor.stream)
        values = dict(zip(factors, torch.stack([*factors.values()]).tolist(), strict=True)) if factors else {}
        for section, index, each in scaled:
            for factor in each:
                section.store.factors[index] = section.store.factors.get(index, 1.0) * values[id(factor)]
        for section in self.sections:
            section.factors.clear()

    def changes(self) -> str:
        """What the program has done to gradients since the last step, as a part of the step's name: ranks that have
        done different things raise where they compare names."""
        if not (self._is_scaled or self._changes):
            return ""
        self._read_factors()
        factors = [sorted(section.store.factors.items()) for section in self.sections] if self._is_scaled else []
        digest = zlib.crc32(repr((factors, self._changes)).encode())
        self._is_scaled, self._changes = False, 0
        return f" with gradients changed by .grad ({digest:08x})"

    def _note_change(self, what: str, section: GradSection, indices: Collection[int]) -> None:
        """The program changes gradients. What is not reduced yet each rank may change by itself."""
        if self._collectives.world_size == 1:
            return
        for index in section.holding.intersection(indices) - section.waiting:
            word = zlib.crc32(f"{what} {section.layout.params[index].spec.name}".encode())
            self._changes = (self._changes + word) % (1 << 32)

    def zero(self, param: nn.Parameter) -> None:
        """Let a gradient be zeros, to which the next backward adds."""
        section, index = self._places[id(param)]
        life = section.lives.get(index, object())
        self.clear([param], by_program=True)
        section.lives[index] = life
        self.zeroed.add(param)

    def _know_norms(self) -> None:
        """At the end of a backward that has reduced: each rank knows norms of whole gradients. Collective.

        On a GPU the sums are still under way, and the host waits for nothing here.
        """
        if self._device.is_host and self._collectives.divides and not self.updates_in_backward:
            self._norms[2.0] = self._find_norms(2.0)

    def _find_norms(self, order: float) -> Norms:
        """Norms of all gradients held, without factors and loss scale. Collective."""
        if order == 2:
            self._complete_sums(self.sections)
        at, found = dict[int, int](), list[float]()
        for section, indices in self._chosen(None):
            at |= {id(section.params[index]): len(found) + row for row, index in enumerate(indices)}
            if order == 2:
                found += [each.sumsq / section.layout.num_copies for each in section.sums(indices)]
            elif indices:
                found += self._powers(section, indices, order)
        if order == math.inf:
            norms = self._collectives.most_over_shards(found)
        else:
            sums = self._collectives.sum_over_shards(found)
            norms = [math.sqrt(each) if order == 2 else each ** (1 / (order or 1)) for each in sums]
        return Norms(dict(zip(at, norms, strict=True)), at)

    def _powers(self, section: GradSection, indices: Sequence[int], order: float) -> list[float]:
        """The sum of each gradient's absolute values to a power, of this rank's part; of order inf the largest one."""
        section.unit.wait_for_update()
        brought, store = section.store.on_disk, section.store
        views = [store.view(index) for index in indices]
        norms = [
            torch.linalg.vector_norm(view, order, dtype=torch.float64) if view.numel() else view.new_zeros(()).double()
            for view in views
        ]
        found = torch.stack(norms)
        powers = found if order == math.inf else found.pow(order or 1) / section.layout.num_copies
        values: list[float] = powers.tolist()
        store.flush(() if brought else None)
        return values

    # Their end

    def clear(self, params: Iterable[nn.Parameter], *, by_program: bool = False) -> None:
        """A step has taken these parameters' gradients, or the program drops them: the next backward starts afresh."""
        params = list(params)
        self.zeroed.difference_update(params)
        for section, indices in self._by_section(params):
            if by_program:
                self._note_change("dropped", section, indices)
            self._clear(section, indices)
        self._end_if_none()

    def _by_section(self, params: Iterable[nn.Parameter]) -> Iterable[tuple[GradSection, list[int]]]:
        """The sections of these parameters, each with their indices in it."""
        found: dict[int, tuple[GradSection, list[int]]] = {}
        for param in params:
            section, index = self._places[id(param)]
            found.setdefault(id(section), (section, []))[1].append(index)
        return found.values()

    def drop(self, params: Collection[nn.Parameter] | None = None) -> bool:
        """Drop the gradients (of `params`; by default all). True if there were any."""
        found = False
        self.zeroed.difference_update(list(self.zeroed) if params is None else params)
        for section, indices in self._chosen(params):
            found = found or bool(indices)
            self._clear(section, indices)
            if section.local is not None and not section.waiting:
                section.local.drop()
        self._end_if_none()
        return found

    def reset(self) -> bool:
        """Drop all gradients, those of a backward that broke off included. True if there were any."""
        self._reductions.drop()
        self.close()
        self._drive_room.drop()
        self._changed = None
        for section in self.sections:
            section.arrived.clear()
            section.awaits_more, section.aside, section.joined = False, False, None
            self._drop_partial(section)
        self._deferred, self._changes = False, 0
        return self.drop()

    def close(self) -> None:
        """Nothing is on its way from a GPU when this returns: memory that copies use may go."""
        for section in self.sections:
            if section.fresh is not None:
                section.fresh.cancel()
        if self._downloads is not None:
            self._downloads.drop()

    def _clear(self, section: GradSection, indices: Collection[int]) -> None:
        """Hold these parameters' gradients no longer."""
        for index in indices if section.lives else ():
            section.lives.pop(index, None)
        gone = section.holding.intersection(indices)
        if not gone:
            return
        if section.fresh is not None:
            section.fresh.land()
        section.store.shown |= bool(gone & section.exposed)
        for each in (section.holding, section.exposed, section.waiting, section.reduced):
            each -= gone
        for index in gone if section.factors else ():
            section.factors.pop(index, None)
        section.store.drop(gone)
        self._drop_zeros(section)

    def _drop_zeros(self, section: GradSection) -> None:
        """Drop what a reduction has made for a section without gradients: nothing is kept of it."""
        if not section.holding:
            section.store.drop()
            section.reduced.clear()

    def _end_if_none(self) -> None:
        """End the loss scale with the last gradients."""
        if not any(section.holding for section in self.sections):
            self.loss_scale, self.overflowed, self._is_scaled = 1.0, False, False
            self._captured = None
            self._norms.clear()


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
    """What is reduced. Ranks must agree too in which parameters have a gradient, if not all."""
    some = of_one and 0 < len(section.arrived) < len(section.layout.params)
    names = [section.layout.params[index].spec.name for index in sorted(section.arrived)]
    return f"{section.unit.name}{', of ' + ', '.join(names) if some else ''}"


def check_closed(grads: Gradients, call: str) -> None:
    """Raise if a backward has updated parameters, and not every optimizer of theirs has been stepped."""
    if grads.updated:
        section, index = grads.place(next(iter(grads.updated)))
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
