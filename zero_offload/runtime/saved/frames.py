"""Whether a call still runs: how hooks that were never left, as after Ctrl-C, are told from those in use."""

from __future__ import annotations

import sys
from types import FrameType


def runs(frame: FrameType) -> bool:
    """Whether a frame is one of our callers, or of another thread's: a GPU's backward has a thread of its own."""
    return _calls(frame, sys._getframe()) or any(_calls(frame, top) for top in sys._current_frames().values())


def _calls(frame: FrameType, callee: FrameType | None) -> bool:
    while callee is not None and callee is not frame:
        callee = callee.f_back
    return callee is not None
