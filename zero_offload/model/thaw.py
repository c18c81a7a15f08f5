"""A section that was frozen when it was offloaded is trained from now on, or frozen again, between two steps.

It thaws where it lies: buffer, number and place in the layout stay. The shard gets a master, which is its value, and
room for states (decision 069). The calls: `check_trainable` per parameter; `thaw_section`, which may fail, then
`install_section`. `check_frozen` and `freeze_section` are the way back, without the master. `recounted` is also for a
generation whose sections have thawed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import nn

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.base.types import Tier, UpdateOverlap, format_bytes
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
from zero_offload.storage.shards.shard import Component, Shard, planned_bytes, shard_bytes
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
    base: Foundation,
    layout: ShardLayout,
    sizes: Sizes,
    place: ParamPlace,
    resting: Collection[int],
    trained: Collection[int],
    undo: ExitStack,
) -> Thawed:
    """Give the section of `place` a master and room for states; nothing is under way. `undo` takes it back. Sections
    `resting` have no states. Those `trained` have been so, some are frozen again: limits of frames are theirs already.

    Raises CapacityError, and changes nothing.
    """
    store, section, config, partition = base.store, place.section, base.config, base.collectives.partition
    index = section.layout.index
    new = layout.thawed({index})
    new_sizes = counted(base, new, sizes, [index], resting)
    kept = shard_bytes(section.shard.layout, [Component.VALUE]) * bool(section.shard.slots)
    check_fits(new_sizes, place, store.retired_bytes + kept)
    base.prefetcher.invalidate(place.unit)  # what is under way is read from where the values have rested
    before = _lay_anew(store, section.shard, new, undo)
    widest = (each.thawed({*trained} - {s.index for s in each.sections if s.trainable}) for each in (layout, new))
    plans = [BufferPlan(each, sizes.placement, partition, config, base.device.is_host) for each in widest]
    limits = zip(*(plan.frame_limits(planned_bytes) for plan in plans), strict=True)
    host, device = ([max(now - then, 0) for then, now in zip(*each, strict=True)] for each in limits)
    return Thawed(place, new, new_sizes, plans[1].landing_bytes(), (host, device), before)


def install_section(base: Foundation, thawed: Thawed) -> None:
    """Use the section so from now on. Nothing of this fails."""
    unit, (host, device) = thawed.place.unit, map(FrameLimits._make, thawed.frames)
    base.store.retire(thawed.before)
    unit.lay_anew(thawed.layout.units[unit.index])
    base.store.arena.widen(host.chosen, host.most, host.kept)
    base.frames.widen(device.chosen, device.most, device.least)
    base.prefetcher.grow(thawed.landing_bytes)
    if base.files.keeper is not None:
        base.files.keeper.relayout(thawed.layout)


def check_frozen(call: str, places: Sequence[ParamPlace]) -> None:
    """Raise ConfigError where parameters still train, or their sections were trained at `zo.offload`."""
    for place in places:
        if place.param.requires_grad:
            raise ConfigError(f"{call}: {place.name} requires a gradient; call requires_grad_(False) on it first")
        if not place.section.layout.is_thawed:
            raise ConfigError(
                f"{call}: {place.name}, or another parameter of {place.unit.name}, was trained when zo.offload was "
                "called, and keeps its master. Freeze all blocks before zo.offload, or leave out master='drop'"
            )


def freeze_section(
    base: Foundation, layout: ShardLayout, place: ParamPlace, undo: ExitStack
) -> tuple[ShardLayout, Shard]:
    """Let the section of `place`, which has thawed, have its values alone; nothing is under way, and it has neither
    states nor gradients. `undo` takes it back. Returns the layout of now, and the shard as it was, to be retired.

    Raises CapacityError or StorageError, and changes nothing.
    """
    shard = place.section.shard
    new = layout.frozen({shard.layout.index})
    base.prefetcher.invalidate(place.unit)  # what is under way is read from where the values have rested
    return new, _lay_anew(base.store, shard, new, undo)


def _lay_anew(store: ShardStore, shard: Shard, layout: ShardLayout, undo: ExitStack) -> Shard:
    """Lay a shard out as its section of `layout` is, with the values that it has; masters begin as these. Returns the
    shard as it was."""
    before = store.lay_anew(shard, layout.sections[shard.layout.index])
    undo.callback(store.lay_back, shard, before)

    def fill(begin: int, _: int, out: torch.Tensor) -> None:
        out.copy_(store.read_chunk(before, Component.VALUE, begin // CHUNK_NUMEL))

    store.write_components(shard, ComponentSource(shard, fill))
    store.staging.drop()
    return before


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


def check_fits(sizes: Sizes, place: ParamPlace, retired_bytes: int) -> None:
    """Raise CapacityError where the states of a section that is to be trained do not fit. Beside the plan's bytes,
    drives have `retired_bytes` of what rests, until the next generation."""
    plan = sizes.plan
    what = f"requires_grad_(True) of {place.name}: states of its section ({place.unit.name}) do not fit"
    if not plan.fits:
        raise CapacityError("\n".join([what, *plan.reasons]))
    if retired_bytes > (left := plan.left_bytes(Tier.NVME)):
        raise CapacityError(
            f"{what} before the next generation: beside them drives keep {format_bytes(retired_bytes)} that the last "
            f"one has of sections that rest, and nvme_capacity leaves {format_bytes(left)}. Call zo.commit where "
            "sections rest, before others are trained (with commit_every=1), or raise nvme_capacity"
        )
