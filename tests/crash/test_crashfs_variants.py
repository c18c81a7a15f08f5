"""The crash test has teeth: each order of a commit that lacks one barrier fails it.

A variant is the real code with one piece taken out. The outcome is one of these: "unrecoverable" (an error says so),
"older than promised" (a reported step is gone) or "wrong states" (without an error).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.helpers import crash_run
from tests.helpers.crash_disk import Sync
from tests.helpers.crash_engine import CrashEngine
from tests.helpers.crash_run import Crash, History, Plan, Run, Setup, Tally, explore, play
from tests.helpers.crashfs import CrashFS
from zero_offload.base.types import Durability
from zero_offload.checkpoint import file_list, generation
from zero_offload.checkpoint.format import GENERATION_NAMES, rank_manifest_name
from zero_offload.checkpoint.generation import GenerationKeeper
from zero_offload.storage.files import manifest
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.manifest import read_manifest, write_manifest
from zero_offload.storage.files.swap_file import SwapFile
from zero_offload.storage.shards.shard import Shard
from zero_offload.storage.shards.snapshot import Snapshots

COMMIT, PROCESS = Setup(Durability.COMMIT), Setup(Durability.PROCESS)
RANKS, THIRD = replace(COMMIT, world_size=2), replace(COMMIT, interval=3)
MACHINES = replace(RANKS, own_drives=True)
POWER, KILL = Plan(Crash.POWER, range(24)), Plan(Crash.KILL, range(12))
Patch = Callable[[], AbstractContextManager[Any]]


def _nothing(*args: Any) -> None:
    """Instead of a flush."""


def _without(owner: object, name: str) -> Patch:
    return lambda: mock.patch.object(owner, name, _nothing)


def _unflushed_manifests() -> AbstractContextManager[Any]:
    real = manifest._write_file
    return mock.patch.object(manifest, "_write_file", lambda *args: real(*args[:3], Durability.PROCESS))


def _manifests_in_place() -> AbstractContextManager[Any]:
    real = manifest._write_file

    def write(directory: RunDirectory, name: str, content: bytes, durability: Durability) -> None:
        real(directory, name.removesuffix(".tmp"), content, durability)
        real(directory, name, content, durability)

    return mock.patch.object(manifest, "_write_file", write)


def _only_the_first_directory() -> AbstractContextManager[Any]:
    real = RunDirectory.sync
    return mock.patch.object(
        RunDirectory, "sync", lambda self, *files: real(self, *files) if self.path.parts[1] == "a" else None
    )


class _HastyRun(Run):
    """Begins the next step when its commit is not acknowledged yet, in the slots of the one before."""

    ahead = False

    def commit(self) -> None:
        with mock.patch.object(generation, "write_manifest", self._write):
            super().commit()

    def _write(self, directory: RunDirectory, name: str, *args: Any) -> str:
        if name in GENERATION_NAMES:
            self.store.mark_committed([shard.current for shard in self.store.shards])
            step = self.step
            with mock.patch.object(Snapshots, "wait_for_slots", _nothing):
                super().train()
            self.step, self.ahead = step, True
        return write_manifest(directory, name, *args)

    def train(self) -> None:
        if self.ahead:
            self.step, self.ahead = self.step + 1, False
        else:
            super().train()


class _CarelessRun(Run):
    """Does not wait for its writes before a commit names them."""

    def commit(self) -> None:
        with mock.patch.object(Shard, "wait_for_writes", _nothing):
            super().commit()


@dataclass
class _Alone:
    """As `CommitGroup`, but it does not wait for other ranks."""

    rank: int
    world_size: int

    def gather_digests(self, digest: str) -> list[str]:
        return [digest] * self.world_size

    @contextmanager
    def together(self) -> Iterator[None]:
        yield


class _LonelyRun(Run):
    """Commits when it likes: the global manifest does not wait for the other ranks'."""

    def commit(self) -> None:
        ranks = self.keeper._ranks
        self.keeper._ranks = _Alone(ranks.rank, ranks.world_size)  # type: ignore[arg-type]
        super().commit()
        self.keeper._ranks = ranks


