"""The differences of the ZeRO stages: bytes that each rank holds, bytes that cross the network, and when gradients are
reduced.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.models import build, tokens_of
from tests.helpers.pairwise import full, in_turn
from tests.helpers.ranks import Case, Outcome, RankPool, RankPools
from zero_offload.base.types import STAGES
from zero_offload.model.api import runtime_of

MICRO_BATCHES = 3
ACCUMULATING = Case({"precision": "fp32"}, num_steps=3, micro_batches=MICRO_BATCHES, max_norm=0.5)


@pytest.fixture(params=[2, full(3)])
def pool(request: pytest.FixtureRequest, pools: RankPools) -> RankPool:
    return pools.of(request.param)


def at_stage(case: Case, stage: int, **settings: Any) -> Case:
    return replace(case, settings=case.settings | {"stage": stage} | settings)


# Bytes that cross the network


def communicate(rank: int, world_size: int, case: Case) -> tuple[dict[str, int], int, int]:
    """Bytes of the last step; whole parameters and whole fp32 gradients of the model, padding included."""
    model, optimizer = ranks.start(case)
    try:
        ranks.steps(case, (rank, world_size), model, optimizer, range(case.num_steps), Outcome())
        owner = runtime_of(model)
        assert owner is not None
        sections = owner.layout.sections
        trained = sum(4 * section.numel for section in sections if section.trainable)
        return (
            zo.stats(model).communicated_bytes,
            sum(section.nbytes for section in sections if section.trainable),
            trained,
        )
    finally:
        zo.close(model)


@in_turn(stage=STAGES, params=["nvme", "cpu"])
def test_volumes_are_those_of_the_paper(stage: int, params: str, pool: RankPool, nvme: Path) -> None:
    settings = {"params": params, "nvme": nvme, "device_memory": "2MiB" if params == "nvme" else None}
    case = at_stage(ACCUMULATING, stage, **settings)
    for found, whole_params, whole_grads in pool.succeed(communicate, replace(case, num_frozen=1)):
        # Stage 0 reduces, and gathers the sums.
        reductions = {0: 2 * MICRO_BATCHES, 1: 1}.get(stage, MICRO_BATCHES)
        assert found["reduced"] == reductions * whole_grads
        if stage == 3:
            # Once after an update; with room for few units for each forward and each backward, frozen ones too.
            least = MICRO_BATCHES if params == "nvme" else 1
            assert least * whole_params <= found["gathered"] <= 4 * MICRO_BATCHES * whole_params
        else:
            assert found["gathered"] == (0 if stage == 0 else whole_params)


# When gradients are reduced


@in_turn(stage=STAGES, grads=["cpu", "nvme"])
def test_no_sync_adds_up_and_reduces_once(stage: int, grads: str, pool: RankPool, nvme: Path) -> None:
    """Stage 1 sums on each rank, then over ranks: `no_sync` makes the same of every stage."""
    expected = pool.succeed(ranks.train, at_stage(ACCUMULATING, 1))
    case = replace(at_stage(ACCUMULATING, stage, grads=grads, nvme=nvme), no_sync=True)
    for found, each in zip(pool.succeed(ranks.train, case), expected, strict=True):
        if stage > 0:
            assert found == each
        else:  # An all-reduce adds up in another order than a reduce-scatter.
            assert found.losses == pytest.approx(each.losses, rel=1e-5)
            assert found.norms == pytest.approx(each.norms, rel=1e-5)


def reductions(rank: int, world_size: int, case: Case) -> int:
    model, optimizer = ranks.start(case)
    try:
        ranks.steps(case, (rank, world_size), model, optimizer, range(2), Outcome())
        return zo.stats(model).communicated_bytes["reduced"]
    finally:
        zo.close(model)


def test_no_sync_saves_reductions(pool: RankPool) -> None:
    case = at_stage(ACCUMULATING, 2)
    synced, unsynced = (pool.succeed(reductions, replace(case, no_sync=flag)) for flag in (False, True))
    assert synced == [MICRO_BATCHES * each for each in unsynced]


def end_unsynced(rank: int, world_size: int, stage: int) -> tuple[float, float]:
    """All backwards in no_sync: the step itself reduces. The norm, and that of the mean gradient."""
    model = zo.offload(build(partial(nn.Linear, 8, 8)), zo.OffloadConfig(stage=stage, precision="fp32"))
    try:
        with zo.no_sync(model):
            model(torch.full((1, 8), float(rank))).sum().backward()
        return zo.clip_grad_norm_(model, 1e9).item(), _norm_of_mean(world_size)
    finally:
        zo.close(model)


def _norm_of_mean(world_size: int) -> float:
    mean = sum(range(world_size)) / world_size
    return float(torch.cat([torch.full((64,), mean), torch.ones(8)]).norm())


@pytest.mark.parametrize("stage", STAGES)
def test_what_no_backward_reduced_the_norm_does(stage: int, pool: RankPool) -> None:
    for norm, expected in pool.succeed(end_unsynced, stage):
        assert norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stage", [0, 3, *map(full, (1, 2))])
def test_the_sum_is_the_mean_times_the_ranks(stage: int, pool: RankPool) -> None:
    case = at_stage(replace(ACCUMULATING, num_steps=1, max_norm=1e9), stage)
    mean, total = (pool.succeed(ranks.train, at_stage(case, stage, grad_reduction=each)) for each in ("mean", "sum"))
    for small, large in zip(mean, total, strict=True):
        assert large.norms == pytest.approx([len(pool.processes) * norm for norm in small.norms], rel=1e-6)


@pytest.mark.parametrize("stage", [0, 3, *map(full, (1, 2))])
def test_gradients_may_cross_in_bf16(stage: int, pool: RankPool) -> None:
    """Half the bytes; the norm is off by what rounding to 8 bits can do, and not exact."""
    precise = at_stage(replace(ACCUMULATING, num_steps=1, max_norm=1e9), stage, precision=zo.Precision("fp32"))
    rounded = at_stage(precise, stage, precision=zo.Precision("fp32", reduce="bf16"))
    for one, two in zip(pool.succeed(ranks.train, precise), pool.succeed(ranks.train, rounded), strict=True):
        assert one.losses == two.losses and one.norms != two.norms
        assert two.norms == pytest.approx(one.norms, rel=2**-8)
    whole, half = (pool.succeed(reductions, case)[0] for case in (precise, rounded))
    assert whole == 2 * half


# Where whole parameters are read


def test_replicas_serve_eval_and_later_forwards(pool: RankPool, nvme: Path) -> None:
    case = Case({"precision": "bf16", "stage": 2, "params": "nvme", "nvme": nvme, "device_memory": "2MiB"})
    for gathered in pool.succeed(evaluate, case):
        assert gathered[0] > 0 and gathered[1:] == [gathered[0]] * 3


def evaluate(rank: int, world_size: int, case: Case) -> list[int]:
    """Bytes gathered after each of some forwards that follow a step."""
    model, optimizer = ranks.start(case)
    owner = runtime_of(model)
    assert owner is not None
    try:
        ranks.steps(case, (rank, world_size), model, optimizer, range(2), Outcome())
        before, found = owner.store.counters.snapshot()["gathered"], []
        for number in range(4):
            with torch.no_grad():
                model(tokens_of(number, batch=1 + rank))
            found.append(int(owner.store.counters.snapshot()["gathered"] - before))
        return found
    finally:
        zo.close(model)
