"""The only parallel loop of the fallback: passes stay serial, callers hand over a range.

The caller takes parts too, and returns, even by Ctrl-C, only when no thread works on its memory any more. Parts are
whole chunks counted from the start of the call, so results never depend on the number of threads.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable

from zero_offload.base.threads import Monitor
from zero_offload.hardware.kernels.words import CHUNK

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
    job = Job(body, [(count * i // team, count * (i + 1) // team) for i in range(team)])
    try:
        for _ in range(team - 1):
            try:
                # Not `threading.Thread`: its `start` takes a lock in Python, which a Ctrl-C may leave taken.
                _thread.start_new_thread(job.help, ())
            except RuntimeError:  # the system gives no more, or the interpreter is going down
                break
        job.work()
    finally:
        job.end()


class Job:
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
        """In another thread, which may come when all is over."""
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
