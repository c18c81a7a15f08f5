"""Counters that every layer may raise: bytes moved per tier, time stalled. Values only.

`Counters` only adds; `Counters.snapshot` copies; a step's figures are the difference of two snapshots.
Threads add under one lock: an addition happens per transfer, not per element.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from zero_offload.types import Tier


class Counters:
    """Monotonic totals since the model was offloaded; keys such as "read.nvme" or "stall_s"."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}

    def add(self, name: str, amount: float) -> None:
        with self._lock:
            self._totals[name] = self._totals.get(name, 0) + amount

    def read(self, tier: Tier, nbytes: int) -> None:
        """Count bytes taken from a tier."""
        self.add(f"read.{tier.value}", nbytes)

    def written(self, tier: Tier, nbytes: int) -> None:
        """Count bytes put on a tier."""
        self.add(f"written.{tier.value}", nbytes)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._totals)
