"""How long a step takes and what compute waits for: from bytes, arithmetic and a machine's rates.

First the seconds that each resource spends on each unit (`StepWorkload.of`, `unit_seconds`). The order of moves follows
the runtime, case by case: `plan/buffers.py` and `runtime/units/param_loader.py` for values, `runtime/grads` for
gradients, `optim/pipeline.py` for states.

A step is a few phases, one after the other. The first forward has the update beside it. Then come each later forward,
each backward, and the time between the last backward and the next forward. Resources work side by side in a phase. It
lasts as long as its busiest resource, plus what one unit takes on the other resources before that resource begins and
after it ends. Commits, and what nothing in the step waits for, run beside all phases: no step is shorter than a
resource's total. Ranks agree between phases.

[Note] This leaves out the order within a phase, and buffers that are full. An event simulation of every transfer took
640 lines more. It gave the same step within 1.2% for 21 published runs, and within 8% for 13 placements on a CPU. It
was not nearer to what was measured (`docs/BENCHMARKS.md`).

Pure, for any number of placements at once: `placement` ranks all its candidates by one call. The calls: `predict` for
one placement; `Totals`, then `step_times`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from zero_offload.base.config import OffloadConfig
from zero_offload.base.spans import Cause
from zero_offload.base.types import Durability, StateKind, Tier, UpdateOverlap
from zero_offload.hardware.machines import Machine, Resource
from zero_offload.plan.memory import (
    PLACED_KINDS,
    Budget,
    Placement,
    UnitBytes,
    in_flight_sum,
    margin_bytes,
    measure_units,
    value_bytes,
)
from zero_offload.plan.partition import ONE_RANK, Partition
from zero_offload.plan.shapes import UnitWork

TOKENS_UNKNOWN = 2048
"""Tokens of a step where the caller does not say how many."""

PYTHON_S = 0.9e-4
"""Of each unit in a step, for each other rank where all compute on CPUs (benchmarks/limits.py ranks, to 16)."""

Tiers = Mapping[StateKind, Tier]
Numbers = npt.NDArray[np.float64]


class Work(IntEnum):
    """The kinds of work that a step does for a unit."""

    FORWARD = 0
    BACKWARD = 1
    SAVE = 2  # activations leave, in each forward
    RESTORE = 3  # activations come back, in each backward
    FETCH = 4  # new values, for the first forward after an update
    FETCH_FROZEN = 5  # values that the update did not change, for the first forward; nothing if the unit stayed
    FETCH_DELIVERED = 6  # new values that an update beside forward writes into the unit's pages; else as FETCH_FROZEN
    FETCH_AGAIN = 7  # for each later forward and each backward; nothing if the unit stayed
    FETCH_GROUPS = 8  # experts in groups, for each forward: they never stay
    FETCH_GROUPS_AGAIN = 9  # the same for each backward
    KEEP = 10  # what was gathered goes to where parameters rest, once
    GRADS = 11  # from each backward to where they rest
    ADD = 12  # reads what each backward but the first adds to
    REDUCE_LATE = 13  # once, before the update
    UPDATE = 14  # on the host
    UPDATE_ON_DEVICE = 15
    COMMIT = 16


FETCHES = [work for work in Work if work.name.startswith("FETCH")]
COLUMN = {resource: index for index, resource in enumerate(Resource)}
STALL = len(COLUMN)
"""The column after the resources': seconds that compute stands still, since a gather is not launched ahead."""
Amount = tuple[Work, Resource, float]
"""Bytes on a resource."""


