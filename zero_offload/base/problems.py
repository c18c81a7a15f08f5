"""How problems are reported. Problems of settings come all at once, unknown names with the nearest known one, and
warnings at the program's line that led to them.

Owns the wording that `OffloadConfig` and the recipes share. Never knows a setting.
"""

from __future__ import annotations

import difflib
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_PACKAGE = f"{Path(__file__).parents[1]}/"


def warn_user(message: str) -> None:
    """Warn, as of the innermost line outside of this package."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


@contextmanager
def warning_after(seconds: float, message: str) -> Iterator[None]:
    """Warn, from another thread, if the block takes longer."""
    timer = threading.Timer(seconds, warnings.warn, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def list_problems(subject: str, problems: Sequence[str]) -> str:
    """One message; `subject` ends in its verb, as "the settings have"."""
    noun = "problem" if len(problems) == 1 else "problems"
    return "\n".join([f"{subject} {len(problems)} {noun}:", *(f"  - {line}" for line in problems)])


def unknown_names(given: Iterable[str], names: Sequence[str], prefix: str = "") -> list[str]:
    """A line for each name that is not among `names`."""
    found = []
    for key in (key for key in given if key not in names):
        hint = did_you_mean(key, names, prefix)
        found.append(f"unknown setting {prefix}{key}: {hint}the settings are {', '.join(names)}")
    return found


def did_you_mean(key: str, names: Sequence[str], prefix: str = "") -> str:
    """A question that offers the nearest of `names`, with a space behind; empty if none is near."""
    near = difflib.get_close_matches(str(key), names, n=1)
    return f"did you mean {prefix}{near[0]}? " if near else ""
