"""One rank's bytes on disk: where every array lies in preallocated files, one file per directory, and what goes to and
from them.

Owns the files and the map of extents; never knows what the bytes mean. The file engine reads an extent's table. A write
stores a block's checksum in it, a read is verified against it, and a manifest is a copy of it. Blocks are dealt to the
directories by their weights, so several drives work at once and end at the same time. The calls: `allocate` every
extent, `create` (or `open_existing`), `launch_read` / `launch_write` and `Transfer.wait`, `sync`, `close`. To go on
from a manifest, `restore_copies` of all that it names comes before any other extent.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from zero_offload.base.checks import DEAR_CHECKS
from zero_offload.base.errors import ConfigError, IntegrityError, StorageError, ZeroOffloadError
from zero_offload.base.events import Counters
from zero_offload.base.spans import Track
from zero_offload.base.types import SECTOR, Tier
from zero_offload.hardware.abi import IoOp
from zero_offload.plan.layout import Dealer
from zero_offload.storage.files.directory import DataFile, RunDirectory
from zero_offload.storage.files.engine import (
    BLOCK_DTYPE,
    BlockTable,
    FileEngine,
    Lasting,
    Ticket,
    TransferTimes,
    Urgency,
)
from zero_offload.storage.memory.arena import Region

ALL_ROWS = slice(None)
_STUCK: list[DataFile] = []
"""Files that a drive may still write."""


@dataclass(frozen=True)
class Extent:
    """Blocks that hold one array; `blocks` has a row of `BLOCK_DTYPE` each, checksums included."""

    name: str
    blocks: BlockTable
    directories: npt.NDArray[np.int32]
    """Which directory each block is in."""
    written: npt.NDArray[np.bool_]
    """Which blocks have ever been written; the others read as zeros."""

    def nbytes_in(self, place: int) -> int:
        """Bytes of it in one directory."""
        return int(self.blocks["nbytes"][self.directories == place].sum())

    def spans_in(self, place: int) -> list[tuple[int, int]]:
        """Where its blocks are in one directory: (begin, end)."""
        here = self.directories == place
        begins = self.blocks["offset"][here]
        return list(zip(begins.tolist(), (begins + self.blocks["nbytes"][here]).tolist(), strict=True))


class ExtentMap:
    """The extents of one rank in several directories."""

    def __init__(self, seed: int, weights: Sequence[float]) -> None:
        self._seed = seed
        self._dealer = Dealer(dict(enumerate(weights)))
        self.sizes = [0] * len(weights)
        """Bytes of the file in each directory."""
        self._restored: list[Extent] = []
        """Between them there may be room."""
        self._gaps: list[list[tuple[int, int]]] = [[] for _ in weights]
        """For each directory, where nothing lies that a manifest names: (begin, end)."""

    def allocate(self, names: Sequence[str], block_sizes: Sequence[int]) -> tuple[Extent, ...]:
        """Extents of blocks of these sizes (bytes, whole sectors), one after the other: where one lies says where all.

        The blocks of the first are dealt to the directories; in each, the other extents lie behind it. They go where an
        earlier run had what no manifest names, if they fit there, else to the end.
        """
        self._find_gaps()
        extents = self._describe(names, block_sizes)
        first = extents[0]
        first.directories[:] = [self._dealer.deal(nbytes) for nbytes in block_sizes]
        for place in range(len(self.sizes)):
            here = first.directories == place
            sizes = first.blocks["nbytes"][here]
            begins = np.cumsum(sizes, dtype=np.uint64) - sizes
            first.blocks["offset"][here] = begins + self._take(place, len(names) * first.nbytes_in(place))
        _place_copies(extents, 0)
        return extents

    def _take(self, place: int, nbytes: int) -> int:
        """Where so many bytes in a row are free in a directory; they are taken."""
        for number, (begin, end) in enumerate(self._gaps[place]):
            if end - begin >= nbytes:
                self._gaps[place][number] = (begin + nbytes, end)
                return begin
        self.sizes[place] += nbytes
        return self.sizes[place] - nbytes

    def free(self, extents: Iterable[Extent]) -> None:
        """Other extents may lie where these do."""
        self._find_gaps()
        for place, gaps in enumerate(self._gaps):
            spans = [(begin, end) for begin, end in gaps if begin < end]
            for extent in extents:
                spans += extent.spans_in(place)
            gaps.clear()
            for begin, end in sorted(spans):
                if gaps and gaps[-1][1] == begin:
                    gaps[-1] = (gaps[-1][0], end)
                else:
                    gaps.append((begin, end))

    def _find_gaps(self) -> None:
        """After the last of `restore_copies`."""
        if not self._restored:
            return
        for place in range(len(self.sizes)):
            spans = [span for extent in self._restored for span in extent.spans_in(place)]
            free_from = 0
            for begin, end in sorted(spans):
                if begin > free_from:
                    self._gaps[place].append((free_from, begin))
                free_from = max(free_from, end)
        self._restored = []

    def restore_copies(
        self, names: Sequence[str], block_sizes: Sequence[int], index: int, record: Any
    ) -> tuple[Extent, ...]:
        """The copies that `allocate` has made. A manifest records copy number `index`; the others are blank.

        Raises IntegrityError when the record does not fit.
        """
        extents = self._describe(names, block_sizes)
        extent = extents[index]
        limits = {"offset": 2**62, "crc": 2**32, "directory": len(self.sizes)}
        values = {key: _numbers(record, key, limit, extent) for key, limit in limits.items()}
        extent.blocks["offset"], extent.blocks["crc"] = values["offset"], values["crc"]
        extent.directories[:] = values["directory"]
        extent.written[:] = not record.get("blank")
        _place_copies(extents, index)
        for each in extents:
            ends = each.blocks["offset"] + each.blocks["nbytes"]
            for place, size in enumerate(self.sizes):
                self.sizes[place] = max(size, int(ends[each.directories == place].max(initial=0)))
        self._restored += extents
        return extents

    def _describe(self, names: Sequence[str], block_sizes: Sequence[int]) -> tuple[Extent, ...]:
        """Extents that lie nowhere yet."""
        assert all(nbytes % SECTOR == 0 for nbytes in block_sizes)
        extents = []
        for name in names:
            table = np.zeros(len(block_sizes), dtype=BLOCK_DTYPE)
            table["nbytes"] = block_sizes
            # A block of another run, extent or position fails its checksum even where its bytes are valid.
            table["seed"] = [_mix(self._seed, zlib.crc32(name.encode()), i) for i in range(len(table))]
            places, written = np.zeros(len(table), dtype=np.int32), np.zeros(len(table), dtype=np.bool_)
            extents.append(Extent(name, table, places, written))
        return tuple(extents)


def extent_record(extent: Extent) -> dict[str, Any]:
    """The record of an extent in a manifest: where each block is and its checksum, or that it was never written."""
    columns = {"offset": extent.blocks["offset"], "crc": extent.blocks["crc"], "directory": extent.directories}
    record = {key: values.tolist() for key, values in columns.items()}
    return record if extent.written.any() else {**record, "blank": True}


def _place_copies(extents: Sequence[Extent], known: int) -> None:
    """Copies of one shape lie behind each other in every directory: from where one is follows where all are."""
    origin = extents[known]
    for number, extent in enumerate(extents):
        extent.directories[:] = origin.directories
        for place in np.unique(origin.directories):
            here = origin.directories == place
            apart = (number - known) * origin.nbytes_in(place)
            offsets = origin.blocks["offset"][here].astype(np.int64) + apart
            if offsets.min() < 0:
                raise IntegrityError(
                    f"the manifest puts {origin.name} where {extent.name} would begin before its file; "
                    "load a checkpoint, or start over with existing='discard'"
                )
            extent.blocks["offset"][here] = offsets


def _numbers(record: Any, key: str, limit: int, extent: Extent) -> list[int]:
    """A list of a manifest's record, checked."""
    values = record.get(key) if isinstance(record, dict) else None
    valid = isinstance(values, list) and len(values) == len(extent.blocks)
    if not valid or not all(type(value) is int and 0 <= value < limit for value in values or ()):
        raise IntegrityError(
            f"the manifest's {key} list of {extent.name} is not {len(extent.blocks)} valid numbers; "
            "load a checkpoint, or start over with existing='discard'"
        )
    assert isinstance(values, list)
    return values


