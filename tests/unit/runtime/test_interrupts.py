"""An exception of a signal's handler reaches the program wherever it strikes: nothing of ours swallows a Ctrl-C."""

from __future__ import annotations

import gc
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from torch import nn

import zero_offload as zo
from tests.helpers.activations import make_small
from tests.helpers.disk import open_model, reference, train
from tests.helpers.locks import locks_taken
from tests.helpers.models import tokens_of

NUM_INTERRUPTS = 100


class Strike(BaseException):
    """As KeyboardInterrupt."""


class Alarm:
    """Strikes once, some time after it was set."""

    def __init__(self) -> None:
        self.num_strikes = 0
        self.where = "nowhere"

    def set(self, after_s: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, after_s)

    def strike(self, _: int, frame: FrameType | None) -> None:
        self.num_strikes += 1
        self.where = "".join(traceback.format_stack(frame, limit=6))
        raise Strike


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    """Callbacks that others hung on the garbage collector (Hypothesis does, in Python) are off: one dropped a strike
    once in 4000. So is the garbage of earlier tests."""
    gc.collect()
    callbacks, gc.callbacks[:] = list(gc.callbacks), []
    alarm = Alarm()
    before = signal.signal(signal.SIGALRM, alarm.strike)
    yield alarm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    gc.callbacks[:] = callbacks


def _until_struck(model: nn.Module, alarm: Alarm, after_s: float) -> None:
    alarm.set(after_s)
    try:
        for step in range(1000):
            model(tokens_of(step)).backward()
    finally:
        alarm.set(0)
    raise AssertionError(f"what the handler of a signal raised was lost; it struck at:\n{alarm.where}")


@pytest.mark.parametrize("activations", ["device", "nvme"])
@pytest.mark.filterwarnings("ignore:the last backward was left by an exception")
def test_no_interrupt_of_a_forward_or_a_backward_is_lost(
    activations: str, alarm: Alarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most strike inside of torch's C++, and come out where it calls Python next: a hook, or a finalizer, where
    Python would drop them. The model goes on as if nothing had been."""
    make_small(monkeypatch)
    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: dropped.append(what.object))
    model, optimizer = open_model(tmp_path, activations=activations)
    losses = train(model, optimizer, 0, 1)
    moments = random.Random(0)
    for _ in range(NUM_INTERRUPTS):
        with pytest.raises(Strike):
            _until_struck(model, alarm, moments.uniform(0.0005, 0.02))
    assert alarm.num_strikes == NUM_INTERRUPTS and not dropped
    optimizer.zero_grad()
    assert losses + train(model, optimizer, 1, 3) == reference(3)[0]
    zo.close(model)


@pytest.mark.parametrize("engine", ["threads", "aiofiles"])
def test_the_control_thread_takes_no_lock_that_an_interrupt_could_leave_taken(engine: str, tmp_path: Path) -> None:
    """The standard library's are given back in Python, and a Ctrl-C may strike first; see base/threads.py."""
    model, optimizer = open_model(tmp_path / "run", io_engine=engine)
    losses = train(model, optimizer, 0, 2)
    with locks_taken() as taken:
        losses += train(model, optimizer, 2, 4)
        zo.save_checkpoint(model, optimizer, tmp_path / "checkpoint")
    zo.close(model)
    assert losses == reference(4)[0]
    assert not taken, taken[0]
