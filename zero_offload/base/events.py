"""Counters that every layer may raise: bytes moved per tier, time stalled. Values only.

`Counters` only adds; `Counters.snapshot` copies; a step's figures are the difference of two snapshots.
Threads add under one lock: an addition happens per transfer, not per element. `Counters.spans` is there for all
that count, and off unless a recording runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from zero_offload.base.spans import Cause, Spans, Track, now
from zero_offload.base.types import Tier


class Counters:
    """Monotonic totals since the model was offloaded; keys such as "read.nvme" or "update_s"."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}
        self._thread = _Thread()
        self.spans = Spans()
        self.last_brought = ""
        """The parameter or unit of the last `bringing`."""

    def add(self, name: str, amount: float) -> float:
        """Returns the new total."""
        with self._lock:
            total = self._totals[name] = self._totals.get(name, 0) + amount
        return total

    def read(self, tier: Tier, nbytes: int) -> None:
        """Count bytes taken from a tier."""
        self._move(f"read.{tier.value}", nbytes)

    def written(self, tier: Tier, nbytes: int) -> None:
        """Count bytes put on a tier."""
        self._move(f"written.{tier.value}", nbytes)

    def _move(self, name: str, nbytes: int) -> None:
        total = self.add(name, nbytes)
        if self.spans.on:
            self.spans.sample(name, total)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    @contextmanager
    def bringing(self, what: str, nbytes: int) -> Iterator[None]:
        """Count a read of parameters outside of the forwards of their modules."""
        self.last_brought = what
        self.add("param_reads", 1)
        self.add("param_reads_bytes", nbytes)
        with self.timed("param_reads_s"):
            yield

    def laps(self, name: str) -> Laps:
        """Count seconds from now on."""
        return Laps(self, name)

    @contextmanager
    def waiting(self, cause: Cause, what: str = "") -> Iterator[None]:
        """Count the seconds inside as exposed: compute stands still. Where waits lie inside each other, an inner one's
        seconds are not the outer one's.
        """
        inner = self._thread.inner_ns
        opened = self.spans.open(Track.WAIT, f"{cause.value}: {what}" if what else cause.value)
        begin = now()
        inner.append(0)
        try:
            yield
        finally:
            passed = now() - begin
            self.add(f"exposed.{cause.value}", (passed - inner.pop()) / 1e9)
            if inner:
                inner[-1] += passed
            if opened is not None:
                self.spans.close(opened)

    def hindering(self, cause: Cause) -> AbstractContextManager[None]:
        """`waiting`, on a thread that compute may be waiting for. Without such a wait around it nothing is counted."""
        return self.waiting(cause) if self._thread.inner_ns else nullcontext()

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._totals)


class Laps:
    """Seconds that are counted while they pass: a step may end in the midst of them."""

    def __init__(self, counters: Counters, name: str) -> None:
        self._counters = counters
        self._name = name
        self._last = time.perf_counter()

    def lap(self) -> None:
        """Count those since the last call."""
        last, self._last = self._last, time.perf_counter()
        self._counters.add(self._name, self._last - last)


class _Thread(threading.local):
    """For each thread, the waits that it is in, and for each wait the nanoseconds of waits inside it."""

    def __init__(self) -> None:
        self.inner_ns: list[int] = []
