"""Quantized weights in use: without gradients, after an exception, in micro-batches, and in code that asks for more."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import zero_offload as zo
from tests.models.test_quantized_views import HIDDEN, LAYERS, Dequantized, Kept, Model, offloaded, train


def _equal(expected: list[Tensor], found: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_without_gradients(layer: Callable[..., Any], mode: Callable[[], Any], nvme: Path) -> None:
    def run(model: Model) -> list[Tensor]:
        with mode():
            return [model(torch.linspace(-1, 1, 2 * HIDDEN).view(2, HIDDEN)).clone() for _ in range(2)]

    model = offloaded(Model(layer), nvme)
    assert _equal(run(Model(layer)), run(model))
    zo.close(model)


@pytest.mark.parametrize("layer", [Dequantized, Kept])
def test_an_exception_leaves_no_trace(layer: Callable[..., Any], nvme: Path) -> None:
    """One in forward, and one in backward when two blocks of four are done."""

    def fail(*_: Any) -> None:
        raise ValueError("broken off")

    model = offloaded(Model(layer), nvme)
    x = torch.randn(2, 8, HIDDEN)
    handle = model.blocks[2].register_forward_hook(fail)
    with pytest.raises(ValueError, match="broken off"):
        model(x)
    handle.remove()
    loss = model(x).square().mean()
    hook = model.blocks[1].down.weight.register_hook(fail)
    with pytest.raises(ValueError, match="broken off"):
        loss.backward()
    hook.remove()
    del loss
    with pytest.warns(UserWarning, match="was left by an exception"):
        found = train(model)
    assert _equal(train(Model(layer)), found)
    zo.close(model)


@pytest.mark.parametrize("layer", [Dequantized, Kept])
def test_micro_batches_in_turns(layer: Callable[..., Any], nvme: Path) -> None:
    batches = [torch.linspace(-1, 1, 2 * HIDDEN).view(2, HIDDEN) * scale for scale in (1.0, 2.0)]

    def loss_of(model: Model, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        return loss

    plain = Model(layer)
    for x in batches:
        loss_of(plain, x).backward()
    expected = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    model = offloaded(Model(layer), nvme)
    zo.accumulate(model, batches, loss_of)
    with zo.gathered(model, kind="grads") as grads:
        assert all(torch.equal(grads[name], grad) for name, grad in expected.items())
    zo.close(model)


def test_what_code_may_ask_of_values(nvme: Path) -> None:
    """Copies, files, addresses and changes have the values of now; gradients those of the change."""

    class Asks(Dequantized):
        asked: list[bool] = []

        def forward(self, x: Tensor) -> Tensor:
            values = self.weight.to(x.dtype) * self.scale
            file = io.BytesIO()
            torch.save(values, file)
            file.seek(0)
            copy = torch.load(file)
            before = values.clone() + 0
            address = values.data_ptr()
            values.mul_(2)
            values[0] = 0
            values.data[1] = 0
            again = torch.from_numpy(values.detach().numpy())
            Asks.asked += [
                isinstance(values, Tensor),
                type(copy) is Tensor and torch.equal(copy, before),
                values.data_ptr() == address == again.data_ptr(),
                torch.equal(again[2:], before[2:] * 2) and not again[:2].any(),
            ]
            return F.linear(x, values)

    expected = train(Model(Asks))
    model = offloaded(Model(Asks), nvme)
    assert _equal(expected, train(model))
    assert all(Asks.asked)
    zo.close(model)


def test_compiled_blocks(nvme: Path) -> None:
    model = offloaded(Model(Dequantized), nvme)
    for block in model.blocks:
        block.compile(backend="eager")
    assert _equal(train(Model(Dequantized)), train(model))
    zo.close(model)


@pytest.mark.parametrize("how", ["data", "numpy"])
def test_changes_that_torch_does_not_count(how: str, nvme: Path) -> None:
    class Changes(Dequantized):
        def forward(self, x: Tensor) -> Tensor:
            values = self.weight.to(x.dtype) * self.scale
            if how == "data":
                values.data.mul_(2)
            else:
                values.detach().numpy()[0] = 0
            return F.linear(x, values)

    model = offloaded(Model(Changes), nvme)
    assert _equal(train(Model(Changes), steps=3), train(model, steps=3))
    zo.close(model)