@dataclass(frozen=True)
class StepBatch:
    """The tokens that one rank computes in a step."""

    tokens: int = TOKENS_UNKNOWN
    """Tokens of a micro-batch."""
    micro_batches: int = 1
    sequence: int = TOKENS_UNKNOWN
    """Tokens that attend to each other."""
    recompute: bool = True
    """True if blocks keep their inputs only, and run again in backward."""
    by_unit: bool = False
    """True if all micro-batches are at a unit before the next one (`zo.accumulate`); else one after the other."""
    has_reference: bool = False
    """True if each micro-batch passes forward once more, without a backward, as by the reference of DPO."""

    @property
    def num_passes(self) -> int:
        """Through the units, forward and back."""
        return 1 if self.by_unit else self.micro_batches

    @property
    def num_references(self) -> int:
        """Passes forward alone."""
        return self.num_passes * self.has_reference

    @property
    def num_together(self) -> int:
        """Micro-batches of a pass, whose activations are kept at once."""
        return self.micro_batches if self.by_unit else 1


def kept_bytes(work: Sequence[UnitWork], config: OffloadConfig, batch: StepBatch, tier: Tier) -> int:
    """Bytes of what is saved for backward, on this tier at once."""
    numel = batch.tokens * batch.num_together * sum(each.saved_values(batch.recompute) for each in work)
    return int(numel * value_bytes(config) * config.activation_fractions.get(tier, 0.0))


def device_activation_bytes(work: Sequence[UnitWork], config: OffloadConfig, batch: StepBatch) -> int:
    """The most bytes on the device, without logits: inputs of blocks, of all micro-batches that go through them
    together, and one block's inside."""
    inside = batch.tokens * value_bytes(config) * max(each.inside_values for each in work)
    return int(kept_bytes(work, config, batch, Tier.DEVICE) + inside)


@dataclass(frozen=True)
class StepWorkload:
    """A step of a model on one rank, whatever the machine."""

    work: tuple[UnitWork, ...]
    units: tuple[UnitBytes, ...]
    config: OffloadConfig
    partition: Partition
    batch: StepBatch
    measured_s: tuple[tuple[float, float], ...] = ()
    """Seconds of each unit's forward and backward, where they are known better than by arithmetic."""

    @classmethod
    def of(
        cls,
        work: Sequence[UnitWork],
        config: OffloadConfig,
        partition: Partition = ONE_RANK,
        batch: StepBatch | None = None,
        units: Sequence[UnitBytes] | None = None,
    ) -> StepWorkload:
        """`units` where their bytes are known better than by element counts."""
        batch = batch or StepBatch()
        if units is None:
            units = measure_units([each.numel for each in work], config, partition, batch.micro_batches)
        return cls(tuple(work), tuple(units), config, partition, batch)

    def as_run(self, tiers: Sequence[Tiers], machine: Machine) -> StepWorkload:
        """With these tiers: where no unit leaves, `zo.accumulate` is the loop."""
        placed = zip(self.units, tiers, strict=True)
        if not self.batch.by_unit or any(buffer_bytes(self, unit, at, machine) for unit, at in placed):
            return self
        return self.in_a_loop()

    def in_a_loop(self) -> StepWorkload:
        """With micro-batches one after the other."""
        return replace(self, batch=replace(self.batch, by_unit=False))

    def likeness(self, index: int) -> tuple[object, ...]:
        """Equal for units of which all but the name is."""
        measured = self.measured_s[index] if self.measured_s else None
        return self.units[index].likeness, self.work[index].likeness, measured


