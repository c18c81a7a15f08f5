"""A device for tests that behaves like a GPU at its worst: memory of its own, copies as late as the waits permit.

A copy is queued, its target poisoned; it happens when compute or the host waits for it, together with all earlier
copies of the same lane. A missing wait is then a NaN (or a wild integer) in the result, and a source that is changed
before that is a wrong number, not a lucky pass.

Compute itself is not late: operations run when they are called. On a GPU they may all still be queued, and so may the
copies that they wait for, when the host goes on. So what the host does with its own memory is checked apart. Each
event has a clock: which copies are over when it has come. The host knows of a copy only when it has waited for an event
that comes after it; to ask whether one is `done` never helps. Until it knows, what a download has brought is not in
host memory, and the source of an upload must stay as it is: a change is an error when the host learns of the upload,
when the same memory is uploaded again, or in `check_sources`. Results of compute that tests read (a loss) tell nobody
anything, though on a GPU they would.

A program computes on stream 0, and inside `on` on another one. What one stream has waited for another has not: tests
say by `computes_with` what an operation reads, since nothing else knows, and by `goes_back` which memory goes.

Not seen: a copy that begins too early, after a mark that is older than compute which uses its target; and memory that
goes back to an allocator under a copy. Threads beside the one that computes must say after which compute a download
comes.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from zero_offload.device import Event, Handoff, HostDevice
from zero_offload.telemetry.spans import Spans


class Clock(NamedTuple):
    """How many uploads and downloads are over."""

    uploads: int = 0
    downloads: int = 0

    def joined(self, other: Clock) -> Clock:
        return Clock(max(self.uploads, other.uploads), max(self.downloads, other.downloads))


class _Copy(NamedTuple):
    number: int
    target: torch.Tensor
    source: torch.Tensor
    """When it is made, and the host does not know: a copy of it."""
    before: Clock
    """What comes before it."""


class _Lane:
    """Copies in order, none of them made before somebody waits."""

    def __init__(self) -> None:
        self.queue: deque[_Copy] = deque()
        self.launched = 0
        self.finished = 0
        self._before = Clock()
        """What comes before the next one, since it came before the last."""
        self.nbytes = 0
        """Of all that was launched."""

    def launch(self, target: torch.Tensor, source: torch.Tensor, before: Clock) -> Clock:
        """What is over when the copy's predecessors are; it has the number `launched`."""
        poison(target)
        self.launched += 1
        self.nbytes += target.nbytes
        self._before = self._before.joined(before)
        self.queue.append(_Copy(self.launched, target, source, self._before))
        return self._before

    def taken(self, number: int) -> list[_Copy]:
        """The copies up to this one that are not made yet, off the queue."""
        found = []
        while self.finished < number:
            found.append(self.queue.popleft())
            self.finished = found[-1].number
        return found


class LateEvent:
    def __init__(self, device: LateDevice, clock: Clock) -> None:
        self._device = device
        self.clock = clock

    def wait(self) -> None:
        self._device.compute_waits(self.clock)

    def synchronize(self) -> None:
        self._device.host_waits(self.clock)

    def done(self) -> bool:
        return self._device.known.joined(self.clock) == self._device.known


def poison(target: torch.Tensor) -> None:
    if target.is_floating_point():
        target.fill_(float("nan"))
    else:
        target.fill_(torch.iinfo(target.dtype).max)


