"""Seconds that each lane spends on a unit in a step, from bytes, arithmetic and a machine's rates.

Owns the arithmetic, not the time of a step: `step_time` adds up units and says what runs beside what. What moves when
follows the runtime, case by case: `offload._home` and `runtime/units/param_loader.py` for values, `runtime/grads` for
gradients, `optim/pipeline.py` for states. Calls: `Job.of`, then `unit_seconds` for each unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain

import numpy as np
import numpy.typing as npt

from zero_offload.base.config import OffloadConfig
from zero_offload.base.types import Durability, StateKind, Tier
from zero_offload.hardware.machines import Lane, Machine
from zero_offload.plan.partition import ONE_RANK, Partition
from zero_offload.plan.shapes import UnitWork
from zero_offload.plan.unit_bytes import UnitBytes, UnitNumel, measure_units, value_bytes

TOKENS_UNKNOWN = 2048
"""Tokens of a step where the caller does not say how many."""

Tiers = Mapping[StateKind, Tier]
Numbers = npt.NDArray[np.float64]


class Work(IntEnum):
    """What a step does for a unit."""

    FORWARD = 0
    BACKWARD = 1
    SAVE = 2  # activations leave, in each forward
    RESTORE = 3  # activations come back, in each backward
    FETCH = 4  # new values, for the first forward after an update
    FETCH_FROZEN = 5  # values that the update did not change, for the first forward; nothing if the unit stayed
    FETCH_DELIVERED = 6  # new values that an update beside forward writes into the unit's pages; else as FETCH_FROZEN
    FETCH_AGAIN = 7  # for each later forward and each backward; nothing if the unit stayed
    KEEP = 8  # what was gathered goes to where parameters rest, once
    GRADS = 9  # from each backward to where they rest
    ADD = 10  # reads what each backward but the first adds to
    REDUCE_LATE = 11  # once, before the update
    UPDATE = 12  # on the host
    UPDATE_ON_DEVICE = 13
    COMMIT = 14


FETCHES = [Work.FETCH, Work.FETCH_FROZEN, Work.FETCH_DELIVERED, Work.FETCH_AGAIN]
COLUMN = {lane: index for index, lane in enumerate(Lane)}
STALL = len(COLUMN)
"""The column after the lanes': seconds that compute stands still, since a gather is not launched ahead."""
Amount = tuple[Work, Lane, float]
"""Bytes on a lane."""


@dataclass(frozen=True)
class Batch:
    """What one rank computes in a step."""

    tokens: int = TOKENS_UNKNOWN
    """Of a micro-batch."""
    micro_batches: int = 1
    sequence: int = TOKENS_UNKNOWN
    """Tokens that attend to each other."""
    recompute: bool = True
    """Blocks keep their inputs only, and run again in backward."""
    by_unit: bool = False
    """All micro-batches at a unit before the next one (`zo.accumulate`), else one after the other, in a loop."""

    @property
    def num_passes(self) -> int:
        """Through the units, forward and back."""
        return 1 if self.by_unit else self.micro_batches

    @property
    def num_together(self) -> int:
        """Micro-batches of a pass, whose activations are kept at once."""
        return self.micro_batches if self.by_unit else 1


def kept_bytes(work: Sequence[UnitWork], config: OffloadConfig, batch: Batch, tier: Tier) -> int:
    """Of what is saved for backward, on this tier at once."""
    numel = batch.tokens * batch.num_together * sum(each.saved_values(batch.recompute) for each in work)
    return int(numel * value_bytes(config) * config.activation_fractions.get(tier, 0.0))


def device_activation_bytes(work: Sequence[UnitWork], config: OffloadConfig, batch: Batch) -> int:
    """At their most on the device, without logits: inputs of blocks, of all micro-batches that go through them
    together, and one block's inside."""
    inside = batch.tokens * value_bytes(config) * max(each.inside_values for each in work)
    return int(kept_bytes(work, config, batch, Tier.DEVICE) + inside)


@dataclass(frozen=True)
class Job:
    """A step of a model on one rank, whatever the machine."""

    work: tuple[UnitWork, ...]
    units: tuple[UnitBytes, ...]
    config: OffloadConfig
    partition: Partition
    batch: Batch
    measured_s: tuple[tuple[float, float], ...] = ()
    """Seconds of each unit's forward and backward, where they are known better than by arithmetic."""

    @classmethod
    def of(
        cls,
        work: Sequence[UnitWork],
        config: OffloadConfig,
        partition: Partition = ONE_RANK,
        batch: Batch | None = None,
        units: Sequence[UnitBytes] | None = None,
    ) -> Job:
        """`units` where their bytes are known better than by element counts."""
        batch = batch or Batch()
        if units is None:
            units = measure_units([each.numel for each in work], config, partition, batch.micro_batches)
        return cls(tuple(work), tuple(units), config, partition, batch)

    def as_run(self, tiers: Sequence[Tiers], machine: Machine) -> Job:
        """With these tiers: where no unit leaves, `zo.accumulate` is the loop."""
        placed = zip(self.units, tiers, strict=True)
        if not self.batch.by_unit or any(buffer_bytes(self, unit, at, machine) for unit, at in placed):
            return self
        return self.in_a_loop()

    def in_a_loop(self) -> Job:
        """With micro-batches one after the other."""
        return replace(self, batch=replace(self.batch, by_unit=False))

    def likeness(self, index: int) -> tuple[object, ...]:
        """Equal for units of which all but the name is."""
        unit, work = self.units[index], self.work[index]
        measured = self.measured_s[index] if self.measured_s else None
        return replace(unit, name="", in_use_with=()), replace(work, numel=UnitNumel("", 0)), measured


