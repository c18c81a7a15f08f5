"""The portable file engine: `preadv` and `pwritev` from Python's threads through aiofiles, on the caller's memory.

Needs no native library. Whole blocks move straight between file and memory, one after the other per thread. Calls that
return bytes objects are sixty times slower. Owns an event loop on a thread of its own, a queue of blocks per drive, and
the results until they are waited for. Never opens or closes a file.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from aiofiles import os as async_os

from zero_offload.base.ends import at_exit
from zero_offload.base.errors import ConfigError
from zero_offload.base.threads import LOOK_S, Bell, start
from zero_offload.base.types import SECTOR
from zero_offload.hardware.abi import IoOp, IoStatus
from zero_offload.hardware.kernels.choice import kernels
from zero_offload.storage.files.engine import (
    BLOCK_DTYPE,
    BlockFailure,
    BlockTable,
    EngineSettings,
    FileEngine,
    StallWatch,
    Ticket,
    TransferTimes,
    Urgency,
    table_error,
    unknown_ticket_error,
)

_Vector = Callable[..., Awaitable[int]]
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


@dataclass
class _Submission:
    """One submission; touched on the loop's thread only."""

    ticket: Ticket
    op: IoOp
    left: int
    done: bool = False
    ended: Bell = field(default_factory=Bell)
    failure: BlockFailure | None = None
    done_bytes: int = 0
    begin_ns: int = 0
    end_ns: int = 0

    def end(self) -> None:
        self.done = True
        self.ended.ring()

    def ends_in(self, timeout_s: float) -> bool:
        """True if it is done, within this time."""
        if not self.done:
            self.ended.wait(timeout_s)
        return self.done


_Job = tuple[int, int, int, int, _Submission]
"""One block: how little urgent, number of its ticket, row, address, batch. Urgent ones come first, then in the order of
submission."""


