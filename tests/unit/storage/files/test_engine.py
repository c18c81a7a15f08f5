from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import mmap
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.helpers.fresh import run_script
from tests.helpers.pairwise import full
from tests.helpers.without_library import without_library
from zero_offload.base.errors import ConfigError, IntegrityError, StorageError
from zero_offload.base.types import EngineKind
from zero_offload.hardware import native
from zero_offload.hardware.abi import Fault, IoOp
from zero_offload.hardware.kernels.checksums import crc32c
from zero_offload.storage.files import engine as engine_words
from zero_offload.storage.files import native_engine
from zero_offload.storage.files.aiofiles_engine import AiofilesEngine
from zero_offload.storage.files.engine import (
    BLOCK_DTYPE,
    STALL_LIMIT_S,
    BlockTable,
    EngineSettings,
    FileEngine,
    StallWatch,
    Ticket,
    Urgency,
)
from zero_offload.storage.files.engines import IO_URING, THREADS, open_engine
from zero_offload.storage.files.native_engine import NativeEngine

BLOCK = 64 << 10


class Memory:
    """Page-aligned bytes, as O_DIRECT needs."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, 1))
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)[:nbytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def fill(self, seed: int) -> Memory:
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, len(self.bytes), dtype=np.uint8)
        return self


@dataclass(frozen=True)
class Lasting:
    address: int
    nbytes: int


@dataclass
class File:
    path: Path
    fd: int

    def table(self, num_blocks: int, nbytes: int = BLOCK, first: int = 0) -> BlockTable:
        blocks = np.zeros(num_blocks, dtype=BLOCK_DTYPE)
        blocks["offset"] = first + np.arange(num_blocks) * nbytes
        blocks["nbytes"], blocks["fd"] = nbytes, self.fd
        blocks["seed"] = np.arange(num_blocks) + 17
        return blocks


KINDS = {
    "threads": replace(THREADS, num_threads=3),
    "parts": replace(THREADS, num_threads=2, request_bytes=12 << 10),
    "io_uring": replace(IO_URING, num_threads=2, depth=5, request_bytes=20 << 10),
    "aiofiles": replace(THREADS, kind=EngineKind.AIOFILES, num_threads=2),
}
NATIVE = [name for name in KINDS if name != "aiofiles"]
"""Those in which faults can be injected."""
ALONE = [replace(THREADS, num_threads=1), replace(IO_URING, num_threads=1, depth=1, request_bytes=1 << 30)]
"""One block at a time."""


def open_or_skip(settings: EngineSettings, num_drives: int = 1) -> FileEngine:
    """A container may forbid io_uring."""
    try:
        return open_engine(settings, num_drives)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest) -> Iterator[FileEngine]:
    engine = open_or_skip(KINDS[request.param])
    yield engine
    engine.close()


native_only = pytest.mark.parametrize("engine", NATIVE, indirect=True)


@pytest.fixture(params=ALONE, ids=lambda settings: settings.kind.value)
def alone(request: pytest.FixtureRequest) -> Iterator[NativeEngine]:
    engine = open_or_skip(request.param)
    assert isinstance(engine, NativeEngine)
    yield engine
    engine.close()


@pytest.fixture(params=["buffered", "direct"])
def file(request: pytest.FixtureRequest, tmp_path: Path, engine: FileEngine) -> Iterator[File]:
    path = tmp_path / "extents.bin"
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if request.param == "direct" else 0)
    try:
        fd = os.open(path, flags, 0o600)
    except OSError:
        pytest.skip(f"{tmp_path} has no O_DIRECT")
    engine.name_file(fd, str(path))
    yield File(path, fd)
    os.close(fd)


any_file = pytest.mark.parametrize("file", ["buffered", full("direct")], indirect=True)
"""How it was opened changes nothing."""


def test_round_trip_sets_and_verifies_checksums(engine: FileEngine, file: File) -> None:
    source, target = Memory(7 * BLOCK).fill(1), Memory(7 * BLOCK)
    blocks = file.table(7)
    engine.wait(engine.submit(IoOp.WRITE, blocks, source.address))
    assert len(set(blocks["crc"].tolist())) == 7
    ticket = engine.submit(IoOp.READ, blocks, target.address)
    engine.wait(ticket)
    assert np.array_equal(source.bytes, target.bytes)
    assert file.path.read_bytes() == source.bytes.tobytes()


def test_what_has_moved_is_counted(engine: FileEngine, file: File) -> None:
    """Or a drive that works would be given up."""
    memory, blocks = Memory(7 * BLOCK).fill(1), file.table(7)
    engine.wait(engine.submit(IoOp.WRITE, blocks, memory.address))
    assert _moved_bytes(engine) == 7 * BLOCK
    engine.wait(engine.submit(IoOp.READ, blocks, memory.address))
    assert _moved_bytes(engine) == 14 * BLOCK


def _moved_bytes(engine: FileEngine) -> int:
    if isinstance(engine, AiofilesEngine):
        return engine.moved_bytes
    assert isinstance(engine, NativeEngine)
    return native_engine.moved_bytes(engine.handle)


def test_a_wait_that_comes_late_says_when_the_bytes_moved(engine: FileEngine, file: File) -> None:
    memory, before_ns = Memory(4 * BLOCK).fill(0), time.perf_counter_ns()
    ticket = engine.submit(IoOp.WRITE, file.table(4), memory.address)
    while not engine.done(ticket):
        time.sleep(0.001)
    seen_ns = time.perf_counter_ns()
    time.sleep(0.01)
    moved = engine.wait(ticket)
    assert before_ns < moved.begin_ns < moved.end_ns < seen_ns


def test_memory_that_lasts_gives_the_same_bytes(engine: FileEngine, file: File) -> None:
    """More of it than the kernel's table holds, and blocks that lie in two of them."""
    source, target = Memory(80 * 4096).fill(2), Memory(80 * 4096)
    for number in range(79):
        for memory in (source, target):
            engine.add_memory(Lasting(memory.address + 4096 * number, 4096))
    blocks = file.table(80, 4096)
    engine.wait(engine.submit(IoOp.WRITE, blocks, source.address))
    engine.wait(engine.submit(IoOp.READ, blocks, target.address))
    assert np.array_equal(source.bytes, target.bytes)
    target.bytes[:] = 0
    blocks = file.table(40, 8192)
    engine.wait(engine.submit(IoOp.WRITE, blocks, source.address))
    engine.wait(engine.submit(IoOp.READ, blocks, target.address))
    assert np.array_equal(source.bytes, target.bytes)


