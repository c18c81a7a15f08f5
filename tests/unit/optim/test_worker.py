"""The worker's thread: order, errors, and that it never outlives its use."""

from __future__ import annotations

import functools
import gc
import signal
import textwrap
import threading
import time
import weakref

import pytest

from tests.helpers.fresh import run_script
from zero_offload.base.events import Counters
from zero_offload.base.threads import FirstError, UnitUpdate, UpdateInterrupted
from zero_offload.optim import worker as worker_module
from zero_offload.optim.worker import Worker


def test_jobs_run_in_order() -> None:
    worker = Worker(FirstError())
    done: list[int] = []
    for number in range(50):
        worker.submit(functools.partial(done.append, number))
    worker.drain()
    assert done == list(range(50))
    worker.shutdown()


def test_an_error_reaches_everyone_and_stops_what_follows() -> None:
    errors = FirstError()
    worker = Worker(errors)
    done: list[int] = []
    gate = threading.Event()

    def fail() -> None:
        gate.wait(10)
        raise ValueError("broken")

    worker.submit(fail)
    worker.submit(lambda: done.append(1))
    gate.set()
    for call in (
        worker.drain,
        worker.drain,
        errors.check,
        lambda: worker.submit(lambda: None),
        UnitUpdate(errors, Counters()).wait,
    ):
        with pytest.raises(ValueError, match="broken"):
            call()
    worker.shutdown()
    assert not done


def test_an_interrupt_of_the_control_thread_lets_finish_what_was_submitted() -> None:
    """The step before may be on its way into a generation, together with other ranks."""
    errors = FirstError()
    worker, other = Worker(errors), Worker(errors)
    told: list[BaseException] = []
    errors.tell(told.append)
    done: list[int] = []
    gate = threading.Event()
    worker.submit(lambda: assert_opens(gate))
    worker.submit(lambda: other.submit(lambda: done.append(1)))
    errors.set(KeyboardInterrupt())
    gate.set()
    for each in (worker, other):
        with pytest.raises(UpdateInterrupted):
            each.drain()
        each.shutdown()
    assert done == [1] and not told


def test_what_fails_after_an_interrupt_stops_all_the_same() -> None:
    errors = FirstError()
    told: list[BaseException] = []
    errors.tell(told.append)
    errors.set(KeyboardInterrupt())
    broken = ValueError("broken")
    errors.set(broken)
    errors.set(KeyboardInterrupt())
    assert told[0] is broken
    with pytest.raises(ValueError, match="broken"):
        errors.check_work()


def assert_opens(gate: threading.Event) -> None:
    assert gate.wait(10)


def test_shutdown_waits_for_what_was_submitted() -> None:
    worker, gate = Worker(FirstError()), threading.Event()
    done: list[int] = []

    def wait() -> None:
        gate.wait(10)
        done.append(1)

    worker.submit(wait)
    threading.Timer(0.05, gate.set).start()
    worker.shutdown()
    assert done == [1]
    worker.submit(lambda: done.append(2))
    assert done == [1, 2]


def test_shutdown_waits_through_every_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else files would be closed, and their lock given back, under what still writes to them."""
    worker, gate, waits = Worker(FirstError()), threading.Event(), threading.Event()
    wait_through = worker_module.through_interrupts
    monkeypatch.setattr(worker_module, "through_interrupts", lambda wait: (waits.set(), wait_through(wait)))
    done: list[int] = []

    def wait() -> None:
        assert_opens(gate)
        done.append(1)

    def strike() -> None:
        assert_opens(waits)
        for _ in range(3):
            time.sleep(0.05)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.2)
        gate.set()

    worker.submit(wait)
    with pytest.raises(KeyboardInterrupt):
        threading.Thread(target=strike).start()
        worker.shutdown()
    assert done == [1]


def test_a_dropped_worker_ends_its_thread_and_keeps_nothing() -> None:
    class Kept:
        pass

    before = set(threading.enumerate())
    worker, kept = Worker(FirstError()), Kept()
    reference, (thread,) = weakref.ref(kept), set(threading.enumerate()) - before
    worker.submit(functools.partial(isinstance, kept, Kept))  # type: ignore[arg-type]
    worker.drain()
    del kept, worker
    gc.collect()
    thread.join(10)
    assert not thread.is_alive() and reference() is None


SCRIPT = """
import threading, time
from zero_offload.optim.worker import Worker
from zero_offload.base.threads import FirstError

def thread_named(name):
    return next(thread for thread in threading.enumerate() if thread.name == name)
"""

ENDINGS = {
    "without a word": """
        worker = Worker(FirstError())
        worker.submit(lambda: (time.sleep(0.3), print("done")))
    """,
    "interrupted while the thread starts": """
        start = threading.Thread.start
        def interrupted(thread):
            start(thread)
            raise KeyboardInterrupt
        threading.Thread.start = interrupted
        try:
            Worker(FirstError())
        except KeyboardInterrupt:
            print("done")
    """,
    "signalled while another thread has the interpreter for longer than a look": """
        import signal
        signal.signal(signal.SIGUSR1, lambda *_: None)
        worker = Worker(FirstError())
        for _ in range(3):
            time.sleep(0.05)
            signal.pthread_kill(thread_named("zero_offload-update").ident, signal.SIGUSR1)
            sum(range(20_000_000))  # in C, so no other thread runs
        print("done")
    """,
    "submitting to one whose thread has ended": """
        worker, other = Worker(FirstError()), Worker(FirstError(), "other")
        def hand_on():
            thread_named("other").join()
            other.submit(lambda: print("done"))
        worker.submit(hand_on)
    """,
    "submitting at exit": """
        import atexit
        worker = Worker(FirstError())
        atexit.register(lambda: worker.submit(lambda: print("done")))
    """,
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_a_process_ends(ending: str) -> None:
    script = SCRIPT + textwrap.dedent(ending)
    done = run_script(script)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
