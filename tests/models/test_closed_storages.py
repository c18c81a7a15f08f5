"""Functions that torch shows to no class: of a parameter at rest they have its newest values, or raise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zero_offload as zo
from tests.helpers.models import TinyLM, build
from tests.helpers.reference import placed
from tests.helpers.twins import train
from zero_offload.base.threads import UnitUpdate
from zero_offload.model.api import runtime_of
from zero_offload.runtime.units.unit import UnitState
from zero_offload.storage.memory import access

RAISES = r"Cannot access data pointer of Storage that is invalid"


def by_data(param: Tensor) -> Tensor:
    other = torch.empty(0)
    other.data = param
    return other + 0


def by_set(param: Tensor) -> Tensor:
    other = torch.empty(0)
    return other.set_(param) + 0


def past_classes(param: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return param + 0


def by_capsule(param: Tensor) -> Tensor:
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(param)).clone()


def in_place(param: Tensor) -> Tensor:
    other = torch.empty(0)
    other.data = param
    return other.mul_(2) / 2


READS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": torch.tensor,
    "Tensor": lambda param: torch.Tensor(param) + 0,
    "data": by_data,
    "set_": by_set,
    "in place": in_place,
    "past classes": past_classes,
    "capsule": by_capsule,
    "asarray": lambda param: torch.asarray(param, copy=True),
    "new_tensor": lambda param: torch.zeros(1).new_tensor(param),
    "as_subclass": lambda param: Tensor.as_subclass(param, Tensor) + 0,
    "_make_subclass": lambda param: Tensor._make_subclass(Tensor, param) + 0,
    "sparse": lambda param: torch.sparse_coo_tensor(torch.arange(len(param))[None], param).to_dense(),
    "nested": lambda param: torch.nested.nested_tensor([param]).to_padded_tensor(0)[0],
    "vmap": lambda param: torch.vmap(lambda row: row * 1)(param),
}


def away(nvme: Path) -> nn.Module:
    return zo.offload(build(TinyLM), placed("fp32", ("nvme",) * 3, nvme))


def read(name: str, param: Tensor) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch recommends .clone()
        return READS[name](param)


@pytest.mark.parametrize("name", READS)
def test_memory_that_is_away_raises(name: str, nvme: Path) -> None:
    model = away(nvme)
    weight = model.blocks[0].up.weight
    assert all(unit.state is UnitState.AWAY for unit in runtime_of(model).units)
    with pytest.raises(RuntimeError, match=RAISES):
        read(name, weight)
    assert torch.equal(weight.detach().clone(), build(TinyLM).blocks[0].up.weight)
    zo.close(model)


def test_questions_about_memory_that_is_away(nvme: Path) -> None:
    """torch's C++ has no error for these: it ends the process."""
    model = away(nvme)
    weight = model.blocks[0].up.weight
    assert not weight.is_shared() and not weight.is_pinned()
    with FakeTensorMode() as mode, pytest.raises(zo.ZeroOffloadError, match=r"blocks\.0\.up\.weight"):
        mode.from_tensor(weight)
    zo.close(model)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("name", ["tensor", "data", "capsule"])
def test_values_that_are_here_are_the_newest(name: str, tier: str, nvme: Path) -> None:
    model, plain = zo.offload(build(TinyLM), placed("fp32", (tier,) * 3, nvme)), build(TinyLM)
    optimizers = zo.AdamW(model.parameters(), lr=1e-2), zo.AdamW(plain.parameters(), lr=1e-2)
    for seed in range(3):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            list(train(each, optimizer, [seed]))
        for (_, param), (_, twin) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            try:
                found = read(name, param)
            except RuntimeError as error:
                assert "is invalid" in str(error)
                param.detach()  # waits for the update where the parameter can be read in its place
                continue
            assert torch.equal(found, twin)
            del found
    zo.close(model)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_an_update_under_way_closes_the_memory_that_is_here(tier: str, nvme: Path) -> None:
    model = zo.offload(build(TinyLM), placed("fp32", (tier,) * 3, nvme))
    owner, weight = runtime_of(model), model.blocks[0].up.weight
    unit = owner.places[weight].unit
    owner.prefetcher.fetch_for_access(unit)
    expected = weight.detach().clone()
    assert torch.equal(read("tensor", weight), expected)
    update = UnitUpdate(owner.errors, owner.store.counters)
    unit.begin_update(update)
    with pytest.raises(RuntimeError, match=RAISES):
        read("tensor", weight)
    update.begin()
    update.complete()
    unit.wait_for_update()
    assert torch.equal(read("tensor", weight), expected)
    zo.close(model)


def test_a_tensor_that_is_given_the_memory_keeps_it_here(nvme: Path) -> None:
    """It shows the parameter, as in plain torch; the unit stays, as for any view."""
    model, plain, shown = away(nvme), build(TinyLM), []
    for each in (model, plain):
        other = torch.empty(0)

        def take(module: nn.Module, *_: Any, other: Tensor = other) -> None:
            other.data = module.up.weight.detach()

        each.blocks[0].register_forward_hook(take)
        optimizer = zo.AdamW(each.parameters(), lr=1e-2)
        for seed in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                list(train(each, optimizer, [seed]))
            shown.append(other.clone())
    assert all(map(torch.equal, shown[:3], shown[3:]))
    zo.close(model)


def test_a_torch_whose_flag_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is closed, and training is what it was."""
    monkeypatch.delattr(torch._C, "_set_throw_on_mutable_data_ptr")
    access.flags_at.cache_clear()
    try:
        model = zo.offload(build(TinyLM), zo.OffloadConfig(params="cpu", precision="fp32"))
        list(train(model, zo.SGD(model.parameters(), lr=0.1), range(2)))
        assert torch.equal(torch.Tensor(model.head.weight), model.head.weight.detach())
        zo.close(model)
    finally:
        access.flags_at.cache_clear()