def test_blocks_may_be_anywhere_in_any_order(engine: FileEngine, file: File) -> None:
    source, target = Memory(4 * BLOCK).fill(2), Memory(2 * BLOCK)
    blocks = file.table(4)[::-1].copy()
    engine.wait(engine.submit(IoOp.WRITE, blocks, source.address))
    engine.wait(engine.submit(IoOp.READ, blocks[1:3], target.address))
    assert np.array_equal(target.bytes, source.bytes[BLOCK : 3 * BLOCK])


def test_many_tickets_from_many_threads(engine: FileEngine, file: File) -> None:
    """Each thread owns a range of the file and reads back what it wrote, while the others do too."""
    problems: list[str] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        source, target = Memory(8 * 4096).fill(number), Memory(8 * 4096)
        blocks = file.table(8, 4096, first=number * 8 * 4096)
        for _ in range(20):
            begin, end = sorted(rng.integers(0, 9, 2))
            part = blocks[begin:end]
            engine.wait(engine.submit(IoOp.WRITE, part, source.address + 4096 * int(begin)))
            ticket = engine.submit(IoOp.READ, part, target.address, Urgency(int(rng.integers(0, 2))))
            engine.wait(ticket)
            if target.bytes[: 4096 * (end - begin)].tobytes() != source.bytes[4096 * begin : 4096 * end].tobytes():
                problems.append(f"thread {number}, blocks {begin} to {end}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_many_tickets_in_flight_at_once(engine: FileEngine, file: File) -> None:
    source, target = Memory(100 * 4096).fill(3), Memory(100 * 4096)
    tables = [file.table(1, 4096, first=i * 4096) for i in range(100)]
    writes = [engine.submit(IoOp.WRITE, table, source.address + 4096 * i) for i, table in enumerate(tables)]
    for ticket in reversed(writes):
        engine.wait(ticket)
    reads = [engine.submit(IoOp.READ, table, target.address + 4096 * i) for i, table in enumerate(tables)]
    for ticket in reads:
        engine.wait(ticket)
    assert np.array_equal(source.bytes, target.bytes)


def test_urgent_goes_before_what_has_not_started(alone: NativeEngine, tmp_path: Path) -> None:
    engine = alone
    first, second = Memory(4096).fill(1), Memory(4096).fill(2)
    with open(tmp_path / "file", "w+b") as stream:
        file = File(tmp_path / "file", stream.fileno())
        engine.inject_fault(Fault.STALL)
        busy = engine.submit(IoOp.WRITE, file.table(1, 4096, first=4096), first.address)
        normal = engine.submit(IoOp.WRITE, file.table(1, 4096), first.address)
        urgent = engine.submit(IoOp.WRITE, file.table(1, 4096), second.address, Urgency.URGENT)
        engine.inject_fault(Fault.NONE)
        for ticket in (busy, normal, urgent):
            engine.wait(ticket)
        # The last writer was the normal one.
        assert os.pread(file.fd, 4096, 0) == first.bytes.tobytes()


def test_reads_and_writes_take_turns(alone: NativeEngine, tmp_path: Path) -> None:
    """A long write-back does not keep reads waiting, nor reads a write."""
    source = Memory(40 * BLOCK).fill(1)
    with open(tmp_path / "file", "w+b") as stream:
        file = File(tmp_path / "file", stream.fileno())
        blocks = file.table(40)
        alone.wait(alone.submit(IoOp.WRITE, blocks, source.address))
        alone.inject_fault(Fault.STALL)
        held = alone.submit(IoOp.WRITE, blocks[:1], source.address)
        many = alone.submit(IoOp.WRITE, blocks[1:20], source.address + BLOCK)
        few = alone.submit(IoOp.READ, blocks[20:24], source.address + 20 * BLOCK)
        alone.inject_fault(Fault.STALL, 14)
        alone.wait(few)
        assert not alone.done(many)
        alone.inject_fault(Fault.NONE)
        alone.wait(many)
        alone.wait(held)


def test_urgent_blocks_do_not_starve_the_rest(alone: NativeEngine, tmp_path: Path) -> None:
    source = Memory(200 * 4096).fill(1)
    with open(tmp_path / "file", "w+b") as stream:
        file = File(tmp_path / "file", stream.fileno())
        alone.inject_fault(Fault.STALL)
        held = alone.submit(IoOp.WRITE, file.table(1, 4096), source.address)
        normal = alone.submit(IoOp.WRITE, file.table(1, 4096, first=4096), source.address)
        urgent = alone.submit(IoOp.WRITE, file.table(200, 4096, first=8192), source.address, Urgency.URGENT)
        alone.inject_fault(Fault.STALL, 60)
        alone.wait(normal)
        alone.wait(held)
        assert not alone.done(urgent)
        alone.inject_fault(Fault.NONE)
        alone.wait(urgent)


@native_only
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault.WRITE_EIO, "write of 64 KiB at offset 131072 of .*extents.bin .*EIO.*dmesg"),
        (Fault.WRITE_ENOSPC, "block 3 of 5.*No space left.*ENOSPC.*Free space"),
    ],
)
def test_a_failing_write_names_the_place(engine: NativeEngine, file: File, fault: Fault, message: str) -> None:
    source = Memory(5 * BLOCK).fill(4)
    engine.inject_fault(fault, 3)
    ticket = engine.submit(IoOp.WRITE, file.table(5), source.address)
    with pytest.raises(StorageError, match=message):
        engine.wait(ticket)
    engine.wait(engine.submit(IoOp.WRITE, file.table(5), source.address))


