"""The future of one unit's update: waited for by the control thread, completed by whatever thread computes it."""

from __future__ import annotations

from zero_offload.base.events import Counters
from zero_offload.base.spans import Cause
from zero_offload.base.threads import FirstError, Monitor


class UnitUpdate:
    """One unit's next values.

    Until the update starts, the control thread may name memory for them (`deliver_to`). The update writes them there as
    well as to the tier, so that forward does not read them back.

    [Note: no concurrent.futures.Future]
    A Future takes its lock in Python, where a Ctrl-C may strike before the lock is given back. The update's thread then
    waits for ever. `Monitor` holds locks of C only.
    """

    def __init__(self, errors: FirstError, counters: Counters) -> None:
        """A wait raises what `errors` has, and counts its seconds in `counters`."""
        self._errors = errors
        self._counters = counters
        self._changed: Monitor = errors.changed
        self._target: tuple[int, ...] | None = None
        self._is_started = False
        self.is_done = False
        """True if the new values are computed, delivered where asked, and on their way to their tier."""

    def deliver_to(self, addresses: tuple[int, ...]) -> bool:
        """Write the new values to host memory too, one address per section. False if the update has started."""
        with self._changed.lock:
            if not self._is_started:
                self._target = addresses
            return not self._is_started

    def withdraw(self) -> bool:
        """Take back what `deliver_to` named, so that the memory may serve another unit. False if it has started."""
        with self._changed.lock:
            if not self._is_started:
                self._target = None
            return not self._is_started

    def start(self) -> tuple[int, ...] | None:
        """Returns where to deliver, one address per section; from now on this stays. On the update's thread."""
        with self._changed.lock:
            self._is_started = True
            return self._target

    def complete(self) -> None:
        """On the update's thread."""
        self.is_done = True
        self._changed.notify()

    def wait(self) -> None:
        """Return when the update is done. Raises the first error of the model's work, whichever unit it struck."""
        if not self.is_done and self._errors.error is None:
            with self._counters.waiting(Cause.UPDATE):
                self._changed.wait_for(lambda: self.is_done or self._errors.error is not None)
        self._errors.check()
