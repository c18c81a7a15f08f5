"""Which tiers make a step fastest: what "auto" chooses, by simulation.

Owns the candidates and the order in which they are tried. A candidate gives each automatic kind its shares of the
tiers, in a few steps; shares are dealt to units in an order that spreads every one of them over the depth, and a larger
share keeps what a smaller one had. All candidates that fit are ranked by a bound that takes no simulation, and
simulated in that order until the bound says that none is left which could be faster. Pure, and the same for the same
input: no clock.

More memory only adds candidates. The calls: `Outlook.of`, then `fastest`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from zero_offload.config import OffloadConfig
from zero_offload.plan.costs import Job, unit_costs
from zero_offload.plan.hardware import Cluster, Lane, Machine, default_machine
from zero_offload.plan.lane_costs import UnitCosts
from zero_offload.plan.memory import Budget, Placement, estimate_memory
from zero_offload.plan.partition import Partition
from zero_offload.plan.shapes import UnitWork, plain_block
from zero_offload.plan.simulate import simulate
from zero_offload.plan.unit_bytes import PLACED_KINDS, UnitBytes, UnitNumel, resting
from zero_offload.types import StateKind, Tier, UpdateOverlap

SHARE_STEPS: Mapping[StateKind, int] = {StateKind.PARAMS: 4, StateKind.GRADS: 4, StateKind.OPTIMIZER: 16}
"""Into how many parts the bytes of a kind are cut; most bytes are the optimizer's."""
SIMULATIONS_MAX = 16
CANDIDATES_MAX = 1024
"""Looked at: some need buffers that were not reserved, and do not fit after all."""
TRAILS = 0.05
"""A bound may be above a step by as much: what of an update is written beside backward."""
CORES_USUAL = 8

UnitTiers = dict[StateKind, Tier]
Numbers = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
_TIERS = tuple(Tier)
_NAMELESS = UnitNumel("", 0)


@dataclass(frozen=True)
class Outlook:
    """What a placement is judged by."""

    job: Job
    machine: Machine
    simulations_max: int = SIMULATIONS_MAX
    """0: the bound alone decides, where only a placement that fits is wanted."""
    searches: dict[object, Search] = field(default_factory=dict, compare=False, repr=False)
    """Those made for it, by what was given: asked again with more memory they know what they have simulated."""

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
    tiers = (*room.free_bytes, room.last)
    key = (tiers, room.budget.shared_memory, tuple(tuple(at.items()) for at in given))
    if key not in outlook.searches:
        outlook.searches[key] = Search(outlook, given, tiers, room.budget)
    return outlook.searches[key].best(room)


def spread_order(count: int) -> list[int]:
    """Indices in an order of which every beginning is spread over the whole: by their reversed binary digits."""
    digits = max(count - 1, 1).bit_length()
    return sorted(range(count), key=lambda index: int(f"{index:0{digits}b}"[::-1], 2))


