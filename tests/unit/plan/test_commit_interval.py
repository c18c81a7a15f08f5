"""What commits cost by made-up clocks, and the interval that follows."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from zero_offload.plan.commit_interval import (
    COST_SHARE_MAX,
    GROWTH_MAX,
    INTERVAL_FIRST,
    INTERVAL_MAX,
    CommitInterval,
    StepTime,
    earliest,
)


def run(
    num_commits: int, step_s: float, wait_s: float, slower_s: float, noise: float = 0.0, interval: int = INTERVAL_FIRST
) -> list[int]:
    """Intervals of a run in which each commit costs one step so much more; the first has a long first step."""
    policy, clock = CommitInterval(), random.Random(0)
    policy.add(StepTime(50 * step_s, 0.0, beside_commit=False))
    intervals, beside, left = [], False, interval - 1
    for _ in range(num_commits):
        for _ in range(left):
            length = step_s * (1 + noise * clock.uniform(-1, 1)) + (wait_s + slower_s) * beside
            policy.add(StepTime(length, wait_s * beside, beside))
            beside = False
        interval = left = policy.wish(interval)
        intervals.append(interval)
        beside = True
    return intervals


@pytest.mark.parametrize(("wait_s", "slower_s"), [(0.29, 0.0), (0.0, 0.29), (0.1, 0.19)])
def test_a_commit_costs_two_percent_of_the_steps_it_serves(wait_s: float, slower_s: float) -> None:
    # 2% of 1 s each.
    assert run(12, 1.0, wait_s, slower_s)[-1] == 15


@pytest.mark.parametrize("cost_share", [0.001, 0.019, 0.51, 3.03])
def test_the_bound_holds_whatever_a_commit_costs(cost_share: float) -> None:
    interval = run(12, 0.2, 0.2 * cost_share, 0.0)[-1]
    assert cost_share / interval <= COST_SHARE_MAX
    assert interval == 1 or cost_share / (interval - 1) > COST_SHARE_MAX


def test_free_commits_come_with_every_step() -> None:
    assert run(4, 1.0, 0.0, 0.0) == [4, 2, 1, 1]


def test_noise_does_not_send_it_far() -> None:
    assert max(run(40, 1.0, 0.0, 0.0, noise=0.05)) <= 2 * INTERVAL_FIRST
    assert 10 <= run(40, 1.0, 0.3, 0.0, noise=0.05)[-1] <= 20


def test_it_grows_by_steps_and_ends_at_its_limit() -> None:
    intervals = run(8, 1.0, 500.0, 0.0)
    assert intervals[:4] == [4, 16, 64, 256] and intervals[-1] == INTERVAL_MAX
    assert all(after <= GROWTH_MAX * before for before, after in pairwise(intervals))


def test_one_slow_commit_is_forgotten() -> None:
    policy, interval = CommitInterval(), 8
    wishes = []
    for number in range(6):
        policy.add(StepTime(100.0 if number == 2 else 1.0, 0.0, beside_commit=True))
        for _ in range(7):
            policy.add(StepTime(1.0, 0.0, beside_commit=False))
        wishes.append(interval := policy.wish(interval))
    assert max(wishes) <= 8 and wishes[-1] == 1


def test_it_shrinks_by_halves_at_most() -> None:
    assert earliest(1) == earliest(2) == earliest(3) == 1 and earliest(1000) == 500
    for interval in (1, 2, 3, 7, 100, INTERVAL_MAX):
        policy = CommitInterval()
        for beside in (False, False, True):
            policy.add(StepTime(1.0, 0.0, beside))
        assert policy.wish(interval) == earliest(interval)


def test_without_a_measure_it_stays() -> None:
    policy = CommitInterval()
    assert policy.wish(6) == 6
    policy.add(StepTime(9.0, 0.0, beside_commit=False))
    policy.add(StepTime(1.0, 0.0, beside_commit=True))
    assert policy.wish(6) == 6  # nothing to compare with
    policy.add(StepTime(0.0, 0.0, beside_commit=False))
    assert policy.wish(6) == 6
