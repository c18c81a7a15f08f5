"""Spans of files at any byte, read by blocks: what comes, what is verified, and what stays out of reach."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zero_offload.base.errors import IntegrityError, StorageError
from zero_offload.base.events import Counters
from zero_offload.base.types import SECTOR, Tier
from zero_offload.hardware.abi import Fault
from zero_offload.storage.files import base_file, base_files
from zero_offload.storage.files.base_file import (
    BLOCK_BYTES,
    BaseFile,
    BaseSpan,
    Stretch,
    check_in_place,
    fingerprint_of,
)
from zero_offload.storage.files.base_files import BATCH_BLOCKS, NUM_BATCHES, BaseFiles
from zero_offload.storage.files.engine import Urgency
from zero_offload.storage.files.engines import open_engine

LONG = (NUM_BATCHES + 2) * BATCH_BLOCKS * BLOCK_BYTES + 12_345
"""More than is on its way at a time, and a last block of no whole sector."""


def write(path: Path, nbytes: int, seed: int = 0) -> bytes:
    """A file with a header of 16 bytes, and random ones."""
    head = b"{}              "
    content = len(head).to_bytes(8, "little") + head + random.Random(seed).randbytes(nbytes - 24)
    path.write_bytes(content)
    return content


@pytest.fixture(params=["threads", "io_uring", "aiofiles"])
def base(request: pytest.FixtureRequest) -> Iterator[BaseFiles]:
    files = BaseFiles(Counters(), io_engine=request.param)
    yield files
    files.close()


def read(base: BaseFiles, spans: list[BaseSpan], begin: int, end: int) -> bytes:
    out = torch.full((end - begin,), 0xAA, dtype=torch.uint8)
    base.read(spans, begin, end, out.data_ptr())
    return out.numpy().tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_is_what_files_have_and_zeros_between(seed: int, base: BaseFiles, tmp_path: Path) -> None:
    draw = random.Random(seed)
    contents = [write(tmp_path / f"{n}", draw.choice([5_000, BLOCK_BYTES, 3 * BLOCK_BYTES + 77]), n) for n in range(3)]
    files = [base.open(tmp_path / f"{n}") for n in range(3)]
    expected, spans = bytearray(), []
    for _ in range(40):
        number = draw.randrange(3)
        offset = draw.randrange(len(contents[number]))
        nbytes = draw.randint(1, min(len(contents[number]) - offset, draw.choice([100, 70_000, 2 * BLOCK_BYTES])))
        expected += bytes(draw.choice([0, 0, 512]))
        spans.append(BaseSpan(len(expected), nbytes, files[number], offset))
        expected += contents[number][offset : offset + nbytes]
    expected += bytes(300)
    assert read(base, spans, 0, len(expected)) == bytes(expected)
    for _ in range(10):
        begin = draw.randrange(len(expected))
        end = draw.randint(begin, len(expected))
        assert read(base, spans, begin, end) == bytes(expected[begin:end])
    places = sorted(draw.randrange(len(expected)) for _ in range(10))
    wanted = list(itertools.pairwise(places))[::2]
    outs = [torch.full((end - begin,), 0xAA, dtype=torch.uint8) for begin, end in wanted]
    together = [Stretch(begin, end, out.data_ptr()) for (begin, end), out in zip(wanted, outs, strict=True)]
    base.launch_read("s", spans, together).wait()
    assert [out.numpy().tobytes() for out in outs] == [bytes(expected[begin:end]) for begin, end in wanted]


def test_long_reads_pass_through_bounded_memory_and_urgent_ones_go_first(base: BaseFiles, tmp_path: Path) -> None:
    content = write(tmp_path / "long", LONG)
    file = base.open(tmp_path / "long")
    whole = [BaseSpan(0, LONG, file, 0)]
    outs = [torch.zeros(LONG, dtype=torch.uint8) for _ in range(3)]
    launched = [base.launch_read("s", whole, [Stretch(0, LONG, out.data_ptr())]) for out in outs]
    part = torch.zeros(10, dtype=torch.uint8)
    base.launch_read("s", whole, [Stretch(5, 15, part.data_ptr())], Urgency.URGENT).wait()
    assert not launched[-1].done() and part.numpy().tobytes() == content[5:15]
    for transfer, out in zip(launched, outs, strict=True):
        transfer.wait()
        transfer.wait()
        assert transfer.done() and out.numpy().tobytes() == content
    assert base.memory_bytes == NUM_BATCHES * BATCH_BLOCKS * BLOCK_BYTES
    assert file.known.all()


def test_the_bytes_that_are_counted_are_those_of_whole_blocks(base: BaseFiles, tmp_path: Path) -> None:
    write(tmp_path / "f", 3 * BLOCK_BYTES + 100)
    file = base.open(tmp_path / "f")
    # Two spans share the first block; the second ends in the next.
    spans = [BaseSpan(0, 10, file, 5), BaseSpan(10, BLOCK_BYTES, file, 50), BaseSpan(2 * BLOCK_BYTES, 7, file, LONG)]
    read(base, spans[:2], 0, BLOCK_BYTES + 10)
    counted = base.counters.snapshot()
    assert counted["read.nvme"] == 2 * BLOCK_BYTES and f"written.{Tier.NVME.value}" not in counted
    read(base, [BaseSpan(0, 20, file, 3 * BLOCK_BYTES + 10)], 0, 20)
    assert base.counters.snapshot()["read.nvme"] == 2 * BLOCK_BYTES + 100
    outs = [torch.zeros(10, dtype=torch.uint8) for _ in "ab"]
    spans = [BaseSpan(0, 20, file, BLOCK_BYTES + 10)]
    base.launch_read("s", spans, [Stretch(10 * n, 10 * n + 10, out.data_ptr()) for n, out in enumerate(outs)]).wait()
    assert base.counters.snapshot()["read.nvme"] == 3 * BLOCK_BYTES + 100


def test_files_are_opened_to_read_only(base: BaseFiles, tmp_path: Path) -> None:
    write(tmp_path / "f", 9_000)
    file = base.open(tmp_path / "f")
    fds = [each.fd for each in file.descriptors]
    assert {fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE for fd in fds} == {os.O_RDONLY}
    assert base.open(tmp_path / "f") is file
    base.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    with pytest.raises((StorageError, IntegrityError)):
        read(base, [BaseSpan(0, 5, file, 0)], 0, 5)


@pytest.mark.parametrize("refuses", ["at once", "with the first read"])
def test_a_file_system_without_o_direct(refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, flags: Any, *more: Any) -> Any:
        if refuses == "at once" and not flags & os.O_DIRECT:
            return call(path, flags, *more)
        raise OSError(errno.EINVAL, "Invalid argument")

    call = os.open
    monkeypatch.setattr(base_file.os, "open" if refuses == "at once" else "preadv", refuse)
    content = write(tmp_path / "f", 2 * BLOCK_BYTES)
    base = BaseFiles(io_engine="threads")
    file = base.open(tmp_path / "f")
    assert len({each.fd for each in file.descriptors}) == 1
    assert read(base, [BaseSpan(0, len(content), file, 0)], 0, len(content)) == content
    base.close()


@pytest.mark.parametrize("nbytes", [SECTOR, BLOCK_BYTES])
def test_a_drive_that_fails_when_a_file_is_opened(nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first sector past the page cache, and with a block whose checksum is made."""

    def fail(fd: int, wanted: Any, *more: Any) -> Any:
        if (wanted if isinstance(wanted, int) else len(wanted[0])) == nbytes:
            raise OSError(errno.EIO, "Input/output error")
        return read(fd, wanted, *more)

    read = os.pread
    write(tmp_path / "f", 2 * BLOCK_BYTES)
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(base_file.os, "pread" if nbytes == BLOCK_BYTES else "preadv", fail)
    with pytest.raises(StorageError, match="/f: Input/output error"):
        BaseFile.open(tmp_path / "f")
    assert os.listdir("/proc/self/fd") == before


