"""Each parameter of one offloaded model: where it is, what optimizers keep of it, and what it answers.

With several ranks a parameter is spread over them: then reads and writes of one parameter raise, naming the call that
works.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch import nn

from zero_offload.base.alike import Compared, word_of
from zero_offload.base.errors import CapacityError, ConfigError, ZeroOffloadError
from zero_offload.base.host import host_empty, host_reserved, host_tensor, host_zeros
from zero_offload.base.problems import warn_user
from zero_offload.base.types import Tier, format_bytes
from zero_offload.checkpoint.values import (
    Edited,
    Edits,
    completed,
    master_part,
    master_parts,
    read_master,
    read_master_part,
    read_row,
    read_rows,
    read_state,
    read_values,
    rows_directory,
)
from zero_offload.hardware.kernels.arguments import Hyper
from zero_offload.hardware.kernels.checksums import crc32c_of_tensor
from zero_offload.model.commits import Commits
from zero_offload.model.foundation import Foundation
from zero_offload.optim.state import BESIDE, Entry, count_of, settled
from zero_offload.optim.unitwise.packing import keep_states
from zero_offload.optim.unitwise.state_rows import unpack
from zero_offload.plan.layout import CHUNK_NUMEL, ParamSlice
from zero_offload.plan.memory import CHUNKS_IN_FLIGHT, WALKED_AT_ONCE, MemoryPlan
from zero_offload.plan.quantized import is_wrapper, tensors_of
from zero_offload.plan.tensor_parallel import division, is_dtensor, local_part
from zero_offload.runtime.grads.access import GradAccess
from zero_offload.runtime.grads.gradients import check_not_updated
from zero_offload.runtime.grads.section import Given
from zero_offload.runtime.pass_tracker import PassTracker
from zero_offload.runtime.prefetcher import replaced
from zero_offload.runtime.ranks.watch import Notice
from zero_offload.runtime.saved_tensors.tensors import runs
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.standins.away import part_of
from zero_offload.standins.grad_handle import GradHandle
from zero_offload.standins.guard import GuardedParameter
from zero_offload.standins.owners import owner_of
from zero_offload.standins.readers import Readers
from zero_offload.standins.sources import ParamPlaces, ParamSource, StateSource, Touched
from zero_offload.standins.state_copy import StateCopy, again, state_copy, wrapper_copy
from zero_offload.standins.state_tensor import STEP, StateTensor
from zero_offload.storage.memory.arena import A_BUFFER
from zero_offload.storage.shards.rows import room
from zero_offload.storage.shards.shard import Component, Shard, shard_bytes, unplanned_bytes


@dataclass(frozen=True)
class ParamPlace:
    """Where a parameter is."""

    unit: Unit
    section: Section
    piece: ParamSlice
    param: nn.Parameter = field(compare=False)

    @property
    def name(self) -> str:
        return self.piece.spec.name

    @property
    def may_go(self) -> bool:
        """True if the place can be given up without the model. Quantized weights, DTensors and experts in groups keep
        theirs."""
        spec, is_plain = self.piece.spec, type(self.param) is GuardedParameter
        return is_plain and self.unit.layout.experts is None and not (spec.division or spec.held_by or spec.record)

    @property
    def is_divided(self) -> bool:
        """True if each rank has a part of the parameter only."""
        return self.section.layout.num_shards > 1 or bool(self.piece.spec.division)

    def span(self, shard_index: int) -> tuple[int, int]:
        """A shard's elements of the parameter, as a range within the shard; maybe none."""
        return self.section.layout.in_shard(self.piece, shard_index)

    def own(self, shard_index: int) -> slice:
        """The same elements within the parameter, as they lie in memory."""
        begin, end = self.span(shard_index)
        offset = self.section.layout.shard_numel * shard_index - self.piece.begin
        return slice(begin + offset, end + offset) if begin < end else slice(0, 0)


def is_within(name: str, longer: Iterable[str]) -> bool:
    """True if one of these is the name, or is it with further modules around or in between."""
    return any(all(part in parts for part in name.split(".")) for parts in (iter(each.split(".")) for each in longer))


class ModelPlaces(ParamPlaces):
    """The places of all parameters of a model."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._places: dict[int, ParamPlace] = {}
        self._frozen: set[int] = set()
        self._thawed: list[ParamPlace] = []
        self._resting: set[int] = set()
        self.grow(units)

    def grow(self, units: Iterable[Unit]) -> None:
        """Know the parameters of further units."""
        for unit in units:
            for section, piece, param in unit.placed_params:
                self._places[id(param)] = ParamPlace(unit, section, piece, param)
                if not param.requires_grad:
                    self._frozen.add(id(param))

    def replace(self, place: ParamPlace, new: nn.Parameter) -> None:
        """Another parameter has this place."""
        del self._places[id(place.param)]
        self._places[id(new)] = replace(place, param=new)
        if id(place.param) in self._resting:
            self._resting.remove(id(place.param))
            self._resting.add(id(new))
        self._frozen.discard(id(place.param))
        self._thawed = [each for each in self._thawed if each is not place]
        if not new.requires_grad:
            self._frozen.add(id(new))

    def change(self, units: Iterable[Unit]) -> None:
        """The model has changed: these units have other parameters, or others of their names."""
        trained = [place.param for place in self._thawed]
        frozen, resting = self._frozen, self._resting
        self._places.clear()
        self._frozen = set()
        self.grow(units)
        self._frozen = {key for key in self._places if key in frozen}
        self._resting = {key for key in self._places if key in resting}
        self._thawed = [self[param] for param in trained if id(param) in self._places]

    def __getitem__(self, param: nn.Parameter) -> ParamPlace:
        """Of a parameter that consists of others, the place of the first of them."""
        place = self._places.get(id(param))
        return self._places[id(tensors_of([param])[0])] if place is None else place

    def __contains__(self, param: nn.Parameter) -> bool:
        return id(param) in self._places

    def all(self) -> list[ParamPlace]:
        return list(self._places.values())

    def name_of(self, param: nn.Parameter) -> str:
        return self[param].name

    def describe(self, param: nn.Parameter) -> str:
        """Name and tier, for repr and messages."""
        place, shard = self[param], self[param].section.shard
        return f"{place.name}, offloaded to {(Tier.DEVICE if shard.on_device else shard.placement.params).value}"

    def is_frozen(self, param: nn.Parameter) -> bool:
        consists_of_others = id(param) not in self._places  # it is a quantized weight
        return consists_of_others or id(param) in self._frozen or id(param) in self._resting

    def check_frozen(self, params: Iterable[nn.Parameter]) -> None:
        frozen, resting, places = self._frozen, self._resting, self._places
        for param in params:
            # As `is_frozen`, without a call: each step asks. A stand-in answers for `requires_grad`, at a cost.
            key = id(param)
            if (key in frozen or key in resting or key not in places) and param.requires_grad:
                raise ConfigError(
                    f"{self.name_of(param)} was frozen when zo.offload was called, or its states were deleted, and "
                    "requires_grad_(True) was called on it inside of a forward or of zo.gathered(mode='write'). Call "
                    "it between steps"
                )

    def is_hooked(self, param: nn.Parameter) -> bool:
        """True if it has been trained, here or at first."""
        return id(param) not in self._frozen

    def note_trained(self, param: nn.Parameter) -> None:
        """A parameter that was frozen is trained from now on; it may rest again, as any other."""
        self._resting.discard(id(param))
        if id(param) in self._frozen:
            self._frozen.remove(id(param))
            self._thawed.append(self[param])

    def once_trained(self) -> set[int]:
        """Sections that are trained, or have been since this process began: by index."""
        return {place.section.layout.index for key, place in self._places.items() if key not in self._frozen}

    def note_resting(self, section: Section) -> None:
        """The states of a section have gone: a parameter that is trained again takes room first."""
        self._resting |= {id(place.param) for place in self.of(section)}

    def of(self, section: Section) -> list[ParamPlace]:
        """The parameters of a section."""
        return [place for place in self._places.values() if place.section is section]

    def listed(self) -> list[ParamPlace]:
        """All but those that stand where parameters have been that are gone."""
        return [place for place in self._places.values() if not place.piece.is_gone]

    def thawed(self) -> list[str]:
        """The parameters that were frozen at first, and require a gradient."""
        return [place.name for place in self._thawed if place.param.requires_grad]


ALL_ALIKE = "which all ranks make (so not under 'if rank == 0:')"

States = Mapping[str, torch.Tensor]
"""States by torch's names."""

