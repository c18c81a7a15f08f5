from __future__ import annotations

import threading
import time

import pytest

from zero_offload.base.events import Counters
from zero_offload.base.threads import FirstError, UnitUpdate


@pytest.fixture
def errors() -> FirstError:
    return FirstError()


@pytest.fixture
def update(errors: FirstError) -> UnitUpdate:
    return UnitUpdate(errors, Counters())


def test_values_are_delivered_to_memory_named_before_the_start(update: UnitUpdate) -> None:
    assert update.deliver_to((10, 20))
    assert update.begin() == (10, 20)
    assert not update.deliver_to((30,)) and not update.is_done
    update.complete()
    assert update.is_done


def test_memory_can_be_taken_back_until_the_start(update: UnitUpdate) -> None:
    assert update.withdraw(), "none was named, and nothing will be delivered"
    update.deliver_to((10,))
    assert update.withdraw() and update.deliver_to((20,)), "another may be named"
    assert update.withdraw() and update.begin() is None and not update.withdraw()


def test_what_was_taken_back_too_late_is_delivered(update: UnitUpdate) -> None:
    update.deliver_to((10,))
    assert update.begin() == (10,) and not update.withdraw()


def test_a_wait_ends_with_the_update_it_is_for(errors: FirstError) -> None:
    counters = Counters()
    first, second = (UnitUpdate(errors, counters) for _ in range(2))
    woken, waits = threading.Event(), threading.Event()
    wait_for = errors.changed.wait_for
    errors.changed.wait_for = lambda is_so: (waits.set(), wait_for(is_so))  # type: ignore[method-assign,func-returns-value]
    waiter = threading.Thread(target=lambda: (second.wait(), woken.set()))
    waiter.start()
    assert waits.wait(10)
    for update in (first, second):
        assert not woken.wait(0.02)
        update.begin()
        update.complete()
    assert woken.wait(10)
    waiter.join()
    assert counters.snapshot()["exposed.update"] > 0
    before = counters.snapshot()
    second.wait()
    assert counters.snapshot() == before, "a wait for what is done is none"


def test_an_error_reaches_every_wait_from_then_on(errors: FirstError, update: UnitUpdate) -> None:
    caught = []

    def wait() -> None:
        try:
            update.wait()
        except OSError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.02)
    errors.set(OSError("disk gone"))
    waiter.join(10)
    assert len(caught) == 1
    done = UnitUpdate(errors, Counters())
    done.begin()
    done.complete()
    for call in (update.wait, done.wait, errors.check):
        with pytest.raises(OSError, match="disk gone"):
            call()
