"""`zo.profile`: records what a model does, says where each step went, and writes a trace that Perfetto opens.

Owns the file's format. Never records: that is done where things happen, into `Spans`.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from zero_offload.base.errors import ConfigError, StorageError
from zero_offload.base.spans import SPANS_MAX, TRANSFERS, Cause, CounterSample, Span, Spans, Track, now
from zero_offload.model.api import need_runtime
from zero_offload.storage.files.system import refuse_other_kinds, replace_file

_ROWS_PER_TRACK = 1000
_ORIGINS_NS = 4 * 86400 * 10**9
"""Times are counted from such a multiple: as floats of microseconds they keep their nanoseconds."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, from one `step()` to the next: compute, waits and the rest add up to `step_s`."""

    step: int
    step_s: float
    forward_s: float
    """Without what it waited for; so is backward's. On a GPU: of the host, which launches its work."""
    backward_s: float
    exposed_s: dict[str, float]
    """Seconds by what was waited for."""
    other_s: float
    """`step()` itself, and what the program does between the calls: batches, schedulers, metrics."""
    update_s: float
    update_overlap: float | None
    """The share of the update's seconds in which forward or backward computed; None without an update."""
    transfer_s: float
    """Seconds in which something was on its way from or to a drive, another rank or a GPU."""
    transfer_overlap: float | None


def step_times(spans: Iterable[Span]) -> list[StepTime]:
    """Times of each step that was recorded to its end. Sweeps over begins and ends of all spans, in order of time."""
    edges: list[tuple[int, bool, int, Span]] = []
    for span in spans:
        if span.begin_ns < span.end_ns:
            edges += [(span.begin_ns, True, -span.end_ns, span), (span.end_ns, False, 0, span)]
    edges.sort(key=lambda edge: edge[:3])
    sums: dict[str, Counter[str]] = {}
    """Nanoseconds in each step of what `_counted` names."""
    running: Counter[Track] = Counter()
    waits: list[Span] = []
    """Those under way. Waits lie beside or inside each other, so the last is the innermost."""
    step, last_ns = "", 0
    for at_ns, is_begin, _, span in edges:
        if step:
            for name in _counted(running, waits):
                sums[step][name] += at_ns - last_ns
        last_ns = at_ns
        running[span.track] += 1 if is_begin else -1
        if span.track is Track.WAIT:
            (waits.append if is_begin else waits.remove)(span)
        elif span.track is Track.STEPS:
            step = span.name if is_begin else ""
            sums.setdefault(span.name, Counter())
    return [_step_time(int(step), of_step) for step, of_step in sums.items()]


def _counted(running: Counter[Track], waits: Sequence[Span]) -> list[str]:
    """The names under which a moment counts, with so many spans of each track under way."""
    computes = [track.value for track in (Track.FORWARD, Track.BACKWARD) if running[track] and not waits]
    names = ["step", *computes]
    if waits:
        names.append(f"wait for {waits[-1].name.split(':')[0]}")
    for name, tracks in (("update", (Track.UPDATE,)), ("transfer", TRANSFERS)):
        if any(running[track] for track in tracks):
            names += [name, f"{name} beside compute"] if computes else [name]
    return names


def _step_time(step: int, sums: Counter[str]) -> StepTime:
    def overlap(name: str) -> float | None:
        return sums[f"{name} beside compute"] / sums[name] if sums[name] else None

    exposed_s = {cause.value: sums[f"wait for {cause.value}"] / 1e9 for cause in Cause}
    step_s, forward_s, backward_s = (sums[name] / 1e9 for name in ("step", "forward", "backward"))
    return StepTime(
        step=step,
        step_s=step_s,
        forward_s=forward_s,
        backward_s=backward_s,
        exposed_s=exposed_s,
        other_s=max(0.0, step_s - forward_s - backward_s - sum(exposed_s.values())),
        update_s=sums["update"] / 1e9,
        update_overlap=overlap("update"),
        transfer_s=sums["transfer"] / 1e9,
        transfer_overlap=overlap("transfer"),
    )


