"""The storage of a parameter is its own on a device too, where its memory comes to another address in every use."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.fake_gpu.training import SOME, check
from tests.helpers.models import WIDE, StridedBlock, TinyLM, build
from tests.helpers.reference import Recipe
from zero_offload.hardware.accelerators import ACCELERATORS
from zero_offload.model.api import runtime_of
from zero_offload.runtime.units.unit import UnitState
from zero_offload.storage.memory import resizable
from zero_offload.storage.memory.exchange import by_bytes

Strided = partial(TinyLM, WIDE, 4, StridedBlock)
PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {"params": "device", "grads": "device", "optimizer": "device"},
    "cpu": {"params": "cpu", "grads": "device", "device_memory": "8MiB"},
    "nvme": {"params": "nvme", "optimizer": "nvme", "device_memory": "8MiB"},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_forward_with_strides_of_its_own(placement: str, nvme: Path) -> None:
    check(Recipe(Strided, "fp32", 3), SOME, nvme=nvme, durability="scratch", **PLACEMENTS[placement])


def leaving(nvme: Path) -> nn.Module:
    model = build(lambda: nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(8))))
    return zo.offload(model, zo.OffloadConfig(precision="fp32", nvme=nvme, durability="scratch", **PLACEMENTS["nvme"]))


def test_storages_go_with_the_memory_and_come_with_it(nvme: Path) -> None:
    """The same objects, of no bytes while their unit is away."""
    device.policy(Policy.LATE)
    model, seen, departed = leaving(nvme), set(), set()
    units = runtime_of(model).units

    def ask(module: nn.Module, inputs: Any, output: Any) -> None:
        storage = module.weight.untyped_storage()
        seen.add(storage._cdata)
        assert (module.weight.storage_offset(), storage.nbytes()) == (0, module.weight.nbytes)
        away = [each for each in units if each.state is UnitState.AWAY]
        departed.update(each.name for each in away)
        with torch._C.DisableTorchFunctionSubclass():
            assert all(param.untyped_storage().nbytes() == 0 for unit in away for param in unit.params)

    for layer in model:
        layer.register_forward_hook(ask)
    for _ in range(3):
        model(torch.ones(1, WIDE, device=TYPE)).sum().backward()
    assert len(seen) == len(departed) == len(model) and device.take_races() == []
    zo.close(model)


def test_a_view_from_a_forward_outlives_the_model(nvme: Path) -> None:
    device.policy(Policy.LATE)
    model, kept = leaving(nvme), list[Tensor]()
    with zo.gathered(model[2]):
        expected = model[2].weight.cpu().clone()
    model[2].register_forward_hook(lambda module, inputs, output: kept.append(module.weight.detach()))
    with torch.no_grad():
        model(torch.ones(1, WIDE, device=TYPE))
    nbytes = {section.flat.nbytes for unit in runtime_of(model).units for section in unit.sections}
    del model
    gc.collect()
    others = [torch.full((each // 4,), 7.0, device=TYPE) for each in nbytes for _ in range(8)]
    assert torch.equal(kept[0].cpu(), expected) and others


def test_a_gradient_at_rest_shares_no_storage_with_its_neighbours(nvme: Path) -> None:
    device.policy(Policy.LATE)
    model = zo.offload(build(Strided), zo.OffloadConfig(precision="fp32", **PLACEMENTS["device"]))
    model(torch.ones(2, 9, dtype=torch.long, device=TYPE)).backward()
    for name, param in model.named_parameters():
        assert (param.grad.storage_offset(), param.grad.untyped_storage().nbytes()) == (0, param.grad.nbytes), name
    zo.close(model)


def test_without_an_exchange_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of a section share the storage of its buffer, and train to the same bits."""
    monkeypatch.setattr(resizable, "exchanger", lambda: None)
    check(Recipe(partial(TinyLM, WIDE, 4), "fp32", 3), SOME[:1], device_memory="28MiB")


def test_a_torch_without_a_function_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before 2.13: each parameter has its storage, and it trains to the same bits."""
    monkeypatch.setattr(resizable, "exchanger", by_bytes)
    check(Recipe(Strided, "fp32", 3), SOME[:1], device_memory="28MiB")
    check(Recipe(partial(TinyLM, WIDE, 4), "bf16", 3), SOME[:1], device_memory="28MiB")


@pytest.fixture
def own_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NPUs, storages of capsules are not the device's own."""
    monkeypatch.setitem(ACCELERATORS, TYPE, replace(ACCELERATORS[TYPE], has_aliases=False))


@pytest.mark.usefixtures("own_storages")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_device_with_storages_of_its_own(placement: str, nvme: Path) -> None:
    """No parameter reads its neighbours."""
    check(Recipe(Strided, "fp32", 3), SOME[:2], nvme=nvme, durability="scratch", **PLACEMENTS[placement])
    test_storages_go_with_the_memory_and_come_with_it(nvme / "leaves")
    test_a_view_from_a_forward_outlives_the_model(nvme / "outlives")


def test_memory_that_is_away_raises(nvme: Path) -> None:
    """A storage of no bytes would be read at address 0."""
    device.policy(Policy.LATE)
    model, plain = leaving(nvme), build(lambda: nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(8))))
    for _ in range(2):
        model(torch.ones(1, WIDE, device=TYPE)).sum().backward()
        away = [unit for unit in runtime_of(model).units if unit.state is UnitState.AWAY]
        assert away
        for param in (param for unit in away for param in unit.params):
            with pytest.raises(RuntimeError, match="is invalid"), torch.no_grad():
                torch.tensor(param)
    for param, twin in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.detach().cpu(), twin)
    zo.close(model)
