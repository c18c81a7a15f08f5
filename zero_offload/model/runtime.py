"""`ModelRuntime`: what parameters, optimizers and the public functions talk to once a model is offloaded.

Owns the step: which gradients an update takes, and what is recorded of it. Moves no bytes: it asks the runtime, the
update pipeline and the keeper of generations, which know nothing of each other. Backward fills `grads`, which clips
them; `unscale`; `update` captures everything by value and launches. `commit` begins when it is complete and runs beside
the next step (`commits.py`). Where the update runs inside of backward (`backward_updates.py`), `update` closes the
step.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_offload.base.alike import Compared
from zero_offload.base.ends import at_exit
from zero_offload.base.errors import CapacityError, CheckpointError, ConfigError, ZeroOffloadError
from zero_offload.base.problems import list_problems, warn_user
from zero_offload.base.spans import Track
from zero_offload.base.stats import Stats
from zero_offload.base.types import Durability, Tier, format_bytes
from zero_offload.checkpoint.base_record import files_of
from zero_offload.checkpoint.extras import NotedForms
from zero_offload.checkpoint.format import CHANGES_MAX, Change, Generation, StepRecord
from zero_offload.checkpoint.generation import GenerationKeeper
from zero_offload.checkpoint.portable import save
from zero_offload.checkpoint.saved_generation import SavedGeneration
from zero_offload.checkpoint.values import replace_masters
from zero_offload.hardware.device import read_memory
from zero_offload.hardware.kernels.arguments import Hyper
from zero_offload.hardware.probe import peak_resident_bytes
from zero_offload.model.assembly import Assembly
from zero_offload.model.commits import JointStep
from zero_offload.model.move_in import CastBuffer
from zero_offload.model.params import ModelParams, ModelPlaces, ModelStates, ParamPlace, by_section, is_within
from zero_offload.model.parts import ModelParts
from zero_offload.model.thaw import (
    check_fits,
    check_frozen,
    check_trainable,
    counted,
    freeze_section,
    install_section,
    thaw_section,
)
from zero_offload.model.updates import Sections, check_holds_grads, failing
from zero_offload.optim.optimizer import FusedOptimizer
from zero_offload.optim.optimizers import ours_for
from zero_offload.optim.param_groups import Names
from zero_offload.optim.unitwise.optimizer import Unitwise
from zero_offload.plan.layout import ShardLayout
from zero_offload.plan.memory import Sizes
from zero_offload.plan.quantized import is_wrapper, offloaded_tensors
from zero_offload.runtime.grads.gradients import check_closed
from zero_offload.runtime.grads.section import GradState
from zero_offload.runtime.hooks import hook_grads, unhook_grads
from zero_offload.runtime.prefetcher import replaced
from zero_offload.runtime.ranks.watch import Notice
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.standins.guard import unguard
from zero_offload.standins.owners import live_owners, not_adopted, owner_of, register, unregister
from zero_offload.standins.sources import LossScaler, Owner, ParamTensors, Trainer, UnitStep
from zero_offload.storage.files.base_file import BaseSpan, missing_text
from zero_offload.storage.memory.arena import Need
from zero_offload.storage.shards.shard import Shard
from zero_offload.storage.shards.store import ShardStore

SAME = 1e-6
"""Sums of squares of the same gradients may differ by so much of them, between machines."""

NOT_ALONE = "so not under 'if rank == 0:'"
"""See `ModelRuntime.together`."""

TOLD_READS = 0.1
"""The share of a step from which a warning says what reads of single parameters cost."""

Capture = Callable[[], dict[str, Any]]
"""The program's part of a generation: `StepRecord.rng` and `.buffers`."""


