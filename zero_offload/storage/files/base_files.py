"""Files of a base model, read where they lie: safetensors in a local folder, which hold the frozen parts of a model.

Owns their descriptors, an engine and a thread to read them, and what is known of their bytes. Opens them to read only
and locks nothing: any number of runs share them. Knows offsets, not tensors. The calls: `open` (or `restore`, of what a
generation has recorded), `launch_read` and `Transfer.wait`, `check_in_place`, `close`.

[Note: reading a base]
Values begin at any byte of a file, and O_DIRECT moves whole sectors. So blocks of `BLOCK_BYTES`, counted from the start
of the file, go to a bounce region, and from there what is wanted goes to its place. A region of `NUM_GROUPS` groups of
blocks serves all reads, in turns: the drive fills some, while the thread empties another.

[Note: what is known of a base]
These files have no checksums. The first read of a block makes its CRC-32C. Every later read is
verified against it, also in a run that goes on from a generation, which keeps the checksums. Before a generation is
resumed, or a copy of the folder takes the place of the first one, files must be alike: name, size, header (so the
names, dtypes, shapes and places of all tensors) and the bytes of two blocks. Two fine-tunes of one model differ in the
latter. A file that differs elsewhere is found by the first read of a block that differs, if it was ever read before.
The time of a file's last change is recorded and not compared: a copy or a `touch` changes it, and no byte.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import hashlib
import itertools
import mmap
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from zero_offload.base.errors import IntegrityError, StorageError, ZeroOffloadError
from zero_offload.base.events import Counters
from zero_offload.base.spans import Lane
from zero_offload.base.threads import LOOK_S, THREAD_PREFIX, Bell, Monitor, start
from zero_offload.base.types import MIB, SECTOR, Tier, format_bytes
from zero_offload.hardware.abi import IoOp
from zero_offload.hardware.kernels.checksums import crc32c
from zero_offload.storage.files.directory import DataFile
from zero_offload.storage.files.engine import BLOCK_DTYPE, FileEngine, Moved, Ticket, Urgency
from zero_offload.storage.files.engines import open_engine, pick
from zero_offload.storage.files.swap_file import Transfer
from zero_offload.storage.files.system import REAL, naming_errors
from zero_offload.storage.memory.arena import Arena, Region

BLOCK_BYTES = MIB
"""What has a checksum, counted from the start of a file. Never to be changed: generations keep checksums."""
GROUP_BLOCKS = 8
"""Blocks that are launched together."""
NUM_GROUPS = 4
"""Groups on their way at a time."""
LENGTH_NBYTES = 8
"""A safetensors file begins with the length of its header."""
HEADER_NBYTES_MAX = 100_000_000
"""What the format allows."""
_NBYTES_MAX = 1 << 44
"""Of a file that a record may name: its checksums take memory."""
_STUCK: list[BaseFiles] = []
"""Those whose drive may still write to their memory."""

NEW_PLACE = 'call zo.load_pretrained(model, "its new place/") after zo.offload'
"""What to type where a base has moved."""


class BaseFile:
    """One file of a base, and what is known of its bytes."""

    def __init__(self, path: Path, nbytes: int, mtime_ns: int, head: str) -> None:
        """`head`: the digest of the file up to its data."""
        self.path = path
        self.nbytes = nbytes
        self.mtime_ns = mtime_ns
        self.head = head
        self.crcs = np.zeros(-(-nbytes // BLOCK_BYTES), dtype=np.uint32)
        self.known = np.zeros(len(self.crcs), dtype=np.bool_)
        """Blocks that have a checksum."""
        self.problem = ""
        """Why it is not open, where it is to be read."""
        self._direct: DataFile | None = None
        self._buffered: DataFile | None = None
        self._opened: list[DataFile] = []
        """With those of earlier places, which reads under way may still use."""
        self._identity = (0, 0)

    @classmethod
    def open(cls, path: Path) -> BaseFile:
        """Raises StorageError and IntegrityError."""
        path = path.absolute()
        found = _open_to_read(path)
        try:
            info = REAL.fstat(found.fd)
            file = cls(path, info.st_size, info.st_mtime_ns, _head_of(found))
            file._take(found, info)
            for block in file.samples:
                file.crcs[block], file.known[block] = file._read_crc(block), True
        except BaseException:
            found.close()
            raise
        return file

    @property
    def samples(self) -> list[int]:
        """Blocks that are read when the file is opened."""
        return sorted({len(self.crcs) // 2, len(self.crcs) - 1}) if self.nbytes else []

    @property
    def fingerprint(self) -> str:
        """See [Note: what is known of a base]."""
        samples = [int(self.crcs[block]) for block in self.samples]
        return hashlib.sha256(f"{self.path.name} {self.nbytes} {self.head} {samples}".encode()).hexdigest()

    @property
    def is_open(self) -> bool:
        return self._buffered is not None and self._buffered.fd >= 0

    def open_at(self, path: Path) -> BaseFile:
        """The file of this name, which `become` takes over. Raises IntegrityError where it is not like this one."""
        there = BaseFile.open(path)
        try:
            self._check_alike(there)
        except BaseException:
            there.close()
            raise
        return there

    def become(self, there: BaseFile) -> None:
        """Be read where a file lies that is alike."""
        self.path, self.mtime_ns, self.problem = there.path, there.mtime_ns, ""
        self._direct, self._buffered, self._identity = there._direct, there._buffered, there._identity
        self._opened += there._opened

    def _check_alike(self, other: BaseFile) -> None:
        differ = "size" if self.nbytes != other.nbytes else "header" if self.head != other.head else ""
        for block in self.samples if not differ else ():
            if self.known[block] and self.crcs[block] != other.crcs[block]:
                differ = f"content (block {block + 1} of {len(self.crcs)})"
        if differ:
            raise IntegrityError(
                f"{other.path} is not the file that was read before as {self.path}: it has another {differ}"
            )

    def fds(self, block: int) -> tuple[int, int]:
        """The descriptor to read a block by, and its bytes. O_DIRECT takes whole sectors only."""
        assert self._direct is not None and self._buffered is not None
        nbytes = min(BLOCK_BYTES, self.nbytes - block * BLOCK_BYTES)
        return (self._direct if nbytes % SECTOR == 0 else self._buffered).fd, nbytes

    @property
    def descriptors(self) -> list[DataFile]:
        return [each for each in (self._direct, self._buffered) if each is not None]

    def what_changed(self) -> str:
        """What has become of the file of this name; empty where it is the one that is open."""
        try:
            info = os.stat(self.path)
        except OSError as error:
            return f"cannot be found any more ({error.strerror})"
        if (info.st_dev, info.st_ino) != self._identity:
            return "was replaced by another file"
        return self.what_became_of_size(info)

    def what_became_of_size(self, info: os.stat_result | None = None) -> str:
        assert self._buffered is not None
        size = (info or REAL.fstat(self._buffered.fd)).st_size
        return "" if size == self.nbytes else f"has {size} bytes now, and had {self.nbytes}"

    def _read_crc(self, block: int) -> int:
        assert self._buffered is not None
        nbytes = self.fds(block)[1]
        with naming_errors("read", self.path):
            content = os.pread(self._buffered.fd, nbytes, block * BLOCK_BYTES)
        if len(content) < nbytes:
            raise IntegrityError(f"{self.path} has become shorter while it was read; get it again")
        return crc32c(np.frombuffer(content, dtype=np.uint8).ctypes.data, nbytes)

    def _take(self, found: DataFile, info: os.stat_result) -> None:
        self._identity = (info.st_dev, info.st_ino)
        self._buffered = found
        self._direct = _open_direct(self.path, info) or found
        self._opened = self.descriptors

    def close(self) -> None:
        for each in self._opened:
            each.close()

    # What is recorded

    @property
    def record(self) -> dict[str, Any]:
        """What a generation says of it, the same on all ranks."""
        samples = {str(block): int(self.crcs[block]) for block in self.samples if self.known[block]}
        return {
            "path": str(self.path),
            "nbytes": self.nbytes,
            "mtime_ns": self.mtime_ns,
            "head": self.head,
            "samples": samples,
        }

    @property
    def hashes(self) -> dict[str, str]:
        """The checksums that this rank knows."""
        known = self.known.copy()
        return {"known": _text(np.packbits(known)), "crcs": _text(self.crcs[known].astype("<u4"))}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> BaseFile:
        """Not open yet. Raises ValueError and its like for what is not such a record."""
        if not 0 < (nbytes := int(record["nbytes"])) < _NBYTES_MAX:
            raise ValueError(f"a file of {nbytes} bytes")
        file = cls(Path(record["path"]), nbytes, int(record["mtime_ns"]), str(record["head"]))
        file.problem = "is not open"
        for block, crc in record["samples"].items():
            file.crcs[int(block)], file.known[int(block)] = int(crc), True
        return file

    def learn(self, hashes: Mapping[str, str]) -> None:
        """Take checksums that were made before. Raises IntegrityError where one contradicts what is known."""
        known = np.unpackbits(_array(hashes["known"], "u1"), count=len(self.crcs)).astype(np.bool_)
        crcs = np.zeros_like(self.crcs)
        crcs[known] = _array(hashes["crcs"], "<u4")
        if (differ := known & self.known & (crcs != self.crcs)).any():
            raise IntegrityError(
                f"{self.path}: two records of its {int(differ.argmax()) + 1}. MiB contradict each other, so it has "
                "changed between two reads; get the file again as it was"
            )
        self.crcs[known] = crcs[known]
        self.known |= known


def _text(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: str) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)


def _open_to_read(path: Path) -> DataFile:
    with naming_errors("open", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    info = REAL.fstat(fd)
    file = DataFile(fd, path, info.st_size, REAL)
    if not stat.S_ISREG(info.st_mode):
        file.close()
        raise StorageError(f"{path} is not a file; name a folder of safetensors files")
    return file


def _head_of(file: DataFile) -> str:
    """The digest of a safetensors file up to its data."""
    with naming_errors("read", file.path):
        nbytes = int.from_bytes(os.pread(file.fd, LENGTH_NBYTES, 0), "little")
        return hashlib.sha256(os.pread(file.fd, LENGTH_NBYTES + min(nbytes, HEADER_NBYTES_MAX), 0)).hexdigest()


def _open_direct(path: Path, info: os.stat_result) -> DataFile | None:
    """The same file past the page cache; None where its file system refuses that, at once or with the first read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    file = DataFile(fd, path, info.st_size, REAL)
    try:
        found = REAL.fstat(fd)
        if (found.st_dev, found.st_ino) == (info.st_dev, info.st_ino):
            REAL.set_flags(fd, REAL.get_flags(fd) & ~os.O_NONBLOCK | os.O_DIRECT)
            os.preadv(fd, [mmap.mmap(-1, SECTOR)], 0)
            return file
    except OSError as error:
        if error.errno != errno.EINVAL:
            file.close()
            raise
    file.close()
    return None


