"""Which tiers make a step fastest: what "auto" chooses.

Owns the candidates. A candidate gives each automatic kind its shares of the tiers, in a few steps. Shares are dealt to
units in an order that spreads each of them over the depth, and a larger share keeps what a smaller one had. All
candidates are ranked by `step_time`, and the first that fits is taken. Pure: no clock, the same for the same input.

More memory only adds candidates. The calls: `Outlook.of`, then `fastest`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zero_offload.base.config import OffloadConfig
from zero_offload.base.types import StateKind, Tier
from zero_offload.hardware.machines import Cluster, Machine, default_machine
from zero_offload.plan.costs import Job, Numbers
from zero_offload.plan.memory import Budget, Placement, estimate_memory
from zero_offload.plan.partition import Partition
from zero_offload.plan.shapes import UnitWork, plain_block
from zero_offload.plan.step_time import Totals, of_unit, predict, step_times
from zero_offload.plan.unit_bytes import PLACED_KINDS, UnitBytes, UnitNumel, resting

SHARE_STEPS: Mapping[StateKind, int] = {StateKind.PARAMS: 4, StateKind.GRADS: 4, StateKind.OPTIMIZER: 16}
"""Into how many parts the bytes of a kind are cut; most bytes are the optimizer's."""
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
    """What a placement is judged by."""

    job: Job
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
        job = Job.of(known, config, partition, units=units)
        cluster, dtype = Cluster(partition.world_size), config.compute_dtype_name
        return cls(job, default_machine(device_name, num_cores, cluster=cluster, dtype=dtype))


