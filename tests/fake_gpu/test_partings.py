"""One rank, with a fake GPU, does something else than the others: all raise one error before an update."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.pairwise import in_turn
from tests.helpers.parting import ENOUGH_S, NUM_BLOCKS, WAYS, Outcome, Way, count_rounds, other_order_and_a_look, part
from tests.helpers.ranks import RankPool, RankPools


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(2, on_device=True)


def part_with(rank: int, world_size: int, way: Way | None, settings: dict[str, Any], args: dict[str, Any]) -> Outcome:
    return part(rank, world_size, way, settings, **args)


def check(found: list[Outcome], num_before: int) -> None:
    for each in found:
        assert each.error and each.error == found[0].error and each.seconds < ENOUGH_S
        assert each.num_steps == num_before


@in_turn(way=WAYS, grads=["cpu", "device"], num_before=[0, 3, 5], on=[1, 0])
def test_all_raise(way: Way, grads: str, num_before: int, on: int, pool: RankPool) -> None:
    """Steps are known after three."""
    settings = {"stage": 3, "precision": "bf16", "grads": grads, "device_memory": "8MiB"}
    check(pool.succeed(part_with, way, settings, {"num_before": num_before, "on": on, "by_sockets": True}), num_before)
    pool.renew()  # their collectives are aborted


@pytest.mark.parametrize("on", [1, 0])
def test_a_rank_that_waits_for_its_device_learns_it(on: int, pool: RankPool) -> None:
    args = {"num_before": 5, "on": on, "by_sockets": True}
    found = pool.succeed(part_with, other_order_and_a_look, {"stage": 3}, args)
    check(found, 5)
    assert "start all again" in found[0].error
    pool.renew()


@pytest.mark.parametrize(("stage", "most"), [(0, 3), (1, 4), (2, 4), (3, 4)])
def test_rounds_do_not_grow_with_units(stage: int, most: int, pool: RankPool) -> None:
    """The first steps are announced. One round of each is about the memory of devices."""
    assert NUM_BLOCKS > 3
    for counts in pool.succeed(count_rounds, {"stage": stage}, False):
        assert max(counts[2:]) <= most and counts[0] > 6, counts


def test_updates_in_backward_are_announced(pool: RankPool) -> None:
    """They would use what has come before all ranks compare."""
    for counts in pool.succeed(count_rounds, {"stage": 3, "overlap": "backward"}, False):
        assert min(counts) > 6
