"""Runs of before a unit's few trained parameters were a unit of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from zero_offload.plan.model_spec import UnitSpec

DIM = 64


class Block(nn.Module):
    """A frozen layer with an adapter, and a frozen norm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.inner, self.outer = nn.Linear(DIM, 4, bias=False), nn.Linear(4, DIM, bias=False)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(torch.relu(self.up(normed))) + self.outer(self.inner(normed))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        for name, param in self.named_parameters():
            param.requires_grad_("inner" in name or "outer" in name)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def opened(run: Path, existing: str, precision: Any) -> tuple[nn.Module, zo.AdamW]:
    torch.manual_seed(0)
    model = Adapted()
    zo.offload(model, zo.OffloadConfig(params="nvme", nvme=str(run), existing=existing, precision=precision))
    return model, zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def steps(model: nn.Module, optimizer: zo.AdamW, first: int, last: int) -> list[float]:
    losses = []
    for seed in range(first, last):
        loss = model(torch.randn(8, DIM, generator=torch.Generator().manual_seed(seed))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        zo.commit(model, optimizer)
        losses.append(loss.item())
    return losses


def write_as_before(folder: Path, precision: Any) -> list[float]:
    """A run and a checkpoint of three steps, whose units have no parts; returns the losses of six."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitSpec, "parts", lambda unit: (unit,))
        model, optimizer = opened(folder / "run", "discard", precision)
        losses = steps(model, optimizer, 0, 3)
        zo.save_checkpoint(model, optimizer, folder / "copy")
        zo.close(model)
        model, optimizer = opened(folder / "whole", "discard", precision)
        whole = steps(model, optimizer, 0, 6)
        zo.close(model)
    assert whole[:3] == losses
    return whole


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_frozen_parameters_of_one_dtype_go_on_with_the_same_losses(precision: str, tmp_path: Path) -> None:
    whole = write_as_before(tmp_path, precision)
    model, optimizer = opened(tmp_path / "run", "resume", precision)
    assert zo.resume(model, optimizer) is not None
    assert steps(model, optimizer, 3, 6) == whole[3:]
    zo.close(model)
    model, optimizer = opened(tmp_path / "other", "discard", precision)
    zo.load_checkpoint(model, optimizer, tmp_path / "copy")
    assert steps(model, optimizer, 3, 6) == whole[3:]
    zo.close(model)


def test_frozen_parameters_of_several_dtypes_say_what_to_do(tmp_path: Path) -> None:
    precision = zo.Precision(compute="bf16", modules={"blocks.*.norm": "fp32"})
    write_as_before(tmp_path, precision)
    with pytest.raises(zo.CheckpointError, match="in other units, from 'blocks.0.norm.weight' on"):
        opened(tmp_path / "run", "resume", precision)
    model, optimizer = opened(tmp_path / "other", "discard", precision)
    with pytest.raises(zo.CheckpointError, match="in other units, from 'blocks.0.norm.weight' on"):
        zo.load_checkpoint(model, optimizer, tmp_path / "copy")
    zo.close(model)
