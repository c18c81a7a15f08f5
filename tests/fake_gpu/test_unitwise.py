"""An optimizer of others over a model that a GPU computes has the bits of the host. States and masters rest anywhere
but in the device's memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import LATE, Policy
from tests.helpers.models import TinyLM, build, tokens_of

pytestmark = pytest.mark.usefixtures("late")

PLACEMENTS: list[tuple[Any, Any, Any]] = [
    ("device", "device", "cpu"),
    ("device", "cpu", "nvme"),
    ("cpu", "device", "cpu"),
    ("cpu", "cpu", {"cpu": 0.5, "nvme": 0.5}),
    ("nvme", "nvme", "nvme"),
]


def train(config: zo.OffloadConfig, steps: int) -> tuple[list[float], dict[str, Any]]:
    model: Any = build(lambda: TinyLM(num_blocks=3))
    model.blocks[1].up.requires_grad_(False)
    zo.offload(model, config)
    optimizer = zo.unitwise(torch.optim.NAdam(model.parameters(), 1e-2))
    zo.resume(model, optimizer)
    seen = []
    for step in range(steps):
        for micro in range(1 + step % 2):
            loss = model(tokens_of(10 * step + micro))
            loss.backward()
            seen.append(loss.item())
        seen.append(zo.clip_grad_norm_(model, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    with zo.gathered(model, kind="master") as masters:
        found = {name: value.to("cpu", copy=True) for name, value in masters.items()}
    for index, entry in optimizer.state_dict()["state"].items():
        found |= {f"{index} {name}": value for name, value in entry.items()}
    zo.close(model)
    return seen, found


@pytest.mark.parametrize(
    ("precision", "placement", "policy"),
    [*zip(itertools.cycle(["fp32", "bf16", "fp16"]), PLACEMENTS * 2, itertools.cycle(LATE))],
    ids=str,
)
def test_the_bits_of_the_host(precision: str, placement: Any, policy: Policy, tmp_path: Path) -> None:
    params, grads, optimizer = placement
    with device.on_host():
        expected = train(zo.OffloadConfig(precision=precision), 4)
    device.policy(policy, 1)
    config = zo.OffloadConfig(
        params=params, grads=grads, optimizer=optimizer, precision=precision, nvme=tmp_path, durability="scratch"
    )
    seen, found = train(config, 4)
    assert seen == expected[0]
    assert [name for name, value in expected[1].items() if not torch.equal(found[name], value)] == []


def test_states_in_the_devices_memory_are_refused() -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(params="device", optimizer="device"))
    with pytest.raises(zo.ConfigError, match='states rest on the GPU .* place them on "cpu" or "nvme"'):
        zo.unitwise(torch.optim.NAdam(model.parameters()))
    zo.close(model)