class LateDevice:
    """Stands in for `AcceleratorDevice`; counts what it is asked."""

    torch_device = torch.device("cpu")
    name = "late"
    is_host = False
    numa_node = 0

    def __init__(self) -> None:
        self._lock = threading.RLock()
        """Control and the threads of updates and commits share lanes, as they share streams."""
        self.uploads = _Lane()
        self.downloads = _Lane()
        self.known = Clock()
        """What the host knows to be over."""
        self._stream = 0
        self._computes: dict[int, Clock] = {}
        """By stream: what compute launched so far has waited for."""
        self._uses: dict[int, dict[int, int]] = {}
        """By stream: how many uses of each stream come before what it launches next."""
        self._read_at: list[tuple[int, int, int, int]] = []
        """What streams have read: from, to, stream, and which of its uses that was."""
        self._uploaded: list[tuple[int, int, int]] = []
        """Where uploads went: from, to, and the number."""
        self._read: dict[tuple[int, int], _Copy] = {}
        """Uploads that are made, and that may still be under way for all the host knows: by address and size."""
        self._arrived: deque[_Copy] = deque()
        """Downloads that are made, and have not come to host memory."""
        self.pinned: dict[int, int] = {}
        self._computes_on = threading.get_ident()

    @property
    def _compute(self) -> Clock:
        return self._computes.get(self._stream, Clock())

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self._stream = self._stream, stream
        yield
        self._stream = before

    def stream(self) -> int:
        return self._stream

    def join(self, streams: Iterable[int], into: int | None = None) -> None:
        then = self._stream if into is None else into
        for first in streams:
            clocks = [self._computes.get(each, Clock()) for each in (first, then)]
            self._computes[then] = clocks[0].joined(clocks[1])
            known, others = self._uses.setdefault(then, {}), self._uses.get(first, {})
            known.update({each: max(count, known.get(each, 0)) for each, count in others.items()})

    def use_here(self, tensor: torch.Tensor) -> None:
        """Nothing here gives memory back early."""

    def computes_with(self, tensor: torch.Tensor) -> None:
        """An operation on this stream reads it."""
        own = self._uses.setdefault(self._stream, {})
        own[self._stream] = own.get(self._stream, 0) + 1
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        self._read_at.append((begin, end, self._stream, own[self._stream]))
        number = max((number for low, high, number in self._uploaded if low < end and begin < high), default=0)
        assert number <= self._compute.uploads, f"stream {self._stream} reads what it has not waited for"

    def goes_back(self, storage: torch.UntypedStorage, home: int) -> None:
        """Memory is given to whatever comes next on the stream `home`."""
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        known = self._uses.get(home, {})
        inside = [each for each in self._read_at if each[0] < end and begin < each[1]]
        late = {stream for _, _, stream, count in inside if count > known.get(stream, 0)}
        assert not late, f"memory goes before streams {late} are done with it"
        self._read_at = [each for each in self._read_at if each not in inside]

    def upload(self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None) -> Handoff:
        self._check_pinned(source)
        with self._lock:
            self._uploaded.append((target.data_ptr(), target.data_ptr() + target.nbytes, self.uploads.launched + 1))
            before = self.uploads.launch(target, source, self._before(after))
            return Handoff(target, LateEvent(self, before._replace(uploads=self.uploads.launched)))

    def download(
        self, target: torch.Tensor, source: torch.Tensor, *, after: Event | None = None, keeps_source: bool = False
    ) -> Handoff:
        self._check_pinned(target)
        if after is None:
            # A micro-batch's thread computes on the stream of the thread that made it.
            computes = threading.get_ident() == self._computes_on or "micro-batch" in threading.current_thread().name
            assert computes, "a download of another thread comes after no compute"
        with self._lock:
            self._release(self._before(after).uploads)  # out of the same memory, maybe
            before = self.downloads.launch(target, source, self._before(after))
            return Handoff(target, LateEvent(self, before._replace(downloads=self.downloads.launched)))

    def mark(self) -> LateEvent:
        return LateEvent(self, self._compute)

    @contextlib.contextmanager
    def following(self, events: Iterable[Event]) -> Iterator[None]:
        for event in events:
            assert isinstance(event, LateEvent)
            with self._lock:
                self._make(event.clock)  # compute has not waited for it
        yield

    def _before(self, after: Event | None) -> Clock:
        if after is None:
            return self._compute
        assert isinstance(after, LateEvent)
        return after.clock

    @property
    def is_ahead(self) -> bool:
        """Whether something has come after an upload that compute has not waited for."""
        return self._compute.uploads < self.uploads.finished

    # What waits are for

    def compute_waits(self, clock: Clock) -> None:
        with self._lock:
            self._make(clock)
            self._computes[self._stream] = self._compute.joined(clock)

    def host_waits(self, clock: Clock) -> None:
        with self._lock:
            self._make(clock)
            self.known = self.known.joined(clock)
            self._bring(self.known.downloads)
            self._release(self.known.uploads)

    def _make(self, clock: Clock) -> None:
        """Make all copies up to these."""
        for copy in self.downloads.taken(clock.downloads):
            self._make(copy.before)
            self._arrived.append(copy._replace(source=copy.source.clone()))
        for copy in self.uploads.taken(clock.uploads):
            self._make(copy.before)
            self._bring(copy.before.downloads)
            copy.target.copy_(copy.source)
            place = copy.source.data_ptr(), copy.source.nbytes
            if place in self._read:
                self._check(self._read[place])
            # Who knows of this one knows of the one before.
            self._read[place] = copy._replace(target=copy.source, source=copy.source.clone())

    def _bring(self, count: int) -> None:
        """So many downloads have come to host memory."""
        while self._arrived and self._arrived[0].number <= count:
            copy = self._arrived.popleft()
            self._release(copy.before.uploads)
            copy.target.copy_(copy.source)

    def _release(self, count: int) -> None:
        """So many uploads have read their sources."""
        for place, copy in list(self._read.items()):
            if copy.number <= count:
                self._check(self._read.pop(place))

    def check_sources(self) -> None:
        """Nothing has changed that an upload may still read."""
        with self._lock:
            for copy in self._read.values():
                self._check(copy)

    def _check(self, copy: _Copy) -> None:
        same = torch.equal(copy.target.view(torch.uint8), copy.source.view(torch.uint8))
        assert same, "host memory has changed while an upload could still read it"

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return HostDevice().alias(tensor)

    def will_pin(self, nbytes: int) -> None: ...

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