def unit_seconds(workload: StepWorkload, index: int, at: Tiers, machine: Machine) -> Numbers:
    """(Work, resources and `STALL`): seconds for one unit with these tiers.

    An update on the host has all cores here, and no drive takes any from it.
    """
    unit, batch = workload.units[index], workload.batch
    found = np.zeros((len(Work), len(COLUMN) + 1))
    for work, resource, nbytes in chain(
        _saved(workload, index, machine),
        _fetches(workload, index, at, machine),
        _grads(workload, unit, at, machine),
        _update(workload, unit, at, machine),
    ):
        if rate := machine.streams(resource):  # what the machine has no resource for takes no time
            found[work, COLUMN[resource]] += nbytes / rate
    forward_s, backward_s = _compute_seconds(workload, index, machine)
    if machine.is_host:  # the thread of backward copies gradients to their places
        backward_s += 2 * _made_bytes(workload, unit) / machine.host_bytes
    found[Work.FORWARD, COLUMN[Resource.COMPUTE]] = forward_s
    found[Work.BACKWARD, COLUMN[Resource.COMPUTE]] = backward_s
    # A gather is launched ahead where each rank has its part in memory.
    again = found[[Work.FETCH_AGAIN, Work.FETCH_GROUPS_AGAIN], COLUMN[Resource.READ]].any()
    if again or workload.partition.replicates_params:
        found[FETCHES, STALL] = found[FETCHES, COLUMN[Resource.NETWORK]]
    if batch.num_together > 1:  # they take turns at the unit; its gradients leave once, added up
        groups = [Work.FETCH_GROUPS, Work.FETCH_GROUPS_AGAIN]  # each micro-batch fetches its own
        found[[Work.FORWARD, Work.BACKWARD, Work.SAVE, Work.RESTORE, *groups]] *= batch.num_together
        found[Work.ADD] = found[Work.GRADS, COLUMN[Resource.HOST]] = 0.0
    return found


def _compute_seconds(workload: StepWorkload, index: int, machine: Machine) -> tuple[float, float]:
    if workload.measured_s:
        return workload.measured_s[index]
    work, batch = workload.work[index], workload.batch
    whole = workload.units[index].params_bytes * workload.partition.param_shards
    touched = work.share_touched(batch.tokens)
    # Few tokens: the weights must still be read once.
    floor_s = touched * whole / machine.device_bytes if work.matmul_numel else 0.0
    forward_s = max(batch.tokens * work.forward_flops(batch.sequence) / machine.flops, floor_s)
    passes = work.backward_share(batch.sequence) + work.rerun_share(batch.sequence, batch.recompute)
    # The plain weight that is made of a quantized one is written to the device's memory and read again, for each use.
    made_s = 2 * touched * work.quantized_numel * value_bytes(workload.config) / machine.device_bytes
    return forward_s + made_s, passes * forward_s + work.backward_uses(batch.recompute) * made_s


def _saved(workload: StepWorkload, index: int, machine: Machine) -> Iterator[Amount]:
    """Activations of a micro-batch that leave the device and come back."""
    batch, fractions = workload.batch, workload.config.activation_fractions
    nbytes = batch.tokens * value_bytes(workload.config) * workload.work[index].saved_values(batch.recompute)
    on_disk = nbytes * fractions.get(Tier.NVME, 0.0)
    away = on_disk + nbytes * fractions.get(Tier.CPU, 0.0)
    yield Work.SAVE, Resource.DOWNLOAD, away
    yield Work.SAVE, Resource.WRITE, on_disk
    yield Work.RESTORE, Resource.READ, on_disk
    yield Work.RESTORE, Resource.UPLOAD, away


def _is_in_place(at: Tiers, machine: Machine) -> bool:
    """True if parameters rest where compute reads them."""
    return at[StateKind.PARAMS] is Tier.DEVICE or (machine.is_host and at[StateKind.PARAMS] is Tier.CPU)


def _is_updated_on_device(at: Tiers, machine: Machine) -> bool:
    """True of trained parameters."""
    return at[StateKind.OPTIMIZER] is Tier.DEVICE and not machine.is_host


def buffer_bytes(workload: StepWorkload, unit: UnitBytes, at: Tiers, machine: Machine) -> int:
    """Bytes of compute memory while the unit is there, whole; 0 if it always is, or comes in groups."""
    if unit.group_bytes:
        return 0
    parts = ((unit.trained_bytes, True), (unit.frozen_bytes, False))
    return sum(
        nbytes * workload.partition.param_shards
        for nbytes, is_trained in parts
        if _leaves(workload.partition, at, machine, is_trained=is_trained)
    )


