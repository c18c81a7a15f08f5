"""`offload()`: from a module and a config to a `ModelRuntime` with its hooks in place; `plan()`: what it would take.

`Builder` owns the order of building: a model's `Foundation`, then the parts of its step (`assemble`). Parameters move
in section by section, so that the peak is the model plus one chunk. A second call adopts parameters (`Growth`). Nothing
here runs in a training step.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_offload.base.alike import Compared, of_config, word_of
from zero_offload.base.config import BUDGETS, OffloadConfig
from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.base.events import Counters
from zero_offload.base.inputs import check_config, check_model
from zero_offload.base.problems import warn_user
from zero_offload.base.threads import FirstError
from zero_offload.base.types import Branches, Durability, HardwareProfile, Tier, UpdateOverlap, format_bytes
from zero_offload.checkpoint.extras import note_forms
from zero_offload.checkpoint.file_list import count_reusable
from zero_offload.checkpoint.run_files import RunFiles
from zero_offload.hardware.device import Device, compute_device, on_likely_gpu
from zero_offload.hardware.probe import probe_hardware
from zero_offload.hardware.rates import with_measured
from zero_offload.model.about import about, deciding_values
from zero_offload.model.assembly import assemble
from zero_offload.model.changes import Changes
from zero_offload.model.deferred.from_files import make_what_came_later
from zero_offload.model.foundation import Foundation
from zero_offload.model.live_blocks import LiveBlocks
from zero_offload.model.move_in import (
    base_paths,
    check_not_wrapped,
    check_same_base,
    check_same_model,
    lacks_values,
    move_buffers,
    move_in,
    param_problem,
    sections_without_values,
)
from zero_offload.model.planned_states import Optimizers, PlannedStates, planned_states
from zero_offload.model.prepared import mark_prepared
from zero_offload.model.replacements import Replacements
from zero_offload.model.runtime import ModelRuntime
from zero_offload.model.thaw import counted, recounted
from zero_offload.optim.worker import Worker
from zero_offload.plan.buffers import BufferPlan, FrameLimits, Home
from zero_offload.plan.dtypes import Cast, resolve
from zero_offload.plan.forecast import Plan
from zero_offload.plan.layout import ShardLayout, UnitLayout, make_layout
from zero_offload.plan.memory import (
    MemoryPlan,
    Placement,
    Sizes,
    UnitBytes,
    UnitNumel,
    activations_ahead_bytes,
    estimate_memory,
    measure_units,
    numels_in_turns,
    walk_notes,
)
from zero_offload.plan.model_spec import ModelSpec, UnitChoice
from zero_offload.plan.partition import Partition
from zero_offload.plan.placement import Outlook, assign_tiers, place, tier_budget
from zero_offload.plan.quantized import offloaded_tensors, ordinary_buffers_of, wrappers
from zero_offload.plan.shapes import UnitWork, work_of
from zero_offload.plan.step_time import TOKENS_UNKNOWN, StepBatch
from zero_offload.plan.tensor_parallel import dtensor_problems, is_dtensor, mesh_of
from zero_offload.plan.turns import most_live
from zero_offload.runtime.device_limit import DeviceLimit
from zero_offload.runtime.hooks import experts_in, install_hooks, install_walk_hooks, is_recomputed
from zero_offload.runtime.pass_tracker import ModelLife
from zero_offload.runtime.prefetcher import ParamPrefetcher
from zero_offload.runtime.ranks.collectives import Collectives, CommitGroup
from zero_offload.runtime.ranks.group import CALL, Callers, RankGroup, mesh_problems, partition_of
from zero_offload.runtime.ranks.join import join
from zero_offload.runtime.ranks.watch import Notice
from zero_offload.runtime.saved_tensors.activations import open_activations
from zero_offload.runtime.units.group_reader import GroupReader
from zero_offload.runtime.units.param_loader import DeviceParamLoader, HostParamLoader, ParamLoader
from zero_offload.runtime.units.unit import Section, Unit, stays_guarded
from zero_offload.standins.collectives import answer_in_lists
from zero_offload.standins.guard import class_at_rest, compile_around, unguard
from zero_offload.standins.owners import owner_of, register, unregister
from zero_offload.standins.sources import Owner
from zero_offload.storage.files.system import naming_errors
from zero_offload.storage.memory.arena import Arena, MovableBuffer
from zero_offload.storage.memory.heap import trim_heap
from zero_offload.storage.memory.resizable import FrameAllocator, FrameBudget, ResizableBuffer
from zero_offload.storage.memory.staging import Staging
from zero_offload.storage.shards.drive_grads import DriveRoom
from zero_offload.storage.shards.grad_downloads import GradDownloads
from zero_offload.storage.shards.ring_grads import GradRing
from zero_offload.storage.shards.shard import Component, planned_bytes
from zero_offload.storage.shards.store import ShardStore


def offload(
    model: nn.Module,
    config: OffloadConfig | None = None,
    mesh: DeviceMesh | None = None,
    units: UnitChoice | None = None,
) -> nn.Module:
    """Offload `model` in place and return it: same object, same class, hooks only.

    Its floating parameters become their compute dtype, with fp32 masters from their present values. `units` names what
    moves together (module names, classes or modules); by default the repeated blocks are found. `mesh` names the ranks
    that train this model, by default all. It has one dimension, over which states are divided, or two, (replicate,
    shard), for hybrid sharding. All of its ranks call this together. Where a launcher has set RANK, WORLD_SIZE above 1
    and MASTER_ADDR and no process group exists, this makes it. WORLD_SIZE=1 says that the process trains alone. Each
    rank has a GPU of its own: that of LOCAL_RANK, or the program's choice. With a generation in the directory and
    existing="resume", parameters and states are the generation's.

    A model that has got parameters since (adapters, a new head, a module around it) is offloaded again, between two
    steps. The second call adopts them, frozen ones too, as units of their own. It moves nothing else. It needs no
    `config`, or the same. Optimizers go on; the next generation has the new parameters. A resume makes the same calls
    in the same order.

    Raises ConfigError (all problems at once), CapacityError, StorageError, LockError, IntegrityError and
    CheckpointError. The model is then as it was, unless reading a generation back failed half-way. Values that had
    moved to the tiers and cannot be read back, as with several ranks, are NaN, and a warning says so.
    """
    with contextlib.ExitStack() as undo:
        if owners := _owners_in(model):
            # Parameters that have come since the first call; a failure leaves the model as it was.
            growth = Growth(model, owners, config, mesh, units, undo)
            growth.make_units()
            growth.join_generations()
            owner = growth.install()
            undo.pop_all()
            trim_heap()  # the parameters' old storages are free
        else:
            # A new model: files first, since a generation in them decides values and steps.
            builder = Builder(model, config, mesh, units, undo)
            builder.open_files()
            with builder.ranks.together():
                builder.make_units()
                builder.make_movers()
            builder.fill()
            with builder.ranks.together():
                builder.move_in()
                owner = builder.make_runtime()
                undo.callback(setattr, owner.life, "is_closed", True)  # a traceback may keep it until Python exits
                _install(model, owner, owner.units, builder.spec, builder.casts, undo)
            owner.files.finish_resume(owner.ranks)
            check_same_base(owner.store, owner.ranks)
            if owner.files.found is not None:
                owner.adopt_generation(owner.files.found)
                owner.train_again(owner.files.found)
                owner.note_lost_base(builder.base_paths)
            else:
                owner.life.lacks_weights = builder.skips_values
            owner.cast_buffers = frozenset(builder.buffer_dtypes)
            owner.watched_buffers = [each for each in builder.cast_buffers if each.is_narrow]
            trim_heap()
            owner.close_when_dropped()
            undo.pop_all()
        owner.note_names()
        owner.about = about(model) if owner.ranks.rank == 0 else {}
        note_forms(model, owner.built_buffers)
    mark_prepared(model, owner.device.torch_device.type)
    return model


class Builder:
    """Builds what a `ModelRuntime` is made of, in the order of the methods. After an error `undo` gives all of it back,
    the latest first."""

    def __init__(
        self,
        model: nn.Module,
        config: OffloadConfig | None,
        mesh: DeviceMesh | None,
        units: UnitChoice | None,
        undo: contextlib.ExitStack,
    ) -> None:
        """Check what was given, meet the other ranks, and decide where everything rests. Collective."""
        self.model, self.undo, self.errors, self.counters = model, undo, FirstError(), Counters()
        join()
        callers = Callers.of(mesh)
        num_here, most_here = callers.take_gpus()
        # With DTensors the ranks that hold the other parts are told as well.
        tensor_mesh = mesh_of(model.parameters()) if isinstance(model, nn.Module) else None
        notice = Notice()
        # Checks and layout of this rank alone; `notice` compares their results between ranks at the end.
        with callers.together_with(tensor_mesh, notice):
            check_model("zo.offload", model)
            self.config = self.given = check_config("zo.offload", config)
            self.device = compute_device()
            check_not_wrapped(model)
            make_what_came_later(model)
            _check_params(model.named_parameters(), mesh_problems(mesh, self.device.torch_device.type, tensor_mesh))
            self.skips_values = lacks_values(tensor for _, tensor in offloaded_tensors(model))
            partition = partition_of(self.config, mesh, most_here)
            self.spec = ModelSpec.from_module(model, units, experts=experts_in(model))
            dtypes = resolve(model, self.config)
            self.casts, self.buffer_dtypes = dtypes.casts, dtypes.buffers
            self.layout = make_layout(self.spec, dtypes, partition.optimizer_shards)
            own_hardware = _hardware(self.config, self.device, num_here)
            _check_experts(self.layout.units, self.config)
            self.without = sections_without_values(self.layout, dict(offloaded_tensors(model)))
            unit_bytes = _unit_bytes(self.layout.units, self.spec, self.config, partition, self.without)
            device_type = self.device.torch_device.type
            notice.compared.append(
                Compared.of({**of_config(self.config), "mesh": callers.cut(mesh), "the compute device": device_type})
            )
            notice.compared += _configs_of(model, len(callers.members))
        # From here on ranks talk: they agree on one machine, and place by that.
        self.group = group = RankGroup.of(self.config, mesh, tensor_mesh, callers, most_here)
        self.collectives = Collectives(group, self.device.torch_device, self.config, self.counters)
        self.ranks = CommitGroup(group)
        hardware, self.config = _agree(own_hardware, self.config, self.ranks)
        with self.ranks.together(), _saying_how_to_read(model, unit_bytes, self.config, hardware, partition):
            outlook = _outlook(unit_bytes, work_of(model, self.spec).units, self.config, partition, hardware)
            placement = place(unit_bytes, self.config, hardware, partition, outlook)
        # Placement decides bytes, and bytes decide buffers.
        plan = estimate_memory(unit_bytes, placement, self.config, group.partition)
        self.sizes = Sizes(hardware, unit_bytes, placement, plan)
        self.buffers = BufferPlan(self.layout, placement, group.partition, self.config, self.device.is_host)

    def open_files(self) -> None:
        """Lock the directories and look for a generation; then all ranks must have the same model. Collective."""
        self.files = RunFiles.open(self.config, self.layout, self.ranks, self.errors, self.counters)
        self.undo.callback(self.files.close)
        if self.files.keeper is not None:
            self._relayout(self.files.keeper.layout)
        check_same_model(dict(offloaded_tensors(self.model)), self.ranks, values=self.files.found is None)
        _check_same_units(self.model, self.layout.units, self.ranks)

    def _relayout(self, layout: ShardLayout) -> None:
        """Have the layout of the generation found: some sections may be trained that the model has frozen."""
        thawed = {each.index for each in layout.sections if each.is_thawed}
        self.layout, self.without = layout, self.without - thawed
        self.sizes = recounted(self.sizes, layout, thawed, self.config, self.group.partition, self.without)
        self.buffers = replace(self.buffers, layout=layout)

    def make_units(self) -> None:
        """Take memory, make or open the files, and make units, which are still empty."""
        config, device, files = self.config, self.device, self.files
        on_host, on_device = self.buffers.frame_limits(planned_bytes)
        pinner, most_bytes = None if device.is_host else device, config.budget_bytes(Tier.CPU)
        arena = Arena(on_host.chosen, on_host.most, pinner, num_kept=on_host.kept, most_bytes=most_bytes)
        device.will_pin(self.sizes.plan.used_bytes(Tier.CPU))
        self.frames = FrameBudget(on_device.chosen, on_device.most, on_device.least)
        num_slots = 1 if config.effective_durability is Durability.SCRATCH else 2
        self.store = ShardStore(
            self.layout, self.sizes.placement.tiers, arena, files.swap, num_slots, device, self.counters, files.base
        )
        files.create(self.store, config.effective_durability, self.without)
        if files.keeper is not None and files.swap is not None:
            files.keeper.adopt(self.store, files.swap)
        self.units = [
            _make_unit(index, self.buffers, self.store, device, self.frames, self.errors, self.collectives.shard_index)
            for index in range(len(self.layout.units))
        ]
        updates_in_backward = config.overlap == UpdateOverlap.BACKWARD
        self.grad_ring = GradRing(arena, self.buffers.grad_ring_bytes()) if updates_in_backward else None

    def make_movers(self) -> None:
        """Make what moves bytes, start the workers, and move buffers."""
        config, device, store, collectives, files = self.config, self.device, self.store, self.collectives, self.files
        device.record_to(self.counters.spans)
        loader: ParamLoader = HostParamLoader(store, collectives.shard_index)
        limit: DeviceLimit | None = None
        budget: FrameAllocator = store.arena
        if not device.is_host:
            staging = Staging(store.arena)
            staging.widen(self.buffers.landing_bytes())
            loader = DeviceParamLoader(store, device, staging, collectives.shard_index)
            limit, budget = self._make_limit(), self.frames
        self.cast_buffers = move_buffers(self.model, self.buffer_dtypes, device, self.undo)
        ahead_max = activations_ahead_bytes(config, self.sizes.placement.budget)
        self.activations = open_activations(config, device, store, files.scratch, _buffers(self.model), ahead_max)
        downloads = None if device.is_host else GradDownloads(device, store.arena, self.counters)
        drive_room = DriveRoom(self.counters, downloads)
        self.expert_groups = GroupReader(store, collectives, device, self.buffers.group_bytes())
        self.prefetcher = ParamPrefetcher(
            self.units, store, collectives, loader, budget, limit, drive_room, self.expert_groups
        )
        self.update_worker = self._start_worker("zero_offload-update")
        self.commit_worker = None if files.keeper is None else self._start_worker("zero_offload-commit")

    def fill(self) -> None:
        """Read the generation found, if there is one. Collective: ranks may have each other's files."""
        self.files.fill(self.store, self.store.shards, self.collectives.shard_index, self.ranks)

    def move_in(self) -> None:
        """Move the parameters in. They come last: a smaller dtype rounds frozen ones for good."""
        self.base_paths = base_paths(tensor for _, tensor in offloaded_tensors(self.model))
        values_of = None if self.files.found is not None else self.collectives.shard_index
        self.without_values = move_in(self.model, self.units, self.store, values_of, self.undo)
        self.store.staging.drop()

    def _make_limit(self) -> DeviceLimit:
        collectives, grows = self.collectives, self.config.device_memory is None
        # Where ranks use different units, they agree before each gather, and need not have the same ones here.
        alike = collectives.num_shards > 1 and not collectives.partition.any_branches
        agreement, world_size = collectives.agreement if alike else None, collectives.world_size
        return DeviceLimit(self.device.torch_device, self.frames, self.units, agreement, world_size, grows=grows)

    def _start_worker(self, name: str) -> Worker:
        worker = Worker(self.errors, name)
        self.undo.callback(worker.shutdown)
        return worker

    def make_runtime(self) -> ModelRuntime:
        base = Foundation(
            config=self.config,
            given=self.given,
            layout=self.layout,
            sizes=self.sizes,
            group=self.group,
            ranks=self.ranks,
            collectives=self.collectives,
            device=self.device,
            store=self.store,
            frames=self.frames,
            files=self.files,
            errors=self.errors,
            life=ModelLife(self.errors),
            update_worker=self.update_worker,
            commit_worker=self.commit_worker,
            units=self.units,
            prefetcher=self.prefetcher,
            expert_groups=self.expert_groups,
            activations=self.activations,
            grad_ring=self.grad_ring,
            without_values={} if self.files.found else self.without_values,
        )
        return ModelRuntime(assemble(base))