def _unchecked() -> AbstractContextManager[Any]:
    """Digests of others are not known, so none is looked at."""
    return mock.patch.object(generation, "read_manifest", lambda home, name, *_: read_manifest(home, name))


def _newest() -> AbstractContextManager[Any]:
    """Nor is the global manifest: a rank goes on from the newest of its own."""

    def newest(keeper: GenerationKeeper) -> dict[str, Any]:
        names = [rank_manifest_name(keeper._ranks.rank, number) for number in (0, 1)]
        found = [read_manifest(keeper._home, name) for name in names]
        return max((each for each in found if each is not None), key=lambda payload: int(payload["step"]))

    return mock.patch.object(GenerationKeeper, "rank_payload", newest)


def _own_newest() -> AbstractContextManager[Any]:
    """No word of other machines counts."""

    def spread(keeper: GenerationKeeper, number: int | None) -> Any:
        newest = None if keeper._history is None else keeper._history.newest
        keeper.holders = {rank: rank for rank in range(keeper._ranks.world_size)}
        return None if newest is None else SimpleNamespace(identity=newest.identity)

    return mock.patch.object(GenerationKeeper, "spread", spread)


def _no_checksums() -> AbstractContextManager[Any]:
    return mock.patch.object(CrashEngine, "_read_verified", CrashEngine._read)


NO_FDATASYNC = _without(SwapFile, "sync")


def _runs_as(kind: type[Run]) -> Patch:
    return lambda: mock.patch.object(crash_run, "Run", kind)


@dataclass(frozen=True)
class Variant:
    setup: Setup
    plan: Plan
    patch: Patch
    """The piece that the crashing run lacks."""
    verdicts: frozenset[str]
    """Verdicts that must be among the outcomes."""
    recovery: Patch = contextlib.nullcontext
    """The piece that its successors lack too."""


LOST, OLDER, WRONG = "unrecoverable", "older than promised", "wrong states"
HASTY, LONELY = _runs_as(_HastyRun), _runs_as(_LonelyRun)
NO_FLUSH_FOUND = _without(GenerationKeeper, "_flush_found")
VARIANTS = {
    "no fdatasync before the rank manifest": Variant(COMMIT, POWER, NO_FDATASYNC, frozenset({LOST})),
    "no fdatasync, no checksums": Variant(COMMIT, POWER, NO_FDATASYNC, frozenset({WRONG}), _no_checksums),
    "manifests not flushed": Variant(COMMIT, POWER, _unflushed_manifests, frozenset({LOST})),
    "directory not flushed": Variant(COMMIT, POWER, _without(RunDirectory, "sync"), frozenset({LOST, OLDER})),
    "second directory not flushed": Variant(
        replace(COMMIT, directories=("/a/run", "/b/run")), POWER, _only_the_first_directory, frozenset({LOST})
    ),
    "path to the directory not flushed": Variant(COMMIT, POWER, _without(file_list, "sync_path"), frozenset({OLDER})),
    "slot reused before the commit is acknowledged": Variant(COMMIT, POWER, HASTY, frozenset({LOST})),
    "slot reused, no checksums": Variant(COMMIT, POWER, HASTY, frozenset({WRONG}), _no_checksums),
    "one slot, written in place": Variant(
        THIRD, POWER, lambda: mock.patch.object(Shard, "writable_slot", lambda shard: 0), frozenset({LOST})
    ),
    "writes not waited for": Variant(PROCESS, KILL, _runs_as(_CarelessRun), frozenset({WRONG})),
    "manifests written in place": Variant(PROCESS, KILL, _manifests_in_place, frozenset({LOST})),
    "global manifest before the other rank's": Variant(RANKS, POWER, LONELY, frozenset({LOST}), _unchecked),
    "ranks commit alone, each its own manifest": Variant(RANKS, POWER, LONELY, frozenset({WRONG}), _newest),
    "machines go on from their own newest generations": Variant(
        MACHINES, POWER, contextlib.nullcontext, frozenset({LOST}), _own_newest
    ),
    "what a resume found is not flushed": Variant(
        COMMIT,
        Plan(Crash.KILL, range(1), then=Plan(Crash.POWER, range(8))),
        NO_FLUSH_FOUND,
        frozenset({LOST, OLDER}),
        NO_FLUSH_FOUND,
    ),
}