class Search:
    """All candidates for one model on one machine, whatever the room; what was simulated once is known."""

    def __init__(
        self, outlook: Outlook, given: Sequence[Mapping[StateKind, Tier]], tiers: Sequence[Tier], budget: Budget
    ) -> None:
        self._outlook = outlook
        self._given = given
        self._budget = budget
        self._memory = tuple(dict.fromkeys(tier for tier in tiers if tier is not Tier.NVME))
        self._tiers = tuple(dict.fromkeys(tiers))
        self._axes = [self._shares(kind) for kind in PLACED_KINDS]
        self._steps_s: dict[bytes, float] = {}
        self._order, self._bounds, self._bytes = self._rank()

    def best(self, room: Room) -> list[UnitTiers]:
        on_last = self._all_on(room.last)
        best: tuple[float, Indices] | None = None
        num_simulated = 0
        for bound_s, choice in itertools.islice(self._fitting(room, on_last), CANDIDATES_MAX):
            tiers = self.tiers_of(choice)
            if best is not None and (bound_s * (1 - TRAILS) >= best[0] or num_simulated >= self._simulations_max):
                break
            if not self._fits(tiers, room.budget):
                continue
            if self._simulations_max == 0:
                return tiers
            num_simulated += 1
            step_s = self._step_s(choice.tobytes(), tiers)
            if best is None or step_s < best[0]:
                best = step_s, choice
        found = self._best_of_whole(room, best and self.tiers_of(best[1]), best and best[0])
        if found is not None:
            return found
        # What one tier holds with nothing left for activations is better than what none does.
        whole = (on_last, *(self._all_on(tier) for tier in self._tiers))
        return next((tiers for tiers in whole if self._fits(tiers, room.budget)), on_last)

    def _best_of_whole(
        self, room: Room, found: list[UnitTiers] | None, found_s: float | None
    ) -> list[UnitTiers] | None:
        """What was found, or all on one tier of memory: that may fit only because it needs no buffers of a drive."""
        for tier in self._memory:
            tiers = self._all_on(tier)
            if self._fits(tiers, room.budget) and self._is_within(tiers, room):
                step_s = self._step_s(tier.value.encode(), tiers)
                if found_s is None or step_s < found_s:
                    found, found_s = tiers, step_s
        return found

    def _is_within(self, tiers: list[UnitTiers], room: Room) -> bool:
        job = self._outlook.job
        plan = estimate_memory(job.units, Placement(tuple(tiers), room.budget), job.config, job.partition)
        return all(
            plan.used_bytes(tier) + plan.used_bytes(Tier.DEVICE) * room.budget.shared_memory <= limit
            for tier, limit in room.limit_bytes.items()
        )

    def _all_on(self, tier: Tier) -> list[UnitTiers]:
        return [{kind: at.get(kind, tier) for kind in PLACED_KINDS} for at in self._given]

    @property
    def _simulations_max(self) -> int:
        return self._outlook.simulations_max

    def _step_s(self, key: bytes, tiers: list[UnitTiers]) -> float:
        if key not in self._steps_s:
            placement = Placement(tuple(tiers), self._budget)
            self._steps_s[key] = simulate(self._outlook.job, placement, self._outlook.machine).step_s
        return self._steps_s[key]

    def _fits(self, tiers: list[UnitTiers], budget: Budget) -> bool:
        job = self._outlook.job
        return estimate_memory(job.units, Placement(tuple(tiers), budget), job.config, job.partition).fits

    def tiers_of(self, choice: Indices) -> list[UnitTiers]:
        return [self._at(unit, int(each)) for unit, each in enumerate(choice)]

    def _at(self, unit: int, choice: int) -> UnitTiers:
        return dict(zip(PLACED_KINDS, _CHOICES[choice], strict=True)) | dict(self._given[unit])

    def _fitting(self, room: Room, on_last: list[UnitTiers]) -> Iterator[tuple[float, Indices]]:
        """Candidates that fit into memory, each once, those with the lowest bound first."""
        free: dict[Tier, float] = dict(room.free_bytes)
        if room.last in free:
            # What has no room goes to the last tier, up to all of it where not everything fits there.
            beyond = room.budget.of(room.last) - room.limit_bytes[room.last]
            free[room.last] = np.inf if self._fits(on_last, room.budget) else free[room.last] + beyond
        limits = np.array([free[tier] for tier in self._memory])
        fits = np.flatnonzero((self._bytes[self._order] <= limits).all(axis=1))
        seen: set[bytes] = set()
        for index in self._order[fits]:
            choice = self._choice(int(index))
            if (key := choice.tobytes()) not in seen:
                seen.add(key)
                yield float(self._bounds[index]), choice

    def _choice(self, index: int) -> Indices:
        """Of every unit, the number of its choice under the candidate of this index."""
        params, grads, optimizer = np.unravel_index(index, tuple(len(axis) for axis in self._axes))
        rows = (self._axes[0][params], self._axes[1][grads], self._axes[2][optimizer])
        return cast(Indices, (rows[0] * len(_TIERS) + rows[1]) * len(_TIERS) + rows[2])

    def _rank(self) -> tuple[Indices, Numbers, Numbers]:
        """The order of all candidates, their bounds, and their bytes on tiers of memory.

        Of equal bounds the one that moves least comes first, then the one on faster tiers.
        """
        rows = self._rows()
        table = np.array([[*seconds, *nbytes] for of_unit in rows for seconds, nbytes in of_unit])
        table = table.reshape(len(rows), len(_CHOICES), -1)  # (units, choices, columns)
        unit = np.arange(len(rows))
        sums, ranks = [], []
        for params, grads in itertools.product(self._axes[0], self._axes[1]):
            chosen = (params * len(_TIERS) + grads) * len(_TIERS) + self._axes[2]
            sums.append(table[unit, chosen].sum(1))
            ranks.append((params + grads + self._axes[2]).sum(1))
        totals = np.concatenate(sums)
        seconds = totals[:, : -len(self._memory)]
        bounds = _bound(seconds, self._outlook)
        order = np.lexsort((np.concatenate(ranks), seconds[:, : len(Lane)].sum(1).round(9), bounds.round(9)))
        return order, bounds, totals[:, -len(self._memory) :]

    def _rows(self) -> list[list[tuple[list[float], list[float]]]]:
        """Of each unit and choice: seconds by column, and bytes by tier of memory, of the kinds to be placed."""
        job, machine = self._outlook.job, self._outlook.machine
        known: dict[object, list[tuple[list[float], list[float]]]] = {}
        found = []
        for unit in range(len(self._given)):
            sizes = (replace(job.units[unit], name="", in_use_with=()), replace(job.work[unit], numel=_NAMELESS))
            key = (sizes, *self._given[unit].values())
            if key not in known:
                costs = [
                    unit_costs(job, unit, self._at(unit, choice), machine, update_beside=False)
                    for choice in range(len(_CHOICES))
                ]
                known[key] = [
                    (_columns(cost, self._outlook), [self._bytes_of(unit, choice, tier) for tier in self._memory])
                    for choice, cost in enumerate(costs)
                ]
            found.append(known[key])
        return found

    def _bytes_of(self, unit: int, choice: int, tier: Tier) -> float:
        job, at = self._outlook.job, self._at(unit, choice)
        return sum(
            nbytes
            for place, kind, nbytes in resting(job.units[unit], at, job.partition, self._budget.shared_memory)
            if kind not in self._given[unit] and place is tier
        )

    def _shares(self, kind: StateKind) -> Indices:
        """(candidates, units): the index of a tier for each unit; one row where the kind is given."""
        if kind in self._given[0]:
            return np.array([[_TIERS.index(at[kind]) for at in self._given]])
        weights = [weight(unit, kind) for unit in self._outlook.job.units]
        total, behind, reached = sum(weights), np.zeros(len(weights)), 0
        for index in spread_order(len(weights)):
            reached += weights[index]
            behind[index] = reached / total if total else 0.0
        steps = SHARE_STEPS[kind]
        rows = []
        for cut in itertools.product(range(steps + 1), repeat=len(self._tiers) - 1):
            if sum(cut) <= steps:
                ends = np.cumsum(cut) / steps
                place = (behind[:, None] > ends[None, :] + 1e-9).sum(1)
                rows.append(np.array([_TIERS.index(tier) for tier in self._tiers])[place])
        return np.array(rows)


