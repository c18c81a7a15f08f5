"""How a run's process ends: with its last step, with the step in which the user asks it to stop, or by an error.

The calls: `closed_on_error` around all that has the model; `requested_stop_of` around the steps.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import TypeVar

from torch import nn

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.model.api import close
from zero_offload.runs.ranks import Ranks
from zero_offload.runtime.stop import SIGNALS, StopRequest, requested_stop

_Model = TypeVar("_Model", bound=nn.Module)


class Ending(StrEnum):
    """Why a run's process ends without an error."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    PLANNED = "planned"


@contextmanager
def requested_stop_of(ranks: Ranks) -> Iterator[StopRequest]:
    """As `requested_stop`, for a command on these ranks: Ctrl-C too finishes the step."""
    token = ranks.of_first(secrets.token_hex(8))
    with requested_stop((signal.SIGINT, *SIGNALS), watch=ranks.watch, token=token) as stop:
        yield stop


@contextmanager
def closed_on_error(model: _Model) -> Iterator[_Model]:
    """Leave the last whole step as a generation where an error with a message ends the run."""
    try:
        yield model
    except ZeroOffloadError:
        with suppress(ZeroOffloadError):  # the first error tells more than what follows from it
            close(model)
        raise