def _make_unit(
    index: int,
    buffers: BufferPlan,
    store: ShardStore,
    device: Device,
    frames: FrameBudget,
    errors: FirstError,
    shard_index: int,
) -> Unit:
    """A unit with its flat buffers; they have no values."""
    layout = buffers.layout.units[index]
    homes = {section.index: buffers.home(section) for section in layout.sections}
    sections = []
    for section in layout.sections:
        shard, home = store.shards[section.index], homes[section.index]
        own = slice(shard_index * section.shard_numel, (shard_index + 1) * section.shard_numel)
        if home is Home.IN_PLACE:
            # Whole parameters where they are updated: the shard is (part of) the flat buffer, without a second copy.
            flat = store.memory_of(shard, section.dtype, section.numel)
            # A storage of its own, so that views of updates and commits do not count as views that the program holds.
            store.place_memory(shard, {Component.VALUE: device.alias(flat)[own]})
            sections.append(Section(shard, flat, None))
            continue
        if home is Home.AWAY and buffers.partition.replicates_params and layout.experts is None:
            store.place_replica(shard)
        replica = shard.replica.memory if shard.replica is not None and not shard.on_device else None
        store.place_memory(shard, {} if replica is None else {Component.VALUE: replica[own]})
        if device.is_host:
            pages = MovableBuffer(store.arena, section.nbytes)
            sections.append(Section(shard, pages.region.tensor(section.dtype, section.numel), pages))
        else:
            buffer = ResizableBuffer(frames, section.numel, section.dtype, device.torch_device)
            sections.append(Section(shard, buffer.tensor, buffer))
    return Unit(index, layout, sections, errors, resident=Home.AWAY not in homes.values())