def _mix(*words: int) -> int:
    """Spread a few integers over 32 bits (FNV-1a over their 64-bit forms)."""
    value = 0x811C9DC5
    for word in words:
        for byte in word.to_bytes(8, "little"):
            value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


class Moving(Protocol):
    """Bytes on their way. `wait` is called until it returns or raises a ZeroOffloadError, and then no more."""

    def wait(self) -> TransferTimes: ...

    def done(self) -> bool: ...


@dataclass(frozen=True)
class _OfEngine:
    """Blocks that an engine moves."""

    engine: FileEngine
    ticket: Ticket

    def wait(self) -> TransferTimes:
        return self.engine.wait(self.ticket)

    def done(self) -> bool:
        try:
            return self.engine.done(self.ticket)
        except ConfigError:
            return True  # another thread has just waited for it


class Transfer:
    """Blocks on their way; any thread may wait, any number of times, and each sees the same outcome."""

    def __init__(
        self,
        moving: Moving | None,
        on_error: Callable[[Exception], None],
        tell: Callable[[int, int], None] | None,
    ) -> None:
        """`moving` is None where there is nothing to wait for. `tell`, which never raises, gets the times of its
        beginning and end, once it was waited for."""
        self._moving = moving
        self._on_error = on_error
        self._lock = threading.Lock()
        self.arrived = moving is None
        """True once it was waited for without an error: a further wait would only return."""
        self._error: ZeroOffloadError | None = None
        self._tell = tell

    def wait(self) -> None:
        """Return when the bytes have arrived. Raises StorageError or IntegrityError."""
        with self._lock:
            if self._moving is not None:
                try:
                    moved = self._moving.wait()
                    if self._tell is not None:
                        self._tell(*moved)
                    self.arrived = True
                except ZeroOffloadError as error:
                    self._error = error
                    self._on_error(error)
                self._moving = None
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """True if `wait` would return at once."""
        # Without the lock: a signal's handler may raise between taking it and any line that would give it back.
        moving = self._moving
        return moving is None or moving.done()


