"""Where a step went, of spans made by hand."""

from __future__ import annotations

import random

import pytest

from zero_offload.base.breakdown import common, seconds, step_times, union, without
from zero_offload.base.spans import Lane, Span

S = 10**9


def _span(lane: Lane, name: str, begin_s: float, end_s: float) -> Span:
    return Span(lane, name, int(begin_s * S), int(end_s * S))


STEPS = [
    _span(Lane.STEPS, "7", 0, 10),
    _span(Lane.FORWARD, "forward", 1, 4),
    _span(Lane.FORWARD, "a", 2, 3),
    _span(Lane.WAIT, "update", 1, 1.5),
    _span(Lane.WAIT, "params: a", 1, 2),
    _span(Lane.BACKWARD, "backward", 4, 8),
    _span(Lane.WAIT, "grads: a", 7, 8),
    _span(Lane.UPDATE, "update", 0.5, 2.5),
    _span(Lane.UPDATE, "a", 0.5, 2.5),
    _span(Lane.READ, "x", 2, 3),
    _span(Lane.READ, "y", 2.5, 7.5),
    _span(Lane.WAIT, "commit", 9, 9.25),
    _span(Lane.STEPS, "8", 10, 12),
    _span(Lane.WAIT, "update", 9.75, 10.5),
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
    assert step_times([]) == step_times([_span(Lane.FORWARD, "a", 0, 1)]) == []


@pytest.mark.parametrize("seed", range(20))
def test_intervals_are_sets_of_points(seed: int) -> None:
    draw = random.Random(seed)
    one, other = ([_interval(draw) for _ in range(draw.randrange(8))] for _ in range(2))
    a, b = _points(one), _points(other)
    assert _points(union(one)) == a and sum(end - begin for begin, end in union(one)) == len(a)
    assert _points(common(union(one), union(other))) == a & b
    assert _points(without(union(one), union(other))) == a - b
    assert seconds(union(one)) == len(a) / S


def _interval(draw: random.Random) -> tuple[int, int]:
    begin = draw.randrange(40)
    return begin, begin + draw.randrange(10)


def _points(intervals: list[tuple[int, int]]) -> set[int]:
    return {point for begin, end in intervals for point in range(begin, end)}
