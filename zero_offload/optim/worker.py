"""A thread that runs jobs in the order in which they were submitted: updates on one, commits on another.

[Note: how the thread ends]
It ends when its `Worker` is shut down or dropped, and after the main thread, once the queue is empty: what was
submitted is complete before the process is gone. It looks after the main thread by itself, since a Ctrl-C can strike
while a thread is being started: one that waited to be told would then keep the process for ever. What is submitted
after its end (by the other worker, which may have had more to do) runs on the thread that submits.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from zero_offload.base.threads import LOOK_S, Bell, FirstError, start, through_interrupts


@dataclass
class _Outcome:
    """What became of a job, or of the thread."""

    done: bool = False
    error: BaseException | None = None
    ended: Bell = field(default_factory=Bell)

    def of(self, job: Callable[[], None]) -> None:
        """Run it, on the thread."""
        try:
            job()
        except BaseException as error:
            self.error = error
        self.done = True
        self.ended.ring()

    def wait(self) -> None:
        """Raises its error."""
        while not self.done:
            self.ended.wait(LOOK_S)
        if self.error is not None:
            raise self.error


_Item = tuple[Callable[[], None], _Outcome]


class _Jobs:
    """What submitter and thread share.

    No `SimpleQueue`: in Python 3.11 its `get` waits without end where a signal comes to the waiting thread and the
    interpreter is another's until the time is over: what is left of it is negative then.
    """

    def __init__(self) -> None:
        self._queue: deque[_Item | None] = deque()
        self._filled = Bell()
        # Reentrant: a worker may be dropped, and its thread told so, by whatever collects garbage.
        self._lock = threading.RLock()
        self._closing = False
        self._ended = False
        """The thread takes no further job."""

    def put(self, item: _Item | None) -> bool:
        """False if the thread has ended. None asks the thread to end."""
        with self._lock:
            if not self._ended:
                self._queue.append(item)
                self._filled.ring()
            return not self._ended

    def get(self) -> _Item | None:
        """The next job, or None at the end. On the thread."""
        while not (self._closing and self._end()):
            if not self._queue:
                self._filled.wait(LOOK_S)
                self._closing = self._closing or not threading.main_thread().is_alive()
            elif (item := self._queue.popleft()) is not None:
                return item
            else:
                self._closing = True
        return None

    def _end(self) -> bool:
        """True if there is nothing left to do."""
        with self._lock:
            self._ended = not self._queue
            return self._ended


class Worker:
    """A queue of jobs on one thread. The first error stops everything: every wait raises it.

    The queues are short by construction: a step submits one update (with overlap="backward" one per unit) and at most
    one commit, and waits for the previous update of every unit before it submits; a commit begins when the one before
    has ended (`Snapshots.begin`).
    """

    def __init__(self, errors: FirstError, name: str = "zero_offload-update") -> None:
        self._errors = errors
        self._jobs = _Jobs()
        self._unfinished: list[_Outcome] = []
        self._end = _Outcome()
        self._thread = threading.Thread(target=self._end.of, args=(partial(_work, self._jobs),), name=name)
        start(self._thread)
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, job: Callable[[], None]) -> None:
        self._errors.check_work()
        self._unfinished = [each for each in self._unfinished if not each.done]
        outcome = _Outcome()
        if self._jobs.put((lambda: self._run(job), outcome)):
            self._unfinished.append(outcome)
        else:
            # The interpreter is shutting down.
            self._run(job)

    def _run(self, job: Callable[[], None]) -> None:
        self._errors.check_work()
        try:
            job()
        except BaseException as error:
            self._errors.set(error)
            raise

    @property
    def busy(self) -> bool:
        """True if `drain` would wait."""
        return not all(outcome.done for outcome in self._unfinished)

    def drain(self) -> None:
        """Wait until everything submitted is complete. Raises the first error."""
        for outcome in self._unfinished:
            outcome.wait()
        self._unfinished = [each for each in self._unfinished if not each.done]
        self._errors.check()

    def shutdown(self) -> None:
        """Let the thread finish what was submitted, and end; a Ctrl-C meanwhile is raised when it has."""
        self._jobs.put(None)
        # Not by `join` alone: a Ctrl-C in it makes Python 3.11 take a thread that runs for one that has ended.
        through_interrupts(self._end.wait)
        self._thread.join()


def _work(jobs: _Jobs) -> None:
    """Holds the queue alone while it waits, so that a `Worker` can be dropped."""
    while (item := jobs.get()) is not None:
        job, outcome = item
        outcome.of(job)
        del item, job, outcome