def flip(path: Path, offset: int) -> None:
    """Change one byte, and nothing that a directory shows of the file."""
    info = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def test_a_block_that_was_read_is_verified_from_then_on(base: BaseFiles, tmp_path: Path) -> None:
    write(tmp_path / "f", 6 * BLOCK_BYTES)
    file = base.open(tmp_path / "f")
    span = [BaseSpan(0, 2 * BLOCK_BYTES, file, 0)]
    flip(tmp_path / "f", BLOCK_BYTES + 5)  # not read yet
    read(base, span, 0, 2 * BLOCK_BYTES)
    flip(tmp_path / "f", BLOCK_BYTES + 9)
    read(base, span, 0, 10)
    with pytest.raises(
        IntegrityError, match=r"/f, a file of the base.*holds other bytes.*offset 1048576.*Put the file"
    ):
        read(base, span, 0, 2 * BLOCK_BYTES)
    # An error of one read leaves the others alone.
    read(base, span, 0, 10)


def test_known_and_new_blocks_in_one_read(base: BaseFiles, tmp_path: Path) -> None:
    content = write(tmp_path / "f", 6 * BLOCK_BYTES)
    file = base.open(tmp_path / "f")
    whole = [BaseSpan(0, len(content), file, 0)]
    read(base, whole, BLOCK_BYTES + 3, BLOCK_BYTES + 9)
    assert file.known.tolist() == [False, True, False, True, False, True]
    assert read(base, whole, BLOCK_BYTES, 3 * BLOCK_BYTES) == content[BLOCK_BYTES : 3 * BLOCK_BYTES]
    assert read(base, whole, 0, len(content)) == content
    flip(tmp_path / "f", 4 * BLOCK_BYTES)
    with pytest.raises(IntegrityError, match="offset 4194304"):
        read(base, whole, 0, len(content))


