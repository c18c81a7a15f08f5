"""Frozen quantized weights are tensors like others: they move, rest, come back and are written, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.failing import fail_at
from tests.helpers.models import WIDE, tokens_of
from tests.helpers.pairwise import in_pairs
from tests.helpers.quantized import KINDS, Bytes, Packed, Scaled, inner_tensors, quantized_lm
from zero_offload.model import move_in
from zero_offload.plan.dtypes import resolve
from zero_offload.plan.layout import make_layout
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.plan.quantized import offloaded_tensors
from zero_offload.standins.owners import owner_of

ON_DISK: dict[str, Any] = {"params": "nvme", "optimizer": "nvme"}


def losses_of(model: nn.Module, steps: range = range(3)) -> list[float]:
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    return list(trained(model, optimizer, steps))


def trained(model: nn.Module, optimizer: zo.AdamW, steps: range) -> Any:
    for step in steps:
        loss = model(tokens_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def config_of(where: str, folder: Path, **changes: Any) -> zo.OffloadConfig:
    settings = {"precision": "fp32"} | (ON_DISK | {"nvme": folder} if where == "nvme" else {}) | changes
    return zo.OffloadConfig(**settings)


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(
        (ours[name].dtype, ours[name].stride()) == (theirs[name].dtype, theirs[name].stride())
        and torch.equal(
            ours[name].contiguous().view(-1).view(torch.uint8), theirs[name].contiguous().view(-1).view(torch.uint8)
        )
        for name in ours
    )


@in_pairs(kind=list(KINDS), where=["cpu", "nvme"], recompute=[False, True])
def test_training_gives_the_losses_of_the_model_in_memory(kind: str, where: str, recompute: bool, nvme: Path) -> None:
    plain, model = quantized_lm(kind, WIDE), quantized_lm(kind, WIDE)
    if recompute:
        zo.checkpoint(list(model.blocks))  # type: ignore[arg-type]
    expected = losses_of(plain)
    zo.offload(model, config_of(where, nvme, cpu_memory="68MiB" if where == "nvme" else None))
    assert losses_of(model) == expected
    assert same_bits(inner_tensors(model), inner_tensors(plain))
    zo.close(model)


@pytest.mark.parametrize("kind", KINDS)
def test_what_moves_keeps_its_dtype_and_its_strides(kind: str) -> None:
    """Everything but what is computed with: in bf16 scales stay what they are."""
    model = quantized_lm(kind)
    before = {name: (each.dtype, each.shape, each.stride()) for name, each in offloaded_tensors(model.blocks)}
    zo.offload(model, zo.OffloadConfig(precision="bf16", params="cpu"))
    after = {name: (each.dtype, each.shape, each.stride()) for name, each in offloaded_tensors(model.blocks)}
    assert before.keys() == after.keys()
    assert all(owner_of(tensor) is not None for _, tensor in offloaded_tensors(model))
    for name, (dtype, *lies) in before.items():
        is_computed_with = "norm" in name or name.endswith("bias")
        assert after[name] == (torch.bfloat16 if is_computed_with else dtype, *lies), name
    assert (kind == "buffers") == any(name.endswith("qweight") for name in after)
    zo.close(model)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts(kind: str, nvme: Path) -> None:
    plain, model = quantized_lm(kind), quantized_lm(kind)
    for tensor in inner_tensors(model).values():
        tensor.view(-1).view(torch.uint8).zero_() if tensor.is_contiguous() else tensor.zero_()
    zo.offload(model, config_of("nvme", nvme))
    assert not same_bits(inner_tensors(model), inner_tensors(plain))
    model.load_state_dict(plain.state_dict())
    assert same_bits(inner_tensors(model), inner_tensors(plain))
    if "subclass" in kind:
        plain_values = {
            name: tensor + 1 for name, tensor in quantized_lm("int8").state_dict().items() if "weight" in name
        }
        with pytest.raises(
            RuntimeError, match="blocks.0.up.weight.*is a Scaled and cannot take the values of a Tensor"
        ):
            model.load_state_dict(plain_values, strict=False)
        ours, theirs = (inner_tensors(each.blocks[0].up) for each in (model, plain))
        assert same_bits(ours, theirs)
    zo.close(model)


@pytest.mark.parametrize("kind", KINDS)
def test_gathered_shows_and_changes_the_tensors(kind: str, nvme: Path) -> None:
    plain, model = quantized_lm(kind), quantized_lm(kind)
    expected = dict(offloaded_tensors(plain))
    zo.offload(model, config_of("nvme", nvme))
    with zo.gathered(model) as values:
        assert all(torch.equal(values[name].float(), tensor.float()) for name, tensor in expected.items())
    with zo.gathered(model, mode="write") as values:
        for tensor in values.values():
            tensor.data.copy_(torch.ones(()))
    with zo.gathered(model) as values:
        assert all((tensor.float() == 1).all() for tensor in values.values())
    zo.close(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_and_a_checkpoint_loads(kind: str, nvme: Path, tmp_path: Path) -> None:
    """Into a model whose tensors have other values."""
    expected, before = losses_of(quantized_lm(kind), range(4)), inner_tensors(quantized_lm(kind))
    frozen = {name for name, tensor in before.items() if "values" in name or "scale" in name or "qweight" in name}

    def start(**changes: Any) -> tuple[nn.Module, zo.AdamW]:
        model = quantized_lm(kind)
        if changes:
            for name, tensor in inner_tensors(model).items():
                tensor.data.zero_() if name in frozen else None
        zo.offload(model, config_of("nvme", changes.pop("nvme", nvme), **changes))
        return model, zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)

    model, optimizer = start()
    found = list(trained(model, optimizer, range(2)))
    zo.commit(model, optimizer)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    zo.close(model)
    resumed, optimizer = start(existing="resume")
    assert zo.resume(resumed, optimizer) is not None
    assert found + list(trained(resumed, optimizer, range(2, 4))) == expected
    after = inner_tensors(resumed)
    assert same_bits({name: after[name] for name in frozen}, {name: before[name] for name in frozen})
    zo.close(resumed)
    loaded, optimizer = start(nvme=tmp_path / "other")
    zo.load_checkpoint(loaded, optimizer, tmp_path / "saved")
    assert found + list(trained(loaded, optimizer, range(2, 4))) == expected
    zo.close(loaded)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_offload_is_undone(kind: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = quantized_lm(kind), quantized_lm(kind)
    number = len(list(offloaded_tensors(model)))
    fail_at(monkeypatch, move_in, "prepare", 1, RuntimeError("injected"))
    with pytest.raises(RuntimeError, match="injected"):
        zo.offload(model, config_of("nvme", nvme))
    monkeypatch.undo()
    assert all(owner_of(tensor) is None for _, tensor in offloaded_tensors(model))
    assert same_bits(inner_tensors(model), inner_tensors(plain))
    assert len(list(offloaded_tensors(model))) == number
    assert losses_of(model) == losses_of(plain)
    zo.offload(model, config_of("nvme", nvme))
    zo.close(model)


def test_adopted_later(nvme: Path) -> None:
    model = quantized_lm("buffers")
    model.blocks[1].up = nn.Linear(32, 128)
    zo.offload(model, config_of("nvme", nvme))
    with zo.gathered(model.blocks[1].up):
        model.blocks[1].second = Packed(nn.Linear(32, 128))
        expected = model.blocks[1].second.qweight.clone()
    zo.offload(model)
    assert owner_of(model.blocks[1].second.qweight) is owner_of(model.norm.weight)
    assert torch.equal(model.state_dict()["blocks.1.second.qweight"], expected)
    zo.close(model)


def test_tables_that_layers_share_are_one_in_each() -> None:
    """One in all of them would be in one unit, for which every block would wait. A tied weight stays one."""
    table = torch.ones(4, 1)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4, bias=False)) for _ in range(3))
    for layer in layers:
        weight: Any = nn.Parameter(Scaled.of(torch.eye(4)), requires_grad=False)
        weight.scales_ = table
        layer[0].weight = weight
    layers[2][0].weight = layers[0][0].weight
    spec = ModelSpec.from_module(layers)
    names = {unit.name: [param.name for param in unit.params] for unit in spec.units}
    assert names == {str(i): [f"{i}.0.weight.values_", f"{i}.0.weight.scales_"] for i in range(2)}
    assert [point.units for point in spec.hook_points] == [(0,), (1,), (0,)]


def test_layouts_count_bytes_as_they_are() -> None:
    model = quantized_lm("fp8")
    layout = make_layout(ModelSpec.from_module(model), resolve(model, zo.OffloadConfig(precision="bf16")), 1)
    kinds = {(section.dtype, section.trainable) for unit in layout.units for section in unit.sections}
    assert kinds == {
        (torch.bfloat16, True),
        (torch.float8_e4m3fn, False),
        (torch.float32, False),
    }


@pytest.mark.parametrize("kind", ["subclass", "int8"])
def test_quantized_weights_are_not_trained(kind: str) -> None:
    model = quantized_lm(kind)
    if kind == "subclass":
        model.blocks[1].up.weight.requires_grad_(True)
        words = "blocks.1.up.weight is a Scaled that requires a gradient, and quantized weights are not trained"
        with pytest.raises(zo.ConfigError, match=words):
            zo.offload(model, zo.OffloadConfig())
        model = quantized_lm(kind)
    zo.offload(model, zo.OffloadConfig())
    with pytest.raises(zo.ConfigError, match=r"blocks\.1\.up\.weight\S* is a quantized weight, or belongs to one, and"):
        model.blocks[1].up.weight.requires_grad_(True)
    assert not model.blocks[1].up.weight.requires_grad
    zo.close(model)


class Odd(nn.Parameter):
    """A class of a library that is not known."""


def test_other_classes_are_refused() -> None:
    model = quantized_lm("int8")
    model.blocks[0].up.bias = Odd(torch.ones(128))
    with pytest.raises(zo.ConfigError, match="blocks.0.up.bias is a Odd; plain parameters, DTensors and quantized"):
        zo.offload(model, zo.OffloadConfig())


def test_scales_of_a_layer_that_is_not_quantized_are_computed_with() -> None:
    """By name alone nothing keeps its dtype."""
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_parameter("scale", nn.Parameter(torch.ones(4), requires_grad=False))
    spec = ModelSpec.from_module(model)
    assert not any(param.keeps_dtype for unit in spec.units for param in unit.params)
    quantized = ModelSpec.from_module(nn.Sequential(Bytes(nn.Linear(4, 4), torch.int8)))
    kept = {param.name: param.keeps_dtype for unit in quantized.units for param in unit.params}
    assert kept == {"0.weight": True, "0.weight_scale_inv": True, "0.bias": False}
    assert list(itertools.chain(*(unit.params for unit in spec.units)))
