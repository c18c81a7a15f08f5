"""Two ranks, each with a fake GPU, of which one has less memory: parameters stay on both, or on neither; same bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.fake_gpu.test_residency import BLOCK_FRAMES, NUM_BLOCKS, make
from tests.helpers.models import WIDE
from tests.helpers.pairwise import full
from tests.helpers.ranks import RankPool, RankPools
from zero_offload.base.types import FRAME

TIGHT = 300 * 10**6
"""Enough for a step, but for less than half of the margin."""
IN_FLIGHT, WHOLE = 3 * BLOCK_FRAMES, NUM_BLOCKS * BLOCK_FRAMES + 1


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(2, on_device=True)


class Seen(NamedTuple):
    """Of one rank, step by step."""

    losses: list[float]
    limits: list[int]
    gathered: list[int]
    reason: str


def train(rank: int, world_size: int, seed: int, memory: dict[int, int], settings: dict[str, Any]) -> Seen:
    """Rank 1 has only so many bytes of memory from a step on. Before the third step both evaluate."""
    device.reset(rank)
    device.policy(Policy.RANDOM, seed)
    model = zo.offload(make(), zo.OffloadConfig(precision="fp32", **settings))
    optimizer, seen = zo.AdamW(model.parameters(), lr=1e-2), Seen([], [], [], "")
    whole = torch.fakegpu.mem_get_info()[1]  # type: ignore[attr-defined]
    for number in range(5):
        nbytes = next((nbytes for begin, nbytes in memory.items() if rank and begin <= number), whole)
        with device.memory_limit(nbytes, rank):
            batch = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(10 * number + rank)).to(TYPE)
            if number == 2:
                with torch.no_grad():
                    seen.losses.append(float(model(batch).sum()))
            loss = model(batch).square().mean()
            loss.backward()
            zo.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        stats = zo.stats(model)
        assert stats.device_params is not None
        seen.losses.append(float(loss.detach()))
        seen.limits.append(stats.device_params.limit // FRAME)
        seen.gathered.append(stats.communicated_bytes["gathered"])
    reason = stats.device_params.reason
    zo.close(model)
    assert device.take_races() == []
    return seen._replace(reason=reason)


@pytest.mark.parametrize("stage", [full(1), 3])
def test_ranks_keep_as_many_parameters(pool: RankPool, stage: int) -> None:
    few = pool.succeed(train, 0, {}, {"stage": stage, "device_memory": "64MiB"})
    both, never, later = (
        pool.succeed(train, seed, memory, {"stage": stage}) for seed, memory in enumerate([{}, {0: TIGHT}, {3: TIGHT}])
    )
    for found in (both, never, later):
        assert [seen.losses for seen in found] == [seen.losses for seen in few]
        assert found[0].limits == found[1].limits
        assert found[0].gathered == found[1].gathered
    assert both[0].limits == [IN_FLIGHT, *4 * [WHOLE]]
    assert never[0].limits == 5 * [IN_FLIGHT]
    assert later[0].limits == [IN_FLIGHT, WHOLE, WHOLE, IN_FLIGHT, IN_FLIGHT]
    assert later[0].reason == "another rank has room for no more"
    assert later[1].reason == "less memory is free than after the first step"
    if stage == 3:
        assert both[0].gathered[4] < later[0].gathered[4]
