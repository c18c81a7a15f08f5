from __future__ import annotations

import threading
import time

import pytest

from zero_offload.shards.update_board import UpdateBoard
from zero_offload.telemetry.events import Counters


def test_idle_units_are_not_waited_for() -> None:
    board = UpdateBoard(2)
    board.wait(1)
    assert not board.pending(1) and not board.offer(1, (1,))


def test_a_delivery_is_taken_until_the_update_begins() -> None:
    board = UpdateBoard(2)
    board.queue([0, 1])
    assert board.pending(0) and board.offer(0, (10, 20))
    assert board.start(0) == (10, 20)
    assert board.pending(0) and not board.offer(0, (30,))
    assert board.start(1) is None
    board.complete(0)
    assert not board.pending(0) and board.pending(1)
    board.complete(1)
    board.queue([0])
    assert board.start(0) is None, "a delivery is for one update"


def test_an_offer_can_be_withdrawn_until_the_update_begins() -> None:
    board = UpdateBoard(2)
    board.queue([0, 1])
    board.offer(0, (10,))
    assert board.withdraw(0) and board.offer(0, (20,)), "another may be made"
    assert board.withdraw(0) and board.start(0) is None and not board.withdraw(0)
    assert board.withdraw(1), "nothing was offered, and nothing will be delivered"


def test_waiters_wake_when_their_unit_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters()
    board, woken, waits = UpdateBoard(2, counters), threading.Event(), threading.Event()
    wait_for = board._changed.wait_for
    monkeypatch.setattr(board._changed, "wait_for", lambda is_so: (waits.set(), wait_for(is_so)))
    board.wait(0)
    assert counters.snapshot() == {}
    board.queue([0, 1])
    waiter = threading.Thread(target=lambda: (board.wait(1), woken.set()))
    waiter.start()
    assert waits.wait(10)
    for unit in (0, 1):
        assert not woken.wait(0.02)
        board.start(unit)
        board.complete(unit)
    assert woken.wait(10)
    waiter.join()
    assert counters.snapshot()["exposed.update"] > 0


def test_an_error_reaches_everyone_from_then_on() -> None:
    board, caught = UpdateBoard(2), []

    def wait() -> None:
        try:
            board.wait(0)
        except OSError as error:
            caught.append(error)

    board.queue([0])
    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.02)
    board.fail(OSError("disk gone"))
    waiter.join(10)
    assert len(caught) == 1
    for call in (lambda: board.wait(0), lambda: board.wait(1), board.check):
        with pytest.raises(OSError, match="disk gone"):
            call()


def test_a_unit_is_queued_once() -> None:
    board = UpdateBoard(1)
    board.queue([0])
    with pytest.raises(AssertionError):
        board.queue([0])
