"""torch.distributed.checkpoint, and state dicts on two ranks, of models that a library has quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.quantized_models import BITSANDBYTES, adapted_model
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


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_a_run_goes_on_from_it(kind: str, world_size: int, pools: RankPools, tmp_path: Path) -> None:
    where = "nvme" if kind != "fp4" else "cpu"
    saved = on_ranks(pools, world_size, save, kind, where, str(tmp_path))
    loaded = on_ranks(pools, world_size, load, kind, where, str(tmp_path))
    for (losses, values), (again, found) in zip(saved, loaded, strict=True):
        assert again == losses
        assert found.keys() == values.keys() and all(torch.equal(found[name], values[name]) for name in values)