def _buffers(model: nn.Module) -> Iterator[torch.Tensor]:
    """Those that are not offloaded."""
    return (buffer for module in model.modules() for _, buffer in ordinary_buffers_of(module))


def _owners_in(model: object) -> list[Owner]:
    """The owners of the parameters that are offloaded already."""
    params = model.parameters() if isinstance(model, nn.Module) else ()
    return list({id(owner): owner for param in params if (owner := owner_of(param)) is not None}.values())


def _install(
    root: nn.Module,
    owner: ModelRuntime,
    units: Sequence[Unit],
    spec: ModelSpec,
    casts: Mapping[str, Cast],
    undo: contextlib.ExitStack,
) -> None:
    """Units that are filled get their owner, guards and hooks. `spec` describes them."""
    for unit in units:
        undo.callback(unguard, unit.params)
        for param in unit.params:
            undo.callback(unregister, param)
            register(param, owner)
        unit.seal()
        unit.guard()
    _guard_wrappers(root, owner, undo)
    placed = [(stays_guarded(section, piece), p) for unit in units for section, piece, p in unit.placed_params]
    answer_in_lists()
    compile_around([*(p for is_guarded, p in placed if is_guarded), *(each for _, each in wrappers(root))])
    points = {point.module: [units[i] for i in point.units] for point in spec.hook_points}
    if not owner.has_root(root):
        points = {"": [], **points}
    params = [param for unit in units for param in unit.params]
    _hook(root, owner, points, params, casts, undo)