class RelayedEngine:
    """An engine of which a test replaces a call."""

    def __init__(self, *args: Any) -> None:
        self.engine = open_engine(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def test_two_first_reads_of_a_block_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one was launched when no checksum was known yet."""
    content = write(tmp_path / "f", 6 * BLOCK_BYTES)
    both = threading.Event()

    class Engine(RelayedEngine):
        count = 0

        def submit(self, *args: Any) -> Any:
            ticket = self.engine.submit(*args)
            while not self.engine.done(ticket):
                time.sleep(0.001)
            self.count += 1
            if self.count == 1:
                assert both.wait(60)
                flip(tmp_path / "f", BLOCK_BYTES - 1)
            return ticket

    monkeypatch.setattr(base_files, "open_engine", Engine)
    base = BaseFiles(io_engine="threads")
    file = base.open(tmp_path / "f")
    span, outs = [BaseSpan(0, len(content), file, 0)], [torch.zeros(2 * BLOCK_BYTES, dtype=torch.uint8) for _ in "ab"]
    first = base.launch_read("s", span, [Stretch(0, 10, outs[0].data_ptr())])
    second = base.launch_read("s", span, [Stretch(0, 2 * BLOCK_BYTES, outs[1].data_ptr())])
    both.set()
    first.wait()
    with pytest.raises(IntegrityError, match="holds other bytes than when it was first read.*offset 0"):
        second.wait()
    assert read(base, span, BLOCK_BYTES, 2 * BLOCK_BYTES) == content[BLOCK_BYTES : 2 * BLOCK_BYTES]
    base.close()


def test_a_file_that_became_shorter(base: BaseFiles, tmp_path: Path) -> None:
    write(tmp_path / "f", 6 * BLOCK_BYTES)
    file = base.open(tmp_path / "f")
    os.truncate(tmp_path / "f", 2 * BLOCK_BYTES)
    with pytest.raises(IntegrityError, match="has 2097152 bytes now, and had 6291456"):
        read(base, [BaseSpan(0, 100, file, 4 * BLOCK_BYTES)], 0, 100)
    with pytest.raises(IntegrityError, match="has 2097152 bytes now"):
        check_in_place([file])


@pytest.mark.parametrize("how", ["deleted", "replaced", "touched"])
def test_a_name_that_leads_elsewhere(how: str, base: BaseFiles, tmp_path: Path) -> None:
    content = write(tmp_path / "f", 9_000)
    file = base.open(tmp_path / "f")
    if how == "deleted":
        (tmp_path / "f").unlink()
    elif how == "replaced":
        (tmp_path / "g").write_bytes(content)
        (tmp_path / "g").rename(tmp_path / "f")
    else:
        os.utime(tmp_path / "f", (1, 1))
        return check_in_place([file])
    with pytest.raises(IntegrityError, match="cannot be found any more" if how == "deleted" else "was replaced"):
        check_in_place([file])
    assert read(base, [BaseSpan(0, 9_000, file, 0)], 0, 9_000) == content  # what is open stays readable
    return None


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_a_drive_that_fails(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Any] = []

    def opened(*args: Any) -> Any:
        engines.append(open_engine(*args))
        return engines[-1]

    monkeypatch.setattr(base_files, "open_engine", opened)
    errors: list[Exception] = []
    base = BaseFiles(on_error=errors.append, io_engine=engine)
    write(tmp_path / "f", 4 * BLOCK_BYTES)
    file = base.open(tmp_path / "f")
    span, out = [BaseSpan(0, 4 * BLOCK_BYTES, file, 0)], torch.zeros(4 * BLOCK_BYTES, dtype=torch.uint8)
    read(base, span, 0, 10)
    engines[0].inject_fault(Fault.READ_EIO, 2)
    transfer = base.launch_read("s", span, [Stretch(0, 4 * BLOCK_BYTES, out.data_ptr())])
    for _ in range(2):
        with pytest.raises(StorageError, match=r"/f .*Input/output error"):
            transfer.wait()
    assert len(errors) == 1
    engines[0].inject_fault(Fault.READ_FLIP, 1)
    read(base, span, 0, 10)  # a bad transfer of a known block is made once more
    base.close()


def test_records_and_checksums_come_back(tmp_path: Path) -> None:
    content = write(tmp_path / "f", 6 * BLOCK_BYTES + 3)
    first = BaseFiles()
    file = first.open(tmp_path / "f")
    read(first, [BaseSpan(0, 9, file, 0)], 0, 9)
    record, hashes, print_ = file.record, file.hashes, fingerprint_of([file])
    first.close()
    os.utime(tmp_path / "f", (5, 5))
    second = BaseFiles()
    (again,) = second.restore([record], [[hashes], [hashes]])
    assert again.is_open and again.known.tolist() == file.known.tolist() and fingerprint_of([again]) == print_
    assert read(second, [BaseSpan(0, 6 * BLOCK_BYTES, again, 0)], 0, 6 * BLOCK_BYTES) == content[: 6 * BLOCK_BYTES]
    second.close()
    flip(tmp_path / "f", 7)
    third = BaseFiles()
    (other,) = third.restore([record], [[hashes]])
    assert not other.is_open and "header" in other.problem
    third.close()
    flip(tmp_path / "f", 7)
    flip(tmp_path / "f", 77)
    fourth = BaseFiles()
    (alike,) = fourth.restore([record], [[hashes]])
    assert alike.is_open  # neither its header nor the two blocks differ
    with pytest.raises(IntegrityError, match="holds other bytes"):
        read(fourth, [BaseSpan(0, 9, alike, 500)], 0, 9)
    fourth.close()


def test_what_a_generation_has_read_is_known_of_a_file_that_is_open_too(tmp_path: Path) -> None:
    write(tmp_path / "f", 6 * BLOCK_BYTES)
    base, open_already = BaseFiles(), BaseFiles()
    file = base.open(tmp_path / "f")
    read(base, [BaseSpan(0, 9, file, 0)], 0, 9)
    record, hashes = file.record, file.hashes
    base.close()
    flip(tmp_path / "f", 77)
    again = open_already.open(tmp_path / "f")
    assert open_already.restore([record], [[hashes]]) == [again]
    with pytest.raises(IntegrityError, match="holds other bytes"):
        read(open_already, [BaseSpan(0, 9, again, 500)], 0, 9)
    open_already.close()


def test_two_ranks_that_contradict_each_other(tmp_path: Path) -> None:
    write(tmp_path / "f", 6 * BLOCK_BYTES)
    file = BaseFile.open(tmp_path / "f")
    file.known[0], file.crcs[0] = True, np.uint32(5)
    first = file.hashes
    file.crcs[0] = 6
    with pytest.raises(IntegrityError, match="contradict each other"):
        BaseFiles().restore([file.record], [[first], [file.hashes]])
    file.close()


def test_a_copy_elsewhere(tmp_path: Path) -> None:
    content = write(tmp_path / "f", 3 * BLOCK_BYTES)
    base = BaseFiles()
    file = base.open(tmp_path / "f")
    span = [BaseSpan(0, len(content), file, 0)]
    read(base, span, 0, len(content))
    (tmp_path / "new").mkdir()
    (tmp_path / "f").rename(tmp_path / "new" / "f")
    base.move([file], {"f": tmp_path / "new" / "f"})
    assert read(base, span, 0, len(content)) == content
    check_in_place([file])
    write(tmp_path / "new" / "g", 3 * BLOCK_BYTES, seed=1)
    with pytest.raises(IntegrityError, match="another content"):
        base.move([file], {"f": tmp_path / "new" / "g"})
    with pytest.raises(IntegrityError, match="not among the files"):
        base.move([file], {})
    assert read(base, span, 0, len(content)) == content
    base.close()


def test_a_move_is_whole_or_none(tmp_path: Path) -> None:
    content = {name: write(tmp_path / name, 3 * BLOCK_BYTES, seed) for seed, name in enumerate("fg")}
    base = BaseFiles()
    files = [base.open(tmp_path / name) for name in "fg"]
    shutil.copytree(tmp_path, tmp_path / "new")
    paths = {name: tmp_path / "new" / name for name in "fg"}
    write(paths["g"], 3 * BLOCK_BYTES, seed=5)
    with pytest.raises(IntegrityError, match="another content"):
        base.move(files, paths)
    assert [file.path.parent for file in files] == [tmp_path, tmp_path]
    paths["g"].write_bytes(content["g"])
    base.move(files, paths)
    assert [file.path for file in files] == list(paths.values())
    # The file at the first place is another one now.
    other = write(tmp_path / "f", 3 * BLOCK_BYTES, seed=7)
    assert read(base, [BaseSpan(0, len(other), base.open(tmp_path / "f"), 0)], 0, len(other)) == other
    base.close()


def test_a_read_under_way_while_a_file_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = write(tmp_path / "f", 6 * BLOCK_BYTES)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "f").write_bytes(content)
    base = BaseFiles(io_engine="threads")
    file = base.open(tmp_path / "f")
    launch, moved = threading.Event(), threading.Event()

    class Engine(RelayedEngine):
        def submit(self, *args: Any) -> Any:
            launch.set()
            assert moved.wait(60)
            return self.engine.submit(*args)

    monkeypatch.setattr(base_files, "open_engine", Engine)
    out = torch.zeros(len(content), dtype=torch.uint8)
    transfer = base.launch_read("s", [BaseSpan(0, len(content), file, 0)], [Stretch(0, len(content), out.data_ptr())])
    assert launch.wait(60)
    base.move([file], {"f": tmp_path / "new" / "f"})
    moved.set()
    transfer.wait()
    assert out.numpy().tobytes() == content
    base.close()


def test_what_two_restores_name_is_one_file(tmp_path: Path) -> None:
    """Also where it is gone: a second zo.offload restores further sections of one base."""
    write(tmp_path / "f", 3 * BLOCK_BYTES)
    first = BaseFiles()
    file = first.open(tmp_path / "f")
    first.close()
    (tmp_path / "f").rename(tmp_path / "g")
    base = BaseFiles()
    (lost,) = base.restore([file.record], [[file.hashes]])
    assert not lost.is_open and base.restore([file.record], [[file.hashes]]) == [lost]
    base.close()


def test_an_empty_file_in_its_place(tmp_path: Path) -> None:
    write(tmp_path / "f", 3 * BLOCK_BYTES)
    first = BaseFiles()
    file = first.open(tmp_path / "f")
    first.close()
    (tmp_path / "f").write_bytes(b"")
    base = BaseFiles()
    (other,) = base.restore([file.record], [[file.hashes]])
    assert not other.is_open and "it has another size" in other.problem
    base.close()


def test_what_claims_a_long_header_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"\xff" * 8)
    os.truncate(tmp_path / "f", 1 << 32)
    read_bytes: list[int] = []
    pread = os.pread
    monkeypatch.setattr(base_file.os, "pread", lambda *args: [read_bytes.append(args[1]), pread(*args)][1])
    BaseFile.open(tmp_path / "f").close()
    assert max(read_bytes) < 1 << 27


def test_a_forked_child_has_no_file_open(tmp_path: Path) -> None:
    write(tmp_path / "f", 9_000)
    base = BaseFiles()
    file = base.open(tmp_path / "f")
    read(base, [BaseSpan(0, 5, file, 0)], 0, 5)
    if (pid := os.fork()) == 0:
        found = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        os._exit(any(str(tmp_path / "f") == path for path in found))
    assert os.waitpid(pid, 0)[1] == 0
    base.close()


def test_a_close_while_reads_wait(tmp_path: Path) -> None:
    write(tmp_path / "f", LONG)
    base = BaseFiles()
    file = base.open(tmp_path / "f")
    outs = [torch.zeros(LONG, dtype=torch.uint8) for _ in range(3)]
    launched = [base.launch_read("s", [BaseSpan(0, LONG, file, 0)], [Stretch(0, LONG, out.data_ptr())]) for out in outs]
    began = time.monotonic()
    base.close()
    assert time.monotonic() - began < 60
    with pytest.raises(StorageError, match="closed"):
        launched[-1].wait()
