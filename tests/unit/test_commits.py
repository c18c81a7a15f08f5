"""When a step is due, with everything behind it made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zero_offload.checkpoint.format import StepRecord
from zero_offload.commits import Commits
from zero_offload.plan.commit_interval import INTERVAL_FIRST


class Ranks:
    """Stands for the store, the keeper and both workers: jobs run at once, and what all ranks have agreed on is known
    when somebody waits for it, not before.
    """

    def __init__(self, agreed: list[int]) -> None:
        self.agreed = agreed
        self.agreed_wish = 10**6
        self.num_ended = 0
        self.step = 0
        self.waited_at: list[int] = []
        self.committed: list[tuple[int, Any]] = []

    def submit(self, job: Callable[[], None]) -> None:
        job()

    def begin(self, order: tuple[int, ...]) -> tuple[int, ...]:
        return order

    def commit(self, record: StepRecord, snapshot: tuple[int, ...], wish: int) -> None:
        assert snapshot == (2, 1, 0)
        self.committed.append((record.step, record.extra))

    def wait_for_end(self, number: int) -> None:
        assert number == len(self.committed)
        self.waited_at.append(self.step)
        self.num_ended, self.agreed_wish = number, self.agreed[number - 1]


def _record(step: int, extra: Any = None) -> StepRecord:
    return StepRecord(step, {}, [], None if extra is None else {}, extra, None, {})


def _run(ranks: Ranks, num_steps: int, every: int | str, begin: int = 0) -> Commits:
    fake: Any = ranks
    commits = Commits(fake, fake, (fake, fake), lambda: (2, 1, 0), every)
    commits.start_at(begin)
    for ranks.step in range(begin + 1, begin + num_steps + 1):
        commits.add(_record(ranks.step), 1.0, 0.0)
        commits.complete(lambda: _record(ranks.step, f"after {ranks.step}"))
    return commits


def test_auto_commits_what_all_have_agreed_on() -> None:
    ranks = Ranks([2, 5, 5, 99])
    _run(ranks, 20, "auto")
    assert ranks.committed == [(step, f"after {step}") for step in (4, 6, 11, 16)]
    # Half an interval after each: until then it cannot be due.
    assert ranks.waited_at == [6, 7, 13, 18]


def test_auto_does_not_wait_for_a_commit_that_was_made_before_the_first_step() -> None:
    """Of files that were cut anew."""
    ranks = Ranks([0, 2, 5, 5, 99])
    ranks.committed.append((0, "cut anew"))
    ranks.num_ended = 1
    _run(ranks, 20, "auto")
    assert [step for step, _ in ranks.committed] == [0, 4, 6, 11, 16]
    assert ranks.waited_at == [6, 7, 13, 18]


def test_auto_counts_from_where_a_run_goes_on() -> None:
    ranks = Ranks([4])
    _run(ranks, 7, "auto", begin=101)
    assert ranks.committed == [(101 + INTERVAL_FIRST, f"after {101 + INTERVAL_FIRST}")]


@pytest.mark.parametrize("every", [1, 3])
def test_a_number_counts_steps_and_waits_for_nobody(every: int) -> None:
    ranks = Ranks([])
    _run(ranks, 7, every, begin=1)
    assert [step for step, _ in ranks.committed] == [step for step in range(2, 9) if step % every == 0]
    assert not ranks.waited_at


def test_what_is_left_at_the_end() -> None:
    ranks = Ranks([])
    commits = _run(ranks, 2, 10)
    commits.launch_latest()
    commits.launch_latest()
    assert ranks.committed == [(2, "after 2")]
    commits.add(_record(3), 1.0, 0.0)
    commits.forget_unfit()
    commits.launch_latest()
    assert ranks.committed == [(2, "after 2")]


def test_a_program_that_never_completes_its_steps() -> None:
    ranks = Ranks([])
    fake: Any = ranks
    commits = Commits(fake, fake, (fake, fake), lambda: (2, 1, 0), 2)
    for step in (1, 2):
        commits.launch_due()
        commits.add(_record(step), 1.0, 0.0)
    assert not ranks.committed and not commits.completes
    commits.launch_due()
    commits.forget_unfit()
    assert ranks.committed == [(2, None)]
