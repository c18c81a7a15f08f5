"""A thread that runs calls in the order in which they were submitted: updates on one, commits on another.

[Note: how the thread ends]
It ends when its `Worker` is shut down or dropped, and after the main thread, once the queue is empty. So what was
submitted is complete before the process is gone. It watches the main thread by itself. A Ctrl-C can strike while a
thread is being started: a thread that waited to be told would then keep the process for ever. A call that is submitted
after its end (by the other worker, which may have had more to do) runs on the thread that submits.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

from zero_offload.base.threads import LOOK_S, Bell, FirstError, start, through_interrupts


class _QueuedCall:
    """A call of a program, or the thread's own, with its result."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call
        self._error: BaseException | None = None
        self._ended = Bell()
        self.done = False

    def run(self) -> None:
        """Run the call on the thread. Afterwards the objects that it refers to are released."""
        assert self._call is not None
        try:
            self._call()
        except BaseException as error:
            self._error = error
        self._call = None
        self.done = True
        self._ended.ring()

    def wait(self) -> None:
        """Raises its error."""
        while not self.done:
            self._ended.wait(LOOK_S)
        if self._error is not None:
            raise self._error


class _CallQueue:
    """The queue that submitter and thread share.

    It is not a `SimpleQueue`, whose `get` can wait without end in Python 3.11. That happens when a signal comes to the
    waiting thread, and another thread has the interpreter until the time is over. The time left is negative then.
    """

    def __init__(self) -> None:
        self._queue: deque[_QueuedCall | None] = deque()
        self._filled = Bell()
        # Reentrant: a worker may be dropped, and its thread told so, by whatever collects garbage.
        self._lock = threading.RLock()
        self._closing = False
        self._ended = False
        """The thread takes no further call."""

    def put(self, queued: _QueuedCall | None) -> bool:
        """Queue a call; False if the thread has ended. None asks the thread to end."""
        with self._lock:
            if not self._ended:
                self._queue.append(queued)
                self._filled.ring()
            return not self._ended

    def get(self) -> _QueuedCall | None:
        """The next call, or None at the end. On the thread."""
        while not (self._closing and self._end()):
            if not self._queue:
                self._filled.wait(LOOK_S)
                self._closing = self._closing or not threading.main_thread().is_alive()
            elif (queued := self._queue.popleft()) is not None:
                return queued
            else:
                self._closing = True
        return None

    def _end(self) -> bool:
        """True if there is nothing left to do."""
        with self._lock:
            self._ended = not self._queue
            return self._ended


class Worker:
    """A queue of calls on one thread. The first error stops everything: every wait raises it.

    The queues are short by construction. A step submits one update (with overlap="backward" one per unit) and at most
    one commit. Before that it waits for the previous update of every unit. A commit begins when the one before has
    ended (`Snapshots.take`).
    """

    def __init__(self, errors: FirstError, name: str = "zero_offload-update") -> None:
        self._errors = errors
        self._calls = _CallQueue()
        self._unfinished: list[_QueuedCall] = []
        self._end = _QueuedCall(partial(_work, self._calls))
        self._thread = threading.Thread(target=self._end.run, name=name)
        start(self._thread)
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, call: Callable[[], None]) -> None:
        self._errors.check_work()
        self._unfinished = [each for each in self._unfinished if not each.done]
        queued = _QueuedCall(partial(self._run, call))
        if self._calls.put(queued):
            self._unfinished.append(queued)
        else:
            # The interpreter is shutting down.
            self._run(call)

    def _run(self, call: Callable[[], None]) -> None:
        self._errors.check_work()
        try:
            call()
        except BaseException as error:
            self._errors.set(error)
            raise

    @property
    def busy(self) -> bool:
        """True if `drain` would wait."""
        return not all(queued.done for queued in self._unfinished)

    def drain(self) -> None:
        """Wait until everything submitted is complete. Raises the first error."""
        for queued in self._unfinished:
            queued.wait()
        self._unfinished = [each for each in self._unfinished if not each.done]
        self._errors.check()

    def shutdown(self) -> None:
        """Let the thread finish what was submitted, and end; a Ctrl-C meanwhile is raised when it has."""
        self._calls.put(None)
        # Not by `join` alone: after a Ctrl-C in it Python 3.11 takes a running thread for an ended one.
        through_interrupts(self._end.wait)
        self._thread.join()


def _work(calls: _CallQueue) -> None:
    """Holds the queue alone while it waits, so that a `Worker` can be dropped."""
    while (queued := calls.get()) is not None:
        queued.run()
        del queued