_CHOICES = tuple(itertools.product(_TIERS, repeat=len(PLACED_KINDS)))
"""Tiers of parameters, gradients and optimizer states."""


def weight(unit: UnitBytes, kind: StateKind) -> int:
    sizes = {
        StateKind.PARAMS: unit.params_bytes,
        StateKind.GRADS: unit.grads_bytes + unit.passing_grads_bytes,
        StateKind.OPTIMIZER: unit.optimizer_bytes,
    }
    return sizes[kind]


def _columns(cost: UnitCosts, outlook: Outlook) -> list[float]:
    """Seconds of each lane, then those of the update that can run beside the first forward only."""
    lanes = cost.lane_seconds(outlook.job.batch.num_passes)
    if outlook.machine.drive_takes_turns:
        lanes[Lane.READ] += lanes[Lane.WRITE]
        lanes[Lane.WRITE] = 0.0
    update = cost.update
    drives = update.read_s + update.write_s if outlook.machine.drive_takes_turns else max(update.read_s, update.write_s)
    return [*(lanes[lane] for lane in Lane), drives, update.host_s, cost.forward_s]


def _bound(seconds: Numbers, outlook: Outlook) -> Numbers:
    """No step is shorter than the busiest lane, nor than what comes one after the other."""
    lanes, drives, host, forward = seconds[:, : len(Lane)], seconds[:, -3], seconds[:, -2], seconds[:, -1]
    compute = seconds[:, list(Lane).index(Lane.COMPUTE)]
    beside = np.maximum(drives, host)
    in_turn = compute - forward + np.maximum(forward, beside)
    in_turn *= outlook.job.config.overlap != UpdateOverlap.BACKWARD
    return cast(Numbers, np.maximum(lanes.max(1), in_turn))