@native_only
def test_a_failing_read_names_the_place(engine: NativeEngine, file: File) -> None:
    source = Memory(5 * BLOCK).fill(5)
    blocks = file.table(5)
    engine.wait(engine.submit(IoOp.WRITE, blocks, source.address))
    engine.inject_fault(Fault.READ_EIO, 2)
    with pytest.raises(StorageError, match=r"read of 64 KiB at offset 65536 .*block 2 of 5.*EIO"):
        engine.wait(engine.submit(IoOp.READ, blocks, source.address))


def test_a_failure_starts_no_further_block(alone: NativeEngine, tmp_path: Path) -> None:
    engine = alone
    source = Memory(50 * 4096).fill(6)
    with open(tmp_path / "file", "w+b") as stream:
        file = File(tmp_path / "file", stream.fileno())
        engine.inject_fault(Fault.WRITE_EIO, 3)
        with pytest.raises(StorageError):
            engine.wait(engine.submit(IoOp.WRITE, file.table(50, 4096), source.address))
        # io_uring may have launched a few before it knew.
        assert os.fstat(file.fd).st_size <= (2 if engine.settings.kind is EngineKind.THREADS else 6) * 4096
        assert native.io_stats(engine.handle).jobs_queued == 0
        engine.wait(engine.submit(IoOp.WRITE, file.table(50, 4096), source.address))


def test_a_full_device(engine: FileEngine) -> None:
    source = Memory(4096)
    fd = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(StorageError, match=f"file descriptor {fd} .*ENOSPC"):
        engine.wait(engine.submit(IoOp.WRITE, File(Path("/dev/full"), fd).table(1, 4096), source.address))
    os.close(fd)


@native_only
def test_a_storm_of_interruptions_changes_nothing(engine: NativeEngine, file: File) -> None:
    source, target = Memory(3 * BLOCK).fill(7), Memory(3 * BLOCK)
    blocks = file.table(3)
    engine.inject_fault(Fault.STORM, 2)
    engine.wait(engine.submit(IoOp.WRITE, blocks, source.address))
    engine.inject_fault(Fault.STORM, 2)
    engine.wait(engine.submit(IoOp.READ, blocks, target.address))
    assert np.array_equal(source.bytes, target.bytes)


