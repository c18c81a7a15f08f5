"""The elements that an update takes, and its launch: on the update's thread, on the spot, or on the device.

Owns the passes over states and the number of their threads. Does not decide when. The calls: `sections_of`, pure
bookkeeping; `prepare`, which waits for whatever must be over; `launch`, inside of `failing`: from there on the step
counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError
from zero_offload.base.spans import Cause
from zero_offload.base.threads import FirstError, UnitUpdate
from zero_offload.base.types import UpdateOverlap
from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.arguments import Hyper, Segment, segment_array
from zero_offload.hardware.kernels.rules import STATES
from zero_offload.hardware.probe import kernel_threads
from zero_offload.model.commits import Commits
from zero_offload.model.foundation import Foundation
from zero_offload.model.params import ModelStates
from zero_offload.optim.device_pass import DevicePass
from zero_offload.optim.pipeline import SectionUpdate, UpdatePipeline
from zero_offload.optim.unit_pass import UnitPass, WalkedParam, WalkedSection
from zero_offload.runtime.grads.gradients import Gradients
from zero_offload.runtime.grads.section import GradSection
from zero_offload.standins.sources import UnitStep

Sections = Sequence[SectionUpdate] | Sequence[WalkedSection]


class Updates:
    """The updates of one model; used by the control thread."""

    def __init__(self, base: Foundation, grads: Gradients, states: ModelStates, commits: Commits) -> None:
        self._store = base.store
        self._units = base.units
        self._prefetcher = base.prefetcher
        self._device = base.device
        self._overlap = base.config.overlap
        self._worker = base.update_worker
        self._errors = base.errors
        self._grads = grads
        self.states = states
        self.commits = commits
        self._shard_index = base.shard_index
        self._pipeline = UpdatePipeline(base.store)
        self._device_pass = DevicePass(base.store, base.device)
        self._unit_pass = UnitPass(
            base.store, base.device, lambda shard, rows: states.ensure([(shard, [rows])]), base.collectives
        )

    def sections_of(
        self,
        hypers: Mapping[nn.Parameter, Hyper],
        sections: Iterable[GradSection],
        order: Sequence[int],
        param_steps: dict[str, int],
    ) -> list[SectionUpdate]:
        """Which of `sections` to update by `hypers`, with the gradients that they hold; units in `order`.

        Counts the step of each parameter in `param_steps`. A unit takes part with all its trainable sections or not at
        all, since its new values are delivered whole.
        """
        found: dict[int, list[SectionUpdate]] = {}
        for section in sections:
            segments = self._segments(hypers, section, param_steps)
            update = SectionUpdate(
                unit=section.unit.index,
                name=section.unit.name,
                position=section.unit.sections.index(section.section),
                shard=section.section.shard,
                grads=section.store,
                origin=self._shard_index * section.layout.shard_numel,
                segments={rule: segment_array(of_rule) for rule, of_rule in segments.items()},
                complete=sum(map(len, segments.values())) == len(section.layout.params),
            )
            found.setdefault(update.unit, []).append(update)
        busy = {unit for unit, updates in found.items() if any(update.segments for update in updates)}
        return [update for unit in order if unit in busy for update in found[unit]]

    def walked_of(
        self,
        params: Collection[nn.Parameter],
        sections: Iterable[GradSection],
        order: Sequence[int],
        param_steps: dict[str, int],
    ) -> list[WalkedSection]:
        """As `sections_of`, for an optimizer of others that steps `params`. Sections without one of these take no part:
        the values that they deliver stay as they are."""
        found: dict[int, list[WalkedSection]] = {}
        for section in sections:
            walked, is_first = [], False
            for index in sorted(index for index in section.holding if section.params[index] in params):
                piece = section.layout.params[index]
                is_first = is_first or not param_steps[piece.spec.name]
                param_steps[piece.spec.name] += 1
                walked.append(WalkedParam(section.params[index], piece, section.store.factors.get(index, 1.0)))
            update = WalkedSection(
                unit=section.unit.index,
                name=section.unit.name,
                position=section.unit.sections.index(section.section),
                shard=section.section.shard,
                grads=section.store,
                params=walked,
                loss_scale=self._grads.ledger.loss_scale,
                is_first=is_first,
            )
            found.setdefault(update.unit, []).append(update)
        busy = {unit for unit, updates in found.items() if any(update.params for update in updates)}
        return [update for unit in order if unit in busy for update in found[unit]]

    def _segments(
        self, hypers: Mapping[nn.Parameter, Hyper], section: GradSection, param_steps: dict[str, int]
    ) -> dict[Rule, list[Segment]]:
        """Which elements of the section's shard get which hyperparameters, by rule, in order."""
        found: dict[Rule, list[Segment]] = {}
        parts, factors, states = section.store.parts, section.store.factors, set(section.section.shard.states)
        for index in sorted(section.holding):
            hyper = hypers.get(section.params[index])
            if hyper is None:
                continue
            name = section.layout.params[index].spec.name
            param_steps[name] += 1
            if not states.issuperset(STATES[hyper.rule]):
                hyper = hyper.first()
            elif name in self.states.begun:
                hyper = hyper.going_on()
            part, factor = parts[index], factors.get(index, 1.0) / self._grads.ledger.loss_scale
            segment = hyper.segment(part.start, part.stop, factor, param_steps[name])
            found.setdefault(hyper.rule, []).append(segment)
        return found

    def overlaps(self, sections: Sections, stepper: UnitStep | None = None) -> bool:
        """True if the update runs beside compute: pointless where both are arithmetic on the same cores. A walk, by
        `stepper`, does not where it may take room for states, exchanges parts with other ranks, or computes on a GPU.
        """
        if stepper is not None and not (
            stepper.may_go_on and stepper.device.type == "cpu" and all(map(_may_go_on, sections))
        ):
            return False
        if self._overlap == UpdateOverlap.AUTO:
            return not self._device.is_host or any(each.shard.on_disk or each.grads.on_disk for each in sections)
        return self._overlap != UpdateOverlap.NONE

    def prepare(self, sections: Sections, stepper: UnitStep | None = None, *, in_backward: bool = False) -> None:
        """Return when nothing else has to be waited for. A backward calls `wait_for_worker` itself, once."""
        self._errors.check()
        self._store.read_lazy()
        for unit in {section.unit for section in sections}:
            if self._units[unit].update is not None:
                self._units[unit].wait_for_update()
        # Of rules that came by a changed hyperparameter: a momentum, amsgrad.
        fused = [section for section in sections if isinstance(section, SectionUpdate)]
        self.states.ensure((section.shard, STATES[rule]) for section in fused for rule in section.segments)
        # The first part of a walk is made on this thread in any case.
        here = (
            stepper is not None or not self.overlaps(sections) or any(section.shard.on_device for section in sections)
        )
        if here and not in_backward:
            self.wait_for_worker()
        if not in_backward:
            # Gradients on drives, which the update reads: their pages are for the units that it makes new.
            self._prefetcher.pool.drive_room.detach_pages()

    def wait_for_worker(self) -> None:
        """Return when the update's thread is idle. A commit of the step before notes there what it is made of. It must
        do so before this thread changes states."""
        with self._store.counters.waiting(Cause.COMMIT) if self._worker.busy else nullcontext():
            self._worker.drain()

    def launch(
        self,
        params: Iterable[nn.Parameter],
        sections: Sections,
        stepper: UnitStep | None = None,
        *,
        in_backward: bool = False,
    ) -> Mapping[int, UnitUpdate]:
        """Update the sections, all of a unit together, in order; the gradients of `params` are theirs from now on.

        `stepper`: of a walk. `in_backward`: of a backward that goes on, and is done with these units. Returns the
        future of each unit.
        """
        params = list(params)
        self._grads.end_exposed(params)
        units = list(dict.fromkeys(section.unit for section in sections))
        updates = {index: UnitUpdate(self._errors, self._store.counters) for index in units}
        for index, update in updates.items():
            self._units[index].begin_update(update)
        # The update takes what was launched until now, whatever is launched beside it.
        made = None if self._device.is_host else self._device.mark()
        for section in sections:
            section.grads.lend(made)
        self._prefetcher.begin_update(units, in_backward=in_backward)
        # A backward through weights that are about to change must fail as it does in plain torch.
        torch.autograd.graph.increment_version(
            [
                param
                for unit in units
                for section, _, param in self._units[unit].placed_params
                if section.layout.trainable
            ]
        )
        self._grads.clear(params)
        # Between here and the next record nothing says which step the states are of.
        self.commits.forget_record()
        self._run(sections, updates, stepper)
        if not in_backward:
            self._prefetcher.refresh_kept()
            for unit in (self._units[index] for index in units):
                if unit.updates_in_place and unit.is_viewed(unit.sections):  # nothing is in a view's way
                    unit.wait_for_update()
        return updates

    def _run(self, sections: Sections, updates: Mapping[int, UnitUpdate], stepper: UnitStep | None) -> None:
        if stepper is not None:
            self._walk([section for section in sections if isinstance(section, WalkedSection)], updates, stepper)
            return
        fused = [section for section in sections if isinstance(section, SectionUpdate)]
        beside = self.overlaps(sections)
        threads = update_threads(kernel_threads(), beside, self._device.is_host)
        on_host = [section for section in fused if not section.shard.on_device]
        if beside and on_host:
            self._worker.submit(partial(self._pipeline.run, on_host, updates, threads))
        elif not beside:
            with self._store.counters.waiting(Cause.UPDATE):
                self._pipeline.run(on_host, updates, threads)
            self._prefetcher.gatherer.end_update()
        if len(on_host) < len(fused):
            on_device = [section for section in fused if section.shard.on_device]
            with self._store.counters.waiting(Cause.UPDATE):
                self._device_pass.run(on_device, updates)

    def _walk(self, sections: Sequence[WalkedSection], updates: Mapping[int, UnitUpdate], stepper: UnitStep) -> None:
        """Step by an optimizer of others, until the numbers are known that parameters share; then beside compute, where
        that may be."""
        beside = self.overlaps(sections, stepper)
        unknown = _groups_of(sections, stepper)
        walk = self._unit_pass.walk(_leads_first(sections, unknown) if beside else sections, updates, stepper)
        with self._store.counters.waiting(Cause.UPDATE):
            for stepped in walk:
                unknown = [group for group in unknown if group.isdisjoint(stepped)]
                if beside and not unknown:
                    break
        if beside:
            stepper.go_on()
            self._worker.submit(partial(_go_on, walk, stepper, torch.get_num_threads()))
        else:
            self._prefetcher.gatherer.end_update()


