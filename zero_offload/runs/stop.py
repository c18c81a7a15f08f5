"""How a run's process ends: with its last step, with the step in which the user asks it to stop, or by an error.

The calls: `closed_on_error` around all that has the model; `requested_stop()` around the steps, and per step
`StopRequest.requested`.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType
from typing import TypeVar

from torch import nn

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.model.api import close

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_Model = TypeVar("_Model", bound=nn.Module)


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


@contextmanager
def closed_on_error(model: _Model) -> Iterator[_Model]:
    """Leave the last whole step as a generation where an error with a message ends the run."""
    try:
        yield model
    except ZeroOffloadError:
        with suppress(ZeroOffloadError):  # the first error tells more than what follows from it
            close(model)
        raise