def ignore(error: Exception) -> None:
    pass


class SwapFile:
    """The extents of one rank in one or several directories."""

    def __init__(
        self,
        directories: Sequence[RunDirectory],
        name: str,
        engine: FileEngine,
        seed: int,
        weights: Sequence[float] | None = None,
        counters: Counters | None = None,
        on_error: Callable[[Exception], None] = ignore,
    ) -> None:
        """`weights` are the directories' shares of all bytes, by default equal. The same ones give the same places.

        `on_error` gets the error of every transfer that fails, on the thread that waits for it, until `close`.
        """
        self.counters = counters or Counters()
        """Counters of bytes that are read and written."""
        self._directories = tuple(directories)
        self._map = ExtentMap(seed, weights or [1 / len(directories)] * len(directories))
        self.name = name
        self._engine = engine
        self._files: list[DataFile] = []
        self._extents: list[Extent] = []
        self._on_error = on_error
        # Gradients are given room by the control thread, a changed frozen shard by a commit.
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(self._map.sizes)

    def allocate(self, name: str, block_sizes: Sequence[int]) -> Extent:
        """Plan an extent of blocks of these sizes (bytes, whole sectors). After `create` the files grow."""
        (extent,) = self.allocate_copies([name], block_sizes)
        return extent

    def allocate_copies(self, names: Sequence[str], block_sizes: Sequence[int]) -> tuple[Extent, ...]:
        """Plan extents for arrays of one shape, of which a manifest needs to name one only. Raises CapacityError."""
        (extents,) = self.allocate_groups([(names, block_sizes)])
        return extents

    def allocate_groups(self, groups: Iterable[tuple[Sequence[str], Sequence[int]]]) -> list[tuple[Extent, ...]]:
        """As `allocate_copies`, of several groups at once: all or none of them are planned.

        Raises CapacityError when a file cannot grow so far.
        """
        with self._lock:
            before = list(self._map.sizes)
            found = [self._map.allocate(names, block_sizes) for names, block_sizes in groups]
            try:
                for file, size in zip(self._files, self._map.sizes, strict=False):
                    file.grow(size)
            except BaseException:
                self._map.sizes = before
                raise
            for extents in found:
                self._know(extents)
            if DEAR_CHECKS and found:
                self._check_apart()
        return found

    def free(self, extents: Sequence[Extent]) -> None:
        """Other extents may lie where these do: no manifest names them, and no transfer of theirs is under way."""
        gone = set(map(id, extents))
        with self._lock:
            self._extents = [each for each in self._extents if id(each) not in gone]
            self._map.free(extents)

    def _check_apart(self) -> None:
        """No byte of a file is two blocks'."""
        for place in range(len(self._directories)):
            here = [extent.blocks[extent.directories == place] for extent in self._extents]
            blocks = np.sort(np.concatenate(here), order="offset")
            ends = (blocks["offset"] + blocks["nbytes"])[:-1]
            assert (ends <= blocks["offset"][1:]).all(), f"extents in directory {place} overlap"

    def restore_copies(
        self, names: Sequence[str], block_sizes: Sequence[int], index: int, record: Any
    ) -> tuple[Extent, ...]:
        """The copies that `allocate_copies` has made. A manifest records copy number `index`; the others are blank.

        Raises IntegrityError when the record does not fit.
        """
        extents = self._map.restore_copies(names, block_sizes, index, record)
        self._know(extents)
        return extents

    def _know(self, extents: Sequence[Extent]) -> None:
        self._extents += extents
        if self._files:
            self._check_sizes(self._files)
            for extent in extents:
                self._bind(extent)

    def create(self) -> None:
        """Preallocate the files. Raises CapacityError when a directory is too small."""
        self._make(lambda directory, nbytes: directory.create_file(self.name, nbytes))

    def create_scratch(self) -> None:
        """Preallocate files without a name, which vanish with the process. Raises CapacityError."""
        self._make(lambda directory, nbytes: directory.create_scratch(nbytes))

    def _make(self, create: Callable[[RunDirectory, int], DataFile]) -> None:
        with contextlib.ExitStack() as undo:
            files = []
            for directory, size in zip(self._directories, self._map.sizes, strict=True):
                files.append(create(directory, max(size, SECTOR)))
                undo.callback(files[-1].close)
            undo.pop_all()
        self._open(files)

    def open_existing(self) -> None:
        """Open the files of an earlier run. Raises StorageError when one is missing, IntegrityError: when too short."""
        with contextlib.ExitStack() as undo:
            files = []
            for directory in self._directories:
                if self.name not in directory.names():
                    raise StorageError(
                        f"{directory.path / self.name} is missing, which has the states that the generation names. "
                        "Restore the file, load a checkpoint, or start over with existing='discard'"
                    )
                files.append(directory.open_file(self.name))
                undo.callback(files[-1].close)
            self._check_sizes(files)
            undo.pop_all()
        self._open(files)

    def _check_sizes(self, files: Sequence[DataFile]) -> None:
        for file, size in zip(files, self._map.sizes, strict=True):
            if file.nbytes < size:
                raise IntegrityError(
                    f"{file.path} is truncated: {file.nbytes} bytes of {size}. Restore the file, "
                    "load a checkpoint, or start over with existing='discard'"
                )

    def launch_read(self, extent: Extent, rows: slice, address: int, urgency: Urgency = Urgency.NORMAL) -> Transfer:
        """Launch the read of blocks to consecutive memory, verified; of blocks that were all never written, zeros."""
        blocks = extent.blocks[rows]
        nbytes = int(blocks["nbytes"].sum())
        self.counters.read(Tier.NVME, nbytes)
        moving = None
        if extent.written[rows].any():
            moving = _OfEngine(self._engine, self._engine.submit(IoOp.READ, blocks, address, urgency))
        else:
            ctypes.memset(address, 0, nbytes)
        spans = self.counters.spans
        on_done = partial(spans.put, Track.READ, extent.name, nbytes=nbytes) if spans.on else None
        return Transfer(moving, self._fail, on_done)

    def launch_write(self, extent: Extent, rows: slice, address: int) -> Transfer:
        """Launch the write of some blocks from consecutive memory; their checksums are set on the way."""
        blocks = extent.blocks[rows]
        nbytes = int(blocks["nbytes"].sum())
        self.counters.written(Tier.NVME, nbytes)
        extent.written[rows] = True
        spans = self.counters.spans
        on_done = partial(spans.put, Track.WRITE, extent.name, nbytes=nbytes) if spans.on else None
        moving = _OfEngine(self._engine, self._engine.submit(IoOp.WRITE, blocks, address))
        return Transfer(moving, self._fail, on_done)

    def read_array(self, extent: Extent, out: torch.Tensor) -> None:
        """Fill `out`, sector-aligned host memory, and wait."""
        self.launch_read(extent, ALL_ROWS, out.data_ptr(), Urgency.URGENT).wait()

    def write_array(self, extent: Extent, values: torch.Tensor) -> None:
        """Write `values`, sector-aligned host memory, and wait."""
        self.launch_write(extent, ALL_ROWS, values.data_ptr()).wait()

    def read_block(self, extent: Extent, row: int, dtype: torch.dtype, staging: Region) -> torch.Tensor:
        """One block, host, verified: a view of `staging`, valid until that is used again."""
        self.launch_read(extent, slice(row, row + 1), staging.address).wait()
        return staging.tensor(dtype, int(extent.blocks[row]["nbytes"]) // dtype.itemsize)

    def add_memory(self, region: Lasting) -> None:
        """Tell the engine of memory that lasts as long as this file is open."""
        self._engine.add_memory(region)

    def check_in_place(self) -> None:
        """Raise StorageError or LockError unless the names of the files and directories lead to what is open."""
        for directory, file in zip(self._directories, self._files, strict=True):
            directory.check_in_place(file)

    def sync(self) -> None:
        """Make every completed write survive power loss. An error is final: a retry would lie."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Close the files; the engine first. A stuck engine keeps them open, and their directories locked."""
        # It refers to the model, which holds this file and its last transfers: a cycle would outlive the model.
        self._on_error = ignore
        if self._engine.is_stuck:
            _STUCK.extend(self._files)
            for directory in self._directories:
                directory.stays_locked = True
        else:
            for file in self._files:
                file.close()
        self._files = []

    def _fail(self, error: Exception) -> None:
        self._on_error(error)

    def _open(self, files: list[DataFile]) -> None:
        self._files = files
        for drive, file in enumerate(files):
            self._engine.name_file(file.fd, str(file.path), drive)
        for extent in self._extents:
            self._bind(extent)

    def _bind(self, extent: Extent) -> None:
        extent.blocks["fd"] = np.asarray([file.fd for file in self._files], dtype=np.int32)[extent.directories]