def _numel(unit: UnitBytes, partition: Partition) -> UnitNumel:
    whole = unit.params_bytes * partition.param_shards
    frozen = unit.trained_numel * unit.frozen_bytes // max(unit.params_bytes - unit.frozen_bytes, 1)
    return UnitNumel(unit.name, unit.trained_numel, frozen if unit.trained_numel else whole // 2)


@dataclass(frozen=True)
class Room:
    """What a search may use."""

    free_bytes: Mapping[Tier, int]
    """Of memory, beside what is taken already."""
    limit_bytes: Mapping[Tier, int]
    """Of memory, in all."""
    last: Tier
    """Where what has no room goes."""
    budget: Budget


def fastest(outlook: Outlook, given: Sequence[Mapping[StateKind, Tier]], room: Room) -> list[UnitTiers]:
    """Tiers of every unit: those given, and for the other kinds the fastest that fit.

    Where nothing fits, what is not given is on the last tier.
    """
    search = _Search(outlook, given, room)
    fitting = filter(search.fits, itertools.islice(search.candidates(), CANDIDATES_MAX))
    found = next(fitting, None)
    whole = {tier: search.all_on(tier) for tier in (room.last, *search.tiers)}
    # All on one tier of memory may fit only because it needs no buffers of a drive.
    more = [tiers for tier, tiers in whole.items() if tier in search.memory and search.is_within(tiers)]
    if choices := [*([] if found is None else [found]), *more]:
        return min(choices, key=search.step_s)
    # What one tier holds with nothing left for activations is better than what none does.
    return next(filter(search.fits, whole.values()), whole[room.last])


def spread_order(count: int) -> list[int]:
    """Indices in an order of which every beginning is spread over the whole: by their reversed binary digits."""
    digits = max(count - 1, 1).bit_length()
    return sorted(range(count), key=lambda index: int(f"{index:0{digits}b}"[::-1], 2))


class _Search:
    """All candidates for one model on one machine."""

    def __init__(self, outlook: Outlook, given: Sequence[Mapping[StateKind, Tier]], room: Room) -> None:
        self._job = outlook.job
        self._machine = outlook.machine
        self._given = given
        self._room = room
        self.tiers = tuple(dict.fromkeys((*room.free_bytes, room.last)))
        self.memory = tuple(tier for tier in self.tiers if tier is not Tier.NVME)

    def step_s(self, tiers: list[UnitTiers]) -> float:
        return predict(self._job, Placement(tuple(tiers), self._room.budget), self._machine).step_s

    def fits(self, tiers: list[UnitTiers]) -> bool:
        placement = Placement(tuple(tiers), self._room.budget)
        return estimate_memory(self._job.units, placement, self._job.config, self._job.partition).fits

    def is_within(self, tiers: list[UnitTiers]) -> bool:
        """True if it fits into what of memory may be used."""
        budget = self._room.budget
        plan = estimate_memory(self._job.units, Placement(tuple(tiers), budget), self._job.config, self._job.partition)
        return plan.fits and all(
            plan.used_bytes(tier) + plan.used_bytes(Tier.DEVICE) * budget.shared_memory <= limit
            for tier, limit in self._room.limit_bytes.items()
        )

    def all_on(self, tier: Tier) -> list[UnitTiers]:
        return [{kind: at.get(kind, tier) for kind in PLACED_KINDS} for at in self._given]

    def candidates(self) -> Iterator[list[UnitTiers]]:
        """Those that fit into memory without their buffers, each once, the fastest first.

        Of equal steps the one that moves least comes first, then the one on faster tiers.
        """
        room, budget = self._room, self._room.budget
        free: dict[Tier, float] = dict(room.free_bytes)
        if room.last in free:
            # What has no room goes to the last tier, up to all of it where not everything fits there.
            beyond = budget.of(room.last) - room.limit_bytes[room.last]
            free[room.last] = np.inf if self.fits(self.all_on(room.last)) else free[room.last] + beyond
        axes = [self._shares(kind) for kind in PLACED_KINDS]
        rows = [axes[0][:, None, None], axes[1][None, :, None], axes[2][None, None]]
        chosen = (rows[0] * len(_TIERS) + rows[1]) * len(_TIERS) + rows[2]
        chosen = chosen.reshape(-1, len(self._given))  # (candidates, units)
        counts = self._counts(chosen)
        fits = (self._resting(counts) <= np.array([free[tier] for tier in self.memory])).all(1)
        chosen, counts = chosen[fits], [(unit, each[fits]) for unit, each in counts]
        step_s, busy_s = self._times(self._job, counts)
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
        """Of units that are alike the first one, and how many of them each candidate gives each choice."""
        alike: dict[object, list[int]] = {}
        for unit, given in enumerate(self._given):
            alike.setdefault((*self._job.likeness(unit), *given.values()), []).append(unit)
        # One number for each candidate and choice.
        numbers = chosen + len(_CHOICES) * np.arange(len(chosen), dtype=np.int32)[:, None]
        shape = (len(chosen), len(_CHOICES))
        return [
            (units[0], np.bincount(numbers[:, units].ravel(), minlength=math.prod(shape)).reshape(shape))
            for units in alike.values()
        ]

    def _times(self, job: Job, counts: list[tuple[int, Counts]]) -> tuple[Numbers, Numbers]:
        """Of each candidate the seconds of a step, and of all lanes together."""
        seconds, sizes = np.zeros(1), np.zeros(1)
        for unit, each in counts:
            found = [of_unit(job, unit, self._at(unit, choice), self._machine) for choice in range(len(_CHOICES))]
            seconds = seconds + np.tensordot(each, np.stack([one.seconds for one in found]), 1)
            sizes = sizes + each @ np.stack([one.sizes for one in found])
        times = step_times(job, Totals(seconds, sizes), self._machine, self._room.budget)
        step_s, busy_s = times.step_s, times.busy_s.sum(1)
        if job.batch.by_unit and not (leaves := sizes[:, 0] > 0).all():  # as `Job.as_run`
            in_a_loop = self._times(job.in_a_loop(), counts)
            step_s, busy_s = np.where(leaves, step_s, in_a_loop[0]), np.where(leaves, busy_s, in_a_loop[1])
        return step_s, busy_s

    def _resting(self, counts: list[tuple[int, Counts]]) -> Numbers:
        """(candidates, tiers of memory): bytes of the kinds that are to be placed."""
        job, shared = self._job, self._room.budget.shared_memory
        found = np.zeros(1)
        for unit, each in counts:
            table = np.zeros((len(_CHOICES), len(self.memory)))
            for choice in range(len(_CHOICES)):
                for tier, kind, nbytes in resting(job.units[unit], self._at(unit, choice), job.partition, shared):
                    if kind not in self._given[unit] and tier in self.memory:
                        table[choice, self.memory.index(tier)] += nbytes
            found = found + each @ table
        return found

    def _shares(self, kind: StateKind) -> Indices:
        """(candidates, units): the index of a tier for each unit; one row where the kind is given."""
        if kind in self._given[0]:
            return np.array([[_TIERS.index(at[kind]) for at in self._given]], dtype=np.int32)
        weights = [weight(unit, kind) for unit in self._job.units]
        total, behind, reached = sum(weights), np.zeros(len(weights)), 0
        for index in spread_order(len(weights)):
            reached += weights[index]
            behind[index] = reached / total if total else 0.0
        steps = SHARE_STEPS[kind]
        rows = []
        for cut in itertools.product(range(steps + 1), repeat=len(self.tiers) - 1):
            if sum(cut) <= steps:
                ends = np.cumsum(cut) / steps
                place = (behind[:, None] > ends[None, :] + 1e-9).sum(1)
                rows.append(np.array([_TIERS.index(tier) for tier in self.tiers])[place])
        return np.array(rows, dtype=np.int32)


def weight(unit: UnitBytes, kind: StateKind) -> int:
    sizes = {
        StateKind.PARAMS: unit.params_bytes,
        StateKind.GRADS: unit.grads_bytes + unit.passing_grads_bytes,
        StateKind.OPTIMIZER: unit.optimizer_bytes,
    }
    return sizes[kind]
