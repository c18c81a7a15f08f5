from __future__ import annotations

import time

import pytest

from zero_offload.storage.files.engine import STALL_LIMIT_S, StallWatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What `time.monotonic` says."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def _looks_until_over(clock: list[float], watch: StallWatch, step_s: float, moved_bytes: int) -> int:
    looks = 1
    clock[0] += step_s
    while not watch.is_over(moved_bytes):
        looks += 1
        clock[0] += step_s
    return looks


def test_it_is_over_when_nothing_has_moved_for_so_long(clock: list[float]) -> None:
    watch = StallWatch()
    assert not watch.is_over(7)
    assert _looks_until_over(clock, watch, 0.5, 7) == 2 * STALL_LIMIT_S + 1


def test_any_byte_begins_anew(clock: list[float]) -> None:
    watch = StallWatch()
    for moved_bytes in range(5):
        for _ in range(int(STALL_LIMIT_S)):
            assert not watch.is_over(moved_bytes)
            clock[0] += 1
    assert _looks_until_over(clock, watch, 1, 4) <= 2


def test_time_in_which_the_process_was_stopped_is_not_the_drives(clock: list[float]) -> None:
    watch = StallWatch()
    assert not watch.is_over(0)
    assert _looks_until_over(clock, watch, 3600, 0) == STALL_LIMIT_S + 1
