from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from zero_offload.abi import Fault
from zero_offload.errors import ConfigError, IntegrityError, StorageError
from zero_offload.storage.engine import BLOCK_DTYPE, BlockTable, Urgency, open_engine
from zero_offload.storage.native_engine import NativeEngine

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


@pytest.fixture
def engine() -> Iterator[NativeEngine]:
    engine = open_engine(3)
    assert isinstance(engine, NativeEngine)
    yield engine
    engine.close()


@pytest.fixture(params=["buffered", "direct"])
def file(request: pytest.FixtureRequest, tmp_path: Path, engine: NativeEngine) -> Iterator[File]:
    path = tmp_path / "extents.bin"
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if request.param == "direct" else 0)
    try:
        fd = os.open(path, flags, 0o600)
    except OSError:
        pytest.skip(f"{tmp_path} has no O_DIRECT")
    engine.name_file(fd, str(path))
    yield File(path, fd)
    os.close(fd)


def test_round_trip_sets_and_verifies_checksums(engine: NativeEngine, file: File) -> None:
    source, target = Memory(7 * BLOCK).fill(1), Memory(7 * BLOCK)
    blocks = file.table(7)
    engine.wait(engine.write(blocks, source.address))
    assert len(set(blocks["crc"].tolist())) == 7
    ticket = engine.read(blocks, target.address)
    engine.wait(ticket)
    assert np.array_equal(source.bytes, target.bytes)
    assert file.path.read_bytes() == source.bytes.tobytes()
    stats = engine.stats()
    assert (stats.bytes_read, stats.bytes_written, stats.jobs_queued) == (7 * BLOCK, 7 * BLOCK, 0)
    assert stats.busy_read_s > 0 and stats.busy_write_s > 0


def test_blocks_may_be_anywhere_in_any_order(engine: NativeEngine, file: File) -> None:
    source, target = Memory(4 * BLOCK).fill(2), Memory(2 * BLOCK)
    blocks = file.table(4)[::-1].copy()
    engine.wait(engine.write(blocks, source.address))
    engine.wait(engine.read(blocks[1:3], target.address))
    assert np.array_equal(target.bytes, source.bytes[BLOCK : 3 * BLOCK])