_ROW_BYTES_MOST = 64
"""Per parameter. Few optimizers of others keep more, so their states are in question where less is left."""
_CHUNK_BYTES = 18
"""Per element of a chunk in flight: values, masters, two states and a gradient, at most."""
_SETTINGS = {Tier.DEVICE: "device_memory", Tier.CPU: "cpu_memory", Tier.NVME: "nvme_capacity"}


class ModelStates(StateSource):
    """Optimizers' states of offloaded parameters, as the optimizers see them, and the writes of masters and states.

    Owns how many updates each parameter has had, and what budgets leave
    for states that plans do not count. The states themselves are the shards': there are none before an optimizer is
    built, and of each section all that its parameters' optimizers keep.
    """

    def __init__(self, base: Foundation, places: ModelPlaces, commits: Commits) -> None:
        self._places = places
        self._store = base.store
        self._prefetcher = base.prefetcher
        self._life = base.life
        self._commits = commits
        self._shard_index = base.shard_index
        self._collectives = base.collectives
        self._together, self._is_shared = base.collectives.together, base.collectives.is_shared
        self._updates_in_backward = base.grad_ring is not None
        self._plan = base.sizes.plan
        self._has_limit = base.config.nvme_capacity is not None
        self._slot_bytes = 0
        """Of frozen sections that were written, beyond the plan."""
        self.readers = Readers()
        self.param_steps: dict[str, int] = {}
        self.begun: set[str] = set()
        """Parameters that have states though no step is counted: those of a fake step, or that the program has set."""
        self._loaded_steps: dict[str, int] = {}
        """The counts that came with states from files or a state dict."""
        self._completed: dict[str, int] = {}
        """Those that came with what completes a value to its fp32 master."""
        self._stale: list[ParamPlace] = []
        """Parameters whose states were dropped, and are not zero yet."""
        self.resting: set[int] = set()
        """Sections that have no states, since nothing in them is trained: by index."""
        self.adopt({})

    def adopt(self, param_steps: Mapping[str, int]) -> None:
        """The shards have states that were saved after so many updates of each parameter."""
        self.param_steps = {place.name: int(param_steps.get(place.name, 0)) for place in self._places.listed()}
        self._loaded_steps = dict(self.param_steps)
        self._stale.clear()
        self._completed.clear()
        self.begun.clear()

    def grow(self, plan: MemoryPlan, param_steps: Mapping[str, int]) -> None:
        """There are further parameters, and another plan; `param_steps` as `adopt` takes them."""
        self._plan = plan
        for name in (place.name for place in self._places.listed()):
            if name not in self.param_steps:
                self.param_steps[name] = self._loaded_steps[name] = int(param_steps.get(name, 0))

    def change_names(self, gone: Collection[str], names: Mapping[str, tuple[str, ...]]) -> None:
        """The model has changed: it has lost some parameters, and has others under the first of new names."""
        for counts in (self.param_steps, self._loaded_steps, self._completed):
            kept = {name: count for name, count in counts.items() if name not in gone}
            counts.clear()
            counts |= {names.get(name, (name,))[0]: count for name, count in kept.items()}
        self.begun = {names.get(name, (name,))[0] for name in self.begun if name not in gone}

    def add(self, params: Iterable[nn.Parameter], names: Sequence[str]) -> None:
        self.zero_stale()
        params = list(params)
        places = [self._places[param] for param in params]
        self.ensure((each.section.shard, names) for each in places if each.section.layout.index not in self.resting)
        # Loaded states are for the optimizer built next; states that an earlier optimizer has changed are not.
        self._start_anew(
            param
            for param, place in zip(params, places, strict=True)
            if self.param_steps[place.name] != self._loaded_steps[place.name] or place.name in self.begun
        )

    def check_rows(self, params: Collection[nn.Parameter], sizes: Callable[[], Mapping[Any, int]], kind: str) -> None:
        numel = sum(param.numel() for param in params)
        if all(self._plan.left_bytes(tier) > _ROW_BYTES_MOST * numel for tier in Tier):
            return
        found, places = sizes(), [place for place in map(self._places.__getitem__, params) if self._steps(place)]
        rows = dict[int, tuple[Shard, dict[int, tuple[int, str]]]]()
        for place in places:
            shard = place.section.shard
            if shard.rows is None and found.get(place.param):
                rows.setdefault(id(shard), (shard, {}))[1][place.piece.begin] = found[place.param], kind
        lacking = [(shard, [Component.rows(room(sizes), len(shard.layout.chunks()))]) for shard, sizes in rows.values()]
        self._count(lacking, self._walk_bytes(lacking))

    @staticmethod
    def _walk_bytes(lacking: Iterable[tuple[Shard, Iterable[Component]]]) -> int:
        """Memory of a step of these, beyond that of our own optimizers', which plans count."""
        read = [
            shard_bytes(shard.layout, {*shard.components, *components})
            for shard, components in lacking
            if shard.on_disk
        ]
        return max(WALKED_AT_ONCE * max(read, default=0) - CHUNKS_IN_FLIGHT * CHUNK_NUMEL * _CHUNK_BYTES, 0)

    def blank(self, places: Iterable[ParamPlace]) -> None:
        """These have had no updates, and have states of zeros."""
        for of_section in by_section(places):
            zeros, shard = host_zeros(1, torch.float32), of_section[0].section.shard
            spans = [(*place.span(self._shard_index), zeros) for place in of_section]
            edits = dict.fromkeys((each for each in shard.states if not each.is_rows), spans)
            none = {place.piece.begin: (None, "") for place in of_section}
            self._edit(of_section[0], edits | self._rows_with(of_section[0], none))
            for place in of_section:
                self.param_steps[place.name] = self._loaded_steps[place.name] = 0
                self.begun.discard(place.name)

    def _start_anew(self, params: Iterable[nn.Parameter]) -> None:
        self.reset(params)
        self.zero_stale()

    def reset(self, params: Iterable[nn.Parameter]) -> None:
        if not (params := [param for param in params if self.step_of(param) is not None]):
            return
        self._life.check_usable()
        self.readers.before_replacing(params)
        self.change()
        for place in (self._places[param] for param in params):
            self.param_steps[place.name] = self._loaded_steps[place.name] = 0
            self.begun.discard(place.name)
            self._stale.append(place)
        if self._updates_in_backward:  # no step comes before the next update
            self.zero_stale()

    def drop_idle(self, holds_grad: Callable[[nn.Parameter], bool]) -> list[Section]:
        """Give up the room of states that were reset, in sections of which nothing is trained and nothing has states.

        Nothing is done for the others; `zero_stale` follows.
        """
        sections = [of_section[0].section for of_section in by_section(self._stale)]
        dropped = [section for section in sections if self.is_idle(section, holds_grad)]
        for section in dropped:
            self._commits.drain()
            self._store.drop_states(section.shard)
            self.resting.add(section.layout.index)
        self._stale = [place for place in self._stale if place.section.layout.index not in self.resting]
        return dropped

    def round_masters(self, places: Sequence[ParamPlace]) -> None:
        """Masters of some parameters of one section become their values."""
        shard, edits = places[0].section.shard, Edits()
        places[0].unit.wait_for_update()
        for place in places:
            span = place.span(self._shard_index)
            parts = master_parts(shard.layout, read_values(self._store, shard, span))
            for component in parts.keys() - {Component.VALUE}:
                edits.setdefault(component, []).append((*span, parts[component]))
        if edits:  # in fp32 the value is the master
            self._edit(places[0], edits)

    def is_idle(self, section: Section, holds_grad: Callable[[nn.Parameter], bool]) -> bool:
        """True if nothing in a section is trained, and nothing has states or a gradient."""
        places = self._places.of(section)
        return all(
            not (place.param.requires_grad or holds_grad(place.param)) and self.step_of(place.param) is None
            for place in places
        )

    @property
    def has_stale(self) -> bool:
        """True if states were reset that still stand where they rest."""
        return bool(self._stale)

    def zero_stale(self) -> None:
        """Make states that were reset zero, before others use them, or keep them."""
        if self._stale:
            self.blank(self._stale)
            self._stale = []

    def ensure(self, states: Iterable[tuple[Shard, Sequence[str]]]) -> None:
        """Take room for these states of shards; new states are zero. Raises CapacityError."""
        lacking: dict[int, tuple[Shard, dict[Component, None]]] = {}
        for shard, names in states:
            if shard.layout.trainable and not shard.keeps(names):
                lacking.setdefault(id(shard), (shard, {}))[1].update(dict.fromkeys(map(Component, names)))
        if lacking:
            self._count(lacking.values())
            self._commits.drain()
        for shard, components in lacking.values():
            self._store.add_states(shard, components)

    def _count(self, lacking: Iterable[tuple[Shard, Iterable[Component]]], walk_bytes: int = 0) -> None:
        """Raise where these states, and memory of steps, would exceed a budget. AdamW's two are a part of the plan."""
        unplanned, wanted = dict.fromkeys(Tier, 0), {id(shard): components for shard, components in lacking}
        for shard in self._store.shards:
            nbytes = unplanned_bytes(shard.layout, {*shard.states, *wanted.get(id(shard), ())})
            unplanned[Tier.NVME] += nbytes * len(shard.slots)
            unplanned[shard.placement.optimizer] += nbytes * (shard.placement.optimizer is not Tier.NVME)
        shared = self._plan.budget.shared_memory
        unplanned[Tier.CPU] += walk_bytes
        beside = f", with {format_bytes(walk_bytes)} for a step of whole parameters," if walk_bytes else ""
        for tier, nbytes in unplanned.items():
            together = nbytes if tier is Tier.NVME or not shared else unplanned[Tier.DEVICE] + unplanned[Tier.CPU]
            if nbytes and together > (left := max(self._plan.left_bytes(tier), 0)):
                setting = _SETTINGS[Tier.CPU if shared and tier is Tier.DEVICE else tier]
                raise CapacityError(
                    "the optimizer keeps more than two states of a parameter, or larger ones. Of the "
                    f"{tier.value} tier they take{beside} {format_bytes(together)} beyond what was planned, and "
                    f"{format_bytes(left)} are left. Raise {setting}=, place states elsewhere (optimizer=), or use an "
                    "optimizer with fewer (amsgrad=False). zo.plan(model, config, optimizer=optimizer) shows all bytes"
                )

    def step_of(self, param: nn.Parameter) -> int | None:
        name = self._places.name_of(param)
        return self.param_steps[name] if self.param_steps[name] or name in self.begun else None

    def kept(self, param: nn.Parameter, names: Sequence[str]) -> dict[str, torch.dtype]:
        if self.step_of(param) is None:
            return {}
        shard = self._places[param].section.shard
        kept = {name: torch.float32 for name in (STEP, *names) if name == STEP or shard.keeps([name])}
        return kept | master_part(shard.layout)

    def check_usable(self) -> None:
        self._life.check_usable()

    def read(self, param: nn.Parameter, name: str) -> torch.Tensor:
        step = self.step_of(param)
        if step is None and name != Component.VALUE:
            raise ZeroOffloadError(
                f"{name} of {self._places.describe(param)} is gone: the optimizer's states were reset, and no step "
                "has made others. Take a copy before a reset (.clone())"
            )
        if name == STEP:
            return host_tensor(float(step or 0), torch.float32)
        self._life.check_usable()
        place = self._places[param]
        piece, shard = place.piece, place.section.shard
        if place.is_divided:
            raise ZeroOffloadError(
                f"{name} of {place.name} is divided over ranks, and no operation on one of them gathers it. Save it "
                "by torch.distributed.checkpoint (dcp.save), zo.save_checkpoint or zo.export_pretrained; read "
                "parameters in 'with zo.gathered(module):'; reset states by optimizer.state.clear() on all ranks"
            )
        place.unit.wait_for_update()
        span = piece.begin, piece.end
        if name in master_part(shard.layout):
            return read_master_part(self._store, shard, span).view(piece.spec.shape)
        return read_state(self._store, shard, Component(name), span).view(piece.spec.shape)

    def _rows_with(self, place: ParamPlace, states: Mapping[int, tuple[Any, str]]) -> Edits:
        """The edit by which rows of a section have these states, as `keep_states` takes them, after updates under way.
        There is room for them then. `place`: any of the section."""
        place.unit.wait_for_update()
        shard = place.section.shard
        rows, layout = read_rows(self._store, shard), shard.layout
        array = keep_states(rows, states).array
        if array is None and rows is None:
            return {}
        array = rows.array if array is None and rows is not None else array
        assert array is not None
        component = shard.rows
        if component is None or array.numel() > shard_bytes(layout, [component]):
            component = Component.rows(array.numel(), len(layout.chunks()))
            self.ensure([(shard, [component])])
        whole = host_reserved([shard_bytes(layout, [component])], torch.uint8)
        whole[: array.numel()].copy_(array)
        return {component: [(0, layout.shard_numel, whole)]}

    def has_row(self, param: nn.Parameter) -> bool:
        if self.step_of(param) is None:
            return False
        place = self._places[param]
        with self._reading(place):
            has_one = place.piece.begin in rows_directory(self._store, place.section.shard)
        return has_one if place.section.layout.num_shards == 1 else self._collectives.any_rank([has_one])[0]

    def read_row(self, param: nn.Parameter, packages: Collection[str]) -> Any:
        self.check_usable()
        if self.step_of(param) is None:
            return None
        place = self._places[param]
        with self._reading(place):
            row = read_row(self._store, place.section.shard, place.piece.begin)
        if place.section.layout.num_shards > 1:
            mine = host_empty(0, torch.uint8) if row is None else row
            rows = self._collectives.gather_rows(mine, f"the optimizer's state of {place.name}")
            row = next((each for each in rows if each.numel()), None)
        return None if row is None else unpack(row, packages)

    @contextmanager
    def _reading(self, place: ParamPlace) -> Iterator[None]:
        """Ranks read what each has for the others."""
        call = f"a read of the optimizer's state of {place.name}, {ALL_ALIKE}"
        is_cut = place.section.layout.num_shards > 1
        with self._together(call, may_be_alone=True) if is_cut else nullcontext():
            place.unit.wait_for_update()
            yield

    def write_row(self, param: nn.Parameter, state: Any, kind: str) -> None:
        self.zero_stale()
        place = self._places[param]
        self.readers.before_replacing([param], {STEP, Entry.state_name})
        self.change()
        if self._steps(place):
            self._edit(place, self._rows_with(place, {place.piece.begin: (state, kind)}))
        self._count_steps(place.name, self.param_steps[place.name], has_states=bool(state))

    def read_beside(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        place = self._places[param]
        piece, section = place.piece, place.section
        if self.step_of(param) is None or not (parts := master_part(section.layout)):
            return {}
        with self._reading(place):
            mine = read_master_part(self._store, section.shard, place.span(self._shard_index))
        what = f"what completes {place.name} to its master"
        whole = self._collectives.gather_param(section.layout, piece, mine, what)
        (name,) = parts
        return {name: piece.spec.view(whole).to("cpu")}

    def write_beside(self, param: nn.Parameter, beside: Mapping[str, torch.Tensor]) -> None:
        self.readers.before_replacing([param], BESIDE)
        self.change()
        self._write(self._places[param], {}, beside)
        self.masters_completed([self._places.name_of(param)])

    def _steps(self, place: ParamPlace) -> bool:
        """True if this rank steps the whole parameter, and has its row."""
        layout = place.section.layout
        return layout.num_shards == 1 or layout.steppers[place.piece.begin] == self._shard_index

    def create(self, hypers: Mapping[nn.Parameter, Hyper]) -> None:
        """Make states as a step of zero gradients with a learning rate of 0 does, without counting a step."""
        self.zero_stale()
        for param, hyper in hypers.items():
            if self.step_of(param) is None:
                if hyper.initial:
                    initial = host_zeros(param.shape, torch.float32) + hyper.initial
                    self.write(param, 0, dict.fromkeys(hyper.states, initial), {})
                self.begun.add(self._places.name_of(param))

    def edit(self, param: nn.Parameter, name: str, values: torch.Tensor) -> None:
        self.zero_stale()
        place = self._places[param]
        step = count_of(values, f"{name} of {place.name}") if name == STEP else self.param_steps[place.name]
        self.change()
        if name in BESIDE:
            self._write(place, {}, {name: values})
        elif name != STEP:
            self.ensure([(place.section.shard, (name,))])
            self._write(place, {name: values}, {})
        self._count_steps(place.name, step, has_states=True)

    def write(self, param: nn.Parameter, step: int, states: Mapping[str, torch.Tensor | None], beside: States) -> None:
        self.zero_stale()
        place, has_states = self._places[param], any(state is not None for state in states.values())
        if step == 0 and self.step_of(param) is None and not has_states:
            return  # all that there is is zero
        moved, beside = _moved(states, param), _moved(beside, param)
        if not moved and not beside and step == self.step_of(param):
            return  # they are here
        self.readers.before_replacing([param], {*moved, *beside, STEP, Entry.state_name})
        self.change()
        self.ensure([(place.section.shard, tuple(moved))])
        if moved or beside:
            self._write(place, moved, beside)
        self._count_steps(place.name, step, has_states)
        self._loaded_steps[place.name] = step
        if beside:
            self.masters_completed([place.name])

    def _count_steps(self, name: str, step: int, has_states: bool) -> None:
        self.param_steps[name] = step
        if has_states and step == 0:
            self.begun.add(name)
        else:
            self.begun.discard(name)

    def _write(self, place: ParamPlace, states: Mapping[str, torch.Tensor | None], beside: States) -> None:
        """Replace these states, each of the parameter's shape; None is zeros. `beside` the value stands what completes
        it to the master, as `read` returns it, or nothing: then the master stays as it is."""
        shard, span, zeros = place.section.shard, place.span(self._shard_index), host_zeros(1, torch.float32)
        place.unit.wait_for_update()
        beside = {name: self._own(place, values) for name, values in beside.items()}
        master = completed(self._store, shard, beside, span) if beside else None
        edits = {} if master is None else master_parts(shard.layout, master)
        for name, state in states.items():
            edits[Component(name)] = zeros if state is None else self._own(place, state)
        self._edit(place, {component: [(*span, values)] for component, values in edits.items()})
        # In bf16 what completes a value leaves it as it is; in fp16 it is its master, rounded.
        if master is not None and shard.layout.dtype == torch.float16:
            replaced(self._prefetcher, [(place.unit, place.param)])

    def replace(
        self,
        call: str,
        values: Sequence[tuple[ParamPlace, torch.Tensor]],
        before: Mapping[str, torch.Tensor] | None = None,
        *,
        of_16_bits: bool = False,
        is_broken: bool = False,
    ) -> None:
        """The program has changed these parameters between steps, to whole tensors of fp32 or of the compute dtype. Of
        16-bit values, and of fp32 that were `of_16_bits`, those that parameters have already keep their masters.
        `before` has what they were, by name, where the program has changed values where they rest. After an exception
        on some rank, `is_broken`, no generation is made of them unless the program says so.

        A commit under way ends before: its generation has what was. The change is a part of the last step, unless a
        generation has that already. Each copy on the device is made again from what is written here. Collective: all
        ranks write the same, or all raise.
        """
        places = [place for place, _ in values]
        self._life.check_alive()
        wholes, parts = [[each for each in values if bool(each[0].piece.spec.division) is b] for b in (False, True)]
        form = "" if of_16_bits else " fp32"
        notice = Notice(is_broken, self._compared(wholes, form), self._compared(parts, form))
        with self._together(f"{call}, {ALL_ALIKE}", notice, may_be_alone=True):
            self._life.check_usable()
            self.reserve(place.section.shard for place in places)
            self.readers.before_changing([place.param for place in places], BESIDE)
        try:
            with self._together(f"the writes of {call}"):
                self._replace(values, before or {}, of_16_bits=of_16_bits)
        except BaseException:
            self._commits.set_aside()
            self._life.half_written = call
            raise
        if notice.given:
            self._commits.set_aside()
        else:
            self._commits.note_written()

    def _compared(self, values: Sequence[tuple[ParamPlace, torch.Tensor]], form: str) -> list[Compared]:
        """The values, for comparison with other ranks'; `form` is a part of them."""
        if not self._is_shared or not values:
            return []
        words = {
            place.name: f"{crc32c_of_tensor(each.detach().cpu().contiguous()):08x}{form}" for place, each in values
        }
        return [Compared.of({f"the checksum of new values of {name}": word for name, word in words.items()})]

    def _replace(
        self,
        values: Sequence[tuple[ParamPlace, torch.Tensor]],
        before: Mapping[str, torch.Tensor],
        *,
        of_16_bits: bool,
    ) -> None:
        places = [place for place, _ in values]
        try:
            for section in {id(place.section): place.section for place in places}.values():
                masters = []
                for place, each in values:
                    if place.section is section:
                        has_16_bits = of_16_bits or each.dtype == section.layout.dtype
                        old = before.get(place.name)
                        masters.append((place, self.with_masters(place, each, old) if has_16_bits else each))
                self.write_masters(masters)
        finally:
            replaced(self._prefetcher, [(place.unit, place.param) for place in places])

    def with_masters(self, place: ParamPlace, values: torch.Tensor, old: torch.Tensor | None = None) -> torch.Tensor:
        """The parameter's new values, host, of 16 bits. Of this rank's elements, those that are what they were, as
        `old` has it or where they rest, have their fp32 masters."""
        shard, span, spec = place.section.shard, place.span(self._shard_index), place.piece.spec
        if not shard.layout.has_master_apart:
            return values
        place.unit.wait_for_update()
        elements = spec.elements(values.detach().to("cpu")).to(torch.float32, copy=True)
        at = place.own(self._shard_index)
        own = elements[at]
        old = read_values(self._store, shard, span) if old is None else spec.elements(old.to("cpu"))[at]
        # By their bits: 0 and -0 are two values.
        is_kept = old.view(torch.int16) == own.to(old.dtype).view(torch.int16)
        own.copy_(torch.where(is_kept, read_master(self._store, shard, span), own))
        return spec.view(elements)

    def write_masters(self, masters: Sequence[tuple[ParamPlace, torch.Tensor]]) -> None:
        """Replace masters of some parameters of one section by whole tensors, fp32 or of the compute dtype."""
        edits: Edits = {}
        for place, values in masters:
            for component, array in master_parts(place.section.shard.layout, self._own(place, values)).items():
                edits.setdefault(component, []).append((*place.span(self._shard_index), array))
        self._edit(masters[0][0], edits)

    def reserve(self, shards: Iterable[Shard]) -> None:
        """Make sure of room for what is written to shards that are frozen; a commit under way ends before. Raises
        CapacityError, and nothing has changed then."""
        self._commits.drain()
        shards = list({id(shard): shard for shard in shards}.values())
        needed = sum(map(self._store.bytes_to_make_writable, shards))
        left = self._plan.left_bytes(Tier.NVME) - self._slot_bytes
        if self._has_limit and needed > left:
            raise CapacityError(
                f"frozen parameters are to be written: slots for them take {format_bytes(needed)} of the drives, and "
                f"nvme_capacity leaves {format_bytes(max(left, 0))}. Nothing is written; raise it"
            )
        for shard in shards:
            self._store.make_writable(shard)
        self._slot_bytes += needed

    def _own(self, place: ParamPlace, values: torch.Tensor) -> torch.Tensor:
        """(n,) of what this rank's shard has of a parameter, of values of its shape."""
        if is_dtensor(values) and division(values) == place.piece.spec.division:
            values = local_part(values)
        if values.shape != place.piece.spec.shape:
            raise ZeroOffloadError(
                f"{place.name} was given as {type(values).__name__}, of which this rank's part is not known: load by "
                "torch.distributed.checkpoint.load into model.state_dict() and optimizer.state_dict(), or by "
                "zo.load_checkpoint(model, optimizer, path)"
            )
        return place.piece.spec.elements(values.detach())[place.own(self._shard_index)]

    def _edit(self, place: ParamPlace, edits: Edits) -> None:
        self._life.check_usable()
        place.unit.wait_for_update()
        self.replace_elements(place, edits)

    def replace_elements(self, place: ParamPlace, edits: Edits) -> None:
        """Change elements of the shard that a parameter is in, after its update."""
        shard = place.section.shard
        source = Edited(self._store, shard, edits)
        self._store.read_lazy_in(shard, source.spans(Component.VALUE))
        self._store.write_components(shard, source, (source.rows, list(edits)))

    def change(self) -> None:
        """Called before the program changes states."""
        self._commits.drain()
        self._commits.set_aside()

    def values_replaced(self, names: Collection[str]) -> None:
        """A model's state dict is loaded: these parameters'. Masters that an optimizer's has completed, and no step has
        used, go."""
        self._commits.drain()  # a commit under way must not see half of it
        self._commits.set_aside()
        completed = {name: self._completed.pop(name) for name in names if name in self._completed}
        lost = [name for name, step in completed.items() if self.param_steps[name] == step]
        if lost:
            warn_user(
                f"the model's state dict replaces the fp32 master of {lost[0]}, which the optimizer's has just "
                "completed, by its rounded value. Load the model's state dict first, then the optimizer's",
            )

    def masters_completed(self, names: Iterable[str]) -> None:
        """The parts that complete these parameters' values to their masters were loaded, without the values."""
        self._completed |= {name: self.param_steps[name] for name in names}


def by_section(places: Iterable[ParamPlace]) -> list[list[ParamPlace]]:
    """The same, section by section."""
    found: dict[int, list[ParamPlace]] = {}
    for place in places:
        found.setdefault(id(place.section), []).append(place)
    return list(found.values())


def _moved(states: Mapping[str, Any], param: nn.Parameter) -> dict[str, Any]:
    """Those that do not rest where they belong; copies of those that rest elsewhere."""
    found = {
        name: each
        for name, each in states.items()
        if not isinstance(each, StateTensor) or not each.rests_at(param, name)
    }
    return settled(found, param)


def _words_of(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, int]]:
    return [(name, crc32c_of_tensor(each.detach().cpu().contiguous())) for name, each in tensors.items()]


