"""Three and four ranks, each with a fake GPU of its own: collectives, stages, hybrid meshes, tensor parallelism."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fake_gpu.device import LATE, TYPE, Policy
from tests.fake_gpu.test_ranks import late
from tests.fake_gpu.test_ranks_elsewhere import on_host
from tests.helpers import ranks
from tests.helpers.pairwise import full, in_turn
from tests.helpers.ranks import Case, RankPools
from tests.parity import test_tensor_parallel as tensor_parallel
from tests.parity.test_meshes import HYBRID, STRIDED
from zero_offload.runtime.ranks.group import all_gather, reduce_scatter

SMALL = "6MiB"
"""Units come and go."""


def where(rank: int, world_size: int) -> list[Any]:
    """The device that a rank computes on, and what collectives bring there."""
    mine = torch.full((world_size,), float(rank + 1), device=TYPE)
    whole, part = torch.empty(world_size**2, device=TYPE), torch.empty(1, device=TYPE)
    works = [all_gather(whole, mine, async_op=True), reduce_scatter(part, mine, async_op=True)]
    for work in works:
        work.wait()
    dist.all_reduce(mine)
    return [mine.device.index, mine.tolist(), whole.tolist(), part.tolist()]


@pytest.mark.parametrize("size", [3, 4])
def test_each_rank_has_a_device(size: int, pools: RankPools) -> None:
    every = [float(rank + 1) for rank in range(size) for _ in range(size)]
    total = float(size * (size + 1) // 2)
    found = pools.of(size, on_device=True).succeed(late, Policy.LATE, 0, where)
    assert found == [[rank, [total] * size, every, [total]] for rank in range(size)]


@in_turn(size=[4, 3], stage=[3, 1, 2, 0], rests=["cpu", "device", "nvme"], policy=[Policy.RANDOM, *LATE[:3]])
def test_stages_train_to_the_bits_of_the_cpu(
    size: int, stage: int, rests: str, policy: Policy, pools: RankPools, nvme: Path
) -> None:
    case = Case({"stage": stage, "precision": "bf16"}, num_steps=2, max_norm=0.5)
    placed = dict.fromkeys(("params", "grads", "optimizer"), rests) | {"nvme": str(nvme)}
    placed |= {} if rests == "device" else {"device_memory": SMALL}
    on_device = replace(case, settings=case.settings | placed)
    found = pools.of(size, on_device=True).succeed(late, policy, 5, ranks.train, on_device)
    assert found == pools.of(size).succeed(ranks.train, case)


@in_turn(mesh=[HYBRID, STRIDED], stage=[3, 1])
def test_a_hybrid_mesh(mesh: Any, stage: int, pools: RankPools) -> None:
    """Two replicas of two shards."""
    case = Case({"stage": stage, "precision": "fp32"}, num_steps=2, max_norm=0.5, mesh=mesh, num_frozen=1)
    on_device = replace(case, settings=case.settings | {"device_memory": SMALL}, device_type=TYPE)
    found = pools.of(4, on_device=True).succeed(late, Policy.SIDE_LATE, 0, ranks.train, on_device)
    assert found == pools.of(4).succeed(ranks.train, case)


@pytest.mark.parametrize(("plan", "stage"), [("sequence", 3), full("matrices", 1)])
def test_tensor_parallel_ranks(plan: str, stage: int, pools: RankPools) -> None:
    """Two data-parallel ranks of two tensor-parallel ones each."""
    case = tensor_parallel.Case({"stage": stage, "precision": "fp32"}, plan, num_steps=2)
    pool = pools.of(4, on_device=True)
    found = pool.succeed(late, Policy.RANDOM, 3, tensor_parallel.train, replace(case, device_type=TYPE))
    assert found == pool.succeed(on_host, tensor_parallel.train, case)
