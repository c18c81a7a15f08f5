from __future__ import annotations

import signal
import threading

import pytest

from zero_offload.runs.ranks import joined_ranks
from zero_offload.runs.stop import requested_stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with requested_stop() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
    assert signal.getsignal(number) is before


def test_the_second_ctrl_c_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), requested_stop():
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


def test_one_process_needs_no_group() -> None:
    with joined_ranks() as ranks:
        assert (ranks.rank, ranks.size) == (0, 1)
        assert ranks.is_first
        assert ranks.mean(0.1) == 0.1
        assert ranks.any("yes") and not ranks.any(None)
