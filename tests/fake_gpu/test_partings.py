"""One rank, with a fake GPU, does something else than the others: all raise one error before an update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.pairwise import in_turn
from tests.helpers.parting import ENOUGH_S, WAYS, Outcome, Way, part
from tests.helpers.ranks import RankPool, RankPools


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(2, on_device=True)


def part_with(rank: int, world_size: int, way: Way | None, settings: dict[str, Any], args: dict[str, Any]) -> Outcome:
    return part(rank, world_size, way, settings, **args)


@in_turn(way=WAYS, grads=["cpu", "device"], num_before=[0, 3], on=[1, 0])
def test_all_raise(way: Way, grads: str, num_before: int, on: int, pool: RankPool) -> None:
    settings = {"stage": 3, "precision": "bf16", "grads": grads, "device_memory": "8MiB"}
    args = {"num_before": num_before, "on": on}
    expected = pool.succeed(part_with, None, settings, args)
    found = pool.succeed(part_with, way, settings, args)
    for each, plain in zip(found, expected, strict=True):
        assert each.error and each.error == found[0].error and each.seconds < ENOUGH_S
        assert all(torch.equal(each.params[name], plain.params[name]) for name in plain.params)