def unit_seconds(job: Job, index: int, at: Tiers, machine: Machine) -> Numbers:
    """(Work, lanes and `STALL`): seconds for one unit with these tiers.

    An update on the host has all cores here, and no drive takes any from it.
    """
    unit, batch = job.units[index], job.batch
    found = np.zeros((len(Work), len(COLUMN) + 1))
    for work, lane, nbytes in chain(
        _saved(job, index, machine),
        _fetches(job, unit, at, machine),
        _grads(job, unit, at, machine),
        _update(job, unit, at, machine),
    ):
        if rate := machine.streams(lane):  # what the machine has no lane for takes no time
            found[work, COLUMN[lane]] += nbytes / rate
    forward_s, backward_s = _compute_seconds(job, index, machine)
    if machine.is_host:  # the thread of backward copies gradients to their places
        backward_s += 2 * _made_bytes(job, unit) / machine.host_bytes
    found[Work.FORWARD, COLUMN[Lane.COMPUTE]] = forward_s
    found[Work.BACKWARD, COLUMN[Lane.COMPUTE]] = backward_s
    # A gather is launched ahead where each rank has its part in memory.
    if found[Work.FETCH_AGAIN, COLUMN[Lane.READ]] or job.partition.replicates_params:
        found[FETCHES, STALL] = found[FETCHES, COLUMN[Lane.NETWORK]]
    if batch.num_together > 1:  # they take turns at the unit; its gradients leave once, added up
        found[[Work.FORWARD, Work.BACKWARD, Work.SAVE, Work.RESTORE]] *= batch.num_together
        found[Work.ADD] = found[Work.GRADS, COLUMN[Lane.HOST]] = 0.0
    return found


def _compute_seconds(job: Job, index: int, machine: Machine) -> tuple[float, float]:
    if job.measured_s:
        return job.measured_s[index]
    work, batch = job.work[index], job.batch
    whole = job.units[index].params_bytes * job.partition.param_shards
    # Few tokens: the weights must still be read once.
    floor_s = whole / machine.device_bytes if work.matmul_numel else 0.0
    forward_s = max(batch.tokens * work.forward_flops(batch.sequence) / machine.flops, floor_s)
    passes = (2 if job.units[index].trained_numel else 1) + work.rerun_share(batch.sequence, batch.recompute)
    return forward_s, passes * forward_s


def _saved(job: Job, index: int, machine: Machine) -> Iterator[Amount]:
    """Activations of a micro-batch that leave the device and come back."""
    batch, fractions = job.batch, job.config.activation_fractions
    nbytes = batch.tokens * value_bytes(job.config) * job.work[index].saved_values(batch.recompute)
    on_disk = nbytes * fractions.get(Tier.NVME, 0.0)
    away = on_disk + nbytes * fractions.get(Tier.CPU, 0.0)
    yield Work.SAVE, Lane.DOWNLOAD, away
    yield Work.SAVE, Lane.WRITE, on_disk
    yield Work.RESTORE, Lane.READ, on_disk
    yield Work.RESTORE, Lane.UPLOAD, away


def _is_in_place(at: Tiers, machine: Machine) -> bool:
    """True if parameters rest where compute reads them."""
    return at[StateKind.PARAMS] is Tier.DEVICE or (machine.is_host and at[StateKind.PARAMS] is Tier.CPU)


def _is_updated_on_device(unit: UnitBytes, at: Tiers, machine: Machine) -> bool:
    return at[StateKind.OPTIMIZER] is Tier.DEVICE and not machine.is_host and unit.trained_numel > 0


def buffer_bytes(job: Job, unit: UnitBytes, at: Tiers, machine: Machine) -> int:
    """Of compute memory while the unit is there; 0 if it always is."""
    partition, whole = job.partition, unit.params_bytes * job.partition.param_shards
    if partition.param_shards > 1:
        return whole
    is_copy = partition.replicates_params and unit.trained_numel > 0
    stays = _is_in_place(at, machine) or (_is_updated_on_device(unit, at, machine) and not is_copy)
    return 0 if stays else whole


