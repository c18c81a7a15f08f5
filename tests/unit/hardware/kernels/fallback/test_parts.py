"""The parallel loop of the fallback: each range runs once, and no thread is left behind."""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable

import pytest

from tests.helpers.locks import locks_taken
from zero_offload.base.threads import Monitor
from zero_offload.hardware.kernels.fallback import calls
from zero_offload.hardware.kernels.fallback.calls import in_parts


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 1024])
def test_every_part_is_done_once(count: int, num_threads: int) -> None:
    done: list[tuple[int, int]] = []
    in_parts(count, num_threads, lambda begin, end: done.append((begin, end)))
    assert [i for begin, end in sorted(done) for i in range(begin, end)] == list(range(count))
    assert len(done) == min(count, num_threads)


def test_threads_work_side_by_side() -> None:
    meeting = threading.Barrier(2, timeout=60)
    in_parts(2, 2, lambda begin, end: meeting.wait())


def test_an_error_of_any_part_is_raised() -> None:
    for bad in range(3):

        def work(begin: int, end: int, bad: int = bad) -> None:
            if begin == bad:
                raise ZeroDivisionError(bad)

        with pytest.raises(ZeroDivisionError):
            in_parts(3, 3, work)


def test_after_an_interrupt_no_thread_works_on_the_memory() -> None:
    """The caller is interrupted while a helper works: it comes back when the helper has ended."""
    caller, helping, go_on = threading.get_ident(), threading.Event(), threading.Event()
    ended: list[int] = []

    def work(begin: int, end: int) -> None:
        if threading.get_ident() == caller:
            assert helping.wait(60)
            threading.Timer(0.05, go_on.set).start()
            raise KeyboardInterrupt
        helping.set()
        assert go_on.wait(60)
        ended.append(begin)

    with pytest.raises(KeyboardInterrupt):
        in_parts(2, 2, work)
    assert len(ended) == 1


def test_the_caller_takes_no_lock_that_an_interrupt_could_leave_taken() -> None:
    with locks_taken() as taken:
        in_parts(4, 2, lambda begin, end: None)
    assert not taken, taken[0]


def test_a_second_interrupt_during_the_wait_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    helping, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work(begin: int, end: int) -> None:
        helping.set()
        assert go_on.wait(60)
        ended.set()

    job, interrupts, wait_for = calls.ParallelFor(work, [(0, 1)]), iter([True, False]), Monitor.wait_for

    def wait(monitor: Monitor, is_so: Callable[[], bool]) -> None:
        if next(interrupts):
            raise KeyboardInterrupt
        go_on.set()
        wait_for(monitor, is_so)

    monkeypatch.setattr(Monitor, "wait_for", wait)
    threading.Thread(target=job.help).start()
    assert helping.wait(60)
    with pytest.raises(KeyboardInterrupt):
        job.end()
    assert ended.is_set()


def test_a_helper_that_comes_late_finds_nothing_to_do() -> None:
    job = calls.ParallelFor(lambda begin, end: pytest.fail("all was over"), [(0, 1)])
    job.end()
    job.help()


def test_without_threads_the_caller_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the interpreter goes down."""

    def start(*arguments: object) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(_thread, "start_new_thread", start)
    done: list[int] = []
    in_parts(5, 3, lambda begin, end: done.extend(range(begin, end)))
    assert sorted(done) == list(range(5))


def test_a_forked_child_has_threads_of_its_own() -> None:
    meeting = threading.Barrier(2, timeout=60)
    in_parts(2, 2, lambda begin, end: meeting.wait())
    child = os.fork()
    if child == 0:
        status = 1
        try:
            again = threading.Barrier(2, timeout=60)
            in_parts(2, 2, lambda begin, end: again.wait())
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
