"""The cost of a step for the host, by the device's own counts: a model of six blocks and a norm, 38 parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.fake_gpu import device
from tests.helpers.ranks import RankPool, RankPools
from zero_offload.model.api import runtime_of

WIDTH, BLOCKS = 64, 6
SECTIONS = BLOCKS + 1
WAITS = ("event_syncs", "stream_syncs", "device_syncs", "items")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.LayerNorm(WIDTH))


def launches_of_plain_backward() -> int:
    model = make().to(device.TYPE)
    for _ in range(2):
        loss = model(torch.ones(4, WIDTH, device=device.TYPE)).square().mean()
        with device.counting() as counts:
            loss.backward()
        model.zero_grad()
    return counts["launches"]


def train(backwards: int = 1, deferring: bool = False, **settings: Any) -> Iterator[dict[str, Counter[str]]]:
    """The counts of each part of a step, from the third one on; `deferring`, all backwards but the last are in
    `zo.no_sync`."""
    model = zo.offload(make(), zo.OffloadConfig(precision="fp32", **settings))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        found: dict[str, Counter[str]] = {}
        for number in range(backwards):
            loss = model(torch.ones(4, WIDTH, device=device.TYPE)).square().mean()
            sync = nullcontext() if number + 1 == backwards or not deferring else zo.no_sync(model)
            with sync, device.counting() as found[f"backward {number}"]:
                loss.backward()
        with device.counting() as found["clip"]:
            zo.clip_grad_norm_(model, 1.0)
        with device.counting() as found["step"]:
            optimizer.step()
            runtime = runtime_of(model)
            assert runtime is not None
            runtime.drain()
        optimizer.zero_grad()
        if step > 1:
            yield found
    zo.close(model)


def waits(counts: Counter[str]) -> int:
    return sum(counts[name] for name in WAITS)


@pytest.mark.parametrize("policy", [device.Policy.LATE, device.Policy.SIDE_LATE], ids=str)
@pytest.mark.parametrize("grads", ["cpu", "device"])
@pytest.mark.parametrize("params", ["cpu", "device"])
def test_a_section_leaves_as_one_and_the_host_does_not_wait(params: str, grads: str, policy: device.Policy) -> None:
    plain = launches_of_plain_backward()
    device.policy(policy, 0)
    for found in train(params=params, grads=grads):
        backward = found["backward 0"]
        assert waits(backward) == 0
        # A section's gradients, unless they stay, and its sums.
        assert backward["downloads"] == SECTIONS * (1 + (grads == "cpu"))
        assert backward["uploads"] <= BLOCKS
        # For each download and upload one, and one for what is launched before.
        assert backward["events"] <= backward["downloads"] + 2 * backward["uploads"] + 2 * SECTIONS
        assert backward["launches"] <= plain + 30 * SECTIONS
        assert waits(found["clip"]) == 1 and found["clip"]["launches"] == found["clip"]["downloads"] == 0
        assert found["step"]["downloads"] == SECTIONS * (grads == "device")


def test_a_second_backward_leaves_as_one_too() -> None:
    """The host adds it: staging has room for three sections."""
    device.policy(device.Policy.SIDE_EARLY, 0)
    for found in train(backwards=2):
        assert found["backward 1"]["downloads"] == SECTIONS
        assert found["backward 1"]["uploads"] <= BLOCKS
        assert waits(found["backward 1"]) <= 2 * SECTIONS


def test_gradients_for_a_drive_leave_as_one(nvme: Path) -> None:
    device.policy(device.Policy.SIDE_EARLY, 0)
    for found in train(grads="nvme", nvme=nvme, durability="scratch"):
        assert found["backward 0"]["downloads"] == SECTIONS
        assert waits(found["backward 0"]) <= SECTIONS


def test_an_update_on_the_device_is_one_launch_set_per_section() -> None:
    for found in train(params="device", grads="device", optimizer="device"):
        assert waits(found["backward 0"]) == 0 and found["step"]["downloads"] == 0
        assert found["step"]["launches"] <= 250 * SECTIONS


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(2, on_device=True)


def last_step(
    rank: int, world_size: int, backwards: int, settings: dict[str, Any]
) -> tuple[int, dict[str, Counter[str]]]:
    """The launches of a backward of plain tensors, and the counts of a rank's last step."""
    device.reset(rank)
    device.policy(device.Policy.SIDE_LATE, 0)
    plain = launches_of_plain_backward()
    *_, found = train(backwards, deferring=True, **settings)
    assert device.take_races() == []
    return plain, found


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_bring_a_section_into_their_sum_by_one_copy(pool: RankPool, stage: int) -> None:
    settings = {"stage": stage, "params": "device", "grads": "cpu"}
    for plain, found in pool.succeed(last_step, 1, settings):
        backward = found["backward 0"]
        # Per section: zeros for its gaps, the copy, and the sums of this rank's part.
        assert backward["launches"] <= plain + 13 * SECTIONS
        # One rank has no part of the last norm, and so no sums of it.
        assert 2 * SECTIONS - 1 <= backward["downloads"] <= 2 * SECTIONS and backward["uploads"] == 0


@pytest.mark.parametrize("grads", ["cpu", "device", "nvme"])
def test_ranks_bring_sums_of_earlier_backwards_up_by_one_copy(pool: RankPool, grads: str, nvme: Path) -> None:
    settings = {"stage": 2, "params": "device", "grads": grads, "nvme": str(nvme), "durability": "scratch"}
    for plain, found in pool.succeed(last_step, 2, settings):
        # Ranks of a machine say by pages which parameters they have gradients of.
        assert found["backward 1"]["uploads"] == SECTIONS * (grads != "device")
        assert found["backward 1"]["launches"] <= plain + 18 * SECTIONS
