"""What a file engine promises: blocks of files to and from memory, launched now and waited for later.

Owns the words (`BLOCK_DTYPE`, `Ticket`, `Urgency`, `EngineSettings`, `FileEngine`); moves no byte
itself. A block table is both the map and the checksums of an extent: a write fills the checksum of each row,
a read is verified against it. Files are the caller's: opened, sized, named and closed elsewhere.
The calls in order: `engines.open_engine`, `name_file` for each file, `read` / `write`, `wait`, `close`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from zero_offload.base.types import EngineKind, format_bytes

BlockTable = npt.NDArray[np.void]

BLOCK_DTYPE = np.dtype(
    [
        ("offset", np.uint64),  # bytes from the start of the file
        ("nbytes", np.uint32),
        ("crc", np.uint32),  # crc32c of the bytes, started from `seed`
        ("fd", np.int32),
        ("seed", np.uint32),
    ]
)


@dataclass(frozen=True)
class EngineSettings:
    """How an engine works."""

    kind: EngineKind
    num_threads: int
    """Per drive."""
    depth: int
    """Requests in flight per drive and thread; of io_uring only."""
    request_bytes: int
    """Blocks are moved in requests of at most so many bytes, whole sectors."""

    def __str__(self) -> str:
        depth = f", {self.depth} requests in flight" if self.kind is EngineKind.IO_URING else ""
        threads = f"{self.num_threads} thread{'s' if self.num_threads != 1 else ''} per drive"
        return f"{self.kind.value}, {threads}{depth}, requests of {format_bytes(self.request_bytes)}"


class Urgency(IntEnum):
    """Urgent transfers start before all normal ones that have not started; those take turns by kind."""

    NORMAL = 0
    URGENT = 1


@dataclass(frozen=True, eq=False)
class Ticket:
    """A transfer under way. Holds its block table; the memory is the caller's until `wait` returns."""

    number: int
    blocks: BlockTable


class Moved(NamedTuple):
    """When the first block of a transfer was started and the last one was there, by `perf_counter_ns`."""

    begin_ns: int
    end_ns: int


class Lasting(Protocol):
    """Host memory that stays where it is while the object lives."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class FileEngine(Protocol):
    """Any thread may call; a child of fork may not."""

    is_stuck: bool
    """Whether it was given up, as it had moved nothing for `STALL_LIMIT_S`: it starts nothing more, but what it had
    started may still reach its descriptor, which must never stand for another file."""

    def name_file(self, fd: int, path: str, drive: int = 0) -> None:
        """Tell the path that errors on this descriptor shall name, and which of the engine's drives holds the file.

        Of more drives than the engine was opened for, some share its threads.
        """

    def add_memory(self, region: Lasting) -> None:
        """Tell of memory that is used again and again; kept alive with the engine. For speed alone."""

    def read(self, blocks: BlockTable, address: int, urgency: Urgency = Urgency.NORMAL) -> Ticket:
        """Launch the read of blocks to consecutive memory at `address`, verified against their checksums."""

    def read_unverified(self, blocks: BlockTable, address: int) -> Ticket:
        """The same without looking at the checksums."""

    def write(self, blocks: BlockTable, address: int, urgency: Urgency = Urgency.NORMAL) -> Ticket:
        """Launch the write of consecutive memory to blocks; sets their checksums before it is done."""

    def wait(self, ticket: Ticket) -> Moved:
        """Return when all blocks are moved. A ticket can be waited for once, but again after an interrupt.

        Raises StorageError (the system refused, or the engine is stuck) or IntegrityError (truncated, checksum).
        """

    def done(self, ticket: Ticket) -> bool:
        """Whether `wait` would return at once."""

    def close(self) -> None:
        """Wait for everything launched, unless stuck, and stop the threads. Closing twice is allowed."""
