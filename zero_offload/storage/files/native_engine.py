"""The file engine over the native library: io_uring or threads, with checksums, outside the interpreter lock.

Owns the native handle, and every block table until its ticket is waited for: memory the threads still write to must
not be collected. Never opens or closes a file.
"""

from __future__ import annotations

import ctypes as C
import os
import time
import weakref

from zero_offload.base.ends import in_child
from zero_offload.base.types import EngineKind
from zero_offload.hardware import abi, native
from zero_offload.hardware.abi import IoOp, IoResultStruct, IoStatus
from zero_offload.storage.files.engine import (
    BLOCK_DTYPE,
    BlockFailure,
    BlockTable,
    EngineSettings,
    FileEngine,
    Lasting,
    StallWatch,
    Ticket,
    TransferTimes,
    Urgency,
    table_error,
    unknown_ticket_error,
)

# A wait in C cannot see Ctrl-C; it comes back this often to let Python look.
WAIT_SLICE_S = 0.25
_CLOSE_SLICE_S = 0.01

_KINDS = {EngineKind.IO_URING: abi.IoKind.URING, EngineKind.THREADS: abi.IoKind.THREADS}

STUCK: list[NativeEngine] = []
"""Engines whose drives answer no more. They are never freed."""


class NativeEngine(FileEngine):
    def __init__(self, settings: EngineSettings, num_drives: int = 1) -> None:
        super().__init__(settings)
        self._num_drives = num_drives
        self.handle = self._inherited = native.io_open(
            _KINDS[settings.kind], num_drives, settings.num_threads, settings.depth, settings.request_bytes
        )
        """The native engine's; 0 once closed, and in a child of fork."""
        self._free = weakref.finalize(self, _free, self.handle, self._owner_pid)
        # Until waited for, so that a dropped ticket cannot free a table the threads write checksums to.
        self._in_flight: dict[Ticket, IoResultStruct] = {}
        self._lasting: list[Lasting] = []
        in_child(self._let_go)

    def name_file(self, fd: int, path: str, drive: int = 0) -> None:
        self._paths[fd] = path
        native.io_add_file(self._open_handle(), fd, drive % self._num_drives)

    def add_memory(self, region: Lasting) -> None:
        self._lasting.append(region)
        native.io_add_memory(self._open_handle(), region.address, region.nbytes)

    def submit(self, op: IoOp, blocks: BlockTable, address: int, urgency: Urgency = Urgency.NORMAL) -> Ticket:
        if blocks.dtype != BLOCK_DTYPE or blocks.ndim != 1 or not blocks.flags.c_contiguous:
            raise table_error(blocks)
        if not (handle := self.handle):
            raise self._unusable()
        number, result = C.c_uint64(), native.io_result()
        try:
            native.io_submit(handle, op, blocks.ctypes.data, len(blocks), address, urgency, number)
        except BaseException:
            # A signal's handler raised as the call returned: what was launched has no waiter, so it ends first.
            while number.value and result.status == IoStatus.TIMEOUT:
                native.io_wait(handle, number.value, WAIT_SLICE_S, result)
            raise
        ticket = Ticket(number.value, blocks)
        self._in_flight[ticket] = result
        return ticket

    def wait(self, ticket: Ticket) -> TransferTimes:
        handle, result, watch = self.handle, self._in_flight.get(ticket), None
        if not handle or result is None:
            raise self._refusal(ticket)
        while result.status == IoStatus.TIMEOUT:
            native.io_wait(handle, ticket.number, WAIT_SLICE_S, result)
            if result.status == IoStatus.TIMEOUT:
                watch = watch or StallWatch()
                if self.is_stuck or watch.is_over(moved_bytes(handle)):
                    self._give_up(handle)
                    self._raise_stuck(ticket, result.bytes_done)
        moved = TransferTimes(result.begin_ns, result.end_ns)
        # No call, so no signal's handler, between this and the return: a wait that was interrupted can be repeated.
        del self._in_flight[ticket]
        if result.status != IoStatus.DONE:
            failure = BlockFailure(
                op=IoOp(result.op),
                row=result.block,
                status=IoStatus(result.status),
                code=result.sys_errno,
                expected_crc=result.expected_crc,
                actual_crc=result.actual_crc,
            )
            self._raise_failure(ticket, failure)
        return moved

    def done(self, ticket: Ticket) -> bool:
        handle, result = self.handle, self._in_flight.get(ticket)
        if not handle or result is None:
            raise self._refusal(ticket)
        return result.status != IoStatus.TIMEOUT or native.io_done(handle, ticket.number)

    def inject_fault(self, fault: abi.Fault, nth: int = 1) -> None:
        """For tests: make the nth read or write from now on fail in this way, once."""
        native.io_fault(self._open_handle(), fault, nth)

    def close(self) -> None:
        if not self.handle:
            return
        handle, self.handle = self.handle, 0
        watch = StallWatch()
        while not self.is_stuck and _is_busy(handle):
            time.sleep(_CLOSE_SLICE_S)
            if watch.is_over(moved_bytes(handle)):
                self._give_up(handle)
        if self.is_stuck:
            return  # its threads wait for a drive that does not answer; so would we
        # It is freed with this object: another thread may be in a wait, and gets its result.
        native.io_stop(handle)
        self._lasting.clear()

    def _give_up(self, handle: int) -> None:
        """Leave the engine to itself: its transfers may end at any time, or never. So its tables and threads stay as
        long as the process.
        """
        self.is_stuck = True
        if self not in STUCK:
            STUCK.append(self)
        self._free.detach()
        native.io_give_up(handle)

    def _let_go(self) -> None:
        """In a forked child: it may outlive its parent, and must not keep the parent's files and rings alive."""
        self.handle = 0
        if self._free.alive or self.is_stuck:
            native.io_abandon(self._inherited)

    def _open_handle(self) -> int:
        if not self.handle:
            raise self._unusable()
        return self.handle

    def _refusal(self, ticket: Ticket) -> Exception:
        return unknown_ticket_error(ticket) if self.handle else self._unusable()


def moved_bytes(handle: int) -> int:
    """Bytes moved since the engine was opened."""
    stats = native.io_stats(handle)
    return int(stats.bytes_read + stats.bytes_written)


def _is_busy(handle: int) -> bool:
    stats = native.io_stats(handle)
    return bool(stats.jobs_queued + stats.jobs_running)


def _free(handle: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        native.io_close(handle)
