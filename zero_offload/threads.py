"""Threads that wait for each other, while a Ctrl-C may strike the one that computes.

`Condition`, `Event`, `Semaphore` and `Future` of the standard library take and give back their locks in Python, where a
signal's handler may raise first: the lock stays taken, and other threads wait for ever, and with them the end of the
program. What is here holds nothing but locks of C, which a `with` gives back whatever strikes, and whoever waits looks
by himself now and then, should an interrupt have kept others from waking him.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from zero_offload.errors import CapacityError

LOOK_S = 0.1
THREAD_PREFIX = "zero_offload"
"""Of the names of threads that a model's work needs."""
NO_THREAD = "Raise the limit on threads: see 'ulimit -u', and pids.max of the container or cgroup"
"""What to type where the system starts no thread."""


def start(thread: threading.Thread) -> None:
    """Raises CapacityError where the system starts no more."""
    try:
        thread.start()
    except RuntimeError as error:
        count = threading.active_count()
        raise CapacityError(f"cannot start thread {thread.name} beside {count} others: {error}. {NO_THREAD}") from error


class Bell:
    """Wakes the thread that waits, or the next that does; what rings already rings no louder."""

    def __init__(self) -> None:
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it rings already
            self._silence.release()

    def wait(self, timeout_s: float = -1) -> bool:
        """Whether it rang, within this time if it is given."""
        return self._silence.acquire(timeout=timeout_s)


class Monitor:
    """Wakes threads that wait for something to be so. What they look at changes under `lock`."""

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
