"""What a file engine promises: blocks of files to and from memory, launched now and waited for later.

Owns the words (`BLOCK_DTYPE`, `Ticket`, `Urgency`, `FileEngine`) and the choice of engine; moves no byte
itself. A block table is both the map and the checksums of an extent: a write fills the checksum of each row,
a read is verified against it. Files are the caller's: opened, sized, named and closed elsewhere.
The calls in order: `open_engine`, `name_file` for each file, `read` / `write`, `wait`, `close`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

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


class Urgency(IntEnum):
    """Urgent transfers start before all normal ones that have not started."""

    NORMAL = 0
    URGENT = 1


@dataclass(frozen=True, eq=False)
class Ticket:
    """A transfer under way. Holds its block table; the memory is the caller's until `wait` returns."""

    number: int
    blocks: BlockTable
    address: int


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was opened; busy seconds are summed over its threads."""

    jobs_queued: int
    bytes_read: int
    bytes_written: int
    busy_read_s: float
    busy_write_s: float


class FileEngine(Protocol):
    """Any thread may call; a child of fork may not."""

    def name_file(self, fd: int, path: str) -> None:
        """Tell the path that errors on this descriptor shall name."""

    def read(self, blocks: BlockTable, address: int, urgency: Urgency = Urgency.NORMAL) -> Ticket:
        """Launch the read of blocks to consecutive memory at `address`, verified against their checksums."""

    def read_unverified(self, blocks: BlockTable, address: int, urgency: Urgency = Urgency.NORMAL) -> Ticket:
        """The same without looking at the checksums."""

    def write(self, blocks: BlockTable, address: int, urgency: Urgency = Urgency.NORMAL) -> Ticket:
        """Launch the write of consecutive memory to blocks; sets their checksums before it is done."""

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> None:
        """Return when all blocks are moved. A ticket can be waited for once, but again after a timeout.

        Raises StorageError (the system refused, or the time is over) or IntegrityError (truncated, checksum).
        """

    def done(self, ticket: Ticket) -> bool:
        """Whether `wait` would return at once."""

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Wait for everything launched and stop the threads. Closing twice is allowed."""


def open_engine(num_threads: int) -> FileEngine:
    """The fastest engine of this machine. Raises CapacityError when there is none."""
    from zero_offload.storage.native_engine import NativeEngine

    return NativeEngine(num_threads)