def _explore(variant: Variant, narrow: Callable[[Plan, int], Plan] = lambda plan, _: plan) -> Tally:
    """`narrow` may change the plan, given the number of operations."""
    with variant.patch():
        history = play(CrashFS(), variant.setup, 6, 0)
    assert history.errors == []
    with variant.recovery():
        return explore(history, narrow(variant.plan, len(history.fs.journal)))


def _to_the_first(plan: Plan, num_operations: int) -> Plan:
    begin = num_operations // 2 if plan.then is None else num_operations - 2
    then = None if plan.then is None else _to_the_first(plan.then, 0)
    return replace(plan, seeds=plan.seeds[:8], begin=max(begin, 0), then=then, enough=1)


@pytest.mark.parametrize("name", VARIANTS)
def test_without_a_barrier_some_recovery_is_bad(name: str) -> None:
    assert _explore(VARIANTS[name], _to_the_first).bad > 0


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_what_comes_of_each_missing_barrier(name: str) -> None:
    variant = VARIANTS[name]
    tally = _explore(variant)
    print(tally.row(name))
    assert variant.verdicts <= set(tally.verdicts)


@pytest.mark.full
def test_checksums_turn_wrong_states_into_errors() -> None:
    tally = _explore(VARIANTS["no fdatasync before the rank manifest"])
    assert tally.verdicts[LOST] > 0 and tally.verdicts[WRONG] == 0


# A flush that failed


def _with_failed_flush(nth: int) -> History:
    """A run in which the nth flush returns an error, once."""
    fs, flushes = CrashFS(), itertools.count(1)
    fs.fault = lambda op: errno.EIO if isinstance(op, Sync) and next(flushes) == nth else None
    return play(fs, COMMIT, 3, 0)


def _retried() -> AbstractContextManager[Any]:
    real = CrashFS.fsync

    def fsync(fs: CrashFS, fd: int) -> None:
        try:
            real(fs, fd)
        except OSError:
            real(fs, fd)

    return mock.patch.object(CrashFS, "fsync", fsync)


def _failed_flushes(plan: Plan, every: int) -> tuple[Tally, Tally]:
    """Outcomes where failed flushes end the run, and where they are tried again."""
    fatal, retried = Tally(), Tally()
    num_flushes = sum(isinstance(op, Sync) for op in play(CrashFS(), COMMIT, 3, 0).fs.journal)
    for nth in range(1, num_flushes + 1, every):
        history = _with_failed_flush(nth)
        assert len(history.errors) == 1
        fatal.add(explore(history, plan))
        with _retried():
            history = _with_failed_flush(nth)
            assert history.errors == []
            retried.add(explore(history, plan))
    return fatal, retried


def test_a_flush_that_failed_is_not_to_be_tried_again() -> None:
    fatal, retried = _failed_flushes(Plan(Crash.POWER, range(1), every=4), 4)
    assert fatal.bad == 0, fatal.first_bad
    assert retried.bad > 0


@pytest.mark.full
def test_every_flush_that_failed_is_not_to_be_tried_again() -> None:
    fatal, retried = _failed_flushes(Plan(Crash.POWER, range(20)), 1)
    print(fatal.row("a flush fails, at each place: the run ends"))
    print(retried.row("a flush fails, at each place: tried again"))
    assert fatal.bad == 0, fatal.first_bad
    assert retried.verdicts[LOST] > 0
