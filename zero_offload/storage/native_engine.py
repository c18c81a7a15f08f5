"""The file engine over the native thread pool: pread and pwrite with checksums, outside the interpreter lock.

Owns the native handle, the paths of the files for error messages, and every block table until its ticket is
waited for: memory the threads still write to must not be collected. Never opens or closes a file.
"""

from __future__ import annotations

import errno
import os
import time
from typing import NoReturn

from zero_offload import abi, native
from zero_offload.errors import ConfigError, IntegrityError, StorageError
from zero_offload.storage.engine import BLOCK_DTYPE, BlockTable, EngineStats, Ticket, Urgency
from zero_offload.types import format_bytes

# A wait in C cannot see Ctrl-C; it comes back this often to let Python look.
_WAIT_SLICE_S = 0.25

_REMEDIES = {
    errno.ENOSPC: "Free space there or name another directory in nvme=; the last commit is intact",
    errno.EDQUOT: "Raise the quota or name another directory in nvme=; the last commit is intact",
    errno.EIO: "The drive reports a fault: see 'dmesg' and its SMART data; the last commit is intact",
    errno.EBADF: "The file was closed while it was in use",
    errno.EINVAL: "With O_DIRECT the offset, length and memory must be multiples of the drive's sector",
}


class NativeEngine:
    """A `FileEngine`."""

    def __init__(self, num_threads: int) -> None:
        self._handle = native.io_open(num_threads)
        self._owner_pid = os.getpid()
        self._paths: dict[int, str] = {}
        # Until waited for, so that a dropped ticket cannot free a table the threads write checksums to.
        self._in_flight: dict[int, Ticket] = {}

    def name_file(self, fd: int, path: str) -> None:
        self._paths[fd] = path

    def read(self, blocks: BlockTable, address: int, urgency: Urgency = Urgency.NORMAL) -> Ticket:
        return self._submit(abi.IoOp.READ, blocks, address, urgency)

    def read_unverified(self, blocks: BlockTable, address: int, urgency: Urgency = Urgency.NORMAL) -> Ticket:
        return self._submit(abi.IoOp.READ_UNVERIFIED, blocks, address, urgency)

    def write(self, blocks: BlockTable, address: int, urgency: Urgency = Urgency.NORMAL) -> Ticket:
        return self._submit(abi.IoOp.WRITE, blocks, address, urgency)

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> None:
        handle = self._open_handle()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = _WAIT_SLICE_S if deadline is None else deadline - time.monotonic()
            result = native.io_wait(handle, ticket.number, min(max(left_s, 0.0), _WAIT_SLICE_S))
            if result.status != abi.IoStatus.TIMEOUT:
                break
            if deadline is not None and time.monotonic() >= deadline:
                self._raise_timeout(ticket, result, timeout_s)
        self._in_flight.pop(ticket.number, None)
        if result.status != abi.IoStatus.DONE:
            self._raise_failure(ticket, result)

    def done(self, ticket: Ticket) -> bool:
        return native.io_done(self._open_handle(), ticket.number)

    def stats(self) -> EngineStats:
        stats = native.io_stats(self._open_handle())
        return EngineStats(
            jobs_queued=stats.jobs_queued,
            bytes_read=stats.bytes_read,
            bytes_written=stats.bytes_written,
            busy_read_s=stats.busy_read_s,
            busy_write_s=stats.busy_write_s,
        )

    def inject_fault(self, fault: abi.Fault, nth: int = 1) -> None:
        """For tests: make the nth read or write from now on fail in this way, once."""
        native.io_fault(self._open_handle(), fault, nth)

    def close(self) -> None:
        if self._handle and os.getpid() == self._owner_pid:
            handle, self._handle = self._handle, 0
            native.io_close(handle)
            self._in_flight.clear()

    def _open_handle(self) -> int:
        if os.getpid() != self._owner_pid:
            raise StorageError(
                f"process {os.getpid()} is a fork of {self._owner_pid}, which owns this file engine. Open "
                "another in the child, or do not touch offloaded parameters in DataLoader workers"
            )
        if not self._handle:
            raise StorageError("the file engine is closed; nothing can be read or written after close()")
        return self._handle

    def _submit(self, op: abi.IoOp, blocks: BlockTable, address: int, urgency: Urgency) -> Ticket:
        if blocks.dtype != BLOCK_DTYPE or blocks.ndim != 1 or not blocks.flags.c_contiguous:
            raise ConfigError(
                f"a block table is a contiguous array of BLOCK_DTYPE rows, not {blocks.dtype} of shape "
                f"{blocks.shape} with strides {blocks.strides}"
            )
        submission = native.IoSubmission(op, blocks.ctypes.data, len(blocks), address, urgency)
        ticket = Ticket(native.io_submit(self._open_handle(), submission), blocks, address)
        self._in_flight[ticket.number] = ticket
        return ticket

    def _where(self, ticket: Ticket, block: int) -> str:
        row = ticket.blocks[block]
        fd = int(row["fd"])
        path = self._paths.get(fd, f"file descriptor {fd}")
        return (
            f"{format_bytes(int(row['nbytes']))} at offset {int(row['offset'])} of {path} "
            f"(block {block + 1} of {len(ticket.blocks)})"
        )

    def _raise_failure(self, ticket: Ticket, result: abi.IoResultStruct) -> NoReturn:
        verb = "write" if result.op == abi.IoOp.WRITE else "read"
        where = self._where(ticket, result.block)
        if result.status == abi.IoStatus.OS_ERROR:
            code = result.sys_errno
            remedy = _REMEDIES.get(code, "The last commit is intact")
            raise StorageError(
                f"{verb} of {where} failed: {os.strerror(code)} ({errno.errorcode.get(code, code)}). {remedy}"
            )
        if result.status == abi.IoStatus.TRUNCATED:
            raise IntegrityError(
                f"{verb} of {where}: the file ends inside the block. It was truncated by something else; "
                "restore it, or start over with existing='discard'"
            )
        raise IntegrityError(
            f"{verb} of {where}: checksum {result.actual_crc:08x}, expected {result.expected_crc:08x}, also "
            "when read again. The drive does not hold what was written; restore a checkpoint, test the drive"
        )

    def _raise_timeout(self, ticket: Ticket, result: abi.IoResultStruct, timeout_s: float | None) -> NoReturn:
        total = int(ticket.blocks["nbytes"].sum())
        raise StorageError(
            f"{format_bytes(result.bytes_done)} of {format_bytes(total)} moved in {timeout_s:g} s, first "
            f"{self._where(ticket, 0)}. The drive is stalled or slow: see 'dmesg' and 'iostat -x'. "
            "The transfer goes on; wait again"
        )
