"""When a file engine counts as stalled: nothing of it has moved for so long that its drive is given up.

Owns the limit and the clock of one wait; knows no engine. The calls: a `StallWatch` per wait, `is_over` now and then.
"""

from __future__ import annotations

import time

STALL_LIMIT_S = 120.0
"""A wait ends when the engine has moved nothing for so long."""
_SLICE_S_MAX = 1.0
"""What the time between two looks counts for at most."""


class StallWatch:
    """The clock of one wait."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._moved_bytes = -1
        self._idle_s = 0.0

    def is_over(self, moved_bytes: int) -> bool:
        """Whether an engine that has moved so many bytes in all has moved none for `STALL_LIMIT_S`."""
        now = time.monotonic()
        # Time in which this process was stopped is not the drive's.
        self._idle_s += min(now - self._last, _SLICE_S_MAX)
        self._last = now
        if moved_bytes != self._moved_bytes:
            self._moved_bytes, self._idle_s = moved_bytes, 0.0
        return self._idle_s > STALL_LIMIT_S
