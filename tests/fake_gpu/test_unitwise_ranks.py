"""Optimizers of others on ranks with GPUs: parts of parameters cross by the devices, with the bits of host ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils._pytree import tree_map

from tests.fake_gpu import device
from tests.fake_gpu.device import Policy
from tests.helpers.pairwise import in_turn
from tests.helpers.ranks import RankPools
from tests.parity.test_unitwise_ranks import Found, Train, assert_same, plain, run

PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {"params": "device", "grads": "device", "optimizer": "device"},
    "states elsewhere": {"params": "device", "grads": "cpu", "optimizer": "cpu"},
    "cpu": {"params": "cpu", "grads": "device", "optimizer": "cpu"},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
}


def run_late(
    rank: int, world_size: int, policy: Policy, name: str, settings: dict[str, Any], steps: range, how: Train
) -> Found:
    device.reset(rank)
    device.policy(policy, rank)
    found = run(rank, world_size, name, settings, steps, how)
    assert device.take_races() == []
    return found


@in_turn(
    num_ranks=[2, 3],
    stage=[3, 1, 2, 0],
    placement=[*PLACEMENTS],
    policy=[Policy.LATE, Policy.SIDE_LATE, Policy.RANDOM],
    name=["Muon and AdamW", "Adafactor", "Remembering", "Averaged"],
    precision=["fp32", "bf16"],
    how=[{}, {"micro_batches": 2, "max_norm": 0.5}],
)
def test_the_bits_of_host_ranks(
    num_ranks: int,
    stage: int,
    placement: str,
    policy: Policy,
    name: str,
    precision: str,
    how: Train,
    pools: RankPools,
    nvme: Path,
) -> None:
    check(num_ranks, name, {"precision": precision, "stage": stage}, placement, policy, how, pools, nvme)


@pytest.mark.parametrize(
    ("stage", "placement", "policy", "precision"),
    [
        (3, "device", Policy.LATE, "bf16"),
        (2, "cpu", Policy.RANDOM, "fp32"),
        (1, "nvme", Policy.SIDE_LATE, "fp16"),
        (3, "nvme", Policy.SIDE_EARLY, "fp32"),
        (3, "states elsewhere", Policy.SIDE_EARLY, "bf16"),
    ],
)
def test_products_of_matrices_on_the_gpus_of_ranks(
    stage: int, placement: str, policy: Policy, precision: str, pools: RankPools, nvme: Path
) -> None:
    how = {"micro_batches": 2, "max_norm": 0.5}
    check(2, "Muon and AdamW", {"precision": precision, "stage": stage}, placement, policy, how, pools, nvme)


def check(
    num_ranks: int,
    name: str,
    settings: dict[str, Any],
    placement: str,
    policy: Policy,
    how: Train,
    pools: RankPools,
    nvme: Path,
) -> None:
    on_host = settings | {"params": "cpu", "nvme": nvme / "host"}
    expected = pools.of(num_ranks).succeed(run, name, on_host, range(3), how)
    settings |= {**PLACEMENTS[placement], "nvme": nvme / "ranks"}
    found = pools.of(num_ranks, on_device=True).succeed(run_late, policy, name, settings, range(3), how)
    for (masters, states), (their_masters, their_states) in zip(found, expected, strict=True):
        assert_same(masters, their_masters)
        assert tree_map(plain, states) == tree_map(plain, their_states)
