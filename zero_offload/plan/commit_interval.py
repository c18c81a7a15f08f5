"""How many steps lie between two commits when the user says "auto": their cost stays below a share of the step time.

Pure policy: it is told how long steps took and whether a commit was under way beside them, and says how many steps it
wishes until the next. The idea is CheckFreq's (Mohan, Phanishayee, Chidambaram: "CheckFreq: Frequent, Fine-Grained DNN
Checkpointing", FAST '21): measure what a checkpoint costs the steps beside it, and choose the frequency by that. What
is measured here: the seconds that updates waited for a commit, and by how much longer than others the steps beside
it took otherwise. The calls: `add` per step, `wish` when a commit is due.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

COST_SHARE_MAX = 0.02
"""Of the time of a step."""
INTERVAL_MAX = 1000
INTERVAL_FIRST = 4
"""Steps before anything is known. Those before the first commit are what the steps beside it are compared with."""
WARM_UP_STEPS = 1
"""The first one records the trace and fills pools."""
GROWTH_MAX = 4
"""One commit that met a busy drive must not cost a later crash a thousand steps."""
_STEPS_KEPT, _COSTS_KEPT = 16, 3


@dataclass(frozen=True)
class StepTime:
    """One optimizer step, from the end of the last one."""

    step_s: float
    wait_s: float
    """Waited for commits."""
    beside_commit: bool
    """A commit was under way during some of it."""


class CommitInterval:
    """One rank's view of what commits cost."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._plain_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        """Steps without a commit, the latest."""
        self._costs_s: deque[float] = deque(maxlen=_COSTS_KEPT)
        self._beside: list[StepTime] = []
        """Since the last commit was due."""

    def add(self, step: StepTime) -> None:
        self._num_steps += 1
        if self._num_steps <= WARM_UP_STEPS:
            return
        if step.beside_commit:
            self._beside.append(step)
        else:
            self._plain_s.append(step.step_s)

    def wish(self, interval: int) -> int:
        """Steps that the next interval shall have, after one of `interval`; called once per commit.

        It is at least half of that, and at most `GROWTH_MAX` times as long.
        """
        beside, self._beside = self._beside, []
        plain_s = statistics.median(self._plain_s) if self._plain_s else 0.0
        if plain_s <= 0:
            return interval
        if beside:
            waited_s = sum(step.wait_s for step in beside)
            slower_s = sum(step.step_s - step.wait_s - plain_s for step in beside)
            self._costs_s.append(waited_s + max(slower_s, 0.0))
        if not self._costs_s:
            return interval
        needed = math.ceil(statistics.median_low(self._costs_s) / (COST_SHARE_MAX * plain_s))
        return min(max(needed, earliest(interval)), GROWTH_MAX * interval, INTERVAL_MAX)


def earliest(interval: int) -> int:
    """The shortest interval that may follow one of `interval`: before it is over nobody needs to ask for the next."""
    return max(interval // 2, 1)
