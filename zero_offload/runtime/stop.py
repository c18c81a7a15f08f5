"""A request to end: a signal to one rank, which all ranks of a run follow at the same step.

Owns the handlers of signals while a loop runs, and the time that its step still has. The request travels with a call
that all ranks make at the end of each step, so it costs no message. Two threads look beside the loop. One hears signals
as they come, since Python's handlers wait for a thread that is inside of a collective. The other asks the program's
store for a request of another rank, whose step may never end. The calls: `requested_stop` around the loop, `agreeing`
around a call at the end of each step. `StoppedBySignal` is the end.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from zero_offload.base.ends import in_child
from zero_offload.runtime.ranks.watch import Notice, RankWatch

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of launchers and schedulers. Ctrl-C is a person's, who can press it again."""
EXIT_CODE = 130
GRACE_S = 25.0
"""torchrun and Kubernetes kill 30 s after SIGTERM."""
AGAIN_S = 3.0
"""The same signal once more within this time is the same request: torchrun passes on what its ranks got as well."""
_LOOK_EVERY_S = 1.0
_REQUEST, _NOW = "stop", "stop now"


def complain(text: str) -> None:
    """Write a line to this process's standard error, without locks that another thread may have."""
    with suppress(OSError):
        os.write(2, f"zero_offload: {text}\n".encode())


def _each_second(look: Callable[[], None], stop: StopRequest) -> None:
    def run() -> None:
        while not stop.is_closed:
            look()
            time.sleep(_LOOK_EVERY_S)

    threading.Thread(target=run, name="zero_offload-stop", daemon=True).start()


class StoppedBySignal(SystemExit):
    """The end of a program whose loop was asked to stop; `code` is its exit code."""

    def __init__(self, code: int, by: str) -> None:
        super().__init__(code)
        self.by = by
        """The signal, and the rank that had it."""


class StopRequest:
    """Whether this rank was asked to stop, and since when. Raises nothing: the loop asks."""

    def __init__(self, watch: RankWatch | None, token: str, exit_code: int, grace_s: float) -> None:
        """`token` is a word of this loop that all ranks have; `watch` None, or of one rank, is a process alone."""
        self.exit_code, self.grace_s = exit_code, grace_s
        self.doing = "the step"
        """The words for what has to end within the grace period."""
        self.kept = "the last generation"
        """The words for what stands if it does not."""
        self._watch, self._token = watch, token
        self.agreed = False
        """True if all ranks follow a request, of whichever rank."""
        self._by = ""
        self._deadline: float | None = None
        self.is_closed = False

    @property
    def requested(self) -> bool:
        """True if this process was asked to stop."""
        return bool(self._by)

    @property
    def by(self) -> str:
        """The signal, and the rank that had it, on the rank that had it and on those that it has told."""
        return self._by or self._told(_REQUEST) or "a signal on another rank"

    @contextmanager
    def agreeing(self) -> Iterator[Notice]:
        """Inside is a call that all ranks make, with this notice; behind it they agree."""
        notice = Notice(self.requested)
        self.tell()
        yield notice
        self.agreed = self.agreed or notice.given

    def note(self, number: int) -> None:
        """This process was asked by a signal."""
        rank = "" if self._watch is None or self._watch.is_alone else f" on rank {self._watch.rank}"
        self._by = self._by or f"{signal.Signals(number).name}{rank}"
        if number != signal.SIGINT:
            self._begin_grace()

    def tell(self) -> None:
        """Let the others know by the store, who may wait in vain for the end of this rank's step."""
        if self._by and self._watch is not None:
            self._watch.tell(f"{_REQUEST} {self._token}", self._by)

    def look(self) -> None:
        """See whether another rank was asked, and whether the time is up. For a thread, each second."""
        if self.is_closed:
            return
        if self._by:
            self.tell()
        elif self._deadline is None and self._told(_REQUEST):
            self._begin_grace()
        if self._told(_NOW):
            self._end_now()

    def check_time(self) -> None:
        """End this process, and the others, where the step has not ended in time. For a thread."""
        if self._deadline is None or self.is_closed or time.monotonic() < self._deadline:
            return
        complain(
            f"{self.doing} has not ended {self.grace_s:g} s after {self.by}: this rank ends at once with exit code "
            f"{self.exit_code}, and {self.kept} stands. Give a longer grace=, and the launcher as much time "
            "(torchrun --shutdown-timeout, KillWait of SLURM, terminationGracePeriodSeconds of Kubernetes)"
        )
        if self._watch is not None and not self._watch.is_alone:
            # Others are to end with the same code, and not by an error about this rank. A store may not answer.
            telling = threading.Thread(target=self._watch.tell, args=(f"{_NOW} {self._token}", self.by), daemon=True)
            telling.start()
            time.sleep(1.5 * _LOOK_EVERY_S)
        self._end_now()

    def close(self) -> None:
        self.is_closed = True

    def _begin_grace(self) -> None:
        if self._deadline is None:
            self._deadline = time.monotonic() + self.grace_s

    def _told(self, what: str) -> str:
        return "" if self._watch is None else self._watch.told(f"{what} {self._token}")

    def _end_now(self) -> NoReturn:
        os._exit(self.exit_code)


