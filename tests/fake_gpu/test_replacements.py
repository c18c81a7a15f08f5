"""Parameters in the place of gone ones of the same name, on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.helpers.models import build

PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {"params": "device", "grads": "device", "optimizer": "device"},
    "cpu": {"params": "cpu", "grads": "device", "device_memory": "8MiB"},
    "nvme": {"params": "nvme", "optimizer": "nvme", "device_memory": "8MiB"},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_name_that_comes_back_is_as_a_new_one(placement: str, nvme: Path) -> None:
    """As with names of their own: losses, and values after the last step."""
    runs = []
    for names in ("aaa", "abc"):
        device.policy(Policy.LATE)
        settings = {"nvme": nvme, "durability": "scratch"} | PLACEMENTS[placement]
        model: Any = build(lambda: nn.ModuleDict({"body": nn.Linear(40, 40)}))
        zo.offload(model, zo.OffloadConfig(precision="fp32", **settings))
        found = []
        for cycle, name in enumerate(names):
            for other in [each for each in model if each != "body"]:
                del model[other]
            torch.manual_seed(cycle)
            model[name] = nn.Linear(40, 7)
            zo.offload(model)
            optimizer = zo.AdamW(model.parameters(), lr=1e-2)
            for _ in range(2):
                loss = model[name](model["body"](torch.ones(3, 40, device=TYPE))).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.cpu())
        with zo.gathered(model):
            found += [param.detach().cpu().clone() for param in model.parameters()]
        assert device.take_races() == []
        runs.append(found)
        zo.close(model)
    assert all(map(torch.equal, *runs))
