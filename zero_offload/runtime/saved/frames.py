"""Calls of hooks: whether one still runs, which tells those that were never left, as after Ctrl-C, from those in use;
and which ones torch.compile leaves alone."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_COLLECTOR = threading.RLock()


def runs(frame: FrameType) -> bool:
    """Whether a frame is one of our callers, or of another thread's: a GPU's backward has a thread of its own."""
    return _calls(frame, sys._getframe()) or any(_calls(frame, top) for top in _current_frames().values())


def _current_frames() -> dict[int, FrameType]:
    """The top frame of each thread. Python before 3.11.9 holds its list of threads locked meanwhile: a garbage
    collection that begins there and lets another thread run, which ends, waits for ever (python/cpython#106883)."""
    with _COLLECTOR:
        collects = gc.isenabled()
        try:
            gc.disable()
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


@functools.cache
def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The same for torch.compile, which then compiles what a module does between its hooks."""
    disable: Any = torch.compiler.disable
    return disable(hook)  # type: ignore[no-any-return]


def _calls(frame: FrameType, callee: FrameType | None) -> bool:
    while callee is not None and callee is not frame:
        callee = callee.f_back
    return callee is not None
