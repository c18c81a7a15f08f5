"""State dicts of an offloaded model and its optimizer hold all that a run goes on from, bit for bit, on one rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo

MAKERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda params: zo.AdamW(params, 1e-3),
    "Lion": lambda params: zo.Lion(params, 1e-3),
    "SGD": lambda params: zo.SGD(params, 0.1),
    "SGD momentum": lambda params: zo.SGD(params, 0.1, momentum=0.9, dampening=0.5),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, dtype: torch.dtype) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = model(x).float().square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def masters(model: nn.Module) -> dict[str, Tensor]:
    with zo.gathered(model, kind="master") as values:
        return {name: value.clone() for name, value in values.items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", zo.Precision(compute="bf16", states="compact")], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_another_model_goes_on_from_them(name: str, precision: Any) -> None:
    config = zo.OffloadConfig(precision=precision)
    dtype = torch.float16 if precision == "fp16" else torch.float32 if precision == "fp32" else torch.bfloat16
    model = zo.offload(make_model(), config)
    optimizer = MAKERS[name](model.parameters())
    train(model, optimizer, range(3), dtype)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    found = masters(model)
    other = zo.offload(make_model(), config)
    taken = MAKERS[name](other.parameters())
    other.load_state_dict(saved[0])
    taken.load_state_dict(saved[1])
    assert all(torch.equal(value, found[name]) for name, value in masters(other).items())
    if precision in ("fp32", "bf16", "fp16"):  # what is rounded at random depends on no more than seed and step
        assert train(other, taken, range(3, 6), dtype) == train(model, optimizer, range(3, 6), dtype)
        assert all(torch.equal(value, masters(model)[name]) for name, value in masters(other).items())


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_read_twice_is_read_anew(name: str) -> None:
    model = zo.offload(nn.Linear(8, 4, bias=False), zo.OffloadConfig(precision="bf16"))
    optimizer = MAKERS[name](model.parameters())
    train(model, optimizer, range(1), torch.bfloat16)
    before = optimizer.state_dict()["state"][0]
    train(model, optimizer, range(1, 2), torch.bfloat16)
    after = optimizer.state_dict()["state"][0]
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[each], after[each]) for each in before)


@pytest.mark.parametrize("away_first", [False, True], ids=["to offloaded", "to ordinary"])
def test_bf16_masters_go_between_ordinary_and_offloaded_parameters(away_first: bool) -> None:
    """Ordinary ones keep the same residual."""

    def start(away: bool) -> tuple[nn.Module, zo.AdamW]:
        model = make_model().bfloat16()
        if away:
            zo.offload(model, zo.OffloadConfig(precision="bf16"))
        return model, zo.AdamW(model.parameters(), 1e-3)

    model, optimizer = start(away_first)
    train(model, optimizer, range(3), torch.bfloat16)
    other, taken = start(not away_first)
    other.load_state_dict(model.state_dict())
    taken.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, taken):
        each.zero_grad()
    assert train(other, taken, range(3, 8), torch.bfloat16) == train(model, optimizer, range(3, 8), torch.bfloat16)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_order_that_rounds_masters_is_said(precision: str) -> None:
    """Masters would be rounded without a word."""
    model = zo.offload(make_model(), zo.OffloadConfig(precision=precision))
    optimizer = zo.AdamW(model.parameters())
    train(model, optimizer, range(3), torch.bfloat16 if precision == "bf16" else torch.float16)
    other = zo.offload(make_model(), zo.OffloadConfig(precision=precision))
    taken = zo.AdamW(other.parameters())
    taken.load_state_dict(optimizer.state_dict())
    with pytest.warns(UserWarning, match="Load the model's state dict first"):
        other.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken.load_state_dict(optimizer.state_dict())
        assert all(torch.equal(value, masters(model)[name]) for name, value in masters(other).items())
        train(other, taken, range(1), torch.bfloat16 if precision == "bf16" else torch.float16)
        other.load_state_dict(model.state_dict())


@pytest.mark.parametrize("looks", [False, True], ids=["stepped", "saved first"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MAKERS)
def test_states_of_steps_before_offload_are_kept(name: str, precision: str, looks: bool) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    runs = []
    for away in (False, True):
        model = make_model().to(dtype)
        optimizer = MAKERS[name](model.parameters())
        losses = train(model, optimizer, range(3), dtype)
        if away:
            before = copy.deepcopy(optimizer.state_dict()["state"])
            zo.offload(model, zo.OffloadConfig(precision=precision))
            if looks:
                after = optimizer.state_dict()["state"]
                assert all(torch.equal(after[i][each], before[i][each]) for i in before for each in before[i])
        runs.append(losses + train(model, optimizer, range(3, 8), dtype))
    assert runs[0] == runs[1]
