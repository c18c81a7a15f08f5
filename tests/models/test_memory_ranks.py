"""Bytes of each rank at every stage: what rests on a tier is the plan's figure to the byte, what is in flight below it.

Sizes are multiples of a frame however they are divided, so that nothing is rounded up.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.pairwise import full
from tests.helpers.ranks import RankPools
from zero_offload.base.types import STAGES, Tier
from zero_offload.model.api import runtime_of

NARROW, BROAD = 1024, 6144
"""Their product in fp32 is 24 MiB: twelve frames."""


class TwoUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = [(NARROW, BROAD), (BROAD, NARROW)]
        self.blocks = nn.ModuleList(nn.Linear(*shape, bias=False) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.blocks[0].weight.device)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def measure(rank: int, world_size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Two steps of two micro-batches, so that sums of gradients are in fp32 as the plan of several ranks has them."""
    torch.manual_seed(0)
    model, config = TwoUnits(), zo.OffloadConfig(**settings)
    plan = zo.plan(model, config)
    zo.offload(model, config)
    optimizer = zo.AdamW(model.parameters(), lr=1e-4)
    try:
        for _ in range(2):
            for _ in range(2):
                model(torch.ones(1, NARROW) + rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        runtime: Any = runtime_of(model)
        runtime.drain()
        arena = runtime.store.arena
        at_rest = {tier: sum(n for (place, _), n in plan.rest_bytes.items() if place is tier) for tier in Tier}
        return {
            "planned": at_rest,
            "in_flight": plan.staging_bytes,
            "memory": arena.allocated_bytes,
            "frames": arena.frame_bytes,
            "nvme": zo.stats(model).resident_bytes["nvme"],
        }
    finally:
        zo.close(model)


def check(stage: int, world_size: int, tier: str, pools: RankPools, nvme: Path) -> None:
    settings = {"params": tier, "grads": tier, "optimizer": tier, "stage": stage, "precision": "fp32"}
    for found in pools.of(world_size).succeed(measure, settings | ({"nvme": nvme} if tier == "nvme" else {})):
        # The update's staging is taken once and stays; frames are as many as were ever needed at once.
        assert found["memory"] == found["planned"][Tier.CPU] + found["in_flight"][Tier.CPU]
        assert found["nvme"] == found["planned"][Tier.NVME]
        assert 0 <= found["frames"] <= found["in_flight"][Tier.DEVICE]
        assert (found["planned"][Tier.NVME] > 0) == (tier == "nvme")


FEW = [(0, 2, "nvme"), (1, 2, "cpu"), (2, 2, "nvme"), (3, 2, "cpu"), (3, 2, "nvme"), (3, 1, "nvme"), (1, 3, "nvme")]
ALL = list(itertools.product(STAGES, (1, 2, 3, 4), ("cpu", "nvme")))


@pytest.mark.parametrize(
    ("stage", "world_size", "tier"),
    [*FEW, *(full(*each) for each in ALL if each not in FEW)],
)
def test_ranks_hold_what_the_plan_says(stage: int, world_size: int, tier: str, pools: RankPools, nvme: Path) -> None:
    check(stage, world_size, tier, pools, nvme)