def _fetches(job: Job, unit: UnitBytes, at: Tiers, machine: Machine) -> Iterator[Amount]:
    params, optimizer, partition = at[StateKind.PARAMS], at[StateKind.OPTIMIZER], job.partition
    whole, shards = unit.params_bytes * partition.param_shards, partition.optimizer_shards
    on_device = _is_updated_on_device(unit, at, machine)
    buffer, crosses = buffer_bytes(job, unit, at, machine), not machine.is_host
    gathered = whole * (shards - 1) / shards
    # This rank's part of the values, from where it rests.
    own: float = unit.params_bytes * (buffer > 0 and not (on_device and partition.param_shards > 1))
    again = {
        Lane.READ: own * (params is Tier.NVME),
        Lane.UPLOAD: own * crosses,
        Lane.NETWORK: gathered * (partition.param_shards > 1),
    }
    work, first = Work.FETCH, again
    if unit.trained_numel == 0:
        work = Work.FETCH_FROZEN
    elif partition.replicates_params:
        # The new values of the states' shard, gathered, and kept where parameters rest.
        own = whole / shards
        first = {
            Lane.READ: own * (optimizer is params is Tier.NVME and crosses),
            Lane.UPLOAD: own * (crosses and not on_device),
            Lane.NETWORK: gathered,
        }
        yield Work.KEEP, Lane.DOWNLOAD, whole * (crosses and buffer > 0)
        yield Work.KEEP, Lane.WRITE, whole * (params is Tier.NVME)
    elif buffer == 0 and crosses and not on_device:
        first = {Lane.UPLOAD: whole}
    elif machine.is_host and partition.world_size == 1:
        work = Work.FETCH_DELIVERED
    for lane, nbytes in first.items():
        yield work, lane, nbytes
    for lane, nbytes in again.items():
        yield Work.FETCH_AGAIN, lane, nbytes


def _made_bytes(job: Job, unit: UnitBytes) -> int:
    """Of gradients that one backward brings to where they rest."""
    if job.partition.world_size > 1:
        return unit.trained_numel * 4 // job.partition.grad_shards
    return (unit.params_bytes - unit.frozen_bytes) if job.batch.micro_batches == 1 else unit.grads_bytes


def _grads(job: Job, unit: UnitBytes, at: Tiers, machine: Machine) -> Iterator[Amount]:
    tier, partition = at[StateKind.GRADS], job.partition
    world = partition.world_size
    crossing = unit.trained_numel * (4 if job.config.reduce_dtype_name == "float32" else 2) * (world - 1) / world
    # An all-reduce where every rank keeps all, else a reduce-scatter.
    crossing *= 2 if partition.optimizer_shards == 1 else 1
    out = _made_bytes(job, unit)
    leaves = not machine.is_host and tier is not Tier.DEVICE
    on_disk = tier is Tier.NVME and unit.passing_grads_bytes == 0  # what passes is not written
    yield Work.REDUCE_LATE if partition.defers_reduction else Work.GRADS, Lane.NETWORK, crossing
    yield Work.GRADS, Lane.DOWNLOAD, out * leaves
    yield Work.GRADS, Lane.WRITE, out * on_disk
    yield Work.ADD, Lane.READ, out * on_disk
    # From staging to where they rest, where the host adds them up: read and written.
    yield Work.GRADS, Lane.HOST, 2 * out * (leaves and not on_disk and job.batch.micro_batches > 1)


def _update(job: Job, unit: UnitBytes, at: Tiers, machine: Machine) -> Iterator[Amount]:
    if unit.trained_numel == 0:
        return
    params, grads, optimizer = (at[kind] for kind in (StateKind.PARAMS, StateKind.GRADS, StateKind.OPTIMIZER))
    grad_bytes = unit.grads_bytes + unit.passing_grads_bytes
    touched = 2 * unit.optimizer_bytes + grad_bytes
    grad_reads = unit.grads_bytes * (grads is Tier.NVME)
    every = job.config.commit_every
    if isinstance(every, int) and job.config.effective_durability is not Durability.SCRATCH:
        yield Work.COMMIT, Lane.WRITE, unit.optimizer_bytes * (optimizer is not Tier.NVME) / every
    if _is_updated_on_device(unit, at, machine):
        yield Work.UPDATE_ON_DEVICE, Lane.READ, grad_reads
        yield Work.UPDATE_ON_DEVICE, Lane.UPLOAD, grad_bytes * (grads is not Tier.DEVICE)
        yield Work.UPDATE_ON_DEVICE, Lane.COMPUTE, touched
        return
    on_disk = optimizer is Tier.NVME
    values = unit.trained_numel / job.partition.optimizer_shards * value_bytes(job.config)
    # Where only parameters rest on NVMe their values there are a copy that the update writes.
    copies = values * (params is Tier.NVME and not on_disk and not job.partition.replicates_params)
    # Values that are in memory are not read with the states.
    delivers = values * (on_disk and params is not Tier.NVME)
    yield Work.UPDATE, Lane.READ, grad_reads + (unit.optimizer_bytes - delivers) * on_disk
    yield Work.UPDATE, Lane.DOWNLOAD, grad_bytes * (grads is Tier.DEVICE and not machine.is_host)
    yield Work.UPDATE, Lane.HOST, touched + delivers + copies
    yield Work.UPDATE, Lane.WRITE, unit.optimizer_bytes * on_disk + copies