def _guard_wrappers(root: nn.Module, owner: ModelRuntime, undo: contextlib.ExitStack) -> None:
    """Parameters that consist of others, which are offloaded, are at rest too."""
    found = [param for _, param in wrappers(root) if owner_of(param) is None]
    undo.callback(unguard, found)
    for param in found:
        undo.callback(unregister, param)
        register(param, owner)
        param.__class__ = class_at_rest(type(param))


def _hook(
    root: nn.Module,
    owner: ModelRuntime,
    points: Mapping[str, Sequence[Unit]],
    params: Sequence[nn.Parameter],
    casts: Mapping[str, Cast],
    undo: contextlib.ExitStack,
) -> None:
    """The model of `owner` has these points, parameters and casts; its other modules have their hooks."""
    points = owner.new_points(root, points, undo)
    new_casts = {name: cast for name, cast in casts.items() if root.get_submodule(name) not in owner.modules}
    install_hooks(root, points, params, owner.tracker, new_casts, owner.grad_ready, owner, undo)
    install_walk_hooks([each for each in root.modules() if each not in owner.modules], undo)
    owner.add_root(root, undo)


class Growth:
    """Offloads what an offloaded model has got since: further units behind those that there are, which stay. Used like
    `Builder`, in the order of the methods."""

    def __init__(
        self,
        model: nn.Module,
        owners: Sequence[Owner],
        config: OffloadConfig | None,
        mesh: DeviceMesh | None,
        units: UnitChoice | None,
        undo: contextlib.ExitStack,
    ) -> None:
        """Check what was given and what is new, and decide where it rests. Collective."""
        if len(owners) > 1:
            shared = "; ".join(text for owner in owners if (text := _shared_text(model, owner)))
            raise ConfigError(
                f"zo.offload: these are {len(owners)} models that were offloaded apart ({shared}); call it with one of "
                "them, or with a module that holds parameters of one"
            )
        (owner,) = owners
        assert isinstance(owner, ModelRuntime)
        if owner.life.is_closed:
            raise ConfigError("zo.offload: the model is offloaded already, and was closed by zo.close; build it again")
        # From here on all ranks take part.
        self.model, self.owner, self.undo = model, owner, undo
        with owner.together("zo.offload"):
            owner.drain()  # a commit under way talks to the other ranks, as what follows does
        notice = Notice()
        with owner.ranks.together(CALL, notice):
            with _saying_whose_they_are(model, owner):
                _check_call(owner, config, mesh)
            # New tensors become units behind those that exist: nothing that rests moves.
            found = {id(tensor): tensor for _, tensor in offloaded_tensors(model) if owner_of(tensor) is None}
            with _saying_whose_they_are(model, owner):
                root = owner.root_of(found.values()) or model
                added = self._look(root, found, units)
                if self.changes.root is not root:
                    added = self._look(self.changes.root, found, units)
            notice.compared += _configs_of(self.root, owner.ranks.world_size)
            others = {name: tensor for name, tensor in added.items() if name not in self.replacements.places}
            self.spec = self._spec(units, others) if others else ModelSpec((), ())
            dtypes = resolve(self.root, owner.config, strict=False)
            self.casts = dtypes.casts
            known = {name for name, module in self.root.named_modules() if module in owner.modules}
            self.buffer_dtypes = {
                name: dtype for name, dtype in dtypes.buffers.items() if name.rpartition(".")[0] not in known
            }
            changed = self.changes.layout(owner.layout)
            self.changes.check(changed)
            self.layout = make_layout(self.spec, dtypes, owner.layout.num_shards, changed)
            _check_experts(self.layout.units[len(owner.units) :], owner.config)
            if owner.keeper is not None:
                self.layout = owner.keeper.check_growth(self.layout)
            self.without = sections_without_values(self.layout, added)
            work = work_of(self.root, self.spec).units if others else ()
            empty = [section.layout.index for section in self.changes.empty_sections(changed)]
            sizes = counted(owner.base, changed, owner.sizes, empty, owner.states.resting) if empty else owner.sizes
            self.sizes = _grown_sizes(owner, sizes, self.layout, self.spec, work, self.without) if others else sizes
            moved = {"modules that were removed or moved": self.changes.text()}
            notice.compared.append(Compared.of(moved))
        # A generation that was found may have values and steps for the new parameters.
        self.awaited, resumed = owner.files.awaits, owner.files.found
        self.param_steps = resumed.payload.get("param_steps", {}) if self.awaited and resumed is not None else {}
        partition, is_host = owner.collectives.partition, owner.device.is_host
        self.before = BufferPlan(owner.layout, owner.sizes.placement, partition, owner.config, is_host)
        self.buffers = replace(self.before, layout=self.layout, placement=self.sizes.placement)
        self.skips_values = lacks_values(added.values())
        check_same_model(added, owner.ranks, values=not self.awaited)
        _check_same_units(self.root, self.layout.units, owner.ranks)

    def _look(
        self, root: nn.Module, found: Mapping[int, torch.Tensor], units: UnitChoice | None
    ) -> dict[str, torch.Tensor]:
        """The new tensors `found` (by id) under their names in `root`; notes what has changed beside them."""
        owner, self.root = self.owner, root
        added = {name: tensor for name, tensor in offloaded_tensors(root) if id(tensor) in found}
        spec = self._spec(units, added) if added else ModelSpec((), ())
        self.replacements = Replacements.of(owner, (root, self.model), spec, added)
        self.changes = Changes.of(owner, root, self.model, added, self.replacements)
        _check_added(owner, root, added, has_changed=self.changes.any)
        return added

    def _spec(self, units: UnitChoice | None, tensors: Mapping[str, torch.Tensor]) -> ModelSpec:
        return ModelSpec.from_module(self.root, units, tensors.values(), experts_in(self.root))

    def make_units(self) -> None:
        """Take room, make units, and move the parameters in."""
        owner, store, files, first = self.owner, self.owner.store, self.owner.files, len(self.owner.units)
        shard_index = owner.collectives.shard_index
        sections = [section for unit in self.layout.units[first:] for section in unit.sections]
        self.undo.callback(store.shrink, len(store.shards))
        with owner.ranks.together():
            shards = store.grow(sections, self.sizes.placement.tiers)
            files.lay_out(store, shards, self.without, awaited=self.awaited)
            self.units = [
                _make_unit(index, self.buffers, store, owner.device, owner.base.frames, owner.errors, shard_index)
                for index in range(first, len(self.layout.units))
            ]
            self.cast_buffers = move_buffers(self.root, self.buffer_dtypes, owner.device, self.undo)
        if self.awaited:
            files.fill(store, shards, shard_index, owner.ranks)
        with owner.ranks.together():
            values_of = None if self.awaited else shard_index
            self.without_values = move_in(self.root, self.units, store, values_of, self.undo)
            store.staging.drop()

    def join_generations(self) -> None:
        """Later generations have the new units; a resumed generation may have waited for them. Collective."""
        owner = self.owner
        if owner.keeper is not None and self.units:
            self.undo.callback(owner.keeper.shrink, owner.layout)
            owner.keeper.grow(self.layout)
            if self.awaited:
                owner.files.finish_resume(owner.ranks)
                owner.note_lost_base()
        if owner.activations is not None:
            owner.activations.exempt(_buffers(self.root))

    def install(self) -> ModelRuntime:
        """Guard and hook the units, and join them with those of the model."""
        owner = self.owner
        limits = zip(self.buffers.frame_limits(planned_bytes), self.before.frame_limits(planned_bytes), strict=True)
        on_host, on_device = (
            FrameLimits(*(max(now - then, 0) for now, then in zip(*each, strict=True))) for each in limits
        )
        _install(self.root, owner, self.units, self.spec, self.casts, self.undo)
        if self.model not in owner.modules:  # around the root: what it does with parameters is a forward too
            _hook(self.model, owner, {"": []}, (), {}, self.undo)
        with owner.ranks.together():
            self.changes.prepare()
            self.replacements.write()
        if self.replacements.places:
            self.replacements.finish()
            # After that: on a device a parameter becomes another tensor, which has no hooks.
            _hook(self.root, owner, self.replacements.points, self.replacements.params, self.casts, self.undo)
        # Nothing from here on fails, so nothing of it is undone.
        self.changes.apply(self.layout)
        owner.watched_buffers = [*owner.watched_buffers, *(each for each in self.cast_buffers if each.is_narrow)]
        owner.store.arena.widen(on_host.chosen, on_host.most, on_host.kept)
        owner.base.frames.widen(on_device.chosen, on_device.most, on_device.least)
        owner.base.expert_groups.widen(self.buffers.group_bytes())
        owner.grow(self.layout, self.sizes, self.units, self.buffers.landing_bytes(), self.param_steps)
        found = owner.files.found if self.awaited else None
        if found is not None:
            owner.train_again(found)
        else:
            owner.life.lacks_weights |= self.skips_values
            owner.without_values |= self.without_values
        return owner


