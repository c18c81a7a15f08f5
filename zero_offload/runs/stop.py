"""How a run's process ends: with its last step, or with the step in which the user asks it to stop.

The call: `requested_stop()` around the steps; per step `StopRequest.requested`.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Ending(StrEnum):
    """Why a run's process ends without an error."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    PLANNED = "planned"


@dataclass
class StopRequest:
    """Shared by the signal handlers and the loop."""

    requested: bool = False
    """True if the user asked to stop."""


@contextmanager
def requested_stop() -> Iterator[StopRequest]:
    """Inside, the first SIGINT or SIGTERM only sets the flag; the second one ends the process as usual.

    Outside the main thread, where signals cannot be caught, the flag stays False.
    """
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
