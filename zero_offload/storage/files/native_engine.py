"""The file engine over the native library: io_uring or threads, with checksums, outside the interpreter lock.

Owns the native handle, the paths of the files for error messages, and every block table until its ticket is
waited for: memory the threads still write to must not be collected. Never opens or closes a file.
"""

from __future__ import annotations

import ctypes as C
import os
import time
import weakref

from zero_offload.base.ends import in_child
from zero_offload.base.types import EngineKind
from zero_offload.hardware import abi, native
from zero_offload.hardware.abi import IoResultStruct
from zero_offload.storage.files.engine import BlockTable, EngineSettings, Lasting, Moved, Ticket, Urgency
from zero_offload.storage.files.failures import (
    BlockFailure,
    Cause,
    check_owner,
    check_table,
    closed_error,
    raise_failure,
    raise_stuck,
    unknown_ticket_error,
)
from zero_offload.storage.files.stall import StallWatch

# A wait in C cannot see Ctrl-C; it comes back this often to let Python look.
WAIT_SLICE_S = 0.25
_CLOSE_SLICE_S = 0.01

_KINDS = {EngineKind.IO_URING: abi.IoKind.URING, EngineKind.THREADS: abi.IoKind.THREADS}
_CAUSES = {
    abi.IoStatus.OS_ERROR: Cause.SYSTEM,
    abi.IoStatus.TRUNCATED: Cause.TRUNCATED,
    abi.IoStatus.CHECKSUM: Cause.CHECKSUM,
}


STUCK: list[NativeEngine] = []
"""Engines whose drives answer no more. They are never freed."""


class NativeEngine:
    """A `FileEngine`."""

    def __init__(self, settings: EngineSettings, num_drives: int = 1) -> None:
        self.settings = settings
        self._num_drives = num_drives
        self.handle = self._inherited = native.io_open(
            _KINDS[settings.kind], num_drives, settings.num_threads, settings.depth, settings.request_bytes
        )
        """The native engine's; 0 once closed."""
        self._owner_pid = os.getpid()
        self._free = weakref.finalize(self, _free, self.handle, self._owner_pid)
        self._paths: dict[int, str] = {}
        # Until waited for, so that a dropped ticket cannot free a table the threads write checksums to.
        self._in_flight: dict[int, tuple[Ticket, IoResultStruct]] = {}
        self._lasting: list[Lasting] = []
        self.is_stuck = False
        in_child(self._let_go)

    def name_file(self, fd: int, path: str, drive: int = 0) -> None:
        self._paths[fd] = path
        native.io_add_file(self._open_handle(), fd, drive % self._num_drives)

    def add_memory(self, region: Lasting) -> None:
        self._lasting.append(region)
        native.io_add_memory(self._open_handle(), region.address, region.nbytes)

    def read(self, blocks: BlockTable, address: int, urgency: Urgency = Urgency.NORMAL) -> Ticket:
        return self._submit(abi.IoOp.READ, blocks, address, urgency)

    def read_unverified(self, blocks: BlockTable, address: int) -> Ticket:
        return self._submit(abi.IoOp.READ_UNVERIFIED, blocks, address, Urgency.NORMAL)

    def write(self, blocks: BlockTable, address: int, urgency: Urgency = Urgency.NORMAL) -> Ticket:
        return self._submit(abi.IoOp.WRITE, blocks, address, urgency)

    def wait(self, ticket: Ticket) -> Moved:
        handle, result, watch = self._open_handle(), self._result(ticket), StallWatch()
        while result.status == abi.IoStatus.TIMEOUT:
            native.io_wait(handle, ticket.number, WAIT_SLICE_S, result)
            if result.status == abi.IoStatus.TIMEOUT and (self.is_stuck or watch.is_over(moved_bytes(handle))):
                self._give_up(handle)
                raise_stuck(ticket, result.bytes_done, self._paths)
        moved = Moved(result.begin_ns, result.end_ns)
        # No call, so no signal's handler, between this and the return: a wait that was interrupted can be repeated.
        del self._in_flight[ticket.number]
        if result.status != abi.IoStatus.DONE:
            failure = BlockFailure(
                verb="write" if result.op == abi.IoOp.WRITE else "read",
                row=result.block,
                cause=_CAUSES[abi.IoStatus(result.status)],
                code=result.sys_errno,
                expected_crc=result.expected_crc,
                actual_crc=result.actual_crc,
            )
            raise_failure(ticket, failure, self._paths)
        return moved

    def done(self, ticket: Ticket) -> bool:
        handle, result = self._open_handle(), self._result(ticket)
        return result.status != abi.IoStatus.TIMEOUT or native.io_done(handle, ticket.number)

    def _let_go(self) -> None:
        """In a child: one that outlives its parent must not keep the parent's files and rings alive."""
        if self._free.alive or self.is_stuck:
            native.io_abandon(self._inherited)

    def inject_fault(self, fault: abi.Fault, nth: int = 1) -> None:
        """For tests: make the nth read or write from now on fail in this way, once."""
        native.io_fault(self._open_handle(), fault, nth)

    def close(self) -> None:
        if self.handle and os.getpid() == self._owner_pid:
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
        """What is under way may end at any time, or never: tables and threads stay as long as the process."""
        self.is_stuck = True
        if self not in STUCK:
            STUCK.append(self)
        self._free.detach()
        native.io_give_up(handle)

    def _open_handle(self) -> int:
        check_owner(self._owner_pid)
        if not self.handle:
            raise closed_error()
        return self.handle

    def _submit(self, op: abi.IoOp, blocks: BlockTable, address: int, urgency: Urgency) -> Ticket:
        check_table(blocks)
        handle, number, result = self._open_handle(), C.c_uint64(), native.io_result()
        try:
            native.io_submit(handle, op, blocks.ctypes.data, len(blocks), address, urgency, number)
        except BaseException:
            # A signal's handler raised as the call returned: what was launched has no waiter, so it ends first.
            while number.value and result.status == abi.IoStatus.TIMEOUT:
                native.io_wait(handle, number.value, WAIT_SLICE_S, result)
            raise
        ticket = Ticket(number.value, blocks)
        self._in_flight[ticket.number] = ticket, result
        return ticket

    def _result(self, ticket: Ticket) -> IoResultStruct:
        held = self._in_flight.get(ticket.number)
        if held is None or held[0] is not ticket:
            raise unknown_ticket_error(ticket)
        return held[1]


def moved_bytes(handle: int) -> int:
    """What it has moved since it was opened."""
    stats = native.io_stats(handle)
    return int(stats.bytes_read + stats.bytes_written)


def _is_busy(handle: int) -> bool:
    stats = native.io_stats(handle)
    return bool(stats.jobs_queued + stats.jobs_running)


def _free(handle: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        native.io_close(handle)