@dataclass(frozen=True)
class BaseSpan:
    """Bytes [begin, begin + nbytes) of a section, and where they lie in a file."""

    begin: int
    nbytes: int
    file: BaseFile
    offset: int

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


@dataclass
class _Cut:
    """Bytes of a file and the memory that they go to."""

    file: BaseFile
    offset: int
    address: int
    nbytes: int


@dataclass
class _Group:
    """Blocks that are read together, and what is copied from them."""

    read: _Read
    blocks: list[tuple[BaseFile, int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Where each is, in the memory of the group."""
    nbytes: int = 0
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    """From a byte of that memory, to an address, so many bytes."""
    address: int = 0
    is_verified: bool = False
    """True if all of its blocks had a checksum when it was launched."""
    ticket: Ticket | None = None

    @property
    def is_known(self) -> bool:
        file, block = self.blocks[0]
        return bool(file.known[block])

    def place(self, file: BaseFile, block: int) -> int | None:
        """Where a block is, or now will be, in the memory; None where it does not fit."""
        if self.blocks:
            last, number = self.blocks[-1]
            if (last is file) and number == block:
                return self.starts[-1]
            is_full = len(self.blocks) == GROUP_BLOCKS or self.nbytes % SECTOR != 0
            if is_full or bool(file.known[block]) != self.is_known:
                return None
        self.blocks.append((file, block))
        self.starts.append(self.nbytes)
        self.nbytes += file.fds(block)[1]
        return self.starts[-1]

    def copy(self, begin: int, address: int, nbytes: int) -> None:
        if self.copies:
            first, to, before = self.copies[-1]
            if first + before == begin and to + before == address:
                self.copies[-1] = (first, to, before + nbytes)
                return
        self.copies.append((begin, address, nbytes))


@dataclass(eq=False)
class _Read:
    """One call of `launch_read`."""

    cuts: Sequence[_Cut]
    urgency: Urgency
    num_flying: int = 0
    is_launched: bool = False
    """True if no further group comes."""
    error: Exception | None = None
    begin_ns: int = 0
    end_ns: int = 0
    ended: Bell = field(default_factory=Bell)
    is_over: bool = False

    def groups(self) -> Iterator[_Group]:
        group = _Group(self)
        for cut in self.cuts:
            done = 0
            while done < cut.nbytes:
                block, within = divmod(cut.offset + done, BLOCK_BYTES)
                start = group.place(cut.file, block)
                if start is None:
                    yield group
                    group = _Group(self)
                    continue
                nbytes = min(BLOCK_BYTES - within, cut.nbytes - done)
                group.copy(start + within, cut.address + done, nbytes)
                done += nbytes
        if group.blocks:
            yield group

    def end_if_over(self) -> None:
        if self.is_launched and self.num_flying == 0:
            self.end_ns = time.perf_counter_ns()
            self.is_over = True
            self.ended.ring()


def _covering_bytes(cuts: Iterable[_Cut]) -> int:
    """Bytes of the blocks that these lie in; in the order of files and offsets."""
    total, last_file, last = 0, None, -1
    for cut in cuts:
        first, end = cut.offset // BLOCK_BYTES, -(-(cut.offset + cut.nbytes) // BLOCK_BYTES)
        first += cut.file is last_file and first == last
        if first < end:
            total += min(end * BLOCK_BYTES, cut.file.nbytes) - first * BLOCK_BYTES
            last_file, last = cut.file, end - 1
    return total


class BaseFiles:
    """The files of one model's base, on one rank."""

    def __init__(
        self,
        counters: Counters | None = None,
        on_error: Callable[[Exception], None] | None = None,
        io_engine: str = "auto",
    ) -> None:
        """`counters` get the bytes that are read; `on_error` the error of each read, on the thread that waits for it.
        `io_engine` is the kind of the engine, as `engines.pick` takes it, which is opened with the first read."""
        self.counters = counters or Counters()
        self._on_error = on_error or ignore
        self._io_engine = io_engine
        self._files: list[BaseFile] = []
        """With those in whose places others were found later."""
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._engine: FileEngine | None = None
        self._region: Region | None = None
        self._named: dict[int, DataFile] = {}
        """What the engine knows, by descriptor."""
        self._thread: threading.Thread | None = None
        self._changed = Monitor()
        self._waiting: dict[Urgency, deque[tuple[_Read, Iterator[_Group]]]] = {each: deque() for each in Urgency}
        self._reads: dict[int, _Read] = {}
        self._numbers = itertools.count(1)
        self._is_closing = False

    # Files

    def open(self, path: Path) -> BaseFile:
        """The file of this name, opened unless it is. Raises StorageError and IntegrityError."""
        path = path.absolute()
        for file in self._files:
            if file.path == path and file.is_open and not file.what_changed():
                return file
        self._files.append(BaseFile.open(path))
        return self._files[-1]

    def restore(
        self, records: Sequence[Mapping[str, Any]], hashes: Iterable[Sequence[Mapping[str, str]]]
    ) -> list[BaseFile]:
        """Files that a generation names, in its order, with the checksums that each rank has kept. One that cannot be
        opened, or is another, has its `problem`.

        Raises ValueError and its like for what is not such a record, IntegrityError for records that contradict each
        other.
        """
        files = [BaseFile.of_record(record) for record in records]
        for of_rank in hashes:
            for file, each in zip(files, of_rank, strict=True):
                file.learn(each)
        for number, file in enumerate(files):
            known = self._known(file)
            if known is file:
                self._files.append(file)
            else:
                known.learn(file.hashes)
            if not known.is_open:
                try:
                    known.become(known.open_at(file.path))
                except ZeroOffloadError as error:
                    known.problem = str(error)
            files[number] = known
        return files

    def _known(self, file: BaseFile) -> BaseFile:
        """A file that is alike, here or elsewhere, best an open one; else this one."""
        alike = [each for each in self._files if each.fingerprint == file.fingerprint]
        return min(alike, key=lambda each: (not each.is_open, each.path != file.path), default=file)

    def move(self, files: Iterable[BaseFile], paths: Mapping[str, Path]) -> None:
        """Read these files at other places, by name. Raises IntegrityError, and moves none, where some are not
        alike."""
        with contextlib.ExitStack() as undo:
            found = []
            for file in files:
                if (path := paths.get(file.path.name)) is None:
                    raise IntegrityError(f"{file.path.name} is not among the files there")
                if path.absolute() != file.path or not file.is_open:
                    found.append((file, file.open_at(path)))
                    undo.callback(found[-1][1].close)
            undo.pop_all()
        for file, there in found:
            file.become(there)

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory that reads pass through."""
        return 0 if self._region is None else self._region.nbytes

    # Reads

    def launch_read(
        self,
        name: str,
        spans: Sequence[BaseSpan],
        begin: int,
        end: int,
        address: int,
        urgency: Urgency = Urgency.NORMAL,
        on_error: Callable[[Exception], None] | None = None,
    ) -> Transfer:
        """Bring bytes [begin, end) of a section, which `spans` describe, to host memory; what is in no file is zero.

        `name` is the section's, in a recording; `on_error` replaces the files' own. Raises IntegrityError where a file
        is gone.
        """
        on_error = on_error or self._on_error
        cuts, at = [], begin
        for span in spans:
            low, high = max(span.begin, begin), min(span.end, end)
            if low >= high:
                continue
            if not span.file.is_open:
                raise IntegrityError(missing_text([span.file]))
            ctypes.memset(address + at - begin, 0, low - at)
            cuts.append(_Cut(span.file, span.offset + low - span.begin, address + low - begin, high - low))
            at = high
        ctypes.memset(address + at - begin, 0, end - at)
        if not cuts:
            return Transfer(self, None, on_error, None)
        cuts.sort(key=lambda cut: (str(cut.file.path), cut.offset))
        nbytes = _covering_bytes(cuts)
        self.counters.read(Tier.NVME, nbytes)
        spans_on = self.counters.spans
        told = partial(spans_on.put, Lane.READ, name, nbytes=nbytes) if spans_on.on else None
        return Transfer(self, self._submit(_Read(cuts, urgency)), on_error, told)

    def read(self, spans: Sequence[BaseSpan], begin: int, end: int, address: int) -> None:
        """The same, and wait. An error is the caller's alone."""
        self.launch_read("base", spans, begin, end, address, Urgency.URGENT, ignore).wait()

    def _submit(self, read: _Read) -> Ticket:
        if self._is_closing or os.getpid() != self._owner_pid:
            raise self._closed_error()
        with self._lock:
            if self._thread is None:
                self._begin()
        ticket = Ticket(next(self._numbers), np.zeros(0, dtype=BLOCK_DTYPE))
        try:
            with self._changed.lock:
                self._reads[ticket.number] = read
                self._waiting[read.urgency].append((read, read.groups()))
                self._changed.notify()
        except BaseException:
            # A signal's handler raised: what was launched has no waiter, so it ends first.
            while any(each is read for each, _ in list(self._waiting[read.urgency])) or read.num_flying:
                read.ended.wait(LOOK_S)
            raise
        return ticket

    def wait(self, ticket: Ticket) -> Moved:
        read = self._reads[ticket.number]
        while not read.is_over:
            read.ended.wait(LOOK_S)
            if not (read.is_over or self._is_alive):
                raise self._closed_error()
        self._reads.pop(ticket.number, None)
        if read.error is not None:
            raise read.error
        return Moved(read.begin_ns, read.end_ns)

    def done(self, ticket: Ticket) -> bool:
        read = self._reads.get(ticket.number)
        return read is None or read.is_over

    @property
    def _is_alive(self) -> bool:
        return os.getpid() == self._owner_pid and self._thread is not None and self._thread.is_alive()

    def _closed_error(self) -> StorageError:
        if os.getpid() != self._owner_pid:
            return StorageError(f"process {os.getpid()} is a fork of {self._owner_pid}, which reads the base")
        return StorageError("the files of the base are closed; nothing can be read after zo.close(model)")

    def _begin(self) -> None:
        self._region = Arena(0).allocate(NUM_GROUPS * GROUP_BLOCKS * BLOCK_BYTES)
        self._engine = open_engine(pick(self._io_engine))
        self._engine.add_memory(self._region)
        thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}-base", daemon=True)
        start(thread)
        self._thread = thread

    # On the thread

    def _run(self) -> None:
        flying: deque[_Group] = deque()
        turns = itertools.cycle(range(NUM_GROUPS))
        while True:
            while len(flying) < NUM_GROUPS and (group := self._next(wait=not flying)) is not None:
                self._launch(group, next(turns))
                flying.append(group)
            if not flying:
                return
            self._finish(flying.popleft())

    def _next(self, *, wait: bool) -> _Group | None:
        """The next group to launch; None at the end, and without `wait` where there is none now."""
        while True:
            for urgency in (Urgency.URGENT, Urgency.NORMAL):
                queue = self._waiting[urgency]
                while queue:
                    read, groups = queue[0]
                    if self._is_closing and read.error is None:
                        read.error = self._closed_error()
                    group = None if read.error is not None else self._plan(read, groups)
                    if group is not None:
                        read.num_flying += 1
                        return group
                    with self._changed.lock:
                        queue.popleft()
                    read.is_launched = True
                    read.end_if_over()
            if not wait or self._is_closing:
                return None
            self._changed.wait_for(lambda: self._is_closing or any(self._waiting.values()))

    def _plan(self, read: _Read, groups: Iterator[_Group]) -> _Group | None:
        try:
            return next(groups, None)
        except Exception as error:
            read.error = error
            return None

    def _launch(self, group: _Group, turn: int) -> None:
        assert self._engine is not None and self._region is not None
        read = group.read
        group.address = self._region.address + turn * GROUP_BLOCKS * BLOCK_BYTES
        table = np.zeros(len(group.blocks), dtype=BLOCK_DTYPE)
        for row, (file, block) in enumerate(group.blocks):
            fd, nbytes = file.fds(block)
            table[row] = (block * BLOCK_BYTES, nbytes, file.crcs[block], fd, 0)
        try:
            for file in {id(file): file for file, _ in group.blocks}.values():
                for opened in file.descriptors:
                    if self._named.get(opened.fd) is not opened:
                        self._engine.name_file(opened.fd, str(file.path))
                        self._named[opened.fd] = opened
            group.is_verified = group.is_known
            op = IoOp.READ if group.is_verified else IoOp.READ_UNVERIFIED
            group.ticket = self._engine.submit(op, table, group.address, read.urgency)
            read.begin_ns = read.begin_ns or time.perf_counter_ns()
        except Exception as error:
            read.error = read.error or error

    def _finish(self, group: _Group) -> None:
        read = group.read
        try:
            if group.ticket is not None:
                assert self._engine is not None
                self._engine.wait(group.ticket)
                if not group.is_verified:
                    self._note(group)
                for begin, address, nbytes in group.copies if read.error is None else ():
                    ctypes.memmove(address, group.address + begin, nbytes)
        except IntegrityError as error:
            read.error = read.error or self._explain(group, error)
        except Exception as error:
            read.error = read.error or error
        read.num_flying -= 1
        read.end_if_over()

    def _note(self, group: _Group) -> None:
        """Checksums of what has come for the first time; another read may have made some meanwhile."""
        for (file, block), begin in zip(group.blocks, group.starts, strict=True):
            found = crc32c(group.address + begin, file.fds(block)[1])
            if file.known[block] and found != int(file.crcs[block]):
                raise IntegrityError(f"two reads of its block {block + 1} differ")
            file.crcs[block] = found
            file.known[block] = True

    def _explain(self, group: _Group, error: IntegrityError) -> IntegrityError:
        """The first file of a group that is not what it was."""
        for (file, block), begin in zip(group.blocks, group.starts, strict=True):
            if what := file.what_became_of_size():
                return changed_error(file, what)
            nbytes = file.fds(block)[1]
            if file.known[block] and crc32c(group.address + begin, nbytes) != int(file.crcs[block]):
                where = f"{format_bytes(nbytes)} at offset {block * BLOCK_BYTES}"
                return changed_error(file, f"holds other bytes than when it was first read ({where})")
        return IntegrityError(f"{group.blocks[0][0].path}: {error}")

    def close(self) -> None:
        """End the thread, the engine, and close the files. Closing twice is allowed."""
        if os.getpid() != self._owner_pid:
            return
        self._on_error = ignore
        with self._changed.lock:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        if self._engine is not None:
            self._engine.close()
            if self._engine.is_stuck:
                _STUCK.append(self)
                return
        for file in self._files:
            file.close()
        self._region = None


def ignore(error: Exception) -> None:
    pass


def check_in_place(files: Iterable[BaseFile]) -> None:
    """Raise IntegrityError unless the names of these files lead to what is open: a generation is about to name them."""
    for file in files:
        if what := file.what_changed():
            raise changed_error(file, what)


def changed_error(file: BaseFile, what: str) -> IntegrityError:
    return IntegrityError(
        f"{file.path}, a file of the base that this model reads in place, {what}. Put the file back as it was "
        f"({file.nbytes} bytes), or, if a copy of the folder is elsewhere, {NEW_PLACE} with existing='resume'; with "
        "another base a run starts over: existing='discard'"
    )


def missing_text(files: Sequence[BaseFile]) -> str:
    """What to say of files that are to be read and are not there."""
    first = files[0]
    more = f" and {len(files) - 1} more files" if files[1:] else ""
    return (
        f"the base of this model lies in {first.path}{more}, and cannot be read there: {first.problem}. "
        f"If its folder is somewhere else now, {NEW_PLACE}"
    )


def fingerprint_of(files: Iterable[BaseFile]) -> str:
    """The fingerprint of a base; see [Note: what is known of a base]."""
    return hashlib.sha256(" ".join(sorted(file.fingerprint for file in files)).encode()).hexdigest()
