"""Which locks of the standard library this thread takes in Python: a Ctrl-C may strike before they are given back."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def locks_taken() -> Iterator[list[str]]:
    """Where each was taken, in the block."""
    taken: list[str] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "__enter__":
            taken.append("".join(traceback.format_stack(frame, limit=6)))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield taken
    finally:
        sys.setprofile(before)
