"""Which tier every unit's parameters, gradients and optimizer states rest on.

Owns the choice. Pure: it never allocates, and the same input gives the same placement on every rank.
The calls in order: `tier_budget` joins the user's budgets with the machine, `assign_tiers` deals units to
tiers ("auto" by `search`), `place` does both and raises CapacityError when the result does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import CapacityError
from zero_offload.base.types import HardwareProfile, Tier, format_bytes
from zero_offload.plan.dealer import Dealer
from zero_offload.plan.memory import Budget, MemoryPlan, Placement, estimate_memory
from zero_offload.plan.partition import ONE_RANK, Partition
from zero_offload.plan.search import Outlook, Room, UnitTiers, fastest, weight
from zero_offload.plan.unit_bytes import PLACED_KINDS, UnitBytes

__all__ = ["Placement", "UnitBytes", "Variant", "assign_tiers", "place", "tier_budget", "ways_to_fit"]

AUTO_FRACTION = 0.5
"""What "auto" fills of memory that has no budget: activations and the program need room too."""


def place(
    units: Sequence[UnitBytes],
    config: OffloadConfig,
    hardware: HardwareProfile,
    partition: Partition = ONE_RANK,
    outlook: Outlook | None = None,
) -> Placement:
    """Place every unit; CapacityError says what is missing and names settings that would fit."""
    budget = tier_budget(config, hardware)
    placement = assign_tiers(units, config, budget, partition, outlook)
    plan = estimate_memory(units, placement, config, partition)
    if not plan.fits:
        ways = ways_to_fit(units, config, hardware, partition)
        on_disk = plan.used_bytes(Tier.NVME) > budget.of(Tier.NVME) > 0
        where = [f"the nvme tier is {', '.join(map(str, config.nvme_dirs))}"] if on_disk else []
        raise CapacityError("\n".join([*plan.reasons, *where, *ways]))
    return placement


def tier_budget(config: OffloadConfig, hardware: HardwareProfile) -> Budget:
    """The user's budgets where given, never more than the machine has."""
    has = {
        Tier.DEVICE: hardware.device_memory_bytes,
        Tier.CPU: hardware.cpu_memory_bytes,
        Tier.NVME: hardware.nvme_free_bytes,
    }
    limits = {tier: min(config.budget_bytes(tier) or nbytes, nbytes) for tier, nbytes in has.items()}
    shared = hardware.device_name.lower().startswith("cpu")
    return Budget(limits[Tier.DEVICE], limits[Tier.CPU], limits[Tier.NVME], shared)


def assign_tiers(
    units: Sequence[UnitBytes],
    config: OffloadConfig,
    budget: Budget,
    partition: Partition = ONE_RANK,
    outlook: Outlook | None = None,
) -> Placement:
    """A tier for every unit and kind, whether or not the total fits; `outlook` is what "auto" judges by."""
    tiers: list[UnitTiers] = [{} for _ in units]
    automatic = False
    for kind in PLACED_KINDS:
        request = config.placement_of(kind)
        if isinstance(request, str):
            automatic = True
            continue
        for unit_tiers, tier in zip(tiers, _deal([weight(unit, kind) for unit in units], request), strict=True):
            unit_tiers[kind] = tier
    if automatic:
        room = _room(units, tiers, config, budget, partition)
        tiers = fastest(outlook or _usual_outlook(units, config, budget, partition), tiers, room)
    return Placement(tuple(tiers), budget)


def _deal(weights: Sequence[int], fractions: Mapping[Tier, float]) -> list[Tier]:
    """A tier for each weight.

    Dealing in model order spreads every tier over the depth: slow and fast units alternate, so the
    prefetch of a slow one hides behind the compute of the fast ones around it.
    """
    dealer = Dealer({tier: fractions[tier] for tier in Tier if tier in fractions})
    return [dealer.deal(weight) for weight in weights]


def _usual_outlook(units: Sequence[UnitBytes], config: OffloadConfig, budget: Budget, partition: Partition) -> Outlook:
    return Outlook.of(units, config, partition, "cpu" if budget.shared_memory else "a GPU")


def _room(
    units: Sequence[UnitBytes], given: Sequence[UnitTiers], config: OffloadConfig, budget: Budget, partition: Partition
) -> Room:
    """Bytes that "auto" may take of each memory tier."""
    # On a CPU device the device tier is the same memory under another name.
    memory = (Tier.CPU,) if budget.shared_memory else (Tier.DEVICE, Tier.CPU)
    last = Tier.NVME if config.nvme_dirs else Tier.CPU
    # Buffers in flight are largest when everything rests on the last tier: reserve those, and what the
    # user has placed, before dealing out the rest.
    worst = [{kind: at.get(kind, last) for kind in PLACED_KINDS} for at in given]
    bound = estimate_memory(units, Placement(tuple(worst), budget), config, partition)
    placed_only = {(tier, kind): nbytes if kind in given[0] else 0 for (tier, kind), nbytes in bound.rest_bytes.items()}
    taken = replace(bound, rest_bytes=placed_only)
    free_bytes, limit_bytes = {}, {}
    for tier in memory:
        fraction = AUTO_FRACTION if config.budget_bytes(tier) is None else 1.0
        limit_bytes[tier] = int(budget.of(tier) * fraction)
        free_bytes[tier] = limit_bytes[tier] - taken.used_bytes(tier)
        if budget.shared_memory:
            free_bytes[tier] -= taken.used_bytes(Tier.DEVICE)
    return Room(free_bytes, limit_bytes, last, budget)


