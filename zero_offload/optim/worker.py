"""The one thread that runs updates and commits, in the order in which they were submitted.

[Note: how the thread ends]
It ends when its `Worker` is shut down or dropped, and after the main thread, once the queue is empty: what was
submitted is complete before the process is gone. It looks after the main thread by itself, since a Ctrl-C can strike
while a thread is being started: one that waited to be told would then keep the process for ever.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from zero_offload.shards.update_board import UpdateBoard

_LOOK_EVERY_S = 0.1

_Queue = queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]


class Worker:
    """A queue of jobs on one thread. The first error stops everything: it reaches all waiters by the board.

    The queue is short by construction: a step submits one update and at most one commit, and waits for the
    previous update of every unit before it submits.
    """

    def __init__(self, board: UpdateBoard) -> None:
        self._board = board
        self._queue: _Queue = queue.SimpleQueue()
        self._unfinished: list[Future[None]] = []
        self._thread = threading.Thread(target=_work, args=(self._queue,), name="zero_offload-update")
        self._thread.start()
        weakref.finalize(self, self._queue.put, None).atexit = False

    def submit(self, job: Callable[[], None]) -> None:
        self._board.check()
        self._unfinished = [each for each in self._unfinished if not each.done()]
        if not self._thread.is_alive():
            # The interpreter is shutting down.
            self._run(job)
            return
        future: Future[None] = Future()
        self._unfinished.append(future)
        self._queue.put((lambda: self._run(job), future))

    def _run(self, job: Callable[[], None]) -> None:
        self._board.check()
        try:
            job()
        except BaseException as error:
            self._board.fail(error)
            raise

    def drain(self) -> None:
        """Wait until everything submitted is complete. Raises the first error."""
        while self._unfinished:
            self._unfinished[0].result()
            self._unfinished.pop(0)
        self._board.check()

    def shutdown(self) -> None:
        """Let the thread finish what was submitted, and end."""
        self._queue.put(None)
        self._thread.join()


def _work(jobs: _Queue) -> None:
    """Holds the queue alone while it waits, so that a `Worker` can be dropped."""
    while True:
        try:
            item = jobs.get(timeout=_LOOK_EVERY_S)
        except queue.Empty:
            if threading.main_thread().is_alive():
                continue
            return
        if item is None:
            return
        job, future = item
        try:
            job()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del item, job, future