def _check_added(owner: ModelRuntime, root: nn.Module, added: Mapping[str, torch.Tensor], *, has_changed: bool) -> None:
    """Raise for new parameters that cannot be offloaded beside the others, and where nothing `has_changed`."""
    if not added and not has_changed:
        raise ConfigError(
            "zo.offload: the model is offloaded already and has no new parameter to adopt. Call it once per model, "
            "and again after modules were added, removed or moved"
        )
    check_not_wrapped(root)
    divided = [name for name, param in added.items() if is_dtensor(param)] if not owner.base.group.columns else []
    new_params = [(name, param) for name, param in root.named_parameters() if owner_of(param) is None]
    problems = [f"{name} is a DTensor, and the offloaded model has none" for name in divided]
    _check_params(new_params, problems, owner.device.torch_device)  # peft moves adapters to where the base computes


def _grown_sizes(
    owner: ModelRuntime,
    sizes: Sizes,
    layout: ShardLayout,
    spec: ModelSpec,
    work: Sequence[UnitWork],
    without: Container[int],
) -> Sizes:
    """`sizes` with the units of `spec`, the last of `layout`, placed in what others leave. Sections `without` values
    rest in files. Raises CapacityError."""
    config, partition = owner.config, owner.collectives.partition
    first, budget, plan = len(owner.units), sizes.placement.budget, sizes.plan
    new = _unit_bytes(layout.units[first:], spec, config, partition, without)
    outlook = _outlook(new, work, config, partition, sizes.hardware)
    left = {tier: max(plan.left_bytes(tier), 0) for tier in Tier}
    rest = replace(
        budget,
        device_bytes=budget.device_bytes if budget.shared_memory else left[Tier.DEVICE],
        cpu_bytes=left[Tier.CPU],
        nvme_bytes=left[Tier.NVME],
    )
    tiers = assign_tiers(new, config, rest, partition, outlook).tiers
    unit_bytes = [
        *sizes.unit_bytes,
        *(replace(u, in_use_with=tuple(tuple(i + first for i in at) for at in u.in_use_with)) for u in new),
    ]
    placement = Placement((*sizes.placement.tiers, *tiers), budget)
    plan = estimate_memory(unit_bytes, placement, config, partition)
    if not plan.fits:
        raise CapacityError("\n".join(["zo.offload: the new parameters do not fit beside the model", *plan.reasons]))
    return Sizes(sizes.hardware, unit_bytes, placement, plan)


