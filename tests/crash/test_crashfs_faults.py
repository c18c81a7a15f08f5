"""A drive that refuses, or a rank that dies, anywhere in a run: no commit, no second try, and the last one loads.

On the disk in memory of the crash tests, under the real worker where it is about how a run ends.
"""

from __future__ import annotations

import errno
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.helpers import crash_run
from tests.helpers.crash_disk import Link, Op, Rename, Resize, Sync, Write
from tests.helpers.crash_run import History, Run, Setup, describe, judge, play
from tests.helpers.crashfs import CrashFS
from tests.helpers.crew import Crew, Killed
from zero_offload.base.errors import CapacityError, RankError, StorageError, ZeroOffloadError
from zero_offload.base.threads import FirstError
from zero_offload.base.types import Durability
from zero_offload.checkpoint.format import GENERATION_NAMES
from zero_offload.optim.worker import Worker
from zero_offload.plan.layout import SHARD_NUMEL

COMMIT, PROCESS = Setup(Durability.COMMIT), Setup(Durability.PROCESS)
RANKS = replace(COMMIT, world_size=2)
STEPS = 3


def _is_block(op: Op) -> bool:
    return isinstance(op, Write) and len(op.data) % (SHARD_NUMEL * 4) == 0


FAULTS: dict[str, tuple[int, Callable[[Op], bool]]] = {
    "a flush, EIO": (errno.EIO, lambda op: isinstance(op, Sync)),
    "a small file, ENOSPC": (errno.ENOSPC, lambda op: isinstance(op, Write) and not _is_block(op)),
    "a name, ENOSPC": (errno.ENOSPC, lambda op: isinstance(op, Link)),
    "a rename, EACCES": (errno.EACCES, lambda op: isinstance(op, Rename)),
    "a rename, EROFS": (errno.EROFS, lambda op: isinstance(op, Rename)),
    "room for a file, ENOSPC": (errno.ENOSPC, lambda op: isinstance(op, Resize) and op.nbytes > 0),
    "a block, EIO": (errno.EIO, _is_block),
    "a block, ENOSPC": (errno.ENOSPC, _is_block),
}


class _WorkedRun(Run):
    """Steps and commits are jobs of the real worker; after an error it is asked for more, as by a careless user."""

    @functools.cached_property
    def _worker(self) -> Worker:
        return Worker(FirstError())

    def train(self) -> None:
        self._do(super().train)

    def commit(self) -> None:
        self._do(super().commit)

    def _do(self, job: Callable[[], None]) -> None:
        try:
            self._worker.submit(job)
            self._worker.drain()
        except ZeroOffloadError as error:
            num_operations = len(self.fs.journal)
            for again in (super().train, super().commit):
                with pytest.raises(type(error)) as caught:
                    self._worker.submit(again)
                assert str(caught.value) == str(error)
            self._worker.shutdown()
            assert len(self.fs.journal) == num_operations
            raise

    @property
    def fs(self) -> CrashFS:
        system = self.keeper._home.system
        assert isinstance(system, CrashFS)
        return system


def _places(setup: Setup, chosen: Callable[[Op], bool]) -> list[int]:
    """The operations of a run in which nothing goes wrong that are of this kind."""
    journal = play(CrashFS(), setup, STEPS, 0).fs.journal
    return [k for k, op in enumerate(journal) if chosen(op)]


def _play_with_fault(setup: Setup, place: int, code: int) -> History:
    """A run in which that operation fails, once."""
    fs, failures = CrashFS(), itertools.count()
    fs.fault = lambda op: code if len(fs.journal) == place and next(failures) == 0 else None
    return play(fs, setup, STEPS, 0)


def _check_fault(setup: Setup, place: int, code: int) -> None:
    history = _play_with_fault(setup, place, code)
    _check_errors(history)
    # Not tried again: blocks under way may land and unfinished files go, but nothing is flushed or named any more.
    later = [op for op in history.fs.journal[place:] if isinstance(op, Sync | Link | Rename)]
    if setup.world_size == 1:
        assert later == [], [describe(op) for op in later]
    _check_what_is_left(history)


def _check_errors(history: History) -> None:
    """Every rank has stopped, and some rank says what the drive refused."""
    assert len(history.errors) == history.setup.world_size
    assert all(isinstance(each, StorageError | CapacityError | RankError) for each in history.errors), history.errors
    assert not all(isinstance(each, RankError) for each in history.errors)


