"""One rank does something else than the others: all raise one error, none waits, and no value is wrong afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.pairwise import full, in_turn
from tests.helpers.parting import (
    ENOUGH_S,
    NUM_BLOCKS,
    WAYS,
    Outcome,
    Way,
    count_rounds,
    further_unit,
    missing_unit,
    other_order,
    other_setting,
    part,
    ways_of_all,
)
from tests.helpers.ranks import RankPool, RankPools
from zero_offload.runtime.ranks.exchange import HostExchange
from zero_offload.runtime.ranks.group import Course


@pytest.fixture(params=[2, full(3)])
def pool(request: pytest.FixtureRequest, pools: RankPools) -> RankPool:
    return pools.of(request.param)


def check(found: list[Outcome], expected: list[Outcome], says: str) -> None:
    for each in found:
        assert says in each.error and each.error == found[0].error
        assert each.seconds < ENOUGH_S, each
    for each, plain in zip(found, expected, strict=True):
        assert each.params.keys() == plain.params.keys()
        assert all(torch.equal(each.params[name], plain.params[name]) for name in plain.params)


SAYS = {other_setting: "zo.clip_grad_norm_: ranks differ: max_norm is "}


@in_turn(way=WAYS, stage=[3, 2], precision=["fp32", "bf16"], num_before=[0, 3], on=[1, 0])
def test_all_raise_and_go_on(way: Way, stage: int, precision: str, num_before: int, on: int, pool: RankPool) -> None:
    settings = {"stage": stage, "precision": precision}
    args = {"num_before": num_before, "on": on}
    expected = pool.succeed(part_with, None, settings, args)
    found = pool.succeed(part_with, way, settings, args)
    # At stage 2 ranks gather nothing in an evaluation.
    if (stage, way.__name__) == (2, "evaluation_alone"):
        assert all(each.error == "" for each in found)
        return
    check(found, expected, SAYS.get(way, "Each rank went its own way through the model"))


def part_with(rank: int, world_size: int, way: Way | None, settings: dict[str, Any], args: dict[str, Any]) -> Outcome:
    return part(rank, world_size, way, settings, **args)


@in_turn(way=[further_unit, missing_unit, other_order], on=[1, 0])
def test_a_backward_that_broke_off_leaves_nothing(way: Way, on: int, pool: RankPool) -> None:
    settings, args = {"stage": 2, "precision": "bf16"}, {"on": on, "goes_on": True}
    expected = pool.succeed(part_with, None, settings, args)
    check(pool.succeed(part_with, way, settings, args), expected, "Each rank went its own way")


# Without pages: recorded steps


@in_turn(way=WAYS, stage=[3, 2], precision=["fp32", "bf16"], num_before=[0, 3, 5], on=[1, 0])
def test_all_raise_where_ranks_share_no_pages(
    way: Way, stage: int, precision: str, num_before: int, on: int, pool: RankPool
) -> None:
    settings = {"stage": stage, "precision": precision}
    found = pool.succeed(part_with, way, settings, {"num_before": num_before, "on": on, "without_pages": True})
    if (stage, way.__name__) == (2, "evaluation_alone"):
        assert all(each.error == "" for each in found)
        return
    for each in found:
        assert SAYS.get(way, "Each rank went its own way through the model") in each.error, each.error
        assert each.error == found[0].error and each.seconds < ENOUGH_S
    pool.renew()  # their connections are closed


def changes_now_and_then(rank: int, world_size: int, without_pages: bool) -> Outcome:
    """All ranks alike: steps, an evaluation, another order, two backwards for a step."""
    return part(rank, world_size, ways_of_all, {"stage": 3}, without_pages=without_pages, goes_on=True, on=-1)


def test_steps_that_change_on_all_ranks(pool: RankPool) -> None:
    found, expected = (pool.succeed(changes_now_and_then, without_pages) for without_pages in (True, False))
    for each, plain in zip(found, expected, strict=True):
        assert each.error == "" and each.params.keys() == plain.params.keys()
        assert all(torch.equal(each.params[name], plain.params[name]) for name in plain.params)


# Rounds


@pytest.mark.parametrize("without_pages", [False, True])
@pytest.mark.parametrize(("stage", "most"), [(0, 2), (1, 3), (2, 3), (3, 3)])
def test_rounds_do_not_grow_with_units(stage: int, most: int, without_pages: bool, pool: RankPool) -> None:
    """Without pages the first steps are announced. Numbers of norms ride with other words."""
    assert NUM_BLOCKS > 3
    for counts in pool.succeed(count_rounds, {"stage": stage}, without_pages):
        assert max(counts[2:] if without_pages else counts) <= most, counts
        assert not without_pages or counts[0] > 6


# Bytes


def exchange_apart(rank: int, world_size: int) -> list[bool]:
    """Exchanges of ranks whose courses differ, of other sizes; then of one course, on the same sockets."""
    course = Course()
    exchange = HostExchange(dist.new_group(list(range(world_size))), course)
    course.go(f"rank {rank}")
    course.go("the same")
    apart = torch.full(((rank + 1) * 1000 * world_size,), float("nan"))
    apart.tensor_split(world_size)[rank].fill_(rank)
    launched = exchange.gather(apart)
    dist.barrier()
    course.restart(7)
    together = torch.full((6 * world_size,), float("nan"))
    together.tensor_split(world_size)[rank].fill_(rank)
    exchange.gather(together)()
    dist.barrier()
    del launched
    untouched = [bool(part.isnan().all()) for other, part in enumerate(apart.tensor_split(world_size)) if other != rank]
    came = [bool((part == other).all()) for other, part in enumerate(together.tensor_split(world_size))]
    return untouched + came


def test_bytes_of_ranks_that_said_different_things_do_not_meet(pool: RankPool) -> None:
    assert all(all(each) for each in pool.succeed(exchange_apart))