def test_many_tickets_from_many_threads(engine: NativeEngine, file: File) -> None:
    """Each thread owns a range of the file and reads back what it wrote, while the others do too."""
    problems: list[str] = []

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        source, target = Memory(8 * 4096).fill(number), Memory(8 * 4096)
        blocks = file.table(8, 4096, first=number * 8 * 4096)
        for _ in range(20):
            begin, end = sorted(rng.integers(0, 9, 2))
            part = blocks[begin:end]
            engine.wait(engine.write(part, source.address + 4096 * int(begin)))
            ticket = engine.read(part, target.address, Urgency(int(rng.integers(0, 2))))
            engine.wait(ticket)
            if target.bytes[: 4096 * (end - begin)].tobytes() != source.bytes[4096 * begin : 4096 * end].tobytes():
                problems.append(f"thread {number}, blocks {begin} to {end}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_many_tickets_in_flight_at_once(engine: NativeEngine, file: File) -> None:
    source, target = Memory(100 * 4096).fill(3), Memory(100 * 4096)
    tables = [file.table(1, 4096, first=i * 4096) for i in range(100)]
    writes = [engine.write(table, source.address + 4096 * i) for i, table in enumerate(tables)]
    for ticket in reversed(writes):
        engine.wait(ticket)
    reads = [engine.read(table, target.address + 4096 * i) for i, table in enumerate(tables)]
    for ticket in reads:
        engine.wait(ticket)
    assert np.array_equal(source.bytes, target.bytes)


def test_urgent_goes_before_what_has_not_started(tmp_path: Path) -> None:
    engine = open_engine(1)
    big = Memory(64 << 20)
    first, second = Memory(4096).fill(1), Memory(4096).fill(2)
    with open(tmp_path / "file", "w+b") as stream:
        file = File(tmp_path / "file", stream.fileno())
        busy = engine.write(file.table(1, len(big.bytes), first=4096), big.address)
        normal = engine.write(file.table(1, 4096), first.address)
        urgent = engine.write(file.table(1, 4096), second.address, Urgency.URGENT)
        for ticket in (busy, normal, urgent):
            engine.wait(ticket)
        # The last writer was the normal one.
        assert os.pread(file.fd, 4096, 0) == first.bytes.tobytes()
        engine.close()


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
    ticket = engine.write(file.table(5), source.address)
    with pytest.raises(StorageError, match=message):
        engine.wait(ticket)
    engine.wait(engine.write(file.table(5), source.address))


def test_a_failing_read_names_the_place(engine: NativeEngine, file: File) -> None:
    source = Memory(5 * BLOCK).fill(5)
    blocks = file.table(5)
    engine.wait(engine.write(blocks, source.address))
    engine.inject_fault(Fault.READ_EIO, 2)
    with pytest.raises(StorageError, match=r"read of 64 KiB at offset 65536 .*block 2 of 5.*EIO"):
        engine.wait(engine.read(blocks, source.address))


def test_a_failure_starts_no_further_block(tmp_path: Path) -> None:
    engine = open_engine(1)
    assert isinstance(engine, NativeEngine)
    source = Memory(50 * 4096).fill(6)
    with open(tmp_path / "file", "w+b") as stream:
        file = File(tmp_path / "file", stream.fileno())
        engine.inject_fault(Fault.WRITE_EIO, 3)
        with pytest.raises(StorageError):
            engine.wait(engine.write(file.table(50, 4096), source.address))
        assert os.fstat(file.fd).st_size == 2 * 4096
        assert engine.stats().jobs_queued == 0
        engine.wait(engine.write(file.table(50, 4096), source.address))
        engine.close()


def test_a_full_device() -> None:
    engine = open_engine(1)
    source = Memory(4096)
    fd = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(StorageError, match=f"file descriptor {fd} .*ENOSPC"):
        engine.wait(engine.write(File(Path("/dev/full"), fd).table(1, 4096), source.address))
    os.close(fd)
    engine.close()


def test_a_short_write_goes_on(engine: NativeEngine, file: File) -> None:
    source, target = Memory(3 * BLOCK).fill(7), Memory(3 * BLOCK)
    blocks = file.table(3)
    engine.inject_fault(Fault.WRITE_SHORT, 2)
    engine.wait(engine.write(blocks, source.address))
    engine.wait(engine.read(blocks, target.address))
    assert np.array_equal(source.bytes, target.bytes)


def test_a_bit_flipped_once_on_the_way_is_read_again(engine: NativeEngine, file: File) -> None:
    source, target = Memory(3 * BLOCK).fill(8), Memory(3 * BLOCK)
    blocks = file.table(3)
    engine.wait(engine.write(blocks, source.address))
    engine.inject_fault(Fault.READ_FLIP, 2)
    engine.wait(engine.read(blocks, target.address))
    assert np.array_equal(source.bytes, target.bytes)
    engine.inject_fault(Fault.READ_FLIP, 2)
    engine.wait(engine.read_unverified(blocks, target.address))
    assert not np.array_equal(source.bytes, target.bytes)


def test_a_bit_flipped_on_the_drive_is_found(engine: NativeEngine, file: File) -> None:
    source, target = Memory(4 * BLOCK).fill(9), Memory(4 * BLOCK)
    blocks = file.table(4)
    engine.inject_fault(Fault.WRITE_FLIP, 3)
    engine.wait(engine.write(blocks, source.address))
    expected = int(blocks["crc"][2])
    with pytest.raises(IntegrityError, match=rf"offset 131072 .*block 3 of 4.* expected {expected:08x}"):
        engine.wait(engine.read(blocks, target.address))
    engine.wait(engine.read_unverified(blocks, target.address))
    assert (source.bytes != target.bytes).sum() == 1


@pytest.mark.parametrize("what", ["seed", "crc", "offset"])
def test_another_block_is_not_taken_for_this_one(engine: NativeEngine, file: File, what: str) -> None:
    source = Memory(2 * BLOCK).fill(10)
    blocks = file.table(2)
    engine.wait(engine.write(blocks, source.address))
    blocks[what] = blocks[what][::-1].copy()
    with pytest.raises(IntegrityError, match="block 1 of 2"):
        engine.wait(engine.read(blocks, source.address))


@pytest.mark.parametrize("size", [0, BLOCK, 2 * BLOCK + 4096, 2 * BLOCK + 777])
def test_a_truncated_file(engine: NativeEngine, file: File, size: int) -> None:
    memory = Memory(3 * BLOCK).fill(11)
    blocks = file.table(3)
    engine.wait(engine.write(blocks, memory.address))
    os.truncate(file.path, size)
    with pytest.raises(IntegrityError, match=rf"block {size // BLOCK + 1} of 3.*ends inside the block"):
        engine.wait(engine.read(blocks, memory.address))


def test_a_wrong_descriptor(engine: NativeEngine) -> None:
    memory = Memory(4096)
    fd = os.open("/dev/null", os.O_RDWR)
    os.close(fd)
    blocks = File(Path("gone"), fd).table(1, 4096)
    with pytest.raises(StorageError, match="EBADF.*closed while it was in use"):
        engine.wait(engine.write(blocks, memory.address))


def test_a_timeout_leaves_the_ticket_open(tmp_path: Path) -> None:
    engine = open_engine(1)
    memory = Memory(64 << 20)
    with open(tmp_path / "file", "w+b") as stream:
        ticket = engine.write(File(tmp_path / "file", stream.fileno()).table(64, 1 << 20), memory.address)
        with pytest.raises(StorageError, match=r"of 64 MiB moved in 0 s.*wait again"):
            engine.wait(ticket, timeout_s=0.0)
        engine.wait(ticket, timeout_s=60.0)
        assert os.fstat(stream.fileno()).st_size == 64 << 20
        engine.close()


def test_done_and_a_second_wait(engine: NativeEngine, file: File) -> None:
    memory = Memory(BLOCK)
    ticket = engine.write(file.table(1), memory.address)
    for _ in range(10_000):
        if engine.done(ticket):
            break
        threading.Event().wait(0.001)
    assert engine.done(ticket)
    engine.wait(ticket)
    for call in (engine.wait, engine.done):
        with pytest.raises(ConfigError, match="not open"):
            call(ticket)


def test_no_blocks_are_done_at_once(engine: NativeEngine, file: File) -> None:
    ticket = engine.read(file.table(0), 0)
    assert engine.done(ticket)
    engine.wait(ticket)


def test_close_waits_and_keeps_dropped_tables_alive(tmp_path: Path) -> None:
    engine = open_engine(1)
    memory = Memory(4096).fill(12)
    with open(tmp_path / "file", "w+b") as stream:
        for i in range(200):
            engine.write(File(tmp_path / "file", stream.fileno()).table(1, 4096, first=4096 * i), memory.address)
            gc.collect(0)
        engine.close()
        engine.close()
        assert os.pread(stream.fileno(), 200 * 4096, 0) == memory.bytes.tobytes() * 200


def test_a_closed_engine_says_so(engine: NativeEngine, file: File) -> None:
    engine.close()
    with pytest.raises(StorageError, match="closed"):
        engine.read(file.table(1), Memory(BLOCK).address)


def test_a_forked_child_is_refused(engine: NativeEngine, file: File) -> None:
    blocks, memory = file.table(1), Memory(BLOCK)
    child = os.fork()
    if child == 0:
        try:
            engine.read(blocks, memory.address)
        except StorageError as error:
            engine.close()
            os._exit(0 if "is a fork of" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    engine.wait(engine.write(blocks, memory.address))


def test_refuses_what_is_no_block_table(engine: NativeEngine, file: File) -> None:
    with pytest.raises(ConfigError, match="strides"):
        engine.read(file.table(4)[::2], Memory(2 * BLOCK).address)
    with pytest.raises(ConfigError, match="float64"):
        engine.read(np.zeros(3), Memory(BLOCK).address)
    with pytest.raises(ConfigError, match="base is NULL"):
        engine.read(file.table(1), 0)
