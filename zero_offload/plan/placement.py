"""Which tier every unit's parameters, gradients and optimizer states rest on.

Owns the choice. Pure: it never allocates, and the same input gives the same placement on every rank.
The calls in order: `tier_budget` joins the user's budgets with the machine, `assign_tiers` deals units to
tiers, `place` does both and raises CapacityError when the result does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zero_offload.config import OffloadConfig
from zero_offload.errors import CapacityError
from zero_offload.plan.dealer import Dealer
from zero_offload.plan.memory import (
    PLACED_KINDS,
    Budget,
    MemoryPlan,
    Placement,
    UnitBytes,
    estimate_memory,
    rest_bytes,
)
from zero_offload.plan.partition import ONE_RANK, Partition
from zero_offload.types import HardwareProfile, StateKind, Tier, format_bytes

__all__ = ["Placement", "UnitBytes", "assign_tiers", "place", "tier_budget", "ways_to_fit"]

AUTO_FRACTION = 0.5
"""What "auto" fills of memory that has no budget: activations and the program need room too."""

UnitTiers = dict[StateKind, Tier]


def place(
    units: Sequence[UnitBytes], config: OffloadConfig, hardware: HardwareProfile, partition: Partition = ONE_RANK
) -> Placement:
    """Place every unit; CapacityError says what is missing and names settings that would fit."""
    budget = tier_budget(config, hardware)
    placement = assign_tiers(units, config, budget, partition)
    plan = estimate_memory(units, placement, config, partition)
    if not plan.fits:
        ways = ways_to_fit(units, config, hardware, partition)
        on_disk = plan.used_bytes(Tier.NVME) > budget.of(Tier.NVME)
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
    units: Sequence[UnitBytes], config: OffloadConfig, budget: Budget, partition: Partition = ONE_RANK
) -> Placement:
    """A tier for every unit and kind, whether or not the total fits."""
    tiers: list[UnitTiers] = [{} for _ in units]
    automatic = []
    for kind in PLACED_KINDS:
        request = config.placement_of(kind)
        if isinstance(request, str):
            automatic.append(kind)
            continue
        for unit_tiers, tier in zip(tiers, _deal([_weight(unit, kind) for unit in units], request), strict=True):
            unit_tiers[kind] = tier
    if automatic:
        _assign_automatically(units, tiers, automatic, _AutoRoom(config, budget, partition))
    return Placement(tuple(tiers), budget)


def _weight(unit: UnitBytes, kind: StateKind) -> int:
    sizes = {
        StateKind.PARAMS: unit.params_bytes,
        StateKind.GRADS: unit.grads_bytes + unit.passing_grads_bytes,
        StateKind.OPTIMIZER: unit.optimizer_bytes,
    }
    return sizes[kind]


def _deal(weights: Sequence[int], fractions: Mapping[Tier, float]) -> list[Tier]:
    """A tier for each weight.

    Dealing in model order spreads every tier over the depth: slow and fast units alternate, so the
    prefetch of a slow one hides behind the compute of the fast ones around it.
    """
    dealer = Dealer({tier: fractions[tier] for tier in Tier if tier in fractions})
    return [dealer.deal(weight) for weight in weights]


class _AutoRoom:
    """Bytes "auto" may still take of each memory tier, fastest tier first."""

    def __init__(self, config: OffloadConfig, budget: Budget, partition: Partition) -> None:
        self.partition = partition
        self.config = config
        self.budget = budget
        # On a CPU device the device tier is the same memory under another name.
        memory = (Tier.CPU,) if budget.shared_memory else (Tier.DEVICE, Tier.CPU)
        self.last = Tier.NVME if config.nvme_dirs else Tier.CPU
        self.tiers: tuple[Tier, ...] = tuple(dict.fromkeys((*memory, self.last)))
        self.free_bytes = {tier: self._limit_bytes(tier) for tier in memory}

    def _limit_bytes(self, tier: Tier) -> int:
        fraction = AUTO_FRACTION if self.config.budget_bytes(tier) is None else 1.0
        return int(self.budget.of(tier) * fraction)

    def reserve(self, plan: MemoryPlan) -> None:
        """Take away what a plan uses of memory."""
        for tier in self.free_bytes:
            self.free_bytes[tier] -= plan.used_bytes(tier)
            if self.budget.shared_memory:
                self.free_bytes[tier] -= plan.used_bytes(Tier.DEVICE)

    def take(self, nbytes_on: Mapping[Tier, int]) -> Tier:
        """The fastest tier with room for the bytes it would cost there; the last one has no limit here."""
        for tier, free_bytes in self.free_bytes.items():
            if nbytes_on[tier] <= free_bytes:
                self.free_bytes[tier] -= nbytes_on[tier]
                return tier
        return self.last


def _assign_automatically(
    units: Sequence[UnitBytes], tiers: list[UnitTiers], kinds: Sequence[StateKind], room: _AutoRoom
) -> None:
    # Buffers in flight are largest when everything rests on the last tier: reserve those, and what the
    # user has placed, before dealing out the rest.
    worst = [{kind: given.get(kind, room.last) for kind in PLACED_KINDS} for given in tiers]
    bound = estimate_memory(units, Placement(tuple(worst), room.budget), room.config, room.partition)
    placed_only = {(tier, kind): 0 if kind in kinds else nbytes for (tier, kind), nbytes in bound.rest_bytes.items()}
    room.reserve(replace(bound, rest_bytes=placed_only))
    for kind in kinds:
        for unit, given in zip(units, tiers, strict=True):
            known = {each: given.get(each, room.last) for each in PLACED_KINDS}
            costs = {
                tier: rest_bytes(unit, kind, known | {kind: tier}, room.partition, room.budget.shared_memory)
                for tier in room.tiers
            }
            given[kind] = room.take(costs)


_CHANGES: tuple[Mapping[str, str | None], ...] = (
    {"cpu_memory": None},
    {"optimizer": "nvme"},
    {"optimizer": "nvme", "params": "nvme"},
    {"optimizer": "nvme", "params": "nvme", "grads": "nvme"},
    {"durability": "scratch"},
    {"optimizer": "cpu", "durability": "scratch"},
)
"""What to try when a plan does not fit, least costly for step time and safety first."""
_RANK_FACTORS = (2, 4, 8, 16)
_WAYS_MAX = 2


def ways_to_fit(
    units: Sequence[UnitBytes], config: OffloadConfig, hardware: HardwareProfile, partition: Partition
) -> list[str]:
    """Changes of settings under which the same model fits."""
    ways = []
    for changes in _CHANGES:
        trial, machine = _with_changes(config, changes, hardware)
        plan = _try(units, trial, machine, partition)
        if plan.fits:
            ways.append(f"would fit: {_describe(changes, plan, config)}")
    for factor in _RANK_FACTORS if config.stage == 3 else ():
        more = replace(partition, world_size=partition.world_size * factor)
        if _try([_divide(unit, factor) for unit in units], config, hardware, more).fits:
            ways.append(f"would fit: {more.world_size} ranks, each with this much memory and disk")
            break
    return ways[:_WAYS_MAX] or ["nothing else fits this machine: use a smaller model or more memory"]


def _try(
    units: Sequence[UnitBytes], config: OffloadConfig, hardware: HardwareProfile, partition: Partition
) -> MemoryPlan:
    placement = assign_tiers(units, config, tier_budget(config, hardware), partition)
    return estimate_memory(units, placement, config, partition)


def _with_changes(
    config: OffloadConfig, changes: Mapping[str, Any], hardware: HardwareProfile
) -> tuple[OffloadConfig, HardwareProfile]:
    if config.nvme_dirs or "nvme" not in changes.values():
        return replace(config, **changes), hardware
    # No directory yet: try one of any size, and say how much it must hold.
    return replace(config, nvme="nvme", **changes), replace(hardware, nvme_free_bytes=_UNKNOWN_BYTES)


_UNKNOWN_BYTES = 1 << 62


def _describe(changes: Mapping[str, str | None], plan: MemoryPlan, config: OffloadConfig) -> str:
    if "cpu_memory" in changes:
        needed = plan.used_bytes(Tier.CPU) + plan.used_bytes(Tier.DEVICE) * plan.budget.shared_memory
        return f"cpu_memory of at least {format_bytes(needed)}"
    settings = ", ".join(f"{name}={value!r}" for name, value in changes.items())
    if plan.budget.nvme_bytes != _UNKNOWN_BYTES:
        return settings
    return f"{settings}, nvme= a directory with {format_bytes(plan.used_bytes(Tier.NVME))} free"


def _divide(unit: UnitBytes, factor: int) -> UnitBytes:
    return replace(
        unit,
        params_bytes=-(-unit.params_bytes // factor),
        grads_bytes=-(-unit.grads_bytes // factor),
        optimizer_bytes=-(-unit.optimizer_bytes // factor),
        frozen_bytes=-(-unit.frozen_bytes // factor),
        trained_numel=-(-unit.trained_numel // factor),
        passing_grads_bytes=-(-unit.passing_grads_bytes // factor),
    )
