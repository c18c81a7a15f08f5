"""What went wrong with a transfer, as the one error that its waiter gets: file, offset, block, reason, remedy.

Owns the texts of all file engines; decides nothing. `raise_failure` for a block that failed, `raise_stuck` for a
transfer that was given up, `check_table` and `check_owner` before one; `remedy_of` for other places that meet an errno
elsewhere.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

from zero_offload.base.errors import ConfigError, IntegrityError, StorageError
from zero_offload.base.types import format_bytes
from zero_offload.storage.files import stall
from zero_offload.storage.files.engine import BLOCK_DTYPE, BlockTable, Ticket

_REMEDIES = {
    errno.ENOSPC: "Free space there (or inodes: see 'df -i') or name another directory in nvme=",
    errno.EDQUOT: "Raise the quota or name another directory in nvme=",
    errno.EEXIST: "No run.json names it: if it is left over from a run that is not needed, delete it by hand, "
    "or name another directory in nvme=",
    errno.EFBIG: "Files may not grow that far: see 'ulimit -f', and type 'ulimit -f unlimited'",
    errno.EMFILE: "Too many files are open in this process: see 'ulimit -n', and type 'ulimit -n 4096'",
    errno.ENFILE: "Too many files are open on this machine: see /proc/sys/fs/file-max",
    errno.EIO: "The drive reports a fault: see 'dmesg' and its SMART data",
    errno.EROFS: "The file system is read-only: see 'dmesg' and 'mount', or name another directory in nvme=",
    errno.ENAMETOOLONG: "Name a directory with a shorter path in nvme=",
    errno.EBADF: "The file was closed while it was in use",
    errno.EINVAL: "With O_DIRECT the offset, length and memory must be multiples of the drive's sector",
}
_COMMIT_STAYS = "The last commit is intact"


class Cause(Enum):
    """How a block failed."""

    SYSTEM = "system"  # the system refused; see `code`
    TRUNCATED = "truncated"
    CHECKSUM = "checksum"


@dataclass(frozen=True)
class BlockFailure:
    """The first block of a transfer that failed."""

    verb: str
    row: int
    cause: Cause
    code: int = 0
    """errno."""
    expected_crc: int = 0
    actual_crc: int = 0


def check_table(blocks: BlockTable) -> None:
    """Raise ConfigError unless an engine can read this table in place."""
    if blocks.dtype != BLOCK_DTYPE or blocks.ndim != 1 or not blocks.flags.c_contiguous:
        raise ConfigError(
            f"a block table is a contiguous array of BLOCK_DTYPE rows, not {blocks.dtype} of shape "
            f"{blocks.shape} with strides {blocks.strides}"
        )


def check_owner(owner_pid: int) -> None:
    """Raise StorageError in a child of the process that opened the engine: its threads stayed behind."""
    if os.getpid() != owner_pid:
        raise StorageError(
            f"process {os.getpid()} is a fork of {owner_pid}, which owns this file engine. Open "
            "another in the child, or do not touch offloaded parameters in DataLoader workers"
        )


def closed_error() -> StorageError:
    return StorageError("the file engine is closed; nothing can be read or written after close()")


def unknown_ticket_error(ticket: Ticket) -> ConfigError:
    return ConfigError(f"ticket {ticket.number} is not open: it was waited for, or never given")


def remedy_of(code: int) -> str:
    """What to do about an errno of the file system."""
    return _REMEDIES.get(code, "Check the disk and its permissions, or name another directory in nvme=")


def raise_failure(ticket: Ticket, failure: BlockFailure, paths: Mapping[int, str]) -> NoReturn:
    """Raise StorageError or IntegrityError."""
    what = f"{failure.verb} of {_where(ticket, failure.row, paths)}"
    if failure.cause is Cause.SYSTEM:
        code = failure.code
        remedies = ". ".join([*filter(None, [_REMEDIES.get(code)]), _COMMIT_STAYS])
        raise StorageError(f"{what} failed: {os.strerror(code)} ({errno.errorcode.get(code, code)}). {remedies}")
    if failure.cause is Cause.TRUNCATED:
        raise IntegrityError(
            f"{what}: the file ends inside the block. It was truncated by something else; "
            "restore it, or start over with existing='discard'"
        )
    raise IntegrityError(
        f"{what}: checksum {failure.actual_crc:08x}, expected {failure.expected_crc:08x}, also "
        "when read again. The drive does not hold what was written; restore a checkpoint, test the drive"
    )


def raise_stuck(ticket: Ticket, done_bytes: int, paths: Mapping[int, str]) -> NoReturn:
    """Raise StorageError: the engine was given up before the transfer had ended."""
    total_bytes = int(ticket.blocks["nbytes"].sum())
    raise StorageError(
        f"given up with {format_bytes(done_bytes)} of {format_bytes(total_bytes)} moved, first "
        f"{_where(ticket, 0, paths)}: nothing at all has moved for {stall.STALL_LIMIT_S:g} s. The drive is stalled or "
        f"slow: see 'dmesg' and 'iostat -x'. {_COMMIT_STAYS}: end this process, which keeps the directory locked, and "
        "resume when the drive answers"
    )


def _where(ticket: Ticket, row: int, paths: Mapping[int, str]) -> str:
    block = ticket.blocks[row]
    fd = int(block["fd"])
    path = paths.get(fd, f"file descriptor {fd}")
    return (
        f"{format_bytes(int(block['nbytes']))} at offset {int(block['offset'])} of {path} "
        f"(block {row + 1} of {len(ticket.blocks)})"
    )
