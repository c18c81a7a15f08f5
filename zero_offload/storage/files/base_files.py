"""The files of one model's base, on one rank, and reads of them.

Owns the files (`base_file.py`), and an engine and a thread to read them. The calls: `open` (or `restore`, of what a
generation has recorded), `launch_read` and `Transfer.wait`, `move`, `close`.

[Note: reading a base]
Values begin at any byte of a file, and O_DIRECT moves whole sectors. So blocks of `BLOCK_BYTES`, counted from the start
of the file, go to a bounce region. From there the wanted bytes go to their place. A region of `NUM_BATCHES` groups of
blocks serves all reads, in turns: the drive fills some, while the thread empties another.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
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
from zero_offload.base.spans import Track
from zero_offload.base.threads import LOOK_S, THREAD_PREFIX, Bell, Monitor, start
from zero_offload.base.types import SECTOR, Tier, format_bytes
from zero_offload.hardware.abi import IoOp
from zero_offload.hardware.kernels.checksums import crc32c
from zero_offload.plan.memory import BASE_BUFFER_BYTES
from zero_offload.storage.files.base_file import BLOCK_BYTES, BaseFile, BaseSpan, Stretch, changed_error, missing_text
from zero_offload.storage.files.directory import DataFile
from zero_offload.storage.files.engine import BLOCK_DTYPE, FileEngine, Ticket, TransferTimes, Urgency
from zero_offload.storage.files.engines import open_engine, pick
from zero_offload.storage.files.swap_file import Transfer, ignore
from zero_offload.storage.memory.arena import Arena, Region

BATCH_BLOCKS = 8
"""Blocks that are launched together."""
NUM_BATCHES = BASE_BUFFER_BYTES // (BATCH_BLOCKS * BLOCK_BYTES)
"""Groups on their way at a time."""
_STUCK: list[BaseFiles] = []
"""Those whose drive may still write to their memory."""


@dataclass
class _CopyRange:
    """Bytes of a file and the memory that they go to."""

    file: BaseFile
    offset: int
    address: int
    nbytes: int


@dataclass
class _ReadBatch:
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
    """True if its blocks have checksums, all of them or none."""
    ticket: Ticket | None = None

    def place(self, file: BaseFile, block: int) -> int | None:
        """Where a block is, or now will be, in the memory; None where it does not fit."""
        is_known = bool(file.known[block])
        if self.blocks:
            last, number = self.blocks[-1]
            if (last is file) and number == block:
                return self.starts[-1]
            if len(self.blocks) == BATCH_BLOCKS or self.nbytes % SECTOR != 0 or is_known != self.is_verified:
                return None
        self.is_verified = is_known
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

    files: BaseFiles
    cuts: Sequence[_CopyRange]
    urgency: Urgency
    num_flying: int = 0
    is_launched: bool = False
    """True if no further group comes."""
    error: Exception | None = None
    begin_ns: int = 0
    end_ns: int = 0
    ended: Bell = field(default_factory=Bell)
    is_over: bool = False

    def __post_init__(self) -> None:
        self._groups = self._divide()

    def wait(self) -> TransferTimes:
        while not self.is_over:
            self.ended.wait(LOOK_S)
            if not (self.is_over or self.files.is_alive):
                raise self.files.closed_error()
        if self.error is not None:
            raise self.error
        return TransferTimes(self.begin_ns, self.end_ns)

    def done(self) -> bool:
        return self.is_over

    def next_group(self) -> _ReadBatch | None:
        """None at the end, and after an error."""
        try:
            return None if self.error is not None else next(self._groups, None)
        except Exception as error:
            self.error = error
            return None

    def _divide(self) -> Iterator[_ReadBatch]:
        group = _ReadBatch(self)
        for cut in self.cuts:
            done = 0
            while done < cut.nbytes:
                block, within = divmod(cut.offset + done, BLOCK_BYTES)
                start = group.place(cut.file, block)
                if start is None:
                    yield group
                    group = _ReadBatch(self)
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


def _cuts(spans: Sequence[BaseSpan], stretch: Stretch) -> Iterator[_CopyRange]:
    """The parts of a stretch that files have; the rest of its memory is zeroed."""
    begin, end, address = stretch
    at = begin
    for span in spans:
        low, high = max(span.begin, begin), min(span.end, end)
        if low >= high:
            continue
        if not span.file.is_open:
            raise IntegrityError(missing_text([span.file]))
        ctypes.memset(address + at - begin, 0, low - at)
        yield _CopyRange(span.file, span.offset + low - span.begin, address + low - begin, high - low)
        at = high
    ctypes.memset(address + at - begin, 0, end - at)


def _covering_bytes(cuts: Iterable[_CopyRange]) -> int:
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
        on_error: Callable[[Exception], None] = ignore,
        io_engine: str = "auto",
    ) -> None:
        """`counters` get the bytes that are read; `on_error` the error of each read, on the thread that waits for it.
        `io_engine` is the kind of the engine, as `engines.pick` takes it, which is opened with the first read."""
        self.counters = counters or Counters()
        self._on_error = on_error
        self._io_engine = io_engine
        self._files: list[BaseFile] = []
        """With those in whose places others were found later."""
        self._owner_pid = os.getpid()
        self._engine: FileEngine | None = None
        self._region: Region | None = None
        self._named: dict[int, DataFile] = {}
        """Files that the engine knows, by descriptor."""
        self._thread: threading.Thread | None = None
        self._changed = Monitor()
        self._waiting: dict[Urgency, deque[_Read]] = {each: deque() for each in sorted(Urgency, reverse=True)}
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
        """Files that a generation names, in its order, with the checksums that each rank has kept. A file that cannot
        be opened, or is another, has its `problem`.

        Raises ValueError and its like for what is not such a record, IntegrityError for records that contradict each
        other.
        """
        files = [BaseFile.of_record(record) for record in records]
        for of_rank in hashes:
            for file, each in zip(files, of_rank, strict=True):
                file.learn(each)
        for number, file in enumerate(files):
            known = self._same_file(file)
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

    def _same_file(self, file: BaseFile) -> BaseFile:
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
        stretches: Iterable[Stretch],
        urgency: Urgency = Urgency.NORMAL,
        on_error: Callable[[Exception], None] | None = None,
    ) -> Transfer:
        """Bring stretches of bytes of a section, which `spans` describe, to host memory; what is in no file is zero.

        They are read in the order of the files, and a block that lies in two of them once.
        `name` is the section's, in a recording; `on_error` replaces the files' own. Raises IntegrityError where a file
        is gone.
        """
        on_error = on_error or self._on_error
        cuts = [cut for stretch in stretches for cut in _cuts(spans, stretch)]
        if not cuts:
            return Transfer(None, on_error, None)
        cuts.sort(key=lambda cut: (str(cut.file.path), cut.offset))
        nbytes = _covering_bytes(cuts)
        self.counters.read(Tier.NVME, nbytes)
        spans_on = self.counters.spans
        on_done = partial(spans_on.put, Track.READ, name, nbytes=nbytes) if spans_on.on else None
        return Transfer(self._submit(_Read(self, cuts, urgency)), on_error, on_done)

    def read(self, spans: Sequence[BaseSpan], begin: int, end: int, address: int) -> None:
        """The same, and wait. An error is the caller's alone."""
        self.launch_read("base", spans, [Stretch(begin, end, address)], Urgency.URGENT, ignore).wait()

    def _submit(self, read: _Read) -> _Read:
        if self._is_closing or os.getpid() != self._owner_pid:
            raise self.closed_error()
        waiting = self._waiting[read.urgency]
        try:
            with self._changed.lock:
                if self._thread is None:
                    self._begin()
                waiting.append(read)
                self._changed.notify()
        except BaseException:
            # A signal's handler raised: what was launched has no waiter, so it ends first.
            while read in list(waiting) or read.num_flying:
                read.ended.wait(LOOK_S)
            raise
        return read

    @property
    def is_alive(self) -> bool:
        """True if reads that were launched will end."""
        return os.getpid() == self._owner_pid and self._thread is not None and self._thread.is_alive()

    def closed_error(self) -> StorageError:
        """The error for reads after the files are closed, or in a forked process."""
        if os.getpid() != self._owner_pid:
            return StorageError(f"process {os.getpid()} is a fork of {self._owner_pid}, which reads the base")
        return StorageError("the files of the base are closed; nothing can be read after zo.close(model)")

    def _begin(self) -> None:
        self._region = Arena(0).allocate(NUM_BATCHES * BATCH_BLOCKS * BLOCK_BYTES)
        self._engine = open_engine(pick(self._io_engine))
        self._engine.add_memory(self._region)
        thread = threading.Thread(target=self._run, name=f"{THREAD_PREFIX}-base", daemon=True)
        start(thread)
        self._thread = thread

    # On the thread

    def _run(self) -> None:
        flying: deque[_ReadBatch] = deque()
        turns = itertools.cycle(range(NUM_BATCHES))
        while True:
            while len(flying) < NUM_BATCHES and (group := self._next(wait=not flying)) is not None:
                self._launch(group, next(turns))
                flying.append(group)
            if not flying:
                return
            self._finish(flying.popleft())

    def _next(self, *, wait: bool) -> _ReadBatch | None:
        """The next group to launch; None at the end, and without `wait` where there is none now."""
        while True:
            for queue in self._waiting.values():
                while queue:
                    read = queue[0]
                    if self._is_closing and read.error is None:
                        read.error = self.closed_error()
                    if (group := read.next_group()) is not None:
                        read.num_flying += 1
                        return group
                    with self._changed.lock:
                        queue.popleft()
                    read.is_launched = True
                    read.end_if_over()
            if not wait or self._is_closing:
                return None
            self._changed.wait_for(lambda: self._is_closing or any(self._waiting.values()))

    def _launch(self, group: _ReadBatch, turn: int) -> None:
        assert self._engine is not None and self._region is not None
        read = group.read
        group.address = self._region.address + turn * BATCH_BLOCKS * BLOCK_BYTES
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
            op = IoOp.READ if group.is_verified else IoOp.READ_UNVERIFIED
            group.ticket = self._engine.submit(op, table, group.address, read.urgency)
            read.begin_ns = read.begin_ns or time.perf_counter_ns()
        except Exception as error:
            read.error = read.error or error

    def _finish(self, group: _ReadBatch) -> None:
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
        assert read.num_flying >= 0, "a group of blocks has ended twice"
        read.end_if_over()

    def _note(self, group: _ReadBatch) -> None:
        """Checksums of what has come for the first time; another read may have made some meanwhile."""
        for (file, block), begin in zip(group.blocks, group.starts, strict=True):
            found = crc32c(group.address + begin, file.fds(block)[1])
            if file.known[block] and found != int(file.crcs[block]):
                raise IntegrityError(f"two reads of its block {block + 1} differ")
            file.crcs[block] = found
            file.known[block] = True

    def _explain(self, group: _ReadBatch, error: IntegrityError) -> IntegrityError:
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