@native_only
def test_a_write_that_never_happened_is_found(engine: NativeEngine, file: File) -> None:
    memory = Memory(3 * BLOCK).fill(7)
    blocks = file.table(3)
    engine.wait(engine.submit(IoOp.WRITE, blocks, memory.address))
    memory.fill(8)
    engine.inject_fault(Fault.WRITE_DROP, 2)
    engine.wait(engine.submit(IoOp.WRITE, blocks, memory.address))
    with pytest.raises(IntegrityError, match="block 2 of 3.*checksum"):
        engine.wait(engine.submit(IoOp.READ, blocks, memory.address))


@native_only
def test_a_read_that_ends_early(engine: NativeEngine, file: File) -> None:
    memory = Memory(3 * BLOCK).fill(7)
    blocks = file.table(3)
    engine.wait(engine.submit(IoOp.WRITE, blocks, memory.address))
    engine.inject_fault(Fault.READ_SHORT, 3)
    with pytest.raises(IntegrityError, match="block 3 of 3.*ends inside the block"):
        engine.wait(engine.submit(IoOp.READ, blocks, memory.address))


@native_only
def test_a_short_write_goes_on(engine: NativeEngine, file: File) -> None:
    source, target = Memory(3 * BLOCK).fill(7), Memory(3 * BLOCK)
    blocks = file.table(3)
    engine.inject_fault(Fault.WRITE_SHORT, 2)
    engine.wait(engine.submit(IoOp.WRITE, blocks, source.address))
    engine.wait(engine.submit(IoOp.READ, blocks, target.address))
    assert np.array_equal(source.bytes, target.bytes)


@native_only
def test_a_bit_flipped_once_on_the_way_is_read_again(engine: NativeEngine, file: File) -> None:
    source, target = Memory(3 * BLOCK).fill(8), Memory(3 * BLOCK)
    blocks = file.table(3)
    engine.wait(engine.submit(IoOp.WRITE, blocks, source.address))
    engine.inject_fault(Fault.READ_FLIP, 2)
    engine.wait(engine.submit(IoOp.READ, blocks, target.address))
    assert np.array_equal(source.bytes, target.bytes)
    engine.inject_fault(Fault.READ_FLIP, 2)
    engine.wait(engine.submit(IoOp.READ_UNVERIFIED, blocks, target.address))
    assert not np.array_equal(source.bytes, target.bytes)


@native_only
def test_a_bit_flipped_on_the_drive_is_found(engine: NativeEngine, file: File) -> None:
    source, target = Memory(4 * BLOCK).fill(9), Memory(4 * BLOCK)
    blocks = file.table(4)
    engine.inject_fault(Fault.WRITE_FLIP, 3)
    engine.wait(engine.submit(IoOp.WRITE, blocks, source.address))
    expected = int(blocks["crc"][2])
    with pytest.raises(IntegrityError, match=rf"offset 131072 .*block 3 of 4.* expected {expected:08x}"):
        engine.wait(engine.submit(IoOp.READ, blocks, target.address))
    engine.wait(engine.submit(IoOp.READ_UNVERIFIED, blocks, target.address))
    assert (source.bytes != target.bytes).sum() == 1


@pytest.mark.parametrize("what", ["seed", "crc", "offset"])
def test_another_block_is_not_taken_for_this_one(engine: FileEngine, file: File, what: str) -> None:
    source = Memory(2 * BLOCK).fill(10)
    blocks = file.table(2)
    engine.wait(engine.submit(IoOp.WRITE, blocks, source.address))
    blocks[what] = blocks[what][::-1].copy()
    with pytest.raises(IntegrityError, match="block 1 of 2"):
        engine.wait(engine.submit(IoOp.READ, blocks, source.address))


@pytest.mark.parametrize("size", [0, BLOCK, 2 * BLOCK + 4096, 2 * BLOCK + 777])
def test_a_truncated_file(engine: FileEngine, file: File, size: int) -> None:
    memory = Memory(3 * BLOCK).fill(11)
    blocks = file.table(3)
    engine.wait(engine.submit(IoOp.WRITE, blocks, memory.address))
    os.truncate(file.path, size)
    with pytest.raises(IntegrityError, match=rf"block {size // BLOCK + 1} of 3.*ends inside the block"):
        engine.wait(engine.submit(IoOp.READ, blocks, memory.address))