def _leaves(partition: Partition, at: Tiers, machine: Machine, *, is_trained: bool) -> bool:
    """True if values, trained or frozen, come to compute memory for their uses and may leave it again."""
    if partition.param_shards > 1:
        return True
    is_own = is_trained and _is_updated_on_device(at, machine) and not partition.replicates_params
    return not (_is_in_place(at, machine) or is_own)


def _fetches(workload: StepWorkload, index: int, at: Tiers, machine: Machine) -> Iterator[Amount]:
    unit, work = workload.units[index], workload.work[index]
    if unit.group_bytes:
        # Ranks gather all groups, in order; one rank fetches the experts that its tokens meet.
        touched = 1.0 if workload.partition.param_shards > 1 else work.share_touched(workload.batch.tokens)
        for is_trained in (False, True):
            for kind, resource, nbytes in _fetches_of(workload, unit, at, machine, is_trained=is_trained):
                if kind is Work.FETCH_AGAIN:
                    yield Work.FETCH_GROUPS, resource, nbytes * touched
                    yield (
                        Work.FETCH_GROUPS_AGAIN,
                        resource,
                        nbytes * touched * work.backward_uses(workload.batch.recompute),
                    )
        return
    yield from _fetches_of(workload, unit, at, machine, is_trained=True)
    yield from _fetches_of(workload, unit, at, machine, is_trained=False)


def _fetches_of(
    workload: StepWorkload, unit: UnitBytes, at: Tiers, machine: Machine, *, is_trained: bool
) -> Iterator[Amount]:
    nbytes = unit.trained_bytes if is_trained else unit.frozen_bytes
    params, optimizer, partition = at[StateKind.PARAMS], at[StateKind.OPTIMIZER], workload.partition
    whole, shards = nbytes * partition.param_shards, partition.optimizer_shards
    on_device = is_trained and _is_updated_on_device(at, machine)
    leaves, crosses = _leaves(partition, at, machine, is_trained=is_trained), not machine.is_host
    gathered = whole * (shards - 1) / shards
    # This rank's part of the values, from where it rests.
    own: float = nbytes * (leaves and not (on_device and partition.param_shards > 1))
    again: dict[Resource, float] = {
        Resource.READ: own * (params is Tier.NVME),
        Resource.UPLOAD: own * crosses,
        Resource.NETWORK: gathered * (partition.param_shards > 1),
        # From a buffer to their place: read and written.
        Resource.HOST: 2 * own * (params is Tier.NVME and not is_trained) * unit.base_bytes / max(unit.frozen_bytes, 1),
    }
    work, first = Work.FETCH, again
    if not is_trained:
        work = Work.FETCH_FROZEN
    elif partition.replicates_params:
        # The new values of the states' shard, gathered, and kept where parameters rest.
        own = whole / shards
        first = {
            Resource.READ: own * (optimizer is params is Tier.NVME and crosses),
            Resource.UPLOAD: own * (crosses and not on_device),
            Resource.NETWORK: gathered,
        }
        yield Work.KEEP, Resource.DOWNLOAD, whole * (crosses and leaves)
        yield Work.KEEP, Resource.WRITE, whole * (params is Tier.NVME)
    elif not leaves and crosses and not on_device:
        first = {Resource.UPLOAD: whole}
    elif machine.is_host and partition.world_size == 1:
        work = Work.FETCH_DELIVERED
    for resource, moved in first.items():
        yield work, resource, moved
    for resource, moved in again.items():
        yield Work.FETCH_AGAIN, resource, moved


def _made_bytes(workload: StepWorkload, unit: UnitBytes) -> int:
    """Bytes of gradients that one backward writes to where they rest."""
    if workload.partition.world_size > 1:
        return unit.trained_numel * 4 // workload.partition.grad_shards
    return unit.live_bytes if workload.batch.micro_batches == 1 else unit.grads_bytes