class _Threads(Executor):
    """Threads that the end of the process does not wait for, as it does for those of `ThreadPoolExecutor`.

    A drive may never answer; and transfers go on, until the last moment, while the interpreter ends.
    """

    def __init__(self, num_threads: int) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"zero_offload-io_{i}", daemon=True) for i in range(num_threads)
        ]
        try:
            for thread in self._threads:
                start(thread)
        except BaseException:
            self.shutdown(wait=False)
            raise

    def submit(self, fn: Callable[_Args, _Result], /, *args: _Args.args, **kwargs: _Args.kwargs) -> Future[_Result]:
        future: Future[_Result] = Future()
        self._calls.put(partial(_complete, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _complete(future: Future[_Result], call: Callable[[], _Result]) -> None:
    """Make the call, and give the future its result or its error."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


class AiofilesEngine(FileEngine):
    def __init__(self, settings: EngineSettings, num_drives: int = 1) -> None:
        super().__init__(settings)
        self._drives: dict[int, int] = {}
        self._open: dict[int, _Submission] = {}
        self._numbers = itertools.count(1)
        self.moved_bytes = 0
        """Read and written since it was opened."""
        self._closed = False
        self._defect: Exception | None = None
        num_threads = settings.num_threads * num_drives
        self._executor = _Threads(num_threads)
        self._preadv: _Vector = async_os.wrap(os.preadv)
        self._pwritev: _Vector = async_os.wrap(os.pwritev)
        self._loop = asyncio.new_event_loop()
        self._queues: list[asyncio.PriorityQueue[_Job]] = [asyncio.PriorityQueue() for _ in range(num_drives)]
        self._thread = threading.Thread(target=self._run, name="zero_offload-io-loop", daemon=True)
        try:
            start(self._thread)
        except BaseException:
            self._executor.shutdown(wait=False)
            self._loop.close()
            raise
        # The end of the process does not wait for daemons, but frees the memory that they read and write.
        at_exit(self._end_transfers)

    def name_file(self, fd: int, path: str, drive: int = 0) -> None:
        self._check_open()
        self._paths[fd], self._drives[fd] = path, drive % len(self._queues)

    def submit(self, op: IoOp, blocks: BlockTable, address: int, urgency: Urgency = Urgency.NORMAL) -> Ticket:
        self._check_open()
        if blocks.dtype != BLOCK_DTYPE or blocks.ndim != 1 or not blocks.flags.c_contiguous:
            raise table_error(blocks)
        if len(blocks) and not address:
            raise ConfigError("a transfer: base is NULL")
        ticket = Ticket(next(self._numbers), blocks)
        batch = _Submission(ticket, op, len(blocks))
        if not len(blocks):
            batch.end()
            self._open[ticket.number] = batch
            return ticket
        offsets = [0, *itertools.accumulate(int(nbytes) for nbytes in blocks["nbytes"])]
        jobs = [(-int(urgency), ticket.number, row, address + offsets[row], batch) for row in range(len(blocks))]
        # Last of all: `close` waits for what is open, and a Ctrl-C may strike anywhere.
        self._open[ticket.number] = batch
        self._loop.call_soon_threadsafe(self._queue, jobs)
        return ticket

    def wait(self, ticket: Ticket) -> TransferTimes:
        batch, watch = self._batch(ticket), StallWatch()
        while not batch.ends_in(LOOK_S):
            if self.is_stuck or watch.is_over(self.moved_bytes):
                self.is_stuck = True
                self._raise_stuck(ticket, batch.done_bytes)
        moved = TransferTimes(batch.begin_ns, batch.end_ns)
        # No call, so no signal's handler, between this and the return: a wait that was interrupted can be repeated.
        del self._open[ticket.number]
        if batch.failure is not None:
            if self._defect is not None:
                raise self._defect
            self._raise_failure(ticket, batch.failure)
        return moved

    def done(self, ticket: Ticket) -> bool:
        return self._batch(ticket).done

    def close(self) -> None:
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._end_transfers()
        self._closed = True
        if self.is_stuck:
            return  # its threads wait for a drive that does not answer; so would we
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._executor.shutdown()

    def _end_transfers(self) -> None:
        """Wait for everything launched, but for no longer than any other wait."""
        watch = StallWatch()
        while os.getpid() == self._owner_pid and not self.is_stuck and not self._closed:
            left = next((batch for batch in list(self._open.values()) if not batch.done), None)
            if left is None:
                return
            if not left.ends_in(LOOK_S):
                self.is_stuck = watch.is_over(self.moved_bytes)

    def _check_open(self) -> None:
        if self._closed or os.getpid() != self._owner_pid:
            raise self._unusable()

    def _batch(self, ticket: Ticket) -> _Submission:
        self._check_open()
        batch = self._open.get(ticket.number)
        if batch is None:
            raise unknown_ticket_error(ticket)
        return batch

    # On the loop's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        workers = [
            self._loop.create_task(self._serve(queue))
            for queue in self._queues
            for _ in range(self.settings.num_threads)
        ]
        self._loop.run_forever()
        for worker in workers:
            worker.cancel()
        self._loop.run_until_complete(asyncio.gather(*workers, return_exceptions=True))
        self._loop.close()

    def _queue(self, jobs: list[_Job]) -> None:
        for job in jobs:
            _, _, row, _, batch = job
            drive = self._drives.get(int(batch.ticket.blocks[row]["fd"]), 0)
            self._queues[drive].put_nowait(job)

    async def _serve(self, queue: asyncio.PriorityQueue[_Job]) -> None:
        while True:
            _, _, row, address, batch = await queue.get()
            if batch.failure is None:  # a failure starts no further block
                batch.begin_ns = batch.begin_ns or time.perf_counter_ns()
                failure = await self._move_safely(batch, row, address)
                if failure is None:
                    batch.done_bytes += int(batch.ticket.blocks[row]["nbytes"])
                elif batch.failure is None or failure.row < batch.failure.row:
                    batch.failure = failure
            batch.left -= 1
            assert batch.left >= 0, "a block has moved twice"
            if batch.left == 0:
                batch.end_ns = time.perf_counter_ns()
                batch.end()

    async def _move_safely(self, batch: _Submission, row: int, address: int) -> BlockFailure | None:
        """Every failure reaches the waiter."""
        try:
            return await self._move(batch, row, address)
        except Exception as error:
            self._defect = error
            return BlockFailure(batch.op, row, IoStatus.OS_ERROR, code=errno.EIO)

    async def _move(self, batch: _Submission, row: int, address: int) -> BlockFailure | None:
        block, op = batch.ticket.blocks[row], batch.op
        nbytes, seed = int(block["nbytes"]), int(block["seed"])
        if op is IoOp.WRITE and not self.is_stuck:
            block["crc"] = await self._checksum(seed, address, nbytes)
        actual = 0
        for _ in range(2):  # a second try tells a bad transfer from bad bytes on the drive
            failure = await self._transfer(batch, row, address)
            if failure is not None or op is not IoOp.READ:
                return failure
            actual = await self._checksum(seed, address, nbytes)
            if actual == int(block["crc"]):
                return None
        return BlockFailure(op, row, IoStatus.CHECKSUM, expected_crc=int(block["crc"]), actual_crc=actual)

    async def _checksum(self, seed: int, address: int, nbytes: int) -> int:
        return await self._loop.run_in_executor(self._executor, kernels().crc32c, seed, address, nbytes)

    async def _transfer(self, batch: _Submission, row: int, address: int) -> BlockFailure | None:
        """All bytes of a block, however few a call moves. Once given up, its memory is not ours to touch any more."""
        block, op = batch.ticket.blocks[row], batch.op
        call = self._pwritev if op is IoOp.WRITE else self._preadv
        fd, nbytes, done = int(block["fd"]), int(block["nbytes"]), 0
        memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B") if nbytes else memoryview(b"")
        while not self.is_stuck:
            if done == nbytes:
                return None
            view: Any = memory[done:]
            try:
                moved = await call(fd, [view], int(block["offset"]) + done, executor=self._executor)
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    continue
                return BlockFailure(op, row, IoStatus.OS_ERROR, code=error.errno or errno.EIO)
            if moved < nbytes - done:
                moved -= moved % SECTOR  # what O_DIRECT can go on from
            if moved == 0:
                return BlockFailure(op, row, IoStatus.TRUNCATED)
            done += moved
            self.moved_bytes += moved
        return BlockFailure(op, row, IoStatus.OS_ERROR, code=errno.ETIMEDOUT)