def _check_what_is_left(history: History) -> None:
    """The last commit, or the failed commit if that was named already; after power loss and without."""
    named = sum(isinstance(op, Rename) and op.name in GENERATION_NAMES for op in history.fs.journal)
    reported = history.promised(len(history.fs.journal))
    assert reported <= named <= reported + 1
    left = [history.fs.disk()]
    if history.setup.durability is Durability.COMMIT:
        left += [left[0].without_power(None, seed) for seed in range(4)]
    for disk in {disk.digest(): disk for disk in left}.values():
        verdict, step, sequel = judge(disk, history.setup, 0)
        assert verdict == "good", sequel.summary()
        assert step in (reported, named)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_drive_refuses_ends_the_run(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_run, "Run", _WorkedRun)
    code, chosen = FAULTS[fault]
    places = _places(COMMIT, chosen)
    assert places
    for place in places[:: 3 if len(places) > 6 else 1]:
        _check_fault(COMMIT, place, code)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_drive_refuses_one_rank_ends_all(fault: str) -> None:
    code, chosen = FAULTS[fault]
    places = _places(RANKS, chosen)
    for place in places[:: max(len(places) // 2, 1)]:
        _check_fault(RANKS, place, code)


@pytest.mark.parametrize("setup", [COMMIT, PROCESS, RANKS], ids=str)
def test_a_drive_that_turns_read_only_ends_the_run(setup: Setup) -> None:
    """As some do after an error: nothing can be changed any more, nor tidied up."""
    num_operations = len(play(CrashFS(), setup, STEPS, 0).fs.journal)
    for place in range(0, num_operations, 11 * setup.world_size):
        fs = CrashFS()
        fs.fault = lambda op, fs=fs, place=place: errno.EROFS if len(fs.journal) >= place else None
        history = play(fs, setup, STEPS, 0)
        _check_errors(history)
        _check_what_is_left(history)


@pytest.mark.full
@pytest.mark.parametrize("setup", [COMMIT, RANKS, replace(PROCESS, world_size=2), PROCESS], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_the_drive_refuses_any_rank(fault: str, setup: Setup) -> None:
    code, chosen = FAULTS[fault]
    for place in _places(setup, chosen):
        _check_fault(setup, place, code)


def test_an_error_says_what_was_refused_and_where() -> None:
    (place, *_) = _places(COMMIT, FAULTS["a rename, EROFS"][1])
    (error,) = _play_with_fault(COMMIT, place, errno.EROFS).errors
    assert "cannot write /drive/run/run.json: Read-only file system" in str(error)
    place = _places(COMMIT, FAULTS["a flush, EIO"][1])[-1]
    (error,) = _play_with_fault(COMMIT, place, errno.EIO).errors
    assert "cannot flush /drive/run: Input/output error" in str(error)


# A rank dies


def _play_with_death(setup: Setup, victim: int, place: int) -> History:
    """That rank is killed when it is about to do what would be that operation, or its next one."""
    fs = CrashFS()

    def watch(crew: Crew) -> None:
        dead: list[int] = []

        def call() -> None:
            if crew.rank in dead:
                raise Killed
            crew.turn()
            if crew.rank in dead:
                raise Killed

        def fault(op: Op) -> None:
            if crew.rank == victim and (dead or len(fs.journal) >= place):
                dead.append(victim)
                raise Killed

        fs.before_call, fs.fault = call, fault

    return play(fs, setup, STEPS, 0, watch)


def _deaths(setup: Setup, every: int) -> Iterator[History]:
    begin, end = _last_commit(setup)
    for victim in range(setup.world_size):
        for place in range(begin, end, every):
            history = _play_with_death(setup, victim, place)
            if isinstance(history.outcomes[victim], Killed):
                yield history


def _last_commit(setup: Setup) -> tuple[int, int]:
    """The operations from the last step but one being reported to the end."""
    history = play(CrashFS(), setup, STEPS, 0)
    return max(at for at, step in history.reported if step == STEPS - 1), len(history.fs.journal)


def _check_deaths(setup: Setup, every: int) -> int:
    count = 0
    for history in _deaths(setup, every):
        others = [each for each in history.outcomes if not isinstance(each, Killed)]
        assert len(others) == setup.world_size - 1
        for each in others:
            assert isinstance(each, RankError), "a rank has committed without another"
        assert STEPS not in [step for _, step in history.reported]
        _check_what_is_left(history)
        count += 1
    return count


def test_a_rank_dies_in_a_commit() -> None:
    assert _check_deaths(RANKS, 7) > 4


@pytest.mark.full
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("setup", [COMMIT, PROCESS], ids=str)
def test_a_rank_dies_at_every_stage_of_a_commit(setup: Setup, world_size: int) -> None:
    setup = replace(setup, world_size=world_size)
    count = _check_deaths(setup, 1)
    print(f"| {setup}, one dies in a commit | {count} | 0 |")
    assert count > 10  # 16 of two ranks that flush nothing