class Profile:
    """The record of this rank; complete when the `with` is over."""

    def __init__(self, spans: Spans, rank: int, world_size: int) -> None:
        self._spans = spans
        self._rank = rank
        self._world_size = world_size
        self._kept: tuple[list[Span], list[CounterSample], bool] | None = None
        self._origin_ns = now() // _ORIGINS_NS * _ORIGINS_NS

    def keep(self) -> None:
        """Keep the record as it is now."""
        # Spans under way are still to end, and the next recording drops this one's.
        self._kept = self._recorded()

    def _recorded(self) -> tuple[list[Span], list[CounterSample], bool]:
        return self._kept or (self._spans.taken(), self._spans.samples(), self._spans.is_full)

    def spans(self) -> list[Span]:
        """All spans, in the order in which they ended; those under way at either end are left out."""
        return self._recorded()[0]

    def steps(self) -> list[StepTime]:
        """Where each step went."""
        return step_times(self.spans())

    def export_chrome_trace(self, path: str | Path) -> Path:
        """Write the trace, whole or not at all, and return where: with several ranks a file each, `name.rank0.json`.

        Times are those of the machine's monotonic clock, less some whole days, so files of ranks on one machine can be
        laid side by side.
        Raises StorageError.
        """
        target = trace_path(Path(path), self._rank, self._world_size)
        placed = _placed(self.spans())
        trace = {
            "traceEvents": [*_metadata(self._rank, placed), *self._events(placed)],
            "displayTimeUnit": "ms",
            "otherData": {
                "unix_minus_trace_clock_ns": time.time_ns() - time.perf_counter_ns() + self._origin_ns,
                "oldest_spans_missing": self._recorded()[2],
                "spans_max": SPANS_MAX,
            },
            "steps": [asdict(step) for step in self.steps()],
        }
        with _naming(target):
            replace_file(target, json.dumps(trace).encode())
        return target

    def _events(self, placed: Sequence[tuple[int, Span]]) -> Iterator[dict[str, Any]]:
        for row, span in placed:
            event: dict[str, Any] = {
                "name": span.name,
                "cat": span.track.value,
                "ph": "X",
                "pid": self._rank,
                "tid": row,
            }
            event |= {"ts": self._microseconds(span.begin_ns), "dur": (span.end_ns - span.begin_ns) / 1000}
            event |= {"args": {"bytes": span.nbytes}} if span.nbytes else {}
            yield event
        for sample in self._recorded()[1]:
            kind, tier = sample.name.split(".")
            name, args = f"{_COUNTERS[kind]} {tier}", {"bytes": sample.value}
            yield {"name": name, "ph": "C", "pid": self._rank, "ts": self._microseconds(sample.at_ns), "args": args}

    def _microseconds(self, at_ns: int) -> float:
        return (at_ns - self._origin_ns) / 1000


_COUNTERS = {"read": "bytes read so far from", "written": "bytes written so far to", "resident": "bytes at rest on"}


def trace_path(path: Path, rank: int, world_size: int) -> Path:
    """The file of one rank."""
    return path if world_size == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


@contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Errors of the system say which file it is."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror}; name another file") from error


def _check_place(target: Path) -> None:
    """Raise if no file can be written there, before anything is recorded for it."""
    with _naming(target):
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        refuse_other_kinds(target)
        with tempfile.NamedTemporaryFile(dir=target.parent):
            pass


def _placed(spans: Sequence[Span]) -> list[tuple[int, Span]]:
    """Each span with its row."""
    return [
        (number * _ROWS_PER_TRACK + row, span)
        for number, track in enumerate(Track, 1)
        for row, span in on_rows([span for span in spans if span.track is track])
    ]


def on_rows(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Viewers want spans of a row beside or inside each other. Transfers overlap, and so do forwards that take turns:
    they get several. A transfer inside of another one is not part of it.
    """
    open_ns: list[list[int]] = []
    """By row: ends of the spans that are under way, the innermost last."""
    for span in sorted(spans, key=lambda each: (each.begin_ns, -each.end_ns)):
        for ends in open_ns:
            while ends and ends[-1] <= span.begin_ns:
                ends.pop()
        nests = span.track not in TRANSFERS
        free = (i for i, ends in enumerate(open_ns) if not ends or (nests and ends[-1] >= span.end_ns))
        row = next(free, len(open_ns))
        if row == len(open_ns):
            open_ns.append([])
        open_ns[row].append(span.end_ns)
        yield row, span


def _metadata(rank: int, placed: Sequence[tuple[int, Span]]) -> Iterator[dict[str, Any]]:
    """Names for the process and its rows."""
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"zero_offload rank {rank}"}}
    yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
    for row, track in sorted({row: span.track for row, span in placed}.items()):
        number = row % _ROWS_PER_TRACK
        name = track.value if number == 0 else f"{track.value} {number + 1}"
        yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": row, "args": {"sort_index": row}}


@contextmanager
def profile(model: nn.Module, path: str | Path | None = None) -> Iterator[Profile]:
    """Record what an offloaded model does inside the `with`: forward, backward, waits, updates, commits, transfers.

    With a `path` it becomes a trace there at the end, after an error too: open it in ui.perfetto.dev. Of long runs
    record some steps; the newest `SPANS_MAX` spans are kept. One at a time. Raises ConfigError, StorageError.
    """
    owner = need_runtime(model, "zo.profile")
    spans, ranks = owner.store.counters.spans, owner.ranks
    if spans.on:
        raise ConfigError("this model is being recorded already; end the other zo.profile first")
    recorded = Profile(spans, ranks.rank, ranks.world_size)
    if path is not None:
        _check_place(trace_path(Path(path), ranks.rank, ranks.world_size))
    spans.begin()
    try:
        yield recorded
    finally:
        owner.device.tell_copies()
        spans.end()
        recorded.keep()
        if path is not None:
            recorded.export_chrome_trace(path)