def _check_call(owner: ModelRuntime, config: OffloadConfig | None, mesh: DeviceMesh | None) -> None:
    """Raise where an offloaded model cannot grow now, or is to be another one."""
    if config is not None:
        check_config("zo.offload", config)
        before = owner.base.given
        names = [each.name for each in fields(config) if each.name not in ("existing", "generation")]  # done with
        if differ := [name for name in names if getattr(config, name) != getattr(before, name)]:
            raise ConfigError(
                f"zo.offload: the model is offloaded already, with {differ[0]}={getattr(before, differ[0])!r}, not "
                f"{getattr(config, differ[0])!r}. To adopt new parameters leave config= out, or pass the same one"
            )
    if mesh is not None and tuple(int(rank) for rank in mesh.mesh.flatten()) != owner.base.group.members:
        raise ConfigError("zo.offload: mesh= names other ranks than the first call did; leave it out")
    if owner.config.overlap == UpdateOverlap.BACKWARD:
        raise ConfigError(
            "zo.offload adopts no further parameters with overlap='backward', whose backward has a fixed set of units; "
            "add them before the first zo.offload, or use overlap='forward'"
        )
    owner.check_between_uses("zo.offload adopts parameters")


@contextlib.contextmanager
def _saying_whose_they_are(model: nn.Module, owner: ModelRuntime) -> Iterator[None]:
    """A ConfigError says so where `model` is another one than that of `owner`, and shares parameters with it."""
    try:
        yield
    except ConfigError as error:
        if owner.is_part_of(model):
            raise
        raise ConfigError(
            f"{error}\n{_shared_text(model, owner)}. Two models that share parameters are offloaded by one call, with "
            "a module that holds both. A copy (copy.deepcopy, before zo.offload) is a model of its own"
        ) from error


def _shared_text(model: nn.Module, owner: Owner) -> str:
    """Which parameters `model` shares with that of `owner`."""
    names = [name for name, param in model.named_parameters() if owner_of(param) is owner]
    whose = owner.model_name if isinstance(owner, ModelRuntime) else "another"
    return f"{', '.join(names[:3])}{', ...' * (len(names) > 3)} of this {type(model).__name__} belong to {whose}"


@contextlib.contextmanager
def _saying_how_to_read(
    model: nn.Module,
    units: Sequence[UnitBytes],
    config: OffloadConfig,
    hardware: HardwareProfile,
    partition: Partition,
) -> Iterator[None]:
    """A CapacityError of a model in eval mode says so if it fits without optimizer states."""
    try:
        yield
    except CapacityError as error:
        read = [
            replace(u, grads_bytes=0, optimizer_bytes=0, frozen_bytes=u.params_bytes, trained_numel=0) for u in units
        ]
        placement = assign_tiers(read, config, tier_budget(config, hardware), partition)
        if model.training or not estimate_memory(read, placement, config, partition).fits:
            raise
        states = format_bytes(sum(unit.optimizer_bytes for unit in units))
        raise CapacityError(
            f"{error}\n{states} of this are optimizer states, since parameters require gradients. The model is in eval "
            "mode: if nothing is trained, call model.requires_grad_(False) before zo.offload, and it fits"
        ) from error


