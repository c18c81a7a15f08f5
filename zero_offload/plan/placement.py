"""Which tier every unit's parameters, gradients and optimizer states rest on.

Owns the choice. Pure: it never allocates, and the same input gives the same placement on every rank. The calls in
order: `tier_budget` joins the user's budgets with the machine; `assign_tiers` deals units to tiers. `place` does both,
and raises CapacityError when the result does not fit.

For "auto", `_Search` looks for the tiers that make a step shortest. A candidate gives each automatic kind its shares of
the tiers, in a few steps. Shares are dealt to units in an order that spreads each of them over the depth. A larger
share keeps what a smaller one had. All candidates are ranked by `step_time`, and the first that fits is taken. More
memory only adds candidates.

[Note: trained parts first]
A unit's trained part (`UnitSpec.is_trained_part`) is small, and all that a step changes. So "auto" places all of them
first, with their gradients and states: on the device, else in the host's memory. The search places the other units in
what is left. By fractions too they come first, if they all fit into the share of the fastest tier.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import CapacityError, ZeroOffloadError
from zero_offload.base.types import HardwareProfile, StateKind, Tier, format_bytes
from zero_offload.hardware.machines import Cluster, Machine, default_machine
from zero_offload.plan.layout import Dealer
from zero_offload.plan.memory import (
    PLACED_KINDS,
    Budget,
    MemoryPlan,
    Placement,
    UnitBytes,
    UnitNumel,
    estimate_memory,
    resting,
)
from zero_offload.plan.partition import ONE_RANK, Partition
from zero_offload.plan.shapes import UnitWork, plain_block
from zero_offload.plan.step_time import Numbers, StepWorkload, Totals, of_unit, predict, step_times

AUTO_FRACTION = 0.5
"""The share that "auto" fills of memory that has no budget: activations and the program need room too."""
SHARE_STEPS: Mapping[StateKind, int] = {StateKind.PARAMS: 4, StateKind.GRADS: 4, StateKind.OPTIMIZER: 16}
"""Into how many parts the bytes of a kind are cut; most bytes are the optimizer's."""
ALONE_STEPS = 64
"""The same of a kind that is placed alone: parameters, where nothing else is trained."""
CANDIDATES_MAX = 1024
"""Looked at: some need buffers that were not reserved, and do not fit after all."""
CORES_USUAL = 8

UnitTiers = dict[StateKind, Tier]
Indices = npt.NDArray[np.int32]
Counts = npt.NDArray[np.intp]
_TIERS = tuple(Tier)
_CHOICES = tuple(itertools.product(_TIERS, repeat=len(PLACED_KINDS)))
"""Tiers of parameters, gradients and optimizer states."""


@dataclass(frozen=True)
class Outlook:
    """The grounds on which a placement is judged."""

    workload: StepWorkload
    machine: Machine

    @classmethod
    def of(
        cls,
        units: Sequence[UnitBytes],
        config: OffloadConfig,
        partition: Partition,
        device_name: str,
        num_cores: int = CORES_USUAL,
        work: Sequence[UnitWork] = (),
    ) -> Outlook:
        """By what is known of such a device, without a measurement; without `work` all parameters multiply."""
        known = work or [plain_block(_numel(unit, partition)) for unit in units]
        workload = StepWorkload.of(known, config, partition, units=units)
        cluster, dtype = Cluster(partition.world_size), config.compute_dtype_name
        return cls(workload, default_machine(device_name, num_cores, cluster=cluster, dtype=dtype))


