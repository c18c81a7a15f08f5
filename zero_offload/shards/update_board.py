"""Who waits for whose update: the one thing the control thread and the update worker share.

A unit is queued by `step()`, started and computed by the worker, waited for by whoever needs its parameters or
its gradient buffer. The control thread may offer memory for a queued unit's new values (a delivery) until
the worker starts it; then forward need not read them back. An error of the worker reaches every waiter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from zero_offload.errors import ZeroOffloadError
from zero_offload.telemetry.events import Counters
from zero_offload.telemetry.spans import Cause
from zero_offload.threads import Monitor


class UpdateInterrupted(ZeroOffloadError):
    """Ctrl-C, or an exit, struck a step on the control thread; there it was raised as such."""


class UpdateStatus(Enum):
    IDLE = "idle"
    QUEUED = "queued"
    STARTED = "started"


class UpdateBoard:
    """Update status of every unit."""

    def __init__(self, num_units: int, counters: Counters | None = None) -> None:
        """`counters` learn how long is waited."""
        self._counters = counters or Counters()
        self._changed = Monitor()
        self._status = [UpdateStatus.IDLE] * num_units
        self._deliveries: dict[int, tuple[int, ...]] = {}
        self._error: BaseException | None = None
        self.told = False
        """Whether somebody has had the error raised."""
        self._listeners: list[Callable[[BaseException], None]] = []

    def grow(self, num_units: int) -> None:
        """There are so many units now."""
        self._status += [UpdateStatus.IDLE] * (num_units - len(self._status))

    def tell(self, listener: Callable[[BaseException], None]) -> None:
        """Call `listener` with an error that stops all work, on the thread that has it: somebody waits elsewhere."""
        self._listeners.append(listener)

    def queue(self, units: Iterable[int]) -> None:
        with self._changed.lock:
            for unit in units:
                assert self._status[unit] is UpdateStatus.IDLE
                self._status[unit] = UpdateStatus.QUEUED

    def offer(self, unit: int, addresses: tuple[int, ...]) -> bool:
        """Give memory (one address per section) for the new values; False when the update has begun."""
        with self._changed.lock:
            if self._status[unit] is not UpdateStatus.QUEUED:
                return False
            self._deliveries[unit] = addresses
            return True

    def withdraw(self, unit: int) -> bool:
        """Take the offer back, so that the memory may serve another unit; False when the update has begun."""
        with self._changed.lock:
            self._deliveries.pop(unit, None)
            return self._status[unit] is UpdateStatus.QUEUED

    def start(self, unit: int) -> tuple[int, ...] | None:
        """The worker begins a unit; returns where to deliver, or None."""
        with self._changed.lock:
            self._status[unit] = UpdateStatus.STARTED
            return self._deliveries.pop(unit, None)

    def complete(self, unit: int) -> None:
        """New values are computed, delivered where asked, and on their way to disk."""
        self._status[unit] = UpdateStatus.IDLE
        self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """An update, a commit or a transfer failed: every wait raises the first error.

        Nothing goes on but, after an interrupt, what was submitted before it: the commit of the step before is whole,
        and other ranks take part in it.
        """
        if not isinstance(error, Exception):
            # Whoever comes later is not interrupted, but meets what an interrupt has left.
            error = UpdateInterrupted(
                "an update was interrupted, so this model's states are a mix of two. Start again with zo.offload "
                "(existing='resume' goes on from the last generation)"
            )
        with self._changed.lock:
            # What fails after an interrupt is told too: somebody may wait for it.
            first = self._error if self._error is not None and self._stops_work() else error
            self._error = first
            self._changed.notify()
        if self._stops_work():
            for listener in self._listeners:
                listener(first)

    def pending(self, unit: int) -> bool:
        return self._status[unit] is not UpdateStatus.IDLE

    def wait(self, unit: int) -> None:
        """Return when the unit's update is computed. Raises the worker's error."""
        if self._status[unit] is UpdateStatus.IDLE and self._error is None:
            return
        with self._counters.waiting(Cause.UPDATE):
            self._changed.wait_for(lambda: self._error is not None or self._status[unit] is UpdateStatus.IDLE)
        self.check()

    def check(self) -> None:
        """Raise the worker's error, if there is one."""
        if self._error is not None:
            self.told = True
            raise self._error

    def check_work(self) -> None:
        """Raise what keeps a worker from its jobs."""
        if self._error is not None and self._stops_work():
            raise self._error

    def _stops_work(self) -> bool:
        return self._error is not None and not isinstance(self._error, UpdateInterrupted)

    def check_whole(self) -> None:
        """Raise if a step was interrupted, for whoever needs no update to be complete."""
        if isinstance(self._error, UpdateInterrupted):
            raise self._error
