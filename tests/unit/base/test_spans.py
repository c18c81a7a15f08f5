"""Recorded spans, and their cost in memory: a ring with a bound, and nothing at all when off."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from zero_offload.base import events, spans
from zero_offload.base.events import Counters
from zero_offload.base.spans import Cause, Span, Spans, Track
from zero_offload.base.stats import StatsKeeper
from zero_offload.base.types import Tier


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time in ns, for tests to set."""
    at = [10]
    monkeypatch.setattr(spans, "now", lambda: at[0])
    monkeypatch.setattr(events, "now", lambda: at[0])
    return at


def _names(recorded: Spans) -> list[str]:
    return [span.name for span in recorded.taken()]


def test_off_nothing_is_recorded() -> None:
    counters = Counters()
    counters.read(Tier.NVME, 5)
    with counters.waiting(Cause.PARAMS):
        pass
    StatsKeeper(counters, lambda: (0, 0)).end_step(1)
    assert counters.spans.taken() == [] and counters.spans.samples() == []


def test_the_ring_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "SPANS_MAX", 4)
    monkeypatch.setattr(spans, "SAMPLES_MAX", 3)
    recorded = Spans()
    recorded.begin()
    for number in range(3):
        recorded.put(Track.UPDATE, str(number), spans.now(), spans.now())
    assert not recorded.is_full
    for number in range(3, 10):
        recorded.put(Track.UPDATE, str(number), spans.now(), spans.now())
        recorded.sample(str(number), number)
    assert _names(recorded) == ["6", "7", "8", "9"] and recorded.is_full
    assert [sample.value for sample in recorded.samples()] == [7, 8, 9]


def test_what_began_before_is_left_out_and_a_new_beginning_forgets(clock: list[int]) -> None:
    recorded = Spans()
    recorded.begin()
    clock[0] = 20
    recorded.put(Track.UPDATE, "early", 9, spans.now())
    recorded.put(Track.UPDATE, "whole", 10, spans.now())
    assert recorded.taken() == [Span(Track.UPDATE, "whole", 10, 20)]
    recorded.end()
    recorded.begin()
    assert not recorded.is_full and recorded.taken() == []


def test_threads_record_beside_each_other() -> None:
    recorded = Spans()
    recorded.begin()

    def record(name: str) -> None:
        for _ in range(1000):
            recorded.put(Track.UPDATE, name, spans.now(), spans.now())

    threads = [threading.Thread(target=record, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(_names(recorded)) == sorted(str(number) for number in range(4) for _ in range(1000))


def test_an_inner_wait_is_not_the_outer_one_s(clock: list[int]) -> None:
    counters = Counters()
    counters.spans.begin()
    with counters.waiting(Cause.PARAMS, "block 0"):
        clock[0] += 1000
        with counters.waiting(Cause.UPDATE):
            clock[0] += 200
            with counters.hindering(Cause.COMMIT):
                clock[0] += 30
        clock[0] += 4000
    totals = counters.snapshot()
    assert {name: round(value * 1e9) for name, value in totals.items()} == {
        "exposed.params": 5000,
        "exposed.update": 200,
        "exposed.commit": 30,
    }
    assert [span[:4] for span in counters.spans.taken()] == [
        (Track.WAIT, "commit", 1210, 1240),
        (Track.WAIT, "update", 1010, 1240),
        (Track.WAIT, "params: block 0", 10, 5240),
    ]


def test_what_hinders_a_thread_is_not_exposed_unless_training_waits_for_it(clock: list[int]) -> None:
    counters = Counters()

    def work() -> None:
        with counters.hindering(Cause.COMMIT):
            clock[0] += 100

    with counters.waiting(Cause.UPDATE):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert {name: round(value * 1e9) for name, value in counters.snapshot().items()} == {"exposed.update": 100}


def test_a_wait_that_raises_is_counted_too(clock: list[int]) -> None:
    counters = Counters()
    for _ in range(2):
        with pytest.raises(KeyError), counters.waiting(Cause.GRADS):
            clock[0] += 7
            raise KeyError
    assert round(counters.snapshot()["exposed.grads"] * 1e9) == 14


def test_bytes_are_sampled_as_totals() -> None:
    counters = Counters()
    counters.read(Tier.NVME, 5)
    counters.spans.begin()
    counters.read(Tier.NVME, 7)
    counters.written(Tier.CPU, 1)
    counters.add("departures", 1)
    assert [(sample.name, sample.value) for sample in counters.spans.samples()] == [
        ("read.nvme", 12),
        ("written.cpu", 1),
    ]


def test_laps_count_while_time_passes() -> None:
    counters = Counters()
    laps = counters.laps("update_s")
    assert "update_s" not in counters.snapshot()
    laps.lap()
    first = counters.snapshot()["update_s"]
    laps.lap()
    assert 0 < first < counters.snapshot()["update_s"]


@pytest.fixture
def turns(clock: list[int]) -> Iterator[tuple[Spans, list[int]]]:
    recorded = Spans()
    recorded.begin()
    recorded.backward.begin()
    yield recorded, clock


def _segments(recorded: Spans) -> list[tuple[str, int, int]]:
    return [(span.name, span.begin_ns, span.end_ns) for span in recorded.taken()]


def test_turns_end_when_the_next_one_begins(turns: tuple[Spans, list[int]]) -> None:
    recorded, clock = turns
    for at, sign in ((20, "a"), (30, "a"), (50, "b")):
        clock[0] = at
        recorded.backward.uses(sign)
    clock[0] = 70
    recorded.backward.made("b")
    clock[0] = 90
    recorded.backward.end()
    assert _segments(recorded) == [("a", 20, 50), ("b", 50, 70), ("backward", 10, 90)]


def test_a_result_without_a_sign_before_is_of_all_the_time_since_the_last_one(turns: tuple[Spans, list[int]]) -> None:
    recorded, clock = turns
    clock[0] = 20
    recorded.backward.uses("a")
    clock[0] = 30
    recorded.backward.pause()
    clock[0] = 50
    recorded.backward.made("embedding")
    clock[0] = 60
    recorded.backward.made("embedding")
    recorded.backward.end()
    assert _segments(recorded) == [("a", 20, 30), ("embedding", 30, 60), ("backward", 10, 60)]


def test_a_backward_that_broke_off_leaves_nothing_to_the_next(turns: tuple[Spans, list[int]]) -> None:
    recorded, clock = turns
    recorded.backward.uses("a")
    clock[0] = 40
    recorded.backward.begin()
    clock[0] = 50
    recorded.backward.end()
    assert _segments(recorded) == [("backward", 40, 50)]


def test_a_step_of_which_spans_are_missing_is_left_out(monkeypatch: pytest.MonkeyPatch, clock: list[int]) -> None:
    """Its own span is the last of it, and so the newest."""
    monkeypatch.setattr(spans, "SPANS_MAX", 5)
    recorded = Spans()
    recorded.begin()
    for step in (1, 2, 3):
        began = clock[0]
        for name in "ab":
            clock[0] += 10
            recorded.put(Track.UPDATE, f"{name}{step}", clock[0] - 10, spans.now())
        recorded.put(Track.STEPS, str(step), began, spans.now())
    assert _names(recorded) == ["b2", "a3", "b3", "3"] and recorded.is_full
