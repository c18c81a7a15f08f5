"""Threads that wait for each other, while a Ctrl-C may strike the thread that computes.

`Condition`, `Event`, `Semaphore` and `Future` of the standard library take and release their locks in Python. A
signal's handler may raise before the release. Then the lock stays taken, other threads wait for ever, and the program
does not end. The classes here hold only locks of C, which a `with` releases whatever strikes. A waiting thread looks by
itself now and then, should an interrupt have kept others from waking it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from zero_offload.base.errors import CapacityError, ZeroOffloadError
from zero_offload.base.events import Counters
from zero_offload.base.spans import Cause

LOOK_S = 0.1
THREAD_PREFIX = "zero_offload"
"""The prefix of the names of threads that do a model's work."""
NO_THREAD = "Raise the limit on threads: see 'ulimit -u', and pids.max of the container or cgroup"
"""The remedy to type where the system starts no thread."""


def start(thread: threading.Thread) -> None:
    """Raises CapacityError where the system starts no more."""
    try:
        thread.start()
    except RuntimeError as error:
        count = threading.active_count()
        raise CapacityError(f"cannot start thread {thread.name} beside {count} others: {error}. {NO_THREAD}") from error


def may_join() -> bool:
    """False where this thread is inside of Python's `threading`, which takes its lock once. It starts or ends a thread,
    and the garbage collector calls us meanwhile. Python has this lock until 3.12. Other threads hold it briefly.
    """
    lock = getattr(threading, "_shutdown_locks_lock", None)
    if lock is None:
        return True
    if not lock.acquire(timeout=LOOK_S):
        return False
    lock.release()
    return True


class Bell:
    """Wakes the thread that waits, or the next that does; what rings already rings no louder."""

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it rings already
            self._silence.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """True if it rang, within this time if it is given."""
        return self._silence.acquire(timeout=timeout_s)


class Monitor:
    """Wakes threads that wait for something to be so. The condition that they look at changes under `lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._bells: set[Bell] = set()

    def notify(self) -> None:
        """Something has changed."""
        with self.lock:
            for bell in self._bells:
                bell.ring()
            self._bells.clear()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Return when `is_so()`. For threads that do not hold the lock."""
        bell = Bell()
        while not is_so():
            with self.lock:
                if is_so():
                    return
                self._bells.add(bell)
            bell.wait(LOOK_S)


class UpdateInterrupted(ZeroOffloadError):
    """A Ctrl-C, or an exit, struck a step on the control thread, which raised it there."""


class FirstError:
    """The first error of one model's updates, commits and transfers, which every later wait and use raises."""

    def __init__(self) -> None:
        self.changed = Monitor()
        """Waits for work look at `error` too, and are woken by it."""
        self.error: BaseException | None = None
        self.is_raised = False
        """True if a call of the program has raised it."""
        self._listeners: list[Callable[[BaseException], None]] = []

    def tell(self, listener: Callable[[BaseException], None]) -> None:
        """Call `listener` with an error that stops all work, on the thread that has met it."""
        self._listeners.append(listener)

    def set(self, error: BaseException) -> None:
        """An update, a commit or a transfer failed.

        After an interrupt the work that was submitted before it goes on: other ranks take part in the commit of the
        step before.
        """
        if not isinstance(error, Exception):
            # Later calls are not interrupted themselves, but meet the states that an interrupt has left.
            error = UpdateInterrupted(
                "an update was interrupted, so this model's states are a mix of two. Start again with zo.offload "
                "(existing='resume' goes on from the last generation)"
            )
        with self.changed.lock:
            # An error after an interrupt replaces it, so that waiting threads learn of it.
            first = self.error if self.error is not None and self._stops_work() else error
            self.error = first
            self.changed.notify()
        if self._stops_work():
            for listener in self._listeners:
                listener(first)

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            self.is_raised = True
            raise self.error

    def check_work(self) -> None:
        """Raise an error that keeps threads from their next jobs."""
        if self.error is not None and self._stops_work():
            raise self.error

    def check_whole(self) -> None:
        """Raise if a step was interrupted, for calls that need no update to be complete."""
        if isinstance(self.error, UpdateInterrupted):
            raise self.error

    def _stops_work(self) -> bool:
        return self.error is not None and not isinstance(self.error, UpdateInterrupted)


class UnitUpdate:
    """One unit's next values.

    Until the update starts, the control thread may name memory for them (`deliver_to`). The update writes them there as
    well as to the tier, so that forward does not read them back.

    [Note: no concurrent.futures.Future]
    A Future takes its lock in Python, where a Ctrl-C may strike before the lock is given back. The update's thread then
    waits for ever. `Monitor` holds locks of C only.
    """

    def __init__(self, errors: FirstError, counters: Counters) -> None:
        """A wait raises what `errors` has, and counts its seconds in `counters`."""
        self._errors = errors
        self._counters = counters
        self._changed: Monitor = errors.changed
        self._target: tuple[int, ...] | None = None
        self._is_started = False
        self.is_done = False
        """True if the new values are computed, delivered where asked, and on their way to their tier."""

    def deliver_to(self, addresses: tuple[int, ...]) -> bool:
        """Write the new values to host memory too, one address per section. False if the update has started."""
        with self._changed.lock:
            if not self._is_started:
                self._target = addresses
            return not self._is_started

    def withdraw(self) -> bool:
        """Take back what `deliver_to` named, so that the memory may serve another unit. False if it has started."""
        with self._changed.lock:
            if not self._is_started:
                self._target = None
            return not self._is_started

    def begin(self) -> tuple[int, ...] | None:
        """Returns where to deliver, one address per section; from now on this stays. On the update's thread."""
        with self._changed.lock:
            assert not self._is_started, "an update starts once"
            self._is_started = True
            return self._target

    def complete(self) -> None:
        """Mark the update as done; called on the update's thread."""
        assert self._is_started and not self.is_done, "an update ends once, after its start"
        self.is_done = True
        self._changed.notify()

    def wait(self) -> None:
        """Return when the update is done. Raises the first error of the model's work, whichever unit it struck."""
        if not self.is_done and self._errors.error is None:
            with self._counters.waiting(Cause.UPDATE):
                self._changed.wait_for(lambda: self.is_done or self._errors.error is not None)
        self._errors.check()


def through_interrupts(wait: Callable[[], None]) -> None:
    """Return when `wait` has returned; a Ctrl-C that strikes meanwhile is raised then."""
    struck: KeyboardInterrupt | None = None
    while True:
        try:
            wait()
            break
        except KeyboardInterrupt as interrupt:
            struck = interrupt
    if struck is not None:
        raise struck
