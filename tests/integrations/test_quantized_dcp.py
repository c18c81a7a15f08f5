"""torch.distributed.checkpoint, and state dicts on two ranks, of models that a library has quantized."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

import zero_offload as zo
from tests.helpers.quantized_models import BITSANDBYTES, TORCHAO, adapted_model, base_model
from tests.helpers.ranks import RankPools
from tests.helpers.tools import Tokens, on_ranks
from zero_offload.plan.quantized import slots

STEPS = 2


def opened(kind: str, where: str, nvme: str, *, is_blank: bool = False) -> tuple[nn.Module, zo.AdamW]:
    model = adapted_model("llama", kind).train()
    for slot in slots(model) if is_blank else ():
        if "nested_offset" not in slot.name:  # then records have the sizes that those of a checkpoint have
            slot.tensor.data.zero_()
    tiers: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "nvme": nvme} if where == "nvme" else {}
    zo.offload(model, zo.OffloadConfig(precision="fp32", existing="discard", **tiers))
    return model, zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def step(model: nn.Module, optimizer: zo.AdamW, number: int) -> float:
    loss = model(**{name: tensor[None] for name, tensor in Tokens()[number].items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def save(rank: int, world_size: int, kind: str, where: str, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = opened(kind, where, f"{folder}/saved")
    for number in range(STEPS):
        step(model, optimizer, number)
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=f"{folder}/dcp")
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()} if world_size == 1 else {}
    losses = [step(model, optimizer, number) for number in range(STEPS, 2 * STEPS)]
    zo.close(model)
    return losses, values


def load(rank: int, world_size: int, kind: str, where: str, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = opened(kind, where, f"{folder}/loaded", is_blank=True)
    step(model, optimizer, 0)  # an optimizer without states would load none
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()} if world_size == 1 else {}
    losses = [step(model, optimizer, number) for number in range(STEPS, 2 * STEPS)]
    zo.close(model)
    return losses, found


@pytest.mark.door(
    "bitsandbytes, torch",
    load="`dcp.load`",
    between="nf4, nf4 nested, fp4, int8, with LoRA",
    save="`dcp.save`",
    outcome="right",
)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_a_run_goes_on_from_it(kind: str, world_size: int, pools: RankPools, tmp_path: Path) -> None:
    where = "nvme" if kind != "fp4" else "cpu"
    saved = on_ranks(pools, world_size, save, kind, where, str(tmp_path))
    loaded = on_ranks(pools, world_size, load, kind, where, str(tmp_path))
    for (losses, values), (again, found) in zip(saved, loaded, strict=True):
        assert again == losses
        assert found.keys() == values.keys() and all(torch.equal(found[name], values[name]) for name in values)


def ask(rank: int, world_size: int, kind: str, path: str) -> list[str]:
    """The errors of dcp.save and dcp.load."""
    model, optimizer = opened(kind, "cpu", path)
    state, found = {"model": model.state_dict()}, []
    calls: list[Callable[[], Any]] = [
        lambda: dcp.save(state, checkpoint_id=f"{path}/{rank}", no_dist=True),
        lambda: dcp.load(state, checkpoint_id=f"{path}/plain", no_dist=True),
    ]
    for call in calls:
        with pytest.raises(CheckpointException) as caught:
            call()
        found.append(str(caught.value))
    step(model, optimizer, 0)
    zo.close(model)
    return found


@pytest.mark.door(
    "torchao, torch",
    load="`dcp.load`",
    between="torchao int8, fp8",
    save="`dcp.save`",
    outcome="refused: the weights",
    instead="`zo.save_checkpoint`, `zo.load_checkpoint`",
)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", TORCHAO)
def test_weights_of_torchao_are_one_error(kind: str, world_size: int, pools: RankPools, tmp_path: Path) -> None:
    plain = adapted_model("llama", kind)
    dcp.save({"model": plain.state_dict()}, checkpoint_id=f"{tmp_path}/plain", no_dist=True)
    for found in on_ranks(pools, world_size, ask, kind, str(tmp_path)):
        assert len(found) == 2 and all("several tensors" in each and "zo.save_checkpoint" in each for each in found)


@pytest.mark.parametrize("kind", TORCHAO)
def test_operations_on_a_state_dict_of_torchao(kind: str) -> None:
    """Copies have the values, and what changes a tensor of the state dict changes the model."""
    plain, model = base_model("llama", kind), base_model("llama", kind)
    name = "model.layers.1.mlp.up_proj.weight"
    expected = plain.state_dict()
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    found = model.state_dict()
    assert type(found[name]).__name__ == type(expected[name]).__name__
    copies = {key: value.clone() for key, value in found.items()}
    assert type(copies[name]) is type(expected[name])
    for made in (copies[name], copy.deepcopy(found)[name], found[name].cpu()):
        assert torch.equal(made.dequantize(), expected[name].dequantize())
    assert torch.equal(found[name].dequantize(), expected[name].dequantize())
    other = expected["model.layers.0.mlp.up_proj.weight"]
    for change in (lambda each: each.copy_(other), lambda each: each.detach().copy_(copies[name])):
        change(found[name])
        wanted = found[name].dequantize()
        assert torch.equal(model.state_dict()[name].dequantize(), wanted)
    assert torch.equal(wanted, expected[name].dequantize()) and not torch.equal(wanted, other.dequantize())
    model.load_state_dict(found)
    assigned = base_model("llama", kind)
    assigned.load_state_dict(model.state_dict(), assign=True)
    assert type(assigned.get_parameter(name)) is type(expected[name])
    assert torch.equal(assigned.get_parameter(name).dequantize(), wanted)
    with torch.no_grad():
        assigned.get_parameter(name).copy_(other)
    tokens = {key: tensor[None] for key, tensor in Tokens()[0].items()}
    assert torch.equal(model(**tokens).logits, plain(**tokens).logits)
    zo.close(model)


def ask_for_values(rank: int, world_size: int, kind: str) -> list[str]:
    model = base_model("llama", kind)
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    value, found = model.state_dict()["model.layers.1.mlp.up_proj.weight"], []
    calls: list[Callable[[], Any]] = [value.clone, lambda: value + 1]
    for call in calls:
        with pytest.raises(zo.ZeroOffloadError) as caught:
            call()
        found.append(str(caught.value))
    zo.close(model)
    return found


@pytest.mark.parametrize("kind", ["nf4", *TORCHAO])
def test_values_on_two_ranks_are_one_error(kind: str, pools: RankPools) -> None:
    for found in on_ranks(pools, 2, ask_for_values, kind):
        assert all("is divided over ranks" in each and "zo.gathered" in each for each in found)
