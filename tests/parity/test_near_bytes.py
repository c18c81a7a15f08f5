"""Bytes that cross in pages, as messages, and once per machine: those of plain tensors, whatever is under way."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_offload as zo
from tests.helpers.models import build
from tests.helpers.pairwise import in_turn
from tests.helpers.ranks import RankPool, RankPools
from zero_offload.base.events import Counters
from zero_offload.model.api import runtime_of
from zero_offload.plan.memory import NEAR_LEAST, NEAR_ROOM
from zero_offload.runtime.ranks import exchange, near_bytes, neighbours
from zero_offload.runtime.ranks.exchange import HostExchange
from zero_offload.runtime.ranks.group import Course
from zero_offload.runtime.ranks.near_bytes import open_near_bytes
from zero_offload.runtime.ranks.watch import RankProcess

WORLD_SIZE, NUM_CALLS, AT_ONCE = 4, 60, 4
CALLS = ["gather", "reduce_scatter", "all_reduce", "spread"]


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(WORLD_SIZE)


def values_of(number: int, numel: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * number + rank)).to(dtype)


def expected_of(call: str, every: list[torch.Tensor], number: int, rank: int) -> torch.Tensor:
    """The values that the call leaves on a rank, where `every` rank had these values."""
    if call == "spread":
        return every[number % WORLD_SIZE]
    if call == "gather":
        return torch.cat([each.tensor_split(WORLD_SIZE)[r] for r, each in enumerate(every)])
    total = every[0].float()
    for each in every[1:]:
        total = total + each
    return total if call == "all_reduce" else total.tensor_split(WORLD_SIZE)[rank]


def cross(rank: int, world_size: int, machines: str, room: int, largest: int, restarts: bool) -> list[str]:
    """Calls in an order that all ranks draw alike, some at once, some dropped; the names of those with wrong values."""
    drawn, delays, course, wrong = random.Random(room), random.Random(rank), Course(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankProcess, "here", lambda: RankProcess(machines[rank], "pid:[1]", os.getpid()))
        patch.setattr(neighbours, "RankProcess", RankProcess)
        patch.setattr(near_bytes, "NEAR_ROOM", room)
        patch.setattr(exchange, "NEAR_LARGEST", largest)
        group = dist.new_group(list(range(world_size)))
        made = HostExchange(group, course, open_near_bytes(group, range(world_size)), Counters())
        under_way: list[tuple[str, Callable[[], Any], torch.Tensor | None, torch.Tensor]] = []

        def end(index: int) -> None:
            call, wait, target, expected = under_way.pop(index)
            if delays.random() < 0.1:
                time.sleep(delays.random() * 0.003)
            found = wait()
            if not torch.equal(found if target is None else target, expected):
                wrong.append(call)

        for number in range(NUM_CALLS):
            call, numel = drawn.choice(CALLS), drawn.choice([1, 7, 400, 4000])
            numel *= 1 if call == "spread" else world_size
            dtype = drawn.choice([torch.float32, torch.bfloat16])
            every = [values_of(number, numel, each, dtype) for each in range(world_size)]
            mine, expected = every[rank].clone(), expected_of(call, every, number, rank)
            target = mine if call in ("gather", "spread") else None
            given = () if call == "gather" else (number % world_size,) if call == "spread" else (torch.float32,)
            under_way.append((call, getattr(made, call)(mine, *given), target, expected))
            if restarts and drawn.random() < 0.1:
                # Ranks have parted, and one had launched more.
                while under_way:
                    end(0)
                if rank == 1:
                    made.gather(torch.zeros(numel * world_size))
                dist.barrier()
                course.restart(number + 1)
            while len(under_way) > drawn.randrange(AT_ONCE):
                end(0 if drawn.random() < 0.7 else drawn.randrange(len(under_way)))
        while under_way:
            end(0)
    return wrong


@in_turn(
    machines=["aaaa", "aabb", "abab", "abbb", "abcd", "aabc"],
    room=[1 << 20, 40_000, 0],
    largest=[1 << 20, 9_000, 0],
    restarts=[False, True],
)
def test_values_are_those_of_plain_tensors(
    machines: str, room: int, largest: int, restarts: bool, pool: RankPool
) -> None:
    assert pool.succeed(cross, machines, room, largest, restarts) == [[]] * WORLD_SIZE
    pool.renew()


def fill_again(rank: int, world_size: int) -> int:
    """Many calls, a few of which are never waited for: how far into its room a rank has written."""
    course, group = Course(), dist.new_group(list(range(world_size)))
    near, machines = open_near_bytes(group, range(world_size))
    assert near is not None
    made = HostExchange(group, course, (near, machines), Counters())
    for number in range(200):
        wait = made.gather(torch.full((world_size * 1000,), float(rank + 1)))
        if number % 10:
            wait()
        else:
            del wait
    dist.barrier()
    return int(near._room.nonzero().max())


def test_room_is_used_again(pool: RankPool) -> None:
    assert max(pool.succeed(fill_again)) <= 4 * 4096


def lose_the_other_machine(rank: int, world_size: int) -> str:
    """The error of a gather of which nothing comes from the other machine, on ranks 2 and 3; each hands on to one."""
    wait_for = exchange._wait_for

    def fail(works: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("Connection timed out")
        wait_for(works)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankProcess, "here", lambda: RankProcess("aabb"[rank], "pid:[1]", os.getpid()))
        patch.setattr(neighbours, "time_limit", lambda: timedelta(seconds=20))
        group = dist.new_group(list(range(world_size)))
        made = HostExchange(group, Course(), open_near_bytes(group, range(world_size)), Counters())
        patch.setattr(exchange, "_wait_for", fail if rank > 1 else wait_for)
        try:
            made.gather(torch.ones(world_size * 1000))()
        except RuntimeError as error:
            return str(error)
    return ""


def test_ranks_that_wait_for_each_other_learn_that_a_machine_is_gone(pool: RankPool) -> None:
    """Neither control thread waits for the other machine itself."""
    found = pool.succeed(lose_the_other_machine)
    assert found[:2] == ["", ""]
    assert all(each in ("Connection timed out", "rank 2 has left", "rank 3 has left") for each in found[2:]), found
    pool.renew()


# Plans


def page_bytes() -> int:
    """This process's share of memory under pages for bytes: that of a page which two map is half of each."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name:
            begin, _, end = name.partition("-")
            is_ours = "zero_offload ranks" in rest and int(end, 16) - int(begin, 16) > NEAR_ROOM
        elif name == "Pss:" and is_ours:
            found += int(rest.split()[0]) << 10
    return found


