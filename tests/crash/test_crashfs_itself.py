"""The disk of the crash tests: it behaves as a real one while it lasts, and loses what it may lose, no more."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.crash_disk import Disk, Op, Write
from tests.helpers.crash_engine import CrashEngine
from tests.helpers.crash_run import Setup, describe, play
from tests.helpers.crashfs import CrashFS
from tests.helpers.crew import Crew, CrewGroup, Killed
from zero_offload.base.errors import IntegrityError, LockError, RankError, StorageError
from zero_offload.base.types import Durability
from zero_offload.hardware.abi import IoOp
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.engine import BLOCK_DTYPE
from zero_offload.storage.files.system import REAL, FileSystem

FLAGS = os.O_RDWR | os.O_CREAT
SEEDS = range(40)


def _root(fs: FileSystem, path: Path | str = "/") -> int:
    return fs.open(path, os.O_RDONLY | os.O_DIRECTORY)


def _file(fs: FileSystem, root: int, name: str, content: bytes) -> int:
    fd = fs.open(name, FLAGS, root)
    fs.write_whole(fd, content)
    return fd


def _content(disk: Disk, name: str) -> bytes | None:
    ino = disk.folders[1].get(name)
    return None if ino is None else bytes(disk.files[ino])


def _contents(fs: CrashFS, name: str) -> set[bytes | None]:
    """Contents of a file that power loss now may leave."""
    return {_content(fs.disk().without_power(None, seed), name) for seed in SEEDS}


def test_it_has_every_call() -> None:
    assert set(vars(FileSystem)) - {"__doc__", "__module__", "__dict__", "__weakref__"} <= set(vars(CrashFS))


def test_names_and_bytes_are_flushed_apart() -> None:
    fs = CrashFS()
    root = _root(fs)
    fd = _file(fs, root, "f", b"x" * 2000)
    left = _contents(fs, "f")
    assert {None, b"", b"x" * 2000} < left and len(left) > 6  # torn, garbled, zeros
    fs.fdatasync(fd)
    assert _contents(fs, "f") == {None, b"x" * 2000}
    fs.fsync(root)
    assert _contents(fs, "f") == {b"x" * 2000}
    fs.ftruncate(fd, 10)
    assert _contents(fs, "f") == {b"x" * 2000, b"x" * 10}
    fs.unlink("f", root)
    assert _contents(fs, "f") == {b"x" * 2000, b"x" * 10, None}


def test_a_name_that_is_flushed_says_nothing_of_the_bytes() -> None:
    fs = CrashFS()
    root = _root(fs)
    _file(fs, root, "f", b"x" * 2000)
    fs.fsync(root)
    assert None not in _contents(fs, "f") and b"" in _contents(fs, "f")


def test_a_rename_leaves_the_old_file_or_the_new_one() -> None:
    fs = CrashFS()
    root = _root(fs)
    for name, content in (("f", b"old"), ("f.tmp", b"new")):
        fs.fsync(_file(fs, root, name, content))
    fs.fsync(root)
    fs.replace("f.tmp", "f", root)
    assert _contents(fs, "f") == {b"old", b"new"}
    assert fs.listdir(root) == ["f"]


def test_what_was_not_flushed_is_lost_in_any_order() -> None:
    fs = CrashFS()
    root = _root(fs)
    for name in "abc":
        _file(fs, root, name, b"")
    left = {tuple(sorted(fs.disk().without_power(None, seed).folders[1])) for seed in SEEDS}
    assert {(), ("a",), ("b",), ("c",), ("a", "c"), ("a", "b", "c")} <= left


def test_what_is_on_the_medium_is_not_hurt_by_what_is_not() -> None:
    fs = CrashFS()
    root = _root(fs)
    fd = _file(fs, root, "f", b"x" * 8192)
    fs.fdatasync(fd)
    fs.fsync(root)
    fs.write_block(fd, 4096, b"y" * 4096)
    left = _contents(fs, "f")
    assert len(left) > 6
    assert all(content is not None and content[:4096] == b"x" * 4096 for content in left)


def test_a_flush_that_failed_is_not_made_good_by_another() -> None:
    outcomes = set()
    for filler in range(10):
        fs = CrashFS()
        root = _root(fs)
        for i in range(filler):  # what a failed flush has lost is drawn by its place in the journal
            fs.close(_file(fs, root, f"other{i}", b"y"))
        fd = _file(fs, root, "f", b"x")
        fs.fsync(root)
        fs.fault = lambda op: errno.EIO
        with pytest.raises(OSError, match="Input/output error"):
            fs.fdatasync(fd)
        fs.fault = lambda op: None
        fs.fdatasync(fd)
        assert fs.read_whole(fd) == b"x"  # the page cache does not know
        (content,) = _contents(fs, "f")
        outcomes.add(content)
    assert outcomes == {b"", b"x"}


def test_a_kill_keeps_what_was_issued() -> None:
    fs = CrashFS()
    root = _root(fs)
    fd = _file(fs, root, "f", b"x")
    killed = CrashFS(fs.disk().killed(None, 0))
    assert killed.read_whole(killed.open("f", os.O_RDWR, _root(killed))) == b"x"
    assert _contents(killed, "f") >= {None, b"x"}  # and power may be lost after it
    under_way = Write(fs.fstat(fd).st_ino, 0, b"y" * 2048)
    left = {_content(fs.disk().killed(under_way, seed).settled(), "f") for seed in SEEDS}
    assert left >= {b"x", b"y" * 512, b"y" * 1024, b"y" * 1536, b"y" * 2048}


def test_the_moments_of_a_run_are_its_operations() -> None:
    fs = CrashFS()
    root = _root(fs)
    fs.fsync(_file(fs, root, "f", b"x"))
    assert [type(op).__name__ for _, _, op in fs.moments()] == ["Link", "Write", "Sync", "NoneType"]
    assert [k for k, _, _ in fs.moments([1, 3])] == [1, 3]


# As a real one


def _outcome(call: Callable[[], object]) -> object:
    try:
        return call()
    except OSError as error:
        return error.errno


class _Player:
    """The same calls on some file system, each with what it returned or raised."""

    def __init__(self, fs: FileSystem, path: Path | str) -> None:
        self.fs, self.root = fs, _root(fs, path)

    def play(self, rng: random.Random) -> object:
        name, other = rng.choice("abcd"), rng.choice("abcd")
        flags = rng.choice((os.O_RDWR, FLAGS, FLAGS | os.O_EXCL, FLAGS | os.O_TRUNC))
        kind, number = rng.choice(("open", "write", "cut", "grow", "replace", "unlink", "list")), rng.randrange(5000)
        if kind == "list":
            return sorted(self.fs.listdir(self.root))
        if kind == "replace":
            return _outcome(lambda: self.fs.replace(name, other, self.root))
        if kind == "unlink":
            return _outcome(lambda: self.fs.unlink(name, self.root))
        return _outcome(lambda: self._in_file(name, flags, kind, number))

    def _in_file(self, name: str, flags: int, kind: str, number: int) -> object:
        fd = self.fs.open(name, flags, self.root)
        try:
            if kind == "write":
                self.fs.write_whole(fd, bytes([number % 256]) * number)
            elif kind == "cut":
                self.fs.ftruncate(fd, number)
            elif kind == "grow":
                self.fs.posix_fallocate(fd, number, number + 1)
            info = self.fs.fstat(fd)
            return info.st_size, info.st_nlink, self.fs.read_whole(self.fs.open(name, os.O_RDWR, self.root))
        finally:
            self.fs.close(fd)


@pytest.mark.parametrize("seed", range(5))
def test_it_answers_as_a_real_file_system_does(seed: int, tmp_path: Path) -> None:
    real, ours = _Player(REAL, tmp_path), _Player(CrashFS(), "/")
    one, two = random.Random(seed), random.Random(seed)
    outcomes = []
    for _ in range(150):
        outcomes.append(real.play(one))
        assert ours.play(two) == outcomes[-1]
    assert {errno.ENOENT, errno.EEXIST} <= {each for each in outcomes if isinstance(each, int)}


def test_locks_are_those_of_open_files() -> None:
    fs = CrashFS()
    with RunDirectory.open("/drive/run", fs):
        with pytest.raises(LockError, match=f"process {os.getpid()}"):
            RunDirectory.open("/drive/run", fs)
        with RunDirectory.join("/drive/run", fs):
            pass
    with pytest.raises(StorageError, match="is held by no run"):
        RunDirectory.join("/drive/run", fs)


def test_a_descriptor_of_the_real_system_is_none_of_ours() -> None:
    fs = CrashFS()
    root = _root(fs)
    with pytest.raises(OSError, match="Bad file descriptor"):
        fs.fsync(0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fsync(root)


# The engine


def _blocks(fd: int) -> np.ndarray:
    table = np.zeros(2, dtype=BLOCK_DTYPE)
    table["fd"], table["nbytes"], table["offset"], table["seed"] = fd, 4096, (4096, 0), (1, 2)
    return table


@pytest.mark.parametrize("seed", range(4))
def test_the_engine_moves_and_checks_blocks(seed: int) -> None:
    fs = CrashFS()
    fd = _file(fs, _root(fs), "f", b"")
    engine, table = CrashEngine(fs, seed), _blocks(fd)
    out, back = np.arange(8192, dtype=np.uint8), np.zeros(8192, dtype=np.uint8)
    engine.wait(engine.submit(IoOp.WRITE, table, out.ctypes.data))
    engine.wait(engine.submit(IoOp.READ, table, back.ctypes.data))
    assert (back == out).all()
    assert fs.read_whole(fd) == out.tobytes()[4096:] + out.tobytes()[:4096]
    fs.write_block(fd, 5000, b"?")
    with pytest.raises(IntegrityError, match="checksum of the block at 4096"):
        engine.wait(engine.submit(IoOp.READ, table, back.ctypes.data))
    fs.ftruncate(fd, 5000)
    with pytest.raises(IntegrityError, match="ends inside"):
        engine.wait(engine.submit(IoOp.READ, table, back.ctypes.data))


def test_a_transfer_may_be_late() -> None:
    issued = set()
    for seed in range(8):
        fs = CrashFS()
        fd = _file(fs, _root(fs), "f", b"")
        engine, table, out = CrashEngine(fs, seed), _blocks(fd), np.ones(8192, dtype=np.uint8)
        before = len(fs.journal)
        ticket = engine.submit(IoOp.WRITE, table, out.ctypes.data)
        issued.add(len(fs.journal) - before)
        assert engine.done(ticket) == (len(fs.journal) > before)
        engine.close()
        assert fs.read_whole(fd) == bytes(out)
    assert issued == {0, 2}


# The ranks


def _journal(setup: Setup, seed: int) -> list[str]:
    history = play(CrashFS(), setup, 2, seed)
    assert not history.errors
    return [describe(op) for op in history.fs.journal]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_same_seed_is_the_same_run(world_size: int) -> None:
    setup = Setup(Durability.COMMIT, world_size)
    assert _journal(setup, 5) == _journal(setup, 5)
    assert _journal(setup, 5) != _journal(setup, 6)


def test_ranks_are_interleaved() -> None:
    order: list[int] = []

    def work(rank: int) -> None:
        for _ in range(100):
            order.append(rank)
            crew.turn()

    crew = Crew(3, 0)
    assert crew.run(work) == [None, None, None]
    assert sorted(order) == [0] * 100 + [1] * 100 + [2] * 100
    assert len([1 for a, b in zip(order, order[1:], strict=False) if a != b]) > 30


def test_ranks_hear_what_all_said() -> None:
    crew = Crew(3, 1)

    def work(rank: int) -> object:
        exchange = CrewGroup(crew)
        return (
            exchange.agree(f"of {rank}"),
            exchange.gather_digests(f"{rank}"),
            exchange.all_come("a test", surely=True),
        )

    assert crew.run(work) == [("of 0", ["0", "1", "2"], True)] * 3


@pytest.mark.parametrize("end", [None, Killed(), ValueError("broken")])
def test_one_that_is_gone_fails_those_that_wait(end: BaseException | None) -> None:
    crew = Crew(3, 2)

    def work(rank: int) -> None:
        if rank == 1:
            if end is not None:
                raise end
            return
        crew.meet(None)

    first, second, third = crew.run(work)
    assert second is end
    assert isinstance(first, RankError) and isinstance(third, RankError)


def test_an_error_of_one_rank_is_raised_by_all() -> None:
    crew = Crew(2, 3)

    def work(rank: int) -> None:
        with CrewGroup(crew).together():
            if rank == 1:
                raise StorageError("no space")

    first, second = crew.run(work)
    assert isinstance(first, StorageError) and "another rank: no space" in str(first)
    assert str(second) == "no space"


def test_operations_are_plain_values() -> None:
    assert describe(Write(3, 0, b"xyz")) == "Write {'ino': 3, 'offset': 0, 'data': 3}"
    assert Op(1) == Op(1)
