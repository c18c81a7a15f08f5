"""A device for tests that behaves like a GPU at its worst: memory of its own, copies as late as the waits permit.

A copy is queued, its target poisoned; it happens when somebody waits for it, together with all earlier copies of the
same lane. A missing wait is then a NaN (or a wild integer) in the result, and a source that is changed or freed too
early is a wrong number, not a lucky pass. Threads beside the one that computes must say after which compute a download
comes.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from zero_offload.device import Event, Handoff
from zero_offload.telemetry.spans import Spans


class _Lane:
    """Copies in order, none of them done before somebody waits."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        """Control and the threads of updates and commits share a lane, as they share a stream."""
        self.queue: deque[tuple[int, torch.Tensor, torch.Tensor]] = deque()
        self.launched = 0
        self.finished = 0
        self.nbytes = 0
        """Of all that was launched."""

    def launch(self, target: torch.Tensor, source: torch.Tensor) -> LateEvent:
        with self._lock:
            poison(target)
            self.launched += 1
            self.nbytes += target.nbytes
            self.queue.append((self.launched, target, source))
            return LateEvent(self, self.launched)

    def run_until(self, number: int) -> None:
        with self._lock:
            while self.finished < number:
                finished, target, source = self.queue.popleft()
                target.copy_(source)
                self.finished = finished


class LateEvent:
    def __init__(self, lane: _Lane, number: int) -> None:
        self._lane = lane
        self._number = number

    def wait(self) -> None:
        self._lane.run_until(self._number)

    synchronize = wait

    def done(self) -> bool:
        return self._lane.finished >= self._number


def poison(target: torch.Tensor) -> None:
    if target.is_floating_point():
        target.fill_(float("nan"))
    else:
        target.fill_(torch.iinfo(target.dtype).max)


class LateDevice:
    """Stands in for `CudaDevice`; counts what it is asked."""

    torch_device = torch.device("cpu")
    name = "late"
    is_host = False
    numa_node = 0

    def __init__(self) -> None:
        self.uploads = _Lane()
        self.downloads = _Lane()
        self.pinned: dict[int, int] = {}
        self._computes_on = threading.get_ident()

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None) -> Handoff:
        self._check_pinned(source)
        if after is not None:
            after.wait()
        return Handoff(target, self.uploads.launch(target, source))

    def download(self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None) -> Handoff:
        self._check_pinned(target)
        if after is None:
            # A micro-batch's thread computes on the stream of the thread that made it.
            computes = threading.get_ident() == self._computes_on or "micro-batch" in threading.current_thread().name
            assert computes, "a download of another thread comes after no compute"
        else:
            after.wait()
        return Handoff(target, self.downloads.launch(target, source))

    def mark(self) -> LateEvent:
        return LateEvent(self.uploads, 0)  # compute is done at once

    def pin(self, address: int, nbytes: int) -> None:
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def free_bytes(self) -> int | None:
        return 1 << 34

    def record_to(self, spans: Spans) -> None:
        self.spans = spans

    def tell_copies(self) -> None:
        """Nothing takes time here."""

    def _check_pinned(self, host: torch.Tensor) -> None:
        first, last = host.data_ptr(), host.data_ptr() + host.nbytes
        inside = any(start <= first and last <= start + size for start, size in self.pinned.items())
        assert inside, "asynchronous copy from or to memory that is not pinned"
