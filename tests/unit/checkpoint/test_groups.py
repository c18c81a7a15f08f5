"""A generation belongs to param groups with the same members, not merely of the same size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zero_offload as zo


def build(path: Path, existing: str, order: tuple[int, int]) -> tuple[nn.Module, zo.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    zo.offload(model, zo.OffloadConfig(optimizer="nvme", nvme=path, existing=existing))
    params = list(model.parameters())
    groups = [{"params": [params[i]], "weight_decay": decay} for i, decay in zip(order, (0.1, 0.0), strict=True)]
    return model, zo.AdamW(groups)


def test_groups_of_equal_size_with_other_members_are_refused(tmp_path: Path) -> None:
    model, optimizer = build(tmp_path, "refuse", (0, 1))
    model(torch.ones(1, 8)).float().sum().backward()
    optimizer.step()
    zo.commit(model, optimizer)
    zo.close(model)

    model, optimizer = build(tmp_path, "resume", (1, 0))
    with pytest.raises(zo.CheckpointError, match=r"has 0\.weight in param group 0, where this optimizer has 1\.weight"):
        zo.resume(model, optimizer)
    zo.close(model)

    model, optimizer = build(tmp_path, "resume", (0, 1))
    resumed = zo.resume(model, optimizer)
    assert resumed is not None and resumed.step == 1
    zo.close(model)