def _grads(workload: StepWorkload, unit: UnitBytes, at: Tiers, machine: Machine) -> Iterator[Amount]:
    tier, partition = at[StateKind.GRADS], workload.partition
    world = partition.world_size
    made, replicas = (
        unit.trained_numel * (4 if workload.config.reduce_dtype_name == "float32" else 2),
        partition.num_replicas,
    )
    sharers = world // replicas
    # An all-reduce where every rank keeps all, else a reduce-scatter.
    crossing = made * (sharers - 1) / sharers * (2 if partition.optimizer_shards == 1 else 1)
    if replicas > 1:
        # Then an all-reduce of the rank's part, on a network of its own.
        crossing += 2 * made / sharers * (replicas - 1) / replicas * machine.network_bytes / machine.replica_bytes
    out = _made_bytes(workload, unit)
    leaves = not machine.is_host and tier is not Tier.DEVICE
    on_disk = tier is Tier.NVME and unit.passing_grads_bytes == 0  # what passes is not written
    yield Work.REDUCE_LATE if partition.defers_reduction else Work.GRADS, Resource.NETWORK, crossing
    yield Work.GRADS, Resource.DOWNLOAD, out * leaves
    if unit.group_bytes and leaves and world > 1 and not partition.defers_reduction:
        # Experts' leave as they are made, and come back to be added up.
        made = unit.live_bytes * partition.param_shards
        yield Work.GRADS, Resource.DOWNLOAD, made
        yield Work.GRADS, Resource.UPLOAD, made
    yield Work.GRADS, Resource.WRITE, out * on_disk
    yield Work.ADD, Resource.READ, out * on_disk
    # From staging to where they rest, where the host adds them up: read and written.
    yield Work.GRADS, Resource.HOST, 2 * out * (leaves and not on_disk and workload.batch.micro_batches > 1)


def _update(workload: StepWorkload, unit: UnitBytes, at: Tiers, machine: Machine) -> Iterator[Amount]:
    if unit.trained_numel == 0:
        return
    params, grads, optimizer = (at[kind] for kind in (StateKind.PARAMS, StateKind.GRADS, StateKind.OPTIMIZER))
    grad_bytes = unit.grads_bytes + unit.passing_grads_bytes
    touched = 2 * unit.updated_bytes + grad_bytes
    grad_reads = unit.grads_bytes * (grads is Tier.NVME)
    every = workload.config.commit_every
    if isinstance(every, int) and workload.config.effective_durability is not Durability.SCRATCH:
        yield Work.COMMIT, Resource.WRITE, unit.updated_bytes * (optimizer is not Tier.NVME) / every
    if _is_updated_on_device(at, machine):
        yield Work.UPDATE_ON_DEVICE, Resource.READ, grad_reads
        yield Work.UPDATE_ON_DEVICE, Resource.UPLOAD, grad_bytes * (grads is not Tier.DEVICE)
        yield Work.UPDATE_ON_DEVICE, Resource.COMPUTE, touched
        return
    on_disk = optimizer is Tier.NVME
    values = unit.trained_numel / workload.partition.optimizer_shards * value_bytes(workload.config)
    # Where only parameters rest on NVMe their values there are a copy that the update writes.
    copies = values * (params is Tier.NVME and not on_disk and not workload.partition.replicates_params)
    # Values that are in memory are not read with the states.
    delivers = values * (on_disk and params is not Tier.NVME)
    yield Work.UPDATE, Resource.READ, grad_reads + (unit.updated_bytes - delivers) * on_disk
    yield Work.UPDATE, Resource.DOWNLOAD, grad_bytes * (grads is Tier.DEVICE and not machine.is_host)
    yield Work.UPDATE, Resource.HOST, touched + delivers + copies
    yield Work.UPDATE, Resource.WRITE, unit.updated_bytes * on_disk + copies


COMPUTE, READ, WRITE, HOST = (
    COLUMN[resource] for resource in (Resource.COMPUTE, Resource.READ, Resource.WRITE, Resource.HOST)
)


