"""A section that was frozen when it was offloaded is trained from now on, between two steps.

It thaws where it lies: buffer, number and place in the layout stay. The shard gets a master, which is its value, and
room for states (decision 069). The calls: `check_trainable` per parameter; `thaw_section`, which may fail, then
`install_section`; `thawed_sizes` also for a generation whose sections have thawed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import nn

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.base.types import UpdateOverlap
from zero_offload.checkpoint.values import ComponentSource
from zero_offload.model.foundation import Foundation
from zero_offload.model.params import ParamPlace
from zero_offload.plan.buffers import BufferPlan, FrameLimits
from zero_offload.plan.layout import CHUNK_NUMEL, ShardLayout
from zero_offload.plan.memory import Sizes, UnitNumel, estimate_memory, measure_units
from zero_offload.plan.partition import Partition
from zero_offload.plan.quantized import is_wrapper
from zero_offload.runtime.hooks import experts_of
from zero_offload.runtime.units.unit import stays_guarded
from zero_offload.storage.shards.shard import Component, Shard, planned_bytes
from zero_offload.storage.shards.store import ShardStore


def check_trainable(config: OffloadConfig, modules: Iterable[nn.Module], place: ParamPlace) -> None:
    """Raise ConfigError where a frozen parameter of these modules cannot be trained."""
    param = place.param
    if is_wrapper(param) or stays_guarded(place.section, place.piece):
        raise ConfigError(
            f"{place.name} is a quantized weight, or belongs to one, and cannot be trained; train adapters beside it, "
            "or load the model without quantization"
        )
    for module in modules:
        inner = (each for inside in module.modules() if inside is not module for each in inside._parameters.values())
        if experts_of(module) is not None and any(param is each for each in inner):
            raise ConfigError(
                f"{place.name} is a parameter inside of experts that run in groups (zo.group_experts), which train "
                "their own parameters alone; leave the call out"
            )
    if config.overlap == UpdateOverlap.BACKWARD:
        raise ConfigError(
            f"{place.name} was frozen when zo.offload was called, and a backward that updates (overlap='backward') has "
            "a fixed set of parameters. Let it require a gradient at zo.offload, and freeze it right after; or use "
            "overlap='forward'"
        )


@dataclass(frozen=True)
class Thawed:
    """A model whose section has all that training takes, and is not used so yet."""

    place: ParamPlace
    layout: ShardLayout
    sizes: Sizes
    landing_bytes: int
    """As `BufferPlan.landing_bytes`."""
    frames: tuple[Sequence[int], Sequence[int]]
    """By how much the limits of the host's frames rise, and those of the device's; as `FrameLimits`."""
    before: Shard


def thaw_section(
    base: Foundation, layout: ShardLayout, sizes: Sizes, place: ParamPlace, resting: Collection[int], undo: ExitStack
) -> Thawed:
    """Give the section of `place` a master and room for states; nothing is under way. `undo` takes it back. Sections
    `resting` have no states.

    Raises CapacityError, and changes nothing.
    """
    store, section, config, partition = base.store, place.section, base.config, base.collectives.partition
    index = section.layout.index
    new = layout.thawed({index})
    new_sizes = counted(base, new, sizes, [index], resting)
    check_fits(new_sizes, place)
    base.prefetcher.invalidate(place.unit)  # what is under way is read from where the values have rested
    before = store.thaw(section.shard, new.sections[index])
    undo.callback(store.freeze, section.shard, before)
    _write_master(store, section.shard, before)
    store.staging.drop()
    plans = [BufferPlan(each, sizes.placement, partition, config, base.device.is_host) for each in (layout, new)]
    limits = zip(*(plan.frame_limits(planned_bytes) for plan in plans), strict=True)
    host, device = ([max(now - then, 0) for then, now in zip(*each, strict=True)] for each in limits)
    return Thawed(place, new, new_sizes, plans[1].landing_bytes(), (host, device), before)


def install_section(base: Foundation, thawed: Thawed) -> None:
    """Use the section so from now on. Nothing of this fails."""
    unit, (host, device) = thawed.place.unit, map(FrameLimits._make, thawed.frames)
    base.store.retire(thawed.before)
    unit.thaw(thawed.layout.units[unit.index])
    base.store.arena.widen(host.chosen, host.most, host.kept)
    base.frames.widen(device.chosen, device.most, device.least)
    base.prefetcher.grow(thawed.landing_bytes)
    if base.files.keeper is not None:
        base.files.keeper.relayout(thawed.layout)


def _write_master(store: ShardStore, shard: Shard, before: Shard) -> None:
    """The values of a frozen shard, as it was `before`, are its masters."""

    def fill(begin: int, _: int, out: torch.Tensor) -> None:
        out.copy_(store.read_chunk(before, Component.VALUE, begin // CHUNK_NUMEL))

    store.write_components(shard, ComponentSource(shard, fill))


def recounted(
    sizes: Sizes,
    layout: ShardLayout,
    sections: Iterable[int],
    config: OffloadConfig,
    partition: Partition,
    in_base: Collection[int],
    resting: Collection[int] = (),
) -> Sizes:
    """Sizes in which the units of these sections count as `layout` has them. Sections `in_base` rest in files; those
    `resting` have no states. Placements stay."""
    unit_bytes = list(sizes.unit_bytes)
    for index in {layout.sections[section].unit for section in sections}:
        numel = UnitNumel.of(layout.units[index], unit_bytes[index].in_use_with, in_base, resting)
        (unit_bytes[index],) = measure_units([numel], config, partition)
    plan = estimate_memory(unit_bytes, sizes.placement, config, partition)
    return replace(sizes, unit_bytes=unit_bytes, plan=plan)


def counted(
    base: Foundation, layout: ShardLayout, sizes: Sizes, sections: Iterable[int], resting: Collection[int]
) -> Sizes:
    """The same of a model that runs."""
    in_base = {
        each.layout.index
        for each in base.store.shards
        if each.base is not None and not layout.sections[each.layout.index].trainable
    }
    return recounted(sizes, layout, sections, base.config, base.collectives.partition, in_base, resting)


def check_fits(sizes: Sizes, place: ParamPlace) -> None:
    """Raise CapacityError where the states of a section that is to be trained do not fit."""
    if not sizes.plan.fits:
        what = f"requires_grad_(True) of {place.name}: states of its section ({place.unit.name}) do not fit"
        raise CapacityError("\n".join([what, *sizes.plan.reasons]))
