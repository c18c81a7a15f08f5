"""One rank's bytes on disk: extents in preallocated files, one file per directory.

Owns the map from an extent's blocks to (file, offset) and each block's checksum; never knows what the bytes
mean. An extent's table is what the file engine reads: a write stores the block's checksum in it, a read
is verified against it, and a manifest is a copy of it. Blocks are dealt to the directories by their weights,
so several drives work at once and end at the same time. The calls in order: `allocate` every extent, `create`
(or `open_existing`), `read` / `write` and `Transfer.wait`, `sync`, `close`; to go on from a manifest, `restore`
each extent it names before anything else is allocated.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_offload.errors import ConfigError, IntegrityError, ZeroOffloadError
from zero_offload.plan.dealer import Dealer
from zero_offload.storage.directory import DataFile, RunDirectory
from zero_offload.storage.engine import BLOCK_DTYPE, FileEngine, Lasting, Ticket, Urgency
from zero_offload.types import SECTOR

BlockTable = npt.NDArray[np.void]

_STUCK: list[DataFile] = []
"""Files that a drive may still write."""


@dataclass(frozen=True)
class Extent:
    """Blocks that hold one array; `blocks` has a row of `BLOCK_DTYPE` each, checksums included."""

    name: str
    blocks: BlockTable
    directories: npt.NDArray[np.int32]
    """Which directory each block is in."""

    @property
    def nbytes(self) -> int:
        return int(self.blocks["nbytes"].sum())


class Transfer:
    """Blocks on their way; any thread may wait, any number of times, and each sees the same outcome."""

    def __init__(self, engine: FileEngine, ticket: Ticket, on_error: Callable[[Exception], None]) -> None:
        self._engine = engine
        self._ticket = ticket
        self._on_error = on_error
        self._lock = threading.Lock()
        self._finished = False
        self._error: ZeroOffloadError | None = None

    def wait(self) -> None:
        """Return when the bytes have arrived. Raises StorageError or IntegrityError."""
        with self._lock:
            if not self._finished:
                try:
                    self._engine.wait(self._ticket)
                except ZeroOffloadError as error:
                    self._error = error
                    self._on_error(error)
                self._finished = True
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        # Without the lock: a signal's handler may raise between taking it and any line that would give it back.
        try:
            return self._finished or self._engine.done(self._ticket)
        except ConfigError:
            return True  # someone has just waited for it


class SwapFile:
    """The extents of one rank in one or several directories."""

    def __init__(
        self,
        directories: Sequence[RunDirectory],
        name: str,
        engine: FileEngine,
        seed: int,
        weights: Sequence[float] | None = None,
    ) -> None:
        """`weights` are the directories' shares of all bytes, by default equal. The same ones give the same places."""
        self._directories = tuple(directories)
        self._dealer = Dealer(dict(enumerate(weights or [1 / len(directories)] * len(directories))))
        self._name = name
        self._engine = engine
        self._seed = seed
        self._sizes = [0] * len(self._directories)
        self._files: list[DataFile] = []
        self._extents: list[Extent] = []
        self.on_error: Callable[[Exception], None] = lambda _: None
        """Told of every failed transfer, on the thread that waited for it."""
        # Gradients are given room by the control thread, a changed frozen shard by a commit.
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(self._sizes)

    @property
    def name(self) -> str:
        return self._name

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the file in each directory."""
        return tuple(self._sizes)

    def allocate(self, name: str, block_sizes: Sequence[int]) -> Extent:
        """Plan an extent of blocks of these sizes (bytes, whole sectors). After `create` the files grow."""
        table = np.zeros(len(block_sizes), dtype=BLOCK_DTYPE)
        extent = Extent(name, table, np.zeros(len(block_sizes), dtype=np.int32))
        with self._lock:
            for i, nbytes in enumerate(block_sizes):
                assert nbytes % SECTOR == 0
                place = self._dealer.deal(nbytes)
                table[i]["offset"] = self._sizes[place]
                table[i]["nbytes"] = nbytes
                # A block of another run, extent or position fails its checksum even where its bytes are valid.
                table[i]["seed"] = _mix(self._seed, zlib.crc32(name.encode()), i)
                extent.directories[i] = place
                self._sizes[place] += nbytes
            self._extents.append(extent)
            if self._files:
                for file, size in zip(self._files, self._sizes, strict=True):
                    file.grow(size)
                self._bind(extent)
        return extent

    def restore(self, extent: Extent, record: Any) -> None:
        """Take a manifest's record of an extent. Raises IntegrityError unless it fits."""
        limits = {"offset": 2**62, "crc": 2**32, "directory": len(self._directories)}
        values = {key: _numbers(record, key, limit, extent) for key, limit in limits.items()}
        extent.blocks["offset"], extent.blocks["crc"] = values["offset"], values["crc"]
        extent.directories[:] = values["directory"]
        ends = extent.blocks["offset"] + extent.blocks["nbytes"]
        for place in range(len(self._directories)):
            # What is allocated from here on must not overlap what the manifest names.
            end = int(ends[extent.directories == place].max(initial=0))
            self._sizes[place] = max(self._sizes[place], end)
        if self._files:
            self._check_sizes(self._files)
            self._bind(extent)

    def create(self) -> None:
        """Preallocate the files. Raises CapacityError when a directory is too small."""
        self._make(lambda directory, nbytes: directory.create_file(self._name, nbytes))

    def create_scratch(self) -> None:
        """The same in files without a name: they vanish with the process."""
        self._make(lambda directory, nbytes: directory.create_scratch(nbytes))

    def _make(self, create: Callable[[RunDirectory, int], DataFile]) -> None:
        with contextlib.ExitStack() as undo:
            files = []
            for directory, size in self._pairs():
                files.append(create(directory, max(size, SECTOR)))
                undo.callback(files[-1].close)
            undo.pop_all()
        self._open(files)

    def open_existing(self) -> None:
        """Open the files of an earlier run. Raises IntegrityError when one is shorter than the plan."""
        with contextlib.ExitStack() as undo:
            files = []
            for directory in self._directories:
                files.append(directory.open_file(self._name))
                undo.callback(files[-1].close)
            self._check_sizes(files)
            undo.pop_all()
        self._open(files)

    def _check_sizes(self, files: Sequence[DataFile]) -> None:
        for file, size in zip(files, self._sizes, strict=True):
            if file.nbytes < size:
                raise IntegrityError(
                    f"{file.path} is truncated: {file.nbytes} bytes of {size}. Restore the file, "
                    "load a checkpoint, or start over with existing='discard'"
                )

    def read(self, extent: Extent, rows: slice, address: int, urgency: Urgency = Urgency.NORMAL) -> Transfer:
        """Launch the read of some blocks to consecutive memory; verified against their checksums."""
        return Transfer(self._engine, self._engine.read(extent.blocks[rows], address, urgency), self.on_error)

    def write(self, extent: Extent, rows: slice, address: int) -> Transfer:
        """Launch the write of some blocks from consecutive memory; their checksums are set on the way."""
        return Transfer(self._engine, self._engine.write(extent.blocks[rows], address), self.on_error)

    def add_memory(self, region: Lasting) -> None:
        """Tell the engine of memory that lasts as long as this file is open."""
        self._engine.add_memory(region)

    def sync(self) -> None:
        """Make every completed write survive power loss. An error is final: a retry would lie."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Close the files; the engine first. One that is stuck keeps them open, and their directories locked."""
        if self._engine.is_stuck:
            _STUCK.extend(self._files)
            for directory in self._directories:
                directory.stays_locked = True
        else:
            for file in self._files:
                file.close()
        self._files = []

    def _pairs(self) -> list[tuple[RunDirectory, int]]:
        return list(zip(self._directories, self._sizes, strict=True))

    def _open(self, files: list[DataFile]) -> None:
        self._files = files
        for drive, file in enumerate(files):
            self._engine.name_file(file.fd, str(file.path), drive)
        for extent in self._extents:
            self._bind(extent)

    def _bind(self, extent: Extent) -> None:
        extent.blocks["fd"] = np.asarray([file.fd for file in self._files], dtype=np.int32)[extent.directories]


def extent_record(extent: Extent) -> dict[str, list[int]]:
    """What a manifest keeps of an extent: where each block is and its checksum."""
    columns = {"offset": extent.blocks["offset"], "crc": extent.blocks["crc"], "directory": extent.directories}
    return {key: [int(value) for value in values] for key, values in columns.items()}


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
