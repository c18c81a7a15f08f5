"""An error in `zo.offload` when parameters are on the device already: they come back, the same objects."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.helpers.models import TinyLM, build, tokens_of
from zero_offload.runtime.units.unit import Unit

offload_module = importlib.import_module("zero_offload.model.offload")
move_in_module = importlib.import_module("zero_offload.model.move_in")


class FullError(zo.CapacityError):
    """Of the test's."""


def refusing(does: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Does what another function does, until it is called so often."""
    left = iter(range(calls - 1))

    def call(*args: Any, **settings: Any) -> Any:
        if next(left, None) is None:
            raise FullError("nothing is left")
        return does(*args, **settings)

    return call


@pytest.mark.parametrize(
    ("module", "name", "calls"),
    [
        (move_in_module, "_write_values", 3),  # the first two sections are there
        (move_in_module.MovedTensor, "become", 7),
        (offload_module, "ModelRuntime", 1),
        (Unit, "guard", 2),
        (offload_module, "trim_heap", 1),
    ],
)
def test_parameters_come_back_and_the_next_call_works(
    module: Any, name: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(TinyLM)
    before = {name: (param, param.detach().clone()) for name, param in model.named_parameters()}
    config = zo.OffloadConfig(params="cpu", optimizer="device", precision="fp32")
    device.policy(Policy.LATE)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, refusing(getattr(module, name), calls))
        with pytest.raises(FullError):
            zo.offload(model, config)
    for name, param in model.named_parameters():
        assert param is before[name][0] and param.device.type == "cpu" and type(param) is torch.nn.Parameter
        assert torch.equal(param, before[name][1])
    zo.offload(model, config)
    assert all(param is before[name][0] for name, param in model.named_parameters())
    loss = model(tokens_of(0).to(TYPE))
    loss.backward()
    assert loss.isfinite().item()
    zo.close(model)


def test_what_was_on_the_device_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters that a failed call was to adopt."""
    model: Any = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32"))
    model.late = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2)).to(TYPE)
    before = {name: param.detach().cpu() for name, param in model.late.named_parameters()}
    with monkeypatch.context() as patch:
        patch.setattr(move_in_module, "prepare", refusing(move_in_module.prepare, 0))
        with pytest.raises(FullError):
            zo.offload(model)
    for name, param in model.late.named_parameters():
        assert param.device.type == TYPE and torch.equal(param.detach().cpu(), before[name])
    zo.offload(model)
    for name, param in model.late.named_parameters():
        with zo.gathered(param):
            assert torch.equal(param.detach().cpu(), before[name])
    zo.close(model)