_CHANGES: tuple[Mapping[str, str | None], ...] = (
    {"cpu_memory": None},
    {"device_memory": None},
    {"nvme_capacity": None},
    {"optimizer": "nvme"},
    {"optimizer": "nvme", "params": "nvme"},
    {"optimizer": "nvme", "params": "nvme", "grads": "nvme"},
    {"durability": "scratch"},
    {"optimizer": "cpu", "durability": "scratch"},
    {"params": "cpu"},
    {"params": "cpu", "optimizer": "cpu"},
    {"params": "cpu", "grads": "cpu", "optimizer": "cpu", "durability": "scratch"},
)
"""What to try when a plan does not fit, least costly for step time and safety first. None lifts a budget."""
_RANK_FACTORS = (2, 4, 8, 16)
_WAYS_MAX = 2
_UNKNOWN_BYTES = 1 << 62


@dataclass(frozen=True)
class Variant:
    """The same model held in other bytes: in another format, or trained in part."""

    title: str
    units: Sequence[UnitBytes]
    config: OffloadConfig


def ways_to_fit(
    units: Sequence[UnitBytes],
    config: OffloadConfig,
    hardware: HardwareProfile,
    partition: Partition,
    variants: Sequence[Variant] = (),
    most: int = _WAYS_MAX,
) -> list[str]:
    """Up to `most` changes of settings under which the same model fits; of each variant the least change."""
    elsewhere = _try(units, config, _with_any_disk(hardware), partition)
    another = f"a directory with {format_bytes(elsewhere.used_bytes(Tier.NVME), at_least=True)} free"
    if config.nvme_dirs and elsewhere.fits and hardware.nvme_free_bytes == 0:
        # A file system of the kernel's, or a full one: no setting makes it a place for files.
        where = ", ".join(map(str, config.nvme_dirs))
        return [f"nvme={where} cannot be used: 0 B are free there; name {another}"]
    ways: dict[str, None] = {}
    for every in _CHANGES:
        changes = {name: value for name, value in every.items() if getattr(config, name) != value}
        trial, machine = _with_changes(config, changes, hardware)
        plan = _try(units, trial, machine, partition)
        if changes and plan.fits:
            ways[f"would fit: {_describe(changes, plan)}"] = None
    for variant in variants:
        if way := _least_change(variant, hardware, partition):
            ways[way] = None
    for factor in _RANK_FACTORS if partition.divides_params else ():
        more = replace(partition, world_size=partition.world_size * factor)
        if _try([_divide(unit, factor, partition) for unit in units], config, hardware, more).fits:
            ways[f"would fit: {more.world_size} ranks, each with this much memory and disk"] = None
            break
    if config.nvme_dirs and elsewhere.fits:
        ways[f"would fit: nvme= {another}"] = None
    return list(ways)[:most] or ["nothing else fits this machine: use a smaller model or more memory"]


def _least_change(variant: Variant, hardware: HardwareProfile, partition: Partition) -> str:
    """What a variant needs beside itself to fit; empty where nothing helps."""
    for every in ({}, {"optimizer": "nvme"}, {"optimizer": "nvme", "params": "nvme"}):
        changes = {name: value for name, value in every.items() if getattr(variant.config, name) != value}
        trial, machine = _with_changes(variant.config, changes, hardware)
        plan = _try(variant.units, trial, machine, partition)
        if plan.fits:
            return f"would fit: {variant.title}" + (f", {_describe(changes, plan)}" if changes else "")
    return ""


def _try(
    units: Sequence[UnitBytes], config: OffloadConfig, hardware: HardwareProfile, partition: Partition
) -> MemoryPlan:
    budget = tier_budget(config, hardware)
    placement = assign_tiers(units, config, budget, partition)
    return estimate_memory(units, placement, config, partition)


def _with_changes(
    config: OffloadConfig, changes: Mapping[str, Any], hardware: HardwareProfile
) -> tuple[OffloadConfig, HardwareProfile]:
    if config.nvme_dirs or "nvme" not in changes.values():
        return replace(config, **changes), hardware
    # No directory yet: try one of any size, and say how much it must hold.
    return replace(config, nvme="nvme", **changes), _with_any_disk(hardware)


def _with_any_disk(hardware: HardwareProfile) -> HardwareProfile:
    return replace(hardware, nvme_free_bytes=_UNKNOWN_BYTES)


def _describe(changes: Mapping[str, str | None], plan: MemoryPlan) -> str:
    used = {name: plan.used_bytes(tier) for name, tier in _BUDGETS.items()}
    if plan.budget.shared_memory:
        used |= {"cpu_memory": used["cpu_memory"] + used["device_memory"], "device_memory": plan.least_bytes}
    settings = [
        f"{name} of at least {format_bytes(used[name], at_least=True)}" if name in used else f"{name}={value!r}"
        for name, value in changes.items()
    ]
    if plan.budget.nvme_bytes == _UNKNOWN_BYTES:
        settings.append(f"nvme= a directory with {format_bytes(used['nvme_capacity'], at_least=True)} free")
    return ", ".join(settings)


_BUDGETS = {"device_memory": Tier.DEVICE, "cpu_memory": Tier.CPU, "nvme_capacity": Tier.NVME}


def _divide(unit: UnitBytes, factor: int, partition: Partition) -> UnitBytes:
    """At stage 3, over so many times as many ranks."""
    # Several ranks add gradients up in fp32, where one alone may have had 16 bits.
    least = 4 * unit.trained_numel if partition.world_size == 1 else 0
    return replace(
        unit,
        params_bytes=-(-unit.params_bytes // factor),
        grads_bytes=-(-max(unit.grads_bytes, least * (unit.grads_bytes > 0)) // factor),
        optimizer_bytes=-(-unit.optimizer_bytes // factor),
        frozen_bytes=-(-unit.frozen_bytes // factor),
        passing_grads_bytes=-(-max(unit.passing_grads_bytes, least * (unit.passing_grads_bytes > 0)) // factor),
    )
