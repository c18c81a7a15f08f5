"""Reading an away parameter: inside the model's forward or backward it is fetched, outside it is copied."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import NARROW, WIDE, TinyLM, build, tokens_of
from tests.helpers.reference import placed, read_masters
from tests.helpers.twins import assert_same, train

Model = partial(TinyLM, WIDE)


@pytest.fixture
def away(nvme_config: zo.OffloadConfig) -> TinyLM:
    model = build(Model)
    zo.offload(model, nvme_config)
    assert isinstance(model, TinyLM)
    return model


class Penalized(TinyLM):
    """The loss reads parameters of every block, in the root's own forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        penalty = sum(block.up.weight.square().mean() + block.down.bias.sum() for block in self.blocks)
        return super().forward(tokens) + penalty


class Custom(torch.autograd.Function):
    """Keeps the parameter itself, not a saved tensor, until backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return grad @ ctx.weight, grad.flatten(0, 1).t() @ x.flatten(0, 1)


class KeepsParameter(TinyLM):
    def run_blocks(self, x: Tensor) -> Tensor:
        x = super().run_blocks(x)
        for block in self.blocks:
            x = x + Custom.apply(x, block.up.weight)[..., :1]
        return x


@pytest.mark.parametrize("model", [Penalized, KeepsParameter])
def test_a_touch_inside_forward_fetches(model: type[TinyLM], config: zo.OffloadConfig) -> None:
    def script(twin: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        yield from train(twin, optimizer, range(5))

    # A unit that is touched in backward stays until its end: KeepsParameter needs all blocks at once.
    roomy = config.to_dict() | ({"device_memory": "16MiB"} if config.nvme_dirs else {})
    assert_same(script, partial(model, WIDE), zo.OffloadConfig.from_dict(roomy))


class Divides(TinyLM):
    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert torch.equal(x / block.norm.bias, x / block.norm.bias.detach().clone())
        return super().run_blocks(x)


def test_an_operator_with_a_parameter_on_its_right_has_the_same_bits(fp32_config: zo.OffloadConfig) -> None:
    """Python asks the class of the right side first if it has the reflected operator: in torch x times a reciprocal."""
    model = build(partial(Divides, NARROW))
    with torch.no_grad():
        for block in model.blocks:
            block.norm.bias.uniform_(0.1, 3)
    zo.offload(model, fp32_config)
    model(tokens_of(0)).backward()


def test_a_touch_in_a_submodule_called_alone(fp32_config: zo.OffloadConfig) -> None:
    plain, model = build(Model), zo.offload(build(Model), fp32_config)
    x = torch.randn(2, 5, WIDE)
    assert torch.equal(model.blocks[1](x), plain.blocks[1](x))
    loss = model.blocks[1](x).square().sum()
    loss.backward()
    plain.blocks[1](x).square().sum().backward()
    expected = {f"blocks.1.{name}": p.grad for name, p in plain.blocks[1].named_parameters()}
    with zo.gathered(model, kind="grads") as grads:
        assert set(grads) == set(expected)
        assert all(torch.equal(grads[name], grad) for name, grad in expected.items())


READS = {
    "add": lambda p: p + 1,
    "item": lambda p: p.flatten()[0].item(),
    "sum": lambda p: p.sum(),
    "clone": lambda p: p.clone(),
    "numpy": lambda p: p.detach().numpy(),
    "data": lambda p: p.data.sum(),
    "tolist": lambda p: p.tolist(),
    "matmul": lambda p: torch.matmul(p, p.t()),
    "out": lambda p: torch.add(torch.ones(p.shape), 1, out=p),
    "in_place": lambda p: p.add_(1),
    "set_data": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "set_item": lambda p: p.__setitem__(0, 1.0),
    "index": lambda p: p[0].clone(),
    "iterate": lambda p: [float(row[0]) for row in p],
    "linear": lambda p: nn.functional.linear(torch.ones(1, WIDE), p),
    "write to data": lambda p: p.data.zero_(),
    "write to a view": lambda p: p.t()[0].fill_(1.0),
    "second": lambda p: torch.ones(p.shape) + p,
    "in a list": lambda p: torch.cat([torch.ones(1, WIDE), p]),
    "by keyword": lambda p: torch.add(torch.ones(1), other=p),
    "init": lambda p: nn.init.normal_(p),
    "foreach": lambda p: torch._foreach_norm([p]),
    "to": lambda p: p.to(torch.float64),
    "bool": lambda p: bool(p[0, 0]),
}


def described(result: Any) -> str:
    """Without the name of its node in the graph, and of its class."""
    return f"{result.tolist()} {result.requires_grad}" if isinstance(result, Tensor) else str(result)


@pytest.mark.parametrize("has_graph", [False, True])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_touch_outside_of_forward_is_that_of_a_plain_parameter(tier: str, has_graph: bool, nvme: Path) -> None:
    """The same results, values after it, and errors. The rest of a program's reads and writes: test_between_steps.py"""
    place = (tier, "cpu", tier)
    model, plain = zo.offload(build(Model), placed("fp32", place, nvme if tier == "nvme" else None)), build(Model)
    for each in (model, plain):
        each(tokens_of(0)).backward()
    param, twin = model.blocks[0].up.weight, plain.blocks[0].up.weight
    for name, touch in READS.items():
        found = []
        for each in (param, twin):
            torch.manual_seed(0)
            try:
                with torch.set_grad_enabled(has_graph):
                    found.append(touch(each))
            except (RuntimeError, zo.ZeroOffloadError) as error:
                found.append(error)
        first, second = found
        assert first is param or described(first) == described(second), name
        assert torch.equal(param.detach().clone(), twin.detach()), name


def test_a_resident_parameter_read_after_step_is_the_new_one(nvme: Path) -> None:
    model = zo.offload(build(Model), placed("fp32", ("cpu", "cpu", "nvme"), nvme))
    list(train(model, zo.AdamW(model.parameters(), lr=0.1), range(3)))
    now = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert all(torch.equal(now[name], master) for name, master in read_masters(model).items())


def test_gathered_reads_what_training_left(config: zo.OffloadConfig) -> None:
    model = zo.offload(build(Model), config)
    list(train(model, zo.AdamW(model.parameters()), range(2)))
    masters = read_masters(model)
    with zo.gathered(model.blocks[1]):
        for name, param in model.blocks[1].named_parameters():
            half = param.detach().float()
            assert torch.allclose(half, masters[f"blocks.1.{name}"], rtol=2**-7)