@dataclass(frozen=True)
class Prediction:
    """The prediction of one step, in the steady state."""

    step_s: float
    compute_s: float
    """Seconds of the step in which the device computes, updates in its own memory included."""
    tokens_per_s: float
    """Tokens of all ranks."""
    busy: Mapping[Resource, float]
    """Share of the step; a drive that takes turns has both its reads and writes under `READ`."""
    exposed_s: Mapping[Cause, float]
    """Seconds that compute waited for each cause."""


def predict(workload: StepWorkload, placement: Placement, machine: Machine) -> Prediction:
    """Predict a step of `workload` with this placement on this machine."""
    workload = workload.as_run(placement.tiers, machine)
    known: dict[object, Totals] = {}  # blocks are alike
    seconds, sizes = np.zeros(1), np.zeros(1)
    for index, at in enumerate(placement.tiers):
        key = (*workload.likeness(index), tuple(at.values()))
        if key not in known:
            known[key] = of_unit(workload, index, at, machine)
        seconds, sizes = seconds + known[key].seconds, sizes + known[key].sizes
    times = step_times(workload, Totals(seconds[None], sizes[None]), machine, placement.budget)
    step_s, resources = float(times.step_s[0]), times.busy_s[0]
    tokens = workload.batch.tokens * workload.batch.micro_batches * workload.partition.world_size
    return Prediction(
        step_s,
        float(resources[COMPUTE]),
        tokens / step_s if step_s else float("inf"),
        {resource: float(resources[COLUMN[resource]]) / step_s if step_s else 0.0 for resource in machine.resources()},
        {cause: float(waited[0]) for cause, waited in times.exposed_s.items() if waited[0] > 1e-9 * step_s},
    )


class Totals(NamedTuple):
    """Totals of a unit, or of all together; with an axis before it, of several placements."""

    seconds: Numbers
    """(Work, resources and `STALL`)."""
    sizes: Numbers
    """(3,): bytes of buffers, bytes that rest on a device, and units with gradients or states on drives."""


def of_unit(workload: StepWorkload, index: int, at: Tiers, machine: Machine) -> Totals:
    unit = workload.units[index]
    buffer = buffer_bytes(workload, unit, at, machine)
    params, grads, optimizer = (at[kind] for kind in PLACED_KINDS)
    resting = unit.grads_bytes * (grads is Tier.DEVICE) + unit.optimizer_bytes * (optimizer is Tier.DEVICE)
    # Beside optimizer states on the device the trained values are a part of them.
    stays = buffer == 0 and not (unit.group_bytes and _leaves(workload.partition, at, machine, is_trained=False))
    resting += (unit.params_bytes - unit.trained_bytes * (optimizer is Tier.DEVICE)) * stays
    sizes = np.array([buffer, resting, Tier.NVME in (grads, optimizer)], dtype=float)
    return Totals(unit_seconds(workload, index, at, machine), sizes)


class StepTimes(NamedTuple):
    """Times of a step under each placement."""

    step_s: Numbers
    busy_s: Numbers
    """(placements, resources)."""
    exposed_s: Mapping[Cause, Numbers]


