"""Ctrl-C that waits for the end of a step.

Owns the signal handlers while a run trains. The first SIGINT or SIGTERM only sets a flag; the second one
ends the process as usual. Calls: `requested_stop()` as a context, then `StopRequest.requested` per step.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class StopRequest:
    """Whether the user asked to stop."""

    requested: bool = False


@contextmanager
def requested_stop() -> Iterator[StopRequest]:
    """Collect stop requests; outside the main thread, where signals cannot be caught, none ever comes."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = {number: signal.getsignal(number) for number in _SIGNALS}

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        sys.stderr.write("\nfinishing the step, then committing; once more to stop at once\n")
        for again, handler in previous.items():
            signal.signal(again, handler)

    for number in _SIGNALS:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