def _hardware(config: OffloadConfig, device: Device, num_here: int) -> HardwareProfile:
    """The machine as each of its `num_here` ranks has it: with a share of the host's memory, and of its drives."""
    free_bytes = device.free_bytes()
    for directory in config.nvme_dirs:
        with naming_errors("reach", directory):
            directory.exists()  # raises if it cannot be reached
    with naming_errors("read", Path("/proc")):
        found = probe_hardware(config.nvme_dirs, device_name=device.name, device_memory_bytes=free_bytes)
    share = found.cpu_memory_bytes // num_here
    found = replace(found, cpu_memory_bytes=share, device_memory_bytes=share if free_bytes is None else free_bytes)
    found = count_reusable(found, config.nvme_dirs)
    return replace(found, nvme_free_bytes=found.nvme_free_bytes // num_here)


def _agree(
    hardware: HardwareProfile, config: OffloadConfig, ranks: CommitGroup
) -> tuple[HardwareProfile, OffloadConfig]:
    """The same figures and the same budgets, the least, on every rank: ranks that placed or evicted differently would
    gather in different orders. Warns where what decides numbers beside settings differs from rank 0's."""
    own = [getattr(config, name) for name in BUDGETS]
    cpu, device, nvme, num_cores, *least = ranks.smallest(
        [
            hardware.cpu_memory_bytes,
            hardware.device_memory_bytes,
            hardware.nvme_free_bytes,
            hardware.num_cores,
            *(_NO_BUDGET if budget is None else budget for budget in own),
        ]
    )
    budgets: dict[str, Any] = {
        name: None if nbytes == _NO_BUDGET else nbytes for name, nbytes in zip(BUDGETS, least, strict=True)
    }
    mine = _versions()
    name, first = json.loads(ranks.agree(json.dumps([hardware.device_name, mine])))
    if differ := [f"{key} {mine[key]}, not {first[key]}" for key in mine if mine[key] != first[key]]:
        warn_user(
            f"rank {ranks.rank} has {', '.join(differ)} as rank 0: ranks may compute different numbers. Install the "
            "same on all"
        )
    return HardwareProfile(num_cores, cpu, name, device, nvme), replace(config, **budgets)


_NO_BUDGET = 2**62


def _versions() -> dict[str, str]:
    """Everything beside settings and the model that decides numbers."""
    return {
        "torch": torch.__version__,
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
    }


def _configs_of(model: nn.Module, num_ranks: int) -> list[Compared]:
    """Facts that several ranks have alike: what configs of transformers and peft say of a model's numbers."""
    if num_ranks == 1:
        return []
    texts = deciding_values(model)
    return [Compared(word_of(texts), lambda: texts)]


def _check_same_units(model: nn.Module, units: Sequence[UnitLayout], ranks: CommitGroup) -> None:
    """Raise ConfigError on every rank where they have cut the same parameters into different units, which each gathers
    in its own order; or recompute others. Collective."""
    cut = [
        (unit.name, [(str(s.dtype), s.trainable, [p.spec.name for p in s.params]) for s in unit.sections])
        for unit in units
    ]
    sizes = {unit.name: unit.experts.size for unit in units if unit.experts is not None}
    recomputed = [name for name, module in model.named_modules() if is_recomputed(module)]
    dtypes = [(name, str(buffer.dtype)) for name, buffer in model.named_buffers()]
    notice, more = Notice(), len(units) > _SHOWN
    with ranks.together(CALL, notice):
        compared: dict[str, tuple[object, object]] = {
            "units": (f"{len(units)} ({', '.join(unit.name for unit in units[:_SHOWN])}{', ...' * more})", cut),
            "experts in a group": (sorted(set(sizes.values())), sizes),
            "modules of zo.checkpoint": (len(recomputed), recomputed),
            "dtypes of buffers": (len(dtypes), dtypes),
        }
        texts = {name: f"{shown} of digest {word_of(each):08x}" for name, (shown, each) in compared.items()}
        notice.compared.append(Compared(word_of(texts), lambda: texts))


_SHOWN = 4
"""Units that an error names."""


def _check_params(
    named: Iterable[tuple[str, nn.Parameter]], problems: Iterable[str] = (), device: torch.device | None = None
) -> None:
    """Raise for parameters that cannot be offloaded; `device`: where they may be beside the host."""
    named, found = list(named), list(problems)
    tensor_mesh = mesh_of(param for _, param in named)
    for name, param in named:
        if tensor_mesh is not None and is_dtensor(param):
            found += dtensor_problems(name, param, tensor_mesh)
        elif (problem := param_problem(param, device)) is not None:
            found.append(f"{name} {problem}")
    if found:
        raise ConfigError("\n".join(found[:10] + ["..."] * (len(found) > 10)))


def _check_experts(units: Iterable[UnitLayout], config: OffloadConfig) -> None:
    """Raise for experts in groups that cannot be run."""
    for unit in units:
        if unit.experts is None:
            continue
        if config.branches == Branches.ANY:
            raise ConfigError(
                f"{unit.name}: ranks gather groups of experts in the same order, and branches='any' says that they use "
                "different modules; leave branches= or zo.group_experts out"
            )


def _outlook(
    unit_bytes: Sequence[UnitBytes],
    work: Sequence[UnitWork],
    config: OffloadConfig,
    partition: Partition,
    hardware: HardwareProfile,
) -> Outlook:
    """The grounds on which "auto" judges: inputs on which all ranks agree, and no measurement."""
    return Outlook.of(unit_bytes, config, partition, hardware.device_name, hardware.num_cores, work)


def _unit_bytes(
    units: Sequence[UnitLayout],
    spec: ModelSpec,
    config: OffloadConfig,
    partition: Partition,
    without: Container[int],
) -> Sequence[UnitBytes]:
    """The bytes of the units of `spec`, laid out. Sections `without` values are taken to rest in files; a load takes
    room for those that do not."""
    return measure_units(_numels(units, spec, without), config, partition)


def _numels(
    units: Sequence[UnitLayout], spec: ModelSpec, without: Container[int], kept: PlannedStates | None = None
) -> list[UnitNumel]:
    """`kept`: states in the place of AdamW's."""
    states, walks = (None, None) if kept is None else (kept.nbytes, kept.walks)
    return [
        UnitNumel.of(unit, spec.in_use_with(index), without, states_of=states, walks=walks)
        for index, unit in enumerate(units)
    ]


def plan(
    model: nn.Module,
    config: OffloadConfig,
    *,
    units: UnitChoice | None = None,
    tokens: int = TOKENS_UNKNOWN,
    mesh: DeviceMesh | None = None,
    micro_batches: int = 1,
    live: LiveBlocks | None = None,
    optimizer: Optimizers | None = None,
) -> Plan:
    """Bytes of a rank that `offload(model, config, mesh, units)` would use, by tier and kind of state, and whether they
    fit; meta models too. Not collective: budgets are those of this rank.

    `print(zo.plan(model, config))` shows it; `.fits` and `.reasons` say whether and why not. `.predicted_step_s` and
    `.bottleneck` are predicted, for a step of `tokens` on each rank. They hold for a machine as the name of its GPU
    tells, not measured; `zero-offload plan` measures.

    With `micro_batches` above 1 a step adds up the gradients of so many backwards, in fp32: 4 bytes per parameter where
    they rest. The tokens of a step are divided among them. Placements are those of `offload`, which does not know how
    many there will be.

    With `live` its blocks, frozen now, take turns. The plan is that of a time when all have been trained, with the
    largest of them alive, between a switch and the next generation. `.most_live` is the largest number that fits.

    With `optimizer`, built with the model's parameters, or a sequence of several, its own states are counted. Those of
    other libraries' classes are found by a step of tensors without memory, and so is the memory of such a step
    (`zo.unitwise`). Without it two states of each parameter are counted, as AdamW has. So does `zo.offload`, which
    knows no optimizer: where that does not fit, neither does the plan.
    """
    for name, count in (("tokens", tokens), ("micro_batches", micro_batches)):
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"{name}={count!r}: a step has 1 or more, a whole number")
    check_model("zo.plan", model)
    check_config("zo.plan", config)
    if live is not None and optimizer is not None:
        raise ConfigError("zo.plan: live= counts the states of AdamW alone; leave optimizer= out")
    with on_likely_gpu():
        device = compute_device()
    if problems := list(mesh_problems(mesh, device.torch_device.type, mesh_of(model.parameters()))):
        raise ConfigError("\n".join(problems))
    partition = partition_of(config, mesh)
    # A rank's share of the machine.
    launched = os.environ.get("LOCAL_WORLD_SIZE", "")  # as torchrun sets it; `offload` asks the ranks
    num_here = max(int(launched), 1) if launched.isdecimal() and partition.world_size > 1 else 1
    partition = replace(partition, num_here=num_here)
    spec = ModelSpec.from_module(model, units, experts=experts_in(model))
    layout = make_layout(spec, resolve(model, config), partition.optimizer_shards)
    without = sections_without_values(layout, dict(offloaded_tensors(model)))
    unit_bytes = _unit_bytes(layout.units, spec, config, partition, without)
    kept, params = None, dict(model.named_parameters())
    if optimizer is not None:
        kept = planned_states(layout, params, optimizer, has_gpu=not device.is_host)
    # A placement for one micro-batch, as `offload` makes it.
    hardware = _hardware(config, device, num_here)
    budget = tier_budget(config, hardware)
    work = work_of(model, spec)
    outlook = _outlook(unit_bytes, work.units, config, partition, hardware)
    placement = assign_tiers(unit_bytes, config, budget, partition, outlook)

    def memory_of(num_live: int) -> tuple[Sequence[UnitBytes], MemoryPlan]:
        """Sums of micro-batches, and what lives, count in the plan alone."""
        numels = _numels(layout.units, spec, without, kept)
        if live is not None:
            numels = numels_in_turns(layout, spec, live.names_in(model), num_live, without, live.turns.master)
        found = measure_units(numels, config, partition, micro_batches)
        return found, estimate_memory(found, placement, config, partition)

    each = max(tokens // micro_batches, 1)
    batch = StepBatch(
        tokens=each,
        micro_batches=micro_batches,
        sequence=min(each, TOKENS_UNKNOWN),
        recompute=any(map(is_recomputed, model.modules())),
    )
    notes, refused = list(work.notes), tuple[str, ...]()
    if kept is not None:
        refused = estimate_memory(unit_bytes, placement, config, partition).reasons
    unit_bytes, memory = memory_of(live.turns.num_live if live is not None else 0)
    workload, machine = replace(outlook.workload, batch=batch, units=tuple(unit_bytes)), outlook.machine
    if not device.is_host:
        # The placement is by what all ranks know; the seconds may be by what was measured here.
        machine = with_measured(machine, device.name, config.compute_dtype_name, partition.world_size)
    memory = replace(memory, wear=memory.wear.of_backwards(batch.num_passes))
    if kept is not None:
        notes += [*kept.notes, *walk_notes(unit_bytes, placement)]
    found = replace(Plan.of(memory, workload, placement, machine), notes=tuple(notes), refused=refused)
    if live is None:
        return found
    most = most_live(live.turns.num_blocks, lambda num_live: memory_of(num_live)[1].fits)
    return replace(found, turns=live.turns, most_live=most)