def step_times(workload: StepWorkload, totals: Totals, machine: Machine, budget: Budget) -> StepTimes:
    """Times of a step of `workload` with units' totals under each of the placements."""
    passes, references = workload.batch.num_passes, workload.batch.num_references
    in_backward = workload.config.overlap == UpdateOverlap.BACKWARD
    is_beside = _overlaps(workload, totals.sizes[:, 2] > 0, machine)
    work = _as_run(workload, totals, machine, budget, is_beside)
    new = work[Work.FETCH] + work[Work.FETCH_FROZEN] + work[Work.FETCH_DELIVERED]
    # A CPU waits while activations leave, through a few blocks. A GPU goes on.
    saved, restored = work[Work.SAVE], work[Work.RESTORE]
    if not machine.is_host:
        saved, restored = np.zeros_like(saved), restored + saved
    # A commit is in the way of what backward reads and writes; without that it goes on in the next forward.
    uses_drives = (restored + work[Work.GRADS])[:, [READ, WRITE]].any(1)
    commit = work[Work.COMMIT] * uses_drives[:, None]
    beside = work[Work.UPDATE] * is_beside[:, None]
    forward = (work[Work.FORWARD], (Cause.ACTIVATIONS, saved), (Cause.PARAMS, work[Work.FETCH_GROUPS]))
    backward = (
        work[Work.BACKWARD],
        (Cause.ACTIVATIONS, restored),
        (Cause.PARAMS, work[Work.FETCH_AGAIN] + work[Work.FETCH_GROUPS_AGAIN]),
        (Cause.GRADS, work[Work.GRADS]),
    )
    adds = (*backward, (Cause.GRADS, work[Work.ADD]))
    last = (*(adds if passes > 1 else backward), (Cause.COMMIT, commit))
    phases = [
        (1, (*forward, (Cause.PARAMS, new), (Cause.UPDATE, beside * (not in_backward)))),
        (passes - 1, (*forward, (Cause.PARAMS, work[Work.FETCH_AGAIN]))),
        (references, (work[Work.FORWARD], (Cause.PARAMS, work[Work.FETCH_AGAIN] + work[Work.FETCH_GROUPS]))),
        (min(passes - 1, 1), backward),
        (max(passes - 2, 0), adds),
        (1, (*last, (Cause.UPDATE, beside * in_backward))),
        (1, (np.zeros_like(new), (Cause.GRADS, work[Work.REDUCE_LATE]))),
        (1, (np.zeros_like(new), (Cause.UPDATE, work[Work.UPDATE_ON_DEVICE] + work[Work.UPDATE] - beside))),
    ]
    step_s = np.zeros(len(new))
    exposed_s = {cause: np.zeros(len(new)) for cause in Cause}
    for count, (compute, *others) in phases:
        # Each cause in turn: by how much it makes the phase longer.
        lasts_s = compute[:, COMPUTE]
        for cause, more in others:
            compute = compute + more
            longer_s = _lasts(compute, machine, len(workload.units))
            exposed_s[cause] += count * (longer_s - lasts_s)
            lasts_s = longer_s
        step_s += count * lasts_s
    together_s = machine.agreement_s
    if machine.is_host:
        together_s += PYTHON_S * (workload.partition.world_size - 1) * len(workload.units)
    step_s += together_s
    exposed_s[Cause.GRADS] += together_s
    resources = _resources(np.tensordot(_counts(workload.batch), work, 1), machine)
    least_s = np.maximum(step_s, resources.max(1))
    exposed_s[Cause.COMMIT] += least_s - step_s
    return StepTimes(least_s, resources, exposed_s)


def _overlaps(workload: StepWorkload, uses_drives: npt.NDArray[np.bool_], machine: Machine) -> npt.NDArray[np.bool_]:
    """True where updates run beside compute: `Updates.overlaps`."""
    if workload.config.overlap != UpdateOverlap.AUTO:
        return np.full_like(uses_drives, workload.config.overlap != UpdateOverlap.NONE)
    return uses_drives | (not machine.is_host)


def _counts(batch: StepBatch) -> Numbers:
    """How often a step does each work."""
    passes, references = batch.num_passes, batch.num_references
    of_pass = {Work.BACKWARD, Work.SAVE, Work.RESTORE, Work.GRADS, Work.FETCH_GROUPS_AGAIN}
    others = {
        Work.FORWARD: passes + references,
        Work.FETCH_GROUPS: passes + references,
        Work.ADD: passes - 1,
        Work.FETCH_AGAIN: 2 * passes - 1 + references,
    }
    return np.array([passes if work in of_pass else others.get(work, 1) for work in Work], dtype=float)


