"""The contract of file engines: blocks of files to and from memory, launched now and waited for later.

Owns the words (`BLOCK_DTYPE`, `Ticket`, `Urgency`, `EngineSettings`, `FileEngine`), when an engine counts as stalled,
and the errors of transfers: file, offset, block, reason, remedy. It moves no byte itself. A block table is both the map
and the checksums of an extent. A write fills the checksum of each row, and a read is verified against it. Files are the
caller's: opened, sized, named and closed elsewhere. The calls in order: `engines.open_engine`, `name_file` for each
file, `submit`, `wait`, `close`.
"""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from zero_offload.base.errors import ConfigError, IntegrityError, StorageError
from zero_offload.base.types import EngineKind, format_bytes
from zero_offload.hardware.abi import IoOp, IoStatus
from zero_offload.storage.files.system import REMEDIES

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

STALL_LIMIT_S = 120.0
"""A wait ends when the engine has moved nothing for so long."""
_STALL_SLICE_S_MAX = 1.0
"""Seconds that the time between two looks counts for at most."""
_COMMIT_STAYS = "The last commit is intact"


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
    """Urgent transfers start before all waiting normal transfers, which take turns by kind."""

    NORMAL = 0
    URGENT = 1


@dataclass(frozen=True, eq=False)
class Ticket:
    """A transfer under way. Holds its block table; the memory is the caller's until `wait` returns."""

    number: int
    blocks: BlockTable


class TransferTimes(NamedTuple):
    """When the first block of a transfer was started and the last one was there, by `perf_counter_ns`."""

    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class BlockFailure:
    """The first block of a transfer that failed."""

    op: IoOp
    row: int
    status: IoStatus
    """OS_ERROR, TRUNCATED or CHECKSUM."""
    code: int = 0
    """The errno of OS_ERROR."""
    expected_crc: int = 0
    actual_crc: int = 0


class Lasting(Protocol):
    """Host memory that stays where it is while the object lives."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class StallWatch:
    """The clock of one wait."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._moved_bytes = -1
        self._idle_s = 0.0

    def is_over(self, moved_bytes: int) -> bool:
        """True if an engine that has moved so many bytes in all has moved none for `STALL_LIMIT_S`."""
        now = time.monotonic()
        # Time in which this process was stopped is not the drive's.
        self._idle_s += min(now - self._last, _STALL_SLICE_S_MAX)
        self._last = now
        if moved_bytes != self._moved_bytes:
            self._moved_bytes, self._idle_s = moved_bytes, 0.0
        return self._idle_s > STALL_LIMIT_S


class FileEngine(ABC):
    """Any thread may call; a child of fork may not."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.is_stuck = False
        """True if it was given up, as it had moved nothing for `STALL_LIMIT_S`. It starts nothing more, but what it had
        started may still reach its descriptor, which must never stand for another file."""
        self._paths: dict[int, str] = {}
        self._owner_pid = os.getpid()

    @abstractmethod
    def name_file(self, fd: int, path: str, drive: int = 0) -> None:
        """Tell the path that errors on this descriptor shall name, and which of the engine's drives holds the file.

        Of more drives than the engine was opened for, some share its threads.
        """

    def add_memory(self, region: Lasting) -> None:  # noqa: B027
        """Tell of memory that is used again and again; kept alive with the engine. For speed alone."""

    @abstractmethod
    def submit(self, op: IoOp, blocks: BlockTable, address: int, urgency: Urgency = Urgency.NORMAL) -> Ticket:
        """Launch a transfer between blocks and consecutive memory at `address`.

        READ is verified against the checksums in the table, READ_UNVERIFIED is not. WRITE sets them before it is done.
        Raises ConfigError for what is not a block table, StorageError once closed.
        """

    @abstractmethod
    def wait(self, ticket: Ticket) -> TransferTimes:
        """Return when all blocks are moved. A ticket can be waited for once, but again after an interrupt.

        Raises StorageError (the system refused, or the engine is stuck) or IntegrityError (truncated, checksum).
        """

    @abstractmethod
    def done(self, ticket: Ticket) -> bool:
        """True if `wait` would return at once."""

    @abstractmethod
    def close(self) -> None:
        """Wait for everything launched, unless stuck, and stop the threads. Closing twice is allowed."""

    def _unusable(self) -> StorageError:
        """Why an engine without threads takes no call."""
        if os.getpid() == self._owner_pid:
            return StorageError("the file engine is closed; nothing can be read or written after close()")
        return StorageError(
            f"process {os.getpid()} is a fork of {self._owner_pid}, which owns this file engine. Open "
            "another in the child, or do not touch offloaded parameters in DataLoader workers"
        )

    def _raise_failure(self, ticket: Ticket, failure: BlockFailure) -> NoReturn:
        """Raise StorageError or IntegrityError."""
        verb = "write" if failure.op is IoOp.WRITE else "read"
        what = f"{verb} of {self._where(ticket, failure.row)}"
        if failure.status is IoStatus.OS_ERROR:
            code = failure.code
            remedies = ". ".join([*filter(None, [REMEDIES.get(code)]), _COMMIT_STAYS])
            raise StorageError(f"{what} failed: {os.strerror(code)} ({errno.errorcode.get(code, code)}). {remedies}")
        if failure.status is IoStatus.TRUNCATED:
            raise IntegrityError(
                f"{what}: the file ends inside the block. It was truncated by something else; "
                "restore it, or start over with existing='discard'"
            )
        raise IntegrityError(
            f"{what}: checksum {failure.actual_crc:08x}, expected {failure.expected_crc:08x}, also "
            "when read again. The drive does not hold what was written; restore a checkpoint, test the drive"
        )

    def _raise_stuck(self, ticket: Ticket, done_bytes: int) -> NoReturn:
        """Raise StorageError: the engine was given up before the transfer had ended."""
        total_bytes = int(ticket.blocks["nbytes"].sum())
        raise StorageError(
            f"given up with {format_bytes(done_bytes)} of {format_bytes(total_bytes)} moved, first "
            f"{self._where(ticket, 0)}: nothing at all has moved for {STALL_LIMIT_S:g} s. The drive is stalled or "
            f"slow: see 'dmesg' and 'iostat -x'. {_COMMIT_STAYS}: end this process, which keeps the directory locked, "
            "and resume when the drive answers"
        )

    def _where(self, ticket: Ticket, row: int) -> str:
        block = ticket.blocks[row]
        fd = int(block["fd"])
        path = self._paths.get(fd, f"file descriptor {fd}")
        return (
            f"{format_bytes(int(block['nbytes']))} at offset {int(block['offset'])} of {path} "
            f"(block {row + 1} of {len(ticket.blocks)})"
        )


def table_error(blocks: BlockTable) -> ConfigError:
    """The error for a table that no engine can read in place."""
    return ConfigError(
        f"a block table is a contiguous array of BLOCK_DTYPE rows, not {blocks.dtype} of shape "
        f"{blocks.shape} with strides {blocks.strides}"
    )


def unknown_ticket_error(ticket: Ticket) -> ConfigError:
    return ConfigError(f"ticket {ticket.number} is not open: it was waited for, or never given")
