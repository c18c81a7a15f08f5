"""commit_every="auto": which steps become generations, on one rank and on several whose clocks differ."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.disk import assert_finishes, drain, generation_file, open_model, reference, train
from tests.helpers.ranks import Case, Outcome, RankPool
from zero_offload.checkpoint.format import StepRecord
from zero_offload.checkpoint.generation import GenerationKeeper
from zero_offload.plan.commit_interval import GROWTH_MAX, INTERVAL_FIRST, CommitInterval, earliest
from zero_offload.telemetry import stats

WORLD_SIZE, STEPS = 2, 40


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(WORLD_SIZE)
    yield pool
    pool.close()


def _wish(monkeypatch: pytest.MonkeyPatch, wishes: list[int]) -> None:
    monkeypatch.setattr(CommitInterval, "wish", lambda self, interval: wishes.pop(0))


def committed_steps(nvme: Path, num_steps: int, begin: int = 0, **settings: Any) -> list[int]:
    """Steps whose generation is there when the step after them is over, and where the run was closed."""
    model, optimizer = open_model(nvme, commit_every="auto", **settings)
    zo.resume(model, optimizer)
    found = [begin]
    for step in range(begin, num_steps):
        train(model, optimizer, step, step + 1)
        drain(model)
        there = any(nvme.glob("generation-*.json"))
        found.append(json.loads(generation_file(nvme).read_text())["payload"]["step"] if there else 0)
    zo.close(model)
    return sorted(set(found) - {begin})


def test_intervals_follow_the_wishes(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _wish(monkeypatch, [2, 1, 1, 4, 7, 7, 7])
    assert committed_steps(nvme, 20) == [4, 6, 7, 8, 12, 19]
    # The last step was committed by `close`; a resumed run knows nothing and starts with the first interval.
    _wish(monkeypatch, [3, 3, 3])
    assert committed_steps(nvme, 28, begin=20) == [24, 27]


def test_a_run_that_is_shorter_than_the_first_interval_is_kept(nvme: Path) -> None:
    assert committed_steps(nvme, INTERVAL_FIRST - 1) == []
    assert assert_finishes(nvme, 8, commit_every="auto") == INTERVAL_FIRST - 1


@pytest.mark.parametrize("settings", [{}, {"params": "cpu", "optimizer": "cpu"}], ids=["disk", "memory"])
def test_training_is_the_same(settings: dict[str, Any], nvme: Path) -> None:
    model, optimizer = open_model(nvme, commit_every="auto", **settings)
    assert train(model, optimizer, 0, STEPS) == reference(STEPS)[0]
    zo.close(model)


def test_a_program_that_never_calls_commit(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _wish(monkeypatch, [2] * 9)
    monkeypatch.setattr(zo, "commit", lambda *args, **kwargs: None)
    assert committed_steps(nvme, 13) == [4, 6, 8, 10, 12]


# Several ranks


def train_by_own_clock(rank: int, world_size: int, case: Case, seed: int) -> tuple[list[int], Outcome]:
    """Steps whose commits this rank began, by a clock that jumps; and what was trained."""
    clock, now, begun = random.Random(1000 * seed + rank), [0.0], list[int]()

    def tick() -> float:
        now[0] += clock.choice([0.001, 0.01, 0.1, 1.0, 30.0])
        return now[0]

    commit = GenerationKeeper.commit

    def record(keeper: GenerationKeeper, record: StepRecord, *args: Any) -> None:
        begun.append(record.step)
        commit(keeper, record, *args)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(stats, "time", SimpleNamespace(perf_counter=tick))
        patches.setattr(GenerationKeeper, "commit", record)
        return begun, ranks.train(rank, world_size, case)


@pytest.mark.parametrize("settings", [{"optimizer": "cpu"}, {"optimizer": "nvme", "params": "nvme"}], ids=str)
def test_ranks_commit_the_same_steps_by_whatever_clocks(settings: dict[str, Any], nvme: Path, pool: RankPool) -> None:
    everything = settings | {"nvme": nvme, "existing": "discard"}
    expected = pool.succeed(ranks.train, Case(everything | {"commit_every": 100}, num_steps=STEPS))
    intervals: set[int] = set()
    for seed in (0, 3):
        case = Case(everything | {"commit_every": "auto"}, num_steps=STEPS)
        found = pool.succeed(train_by_own_clock, case, seed)
        assert [outcome for _, outcome in found] == expected
        (begun,) = {tuple(steps) for steps, _ in found}
        assert begun[0] == INTERVAL_FIRST and begun[-1] == STEPS
        gaps = [after - before for before, after in pairwise((0, *begun))]
        # The last one is cut off by `close`.
        assert all(earliest(a) <= b <= GROWTH_MAX * a for a, b in pairwise(gaps[:-1]))
        intervals |= set(gaps)
    assert len(intervals) > 2


def wish_differently(rank: int, world_size: int, case: Case) -> list[int]:
    """The ranks wish different intervals; steps whose commits this rank began."""
    wishes, begun = [[2, 1, 9], [1, 3, 2]][rank], list[int]()
    commit = GenerationKeeper.commit

    def record(keeper: GenerationKeeper, record: StepRecord, *args: Any) -> None:
        begun.append(record.step)
        commit(keeper, record, *args)

    with pytest.MonkeyPatch.context() as patches:
        _wish(patches, [*wishes, 1, 1, 1, 1])
        patches.setattr(GenerationKeeper, "commit", record)
        ranks.train(rank, world_size, case)
    return begun


def test_the_longest_wish_holds_for_all(nvme: Path, pool: RankPool) -> None:
    case = Case({"optimizer": "nvme", "nvme": nvme, "commit_every": "auto"}, num_steps=19)
    assert pool.succeed(wish_differently, case) == [[4, 6, 9, 18, 19]] * WORLD_SIZE