def take_pages(rank: int, world_size: int, stage: int, width: int, num_blocks: int) -> tuple[int, int]:
    """Bytes that a plan has for pages of a rank, and its share of those that some steps have taken."""
    before = page_bytes()
    blocks = build(lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(num_blocks))))
    model = zo.offload(blocks, zo.OffloadConfig(stage=stage, precision="fp32"))
    optimizer, delays = zo.AdamW(model.parameters(), lr=1e-3), random.Random(rank)
    for _ in range(4):
        time.sleep(delays.random() * 0.01)
        model(torch.ones(2, width)).square().mean().backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    owner = runtime_of(model)
    assert owner is not None
    plan = owner.sizes.plan
    dist.barrier()
    taken = page_bytes() - before
    dist.barrier()
    text = str(plan)
    zo.close(model)
    assert ("pages in which ranks of one machine leave bytes" in text) == (plan.near_bytes > 0)
    return plan.near_bytes, taken


@in_turn(stage=[0, 1, 2, 3], sizes=[(64, 4), (128, 12), (300, 8), (1000, 10), (2000, 2)])
def test_a_plan_has_the_pages_that_are_taken(stage: int, sizes: tuple[int, int], pool: RankPool) -> None:
    """The last ones are messages."""
    found = pool.succeed(take_pages, stage, *sizes)
    planned, taken = (sum(each) for each in zip(*found, strict=True))
    assert 0 < taken <= planned <= 6 * taken + 2 * WORLD_SIZE * NEAR_LEAST
