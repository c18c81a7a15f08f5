"""When commits are due by made-up clocks: after a duration, or so that they cost 2% of the time."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest

from zero_offload.checkpoint import commit_clock
from zero_offload.checkpoint.commit_clock import BESIDE_MAX, COST_SHARE_MAX, GROWTH_MAX, PLAIN_MIN, CommitClock


class Run:
    """Steps beside a clock, each by default without noise; a commit costs the step after it."""

    def __init__(self, patches: pytest.MonkeyPatch, every: str) -> None:
        self.now_s = 0.0
        patches.setattr(commit_clock, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.clock = CommitClock(every)
        self.num_steps = 0
        self.commits: list[int] = []
        """Steps that became generations."""
        self.times_s: list[float] = []
        self.is_beside = False

    def go(
        self,
        num_steps: int,
        step_s: float,
        wait_s: float = 0.0,
        slower_s: float = 0.0,
        noise: Callable[[], float] = lambda: 1.0,
    ) -> Run:
        for _ in range(num_steps):
            length_s = step_s * noise() + (wait_s + slower_s) * self.is_beside
            self.now_s += length_s
            is_due = self.clock.is_due()
            self.clock.add(length_s, wait_s * self.is_beside, is_beside=self.is_beside, is_over=True)
            self.num_steps += 1
            self.is_beside = is_due
            if is_due:
                self.commits.append(self.num_steps)
                self.times_s.append(self.now_s)
                self.clock.restart()
        return self

    @property
    def intervals(self) -> list[int]:
        return [after - before for before, after in pairwise(self.commits)]


def test_a_duration_is_over_with_the_first_step_that_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Run(monkeypatch, "25s").go(9, 10.0).commits == [3, 6, 9]
    assert Run(monkeypatch, "2min").go(5, 60.0, wait_s=500.0).commits == [2, 3, 4, 5]
    assert Run(monkeypatch, "1h").go(35, 100.0).commits == []


@pytest.mark.parametrize(("wait_s", "slower_s"), [(0.29, 0.0), (0.0, 0.29), (0.1, 0.19)])
def test_a_commit_costs_two_percent_of_the_steps_it_serves(
    wait_s: float, slower_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2% of 14.5 s. The step beside the commit has 1.29 of them.
    assert Run(monkeypatch, "auto").go(200, 1.0, wait_s, slower_s).intervals[-3:] == [15, 15, 15]


@pytest.mark.parametrize("cost_share", [0.001, 0.019, 0.51, 3.03])
def test_the_bound_holds_whatever_a_commit_costs(cost_share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, "auto").go(1000, 0.2, 0.2 * cost_share)
    length_s = run.times_s[-1] - run.times_s[-2]
    cost_s = 0.2 * cost_share
    assert cost_s / length_s <= COST_SHARE_MAX * 1.0001
    assert run.intervals[-1] == 1 or cost_s / (length_s - 0.2) > COST_SHARE_MAX


def test_free_commits_come_with_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, "auto").go(60, 1.0)
    assert run.commits[0] == PLAIN_MIN + 2  # after the step that fills pools
    assert run.intervals.count(1) >= len(run.intervals) - 4 and max(run.intervals) <= run.commits[0]


def test_it_looks_anew_what_a_step_takes_without_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps get faster by as much as commits cost: beside those alone it could not be told."""
    run = Run(monkeypatch, "auto").go(20, 1.5)
    assert run.intervals[-1] == 1
    run.go(40 * BESIDE_MAX, 1.0, wait_s=0.0, slower_s=0.5)
    assert run.intervals[-1] == 25


def test_noise_does_not_send_it_far(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = random.Random(0)

    def noise() -> float:
        return 1 + clock.uniform(-0.05, 0.05)

    assert max(Run(monkeypatch, "auto").go(200, 1.0, noise=noise).intervals) <= 2 * (PLAIN_MIN + 2)
    assert 10 <= Run(monkeypatch, "auto").go(600, 1.0, 0.3, noise=noise).intervals[-1] <= 20


def test_it_grows_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, "auto").go(3000, 1.0, 20.0)
    lengths_s = [after - before for before, after in pairwise([0.0, *run.times_s])]
    assert len(lengths_s) > 5 and lengths_s[-1] == 1000
    # It ends with the first step that reaches it.
    assert all(after <= max(GROWTH_MAX * before, 21) for before, after in pairwise(lengths_s))


def test_one_slow_commit_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, "auto").go(60, 1.0, 0.1)
    assert run.intervals[-1] == 5
    slow = len(run.commits)
    while len(run.commits) == slow:
        run.go(1, 1.0, 0.1)
    run.go(1, 1.0, 99.0)
    run.go(60, 1.0, 0.1)
    assert max(run.intervals) <= 5 and len(run.commits) >= slow + 10


def test_without_a_measure_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, "auto")
    run.now_s = 1e6
    assert not run.clock.is_due()
    run.go(PLAIN_MIN + 1, 1.0)
    assert not run.commits