class ModelRuntime(Owner):
    """One offloaded model, built by `offload()`."""

    places: ModelPlaces
    access: ModelParams
    parts: ModelParts

    def __init__(self, made: Assembly) -> None:
        base = self.base = made.base
        self.config, self.layout, self.sizes, self.device = base.config, base.layout, base.sizes, base.device
        self.ranks, self.collectives, self.life, self.errors = base.ranks, base.collectives, base.life, base.errors
        self.store, self.files, self.activations = base.store, base.files, base.activations
        self.units, self.prefetcher, self.without_values = base.units, base.prefetcher, base.without_values
        self.places, self.access, self.parts, self._states = made.places, made.access, made.parts, made.states
        self.grads, self.grad_access = made.grads, made.grad_access
        self.tracker, self.experts = made.tracker, made.experts
        self._updates, self._in_backward, self._commits = made.updates, made.in_backward, made.commits
        self._stats, self._end = made.stats, made.end
        # Weak: hooks of modules hold this object.
        self._roots: list[weakref.ref[nn.Module]] = []
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        """The modules that the model had when it was offloaded, or when parameters were last adopted."""
        self._hooked: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()
        """Indices of the units for which a module is hooked."""
        self.names = Names(in_order=False)
        self.about: Mapping[str, Any] = {}
        """The model's own description, for manifests; of rank 0."""
        self.built_buffers: NotedForms = weakref.WeakKeyDictionary()
        """Dtypes and shapes of the buffers when they were offloaded."""
        self.cast_buffers: frozenset[str] = frozenset()
        """Names of the buffers that `zo.offload` gave another dtype."""
        self.watched_buffers: Sequence[CastBuffer] = ()
        """Those of them that are narrower now, until the program has changed one, or made two steps."""
        self.iterations = made.commits.iterations
        self.uncounted = ""
        """Why the states' count of iterations is not known; see `Generation.uncounted`."""
        self.changes: list[Change] = []
        """How the model has changed since it was offloaded; the last changes."""
        self.skipped_steps = 0
        self.groups: list[dict[str, Any]] = []
        """Param groups as the last step or commit gave them."""
        self._has_new_grads = False
        self._num_steps_here = 0
        self._has_told_reads = False
        self._scaler: LossScaler | None = None
        self._named: list[tuple[weakref.ref[nn.Module], int | None, dict[int, str]]] = []
        """Modules given to zo.offload, each with a word for what is in it, and the names of its parameters. None where
        some are not offloaded, and may be trained at any time."""
        self.resume_pending = self.keeper is not None and self.keeper.found is not None
        """True if a generation's tensors are loaded, and the program has not asked for the rest of it."""
        at_exit(self._close_at_exit)

    @property
    def keeper(self) -> GenerationKeeper | None:
        return self.files.keeper

    @property
    def states(self) -> ModelStates:
        """For optimizers."""
        self.life.check_alive()
        return self._states

    @property
    def step_count(self) -> int:
        """Iterations in the states; that of the last step counts, ended or not."""
        return self.iterations.count

    @property
    def makes_generations(self) -> bool:
        return self.keeper is not None

    # Gradients

    def grad_ready(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        """Autograd has a parameter's gradient."""
        if self.tracker.end_ref() is None:
            self.tracker.note_backward()
        if not self._has_new_grads:
            self._has_new_grads = True
            self._commits.launch_due()
        if self._in_backward is not None:
            self._in_backward.arriving(param, in_forward=bool(self.tracker.forwards))
        self.grads.arrive(param, grad)

    def train_with(self, optimizer: Trainer, params: Iterable[nn.Parameter]) -> None:
        self.iterations.add_optimizer(optimizer, map(self.places.name_of, params))
        if self._in_backward is not None:
            self._in_backward.add_trainer(optimizer)

    def unscale(self, scaler: LossScaler, overflowed: bool) -> bool:
        with self.together_and_reduce("scaler.unscale_"):
            check_holds_grads(self.config, "zo.GradScaler")
            settings = {f"{name} of the loss scale": value for name, value in scaler.settings().items()}
            self.compare("loss scale", lambda: Compared.of(settings))
            self._scaler = scaler
            self.tracker.recover()
        return self.grad_access.unscale(scaler.get_scale(), overflowed)

    def instead_of(self, optimizer: torch.optim.Optimizer) -> str | None:
        return None if isinstance(optimizer, FusedOptimizer | Unitwise) else ours_for(optimizer)

    def check_unitwise(self, call: str, *, together: bool) -> None:
        problems = []
        if together and self.collectives.num_shards > 1:
            problems.append(f"units='all' needs all of it on each rank, and {self.collectives.num_shards} divide it")
        pieces = (piece for section in self.layout.sections if section.trainable for piece in section.params)
        if divided := next((piece.spec.name for piece in pieces if piece.spec.division), None):
            problems.append(f"{divided} is a DTensor of which each rank has a part; such a step needs whole parameters")
        if self._in_backward is not None:
            problems.append('overlap="backward" updates while gradients come; offload with overlap="forward"')
        if problems:
            raise ConfigError(list_problems(f"{call} cannot step {self.model_name}", problems))

    @property
    def step_device(self) -> torch.device:
        return self.device.torch_device

    @property
    def has_states_on_device(self) -> bool:
        return any(shard.on_device for shard in self.store.shards)

    # Parameters beside the offloaded ones

    def live_roots(self) -> Iterator[nn.Module]:
        """The modules that were given to zo.offload, the first one first."""
        return filter(None, (reference() for reference in self._roots))

    def has_root(self, module: nn.Module) -> bool:
        return any(root is module for root in self.live_roots())

    def root_of(self, params: Iterable[torch.Tensor]) -> nn.Module | None:
        """The first module given to zo.offload that has all of these."""
        wanted = set(map(id, params))
        return next(
            (root for root in self.live_roots() if wanted <= {id(each) for _, each in offloaded_tensors(root)}), None
        )

    def add_root(self, module: nn.Module, undo: ExitStack) -> None:
        if not self.has_root(module):
            self._roots.append(weakref.ref(module))
            undo.callback(self._roots.pop)
        new = [each for each in module.modules() if each not in self.modules]
        undo.callback(self.modules.difference_update, new)
        self.modules.update(new)

    def new_points(
        self, root: nn.Module, points: Mapping[str, Sequence[Unit]], undo: ExitStack
    ) -> dict[str, Sequence[Unit]]:
        """Those of `points` that are to be hooked; from now on they are."""
        found = dict[str, Sequence[Unit]]()
        for name, units in points.items():
            known = self._hooked.setdefault(root.get_submodule(name), set())
            new = {unit.index for unit in units} - known
            if new or not units:
                found[name] = units
            undo.callback(known.difference_update, new)
            known |= new
        return found

    def tensors_of_roots(self) -> set[int]:
        """Ids of all that the modules given to zo.offload have now."""
        return {id(each) for root in self.live_roots() for _, each in offloaded_tensors(root)}

    @property
    def class_name(self) -> str:
        """For messages."""
        root = next(self.live_roots(), None)
        return "model" if root is None else type(root).__name__

    @property
    def model_name(self) -> str:
        """For messages."""
        names = (piece.spec.name for section in self.layout.sections for piece in section.params if not piece.is_gone)
        return f"an offloaded {self.class_name} (the one with {next(names, 'no parameter')})"

    def is_part_of(self, module: nn.Module) -> bool:
        """True if a model that was given to zo.offload is in `module`, or the other way round."""
        inside = set(module.modules())
        return any(root in inside or module in set(root.modules()) for root in self.live_roots())

    def check_between_uses(self, what: str) -> None:
        """Raise where the layout cannot change now, as `what` does; updates and commits are over."""
        self.life.check_alive()
        self.errors.check_whole()
        if self.tracker.active or self.tracker.forwards or any(unit.gathered_uses for unit in self.units):
            raise ZeroOffloadError(f"{what} between steps, and this is inside of a forward, a backward or zo.gathered")
        self.tracker.recover()

    def grow(
        self,
        layout: ShardLayout,
        sizes: Sizes,
        units: Sequence[Unit],
        landing_bytes: int,
        param_steps: Mapping[str, int],
    ) -> None:
        """Add further units, which are filled with states of so many updates. Nothing is under way, and nothing here
        fails."""
        self.layout, self.sizes = layout, sizes
        self.units.extend(units)
        self.prefetcher.grow(landing_bytes)
        self.grads.grow(units, stay_in_memory=self.base.stays_in_memory)
        self.tracker.grow(units)
        self.places.grow(units)
        self._states.grow(sizes.plan, param_steps)

    def finish_steps(self) -> None:
        """Before the model changes: the last step becomes a generation, if it is due."""
        self._commits.launch_due()
        self.drain()

    def change(
        self,
        layout: ShardLayout,
        gone: Collection[str],
        names: Mapping[str, tuple[str, ...]],
        empty: Sequence[Section],
        change: Change,
    ) -> None:
        """The model has lost parameters, and has others under new names, as `layout` says; sections `empty` have none
        left. Nothing is under way, and nothing here fails."""
        self.layout = layout
        self.tracker.forget(empty)
        for shard in self.store.shards:
            now = layout.sections[shard.layout.index]
            if now.params or not shard.layout.params:
                shard.layout = now
        self.grads.lay_out([section.shard for section in empty])
        for section in empty:
            self.store.vacate(section.shard, layout.sections[section.layout.index])
        for unit in self.units:
            unit.change(layout.units[unit.index])
        self.places.change(self.units)
        self._states.change_names(gone, names)
        self._states.resting -= {section.layout.index for section in empty}
        self.iterations.change_names(gone, names)
        self.names = Names(in_order=False)
        self.changes = [*self.changes, change][-CHANGES_MAX:]
        if self.keeper is not None:
            self.keeper.change(layout)

    def leave_empty(self, place: ParamPlace) -> None:
        """A frozen parameter that no module has stands where one has been: the section stays for the others in it."""
        old, new = place.param, nn.Parameter(place.section.own_view(place.piece), requires_grad=False)
        place.unit.replace(old, new)
        self.grads.ledger.replace(old, new)
        self.places.replace(place, new)
        register(new, self)

    def release(self, param: nn.Parameter, values: torch.Tensor) -> None:
        place = self.places[param]
        call = f"an assignment of shape {tuple(values.shape)} to {place.name}.data"
        with self.together(call):
            self.check_between_uses(call)
            if not place.may_go:
                raise ConfigError(f"{call}: a quantized weight, a DTensor or experts in groups keep their shape")
        self.finish_steps()
        self._states.readers.before_replacing([param])
        self.access.drop_grads([param])
        self._states.change()
        self.prefetcher.invalidate(place.unit)
        self.leave_empty(place)
        unregister(param)
        unhook_grads(param)
        unguard([param])
        param.data = values
        place.unit.guard()
        self._named = [(root, None, names) for root, _, names in self._named]

    def check_copies(self, param: nn.Parameter, memo: dict[int, Any]) -> None:
        if id(self) in memo:
            return
        copied = [module for module in self.modules if id(module) in memo]
        if copied:
            memo[id(self)] = self  # the modules around the first parameter are known, so this was all of it
        tensors = {id(each): each for module in copied for _, each in offloaded_tensors(module)} or {id(param): param}
        nbytes = sum(each.numel() * each.itemsize for each in tensors.values())
        what = f"copy.deepcopy makes {len(tensors)} ordinary parameters of {self.model_name}"
        advice = "zo.copy(model, config) makes a copy that is offloaded, some chunks at a time"
        memory = read_memory(self.device.torch_device)
        if memory is not None:
            left, of = memory.free + memory.reserved - memory.allocated, self.device.name
        elif self.config.cpu_memory is not None:
            left, of = self.sizes.plan.left_bytes(Tier.CPU), "cpu_memory= beside the model"
        else:
            left, of = nbytes, ""
        if nbytes > left:
            raise CapacityError(
                f"{what}: {format_bytes(nbytes)} are needed, {format_bytes(max(left, 0))} are left of {of}. {advice}"
            )
        if memory is None:
            self.store.arena.look(nbytes, Need(what, advice, is_planned=False))

    def note_names(self) -> None:
        """The model's parameters are called as they are now."""
        self._named = []
        for root in self.live_roots():
            is_whole = all(param in self.places or is_wrapper(param) for param in root.parameters())
            self._named.append((weakref.ref(root), _structure_of(root) if is_whole else None, _first_names(root)))

    def _changed_roots(self) -> list[tuple[nn.Module, dict[int, str]]]:
        """Modules given to zo.offload that are not as they were then, with the names of then."""
        found = [(reference(), word, names) for reference, word, names in self._named]
        return [(root, names) for root, word, names in found if root is not None and word != _structure_of(root)]

    def check_names(self, call: str, changed: Sequence[tuple[nn.Module, dict[int, str]]]) -> None:
        """Raise if names of parameters are others' since zo.offload: generations would have them as they were."""
        for root, before in changed:
            now, holders, ordinary = dict[int, list[str]](), dict[str, int](), set[int]()
            for name, tensor in offloaded_tensors(root, remove_duplicate=False):
                now.setdefault(id(tensor), []).append(name)
                holders[name] = id(tensor)
                if owner_of(tensor) is None:
                    ordinary.add(id(tensor))
            # A layer that something is put around keeps its name, unless another parameter has it. A layer that is gone
            # does too: a resume without it says so.
            lost = [
                name
                for key, name in before.items()
                if holders.get(name, key) != key or key in ordinary or (key in now and not is_within(name, now[key]))
            ]
            if lost:
                raise ConfigError(
                    f"{call}: {len(lost)} parameters were moved in the model, or replaced, after zo.offload "
                    f"({_some(lost)}). Generations would have them as they were. Call zo.offload(model) again, which "
                    "takes the model as it is, and then this"
                )
        if changed:
            self.note_names()

    def thaw(self, param: nn.Parameter) -> None:
        place, thawed = self.places[param], None
        call = f"requires_grad_(True) of {place.name}"
        with ExitStack() as undo:
            with self.together(call):
                check_trainable(self.config, self.modules, place)
                self.check_between_uses(f"{call}, which was frozen when zo.offload was called, works")
            self._drop_deleted_states()  # what rests gives its room to what is trained
            index, sizes = place.section.layout.index, self.sizes
            resting = self._states.resting - {index}
            if not place.section.layout.trainable:
                self.drain()
                with self.together(call):
                    self.check_whole(call)
                    trained = self.places.once_trained()
                    thawed = thaw_section(self.base, self.layout, sizes, place, resting, trained, undo)
                sizes = thawed.sizes
            elif index in self._states.resting:
                with self.together(call):
                    sizes = counted(self.base, self.layout, sizes, [index], resting)
                    check_fits(sizes, place, self.store.retired_bytes)
            with torch._C.DisableTorchFunctionSubclass():
                undo.callback(setattr, param, "requires_grad", False)
                param.requires_grad = True
                if not self.places.is_hooked(param):
                    hook_grads(param, self.grad_ready, undo)
            undo.pop_all()
        # Nothing from here on fails.
        if thawed is not None:
            self.layout = thawed.layout
            install_section(self.base, thawed)
            self.grads.thaw(place.unit, place.section)
        self._states.resting.discard(index)
        self._count_as(sizes)
        self.places.note_trained(param)

    def drop_masters(self, params: Iterable[nn.Parameter]) -> None:
        places = [place for place in map(self.places.__getitem__, params) if place.section.layout.trainable]
        if not places:
            return
        call = f"the end of {len(places)} masters (the first: that of {places[0].name})"
        with self.together(call):
            check_frozen(call, places)
            self.check_between_uses(f"{call} comes")
        self._states.readers.before_replacing([place.param for place in places])
        self._states.change()
        self._drop_deleted_states()
        for of_section in by_section(places):
            section = of_section[0].section
            is_whole = len(of_section) == sum(not each.piece.is_gone for each in self.places.of(section))
            if is_whole and self._states.is_idle(section, self.grads.ledger.held):
                self._freeze(of_section[0])
            else:
                self._states.round_masters(of_section)

    def _freeze(self, place: ParamPlace) -> None:
        """A section that has thawed has its values alone again, as at `zo.offload`."""
        section, index = place.section, place.section.layout.index
        if section.shard.states:  # of parameters that had no step
            self.store.drop_states(section.shard)
        with ExitStack() as undo:
            with self.ranks.together():
                layout, before = freeze_section(self.base, self.layout, place, undo)
            undo.pop_all()
        # Nothing from here on fails.
        self.layout = layout
        self.store.retire(before)
        place.unit.lay_anew(layout.units[place.unit.index])
        self.grads.freeze(section)
        if self.keeper is not None:
            self.keeper.relayout(layout)
        self._states.resting.discard(index)
        self.places.note_resting(section)
        self._count_as(counted(self.base, layout, self.sizes, [index], self._states.resting))

    def _count_as(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._states.grow(sizes.plan, {})

    def _drop_deleted_states(self) -> None:
        """Before states are used or kept: those that the program has deleted are zero, or go with their room."""
        if not self._states.has_stale:
            return
        dropped = self._states.drop_idle(self.grads.ledger.held)
        for section in dropped:
            self.places.note_resting(section)
            self.grads.rest(self.places.of(section)[0].param)
        if indices := [section.layout.index for section in dropped]:
            self._count_as(counted(self.base, self.layout, self.sizes, indices, self._states.resting))
        self._states.zero_stale()

    def train_again(self, found: Generation) -> None:
        """Parameters that were thawed when a generation was made require a gradient again, and states that had gone
        have no room."""
        resting = found.resting_in(self.layout)
        for section in {id(place.section): place.section for place in self.places.all()}.values():
            index = section.layout.index
            if index in resting and not any(each.param.requires_grad for each in self.places.of(section)):
                self._states.resting.add(index)
                self.places.note_resting(section)
        if self._states.resting:
            self._count_as(counted(self.base, self.layout, self.sizes, self._states.resting, self._states.resting))
        for place in self.places.all():
            if place.name in found.thawed and self.places.is_frozen(place.param):
                self.thaw(place.param)

    def take_room(self, shards: Iterable[Shard]) -> None:
        """Room on drives for frozen shards that were taken to rest in files, and are to be written.

        Raises CapacityError where there is not enough for all, and takes none.
        """
        new = [shard for shard in shards if not (shard.layout.trainable or shard.slots)]
        needed = self.store.bytes_of_slots(new)
        left = self.sizes.plan.left_bytes(Tier.NVME)
        what = f"{len(new)} frozen sections are to be written, since no file has them as they are used (dtype, layout)"
        if self.config.nvme_capacity is not None and needed > left:
            raise CapacityError(
                f"{what}: they take {format_bytes(needed)} of the drives, and nvme_capacity leaves "
                f"{format_bytes(max(left, 0))}; raise it, or give files in the compute dtype"
            )
        try:
            self.store.lay_out(new)
        except CapacityError as error:
            raise CapacityError(f"{what}. {error}, or give files in the compute dtype") from error

    def check_whole(self, call: str) -> None:
        """Raise if a generation has more than this model: what is made of the rest would be all that is kept."""
        keeper = self.keeper
        if keeper is not None and (names := keeper.awaited):
            raise ConfigError(
                f"{call}: {keeper.found} has {len(names)} further parameters ({_some(names)}), which a second "
                "zo.offload(model) had adopted. Add them to this model too and call zo.offload(model) again; to go on "
                "without them, start over with existing='discard' or in another directory"
            )

    def added_since(self) -> dict[nn.Parameter, str]:
        found: dict[nn.Parameter, str] = {}
        for root in self.live_roots() if not self.life.is_closed else ():
            held = (param for module in root.modules() for param in module._parameters.values() if param is not None)
            # In every commit: names are asked for where there are some, and what is at rest answers through Python.
            if any(param not in self.places and _is_ordinary(param) for param in held):
                named = root.named_parameters()
                found |= {param: name for name, param in named if param not in found and _is_ordinary(param)}
        return found

    def check_adopted(self, call: str) -> None:
        """Raise if the model has trained parameters that are not offloaded: they would be lost."""
        if added := self.added_since():
            raise not_adopted(call, list(added.values()))

    def check_ordinary(self, call: str, squares: Callable[[], float]) -> None:
        if self.ranks.world_size == 1:
            return
        total = squares()
        least, most = self.collectives.extremes(total if math.isfinite(total) else math.inf)
        if least != most and (math.isinf(most) or most - least > SAME * most):
            raise ConfigError(
                f"{call}: the gradients of parameters that are not offloaded differ between ranks: their norm is "
                f"{math.sqrt(least):.6g} on one and {math.sqrt(most):.6g} on another. Nothing reduces them: put their "
                "modules into the model and call zo.offload(model) again, which adopts them, or wrap them in "
                "DistributedDataParallel. What ranks train each for itself needs an optimizer and a clip of its own"
            )

    # The step

    @contextmanager
    def together(self, call: str, instead: str = "", notice: Notice | None = None) -> Iterator[None]:
        """A block at the beginning of `call`, which all ranks make, succeeds on all of them, or all raise.

        Some calls are easily made on one rank alone. For them `instead` says what to do instead: in every error, and in
        a warning while this rank waits for the others. `notice` as in `Agreement.together`.
        """
        self.life.check_alive()  # a forked child has its parent's channel to the others
        may_be_alone = bool(instead) and self.ranks.world_size > 1
        what = f"{call}, which all ranks call ({instead})" if may_be_alone else call
        with self.collectives.together(what, notice, may_be_alone=may_be_alone):
            yield

    @contextmanager
    def together_and_reduce(self, call: str) -> Iterator[None]:
        """As `together`; then gradients that earlier backwards have left on each rank are reduced. Raises too where the
        program has changed gradients on some ranks only."""
        notice = Notice()
        with self.together(call + self.grads.ledger.changes(), notice=notice):
            yield
            notice.flags = self.grads.waiting()
        self.grads.reduce_waiting(notice.flags)

    @contextmanager
    def together_in_step(self, call: str) -> Iterator[None]:
        """As `together`; rank 0 says in the same message whether this step becomes a generation. Raises too where the
        program has changed gradients on some ranks only."""
        self.life.check_alive()
        notice = Notice(self._commits.is_due_by_clock())
        with self.collectives.together(call + self.grads.ledger.changes(), notice, ends_step=True):
            yield
        self._commits.note_due(notice.given)

    def compare(self, name: str, compared: Callable[[], Compared]) -> None:
        """The next call that all ranks make compares this too; they raise where they differ."""
        self.collectives.compare(name, compared)

    def check_step(self) -> None:
        """Raise where no step can be made now."""
        self.life.check_usable()
        self.life.check_assigned()
        self.check_whole("step()")
        if self.makes_generations and not self._commits.completes:  # else zo.commit looks
            self.check_names("step()", self._changed_roots())
        if written := next((unit.name for unit in self.units if unit.writable), ""):
            raise ZeroOffloadError(
                f"step() inside of zo.gathered(mode='write'), which writes parameters of {written} back at its end, "
                "over the update; call step() after it"
            )

    def check_between_steps(self, call: str) -> None:
        """Raise where the states are not those of a whole step."""
        self.life.check_usable()
        self.check_whole(call)
        if changed := self._changed_roots():
            self.check_adopted(call)
            self.check_names(call, changed)
        check_closed(self.grads, call)

    def update(
        self, hypers: Mapping[nn.Parameter, Hyper], groups: Sequence[dict[str, Any]], optimizer: Trainer
    ) -> None:
        """After `check_step`: launch one step over the parameters of `hypers` that have gradients."""
        self._step(hypers, groups, optimizer, hypers)

    def walk(self, params: Collection[nn.Parameter], stepper: UnitStep, optimizer: Trainer) -> None:
        zeroed = self.grads.ledger.zeroed.intersection(params)
        if zeroed and stepper.is_still and not self.grads.ledger.any_held(None):
            self._begin_rows(zeroed, stepper)
            return
        self._step(dict.fromkeys(params), stepper.records(), optimizer, stepper)

    def wait_for_walk(self) -> None:
        self._updates.wait_for_worker()

    def _step(
        self,
        params: Mapping[nn.Parameter, object],
        groups: Sequence[dict[str, Any]],
        optimizer: Trainer,
        by: Mapping[nn.Parameter, Hyper] | UnitStep,
    ) -> None:
        """One step of `optimizer`, whose parameters of this model are `params`, by a rule or by a walk."""
        spans = self.store.counters.spans
        opened = spans.open(Track.STEP, "")
        self._drop_deleted_states()
        if self.watched_buffers:
            self._warn_of_narrow_buffers()
        is_made = False
        if not isinstance(by, UnitStep):
            if self.grads.ledger.zeroed:
                self._begin_states({param: hyper for param, hyper in by.items() if param in self.grads.ledger.zeroed})
            is_made = self._in_backward is not None and self._in_backward.confirm_step(by)
        self._has_new_grads = False
        self.tracker.recover()
        if is_made:
            self._count(params, groups, optimizer)
            if names := self._in_backward.take_skipped() if self._in_backward is not None else ():
                self._count_skipped(names, "units with such gradients stay as they are, others are updated")
        elif not self._update_held(params, groups, optimizer, by):
            return
        spans.close(opened, str(self.step_count))
        if spans.on:
            for tier, nbytes in self._resident_bytes().items():
                spans.sample(f"resident.{tier}", nbytes)
        passed = self._stats.end_step(self.step_count)
        self._tell_reads(passed["step_s"], passed.get("param_reads_s", 0.0), int(passed.get("param_reads", 0)))
        if not self.grads.updated:  # all optimizers have stepped
            self._commits.add(self._record(), passed["step_s"], passed.get("commit_wait_s", 0.0))
        if self.iterations.is_unended:
            self._commits.warn_unended()
        if self.resume_pending:
            self.resume_pending = False
            warn_user(
                f"training goes on from the generation of step {self.step_count - 1} without zo.resume(model, "
                "optimizer): hyperparameters, random number generators and your extra= are not restored",
            )

    def _tell_reads(self, step_s: float, reads_s: float, count: int) -> None:
        """Warn, once, where the program's own reads of parameters are more than a tenth of a step."""
        self._num_steps_here += 1
        # The first step fetches each unit late: it learns their order.
        if self._num_steps_here == 1 or self._has_told_reads or reads_s <= TOLD_READS * step_s:
            return
        self._has_told_reads = True
        warn_user(
            f"step {self.step_count} took {step_s:.3g} s, {reads_s:.3g} s of them for {count} reads of parameters "
            f"outside of the forwards of their modules (the last: {self.store.counters.last_brought}). Hooks that log "
            "values do so, averages of weights, and operations on another module's weight. Let them run in fewer "
            "steps, or give more memory; zo.stats(model).param_reads has the cost of each step"
        )

    def _begin_states(self, hypers: Mapping[nn.Parameter, Hyper]) -> None:
        """For parameters whose gradient the program has set to zeros. torch.distributed.checkpoint has an optimizer
        make its states by a step with a learning rate of 0. Here it is neither a step nor a generation, if there are no
        other gradients and none of these has had a step."""
        if not self.grads.ledger.any_held(None) and not any(
            hyper.lr or self._states.step_of(param) for param, hyper in hypers.items()
        ):
            self._states.create(hypers)
            self.grads.drop(hypers)
        elif hypers and self._in_backward is not None:
            raise ConfigError(
                f"the gradient of {self.places.name_of(next(iter(hypers)))} was set to zeros, which a step takes, and "
                "with overlap='backward' no backward has updated the parameter. Use zero_grad(set_to_none=True), or "
                "offload with overlap='forward'"
            )

    def _begin_rows(self, params: Collection[nn.Parameter], stepper: UnitStep) -> None:
        """As `_begin_states`, for an optimizer of others: its states, of zero gradients, and no other value."""
        for param in params:
            if not self._states.has_row(param):
                master = self.access.read_value(param, master=True).to(stepper.device, torch.float32)
                given = ParamTensors(master, torch.zeros_like(master), None)
                self._states.write_row(param, stepper.step({param: given})[param], stepper.kind)
        self.grads.drop(params)

    def _count(self, params: Iterable[nn.Parameter], groups: Sequence[dict[str, Any]], optimizer: Trainer) -> None:
        if self.iterations.is_over:
            self.groups = list(groups)  # of several optimizers the first one's, unless `zo.commit` is given another
        self.iterations.note_step(optimizer, map(self.places.name_of, params))

    def _update_held(
        self,
        params: Mapping[nn.Parameter, object],
        groups: Sequence[dict[str, Any]],
        optimizer: Trainer,
        by: Mapping[nn.Parameter, Hyper] | UnitStep,
    ) -> bool:
        """Update with the gradients that are held; False if there are none."""
        grads = self.grads
        grads.reduce_waiting()
        if grads.ledger.zeroed:
            self.grad_access.hold_zeros(params)
        # An overflow concerns the whole model.
        taken = None if grads.ledger.overflowed else params
        if not grads.ledger.any_held(taken):
            return False
        finite = taken is not None and grads.norms.all_finite(taken)
        counts = dict(self._states.param_steps)
        sections: Sections = []
        stepper = by if isinstance(by, UnitStep) else None
        if finite:
            self._states.readers.before_step()
            held, order = grads.ledger.sections, self.prefetcher.step_order()
            if isinstance(by, UnitStep):
                sections = self._updates.walked_of(params, held, order, counts)
            else:
                sections = self._updates.sections_of(by, held, order, counts)
            self._updates.prepare(sections, stepper)
        begins = self.iterations.is_over
        # Ctrl-C can strike anywhere below, and the program may catch it and go on.
        with failing(self.errors) if finite else nullcontext():
            self._count(params, groups, optimizer)
            if finite:
                self._states.param_steps = counts
                if self._updates.overlaps(sections, stepper):
                    self._stats.cut()
                self._updates.launch(params, sections, stepper)
                if begins and stepper is not None:
                    self.groups = stepper.records()  # with the numbers that the step has changed
            else:
                names = grads.norms.non_finite(taken)
                grads.drop(taken, to=GradState.TAKEN)
                self._count_skipped(names, "the step is skipped and the states stay as they are")
        return True

    def _count_skipped(self, names: Sequence[str], what: str) -> None:
        self.skipped_steps += 1
        # With a scaler overflows are how it finds the scale.
        if self.skipped_steps == 1 and self._scaler is None:
            warn_user(
                f"step {self.step_count}: a gradient is NaN or infinite ({_some(names) or 'on another rank'}); "
                f"{what}. zo.stats(model).skipped_steps counts such steps",
            )

    # Generations

    def adopt_generation(self, found: Generation, *, loaded: bool = False) -> None:
        """The shards are a generation's, or a checkpoint's that was loaded: so are the counts."""
        self.iterations.start(found.step)
        self.changes = self.changes if loaded else found.changes
        self.uncounted = found.uncounted
        self._states.adopt(found.payload.get("param_steps", {}))
        self._commits.start(loaded=loaded)

    def recount(self, step: int) -> None:
        """The program says how many iterations the states have."""
        self.iterations.start(step)
        self.uncounted = ""

    def note_lost_base(self, others: Mapping[str, Path] | None = None) -> None:
        """Let the model not be used while files that it rests in are gone, or have other bytes. First look for them
        among `others`, by name.
        """
        store, self.life.lost_base = self.store, ""
        if others and not all(file.is_open for file in store.base_files):
            with suppress(ZeroOffloadError):
                store.base.move(store.base_files, others)
        try:
            store.read_base()
        except ZeroOffloadError as error:
            self.life.lost_base = str(error)

    def _warn_of_narrow_buffers(self) -> None:
        """Sums and means in 16 bits may stop to change: what is added becomes smaller than their rounding."""
        changed = [each.name for each in self.watched_buffers if each.is_changed]
        if changed or self.step_count > 1:
            self.watched_buffers = ()
        if changed:
            shown = ", ".join(changed[:3]) + ", ..." * (len(changed) > 3)
            warn_user(
                f"the program changes {shown}, which zo.offload has made 16-bit as module.to(dtype) does: what is "
                f"added to such a sum or mean may be lost. Precision(buffers={{{changed[0]!r}: 'fp32'}}) keeps it"
            )

    def _beside(self) -> dict[str, int]:
        """Iterations of the other models of the program, by run."""
        others = [each for each in live_owners() if isinstance(each, ModelRuntime) and each is not self]
        return {
            each.keeper.run_id: each.step_count
            for each in others
            if each.keeper is not None and not each.life.is_closed
        }

    def _record(self, capture: Capture | None = None, extra: Any = None) -> StepRecord:
        steps = dict(self._states.param_steps)
        thawed, resting, by = self.places.thawed(), sorted(self._states.resting), self.iterations.shown_by
        record = StepRecord(
            self.step_count, steps, self.groups, None, extra, None, {}, self.about, thawed, resting, by, self.changes,
            beside=self._beside(),
        )  # fmt: skip
        if capture is None:
            return record
        return replace(record, **capture(), scaler=None if self._scaler is None else self._scaler.state_dict())

    @property
    def is_frozen(self) -> bool:
        """True if no parameter requires a gradient: no optimizer trains the model."""
        return not any(param.requires_grad for unit in self.units for param in unit.params)

    def commit(
        self,
        capture: Capture,
        extra: Any,
        *,
        is_frozen: bool = False,
        also: Sequence[tuple[ModelRuntime, Capture]] = (),
    ) -> None:
        """Complete the last step's record with what only the caller knows; launch its generation if it is due, with
        those of other models."""
        config = self.config
        if not (self._commits.completes or config.nvme_dirs or config.durability == Durability.SCRATCH):
            warn_user(
                f"zo.commit keeps nothing, neither step {self.step_count} nor later ones: there is no directory for "
                'generations. Name one by OffloadConfig(nvme="/path/to/a/directory"), write copies by '
                "zo.save_checkpoint, or say by durability='scratch' that nothing is to be kept",
            )
        self.iterations.end(is_frozen=is_frozen)
        others = [
            (other.class_name, other._commits, partial(other._record_at, self.step_count, theirs))
            for other, theirs in also
        ]
        self._drop_deleted_states()
        self._commits.complete_record(
            lambda: self._record(capture, extra),
            in_step=self._has_new_grads,
            is_frozen=is_frozen,
            joint=JointStep((self.class_name, self._commits), others) if also else None,
        )

    def note_completes(self) -> None:
        """The program says more of each step by a commit: a step alone makes no generation."""
        self._commits.completes = True

    def _record_at(self, step: int, capture: Capture) -> StepRecord:
        """The record of the states as they are now, which are those of a step of another model."""
        self.iterations.end()
        self.iterations.start(step)
        self._drop_deleted_states()
        return self._record(capture)

    def end_row(self, num_iterations: int) -> None:
        """The program has written a row of a log, which ends so many iterations."""
        self.iterations.end_row(num_iterations)
        self._commits.number_record(self.step_count, self.iterations.shown_by)

    def drain(self) -> None:
        """Wait for updates and commits that are under way. Raises the first error."""
        self._commits.drain()

    def save(self, path: Path, capture: Capture, extra: Any) -> None:
        """Write a checkpoint of the states as they are now, after `check_between_steps` and `drain`. Collective."""
        with self.ranks.together():
            self._drop_deleted_states()
            record = self._record(capture, extra)
        save(path, self.layout, self.store, self.ranks, record)

    def load(
        self, path: Path, check: Callable[[Generation], None], *, masters_only: bool = False
    ) -> tuple[Generation, dict[str, Any] | None]:
        """Replace the states by a checkpoint's; returns what it says, and this rank's generators. Collective.

        With `masters_only` parameters get the checkpoint's values, and optimizers' states and counts stay. `check` may
        raise before anything is replaced. A failure after that leaves a mix, which is neither used nor committed: the
        model has to be loaded again. Updates and commits under way are over.
        """
        generation, rng = SavedGeneration.read_for(
            path, self.layout, self.ranks, lambda saved: self._load(saved, path, check, masters_only=masters_only)
        )
        replaced(self.prefetcher, [(unit, param) for unit in self.units for param in unit.params])
        if self._in_backward is not None:
            self._in_backward.reset()
        self.life.lacks_weights, self.life.half_written = False, ""
        self.note_lost_base()
        self.without_values.clear()
        self.resume_pending = False
        if masters_only:
            self.note_written(whole=True)
        else:
            self.adopt_generation(generation, loaded=True)
        return generation, rng

    def _load(
        self, saved: SavedGeneration, path: Path, check: Callable[[Generation], None], *, masters_only: bool
    ) -> tuple[Generation, dict[str, Any] | None]:
        index, ranks, found, notice = self.collectives.shard_index, self.ranks, saved.generation, Notice()
        # On another machine the same path may hold another one.
        which = f"generation {found.number} (step {found.step}) of run {found.run_id}"
        notice.compared.append(Compared.of({"the checkpoint": which, "optimizer=None": masters_only}))
        with ranks.together("zo.load_checkpoint", notice):
            check(saved.generation)
            found_places = saved.base_places(self.store.base)
            _check_base(saved.generation, self.store, found_places)
            frozen = {shard.layout.index for shard in self.store.shards if not shard.layout.trainable}
            places = {} if saved.lies_elsewhere else {at: spans for at, spans in found_places.items() if at in frozen}
            shards = [shard for shard in self.store.shards if shard.layout.params]
            written = [shard for shard in shards if shard.layout.index not in places]
            self.take_room(written)
            self._states.reserve(written)
            same_ranks = saved.generation.world_size == self.ranks.world_size
            rng = saved.rng_of(self.ranks.rank) if same_ranks else None
        self._states.readers.before_replacing(param for unit in self.units for param in unit.params)
        self.grads.reset()
        self._commits.forget_record()
        self.life.half_written = f"loading {path}"
        if not masters_only:
            saved.tell_conversion(self.layout)
        with ranks.together():
            for shard in shards:
                if (spans := places.get(shard.layout.index)) is not None:
                    self.store.rest_in_base(shard, spans, index)
                    continue
                source = saved.source(shard.layout, index)
                if masters_only:
                    replace_masters(self.store, shard, source)
                else:
                    self.store.add_states(shard, saved.states(shard.layout, index))
                    self.store.write_components(shard, source)
        return saved.generation, rng

    def note_written(self, *, whole: bool) -> None:
        """Parameters are changed from outside; not `whole`: what broke off in between is nothing to resume from."""
        if whole:
            self._commits.note_written()
        else:
            self._commits.set_aside()

    # Life

    def stats(self) -> Stats:
        limit = self.prefetcher.device_limit
        params = None if limit is None else limit.params
        peak = peak_resident_bytes()
        return self._stats.stats(self.step_count, self.skipped_steps, self._resident_bytes(), params, peak)

    def _resident_bytes(self) -> dict[str, int]:
        store = self.store
        return {
            "device": store.device_bytes + sum(section.device_bytes for section in self.grads.ledger.sections),
            "cpu": store.arena.allocated_bytes + store.arena.frame_bytes + store.base.memory_bytes,
            "nvme": sum(file.nbytes for file in (store.swap, self.files.scratch) if file is not None),
        }

    def close(self) -> None:
        """Finish updates, make the last step a generation, release files and locks. Closing twice is allowed."""
        self.life.check_process()
        if not self.life.is_closed:
            self._states.readers.before_step()
        self._end.close()

    def close_when_dropped(self) -> None:
        """Let files and threads live from here on as long as this object, which the model's hooks and graphs keep."""
        weakref.finalize(self, self._end.drop).atexit = False

    def _close_at_exit(self) -> None:
        self._end.close_at_exit(self.close)


def _check_base(found: Generation, store: ShardStore, places: Mapping[int, Sequence[BaseSpan]]) -> None:
    """Raise CheckpointError unless the base that a checkpoint rests in is the model's; or can be read, where the model
    has none."""
    files, own = files_of(places), store.base_files
    if lost := [file for file in files if not file.is_open]:
        raise CheckpointError(
            f"{found} holds the trained part only: {missing_text(lost)}, and load the checkpoint then"
        )
    if own and (foreign := [file for file in files if file not in own]):
        raise CheckpointError(
            f"{found} holds the trained part of a model whose base lies in {foreign[0].path.parent}. The base "
            f"of this model, in {own[0].path.parent}, is another: their fingerprints differ. Call zo.load_pretrained "
            "with the folder of the checkpoint's base, and load the checkpoint then"
        )


def _structure_of(root: nn.Module) -> int:
    """A word for all modules and parameters in a module, and their names. In each commit: by ids, without calls."""
    words, todo, seen = list[tuple[object, ...]](), [root], {id(root)}
    while todo:
        module = todo.pop()
        children, params = module._modules, module._parameters
        words.append((id(module), *children, *map(id, children.values()), *params, *map(id, params.values())))
        for child in children.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                todo.append(child)
    return hash(tuple(words))


def _first_names(root: nn.Module) -> dict[int, str]:
    """The first name of each parameter that is offloaded, by its id."""
    return {id(each): name for name, each in offloaded_tensors(root) if owner_of(each) is not None}


def _is_ordinary(param: nn.Parameter) -> bool:
    """True if it is trained, and no model's."""
    return owner_of(param) is None and param.requires_grad


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:3], *([f"and {len(names) - 3} more"] if len(names) > 3 else [])])
