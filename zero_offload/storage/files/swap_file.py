"""One rank's bytes on disk: extents in preallocated files, one file per directory.

Owns the files and what goes to and from them; never knows what the bytes mean, and leaves to `extents` where they lie.
The calls: `allocate` every extent, `create` (or `open_existing`), `read` / `write` and `Transfer.wait`, `sync`,
`close`; to go on from a manifest, `restore_copies` of all that it names before anything else is allocated.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zero_offload.base.errors import ConfigError, IntegrityError, StorageError, ZeroOffloadError
from zero_offload.base.types import SECTOR
from zero_offload.hardware.abi import IoOp
from zero_offload.storage.files.directory import DataFile, RunDirectory
from zero_offload.storage.files.engine import FileEngine, Lasting, Ticket, Urgency
from zero_offload.storage.files.extents import Extent, ExtentMap

_STUCK: list[DataFile] = []
"""Files that a drive may still write."""


class Transfer:
    """Blocks on their way; any thread may wait, any number of times, and each sees the same outcome."""

    def __init__(self, engine: FileEngine, ticket: Ticket | None, on_error: Callable[[Exception], None]) -> None:
        """Without a `ticket` there is nothing to wait for."""
        self._engine = engine
        self._ticket = ticket
        self._on_error = on_error
        self._lock = threading.Lock()
        self._finished = ticket is None
        self._error: ZeroOffloadError | None = None
        self._tell: Callable[[int, int], None] | None = None

    def tell(self, end: Callable[[int, int], None]) -> None:
        """Call `end`, which never raises, with the times when it began and ended: once it has been waited for."""
        self._tell = end

    def wait(self) -> None:
        """Return when the bytes have arrived. Raises StorageError or IntegrityError."""
        with self._lock:
            if not self._finished and self._ticket is not None:
                try:
                    moved = self._engine.wait(self._ticket)
                    if self._tell is not None:
                        self._tell(*moved)
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
            return self._finished or self._ticket is None or self._engine.done(self._ticket)
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
        self._map = ExtentMap(seed, weights or [1 / len(directories)] * len(directories))
        self._name = name
        self._engine = engine
        self._files: list[DataFile] = []
        self._extents: list[Extent] = []
        self.on_error: Callable[[Exception], None] = lambda _: None
        """Told of every failed transfer, on the thread that waited for it."""
        # Gradients are given room by the control thread, a changed frozen shard by a commit.
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return sum(self._map.sizes)

    @property
    def name(self) -> str:
        return self._name

    def allocate(self, name: str, block_sizes: Sequence[int]) -> Extent:
        """Plan an extent of blocks of these sizes (bytes, whole sectors). After `create` the files grow."""
        (extent,) = self.allocate_copies([name], block_sizes)
        return extent

    def allocate_copies(self, names: Sequence[str], block_sizes: Sequence[int]) -> tuple[Extent, ...]:
        """The same for arrays of one shape, of which a manifest needs to name one only.

        Raises CapacityError when a file cannot grow so far; nothing is planned then.
        """
        with self._lock:
            before = list(self._map.sizes)
            extents = self._map.allocate(names, block_sizes)
            try:
                for file, size in zip(self._files, self._map.sizes, strict=False):
                    file.grow(size)
            except BaseException:
                self._map.sizes = before
                raise
            self._know(extents)
        return extents

    def restore_copies(
        self, names: Sequence[str], block_sizes: Sequence[int], index: int, record: Any
    ) -> tuple[Extent, ...]:
        """What `allocate_copies` has made, of which a manifest records number `index`; the others are blank.

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
        self._make(lambda directory, nbytes: directory.create_file(self._name, nbytes))

    def create_scratch(self) -> None:
        """The same in files without a name: they vanish with the process."""
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
                if self._name not in directory.names():
                    raise StorageError(
                        f"{directory.path / self._name} is missing, which has the states that the generation names. "
                        "Restore the file, load a checkpoint, or start over with existing='discard'"
                    )
                files.append(directory.open_file(self._name))
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

    def read(self, extent: Extent, rows: slice, address: int, urgency: Urgency = Urgency.NORMAL) -> Transfer:
        """Launch the read of blocks to consecutive memory, verified; of blocks that were all never written, zeros."""
        if not extent.written[rows].any():
            ctypes.memset(address, 0, int(extent.blocks[rows]["nbytes"].sum()))
            return Transfer(self._engine, None, self.on_error)
        return Transfer(
            self._engine, self._engine.submit(IoOp.READ, extent.blocks[rows], address, urgency), self.on_error
        )

    def write(self, extent: Extent, rows: slice, address: int) -> Transfer:
        """Launch the write of some blocks from consecutive memory; their checksums are set on the way."""
        extent.written[rows] = True
        return Transfer(self._engine, self._engine.submit(IoOp.WRITE, extent.blocks[rows], address), self.on_error)

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
        """Close the files; the engine first. One that is stuck keeps them open, and their directories locked."""
        if self._engine.is_stuck:
            _STUCK.extend(self._files)
            for directory in self._directories:
                directory.stays_locked = True
        else:
            for file in self._files:
                file.close()
        self._files = []

    def _open(self, files: list[DataFile]) -> None:
        self._files = files
        for drive, file in enumerate(files):
            self._engine.name_file(file.fd, str(file.path), drive)
        for extent in self._extents:
            self._bind(extent)

    def _bind(self, extent: Extent) -> None:
        extent.blocks["fd"] = np.asarray([file.fd for file in self._files], dtype=np.int32)[extent.directories]
