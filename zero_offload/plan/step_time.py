"""How long a step takes and what compute waits for, from each lane's seconds for each unit.

A step is a few phases, one after the other: the first forward, with the update beside it; each later forward; each
backward; what comes between the last backward and the next forward. Lanes work side by side in a phase. It lasts as
long as its busiest lane, and as long as one unit takes on the others, before that lane begins and after it ends.
Commits, and what nothing in the step waits for, run beside all phases: no step is shorter than a lane's total.

[Note] This leaves out the order within a phase, and buffers that are full. An event simulation of every transfer, in
640 lines more, gave the same step within 1.2% for 21 published runs and within 8% for 13 placements on a CPU, and was
no nearer to what was measured (`docs/BENCHMARKS.md`).

Pure, for any number of placements at once: `search` ranks all its candidates by one call. The calls: `predict` for one
placement; `Totals`, then `step_times`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from zero_offload.base.spans import Cause
from zero_offload.base.types import Tier, UpdateOverlap
from zero_offload.hardware.machines import Lane, Machine
from zero_offload.plan.costs import (
    COLUMN,
    STALL,
    Job,
    Numbers,
    Tiers,
    Work,
    buffer_bytes,
    device_activation_bytes,
    unit_seconds,
)
from zero_offload.plan.memory import UNITS_IN_FLIGHT, Budget, Placement, margin_bytes
from zero_offload.plan.unit_bytes import PLACED_KINDS

COMPUTE, READ, WRITE, HOST = (COLUMN[lane] for lane in (Lane.COMPUTE, Lane.READ, Lane.WRITE, Lane.HOST))


@dataclass(frozen=True)
class Prediction:
    """Of one step, in the steady state."""

    step_s: float
    compute_s: float
    """Of which the device computes, updates in its own memory included."""
    tokens_per_s: float
    """Of all ranks."""
    busy: Mapping[Lane, float]
    """Share of the step; a drive that takes turns has both its reads and writes under `READ`."""
    exposed_s: Mapping[Cause, float]
    """What compute waited for."""


def predict(job: Job, placement: Placement, machine: Machine) -> Prediction:
    """Predict a step of `job` with this placement on this machine."""
    job = job.as_run(placement.tiers, machine)
    known: dict[object, Totals] = {}  # blocks are alike
    seconds, sizes = np.zeros(1), np.zeros(1)
    for index, at in enumerate(placement.tiers):
        key = (*job.likeness(index), tuple(at.values()))
        if key not in known:
            known[key] = of_unit(job, index, at, machine)
        seconds, sizes = seconds + known[key].seconds, sizes + known[key].sizes
    times = step_times(job, Totals(seconds[None], sizes[None]), machine, placement.budget)
    step_s, lanes = float(times.step_s[0]), times.busy_s[0]
    tokens = job.batch.tokens * job.batch.micro_batches * job.partition.world_size
    return Prediction(
        step_s,
        float(lanes[COMPUTE]),
        tokens / step_s if step_s else float("inf"),
        {lane: float(lanes[COLUMN[lane]]) / step_s if step_s else 0.0 for lane in machine.lanes()},
        {cause: float(waited[0]) for cause, waited in times.exposed_s.items() if waited[0] > 1e-9 * step_s},
    )


class Totals(NamedTuple):
    """Of a unit, or of all together; with an axis before it, of several placements."""

    seconds: Numbers
    """(Work, lanes and `STALL`)."""
    sizes: Numbers
    """(3,): bytes of buffers, bytes that rest on a device, and units with gradients or states on drives."""


def of_unit(job: Job, index: int, at: Tiers, machine: Machine) -> Totals:
    unit = job.units[index]
    buffer = buffer_bytes(job, unit, at, machine)
    params, grads, optimizer = (at[kind] for kind in PLACED_KINDS)
    resting = unit.grads_bytes * (grads is Tier.DEVICE) + unit.optimizer_bytes * (optimizer is Tier.DEVICE)
    resting += unit.params_bytes * (buffer == 0 and optimizer is not Tier.DEVICE)
    sizes = np.array([buffer, resting, Tier.NVME in (grads, optimizer)], dtype=float)
    return Totals(unit_seconds(job, index, at, machine), sizes)


class StepTimes(NamedTuple):
    """Of a step under each placement."""

    step_s: Numbers
    busy_s: Numbers
    """(placements, lanes)."""
    exposed_s: Mapping[Cause, Numbers]


def step_times(job: Job, totals: Totals, machine: Machine, budget: Budget) -> StepTimes:
    """Of a step of `job` with units' totals under each of the placements."""
    passes = job.batch.num_passes
    in_backward = job.config.overlap == UpdateOverlap.BACKWARD
    is_beside = _overlaps(job, totals.sizes[:, 2] > 0, machine)
    work = _as_run(job, totals, machine, budget, is_beside)
    new = work[Work.FETCH] + work[Work.FETCH_FROZEN] + work[Work.FETCH_DELIVERED]
    # A CPU waits while activations leave, through a few blocks. A GPU goes on.
    saved, restored = work[Work.SAVE], work[Work.RESTORE]
    if not machine.is_host:
        saved, restored = np.zeros_like(saved), restored + saved
    # A commit is in the way of what backward reads and writes; without that it goes on in the next forward.
    uses_drives = (restored + work[Work.GRADS])[:, [READ, WRITE]].any(1)
    commit = work[Work.COMMIT] * uses_drives[:, None]
    beside = work[Work.UPDATE] * is_beside[:, None]
    forward = (work[Work.FORWARD], (Cause.ACTIVATIONS, saved))
    backward = (
        work[Work.BACKWARD],
        (Cause.ACTIVATIONS, restored),
        (Cause.PARAMS, work[Work.FETCH_AGAIN]),
        (Cause.GRADS, work[Work.GRADS]),
    )
    adds = (*backward, (Cause.GRADS, work[Work.ADD]))
    last = (*(adds if passes > 1 else backward), (Cause.COMMIT, commit))
    phases = [
        (1, (*forward, (Cause.PARAMS, new), (Cause.UPDATE, beside * (not in_backward)))),
        (passes - 1, (*forward, (Cause.PARAMS, work[Work.FETCH_AGAIN]))),
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
            longer_s = _lasts(compute, machine, len(job.units))
            exposed_s[cause] += count * (longer_s - lasts_s)
            lasts_s = longer_s
        step_s += count * lasts_s
    lanes = _lanes(np.tensordot(_counts(passes), work, 1), machine)
    least_s = np.maximum(step_s, lanes.max(1))
    exposed_s[Cause.COMMIT] += least_s - step_s
    return StepTimes(least_s, lanes, exposed_s)


def _overlaps(job: Job, uses_drives: npt.NDArray[np.bool_], machine: Machine) -> npt.NDArray[np.bool_]:
    """Whether updates run beside compute: `updates.overlaps`."""
    if job.config.overlap != UpdateOverlap.AUTO:
        return np.full_like(uses_drives, job.config.overlap != UpdateOverlap.NONE)
    return uses_drives | (not machine.is_host)


def _counts(passes: int) -> Numbers:
    """How often a step does each work."""
    of_pass = {Work.FORWARD, Work.BACKWARD, Work.SAVE, Work.RESTORE, Work.GRADS}
    others = {Work.ADD: passes - 1, Work.FETCH_AGAIN: 2 * passes - 1}
    return np.array([passes if work in of_pass else others.get(work, 1) for work in Work], dtype=float)


def _as_run(job: Job, totals: Totals, machine: Machine, budget: Budget, is_beside: npt.NDArray[np.bool_]) -> Numbers:
    """(Work, placements, lanes and `STALL`): without fetches of units that stay; cores are shared."""
    work = totals.seconds.swapaxes(0, 1).copy()
    buffers = totals.sizes[:, 0]
    leaves = 1 - np.minimum(_room_bytes(job, totals.sizes, machine, budget) / np.maximum(buffers, 1), 1)
    work[[Work.FETCH_FROZEN, Work.FETCH_AGAIN]] *= leaves[:, None]
    is_delivered = is_beside & (job.config.overlap != UpdateOverlap.BACKWARD)
    work[Work.FETCH_DELIVERED] *= np.where(is_delivered, 0, leaves)[:, None]
    if machine.is_host:
        _share_cores(job, work, machine, is_beside)
    return work


def _room_bytes(job: Job, sizes: Numbers, machine: Machine, budget: Budget) -> Numbers:
    """For units on their way through: for the largest in flight, or what a budget leaves beside all that rests there;
    where a device's memory has none, what activations and a margin leave, as from the second step on."""
    whole = sorted(unit.params_bytes * job.partition.param_shards for unit in job.units)
    least = sum(whole[-UNITS_IN_FLIGHT:])
    limit = job.config.budget_bytes(Tier.DEVICE)
    if limit is not None:
        least = min(least, limit)
    elif machine.is_host:
        limit = 0
    else:
        activations = device_activation_bytes(job.work, job.config, job.batch)
        margin = margin_bytes(budget.device_bytes, job.partition.world_size, is_measured=False)
        limit = budget.device_bytes - activations - margin
    return np.maximum(least, limit - sizes[:, 1])


def _share_cores(job: Job, work: Numbers, machine: Machine, is_beside: npt.NDArray[np.bool_]) -> None:
    """On a CPU what runs beside compute takes its cores: spread evenly over the passes that it runs beside."""
    passes = job.batch.num_passes
    # The loops of an update beside compute have some of the cores; drives take from any loop.
    lost_s = (work[..., READ] * machine.read_bytes + work[..., WRITE] * machine.write_bytes) * machine.drive_lost_s
    update = work[Work.UPDATE]
    update[:, HOST] *= np.where(is_beside, machine.host_bytes / machine.host_bytes_beside, 1.0)
    update[:, HOST] += lost_s[Work.UPDATE]
    forward_s, backward_s = work[Work.FORWARD, :, COMPUTE], work[Work.BACKWARD, :, COMPUTE]
    others_s = np.tensordot(_counts(passes), lost_s, 1) - lost_s[Work.UPDATE]
    every = 1 + others_s / np.maximum(passes * (forward_s + backward_s), 1e-30)
    # Compute waits for those of its threads whose cores the update has, and has half of its time at least.
    beside_s = backward_s if job.config.overlap == UpdateOverlap.BACKWARD else forward_s
    shared_s = np.where(is_beside, np.minimum(update[:, HOST], beside_s), 0.0) / passes
    forward_s *= every
    backward_s *= every
    beside_s += shared_s


def _lanes(seconds: Numbers, machine: Machine) -> Numbers:
    """Without `STALL`; drives that take turns are one lane."""
    lanes = seconds[:, :STALL].copy()
    if machine.drive_takes_turns:
        lanes[:, READ] += lanes[:, WRITE]
        lanes[:, WRITE] = 0.0
    return lanes


def _lasts(seconds: Numbers, machine: Machine, num_units: int) -> Numbers:
    """The busiest lane, and beside it one unit's way through the others.

    Drives and the host's loops pass chunks on, not units: of these the busiest counts.
    """
    lanes = _lanes(seconds, machine)
    lanes[:, COMPUTE] += seconds[:, STALL]
    busiest = lanes.max(1)
    by_chunk = lanes[:, [READ, WRITE, HOST]]
    others = lanes.sum(1) - by_chunk.sum(1) + by_chunk.max(1) - busiest
    return cast(Numbers, busiest + others / num_units)
