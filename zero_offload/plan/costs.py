"""Seconds that each lane spends on a unit in a step, from bytes, arithmetic and a machine's rates.

Owns the arithmetic and nothing of time: what waits for what is `timeline`'s. What moves when is the runtime's rule,
case by case: `offload._home` and `runtime/units/carrier.py` for values, `runtime/grads` for gradients,
`optim/pipeline.py` for states. Calls: `Job.of`, then `step_costs` for all units, or `unit_costs` for one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zero_offload.config import OffloadConfig
from zero_offload.plan.hardware import Machine
from zero_offload.plan.lane_costs import NO_FETCH, Fetch, UnitCosts, UpdateCosts
from zero_offload.plan.layout import CHUNK_NUMEL
from zero_offload.plan.partition import ONE_RANK, Partition
from zero_offload.plan.shapes import UnitWork
from zero_offload.plan.unit_bytes import UnitBytes, measure_units, value_bytes
from zero_offload.types import Durability, StateKind, Tier, UpdateOverlap

PIECES_MAX = 128
"""Pieces that the updates of all units together are cut into. A piece is a chunk; where there are more, several."""
TOKENS_UNKNOWN = 2048
"""Tokens of a step where nobody has said how many."""


Tiers = Mapping[StateKind, Tier]


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

    @cached_property
    def piece_numel(self) -> int:
        """Elements of a piece of the update: a chunk, or several of a large model."""
        total = sum(unit.trained_numel for unit in self.units) / self.partition.optimizer_shards
        return CHUNK_NUMEL * max(math.ceil(total / CHUNK_NUMEL / PIECES_MAX), 1)

    def as_run(self, tiers: Sequence[Tiers], machine: Machine) -> Job:
        """With these tiers: where no unit leaves, `zo.accumulate` is the loop."""
        placed = zip(self.units, tiers, strict=True)
        if not self.batch.by_unit or any(_fetches(self, unit, at, machine)[2] for unit, at in placed):
            return self
        return replace(self, batch=replace(self.batch, by_unit=False))

    def overlaps(self, tiers: Sequence[Tiers], machine: Machine) -> bool:
        """Whether the update runs beside compute: `updates.overlaps`."""
        if self.config.overlap != UpdateOverlap.AUTO:
            return self.config.overlap != UpdateOverlap.NONE
        on_disk = any(Tier.NVME in (each[StateKind.OPTIMIZER], each[StateKind.GRADS]) for each in tiers)
        return not machine.is_host or on_disk


def step_costs(job: Job, tiers: Sequence[Tiers], machine: Machine) -> list[UnitCosts]:
    """Of every unit, with what compute on a CPU loses to those that use its cores meanwhile."""
    beside = job.overlaps(tiers, machine)
    known: dict[object, UnitCosts] = {}  # blocks are alike
    found = []
    for index, at in enumerate(tiers):
        unit, work = job.units[index], job.work[index]
        measured = job.measured_s[index] if job.measured_s else None
        key = (replace(unit, name=""), replace(work, numel=replace(work.numel, name="")), tuple(at.values()), measured)
        if key not in known:
            known[key] = unit_costs(job, index, at, machine, update_beside=beside)
        found.append(known[key])
    return _charge_cores(job, found, machine, update_beside=beside) if machine.is_host else found


def unit_costs(job: Job, index: int, at: Tiers, machine: Machine, *, update_beside: bool) -> UnitCosts:
    """Of one unit with these tiers; `update_beside`: the update has the cores that compute leaves."""
    unit = job.units[index]
    forward_s, backward_s = _compute_seconds(job, index, machine)
    if machine.is_host:  # the thread of backward copies gradients to their places
        backward_s += _per(2 * _made_bytes(job, unit), machine.host_bytes)
    first, again, buffer_bytes = _fetches(job, unit, at, machine)
    alone = job.partition.world_size == 1
    grads = _grad_costs(job, unit, at, machine)
    keeps = job.config.effective_durability is not Durability.SCRATCH and isinstance(job.config.commit_every, int)
    committed = unit.optimizer_bytes if keeps and at[StateKind.OPTIMIZER] is not Tier.NVME else 0
    costs = UnitCosts(
        forward_s=forward_s,
        backward_s=backward_s,
        buffer_bytes=buffer_bytes,
        first=first,
        again=again,
        delivered=machine.is_host and alone and buffer_bytes > 0 and unit.trained_numel > 0,
        **grads,
        saved_out=_saved_costs(job, index, machine),
        update=_update_costs(job, unit, at, machine, update_beside=update_beside),
        commit_s=_per(committed, machine.write_bytes) / (int(job.config.commit_every) if keeps else 1),
    )
    return costs.taking_turns(job.batch.num_together)


def _per(nbytes: float, rate: float) -> float:
    """Seconds; what a machine has no lane for takes none."""
    return nbytes / rate if rate else 0.0


def _compute_seconds(job: Job, index: int, machine: Machine) -> tuple[float, float]:
    if job.measured_s:
        return job.measured_s[index]
    work, batch = job.work[index], job.batch
    whole = job.units[index].params_bytes * job.partition.param_shards
    # Few tokens: the weights must still be read once.
    floor_s = _per(whole, machine.device_bytes) if work.matmul_numel else 0.0
    forward_s = max(batch.tokens * work.forward_flops(batch.sequence) / machine.flops, floor_s)
    passes = (2 if job.units[index].trained_numel else 1) + work.rerun_share(batch.sequence, batch.recompute)
    return forward_s, passes * forward_s


def _fetches(job: Job, unit: UnitBytes, at: Tiers, machine: Machine) -> tuple[Fetch, Fetch, int]:
    """What brings the unit after an update and what does later, and the bytes of its buffer."""
    params, partition, trained = at[StateKind.PARAMS], job.partition, unit.trained_numel > 0
    whole = unit.params_bytes * partition.param_shards
    shards = partition.optimizer_shards
    on_device = at[StateKind.OPTIMIZER] is Tier.DEVICE and not machine.is_host and trained
    in_place = params is Tier.DEVICE or (machine.is_host and params is Tier.CPU)
    gather_s = _per(whole * (shards - 1) / shards, machine.network_bytes)
    crosses = not machine.is_host
    if partition.param_shards > 1:
        reads = unit.params_bytes if params is Tier.NVME and not on_device else 0
        uploads = unit.params_bytes if crosses and not on_device else 0
        every = Fetch(_per(reads, machine.read_bytes), _per(uploads, machine.upload_bytes), gather_s)
        return every, every, whole
    later = Fetch(_per(whole * (params is Tier.NVME), machine.read_bytes), _per(whole * crosses, machine.upload_bytes))
    if partition.replicates_params and trained:
        # The states' shard of the new values, gathered, and kept where parameters rest.
        own = whole / shards
        first = Fetch(
            _per(own * (at[StateKind.OPTIMIZER] is params is Tier.NVME and not machine.is_host), machine.read_bytes),
            _per(own * (crosses and not on_device), machine.upload_bytes),
            gather_s,
            _per(whole * (crosses and not in_place), machine.download_bytes),
            _per(whole * (params is Tier.NVME), machine.write_bytes),
        )
        return (first, NO_FETCH, 0) if in_place else (first, later, whole)
    if on_device:
        return NO_FETCH, NO_FETCH, 0
    if in_place:
        if machine.is_host or not trained:
            return NO_FETCH, NO_FETCH, 0
        return Fetch(upload_s=_per(whole, machine.upload_bytes)), NO_FETCH, 0
    return later, later, whole


def _grad_costs(job: Job, unit: UnitBytes, at: Tiers, machine: Machine) -> dict[str, float]:
    tier, partition = at[StateKind.GRADS], job.partition
    world = partition.world_size
    crossing = unit.trained_numel * (4 if job.config.reduce_dtype_name == "float32" else 2) * (world - 1) / world
    # An all-reduce where every rank keeps all, else a reduce-scatter.
    crossing *= 2 if partition.optimizer_shards == 1 else 1
    out = _made_bytes(job, unit)
    leaves = not machine.is_host and tier is not Tier.DEVICE
    on_disk = tier is Tier.NVME and unit.passing_grads_bytes == 0  # what passes is not written
    return {
        "reduce_s": 0.0 if partition.defers_reduction else _per(crossing, machine.network_bytes),
        "late_reduce_s": _per(crossing, machine.network_bytes) if partition.defers_reduction else 0.0,
        "grad_download_s": _per(out * leaves, machine.download_bytes),
        "grad_write_s": _per(out * on_disk, machine.write_bytes),
        "grad_read_s": _per(out * on_disk, machine.read_bytes),
        # From staging to where they rest, where the host adds them up: read and written.
        "land_s": _per(2 * out * (leaves and not on_disk and job.batch.micro_batches > 1), machine.host_bytes),
    }


def _made_bytes(job: Job, unit: UnitBytes) -> int:
    """Of gradients that one backward brings to where they rest."""
    if job.partition.world_size > 1:
        return unit.trained_numel * 4 // job.partition.grad_shards
    return (unit.params_bytes - unit.frozen_bytes) if job.batch.micro_batches == 1 else unit.grads_bytes


def _saved_costs(job: Job, index: int, machine: Machine) -> Fetch:
    """Activations of a micro-batch that leave the device and come back."""
    batch = job.batch
    nbytes = batch.tokens * value_bytes(job.config) * job.work[index].saved_values(batch.recompute)
    fractions = job.config.activation_fractions
    on_disk = nbytes * fractions.get(Tier.NVME, 0.0)
    away = 0.0 if machine.is_host else on_disk + nbytes * fractions.get(Tier.CPU, 0.0)
    return Fetch(
        read_s=_per(on_disk, machine.read_bytes),
        upload_s=_per(away, machine.upload_bytes),
        keep_download_s=_per(away, machine.download_bytes),
        keep_write_s=_per(on_disk, machine.write_bytes),
    )


def _update_costs(job: Job, unit: UnitBytes, at: Tiers, machine: Machine, *, update_beside: bool) -> UpdateCosts:
    if unit.trained_numel == 0:
        return UpdateCosts()
    params, grads, optimizer = (at[kind] for kind in (StateKind.PARAMS, StateKind.GRADS, StateKind.OPTIMIZER))
    numel = unit.trained_numel / job.partition.optimizer_shards
    grad_bytes = unit.grads_bytes + unit.passing_grads_bytes
    touched = 2 * unit.optimizer_bytes + grad_bytes
    grad_reads = unit.grads_bytes if grads is Tier.NVME else 0
    if optimizer is Tier.DEVICE and not machine.is_host:
        return UpdateCosts(
            device_read_s=_per(grad_reads, machine.read_bytes),
            device_upload_s=_per(grad_bytes * (grads is not Tier.DEVICE), machine.upload_bytes),
            device_s=_per(touched, machine.device_bytes),
        )
    on_disk = optimizer is Tier.NVME
    values = numel * value_bytes(job.config)
    # Where only parameters rest on NVMe their values there are a copy that the update writes.
    copies = 0.0 if on_disk or params is not Tier.NVME or job.partition.replicates_params else values
    delivers = values if on_disk and params is not Tier.NVME else 0.0
    # Values that are in memory are not read with the states.
    reads = grad_reads + (unit.optimizer_bytes - delivers) * on_disk
    writes = unit.optimizer_bytes * on_disk + copies
    on_gpu = grads is Tier.DEVICE and not machine.is_host
    rate = machine.host_bytes_beside if update_beside else machine.host_bytes
    lost_s = (reads + writes) * machine.drive_lost_s
    is_staged = on_disk or reads > 0 or on_gpu
    # In memory nothing is read ahead or written behind.
    return UpdateCosts(
        pieces=max(math.ceil(numel / job.piece_numel), 1) if is_staged or writes else 1,
        read_s=_per(reads, machine.read_bytes),
        download_s=_per(grad_bytes * on_gpu, machine.download_bytes),
        host_s=_per(touched + delivers + copies, rate) + lost_s,
        write_s=_per(writes, machine.write_bytes),
        is_staged=is_staged,
    )


def _charge_cores(job: Job, costs: Sequence[UnitCosts], machine: Machine, *, update_beside: bool) -> list[UnitCosts]:
    """On a CPU what runs beside compute takes its cores: spread evenly over the passes that it runs beside.

    Units are counted as if none stayed from one pass to the next.
    """
    n = job.batch.num_passes
    forward_s = sum(each.forward_s for each in costs)
    backward_s = sum(each.backward_s for each in costs)
    # Transfers that are the update's own are counted in its time.
    moved_bytes = 0.0
    for each in costs:
        saved = each.saved_out
        reads = (0 if each.delivered and update_beside else each.first.read_s) + (2 * n - 1) * each.again.read_s
        reads += (n - 1) * each.grad_read_s + n * saved.read_s
        writes = n * (each.grad_write_s + saved.keep_write_s) + each.commit_s
        moved_bytes += reads * machine.read_bytes + writes * machine.write_bytes
    # The update's threads are fewer than compute's, which wait for those whose cores they share.
    shared_s = sum(each.update.host_s for each in costs) if update_beside else 0.0
    passes_s = n * (forward_s + backward_s)
    every = 1 + moved_bytes * machine.drive_lost_s / passes_s if passes_s else 1.0
    # The update runs beside the first forward of a step, or beside its last backward.
    in_backward = job.config.overlap == UpdateOverlap.BACKWARD
    beside_s = backward_s if in_backward else forward_s
    # Compute has at least half of its time meanwhile; while it waits for the update nothing is taken.
    factor = every + (min(shared_s, beside_s) / (n * beside_s) if beside_s else 0.0)
    forward_factor, backward_factor = (every, factor) if in_backward else (factor, every)
    return [
        replace(each, forward_s=each.forward_s * forward_factor, backward_s=each.backward_s * backward_factor)
        for each in costs
    ]
