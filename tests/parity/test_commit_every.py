"""commit_every by time: which steps become generations, on one rank and on several whose clocks differ."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.disk import assert_finishes, drain, generation_file, open_model, reference, runtime, train
from tests.helpers.pairwise import full
from tests.helpers.ranks import Case, Outcome, RankPool, RankPools
from zero_offload.base import stats
from zero_offload.checkpoint import commit_clock
from zero_offload.checkpoint.commit_clock import PLAIN_MIN
from zero_offload.checkpoint.format import StepRecord
from zero_offload.checkpoint.generation import GenerationKeeper

WORLD_SIZE, STEPS = 2, 24
FIRST_STEP = PLAIN_MIN + 2
"""The first step that "auto" commits."""


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(WORLD_SIZE)


def _step_clock(patches: pytest.MonkeyPatch, now_s: Callable[[], float]) -> None:
    patches.setattr(commit_clock, "time", SimpleNamespace(monotonic=now_s))


def committed_steps(nvme: Path, num_steps: int, begin: int = 0, **settings: Any) -> list[int]:
    """Steps whose generation is there when the step after them is over, and where the run was closed."""
    model, optimizer = open_model(nvme, **settings)
    zo.resume(model, optimizer)
    found = [begin]
    for step in range(begin, num_steps):
        train(model, optimizer, step, step + 1)
        drain(model)
        there = any(nvme.glob("generation-*.json"))
        found.append(json.loads(generation_file(nvme).read_text())["payload"]["step"] if there else 0)
    zo.close(model)
    return sorted(set(found) - {begin})


def test_a_duration_ends_with_the_first_step_that_reaches_it(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of a step that takes 50 s, by the clock that is read when it begins.
    clock = iter(range(0, 10**6, 50))
    _step_clock(monkeypatch, lambda: 1.0 * next(clock))
    numbers = committed_steps(nvme, 11, commit_every="2 min")
    assert numbers == committed_steps(nvme.with_name("again"), 11, commit_every="120S")
    gaps = {after - before for before, after in zip(numbers, numbers[1:], strict=False)}
    assert gaps <= {2, 3} and len(numbers) >= 3
    assert committed_steps(nvme, 20, begin=11, commit_every="1h") == []
    # Closing keeps the last step.
    assert json.loads(generation_file(nvme).read_text())["payload"]["step"] == 20


def test_auto_keeps_a_run_that_is_shorter_than_its_first_interval(nvme: Path) -> None:
    assert committed_steps(nvme, FIRST_STEP - 1, commit_every="auto") == []
    assert assert_finishes(nvme, 8, commit_every="auto") == FIRST_STEP - 1


@pytest.mark.parametrize("commit_every", ["auto", "0.001s"])
@pytest.mark.parametrize("settings", [{}, {"params": "cpu", "optimizer": "cpu"}], ids=["disk", "memory"])
def test_training_is_the_same(settings: dict[str, Any], commit_every: str, nvme: Path) -> None:
    model, optimizer = open_model(nvme, commit_every=commit_every, **settings)
    assert train(model, optimizer, 0, STEPS) == reference(STEPS)[0]
    drain(model)
    assert runtime(model).store.snapshots.num_ended > 0
    zo.close(model)


def test_a_program_that_never_calls_commit(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zo, "commit", lambda *args, **kwargs: None)
    found = committed_steps(nvme, 6, commit_every="0.000001s")
    # Each in the backward after it, unless the one before still runs when its step begins.
    assert len(found) >= 3 and set(found) <= set(range(1, 6))


# Several ranks


def train_by_own_clock(
    rank: int, world_size: int, case: Case, seed: int, slow: int | None = None
) -> tuple[list[int], Outcome]:
    """Steps whose commits this rank began, by a clock that jumps, or stands still on rank `slow`; what was trained."""
    clock, now, begun = random.Random(1000 * seed + rank), [0.0], list[int]()

    def tick() -> float:
        now[0] += 0.0 if rank == slow else clock.choice([0.001, 0.01, 0.1, 1.0, 30.0])
        return now[0]

    commit = GenerationKeeper.commit

    def record(keeper: GenerationKeeper, record: StepRecord, *args: Any) -> None:
        begun.append(record.step)
        commit(keeper, record, *args)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(stats, "time", SimpleNamespace(perf_counter=tick))
        _step_clock(patches, tick)
        patches.setattr(GenerationKeeper, "commit", record)
        return begun, ranks.train(rank, world_size, case)


@pytest.mark.parametrize("settings", [{"optimizer": "cpu"}, {"optimizer": "nvme", "params": "nvme"}], ids=str)
def test_ranks_commit_the_same_steps_by_whatever_clocks(settings: dict[str, Any], nvme: Path, pool: RankPool) -> None:
    everything = settings | {"nvme": nvme, "existing": "discard"}
    expected = pool.succeed(ranks.train, Case(everything | {"commit_every": 100}, num_steps=STEPS))
    for seed, commit_every in ((3, "auto"), (4, "25s")):
        case = Case(everything | {"commit_every": commit_every}, num_steps=STEPS)
        found = pool.succeed(train_by_own_clock, case, seed)
        assert [outcome for _, outcome in found] == expected
        (begun,) = {tuple(steps) for steps, _ in found}
        assert begun[-1] == STEPS and len(begun) > 2
        if commit_every == "auto":
            assert begun[0] == FIRST_STEP


@pytest.mark.parametrize("overlap", [full("none"), "forward", "backward"])
def test_the_clock_of_rank_0_counts(overlap: str, nvme: Path, pool: RankPool) -> None:
    settings = {"optimizer": "nvme", "nvme": nvme, "commit_every": "25s", "existing": "discard", "overlap": overlap}
    for slow in range(WORLD_SIZE):
        found = pool.succeed(train_by_own_clock, Case(settings, num_steps=STEPS), 0, slow)
        (begun,) = {tuple(steps) for steps, _ in found}
        assert begun == (STEPS,) if slow == 0 else len(begun) > 2
