"""Surroundings of the threads of `zo.accumulate`: the settings of the caller's thread, and their own generators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import zero_offload as zo
from tests.helpers.accumulating import assert_same_grads, away, batches_of, grads_of, loop, third
from tests.helpers.models import Block, TinyLM, build, tokens_of
from zero_offload.hardware.device import HostDevice
from zero_offload.runtime.accumulate.relay import Surroundings


class Counting(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "mm" in func.__name__
        return func(*args, **(kwargs or {}))


def on_a_thread(found: list[Any], ask: Callable[[], Any]) -> None:
    surroundings = Surroundings(HostDevice())

    def run() -> None:
        with surroundings.entered():
            found.append(ask())
        found.append(ask())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def settings() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.empty(0).device.type,
    )


def test_settings_are_those_of_the_caller_while_entered() -> None:
    found: list[Any] = []
    with torch.no_grad(), torch.autocast("cpu", torch.float16), torch.device("meta"):
        here = settings()
        on_a_thread(found, settings)
    assert found == [here, (True, False, None, "cpu")]
    assert here == (False, True, torch.float16, "meta")


def test_modes_and_hooks_of_the_caller() -> None:
    sizes: list[int] = []

    def compute() -> int:
        x = torch.ones(3, 3, requires_grad=True)
        (x @ x).sum()
        return len(sizes)

    found: list[Any] = []
    with Counting() as mode, torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(1) or x, lambda x: x):
        on_a_thread(found, compute)
    assert mode.count == 1  # the second product came after the context
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("where", ["around", "inside"])
def test_autocast(where: str, nvme: Path) -> None:
    """Casts of weights that autocast keeps belong to one micro-batch's graph."""

    def inside(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return third(model, batch)

    plain, model = build(TinyLM), zo.offload(build(TinyLM), away(nvme))
    expected = loop(plain, batches_of(3), inside)
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
        losses = zo.accumulate(model, batches_of(3), inside if where == "inside" else third)
    assert losses == expected
    assert_same_grads(model, plain)
    zo.close(model)


# Generators


class Dropping(TinyLM):
    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.3, self.training))

    def __init__(self) -> None:
        super().__init__(block=self.Block)


@pytest.fixture
def dropped(nvme: Path) -> Iterator[Callable[[bool, int], Any]]:
    models: list[nn.Module] = []

    def run(is_marked: bool, seed: int) -> Any:
        model = zo.offload(build(Dropping), away(nvme / str(len(models))))
        models.append(model)
        if is_marked:
            zo.checkpoint(model.blocks)
        torch.manual_seed(seed)
        losses = zo.accumulate(model, [tokens_of(0)] * 3, third)
        return losses, grads_of(model), torch.rand(1)

    yield run
    for model in models:
        zo.close(model)


def test_dropout_is_drawn_anew_by_each_and_can_be_repeated(dropped: Callable[[bool, int], Any]) -> None:
    losses, grads, after = dropped(False, 1)
    assert len(set(map(float, losses))) == 3
    again = dropped(False, 1)
    assert (again[0], again[2]) == (losses, after)
    assert all(torch.equal(again[1][name], grads[name]) for name in grads)
    assert dropped(False, 2)[0] != losses


def test_recompute_draws_what_forward_drew(dropped: Callable[[bool, int], Any]) -> None:
    losses, grads, after = dropped(False, 1)
    again = dropped(True, 1)
    assert (again[0], again[2]) == (losses, after)
    assert all(torch.equal(again[1][name], grads[name]) for name in grads)


def test_the_first_micro_batch_draws_as_in_a_loop(dropped: Callable[[bool, int], Any]) -> None:
    plain = build(Dropping)
    torch.manual_seed(1)
    assert third(plain, tokens_of(0)).detach() == dropped(False, 1)[0][0]
    torch.manual_seed(1)
    third(plain, tokens_of(0))
    assert torch.rand(1) == dropped(False, 1)[2]  # the caller's generator goes on behind it


def test_without_random_numbers_the_generator_stays(nvme: Path) -> None:
    model = zo.offload(build(TinyLM), away(nvme))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    zo.accumulate(model, batches_of(3), third)
    assert torch.equal(torch.get_rng_state(), before)
    zo.close(model)


def test_who_alone_draws_draws_anew_in_the_next_call(nvme: Path) -> None:
    """A later micro-batch's numbers are not the same in every call."""
    model, drawn = zo.offload(build(TinyLM), away(nvme)), []

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        if batch.shape == batches_of(2)[1].shape:
            drawn.append(torch.rand(1).item())
        return third(model, batch)

    for _ in range(2):
        zo.accumulate(model, batches_of(2), loss_fn)
    assert drawn[0] != drawn[1]
    zo.close(model)