def test_a_wrong_descriptor(engine: FileEngine) -> None:
    memory = Memory(4096)
    fd = os.open("/dev/null", os.O_RDWR)
    os.close(fd)
    blocks = File(Path("gone"), fd).table(1, 4096)
    with pytest.raises(StorageError, match="EBADF.*closed while it was in use"):
        engine.wait(engine.submit(IoOp.WRITE, blocks, memory.address))


GIVEN_UP = (
    "given up with 0 B of 64 KiB moved, first 64 KiB at offset 0 of .*extents.bin .*: "
    "nothing at all has moved for 0.3 s.*stalled or slow.*The last commit is intact.*resume"
)


@native_only
@any_file
def test_a_drive_that_answers_no_more_ends_the_wait(
    engine: NativeEngine, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_words, "STALL_LIMIT_S", 0.3)
    memory = Memory(BLOCK).fill(1)
    engine.inject_fault(Fault.STALL)
    ticket = engine.submit(IoOp.WRITE, file.table(1), memory.address)
    with pytest.raises(StorageError, match=GIVEN_UP):
        engine.wait(ticket)
    monkeypatch.setattr(StallWatch, "is_over", _no_second_limit)
    with pytest.raises(StorageError, match=GIVEN_UP):
        engine.wait(ticket)
    assert engine.is_stuck and not engine.done(ticket)
    handle = engine.handle
    engine.close()  # does not wait for it
    memory.bytes[:] = 0
    _take_back(engine, handle)