def update_threads(available: int, overlaps: bool, is_host: bool) -> int:
    """Threads of an update. On a CPU compute has the same cores meanwhile, and one core nearly saturates the update.
    Beside a GPU the thread that drives it needs a core.
    """
    if not overlaps:
        return available
    return max(1, available // 2 if is_host else available - 1)


@torch.no_grad()
def _go_on(walk: Iterator[object], stepper: UnitStep, num_threads: int) -> None:
    """The rest of a walk, on the update's thread. Sums of some optimizers depend on the number of threads, and a thread
    keeps that with which it began."""
    torch.set_num_threads(num_threads)
    for _ in walk:
        pass
    stepper.end()


def _may_go_on(section: SectionUpdate | WalkedSection) -> bool:
    """True if the step of a section takes no room, meets no other rank and launches nothing."""
    is_whole = section.shard.layout.num_shards == 1 and not section.shard.on_device
    return is_whole and isinstance(section, WalkedSection) and not section.is_first


def _groups_of(sections: Sequence[WalkedSection], stepper: UnitStep) -> list[set[nn.Parameter]]:
    """The param groups, of parameters that a walk steps."""
    walked = {each.param for section in sections for each in section.params}
    return [found for group in stepper.groups if (found := walked.intersection(group))]


def _leads_first(sections: Sequence[WalkedSection], groups: Sequence[set[nn.Parameter]]) -> list[WalkedSection]:
    """The sections, those of a unit together; before the others some that have parameters of all groups."""
    by_unit: dict[int, list[WalkedSection]] = {}
    for section in sections:
        by_unit.setdefault(section.unit, []).append(section)
    leads, unknown = list[int](), groups
    for unit, found in by_unit.items():
        params = [each.param for section in found for each in section.params]
        left = [group for group in unknown if group.isdisjoint(params)]
        if len(left) < len(unknown):
            leads.append(unit)
        unknown = left
    return [section for unit in dict.fromkeys([*leads, *by_unit]) for section in by_unit[unit]]


def check_holds_grads(config: OffloadConfig, call: str) -> None:
    """Raise if a backward uses its gradients itself."""
    if config.overlap == UpdateOverlap.BACKWARD:
        raise ConfigError(
            f"{call} needs all gradients before the update, which overlap='backward' makes while they come; offload "
            "with overlap='forward'"
        )


@contextmanager
def failing(errors: FirstError) -> Iterator[None]:
    """Keep the exception of a block that ends early, so that all later calls meet it."""
    try:
        yield
    except BaseException as error:
        errors.set(error)
        raise
