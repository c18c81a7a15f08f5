"""The only parallel loop of the fallbacks: passes stay serial, callers hand over a range.

Owns threads for each process. Whoever calls takes parts too, and comes back, even by Ctrl-C, only when nobody
works on its memory any more. Chunks are cut from the start of the call, so results never depend on threads.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

from zero_offload.threads import Monitor

CHUNK = 16384
"""Elements: kChunk of csrc/util/chunks.h; sums depend on it."""

Body = Callable[[int, int], None]


def num_chunks(numel: int) -> int:
    return -(-numel // CHUNK)


def in_parts(count: int, num_threads: int, body: Body) -> None:
    """Call body(begin, end) for contiguous runs that make up [0, count), one for each thread."""
    team = min(num_threads, count)
    if team <= 1:
        if count:
            body(0, count)
        return
    job = _Job(body, [(count * i // team, count * (i + 1) // team) for i in range(team)])
    try:
        helpers = _helpers(os.getpid())
        for _ in range(helpers.grow(team - 1)):
            helpers.calls.put(job.help)
        job.work()
    finally:
        job.end()


class _Helpers:
    """Threads, as many as have been of use at once.

    A `ThreadPoolExecutor` takes locks that a Ctrl-C may leave taken; see zero_offload/threads.py.
    """

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """What they call, one call each at a time."""
        self._num, self._most = 0, max(os.cpu_count() or 1, 2)

    def grow(self, count: int) -> int:
        """Have so many; returns how many of them there are."""
        while self._num < min(count, self._most):
            name = f"zero_offload-kernels_{self._num}"
            try:
                threading.Thread(target=_serve, args=(self.calls,), name=name, daemon=True).start()
            except RuntimeError:  # the system gives no more, or the interpreter is going down
                self._most = self._num
            else:
                self._num += 1
        return min(count, self._num)


@functools.cache
def _helpers(pid: int) -> _Helpers:
    """They do not survive a fork, so a child has its own."""
    return _Helpers()


def _serve(calls: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        calls.get()()


class _Job:
    """Parts that are waiting, and how many helpers are at work on one."""

    def __init__(self, body: Body, parts: list[tuple[int, int]]) -> None:
        self._body, self._parts = body, parts
        self._changed = Monitor()
        self._num_helping = 0
        self._failure: BaseException | None = None

    def work(self) -> None:
        """In the calling thread: take parts until none is left."""
        while part := self._take():
            self._body(*part)

    def help(self) -> None:
        """In a thread of the pool, which may come when all is over."""
        while part := self._take(helping=1):
            try:
                self._body(*part)
            except BaseException as error:
                self._failure = error
            finally:
                with self._changed.lock:
                    self._num_helping -= 1
                    self._changed.notify()

    def end(self) -> None:
        """Give out no more parts, and return when no helper has one. Raises what went wrong in one."""
        interrupt: BaseException | None = None
        while True:
            try:
                with self._changed.lock:
                    self._parts.clear()
                self._changed.wait_for(lambda: self._num_helping == 0)
                break
            except BaseException as error:  # a signal's handler: the memory is still in use
                interrupt = error
        if failure := interrupt or self._failure:
            raise failure

    def _take(self, helping: int = 0) -> tuple[int, int] | None:
        with self._changed.lock:
            if not self._parts:
                return None
            self._num_helping += helping
            return self._parts.pop()