class ModelParams(ParamSource):
    """The data and the gradient of a parameter.

    Reads and writes of single parameters go section by section through the store.
    """

    def __init__(
        self,
        base: Foundation,
        places: ModelPlaces,
        states: ModelStates,
        grads: GradAccess,
        tracker: PassTracker,
    ) -> None:
        self._places = places
        self._states = states
        self._shard_index = base.shard_index
        self._collectives = base.collectives
        self._prefetcher = base.prefetcher
        self._store = base.store
        self._grads = grads
        self._tracker = tracker
        self._life = base.life
        self._has_told_rounding = self._has_told_loss = False
        self._walk: FrameType | None = None
        self._walks_over: nn.Module | None = None
        self._copies: dict[int, StateCopy] = {}
        self._writes: dict[int, list[tuple[ParamPlace, torch.Tensor]]] = {}
        """Values that were copied in, by section."""

    # Data

    def touch(self, params: Sequence[nn.Parameter]) -> Touched:
        """Inside a forward or backward parameters are fetched; outside they are read if they are here."""
        self._life.check_usable()
        units = list(dict.fromkeys([self._places[param].unit for param in params]))
        if self._tracker.active:
            self._tracker.touch(units)
            return Touched.OPEN
        self._life.check_assigned(map(id, params))
        if not all(unit.gathered_uses > 0 or unit.readable for unit in units):
            return Touched.AWAY
        for unit in units:
            if unit.gathered_uses > 0:
                self._prefetcher.fetch_for_access(unit)  # a step or a load may have replaced its values meanwhile
            else:
                unit.wait_for_update()
                if self._prefetcher.streams is not None:
                    self._prefetcher.streams.use(unit)
        return Touched.FOR_READING

    def is_in_use(self, param: nn.Parameter) -> bool:
        return self._places[param].unit.runs

    def is_gathered(self, param: nn.Parameter) -> bool:
        return self._places[param].unit.gathered_uses > 0

    # One parameter between steps

    @property
    def is_shared(self) -> bool:
        return self._collectives.is_shared

    def read_value(self, param: nn.Parameter, *, master: bool = False) -> torch.Tensor:
        self._life.check_alive()
        self._life.check_assigned([id(param)])
        place = self._places[param]
        piece, section, unit, read = place.piece, place.section, place.unit, read_master if master else read_values
        call = f"a read of parameter {place.name}{' in fp32' * master}, {ALL_ALIKE}"
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            if unit.gathered_uses > 0 and not master:
                self._check_alone(place)
                self._prefetcher.fetch_for_access(unit)
                here = part_of(param)
                return torch.empty_strided(here.size(), here.stride(), dtype=here.dtype, device=here.device).copy_(here)
            is_cut, collectives = section.layout.num_shards > 1, self._collectives
            with self._store.counters.bringing(place.name, param.nbytes):
                with collectives.together(call, may_be_alone=True) if is_cut else nullcontext():
                    self._check_alone(place)
                    unit.wait_for_update()
                    mine = read(self._store, section.shard, place.span(self._shard_index))
                whole = collectives.gather_param(section.layout, piece, mine, f"parameter {place.name}")
                return piece.spec.view(whole).to(param.device)

    def _check_alone(self, place: ParamPlace) -> None:
        self._life.check_usable()
        self._tracker.check_alone(f"parameter {place.name} is read")

    def keeps_master(self, param: nn.Parameter) -> bool:
        return self._places[param].section.layout.has_master_apart

    def obstacle_to_writing(self, param: nn.Parameter) -> str:
        place = self._places[param]
        if self._tracker.active:
            return "a forward or backward runs"
        if place.unit.writable:
            return f"zo.gathered(mode='write') has parameters of {place.unit.name} in memory until it ends"
        return ""

    def note_rounding(self, param: nn.Parameter) -> None:
        place = self._places[param]
        dtype = place.section.layout.dtype
        if dtype not in (torch.bfloat16, torch.float16) or self._has_told_rounding:
            return
        self._has_told_rounding = True
        warn_user(
            f"{place.name} is changed in place, was frozen at zo.offload and so has {dtype} alone, no fp32 master. A "
            f"change of less than {torch.finfo(dtype).eps / 4:.1g} of a value is lost, as in an average of decay "
            "0.999. Keep it in fp32 by zo.Precision(modules={...: 'fp32'})"
        )

    def write_value(
        self, param: nn.Parameter, values: torch.Tensor, *, of_16_bits: bool = False, is_drawn: bool = False
    ) -> None:
        place = self._places[param]
        self._life.check_usable()
        self._tracker.check_alone(f"parameter {place.name} is changed")
        self._tracker.recover()
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            values = values.detach().to("cpu")
            of_16_bits |= values.dtype != torch.float32
            call = f"a change of parameter {place.name}"
            if is_drawn:
                is_part = bool(place.piece.spec.division)
                values = self._collectives.of_first(values, f"random values for {call}", is_part=is_part)
            elif of_16_bits:
                self._note_loss(place, values)
            self._states.replace(call, [(place, values)], of_16_bits=of_16_bits)

    def note_assigned(self, param: nn.Parameter, values: torch.Tensor | None) -> None:
        if values is not None and type(values) in (torch.Tensor, nn.Parameter) and not values.is_inference():
            self._life.assigned[id(param)] = self._places.name_of(param), Given.of(values)
        else:
            self._life.assigned.pop(id(param), None)

    def _note_loss(self, place: ParamPlace, values: torch.Tensor) -> None:
        """16-bit values replace those of a parameter that was updated; its master may be rounded by that."""
        if self._has_told_loss or not place.section.layout.has_master_apart:
            return
        if not self._states.param_steps[place.name]:
            return
        place.unit.wait_for_update()
        old = read_values(self._store, place.section.shard, place.span(self._shard_index))
        if not torch.equal(old, place.piece.spec.elements(values)[place.own(self._shard_index)].to(old.dtype)):
            self._has_told_loss = True
            warn_user(
                f"{place.name} is given 16-bit values that are not its own, and its fp32 master is these from now on. "
                "Where weights are swapped for an evaluation and come back, each master has lost 16 bits. Copy masters "
                'back (zo.gathered(model, kind="master")), or evaluate a model of its own (zo.copy(model, config))'
            )

    def begin_walk(self, module: nn.Module, call: FrameType) -> None:
        """`detach` gives copies and `copy_` writes, until `end_walk` of the module: what state_dict and
        load_state_dict do. Those of modules inside of it belong to the same walk. `call` may be left by an exception,
        and `end_walk` not come."""
        if self.walking:
            return
        self._life.check_usable()
        # A unit that a broken backward has left in use would be read and written as plain parameters.
        self._tracker.recover()
        self._walk, self._walks_over = call, module
        self._writes.clear()
        self._copies.clear()

    @property
    def is_divided(self) -> bool:
        return any(place.is_divided for place in self._places.all())

    def end_walk(self, module: nn.Module, *, has_masters: bool = False) -> None:
        """Write what was copied in, section by section, if anything was. `has_masters`: where values are what they
        were, fp32 masters were copied in."""
        if self._walks_over is not module:
            return
        self._walk, self._walks_over = None, None
        try:
            if self._writes:
                copied_in = [place for copied in self._writes.values() for place, _ in copied]
                self._states.reserve(place.section.shard for place in copied_in)
                self._states.values_replaced(() if has_masters else {place.name for place in copied_in})
                self._compare_written()
            self._copies.clear()
            for copied in self._writes.values():
                self._states.write_masters([(place, _whole(values)) for place, values in copied])
        finally:
            written = [place for copied in self._writes.values() for place, _ in copied]
            replaced(self._prefetcher, [(place.unit, place.param) for place in written])
            self._writes.clear()

    def _compare_written(self) -> None:
        """Ranks raise in the next call that all make where they have written other values than this one now does.
        Each has its own part of a DTensor, and reads its own of what ranks divide."""
        written = {
            place.name: values
            for copied in self._writes.values()
            for place, values in copied
            if not is_dtensor(place.param) and type(values) in (torch.Tensor, nn.Parameter)
        }
        if written:
            more = f" and {len(written) - 1} other parameters" if len(written) > 1 else ""
            what = f"what was written to {next(iter(written))}{more}"
            self._collectives.compare(what, lambda: Compared.of({what: f"{word_of(_words_of(written)):08x}"}))

    @property
    def walking(self) -> bool:
        return self._walk is not None and runs(self._walk)

    def copy_out(self, param: nn.Parameter) -> torch.Tensor:
        """The parameter's value, a `StateCopy`, host; one for all of its names. In a walk no update comes between.
        Where ranks divide the parameter, a tensor that knows where the values are. A parameter that consists of other
        tensors has a copy that consists of theirs.
        """
        if is_wrapper(param):
            return wrapper_copy(param, self.copy_out)
        if self._places[param].is_divided:
            return StateTensor(param, Component.VALUE, param.dtype, owner=owner_of(param))
        if id(param) not in self._copies:
            place = self._places[param]
            place.unit.wait_for_update()
            with torch.inference_mode(False):  # whose tensors count no changes
                values = host_reserved((place.piece.spec.numel,), place.section.layout.dtype)
                lazy = self._store.read_lazily(place.section.shard, place.piece.begin, values)
                values = place.piece.spec.view(values)
            self._copies[id(param)] = state_copy(param, place.name, values, lazy)
        return again(self._copies[id(param)])

    def read_number(self, param: nn.Parameter) -> float:
        """The parameter's one element, from the rank that has it."""
        place = self._places[param]
        place.unit.wait_for_update()
        begin, end = place.span(self._shard_index)
        shard, dtype = place.section.shard, place.section.layout.dtype
        number = read_values(self._store, shard, (begin, end)) if end > begin else host_zeros(1, dtype)
        return self._collectives.of_one_shard(number, f"the value of {place.name}").item()

    def copy_in(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """Take new values, of the parameter's shape; written when the walk ends."""
        if isinstance(values, StateCopy | StateTensor) and values.shows(param):
            # It is what is there: that is counted as a change, as torch does, and no master is rounded.
            torch.autograd.graph.increment_version(param)
            if isinstance(values, StateCopy):
                values.source.follow()
            return
        place = self._places[param]
        copied = self._writes.setdefault(id(place.section), [])
        copied[:] = [*(each for each in copied if each[0] is not place), (place, values)]

    def write_param(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """As load_state_dict does, but what stays as it was keeps its fp32 master. Inside of a walk, at its end."""
        walk = nn.Module()
        self.begin_walk(walk, sys._getframe())
        with torch.no_grad():
            param.copy_(self._states.with_masters(self._places[param], values))
        self.end_walk(walk, has_masters=True)

    # Gradients

    def read_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            if param.grad is not None:
                return param.grad  # on its way from autograd: a hook of the program looks at it
        if param not in self._places:
            return None  # a quantized weight, which consists of others
        place = self._places[param]
        check_not_updated(self._grads.arriving, param, place.name)
        if param in self._grads.ledger.zeroed:
            return self._handle(param)
        if not place.section.layout.trainable:
            return None
        if not self._grads.arriving.updates_in_backward:
            self._grads.share(param)
        if self._grads.ledger.held(param):
            self._tracker.recover()
        if not self._grads.ledger.held(param):
            if not (_zeroes_module(sys._getframe()) and self._grads.ledger.is_kept(param)):
                return None
            self._grads.zero([param])
            if not self._grads.ledger.held(param):
                return self._handle(param)
        view = self._grads.view(param)
        if view is None and self._grads.arriving.updates_in_backward:
            raise ConfigError(
                f"the gradient of {place.name} waits for a backward that updates the parameter (overlap='backward'); "
                "what looks at gradients before that needs overlap='forward'"
            )
        return self._handle(param) if view is None else view

    def _handle(self, param: nn.Parameter) -> GradHandle:
        return GradHandle.of(param, weakref.ref(self._grads), self._grads.life_of(param))

    def write_grad(self, param: nn.Parameter, grad: torch.Tensor | None) -> None:
        if grad is not None and not isinstance(grad, torch.Tensor):
            raise TypeError(f"assigned grad expected to be a Tensor or None but got grad of type {type(grad).__name__}")
        if isinstance(grad, GradHandle) and (kept := grad.kept) is not None:
            grad = kept
        if isinstance(grad, GradHandle) and grad.param is param and grad.root() is grad:
            self._grads.check_held(param, grad.life)
            return
        with torch._C.DisableTorchFunctionSubclass():
            if grad is not None and param.grad is not None:
                param.grad = grad  # on its way from autograd: a hook of the program changes it
                return
        if grad is None:
            self.drop_grads([param])
            return
        if self._grads.is_shown(param, grad):
            return
        values = grad.clone() if isinstance(grad, GradHandle) else grad.detach()
        if isinstance(grad, GradHandle) and grad.param is not param:
            raise ZeroOffloadError(
                f"{grad.describe()} was assigned to {self._places.describe(param)} too. In plain torch both are one "
                "tensor then, and changes of one are those of the other; here each gradient rests for itself. Assign a "
                "copy: other.grad = param.grad.clone()"
            )
        is_trainable = self._places[param].section.layout.trainable
        if values.shape == param.shape and not values.any() and not (is_trainable and self._grads.shows_memory(param)):
            self.drop_grads([param])
            if is_trainable:
                self._grads.check_unshared(param, grad)
                self._grads.zero([param])
                self._grads.note_given(param, grad)
            return
        self._check_assigned(param, values, is_trainable)
        self._grads.check_unshared(param, grad)
        self.drop_grads([param])
        if not self._grads.adopt(param, grad):
            self._grads.write(param, values)
            self._grads.note_given(param, grad)

    def _check_assigned(self, param: nn.Parameter, grad: torch.Tensor, is_trainable: bool) -> None:
        """Raise unless `grad` can be the gradient of the next step."""
        what = f"the gradient of {self._places.describe(param)} cannot be"
        if grad.shape != param.shape or is_dtensor(param):
            raise ZeroOffloadError(
                f"{what} of shape {tuple(grad.shape)}; assign an ordinary tensor of shape {tuple(param.shape)}"
            )
        if grad.layout is not torch.strided or not grad.is_floating_point():
            raise ZeroOffloadError(f"{what} of {grad.dtype}, {grad.layout}; assign a dense tensor of real numbers")
        if not is_trainable:
            raise ZeroOffloadError(
                f"{what} assigned: the parameter is frozen. Call requires_grad_(True) on it first, between steps"
            )
        if self._grads.arriving.updates_in_backward:
            raise ConfigError(
                f"{what} assigned with overlap='backward', where a backward uses its gradients itself; offload with "
                "overlap='forward'"
            )
        self._grads.check_complete(param)
        self._grads.share(param)

    def holds_grad(self, param: nn.Parameter) -> bool:
        return self._grads.ledger.held(param)

    def zero_grads(self, params: Collection[nn.Parameter]) -> None:
        params = tensors_of(params)
        self._check_not_updated(params)
        self._grads.zero([param for param in params if self._grads.ledger.is_kept(param)])

    def _check_not_updated(self, params: Collection[nn.Parameter]) -> None:
        if not self._grads.arriving.updated.isdisjoint(params):
            self._life.check_usable()
            for param in params:
                check_not_updated(self._grads.arriving, param, self._places.name_of(param))

    def drop_grads(self, params: Collection[nn.Parameter]) -> None:
        params = tensors_of(params)
        self._check_not_updated(params)
        for param in self._grads.in_hand(params):
            with suppress(CapacityError):  # a use of it raises then
                self._store.arena.look(4 * param.numel(), A_BUFFER)
                self._grads.keep(param)
        with torch._C.DisableTorchFunctionSubclass():
            for param in params:
                param.grad = None
        self._grads.arriving.clear(params, by_program=True)


def _whole(values: torch.Tensor) -> torch.Tensor:
    """Values for a parameter; read now, by all ranks, where they are those of a parameter that ranks divide, as a state
    dict has it."""
    owner = owner_of(values.param) if isinstance(values, StateTensor) else None
    if owner is None or not isinstance(values, StateTensor) or not values.shows(values.param):
        return values
    return owner.access.read_value(values.param)


def _zeroes_module(frame: FrameType | None) -> bool:
    """True if `nn.Module.zero_grad(set_to_none=False)` asks for a gradient."""
    while frame is not None and frame.f_code is not nn.Module.zero_grad.__code__:
        frame = frame.f_back
    return frame is not None and not frame.f_locals["set_to_none"]
