"""Spans of work on named tracks, from when to when, for traces and for where a step went. Values only.

Work of one thread has a site: `Spans.open` before and `close` after. It goes to `zo.profile`, while that records, as a
tuple at the end of a ring. The ring needs no lock, so any thread may add to it. It goes to torch.profiler, while that
runs, as a range named `zo TRACK: NAME`. While neither does, a site costs two looks at flags. Times are
`perf_counter_ns`. The other calls: `begin`; `put` for what no thread does alone, such as a transfer; `sample` for
totals; `end`; then `taken`, `samples`.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from time import perf_counter_ns
from typing import NamedTuple

from torch.autograd import profiler

now = perf_counter_ns

SPANS_MAX = 1 << 17
"""Spans in a ring, some 20 MB; the oldest go."""
SAMPLES_MAX = 1 << 16


class Track(StrEnum):
    """The track that a span is drawn on."""

    STEPS = "steps"  # from one step() to the next
    FORWARD = "forward"  # the whole, and in it each hooked module's units; waits are on a track of their own
    BACKWARD = "backward"  # the whole, and in it units in turns
    WAIT = "exposed wait"  # compute stands still
    FETCH = "fetch"  # launching it: its memory, its reads and copies
    GRADS = "gradients"  # one of them to its place
    CLIP = "clip"
    STEP = "step()"  # the call
    UPDATE = "update"  # passes, in them units, in them what a pass waits for and computes
    COMMIT = "commit"
    GATHER = "gather"  # this and all that follow: launched to over; several at a time
    REDUCE = "reduce"
    UPLOAD = "upload"  # timed on the GPU
    DOWNLOAD = "download"
    READ = "drive read"
    WRITE = "drive write"


TRANSFERS = (Track.GATHER, Track.REDUCE, Track.UPLOAD, Track.DOWNLOAD, Track.READ, Track.WRITE)


class Cause(StrEnum):
    """Causes that compute waits for."""

    PARAMS = "params"
    ACTIVATIONS = "activations"
    UPDATE = "update"
    GRADS = "grads"
    COMMIT = "commit"


class Span(NamedTuple):
    """Something that took time."""

    track: Track
    name: str
    begin_ns: int
    end_ns: int
    nbytes: int = 0


class CounterSample(NamedTuple):
    """The value of a counter at a time."""

    name: str
    at_ns: int
    value: float


_NUMBERED = (Track.STEP, Track.COMMIT)
"""Ranges of these tracks have one name, so that tables of torch.profiler add them up; the number is an argument."""


class Opened:
    """A site's work that is under way."""

    __slots__ = ("_range", "begin_ns", "track", "name")

    def __init__(self, track: Track, name: str) -> None:
        self.track, self.name = track, name
        self._range: profiler.record_function | None = None
        if profiler._is_profiler_enabled:
            is_numbered = track in _NUMBERED
            label = f"zo {track.value}" if is_numbered else f"zo {track.value}: {name}"
            self._range = profiler.record_function(label, name if is_numbered and name else None)
            self._range.__enter__()
        self.begin_ns = now()

    def exit(self) -> None:
        """End torch's range; the thread that has opened it must call this."""
        if self._range is not None:
            self._range.__exit__(None, None, None)


class Spans:
    """The spans of one model on one rank."""

    def __init__(self) -> None:
        self.on = False
        self.begin_ns = 0
        self._ring: deque[tuple[Track, str, int, int, int]] = deque(maxlen=SPANS_MAX)
        self._samples: deque[tuple[str, int, float]] = deque(maxlen=SAMPLES_MAX)
        self.backward = Turns(self, Track.BACKWARD)

    def begin(self) -> None:
        """Record from here on; what was recorded before is dropped."""
        self._ring.clear()
        self._samples.clear()
        self.begin_ns = now()
        self.on = True

    def end(self) -> None:
        """Record no more; what is under way is left out."""
        self.on = False

    @property
    def records(self) -> bool:
        """True while spans are recorded, here or by torch.profiler."""
        return self.on or profiler._is_profiler_enabled

    def open(self, track: Track, name: str) -> Opened | None:
        """This thread begins something; None while neither records."""
        return Opened(track, name) if self.on or profiler._is_profiler_enabled else None

    def close(self, opened: Opened | None, name: str = "") -> None:
        """It is over, on the same thread; `name` where that was not known before."""
        if opened is not None:
            opened.exit()
            if self.on:
                self.put(opened.track, name or opened.name, opened.begin_ns, now())

    def put(self, track: Track, name: str, begin_ns: int, end_ns: int, nbytes: int = 0) -> None:
        """Something has taken from then to then."""
        self._ring.append((track, name, begin_ns, end_ns, nbytes))

    def sample(self, name: str, value: float) -> None:
        """A counter has this value from now on."""
        self._samples.append((name, now(), value))

    def taken(self) -> list[Span]:
        """Spans that began and ended since `begin`. The oldest are left out where the ring was too small, and so are
        steps of which something is missing.
        """
        ring = self._ring.copy()
        # A site may have begun under an earlier `begin`.
        whole_ns = ring[0][3] if len(ring) == SPANS_MAX else self.begin_ns
        return [
            Span(*each)
            for each in ring
            if each[2] >= self.begin_ns and (each[0] is not Track.STEPS or each[2] >= whole_ns)
        ]

    def samples(self) -> list[CounterSample]:
        return [CounterSample(*each) for each in self._samples.copy()]

    @property
    def is_full(self) -> bool:
        """True if the ring had no more room, so that the oldest are missing."""
        return len(self._ring) == SPANS_MAX


class Turns:
    """A track with one worker at a time. Ends are not reported: a span ends when the next one starts.

    The calls, when `Spans.on`: `begin`, `uses` and `made` as signs come, `pause` where one is known to be over, `end`.
    """

    def __init__(self, spans: Spans, track: Track) -> None:
        self._spans = spans
        self._track = track
        self._name = ""
        self._whole_ns = self._begin_ns = self._last_ns = 0
        """When the track, and the one whose turn it is, began; the last sign."""

    def begin(self) -> None:
        self._name = ""
        self._whole_ns = self._begin_ns = self._last_ns = now()

    def uses(self, name: str) -> None:
        """This worker begins, if it has not yet."""
        self._last_ns = now()
        if name != self._name:
            self._close(self._last_ns)
            self._name, self._begin_ns = name, self._last_ns

    def made(self, name: str) -> None:
        """This worker has a result, so it has worked since the last sign at least."""
        if name != self._name:
            self._close(self._last_ns)
            self._name, self._begin_ns = name, self._last_ns
        self._last_ns = now()

    def pause(self) -> None:
        """The turn is over."""
        self._last_ns = now()
        self._close(self._last_ns)

    def end(self) -> None:
        """So is the whole."""
        self._close(self._last_ns)
        if self._whole_ns:
            self._spans.put(self._track, self._track.value, self._whole_ns, now())
        self._whole_ns = 0

    def _close(self, at_ns: int) -> None:
        if self._name:
            self._spans.put(self._track, self._name, self._begin_ns, at_ns)
        self._name = ""
