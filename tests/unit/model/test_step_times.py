"""Where a step went, of spans made by hand."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from zero_offload.base.spans import TRANSFERS, Span, Track
from zero_offload.model.profile import step_times

S = 10**9


def _span(track: Track, name: str, begin_s: float, end_s: float) -> Span:
    return Span(track, name, int(begin_s * S), int(end_s * S))


STEPS = [
    _span(Track.STEPS, "7", 0, 10),
    _span(Track.FORWARD, "forward", 1, 4),
    _span(Track.FORWARD, "a", 2, 3),
    _span(Track.WAIT, "update", 1, 1.5),
    _span(Track.WAIT, "params: a", 1, 2),
    _span(Track.BACKWARD, "backward", 4, 8),
    _span(Track.WAIT, "grads: a", 7, 8),
    _span(Track.UPDATE, "update", 0.5, 2.5),
    _span(Track.UPDATE, "a", 0.5, 2.5),
    _span(Track.READ, "x", 2, 3),
    _span(Track.READ, "y", 2.5, 7.5),
    _span(Track.WAIT, "commit", 9, 9.25),
    _span(Track.STEPS, "8", 10, 12),
    _span(Track.WAIT, "update", 9.75, 10.5),
]


def test_a_step_adds_up() -> None:
    first, second = step_times(STEPS)
    assert (first.step, first.step_s, first.forward_s, first.backward_s) == (7, 10, 2, 3)
    assert first.exposed_s == {"params": 0.5, "activations": 0, "update": 0.75, "grads": 1, "commit": 0.25}
    assert first.other_s == 10 - 2 - 3 - 2.5
    # Beside compute: from 2 on; the rest beside waits, and before forward.
    assert (first.update_s, first.update_overlap) == (2, 0.25)
    # Until the gradients are waited for.
    assert (first.transfer_s, first.transfer_overlap) == (5.5, 5 / 5.5)
    assert (second.step, second.step_s, second.exposed_s["update"], second.other_s) == (8, 2, 0.5, 1.5)
    assert second.update_overlap is None and second.transfer_overlap is None


def test_the_order_of_spans_does_not_matter() -> None:
    assert step_times(STEPS[::-1]) == step_times(STEPS)


def test_without_steps_there_is_nothing() -> None:
    assert step_times([]) == step_times([_span(Track.FORWARD, "a", 0, 1)]) == []


@pytest.mark.parametrize("seed", range(20))
def test_intervals_are_sets_of_points(seed: int) -> None:
    """Spans with ends in whole seconds are sets of seconds."""
    draw = random.Random(seed)
    tracks = (Track.FORWARD, Track.BACKWARD, Track.UPDATE, Track.READ, Track.WRITE)
    spans = [_span(track, "", *_interval(draw, 40)) for track in tracks for _ in range(draw.randrange(8))]
    outer = [(begin, begin + 10) for begin in range(0, 40, 10) if draw.random() < 0.5]
    inner = [_interval(draw, 10, begin) for begin, _ in outer]
    steps = [_span(Track.STEPS, "1", 0, 20), _span(Track.STEPS, "2", 20, 50)]
    waits = [_span(Track.WAIT, "params: a", *at) for at in outer] + [_span(Track.WAIT, "update", *at) for at in inner]
    points = {track: _points(span for span in spans if span.track is track) for track in tracks}
    waiting = _points(waits)
    compute = (points[Track.FORWARD] | points[Track.BACKWARD]) - waiting
    transfers = set().union(*(points[track] for track in TRANSFERS if track in points))
    for found, step in zip(step_times([*spans, *waits, *steps]), steps, strict=True):
        whole = _points([step])
        assert (found.step, found.step_s) == (int(step.name), len(whole))
        assert found.forward_s == len((points[Track.FORWARD] - waiting) & whole)
        assert found.backward_s == len((points[Track.BACKWARD] - waiting) & whole)
        assert found.exposed_s["update"] == len(_points(waits[len(outer) :]) & whole)
        assert sum(found.exposed_s.values()) == len(waiting & whole)
        for seconds, overlap, moments in (
            (found.update_s, found.update_overlap, points[Track.UPDATE] & whole),
            (found.transfer_s, found.transfer_overlap, transfers & whole),
        ):
            assert seconds == len(moments)
            assert overlap == (len(moments & compute) / len(moments) if moments else None)


def _interval(draw: random.Random, length: int, begin: int = 0) -> tuple[int, int]:
    """Inside of [begin, begin + length]; maybe empty."""
    first = begin + draw.randrange(length)
    return first, draw.randrange(first, begin + length + 1)


def _points(spans: Iterable[Span]) -> set[int]:
    return {point for span in spans for point in range(span.begin_ns // S, span.end_ns // S)}
