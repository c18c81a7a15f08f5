"""Parameters at rest on two ranks with GPUs: the bits of one rank with a GPU. No race."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.fake_gpu import device
from tests.fake_gpu.device import Policy
from tests.helpers.between_steps import program, run_on_rank
from tests.helpers.pairwise import in_turn
from tests.helpers.ranks import RankPools

TIERS: dict[str, dict[str, Any]] = {
    "device": {"params": "device", "grads": "device", "optimizer": "device"},
    "cpu": {"params": "cpu"},
    "nvme": {"params": "nvme", "optimizer": "nvme"},
}


def run_late(
    rank: int, world_size: int, policy: Policy, settings: dict[str, Any], calls: list[tuple[str, Any]]
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    device.reset(rank)
    device.policy(policy, rank)
    found = run_on_rank(rank, world_size, settings, calls)
    assert device.take_races() == []
    return found


@in_turn(
    stage=[3, 0, 1, 2],
    tier=[*TIERS],
    policy=[Policy.LATE, Policy.SIDE_LATE, Policy.RANDOM],
    seed=[50, 51, 52, 53],
)
def test_a_random_program(stage: int, tier: str, policy: Policy, seed: int, pools: RankPools, nvme: Path) -> None:
    calls = program(seed, 12, precision="bf16", num_ranks=2)
    settings = {"precision": "bf16", "stage": stage, **TIERS[tier]}
    expected, masters = run_late(0, 1, policy, settings | {"nvme": nvme / "alone"}, calls)
    pool = pools.of(2, on_device=True)
    for found, others in pool.succeed(run_late, policy, settings | {"nvme": nvme / "ranks"}, calls):
        assert found == expected and all(torch.equal(others[name], master) for name, master in masters.items())
