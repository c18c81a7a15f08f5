"""Files and directories that are deleted, replaced or renamed under a live run: the next commit stops it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers.child import run_in_child
from tests.helpers.crash_disk import Disk
from tests.helpers.crash_run import Run, Setup, play
from tests.helpers.crashfs import CrashFS
from tests.helpers.disk import (
    SWAP,
    assert_finishes,
    close_broken,
    drain,
    generation_file,
    open_model,
    train,
)
from zero_offload.checkpoint.generation import GenerationKeeper
from zero_offload.storage.files.directory import LOCK_NAME, RunDirectory, hold_directory
from zero_offload.storage.files.swap_file import SwapFile
from zero_offload.storage.files.system import FileSystem
from zero_offload.storage.shards.store import ShardStore

STEPS = 5


def _copied_over(path: Path) -> None:
    """As rsync and editors replace a file."""
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.replace(path)


HOW: dict[str, Callable[[Path], object]] = {"deleted": Path.unlink, "replaced": _copied_over}


def _committed_step(nvme: Path) -> int:
    return int(json.loads(generation_file(nvme).read_text())["payload"]["step"])


def _stopped_at_the_next_commit(nvme: Path, change: Callable[[], object], **settings: Any) -> zo.ZeroOffloadError:
    """The error of a run whose files change after two commits."""
    model, optimizer = open_model(nvme, **settings)
    train(model, optimizer, 0, 2)
    drain(model)
    change()
    with pytest.raises(zo.ZeroOffloadError) as caught:
        train(model, optimizer, 2, 3)
        drain(model)
    close_broken(model)
    return caught.value


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("settings", [{}, {"params": "cpu", "optimizer": "cpu"}], ids=["on disk", "in memory"])
def test_a_swap_file(how: str, settings: dict[str, Any], tmp_path: Path) -> None:
    nvme = tmp_path / "nvme"
    error = _stopped_at_the_next_commit(nvme, lambda: HOW[how](nvme / SWAP), **settings)
    assert type(error) is zo.StorageError and f"{nvme / SWAP} was {how}" in str(error)
    assert _committed_step(nvme) == 2


@pytest.mark.parametrize("how", HOW)
def test_the_lock(how: str, tmp_path: Path) -> None:
    nvme = tmp_path / "nvme"
    error = _stopped_at_the_next_commit(nvme, lambda: HOW[how](nvme / LOCK_NAME))
    assert type(error) is zo.LockError and f"{nvme / LOCK_NAME} was {how}" in str(error)
    assert assert_finishes(nvme, STEPS) == 2


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_directory_that_was_renamed(is_replaced: bool, tmp_path: Path) -> None:
    nvme, elsewhere = tmp_path / "nvme", tmp_path / "elsewhere"

    def change() -> None:
        nvme.rename(elsewhere)
        if is_replaced:
            shutil.copytree(elsewhere, nvme)

    error = _stopped_at_the_next_commit(nvme, change)
    assert type(error) is zo.StorageError and f"{nvme} was renamed" in str(error) and str(elsewhere) in str(error)
    shutil.rmtree(nvme, ignore_errors=True)
    elsewhere.rename(nvme)
    assert assert_finishes(nvme, STEPS) == 2


@pytest.mark.parametrize("directory", [0, 1])
@pytest.mark.parametrize("victim", [0, 1])
def test_any_directory_and_any_rank(victim: int, directory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, fs, commit = Setup(world_size=2, directories=("/a/run", "/b/run")), CrashFS(Disk()), Run.commit

    def commit_without(run: Run) -> None:
        if (run.step, run.rank) == (2, victim):
            fs.unlink(f"rank{victim}.swap", run.keeper._directories[directory].dir_fd)
        commit(run)

    monkeypatch.setattr(Run, "commit", commit_without)
    history = play(fs, setup, STEPS, seed=0)
    assert history.promised(len(fs.journal)) == 1
    assert len(history.errors) == 2  # all at once, with the cause
    assert all(f"{setup.directories[directory]}/rank{victim}.swap was deleted" in str(e) for e in history.errors)


def test_a_checkpoint_whose_place_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is written; until its last rename it is none."""
    model, optimizer = open_model(tmp_path / "nvme")
    train(model, optimizer, 0, 1)
    target, adopt = tmp_path / "saved", GenerationKeeper.adopt

    def replaced(keeper: GenerationKeeper, store: ShardStore, swap: SwapFile) -> None:
        adopt(keeper, store, swap)
        target.rename(tmp_path / "moved")
        target.mkdir(mode=0o700)

    monkeypatch.setattr(GenerationKeeper, "adopt", replaced)
    with pytest.raises(zo.StorageError, match=f"{target} was renamed"):
        zo.save_checkpoint(model, optimizer, target)
    assert list(target.iterdir()) == []
    zo.close(model)


def _open_later(nvme: Path, settings: dict[str, Any]) -> None:
    open_model(nvme, **settings)


@pytest.mark.parametrize("settings", [{}, {"existing": "discard"}, {"durability": "scratch"}], ids=str)
def test_a_second_start_after_the_lock_was_deleted(settings: dict[str, Any], tmp_path: Path) -> None:
    nvme = tmp_path / "nvme"
    model, optimizer = open_model(nvme, **settings)
    train(model, optimizer, 0, 2)
    drain(model)
    (nvme / LOCK_NAME).unlink()
    other = run_in_child(_open_later, nvme, settings)
    assert other.error == "LockError", other
    assert f"{nvme} is in use by another process, although its {LOCK_NAME} was deleted" in other.message
    assert not (nvme / LOCK_NAME).exists()
    close_broken(model)


def test_who_only_reads_respects_the_directorys_lock(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run"):
        (tmp_path / "run" / LOCK_NAME).unlink()
        with pytest.raises(zo.LockError):
            hold_directory(tmp_path / "run")
    hold_directory(tmp_path / "run").close()
    RunDirectory.open(tmp_path / "run").close()


def test_where_directories_cannot_be_locked_the_file_is(tmp_path: Path) -> None:
    class WithoutDirectoryLocks(FileSystem):
        def flock(self, fd: int, operation: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{fd}"):
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            super().flock(fd, operation)

    system = WithoutDirectoryLocks()
    with RunDirectory.open(tmp_path / "run", system), pytest.raises(zo.LockError, match=f"process {os.getpid()}"):
        RunDirectory.open(tmp_path / "run", system)
    with RunDirectory.open(tmp_path / "run", system):
        pass


def test_a_version_that_locks_the_file_only_is_kept_out_and_keeps_out(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run"):
        earlier = os.open(tmp_path / "run" / LOCK_NAME, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(earlier, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(earlier)
    with open(tmp_path / "run" / LOCK_NAME) as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        with pytest.raises(zo.LockError):
            RunDirectory.open(tmp_path / "run")
    RunDirectory.open(tmp_path / "run").close()
