from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from zero_offload.runs.ranks import joined_ranks
from zero_offload.runs.stop import requested_stop_of
from zero_offload.runtime.stop import requested_stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_asks(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with joined_ranks() as ranks, requested_stop_of(ranks) as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
    assert signal.getsignal(number) is before


def test_the_second_ctrl_c_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), joined_ranks() as ranks, requested_stop_of(ranks):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


def test_another_thread_trains_without_handlers() -> None:
    seen = []

    def train() -> None:
        with requested_stop() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_loop_leaves_ctrl_c_to_python() -> None:
    with pytest.raises(KeyboardInterrupt), requested_stop() as stop:
        signal.raise_signal(signal.SIGINT)
    assert not stop.requested


def test_a_forked_process_has_the_signals_of_before() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with requested_stop() as stop:
            if not (child := os.fork()):
                signal.raise_signal(signal.SIGUSR1)
                os._exit(5 if stop.requested else 3)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
            time.sleep(0.6)  # its signal would be heard by the thread here
            assert not stop.requested
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_one_process_needs_no_group() -> None:
    with joined_ranks() as ranks:
        assert (ranks.rank, ranks.size) == (0, 1)
        assert ranks.is_first
        assert ranks.mean(0.1) == 0.1
        assert ranks.any("yes") and not ranks.any(None)
