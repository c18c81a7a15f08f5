"""A call of `zo.accumulate` that breaks off: its threads end, what it has entered is left, and training goes on."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.accumulating import assert_at_rest, assert_same_grads, away, batches_of, loop, third, threads
from tests.helpers.models import TinyLM, build
from tests.helpers.pairwise import full
from tests.helpers.ranks import wait_until
from tests.models.test_exceptions import Explosion, Fused
from zero_offload.hardware.device import HostDevice
from zero_offload.runtime.accumulate.relay import Forks, Relay, Surroundings

ERRORS = [Explosion, KeyboardInterrupt, torch.OutOfMemoryError, SystemExit]


def goes_on(model: nn.Module) -> None:
    """As if what broke off had not been."""
    assert_at_rest(model)
    plain = build(Fused)
    assert zo.accumulate(model, batches_of(3), third) == loop(plain, batches_of(3), third)
    assert_same_grads(model, plain)


def failing(number: int, error: type[BaseException], after: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    """Raises in one micro-batch's loss_fn, before or after its forward."""

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        chosen = batch.shape == batches_of(number + 1)[number].shape
        if chosen and not after:
            raise error("in loss_fn")
        loss = third(model, batch)
        if chosen:
            raise error("in loss_fn")
        return loss

    return loss_fn


@pytest.mark.parametrize(("number", "error"), list(enumerate(ERRORS[:3])) + [(0, ERRORS[3])])
def test_an_error_in_a_loss_reaches_the_caller(number: int, error: type[BaseException], nvme: Path) -> None:
    model = zo.offload(build(Fused), away(nvme))
    for after in (False, True):
        with pytest.raises(error, match="in loss_fn"):
            zo.accumulate(model, batches_of(3), failing(number, error, after))
        goes_on(model)
        model.zero_grad()
    zo.close(model)


@pytest.mark.parametrize("error", ERRORS[:2])
def test_an_error_inside_of_a_unit(error: type[BaseException], nvme: Path) -> None:
    model = zo.offload(build(Fused), away(nvme))
    model.blocks[1].forward_error = error
    with pytest.raises(error, match="in forward"):
        zo.accumulate(model, batches_of(3), third)
    model.blocks[1].forward_error = None
    goes_on(model)
    zo.close(model)


@pytest.mark.parametrize("error", ERRORS[:2])
def test_an_error_in_backward_drops_the_gradients(error: type[BaseException], nvme: Path) -> None:
    model = zo.offload(build(Fused), away(nvme))
    optimizer = zo.AdamW(model.parameters())
    model.blocks[1].backward_error = error
    with pytest.raises(error, match="in backward"):
        zo.accumulate(model, batches_of(3), third)
    model.blocks[1].backward_error = None
    with pytest.warns(UserWarning, match="gradients are dropped"):
        optimizer.step()
    goes_on(model)
    zo.close(model)


def test_a_backward_right_after_a_broken_one_counts(nvme: Path) -> None:
    model, plain = zo.offload(build(Fused), away(nvme)), build(Fused)
    optimizer = zo.AdamW(model.parameters())
    batch = batches_of(1)[0]
    loss = third(model, batch)
    model.blocks[1].backward_error = Explosion
    with pytest.raises(Explosion, match="in backward") as kept:
        zo.accumulate(model, batches_of(3), third)
    model.blocks[1].backward_error = None
    optimizer.zero_grad()
    loss.backward()
    third(plain, batch).backward()
    assert_same_grads(model, plain)
    assert kept.value  # and all frames of it
    zo.close(model)


def test_gradients_of_earlier_calls_stay(nvme: Path) -> None:
    """As those of a loop's earlier micro-batches do when a forward fails."""
    model, plain = zo.offload(build(Fused), away(nvme)), build(Fused)
    zo.accumulate(model, batches_of(3), third)
    with pytest.raises(Explosion):
        zo.accumulate(model, batches_of(3), failing(2, Explosion, True))
    loop(plain, batches_of(3), third)
    assert_same_grads(model, plain)
    zo.close(model)


def test_a_loss_that_runs_the_model_as_an_error_unwinds_it(nvme: Path) -> None:
    """There are no turns any more."""
    model = zo.offload(build(Fused), away(nvme))

    def probing(model: nn.Module, batch: Tensor) -> Tensor:
        if batch.shape == batches_of(2)[1].shape:
            raise Explosion("in loss_fn")
        try:
            return third(model, batch)
        finally:
            with torch.no_grad():
                model(batch)

    with pytest.raises(Explosion, match="in loss_fn"):
        zo.accumulate(model, batches_of(3), probing)
    assert not threads()
    goes_on(model)
    zo.close(model)


class Stubborn(TinyLM):
    """Catches whatever it can."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                x = block(x)
            except BaseException:
                x = x * 1
        return x


def test_a_program_that_catches_everything(nvme: Path) -> None:
    model = zo.offload(build(Stubborn), away(nvme))
    with pytest.raises(Explosion):
        zo.accumulate(model, batches_of(3), failing(0, Explosion, True))
    assert_at_rest(model)
    plain = build(TinyLM)
    assert zo.accumulate(model, batches_of(3), third) == loop(plain, batches_of(3), third)
    zo.close(model)


class Strike:
    """Ctrl-C at the n-th line of ours, on the caller's thread."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if "runtime/accumulate" in frame.f_code.co_filename and event == "line":
            self._left -= 1
            if self._left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


@pytest.fixture
def traced() -> Iterator[Callable[[Strike], None]]:
    before = sys.gettrace()
    yield sys.settrace
    sys.settrace(before)


@pytest.mark.filterwarnings("ignore:the last backward")
@pytest.mark.parametrize("count", [8, full(200)])
def test_ctrl_c_anywhere(count: int, nvme: Path, traced: Callable[[Any], None]) -> None:
    """No thread stays, and the next call is right."""
    model, draws = zo.offload(build(Fused), away(nvme)), random.Random(0)
    num_struck = 0
    for _ in range(count):
        try:
            traced(Strike(draws.randrange(1, 900)))
            zo.accumulate(model, batches_of(3), third)
        except KeyboardInterrupt:
            num_struck += 1
        finally:
            traced(None)
        wait_until(lambda: threads() == [], 10)  # struck at the wrong line, they notice by themselves
        zo.clip_grad_norm_(model, 1.0)  # what a backward has left is dropped
        model.zero_grad()
    assert num_struck > count / 2
    goes_on(model)
    zo.close(model)


def test_threads_wait_for_their_turn() -> None:
    """Two forwards of three that want the same station go there before the third goes on."""
    log: list[tuple[int, str]] = []
    ways = [["a", "c"], ["b", "c"], ["a", "b", "c"]]
    stations = {"a": (1,), "b": (2,), "c": (3,)}

    def forward(number: int) -> None:
        for name in ways[number]:
            relay.wait(stations[name])
            log.append((number, name))

    works = [lambda number=number: forward(number) for number in range(3)]  # type: ignore[misc]
    relay = Relay(works, Surroundings(HostDevice()), Forks(3), lambda: None, lambda runner: None)
    before = threading.active_count()
    relay.run()
    assert threading.active_count() == before
    assert log == [(0, "a"), (2, "a"), (1, "b"), (2, "b"), (0, "c"), (1, "c"), (2, "c")]
