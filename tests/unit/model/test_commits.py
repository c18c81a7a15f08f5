"""When a step is due, with everything behind it made up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import zero_offload as zo
from zero_offload.checkpoint import commit_clock
from zero_offload.checkpoint.format import StepRecord
from zero_offload.model.commits import Commits
from zero_offload.model.iterations import Iterations
from zero_offload.runtime.ranks.collectives import CommitGroup
from zero_offload.runtime.ranks.group import RankGroup


class Runtime:
    """Stands for the store, the keeper and both workers: jobs run at once, and a commit ends after `lasts` steps."""

    def __init__(self, lasts: int = 0) -> None:
        self.step = 0
        self.lasts = lasts
        self.committed: list[tuple[int, Any]] = []
        self.publisher: Any = None

    @property
    def num_ended(self) -> int:
        return sum(step + self.lasts <= self.step for step, _ in self.committed)

    def submit(self, job: Callable[[], None]) -> None:
        job()

    def take(self, order: tuple[int, ...]) -> tuple[int, ...]:
        return order

    def commit(self, record: StepRecord, snapshot: tuple[int, ...], part: object) -> None:
        assert snapshot == (2, 1, 0)
        self.committed.append((record.step, record.extra))

    def commits(self, every: int | str, *, is_first_rank: bool = True) -> Commits:
        fake: Any = self
        ranks = CommitGroup(RankGroup.of(zo.OffloadConfig()))
        ranks.rank = 0 if is_first_rank else 1
        return Commits(fake, fake, (fake, fake), lambda: (2, 1, 0), every, Iterations(), ranks)


def _record(step: int, extra: Any = None) -> StepRecord:
    return StepRecord(step, {}, [], None if extra is None else {}, extra, None, {})


def _run(runtime: Runtime, commits: Commits, num_steps: int, begin: int = 0) -> None:
    commits.start()
    for runtime.step in range(begin + 1, begin + num_steps + 1):
        commits.note_due(commits.is_due_by_clock())
        commits.add(_record(runtime.step), 1.0, 0.0)
        commits.complete_record(lambda: _record(runtime.step, f"after {runtime.step}"))


@pytest.fixture(name="runtime")
def _runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Whose steps take 10 s."""
    runtime = Runtime()
    monkeypatch.setattr(commit_clock, "time", SimpleNamespace(monotonic=lambda: 10.0 * runtime.step))
    return runtime


def test_a_duration_commits_the_first_step_that_reaches_it(runtime: Runtime) -> None:
    _run(runtime, runtime.commits("25s"), 10)
    assert runtime.committed == [(step, f"after {step}") for step in (3, 6, 9)]


def test_a_duration_begins_where_a_run_goes_on(runtime: Runtime) -> None:
    commits = runtime.commits("25s")
    runtime.step = 101
    _run(runtime, commits, 7, begin=101)
    assert [step for step, _ in runtime.committed] == [104, 107]


def test_no_commit_is_due_by_the_clock_while_another_runs(runtime: Runtime) -> None:
    runtime.lasts = 5
    _run(runtime, runtime.commits("25s"), 14)
    assert [step for step, _ in runtime.committed] == [3, 8, 13]


def test_a_commit_that_was_made_before_the_first_step_does_not_count(runtime: Runtime) -> None:
    """Of files that were cut anew."""
    runtime.committed.append((0, "cut anew"))
    _run(runtime, runtime.commits("25s"), 7)
    assert [step for step, _ in runtime.committed] == [0, 3, 6]


def test_other_ranks_do_as_the_first_one_says(runtime: Runtime) -> None:
    commits = runtime.commits("25s", is_first_rank=False)
    for runtime.step in range(1, 9):
        assert not commits.is_due_by_clock()
        commits.note_due(runtime.step in (2, 7))
        commits.add(_record(runtime.step), 1.0, 0.0)
        commits.complete_record(lambda: _record(runtime.step, f"after {runtime.step}"))
    assert [step for step, _ in runtime.committed] == [2, 7]


@pytest.mark.parametrize("every", [1, 3])
def test_a_number_counts_steps(every: int, runtime: Runtime) -> None:
    _run(runtime, runtime.commits(every), 7, begin=1)
    assert [step for step, _ in runtime.committed] == [step for step in range(2, 9) if step % every == 0]


def test_what_is_left_at_the_end(runtime: Runtime) -> None:
    commits = runtime.commits(10)
    _run(runtime, commits, 2)
    commits.launch_latest()
    commits.launch_latest()
    assert runtime.committed == [(2, "after 2")]
    commits.add(_record(3), 1.0, 0.0)
    commits.drop_unresumable()
    commits.launch_latest()
    assert runtime.committed == [(2, "after 2")]


@pytest.mark.parametrize("every", [2, "15s"])
def test_a_program_that_never_completes_its_steps(every: int | str, runtime: Runtime) -> None:
    commits = runtime.commits(every)
    for runtime.step in (1, 2):
        commits.launch_due()
        commits.note_due(commits.is_due_by_clock())
        commits.add(_record(runtime.step), 1.0, 0.0)
    assert not runtime.committed and not commits.completes
    commits.launch_due()
    commits.drop_unresumable()
    assert runtime.committed == [(2, None)]


def _step(commits: Commits, runtime: Runtime) -> None:
    """As the model's runtime does it, by a program that never completes its steps."""
    runtime.step += 1
    commits.launch_due()
    commits.forget_record()
    commits.add(_record(runtime.step), 1.0, 0.0)


def test_a_step_whose_states_are_replaced_is_left_out_and_the_next_takes_its_place(runtime: Runtime) -> None:
    commits = runtime.commits(2)
    for _ in range(2):
        _step(commits, runtime)
    commits.set_aside()  # step 2 is due
    _step(commits, runtime)
    assert not runtime.committed
    _step(commits, runtime)
    assert [step for step, _ in runtime.committed] == [3]


def test_a_due_step_waits_where_only_replaced_states_are_there(runtime: Runtime) -> None:
    """The commit of a step that broke off is made by the next one."""
    commits = runtime.commits(2)
    for _ in range(2):
        _step(commits, runtime)
    commits.forget_record()  # step 3 began, and broke off
    commits.set_aside()
    commits.launch_due()
    _step(commits, runtime)
    commits.launch_due()
    assert [step for step, _ in runtime.committed] == [3]


def test_a_program_says_that_replaced_states_are_the_steps(runtime: Runtime) -> None:
    commits = runtime.commits(2)
    for _ in range(2):
        _step(commits, runtime)
    commits.set_aside()
    commits.complete_record(lambda: _record(2, "replaced"))
    assert runtime.committed == [(2, "replaced")]