@native_only
@any_file
def test_a_drive_that_answers_after_it_was_given_up(
    engine: NativeEngine, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer that was under way may have been cut short, so it has failed; nothing is started any more."""
    monkeypatch.setattr(engine_words, "STALL_LIMIT_S", 0.3)
    memory = Memory(BLOCK).fill(1)
    engine.inject_fault(Fault.STALL)
    ticket = engine.submit(IoOp.WRITE, file.table(1), memory.address)
    with pytest.raises(StorageError, match=GIVEN_UP):
        engine.wait(ticket)
    monkeypatch.setattr(engine_words, "STALL_LIMIT_S", 60.0)
    engine.inject_fault(Fault.NONE)
    while not engine.done(ticket):
        time.sleep(0.001)
    for each in (ticket, engine.submit(IoOp.WRITE, file.table(1), memory.address)):
        with pytest.raises(StorageError, match=r"ETIMEDOUT.*The last commit is intact"):
            engine.wait(each)
        with pytest.raises(ConfigError, match="not open"):
            engine.wait(each)
    handle = engine.handle
    engine.close()
    _take_back(engine, handle)


@native_only
@any_file
def test_a_drive_that_answers_no_more_ends_the_close(
    engine: NativeEngine, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer under way was never waited for."""
    monkeypatch.setattr(engine_words, "STALL_LIMIT_S", 0.3)
    memory = Memory(4 * BLOCK).fill(1)
    engine.inject_fault(Fault.STALL)
    engine.submit(IoOp.WRITE, file.table(4), memory.address)
    handle = engine.handle
    engine.close()
    assert engine.is_stuck
    _take_back(engine, handle)


def _no_second_limit(*_: object) -> bool:
    """In place of `StallWatch.is_over`: a wait for a transfer that was given up fails at once."""
    raise AssertionError("it waits for as long again")


def _take_back(engine: NativeEngine, handle: int) -> None:
    """Free an engine that was given up, as the end of the process does."""
    native.io_fault(handle, Fault.NONE, 1)
    native.io_stop(handle)
    native_engine.STUCK.remove(engine)
    native.io_close(handle)
    engine.is_stuck = False


class SlowDrive:
    """`os.pwritev` that answers when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self._write = os.pwritev
        monkeypatch.setattr(os, "pwritev", self._answer)

    def _answer(self, fd: int, views: Any, offset: int) -> int:
        self.answers.wait()
        return self._write(fd, views, offset)


def test_aiofiles_gives_up_a_drive_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_words, "STALL_LIMIT_S", 0.3)
    drive, memory = SlowDrive(monkeypatch), Memory(8 * BLOCK).fill(1)
    engine = open_engine(KINDS["aiofiles"])
    with open(tmp_path / "extents.bin", "w+b") as stream:
        file = File(tmp_path / "extents.bin", stream.fileno())
        engine.name_file(file.fd, str(file.path))
        tables = [file.table(1, first=i * BLOCK) for i in range(8)]
        tickets = [engine.submit(IoOp.WRITE, table, memory.address + i * BLOCK) for i, table in enumerate(tables)]
        with pytest.raises(StorageError, match=GIVEN_UP):
            engine.wait(tickets[0])
        monkeypatch.setattr(StallWatch, "is_over", _no_second_limit)
        with pytest.raises(StorageError, match=GIVEN_UP):
            engine.wait(tickets[0])
        assert engine.is_stuck and not engine.done(tickets[0])
        drive.answers.set()
        for ticket in tickets:
            while not engine.done(ticket):
                time.sleep(0.001)
            with pytest.raises(StorageError, match=r"ETIMEDOUT.*The last commit is intact"):
                engine.wait(ticket)
        # Each thread had begun one. The memory of the others was not even looked at.
        assert os.fstat(file.fd).st_size == 2 * BLOCK
        assert [bool(table["crc"][0]) for table in tables] == [True] * 2 + [False] * 6
        engine.close()


@pytest.mark.parametrize("ending", ["wait", "close", "nothing"])
def test_the_process_ends_without_a_drive_that_aiofiles_has_given_up(ending: str, tmp_path: Path) -> None:
    code = (
        "import ctypes, mmap, os, sys, threading, numpy as np\n"
        "from zero_offload.base.errors import StorageError\n"
        "from zero_offload.hardware.abi import IoOp\n"
        "from zero_offload.storage.files import engine\n"
        "from zero_offload.storage.files.engines import AIOFILES, open_engine\n"
        "engine.STALL_LIMIT_S, BLOCK_DTYPE = 0.3, engine.BLOCK_DTYPE\n"
        "os.pwritev = lambda *_: threading.Event().wait()\n"
        "engine = open_engine(AIOFILES)\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "memory = mmap.mmap(-1, 4096)\n"
        "blocks = np.zeros(1, BLOCK_DTYPE)\n"
        "blocks['nbytes'], blocks['fd'] = 4096, fd\n"
        "ticket = engine.submit(IoOp.WRITE, blocks, ctypes.addressof(ctypes.c_char.from_buffer(memory)))\n"
        "try:\n    engine.wait(ticket) if sys.argv[2] == 'wait' else None\n"
        "except StorageError as error:\n    print(error)\n"
        "engine.close() if sys.argv[2] != 'nothing' else None\n"
        "print(engine.is_stuck)\n"
    )
    done = run_script(code, str(tmp_path / "file"), ending)
    assert done.returncode == 0, done.stderr
    *told, is_stuck = done.stdout.splitlines()
    assert bool(told) == (ending == "wait") and is_stuck == str(ending != "nothing"), done.stdout


def test_done_and_a_second_wait(engine: FileEngine, file: File) -> None:
    memory = Memory(BLOCK)
    ticket = engine.submit(IoOp.WRITE, file.table(1), memory.address)
    for _ in range(10_000):
        if engine.done(ticket):
            break
        threading.Event().wait(0.001)
    assert engine.done(ticket)
    engine.wait(ticket)
    for call in (engine.wait, engine.done):
        with pytest.raises(ConfigError, match="not open"):
            call(ticket)


@native_only
@pytest.mark.parametrize("fault", [Fault.NONE, Fault.WRITE_EIO])
def test_a_wait_that_is_interrupted_can_be_repeated(
    fault: Fault, engine: NativeEngine, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes out where the call that waits returns: what it has found is not lost, an error neither."""
    original = native.io_wait

    def interrupted(*args: Any) -> None:
        original(*args)
        raise KeyboardInterrupt

    engine.inject_fault(fault)
    memory = Memory(BLOCK)
    ticket = engine.submit(IoOp.WRITE, file.table(1), memory.address)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(native_engine, "WAIT_SLICE_S", 60.0)
        patch.setattr(native, "io_wait", interrupted)
        engine.wait(ticket)
    assert engine.done(ticket)
    with pytest.raises(StorageError, match="EIO") if fault is Fault.WRITE_EIO else contextlib.nullcontext():
        engine.wait(ticket)
    with pytest.raises(ConfigError, match="not open"):
        engine.wait(ticket)


@native_only
def test_what_is_launched_as_a_signal_strikes_has_ended_when_the_exception_arrives(
    engine: NativeEngine, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ticket is lost, so nothing could tell when its memory may be used again."""
    original = native.io_submit

    def interrupted(*args: Any) -> None:
        original(*args)
        threading.Timer(0.1, engine.inject_fault, [Fault.NONE]).start()
        raise KeyboardInterrupt

    memory, blocks = Memory(BLOCK).fill(3), file.table(1)
    engine.inject_fault(Fault.STALL)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(native, "io_submit", interrupted)
        engine.submit(IoOp.WRITE, blocks, memory.address)
    source = memory.bytes.copy()
    memory.fill(4)
    engine.wait(engine.submit(IoOp.READ, blocks, memory.address))
    assert np.array_equal(memory.bytes, source)


def test_no_blocks_are_done_at_once(engine: FileEngine, file: File) -> None:
    ticket = engine.submit(IoOp.READ, file.table(0), 0)
    assert engine.done(ticket)
    engine.wait(ticket)


def test_close_waits_and_keeps_dropped_tables_alive(engine: FileEngine, tmp_path: Path) -> None:
    memory = Memory(4096).fill(12)
    with open(tmp_path / "file", "w+b") as stream:
        for i in range(200):
            engine.submit(
                IoOp.WRITE, File(tmp_path / "file", stream.fileno()).table(1, 4096, first=4096 * i), memory.address
            )
            gc.collect(0)
        engine.close()
        engine.close()
        assert os.pread(stream.fileno(), 200 * 4096, 0) == memory.bytes.tobytes() * 200


def test_a_closed_engine_holds_no_file(engine: FileEngine, tmp_path: Path) -> None:
    """A lock lasts until the last one who has the file open lets go of it. The engine itself is still there."""
    memory = Memory(BLOCK)
    with open(tmp_path / "file", "w+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        engine.name_file(stream.fileno(), stream.name)
        engine.wait(engine.submit(IoOp.WRITE, File(tmp_path / "file", stream.fileno()).table(1), memory.address))
        engine.close()
    with open(tmp_path / "file", "rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_closed_engine_says_so(engine: FileEngine, file: File) -> None:
    engine.close()
    with pytest.raises(StorageError, match="closed"):
        engine.submit(IoOp.READ, file.table(1), Memory(BLOCK).address)


def test_a_forked_child_is_refused(engine: FileEngine, file: File) -> None:
    blocks, memory = file.table(1), Memory(BLOCK)
    child = os.fork()
    if child == 0:
        try:
            engine.submit(IoOp.READ, blocks, memory.address)
        except StorageError as error:
            engine.close()
            os._exit(0 if "is a fork of" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.wait(engine.submit(IoOp.WRITE, blocks, memory.address))


def test_refuses_what_is_no_block_table(engine: FileEngine, file: File) -> None:
    with pytest.raises(ConfigError, match="strides"):
        engine.submit(IoOp.READ, file.table(4)[::2], Memory(2 * BLOCK).address)
    with pytest.raises(ConfigError, match="float64"):
        engine.submit(IoOp.READ, np.zeros(3), Memory(BLOCK).address)
    with pytest.raises(ConfigError, match="base is NULL"):
        engine.submit(IoOp.READ, file.table(1), 0)


# Drives


@native_only
def test_a_slow_drive_does_not_hold_up_another(
    engine: FileEngine, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    two = open_or_skip(KINDS[request.node.callspec.params["engine"]], num_drives=2)
    assert isinstance(two, NativeEngine)
    memory = Memory(20 * BLOCK).fill(1)
    with open(tmp_path / "slow", "w+b") as slow, open(tmp_path / "fast", "w+b") as fast:
        two.name_file(slow.fileno(), "slow", 0)
        two.name_file(fast.fileno(), "fast", 1)
        two.inject_fault(Fault.STALL)
        held = two.submit(IoOp.WRITE, File(tmp_path / "slow", slow.fileno()).table(20), memory.address)
        while native.io_stats(two.handle).jobs_queued == 20:  # the fault is for the first block that any drive takes
            threading.Event().wait(0.001)
        for _ in range(3):
            two.wait(two.submit(IoOp.WRITE, File(tmp_path / "fast", fast.fileno()).table(20), memory.address))
        assert not two.done(held) and _moved_bytes(two) >= 60 * BLOCK
        two.inject_fault(Fault.NONE)
        two.wait(held)
        two.close()


def test_a_submission_over_several_drives(engine: FileEngine, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    many = open_or_skip(KINDS[request.node.callspec.params["engine"]], num_drives=3)
    source, target = Memory(9 * BLOCK).fill(1), Memory(9 * BLOCK)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(tmp_path / str(i), "w+b")) for i in range(3)]
        blocks = File(tmp_path, 0).table(9)
        blocks["fd"] = [files[i % 3].fileno() for i in range(9)]
        for i, file in enumerate(files):
            many.name_file(file.fileno(), f"drive{i}", i)
        many.wait(many.submit(IoOp.WRITE, blocks, source.address))
        many.wait(many.submit(IoOp.READ, blocks, target.address))
        assert np.array_equal(source.bytes, target.bytes)
        os.truncate(tmp_path / "1", 0)
        with pytest.raises(IntegrityError, match="offset 65536 of drive1 .block 2 of 9"):
            many.wait(many.submit(IoOp.READ, blocks, target.address))
        many.close()


@pytest.mark.parametrize("kind", ["threads", "io_uring"])
def test_a_descriptor_that_comes_to_stand_for_another_file(kind: str, tmp_path: Path) -> None:
    engine = open_or_skip(KINDS[kind])
    memory = Memory(BLOCK).fill(1)
    numbers = []
    for name in ("first", "second"):
        with open(tmp_path / name, "w+b", buffering=0) as stream:
            numbers.append(stream.fileno())
            engine.name_file(stream.fileno(), name)
            engine.wait(engine.submit(IoOp.WRITE, File(tmp_path / name, stream.fileno()).table(1), memory.address))
        assert (tmp_path / name).read_bytes() == memory.bytes.tobytes()
        memory.fill(2)
    assert numbers[0] == numbers[1]
    engine.close()


def test_what_a_sandbox_forbids_is_said() -> None:
    """As container runtimes do by default."""
    code = (
        "from tests.helpers.seccomp import forbid_io_uring\n"
        "from zero_offload.base import errors\n"
        "from zero_offload.storage.files.engines import IO_URING, open_engine\n"
        "forbid_io_uring()\n"
        "try:\n    open_engine(IO_URING)\n"
        "except errors.ConfigError as error:\n    print(error)\n"
    )
    done = run_script(code)
    assert "io_uring is not to be had here: io_uring_setup: Operation not permitted" in done.stdout


@pytest.mark.parametrize("what", ["num_threads", "depth", "request_bytes"])
def test_settings_that_cannot_work(what: str) -> None:
    with pytest.raises(ConfigError, match="is 0, not"):
        open_engine(replace(IO_URING, **{what: 0}))


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 255, 256, 4096, 100_001, (1 << 22) + 5])
def test_the_portable_checksum_is_the_native_one(nbytes: int) -> None:
    memory = Memory(nbytes).fill(nbytes)
    for seed in (0, 5, 2**32 - 1):
        expected = native.crc32c(seed, memory.address, nbytes)
        with without_library():
            assert crc32c(memory.address, nbytes, seed=seed) == expected


def test_a_wait_outlives_close(engine: FileEngine, file: File) -> None:
    """Another thread is in `wait` when the engine is closed, again and again: it gets its result."""
    memory, problems = Memory(8 * BLOCK).fill(1), []

    def wait(other: FileEngine, ticket: Ticket) -> None:
        try:
            other.wait(ticket)
        except StorageError as error:
            if "closed" not in str(error):  # it came too late
                problems.append(error)

    settings = engine.settings  # type: ignore[attr-defined]
    for _ in range(20):
        other = open_engine(settings)
        ticket = other.submit(IoOp.WRITE, file.table(8), memory.address)
        thread = threading.Thread(target=wait, args=(other, ticket))
        thread.start()
        other.close()
        thread.join()
        del other
    assert not problems


def test_aiofiles_goes_on_while_the_interpreter_ends(tmp_path: Path) -> None:
    """Thread pools take nothing any more then."""
    code = (
        "import atexit, ctypes, mmap, os, sys, numpy as np\n"
        "from zero_offload.hardware.abi import IoOp\n"
        "from zero_offload.storage.files.engine import BLOCK_DTYPE\n"
        "from zero_offload.storage.files.engines import AIOFILES, open_engine\n"
        "engine = open_engine(AIOFILES)\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "memory = mmap.mmap(-1, 4096)\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(memory))\n"
        "blocks = np.zeros(1, BLOCK_DTYPE)\n"
        "blocks['nbytes'], blocks['fd'] = 4096, fd\n"
        "def late():\n"
        "    memory[:] = b'x' * 4096\n"
        "    engine.wait(engine.submit(IoOp.WRITE, blocks, address))\n"
        "atexit.register(late)\n"
    )
    done = run_script(code, str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_bytes() == b"x" * 4096


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of `time.monotonic`."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def _looks_until_over(clock: list[float], watch: StallWatch, step_s: float, moved_bytes: int) -> int:
    looks = 1
    clock[0] += step_s
    while not watch.is_over(moved_bytes):
        looks += 1
        clock[0] += step_s
    return looks


def test_it_is_over_when_nothing_has_moved_for_so_long(clock: list[float]) -> None:
    watch = StallWatch()
    assert not watch.is_over(7)
    assert _looks_until_over(clock, watch, 0.5, 7) == 2 * STALL_LIMIT_S + 1


def test_any_byte_begins_anew(clock: list[float]) -> None:
    watch = StallWatch()
    for moved_bytes in range(5):
        for _ in range(int(STALL_LIMIT_S)):
            assert not watch.is_over(moved_bytes)
            clock[0] += 1
    assert _looks_until_over(clock, watch, 1, 4) <= 2


def test_time_in_which_the_process_was_stopped_is_not_the_drives(clock: list[float]) -> None:
    watch = StallWatch()
    assert not watch.is_over(0)
    assert _looks_until_over(clock, watch, 3600, 0) == STALL_LIMIT_S + 1