def _numel(unit: UnitBytes, partition: Partition) -> UnitNumel:
    whole = unit.params_bytes * partition.param_shards
    frozen = unit.trained_numel * unit.frozen_bytes // max(unit.trained_bytes, 1)
    return UnitNumel(unit.name, unit.trained_numel, frozen if unit.trained_numel else whole // 2)


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
        suggestions = suggestions_to_fit(units, config, hardware, partition)
        on_disk = plan.used_bytes(Tier.NVME) > budget.of(Tier.NVME) > 0
        where = [f"the nvme tier is {', '.join(map(str, config.nvme_dirs))}"] if on_disk else []
        raise CapacityError("\n".join([*plan.reasons, *where, *suggestions]))
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
    """A tier for every unit and kind, whether or not the total fits.

    "auto" judges by `outlook`, which is of the same units, config and partition.
    """
    tiers: list[UnitTiers] = [{} for _ in units]
    automatic = False
    for kind in PLACED_KINDS:
        request = config.placement_of(kind)
        if isinstance(request, str):
            automatic = True
            continue
        for unit_tiers, tier in zip(tiers, _deal(units, kind, request), strict=True):
            unit_tiers[kind] = tier
    if automatic:
        usual = "cpu" if budget.shared_memory else "a GPU"
        try:
            tiers = _Search(outlook or Outlook.of(units, config, partition, usual), tiers, budget).fastest()
        except (ZeroOffloadError, MemoryError):
            raise
        except Exception as error:  # a prediction only chooses: without one states rest where most of them fit
            last = Tier.NVME if config.nvme_dirs else Tier.CPU
            warnings.warn(
                f"the step could not be predicted ({type(error).__name__}: {error}), so 'auto' is {last.value!r} here. "
                "This is a fault of zero_offload: please report it with the model's config",
                stacklevel=2,
            )
            tiers = _all_on(last, tiers)
    return Placement(tuple(tiers), budget)


def _deal(units: Sequence[UnitBytes], kind: StateKind, fractions: Mapping[Tier, float]) -> list[Tier]:
    """A tier for each unit.

    Dealing in model order spreads every tier over the depth. Slow and fast units alternate, so the prefetch of a slow
    one hides behind the compute of the fast ones around it. See also [Note: trained parts first].
    """
    weights = [weight(unit, kind) for unit in units]
    dealer = Dealer({tier: fractions[tier] for tier in Tier if tier in fractions})
    fastest = next(tier for tier in Tier if fractions.get(tier))
    parts = [index for index, unit in enumerate(units) if unit.is_trained_part]
    dealt = dict[int, Tier]()
    if sum(weights[index] for index in parts) <= fractions[fastest] * sum(weights):
        dealt = {index: dealer.deal(weights[index], to=fastest) for index in parts}
    return [dealt[index] if index in dealt else dealer.deal(each) for index, each in enumerate(weights)]


def spread_order(count: int) -> list[int]:
    """Indices in an order of which every beginning is spread over the whole: by their reversed binary digits."""
    digits = max(count - 1, 1).bit_length()
    return sorted(range(count), key=lambda index: int(f"{index:0{digits}b}"[::-1], 2))


class _Search:
    """All candidates for one model on one machine. `given` has the tiers of the kinds that are not automatic."""

    def __init__(self, outlook: Outlook, given: Sequence[UnitTiers], budget: Budget) -> None:
        self._workload, self._machine, self._budget = outlook.workload, outlook.machine, budget
        config = self._workload.config
        # On a CPU device the device tier is the same memory under another name.
        self._memory = (Tier.CPU,) if budget.shared_memory else (Tier.DEVICE, Tier.CPU)
        self._last = Tier.NVME if config.nvme_dirs else Tier.CPU
        """Where what has no room goes."""
        self._tiers = tuple(dict.fromkeys((*self._memory, self._last)))
        self._automatic = [kind for kind in PLACED_KINDS if kind not in given[0]]
        self._limits: dict[Tier, int] = {}
        """Bytes of memory that may be used."""
        for tier in self._memory:
            fraction = AUTO_FRACTION if config.budget_bytes(tier) is None else 1.0
            self._limits[tier] = int(budget.of(tier) * fraction)
        self._given, self._free = given, self._left_by(given)
        """Tiers that are decided, for each unit; and bytes of memory that are free beside these."""
        if any(unit.is_trained_part for unit in self._workload.units):
            self._place_parts()

    def _place_parts(self) -> None:
        """See [Note: trained parts first]. Where they do not fit, they go where least is missing: on a drive states
        need buffers, which are larger than few states are."""
        found = [(self._given, self._free)]
        for tier in reversed(self._memory):
            first = dict.fromkeys(self._automatic, tier)
            placed = [
                {**at, **first} if unit.is_trained_part else at
                for unit, at in zip(self._workload.units, self._given, strict=True)
            ]
            found.append((placed, self._left_by(placed)))
        self._given, self._free = max(reversed(found), key=lambda each: min(0.0, *each[1].values()))

    def _left_by(self, given: Sequence[UnitTiers]) -> dict[Tier, float]:
        """Bytes of memory that are free beside what is given, and beside buffers."""
        # Buffers in flight are largest when everything else rests on the last tier.
        workload, shared = self._workload, self._budget.shared_memory
        worst = _all_on(self._last, given)
        used = dict(self._plan(worst).staging_bytes)
        for unit, at, fixed in zip(workload.units, worst, given, strict=True):
            for tier, kind, nbytes in resting(unit, at, workload.partition, shared):
                used[tier] += nbytes * (kind in fixed)
        also = used[Tier.DEVICE] if shared else 0
        return {tier: limit - used[tier] - also for tier, limit in self._limits.items()}

    def fastest(self) -> list[UnitTiers]:
        """Tiers of every unit: those given, and for the other kinds the fastest that fit.

        Where nothing fits, what is not given is on the last tier.
        """
        fitting = filter(self._fits, itertools.islice(self._candidates(), CANDIDATES_MAX))
        found = next(fitting, None)
        whole = {tier: _all_on(tier, self._given) for tier in (self._last, *self._tiers)}
        # All on one tier of memory may fit only because it needs no buffers of a drive.
        more = [tiers for tier, tiers in whole.items() if tier in self._memory and self._is_within(tiers)]
        if choices := [*([] if found is None else [found]), *more]:
            return min(choices, key=self._step_s)
        # A placement on one tier with no room left for activations is better than none.
        return next(filter(self._fits, whole.values()), whole[self._last])

    def _step_s(self, tiers: list[UnitTiers]) -> float:
        return predict(self._workload, Placement(tuple(tiers), self._budget), self._machine).step_s

    def _plan(self, tiers: list[UnitTiers]) -> MemoryPlan:
        workload = self._workload
        return estimate_memory(
            workload.units, Placement(tuple(tiers), self._budget), workload.config, workload.partition
        )

    def _fits(self, tiers: list[UnitTiers]) -> bool:
        return self._plan(tiers).fits

    def _is_within(self, tiers: list[UnitTiers]) -> bool:
        """True if it fits into what of memory may be used."""
        plan, shared = self._plan(tiers), self._budget.shared_memory
        return plan.fits and all(
            plan.used_bytes(tier) + plan.used_bytes(Tier.DEVICE) * shared <= limit
            for tier, limit in self._limits.items()
        )

    def _candidates(self) -> Iterator[list[UnitTiers]]:
        """Those that fit into memory without their buffers, each once, the fastest first.

        Of equal steps the candidate that moves least comes first, then the candidate on faster tiers.
        """
        free = dict(self._free)
        if self._last in free:
            # States without room go to the last tier, up to all of it where not everything fits there.
            beyond = self._budget.of(self._last) - self._limits[self._last]
            free[self._last] = np.inf if self._fits(_all_on(self._last, self._given)) else free[self._last] + beyond
        axes = [self._shares(kind) for kind in PLACED_KINDS]
        rows = [axes[0][:, None, None], axes[1][None, :, None], axes[2][None, None]]
        chosen = (rows[0] * len(_TIERS) + rows[1]) * len(_TIERS) + rows[2]
        chosen = chosen.reshape(-1, len(self._given))  # (candidates, units)
        counts = self._counts(chosen)
        fits = (self._resting(counts) <= np.array([free[tier] for tier in self._memory])).all(1)
        chosen, counts = chosen[fits], [(unit, each[fits]) for unit, each in counts]
        step_s, busy_s = self._times(self._workload, counts)
        ranks = sum(row.sum(-1) for row in rows).reshape(-1)[fits]
        order = np.lexsort((ranks, busy_s.round(9), step_s.round(9)))
        seen: set[bytes] = set()
        for index in order:
            if (key := chosen[index].tobytes()) not in seen:
                seen.add(key)
                yield [self._at(unit, int(each)) for unit, each in enumerate(chosen[index])]

    def _at(self, unit: int, choice: int) -> UnitTiers:
        return dict(zip(PLACED_KINDS, _CHOICES[choice], strict=True)) | dict(self._given[unit])

    def _counts(self, chosen: Indices) -> list[tuple[int, Counts]]:
        """For each kind of unit its first one, and how many such units each candidate gives each choice."""
        alike: dict[object, list[int]] = {}
        for unit, given in enumerate(self._given):
            alike.setdefault((*self._workload.likeness(unit), *given.values()), []).append(unit)
        # One number for each candidate and choice.
        numbers = chosen + len(_CHOICES) * np.arange(len(chosen), dtype=np.int32)[:, None]
        shape = (len(chosen), len(_CHOICES))
        return [
            (units[0], np.bincount(numbers[:, units].ravel(), minlength=math.prod(shape)).reshape(shape))
            for units in alike.values()
        ]

    def _times(self, workload: StepWorkload, counts: list[tuple[int, Counts]]) -> tuple[Numbers, Numbers]:
        """For each candidate, the seconds of a step and of all resources together."""
        seconds, sizes = np.zeros(1), np.zeros(1)
        for unit, each in counts:
            found = [of_unit(workload, unit, self._at(unit, choice), self._machine) for choice in range(len(_CHOICES))]
            seconds = seconds + np.tensordot(each, np.stack([one.seconds for one in found]), 1)
            sizes = sizes + each @ np.stack([one.sizes for one in found])
        times = step_times(workload, Totals(seconds, sizes), self._machine, self._budget)
        step_s, busy_s = times.step_s, times.busy_s.sum(1)
        if workload.batch.by_unit and not (leaves := sizes[:, 0] > 0).all():  # as `StepWorkload.as_run`
            in_a_loop = self._times(workload.in_a_loop(), counts)
            step_s, busy_s = np.where(leaves, step_s, in_a_loop[0]), np.where(leaves, busy_s, in_a_loop[1])
        return step_s, busy_s

    def _resting(self, counts: list[tuple[int, Counts]]) -> Numbers:
        """(candidates, tiers of memory): bytes of the kinds that are to be placed."""
        workload, shared = self._workload, self._budget.shared_memory
        found = np.zeros(1)
        for unit, each in counts:
            table = np.zeros((len(_CHOICES), len(self._memory)))
            for choice in range(len(_CHOICES)):
                for tier, kind, nbytes in resting(
                    workload.units[unit], self._at(unit, choice), workload.partition, shared
                ):
                    if kind not in self._given[unit] and tier in self._memory:
                        table[choice, self._memory.index(tier)] += nbytes
            found = found + each @ table
        return found

    def _shares(self, kind: StateKind) -> Indices:
        """(candidates, units): the index of a tier for each unit; one row where there is nothing to choose."""
        fixed = [_TIERS.index(at.get(kind, self._tiers[0])) for at in self._given]
        weights = self._weights(kind)
        total, behind, reached = sum(weights), np.zeros(len(weights)), 0
        if not total:
            return np.array([fixed], dtype=np.int32)
        for index in spread_order(len(weights)):
            reached += weights[index]
            behind[index] = reached / total
        alone = not any(sum(self._weights(other)) for other in PLACED_KINDS if other is not kind)
        steps = ALONE_STEPS if alone else SHARE_STEPS[kind]
        rows = []
        for cut in itertools.product(range(steps + 1), repeat=len(self._tiers) - 1):
            if sum(cut) <= steps:
                ends = np.cumsum(cut) / steps
                place = (behind[:, None] > ends[None, :] + 1e-9).sum(1)
                dealt = np.array([_TIERS.index(tier) for tier in self._tiers])[place]
                rows.append(np.where([kind in at for at in self._given], fixed, dealt))
        return np.array(rows, dtype=np.int32)

    def _weights(self, kind: StateKind) -> list[int]:
        """Bytes of each unit that are yet to be placed."""
        return [
            weight(unit, kind) * (kind not in at) for unit, at in zip(self._workload.units, self._given, strict=True)
        ]


def _all_on(tier: Tier, given: Sequence[UnitTiers]) -> list[UnitTiers]:
    """All kinds on this tier, except the given ones."""
    return [{kind: at.get(kind, tier) for kind in PLACED_KINDS} for at in given]


def weight(unit: UnitBytes, kind: StateKind) -> int:
    sizes = {
        StateKind.PARAMS: unit.params_bytes,
        StateKind.GRADS: unit.grads_bytes + unit.passing_grads_bytes,
        StateKind.OPTIMIZER: unit.optimizer_bytes,
    }
    return sizes[kind]


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
"""Changes to try when a plan does not fit, least costly for step time and safety first. None lifts a budget."""
_VARIANT_CHANGES: tuple[Mapping[str, str | None], ...] = (
    {},
    {"optimizer": "nvme"},
    {"optimizer": "nvme", "params": "nvme"},
)
"""Changes that a variant of the model may need beside itself; the first under which it fits is named."""
_RANK_FACTORS = (2, 4, 8, 16)
_SUGGESTIONS_MAX = 2
_UNKNOWN_BYTES = 1 << 62


@dataclass(frozen=True)
class Variant:
    """The same model held in other bytes: in another format, or trained in part."""

    title: str
    units: Sequence[UnitBytes]
    config: OffloadConfig


def suggestions_to_fit(
    units: Sequence[UnitBytes],
    config: OffloadConfig,
    hardware: HardwareProfile,
    partition: Partition,
    variants: Sequence[Variant] = (),
    most: int = _SUGGESTIONS_MAX,
) -> list[str]:
    """Up to `most` changes of settings under which the same model fits; of each variant the least change."""
    elsewhere = _try(units, config, _with_any_disk(hardware), partition)
    another = f"a directory with {format_bytes(elsewhere.used_bytes(Tier.NVME), at_least=True)} free"
    if config.nvme_dirs and elsewhere.fits and hardware.nvme_free_bytes == 0:
        # A file system of the kernel's, or a full one: no setting makes it a place for files.
        where = ", ".join(map(str, config.nvme_dirs))
        return [f"nvme={where} cannot be used: 0 B are free there; name {another}"]
    fitting = [words for words in _fitting(units, config, hardware, partition, _CHANGES) if words]
    for variant in variants:
        words = next(_fitting(variant.units, variant.config, hardware, partition, _VARIANT_CHANGES), None)
        fitting += [] if words is None else [variant.title + (f", {words}" if words else "")]
    suggestions = dict.fromkeys(f"would fit: {words}" for words in fitting)
    for factor in _RANK_FACTORS if partition.divides_params else ():
        more = replace(partition, world_size=partition.world_size * factor)
        if _try([_divide(unit, factor, partition) for unit in units], config, hardware, more).fits:
            suggestions[f"would fit: {more.world_size} ranks, each with this much memory and disk"] = None
            break
    if config.nvme_dirs and elsewhere.fits:
        suggestions[f"would fit: nvme= {another}"] = None
    return list(suggestions)[:most] or ["nothing else fits this machine: use a smaller model or more memory"]


def _fitting(
    units: Sequence[UnitBytes],
    config: OffloadConfig,
    hardware: HardwareProfile,
    partition: Partition,
    tried: Sequence[Mapping[str, str | None]],
) -> Iterator[str]:
    """In words, those of the changes tried under which the units fit; an empty text where nothing is changed."""
    automatic = [kind.value for kind in PLACED_KINDS if isinstance(config.placement_of(kind), str)]
    for every in tried:
        if config.publish is not None and "durability" in every:
            continue  # without generations there is nothing to publish
        changes = {name: value for name, value in every.items() if getattr(config, name) != value}
        found = [_try(units, *_with_changes(config, changes, hardware), partition)]
        if automatic and config.nvme_dirs and None in changes.values():
            # "auto" fills a budget that is lifted; the least is what to say.
            on_drives: dict[str, str | None] = dict.fromkeys(automatic, Tier.NVME.value)
            found.append(_try(units, *_with_changes(config, on_drives | changes, hardware), partition))
        if fitting := [plan for plan in found if plan.fits]:
            yield _describe(changes, min(fitting, key=_memory_bytes))


def _memory_bytes(plan: MemoryPlan) -> int:
    return plan.used_bytes(Tier.DEVICE) + plan.used_bytes(Tier.CPU)


def _try(
    units: Sequence[UnitBytes], config: OffloadConfig, hardware: HardwareProfile, partition: Partition
) -> MemoryPlan:
    """In the least memory of a device, where that has no budget: some buffers are shares of it."""
    budget = tier_budget(config, hardware)
    placement = assign_tiers(units, config, budget, partition)
    plan = estimate_memory(units, placement, config, partition)
    while plan.fits and config.device_memory is None and not budget.shared_memory:
        less = replace(budget, device_bytes=plan.used_bytes(Tier.DEVICE))
        smaller = estimate_memory(units, replace(placement, budget=less), config, partition)
        if smaller.used_bytes(Tier.DEVICE) == plan.used_bytes(Tier.DEVICE):
            break
        budget, plan = less, smaller
    return plan


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
        base_bytes=-(-unit.base_bytes // factor),
        resting_bytes=-(-unit.resting_bytes // factor),
        resting_master_bytes=-(-unit.resting_master_bytes // factor),
        leaving_bytes=-(-unit.leaving_bytes // factor),
        left_bytes=-(-unit.left_bytes // factor),
        passing_grads_bytes=-(-max(unit.passing_grads_bytes, least * (unit.passing_grads_bytes > 0)) // factor),
    )