def _as_run(
    workload: StepWorkload, totals: Totals, machine: Machine, budget: Budget, is_beside: npt.NDArray[np.bool_]
) -> Numbers:
    """(Work, placements, resources and `STALL`): without fetches of units that stay; cores are shared."""
    work = totals.seconds.swapaxes(0, 1).copy()
    buffers = totals.sizes[:, 0]
    leaves = 1 - np.minimum(_room_bytes(workload, totals.sizes, machine, budget) / np.maximum(buffers, 1), 1)
    work[[Work.FETCH_FROZEN, Work.FETCH_AGAIN]] *= leaves[:, None]
    is_delivered = is_beside & (workload.config.overlap != UpdateOverlap.BACKWARD)
    work[Work.FETCH_DELIVERED] *= np.where(is_delivered, 0, leaves)[:, None]
    if machine.is_host:
        _share_cores(workload, work, machine, is_beside)
    return work


def _room_bytes(workload: StepWorkload, sizes: Numbers, machine: Machine, budget: Budget) -> Numbers:
    """Room for units on their way through. It is the room of the largest in flight, or the room that a budget leaves
    beside all that rests there. Without a budget for a device it is what activations and a margin leave, as from the
    second step on.
    """
    least = in_flight_sum(
        [unit.params_bytes * workload.partition.param_shards for unit in workload.units], workload.units
    )
    limit = workload.config.budget_bytes(Tier.DEVICE)
    if limit is not None:
        least = min(least, limit)
    elif machine.is_host:
        limit = 0
    else:
        activations = device_activation_bytes(workload.work, workload.config, workload.batch)
        margin = margin_bytes(budget.device_bytes, workload.partition.world_size, is_measured=False)
        limit = budget.device_bytes - activations - margin
    return np.maximum(least, limit - sizes[:, 1])


def _share_cores(workload: StepWorkload, work: Numbers, machine: Machine, is_beside: npt.NDArray[np.bool_]) -> None:
    """On a CPU what runs beside compute takes its cores: spread evenly over the passes that it runs beside."""
    passes = workload.batch.num_passes
    # The loops of an update beside compute have some of the cores; drives take from any loop.
    lost_s = (work[..., READ] * machine.read_bytes + work[..., WRITE] * machine.write_bytes) * machine.drive_lost_s
    update = work[Work.UPDATE]
    update[:, HOST] *= np.where(is_beside, machine.host_bytes / machine.host_bytes_beside, 1.0)
    update[:, HOST] += lost_s[Work.UPDATE]
    forward_s, backward_s = work[Work.FORWARD, :, COMPUTE], work[Work.BACKWARD, :, COMPUTE]
    others_s = np.tensordot(_counts(workload.batch), lost_s, 1) - lost_s[Work.UPDATE]
    every = 1 + others_s / np.maximum(passes * (forward_s + backward_s), 1e-30)
    # Compute waits for those of its threads whose cores the update has, and has half of its time at least.
    beside_s = backward_s if workload.config.overlap == UpdateOverlap.BACKWARD else forward_s
    shared_s = np.where(is_beside, np.minimum(update[:, HOST], beside_s), 0.0) / passes
    forward_s *= every
    backward_s *= every
    beside_s += shared_s


def _resources(seconds: Numbers, machine: Machine) -> Numbers:
    """Without `STALL`; drives that take turns are one resource."""
    resources = seconds[:, :STALL].copy()
    if machine.drive_takes_turns:
        resources[:, READ] += resources[:, WRITE]
        resources[:, WRITE] = 0.0
    return resources


def _lasts(seconds: Numbers, machine: Machine, num_units: int) -> Numbers:
    """The busiest resource, and beside it one unit's way through the others.

    Drives and the host's loops pass chunks on, not units: of these the busiest counts.
    """
    resources = _resources(seconds, machine)
    resources[:, COMPUTE] += seconds[:, STALL]
    busiest = resources.max(1)
    by_chunk = resources[:, [READ, WRITE, HOST]]
    others = resources.sum(1) - by_chunk.sum(1) + by_chunk.max(1) - busiest
    return cast(Numbers, busiest + others / num_units)
