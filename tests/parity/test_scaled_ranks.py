"""Loss scaling on two ranks: what overflows on one is skipped by all, and the scale stays the same everywhere."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.models import build
from tests.helpers.pairwise import full
from tests.helpers.ranks import Case, Outcome, RankPool

NUM_STEPS, EVERYWHERE = 8, -1
SOME_STAGES = [3, *map(full, (0, 1, 2))]
SCALE = 2.0**8
OVERFLOWS = {1: 0, 2: 1, 5: 1}
"""Step -> the rank whose loss is infinite."""

Seen = tuple[Outcome, list[float], int]
"""The outcome, the scale after each step, and the number of skipped steps."""


def case_of(stage: int, **settings: Any) -> Case:
    return Case({"stage": stage, "precision": "fp16"} | settings, num_steps=NUM_STEPS, micro_batches=2)


def train(rank: int, world_size: int, case: Case, overflows: dict[int, int]) -> Seen:
    """From the start, or from the generation found; clips every other step."""
    model, optimizer = ranks.start(case)
    out, scales, scaler = Outcome(), [], zo.GradScaler(SCALE, growth_interval=3)
    try:
        resumed = zo.resume(model, optimizer, scaler)
        for step in range(0 if resumed is None else resumed.extra, case.num_steps):
            for micro in range(case.micro_batches):
                loss = model(ranks.rows_of(2 * step + micro, rank, world_size)) / case.micro_batches
                bad = micro == 1 and overflows.get(step) in (rank, EVERYWHERE)
                scaler.scale(loss * (math.inf if bad else 1.0)).backward()
                out.losses.append(loss.item())
            if step % 2:
                scaler.unscale_(optimizer)
                norm = zo.clip_grad_norm_(model, 0.5).item()
                out.norms.append(norm if math.isfinite(norm) else -1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            zo.commit(model, optimizer, extra=step + 1)
        out.params = ranks.read_params(model)
        return out, scales, zo.stats(model).skipped_steps
    finally:
        zo.close(model)


def check_together(found: list[Seen]) -> None:
    """Ranks differ in their rows only."""
    (first, *rest), (second, *others) = found
    assert rest == others and first.norms == second.norms and first.losses != second.losses
    assert all(torch.equal(first.params[name], second.params[name]) for name in first.params)


@pytest.mark.parametrize("stage", SOME_STAGES)
def test_an_overflow_on_one_rank_is_one_of_all(stage: int, pool: RankPool, nvme: Path) -> None:
    everywhere = pool.succeed(train, case_of(stage), dict.fromkeys(OVERFLOWS, EVERYWHERE))
    for settings in ({}, {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": nvme}):
        found = pool.succeed(train, case_of(stage, **settings), OVERFLOWS)
        assert found == everywhere
        check_together(found)
        _, scales, num_skipped = found[0]
        assert num_skipped == len(OVERFLOWS)
        # 2 overflows, then 2 steps without, one more overflow, and 2 steps without.
        assert [scale / SCALE for scale in scales] == [1, 0.5, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125]


@pytest.mark.parametrize("stage", SOME_STAGES)
def test_a_closed_run_resumes_exactly(stage: int, pool: RankPool, nvme: Path) -> None:
    whole = pool.succeed(train, case_of(stage), OVERFLOWS)
    case = case_of(stage, optimizer="nvme", nvme=nvme, existing="resume")
    before = pool.succeed(train, replace(case, num_steps=3), OVERFLOWS)
    after = pool.succeed(train, case, OVERFLOWS)
    for (one, scales, skipped), (two, its_scales, its_skipped), (both, all_scales, all_skipped) in zip(
        before, after, whole, strict=True
    ):
        assert Outcome(one.losses + two.losses, one.norms + two.norms, two.params) == both
        assert scales + its_scales == all_scales and skipped + its_skipped == all_skipped


@pytest.mark.parametrize("stage", SOME_STAGES)
@pytest.mark.parametrize("reduce", ["fp16", "bf16"])
def test_gradients_may_cross_in_16_bits(reduce: str, stage: int, pool: RankPool) -> None:
    precise = pool.succeed(train, case_of(stage), OVERFLOWS)
    rounded = pool.succeed(train, case_of(stage, precision=zo.Precision("fp16", reduce=reduce)), OVERFLOWS)
    check_together(rounded)
    assert rounded[0][1:] == precise[0][1:]
    assert rounded[0][0].losses != precise[0][0].losses
    assert rounded[0][0].losses == pytest.approx(precise[0][0].losses, rel=0.02)


class Mixed(nn.Module):
    """An offloaded body beside an ordinary head that each rank trains on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)


def train_mixed(rank: int, world_size: int, stage: int) -> tuple[list[torch.Tensor], int, float]:
    model = build(Mixed)
    zo.offload(model.body, zo.OffloadConfig(stage=stage, precision="fp32"))
    optimizer, scaler = zo.AdamW(model.parameters(), lr=0.1), zo.GradScaler(SCALE)
    try:
        scaler.scale(model.body(torch.ones(2, 8)).sum()).backward()
        scaler.scale(model.head(torch.ones(2, 8)).sum() * (math.inf if rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        params = [*ranks.read_params(model.body).values(), *(p.detach() for p in model.head.parameters())]
        return params, zo.stats(model.body).skipped_steps, scaler.get_scale()
    finally:
        zo.close(model.body)


@pytest.mark.parametrize("stage", [1, 3, *map(full, (0, 2))])
def test_an_ordinary_parameter_of_one_rank_stops_all(stage: int, pool: RankPool) -> None:
    start = list(build(Mixed).parameters())
    for params, num_skipped, scale in pool.succeed(train_mixed, stage):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(params, start, strict=True))
        assert (num_skipped, scale) == (1, SCALE / 2)
