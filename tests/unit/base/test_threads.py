"""Bells and monitors: no waiting thread misses an event, and a signal's handler leaves no lock taken."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from zero_offload.base import threads
from zero_offload.base.threads import Bell, Monitor


def test_a_bell_that_rang_before_is_heard_once() -> None:
    bell = Bell()
    assert not bell.wait(0)
    bell.ring()
    bell.ring()
    assert bell.wait(0) and not bell.wait(0)


def test_threads_wake_each_other_in_turns() -> None:
    mine, theirs = Bell(), Bell()
    turns: list[str] = []

    def answer() -> None:
        for _ in range(100):
            theirs.wait(30)
            turns.append("theirs")
            mine.ring()

    thread = threading.Thread(target=answer)
    thread.start()
    for _ in range(100):
        turns.append("mine")
        theirs.ring()
        assert mine.wait(30)
    thread.join()
    assert turns == ["mine", "theirs"] * 100


def test_all_who_wait_are_woken_and_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LOOK_S", 60.0)
    monitor, number, seen = Monitor(), 0, []

    def wait(until: int) -> None:
        monitor.wait_for(lambda: number >= until)
        seen.append(until)

    waiting = [threading.Thread(target=wait, args=(until,)) for until in (1, 1, 2)]
    for thread in waiting:
        thread.start()
    for step in (1, 2):
        number = step
        monitor.notify()
        for thread in waiting[: 2 * step]:
            thread.join(30)
        assert sorted(seen) == [1, 1, 2][: 2 * step]


def test_a_wait_notices_a_change_that_was_not_announced() -> None:
    monitor, ends = Monitor(), time.monotonic() + 0.05
    monitor.wait_for(lambda: time.monotonic() > ends)


def test_an_interrupted_wait_leaves_the_lock_to_others() -> None:
    monitor, found = Monitor(), []

    def tell() -> None:
        with monitor.lock:
            monitor.notify()
            found.append(True)

    waits = threading.Event()

    def strike() -> None:
        assert waits.wait(30)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        threading.Thread(target=strike).start()
        monitor.wait_for(lambda: waits.set() is not None)
    thread = threading.Thread(target=tell)
    thread.start()
    thread.join(30)
    assert found
