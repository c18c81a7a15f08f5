"""When a commit is due by time: after a duration, or after a duration that follows from the cost of commits ("auto").

Of rank 0 alone: the others do as it says, so clocks need not agree. "auto" measures what a checkpoint costs the steps
beside it, and chooses the frequency by that. The idea is CheckFreq's (Mohan, Phanishayee, Chidambaram: "CheckFreq:
Frequent, Fine-Grained DNN Checkpointing", FAST '21). A commit costs the seconds that updates waited for it, and the
seconds by which the steps beside it were longer than others. Ranks wait for each other in each step, so what slows
another rank shows in rank 0's steps. The calls: `is_due` when a step begins, `add` when it ends, `restart` when a
commit begins.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

from zero_offload.base.types import parse_seconds

COST_SHARE_MAX = 0.02
"""The most that commits may take of the time, with "auto"."""
PLAIN_MIN = 3
"""Steps without a commit that are measured before the first commit."""
BESIDE_MAX = 16
"""At least one of so many steps runs without a commit, so that there is something to compare with."""
GROWTH_MAX = 4
"""An interval is at most this many times as long as the one before. So after one commit that met a busy drive, a crash
does not cost hours."""
_WARM_UP_STEPS = 1
"""The first step records the trace and fills pools."""
_STEPS_KEPT, _COSTS_KEPT = 16, 3


class CommitClock:
    """The clock of one model's commits."""

    def __init__(self, every: str) -> None:
        """`every`: a duration such as "2min", or "auto"."""
        self._fixed_s = None if every == "auto" else parse_seconds(every)
        self._began_s = time.monotonic()
        self._interval_s = 0.0
        """Seconds between the last two commits."""
        self._num_steps = 0
        self._num_beside = 0
        """Steps since the last one without a commit."""
        self._plain_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        """Steps without a commit, the latest."""
        self._waited_s = self._slower_s = 0.0
        """Seconds that the commit under way has cost so far."""
        self._costs_s: deque[float] = deque(maxlen=_COSTS_KEPT)

    def is_due(self) -> bool:
        elapsed_s = time.monotonic() - self._began_s
        if self._fixed_s is not None:
            return elapsed_s >= self._fixed_s
        needed_s = self._interval_s
        if self._costs_s:
            needed_s = min(statistics.median_low(self._costs_s) / COST_SHARE_MAX, GROWTH_MAX * needed_s)
        return len(self._plain_s) >= PLAIN_MIN and self._num_beside < BESIDE_MAX and elapsed_s >= needed_s

    def add(self, step_s: float, wait_s: float, *, is_beside: bool, is_over: bool) -> None:
        """A step took `step_s`, of which commits cost `wait_s`. `is_beside`: a commit ran during some of it; `is_over`:
        no commit runs now."""
        self._num_steps += 1
        if self._num_steps <= _WARM_UP_STEPS:
            return
        if not is_beside:
            self._num_beside = 0
            self._plain_s.append(step_s)
        elif self._plain_s:
            self._num_beside += 1
            self._waited_s += wait_s
            self._slower_s += step_s - wait_s - statistics.median(self._plain_s)
            if is_over:
                self._costs_s.append(self._waited_s + max(self._slower_s, 0.0))
                self._waited_s = self._slower_s = 0.0

    def restart(self) -> None:
        """A commit begins."""
        now_s = time.monotonic()
        self._interval_s, self._began_s = now_s - self._began_s, now_s
