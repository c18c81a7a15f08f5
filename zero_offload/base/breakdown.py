"""Where steps went, from recorded spans: pure functions of values. The call: `step_times`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zero_offload.base.spans import TRANSFERS, Cause, Lane, Span

Intervals = list[tuple[int, int]]
"""Nanoseconds [begin, end), sorted, disjoint."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, from one `step()` to the next: compute, waits and the rest add up to `step_s`."""

    step: int
    step_s: float
    forward_s: float
    """Without what it waited for; so is backward's. On a GPU: of the host, which launches its work."""
    backward_s: float
    exposed_s: dict[str, float]
    """By what was waited for."""
    other_s: float
    """`step()` itself, and what the program does between the calls: batches, schedulers, metrics."""
    update_s: float
    update_overlap: float | None
    """The share of the update's seconds in which forward or backward computed; None without an update."""
    transfer_s: float
    """Seconds in which something was on its way from or to a drive, another rank or a GPU."""
    transfer_overlap: float | None


def step_times(spans: Sequence[Span]) -> list[StepTime]:
    """Of each step that was recorded to its end."""
    windows = sorted((span for span in spans if span.lane is Lane.STEPS), key=lambda span: span.begin_ns)
    waits = _exclusive(span for span in spans if span.lane is Lane.WAIT)
    waiting = union(each for intervals in waits.values() for each in intervals)
    lanes = {lane: union((s.begin_ns, s.end_ns) for s in spans if s.lane is lane) for lane in Lane}
    forward, backward = (without(lanes[lane], waiting) for lane in (Lane.FORWARD, Lane.BACKWARD))
    compute = union([*forward, *backward])
    transfers = union(each for lane in TRANSFERS for each in lanes[lane])
    found = []
    for window in windows:
        span = [(window.begin_ns, window.end_ns)]
        update, moved = common(lanes[Lane.UPDATE], span), common(transfers, span)
        step_s, forward_s, backward_s = (seconds(common(each, span)) for each in (span, forward, backward))
        exposed = {cause: seconds(common(intervals, span)) for cause, intervals in waits.items()}
        found.append(
            StepTime(
                step=int(window.name),
                step_s=step_s,
                forward_s=forward_s,
                backward_s=backward_s,
                exposed_s=exposed,
                other_s=max(0.0, step_s - forward_s - backward_s - sum(exposed.values())),
                update_s=seconds(update),
                update_overlap=_share(common(update, compute), update),
                transfer_s=seconds(moved),
                transfer_overlap=_share(common(moved, compute), moved),
            )
        )
    return found


def _share(part: Intervals, whole: Intervals) -> float | None:
    return seconds(part) / seconds(whole) if whole else None


def _exclusive(spans: Iterable[Span]) -> dict[str, Intervals]:
    """By cause: waits less the waits inside them. Those of one lane lie beside or inside each other."""
    found: dict[str, Intervals] = {cause.value: [] for cause in Cause}
    running: list[tuple[str, int]] = []
    """Cause and end; the innermost last."""
    last = 0

    def pass_until(at_ns: int) -> None:
        nonlocal last
        while running and running[-1][1] <= at_ns:
            cause, end = running.pop()
            found[cause].append((last, end))
            last = end
        if running:
            found[running[-1][0]].append((last, at_ns))
        last = at_ns

    for span in sorted(spans, key=lambda each: (each.begin_ns, -each.end_ns)):
        pass_until(span.begin_ns)
        running.append((span.name.split(":")[0], span.end_ns))
    if running:
        pass_until(running[0][1])
    return {cause: union(intervals) for cause, intervals in found.items()}


def union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """What lies in at least one of them."""
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif begin < end:
            merged.append((begin, end))
    return merged


def common(one: Intervals, other: Intervals) -> Intervals:
    """What lies in both."""
    found: Intervals = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(one: Intervals, other: Intervals) -> Intervals:
    """What lies in the first alone."""
    found: Intervals = []
    j = 0
    for begin, end in one:
        while j < len(other) and other[j][1] <= begin:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if begin < other[k][0]:
                found.append((begin, other[k][0]))
            begin = max(begin, other[k][1])
            k += 1
        if begin < end:
            found.append((begin, end))
    return found


def seconds(intervals: Intervals) -> float:
    return sum(end - begin for begin, end in intervals) / 1e9
