"""How long a step takes, what each lane does in it, and what compute waits for: `timeline` run on a job's costs.

Owns what is decided before the first step, and what is reported. Pure. The call: `simulate`, which makes a few steps
and reports the last ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zero_offload.plan.costs import Job, device_activation_bytes, step_costs
from zero_offload.plan.hardware import Lane, Machine
from zero_offload.plan.lane_costs import UnitCosts
from zero_offload.plan.memory import (
    ACTIVATION_BLOCK_BYTES,
    ACTIVATION_BLOCKS_OUT,
    UNITS_IN_FLIGHT,
    Placement,
    margin_bytes,
)
from zero_offload.plan.passes import Lanes
from zero_offload.plan.timeline import Policy, Run
from zero_offload.telemetry.spans import Cause
from zero_offload.types import StateKind, Tier, UpdateOverlap

STEPS, REPORTED = 4, 2
"""Steps that are made, and how many of them, the last ones, are reported: the first ones fill the pipelines."""
PASSES = 3
"""Over the units that are simulated in a step; of more, the others take as long as the one before the last."""


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


def simulate(job: Job, placement: Placement, machine: Machine) -> Prediction:
    """Predict a step of `job` with this placement on this machine."""
    job = job.as_run(placement.tiers, machine)
    costs = step_costs(job, placement.tiers, machine)
    policy = _policy(job, placement, costs, machine)
    made = _run(costs, policy, machine)
    if (more := job.batch.num_passes - policy.num_passes) > 0:
        # All between the first and the last are alike.
        fewer = _run(costs, replace(policy, num_passes=policy.num_passes - 1), machine)
        made = made.plus(more, fewer)
    tokens = job.batch.tokens * job.batch.micro_batches * job.partition.world_size
    busy = {lane: seconds / made.step_s if made.step_s else 0.0 for lane, seconds in made.busy_s.items()}
    exposed = {cause: seconds for cause, seconds in made.exposed_s.items() if seconds > 0}
    rate = tokens / made.step_s if made.step_s else float("inf")
    return Prediction(made.step_s, made.busy_s[Lane.COMPUTE], rate, busy, exposed)


@dataclass(frozen=True)
class _Seconds:
    """Of one step."""

    step_s: float
    busy_s: Mapping[Lane, float]
    exposed_s: Mapping[Cause, float]

    def plus(self, count: int, fewer: _Seconds) -> _Seconds:
        """With so many passes more, each of which takes what this step does more than the other."""

        def more(now: float, before: float) -> float:
            return now + count * (now - before)

        return _Seconds(
            more(self.step_s, fewer.step_s),
            {lane: more(seconds, fewer.busy_s[lane]) for lane, seconds in self.busy_s.items()},
            {cause: more(seconds, fewer.exposed_s.get(cause, 0.0)) for cause, seconds in self.exposed_s.items()},
        )


def _run(costs: Sequence[UnitCosts], policy: Policy, machine: Machine) -> _Seconds:
    lanes = Lanes.of(machine)
    run = Run(costs, lanes, policy)
    for number in range(STEPS):
        if number == STEPS - REPORTED:
            run.forget_times()
            began_s = run.now
        run.step()
    return _Seconds(
        (run.now - began_s) / REPORTED,
        {lane: lanes[lane].busy_s / REPORTED for lane in machine.lanes()},
        {cause: seconds / REPORTED for cause, seconds in run.exposed_s.items()},
    )


def _policy(job: Job, placement: Placement, costs: Sequence[UnitCosts], machine: Machine) -> Policy:
    uses = tuple(
        (index,) if work.also_reads is None else (work.also_reads, index) for index, work in enumerate(job.work)
    )
    replicates = job.partition.replicates_params
    held = ACTIVATION_BLOCKS_OUT * ACTIVATION_BLOCK_BYTES
    return Policy(
        uses=uses,
        room_bytes=_room_bytes(job, placement, costs, machine),
        overlaps=job.overlaps(placement.tiers, machine),
        in_backward=job.config.overlap == UpdateOverlap.BACKWARD,
        num_passes=min(job.batch.num_passes, PASSES),
        by_unit=job.batch.by_unit,
        gathers_ahead=tuple(not replicates and each.again.read_s == 0 for each in costs),
        hold_s=held / machine.write_bytes if machine.write_bytes else 0.0,
        is_host=machine.is_host,
    )


def _room_bytes(job: Job, placement: Placement, costs: Sequence[UnitCosts], machine: Machine) -> float:
    """Room for the largest units in flight, or what a budget leaves beside all that rests there; where a device's
    memory has none, what activations and a margin leave, as from the second step on."""
    buffers = sorted(each.buffer_bytes for each in costs)
    least = sum(buffers[-UNITS_IN_FLIGHT:])
    budget = job.config.budget_bytes(Tier.DEVICE)
    if budget is not None:
        least = min(least, budget)
    elif machine.is_host:
        return least
    else:
        whole = placement.budget.device_bytes
        activations = device_activation_bytes(job.work, job.config, job.batch)
        budget = whole - activations - margin_bytes(whole, job.partition.world_size, is_measured=False)
    resting = 0
    for unit, at, cost in zip(job.units, placement.tiers, costs, strict=True):
        if not machine.is_host:
            resting += unit.grads_bytes * (at[StateKind.GRADS] is Tier.DEVICE)
            resting += unit.optimizer_bytes * (at[StateKind.OPTIMIZER] is Tier.DEVICE)
            resting += unit.params_bytes * (cost.buffer_bytes == 0 and at[StateKind.OPTIMIZER] is not Tier.DEVICE)
    return min(sum(buffers), max(least, budget - resting))