@contextmanager
def requested_stop(
    signals: Sequence[signal.Signals] = SIGNALS,
    *,
    watch: RankWatch | None = None,
    token: str = "",
    exit_code: int = EXIT_CODE,
    grace_s: float = GRACE_S,
) -> Iterator[StopRequest]:
    """Inside, the first of `signals` is only noted, for the end of the step. The next one ends the process as usual.

    Outside the main thread no signal can be caught: a request of another rank is heard there, and no other.
    """
    stop = StopRequest(watch, token, exit_code, grace_s)
    with contextlib.ExitStack() as entered:
        entered.callback(stop.close)
        if watch is not None and not watch.is_alone:
            _each_second(stop.look, stop)
        if threading.current_thread() is threading.main_thread():
            entered.enter_context(_Handlers(stop, signals))
        yield stop


class _Handlers:
    """The handlers of signals in the main thread, and a thread that hears signals while the main one cannot."""

    def __init__(self, stop: StopRequest, signals: Sequence[signal.Signals]) -> None:
        self._stop, self._signals = stop, signals
        self._handled, self._heard = _Repeats(), _Repeats()
        """Of the handler and of the thread: both see each signal."""
        self._is_in = self._has_acted = False

    def __enter__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous: dict[int, Any] = {number: signal.getsignal(number) for number in self._signals}
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self._signals:
            signal.signal(number, self._handle)
        self._is_in = True
        in_child(self._leave_in_child)
        threading.Thread(target=self._hear, name="zero_offload-signals", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        # Elsewhere than in the main thread handlers cannot be changed: there they stay until the process ends.
        with suppress(ValueError):
            signal.set_wakeup_fd(self._previous_fd, warn_on_full_buffer=False)
            for number, handler in self._previous.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            self._is_in = False

    def _leave_in_child(self) -> None:
        """A forked process would write its own signals into this one's pipe."""
        if self._is_in:
            self._leave()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._handled.is_first():
            self._stop.note(number)
            if callable(signal.getsignal(signal.SIGCHLD)):
                # A launcher signals a loader's workers too, and torch would raise for these wherever the program is.
                signal.signal(signal.SIGCHLD, lambda *_: None)
            sys.stderr.write("\nfinishing the step, then committing; once more to stop at once\n")
        elif self._handled.is_another(number):
            self._has_acted = True
            signal.signal(number, self._previous[number] or signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._handled.add(number)

    def _hear(self) -> None:
        while self._is_in:
            ready, _, _ = select.select([self._read], [], [], _LOOK_EVERY_S / 2)
            for number in os.read(self._read, 64) if ready else b"":
                if self._previous_fd >= 0:
                    with suppress(OSError):
                        os.write(self._previous_fd, bytes([number]))
                if number in self._signals:
                    self._hear_one(number)
            self._stop.check_time()
        os.close(self._read)
        os.close(self._write)

    def _hear_one(self, number: int) -> None:
        if self._heard.is_first():
            self._stop.note(number)
        elif self._heard.is_another(number):
            time.sleep(1)
            if not self._has_acted and number != signal.SIGINT:
                os._exit(128 + number)  # the handler's thread waits inside of C
        self._heard.add(number)


class _Repeats:
    """Which signals have come, and when."""

    def __init__(self) -> None:
        self._came: dict[int, float] = {}

    def add(self, number: int) -> None:
        self._came.setdefault(number, time.monotonic())

    def is_first(self) -> bool:
        return not self._came

    def is_another(self, number: int) -> bool:
        """True unless this is the request of before, once more."""
        since = time.monotonic() - self._came.get(number, -AGAIN_S)
        return number == signal.SIGINT or since >= AGAIN_S
