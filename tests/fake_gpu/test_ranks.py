"""Two ranks, each with a fake GPU: collectives of device tensors, and stages on every placement."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.helpers import ranks
from tests.helpers.pairwise import Row, full, label, pairwise
from tests.helpers.ranks import Case, Outcome, RankPool, RankPools
from zero_offload.runtime.ranks.group import all_gather, reduce_scatter


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(2, on_device=True)


def late(rank: int, world_size: int, policy: Policy, seed: int, job: Any, *args: Any) -> Any:
    """A job under a policy, which must leave no race."""
    device.reset(rank)
    device.policy(policy, seed)
    result = job(rank, world_size, *args)
    races = device.take_races()
    assert races == [], races
    return result


def collectives(rank: int, world_size: int) -> list[Any]:
    """Each once, with compute before and after that does not wait for it by itself."""
    mine = torch.full((4,), float(rank + 1), device=TYPE) * 2
    works: list[Any] = []
    total, whole, part, root = mine.clone(), torch.empty(8, device=TYPE), torch.empty(2, device=TYPE), mine.clone()
    works.append(dist.all_reduce(total, async_op=True))
    works.append(all_gather(whole, mine, async_op=True))
    works.append(reduce_scatter(part, mine, async_op=True))
    works.append(dist.broadcast(root, 1, async_op=True))
    beside = mine + 1
    for work in works:
        work.wait()
    listed = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(listed, mine)
    dist.barrier()
    third = torch.full((1,), 1 / 3, dtype=torch.float64, device=TYPE)
    dist.all_reduce(third)
    return [each.tolist() for each in (total + 0, whole + 0, part + 0, root + 0, beside, third, *listed)]


SCHEDULES = [(Policy.EAGER, 0), (Policy.LATE, 0), (Policy.SIDE_EARLY, 0), (Policy.SIDE_LATE, 0), (Policy.RANDOM, 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_collectives_on_the_device(pool: RankPool, schedule: tuple[Policy, int]) -> None:
    found = pool.succeed(late, *schedule, collectives)
    for rank, (total, whole, part, root, beside, third, *listed) in enumerate(found):
        assert third == [2 / 3]
        assert total == [6.0] * 4
        assert whole == [2.0] * 4 + [4.0] * 4
        assert part == [6.0] * 2
        assert root == [4.0] * 4
        assert beside == [2.0 * (rank + 1) + 1] * 4
        assert listed == [[2.0] * 4, [4.0] * 4]


def without_wait(rank: int, world_size: int) -> list[str]:
    device.reset(rank)
    device.policy(Policy.LATE)
    mine = torch.ones(4, device=TYPE)
    work = dist.all_reduce(mine, async_op=True)
    mine.sum()
    work.wait()
    return device.take_races()


def test_a_collective_that_nothing_waits_for_is_a_race(pool: RankPool) -> None:
    for races in pool.succeed(without_wait):
        assert any("nothing orders it after collective writes" in race for race in races), races


def on_both_devices(rank: int, world_size: int) -> list[float]:
    """A program may have used another device before it chooses its own."""
    found = []
    for index in range(2):
        with device.current(index):
            total = torch.full((4,), float(rank + 1), device=TYPE) * 2
            dist.all_reduce(total)
            found.append((total * 1).sum().item())
    return found


def test_a_group_has_a_stream_on_each_device(pool: RankPool) -> None:
    pool.renew()
    assert pool.succeed(late, Policy.LATE, 0, on_both_devices) == 2 * [[24.0, 24.0]]


# Training

TIERS: dict[str, Any] = {"device": "device", "cpu": "cpu", "nvme": "nvme", "mixed": {"device": 0.5, "cpu": 0.5}}
MATRIX = {
    "stage": [1, 2, 3],
    "params": list(TIERS),
    "grads": list(TIERS),
    "optimizer": list(TIERS),
    "precision": ["fp32", "bf16", "fp16"],
    "schedule": SCHEDULES[1:],
    "job": [(1, None), (2, 0.5)],
    "how": ["plain", "no_sync", "by_unit"],
}


def case_of(settings: dict[str, Any], job: tuple[int, float | None], how: str) -> Case:
    return Case(settings, 3, *job, no_sync=how == "no_sync", by_unit=how == "by_unit")


@pytest.fixture(scope="module")
def on_cpu(pools: RankPools) -> Callable[..., list[Outcome]]:
    """Outcomes of ranks on the CPU for the same case, whose states rest in memory."""

    @functools.cache
    def outcomes(stage: int, precision: str, job: tuple[int, float | None], how: str) -> list[Outcome]:
        return pools.of(2).succeed(ranks.train, case_of({"stage": stage, "precision": precision}, job, how))

    return outcomes


@pytest.mark.parametrize("row", [full(row) if i % 2 else row for i, row in enumerate(pairwise(MATRIX))], ids=label)
def test_stages_train_to_the_bits_of_the_cpu(
    pool: RankPool, on_cpu: Callable[..., list[Outcome]], row: Row, nvme: Path
) -> None:
    tiers = {kind: TIERS[row[kind]] for kind in ("params", "grads", "optimizer")}
    settings = {**tiers, "stage": row["stage"], "precision": row["precision"], "nvme": str(nvme)}
    found = pool.succeed(late, *row["schedule"], ranks.train, case_of(settings, row["job"], row["how"]))
    assert found == on_cpu(row["stage"], row["precision"], row["job"], row["how"])
