"""Ranks of one machine that reach each other's memory, and those that may not: the same bits."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers import ranks
from tests.helpers.ranks import Case, Failure, Outcome, RankPool
from zero_offload import native
from zero_offload.runtime.ranks import neighbours
from zero_offload.runtime.ranks.lanes import DirectLane, Sockets
from zero_offload.runtime.ranks.neighbours import Channel, Neighbourhood
from zero_offload.runtime.ranks.watch import Place

WORLD_SIZE = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(WORLD_SIZE)
    yield pool
    pool.close()


def open_channel(world_size: int, *, reads: bool = True) -> Channel | None:
    group = dist.new_group(list(range(world_size)))
    return Neighbourhood(group, range(world_size)).channel(range(world_size), reads=reads)


# Turns


def take_turns(rank: int, world_size: int, num_turns: int) -> bool:
    """Every rank, now and then late, tells other words each turn; whether each has heard all of them."""
    channel, delays = open_channel(world_size), random.Random(rank)
    assert channel is not None
    for turn in range(num_turns):
        if delays.random() < 0.05:
            time.sleep(delays.random() * 0.003)
        heard = channel.tell([turn, rank * 1000 + turn])
        if heard != [(turn, other * 1000 + turn) for other in range(world_size)]:
            return False
    return True


def test_every_rank_hears_every_turn(pool: RankPool) -> None:
    assert pool.succeed(take_turns, 2000) == [True] * WORLD_SIZE


def exchange_and_overwrite(rank: int, world_size: int, num_rounds: int) -> int:
    """Buffers are overwritten as soon as a wait is over; how many parts came wrong."""
    channel, delays, wrong = open_channel(world_size), random.Random(rank), 0
    assert channel is not None
    flat = torch.empty(world_size * 50_000, dtype=torch.int64)
    for number in range(num_rounds):
        parts = flat.tensor_split(world_size)
        parts[rank].fill_(number * 10 + rank)
        wait = channel.exchange([parts[rank]] * world_size, parts)
        wrong += sum(not bool((part == number * 10 + other).all()) for other, part in enumerate(parts))
        if delays.random() < 0.1:
            time.sleep(0.002)
        wait()
        flat.fill_(-1)
    return wrong


def test_a_buffer_is_ours_again_when_all_have_read_it(pool: RankPool) -> None:
    assert pool.succeed(exchange_and_overwrite, 200) == [0] * WORLD_SIZE


def interrupt_one(rank: int, world_size: int) -> list[bool]:
    """Ctrl-C on rank 1 after the turn was told, twice, and it goes on; whether an exchange after that is right."""
    channel = open_channel(world_size)
    assert channel is not None
    right = []
    for number in range(3):
        parts = torch.full((world_size, 1000), number * 10 + rank).unbind()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and number < 2:
                patch.setattr(native, "peer_read", interrupt)
            try:
                channel.exchange([parts[rank]] * world_size, parts)()
                right.append(all(bool((part == number * 10 + other).all()) for other, part in enumerate(parts)))
            except KeyboardInterrupt:
                right.append(False)
    return right


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_rank_that_is_interrupted_keeps_nobody_waiting(pool: RankPool) -> None:
    found = pool.succeed(interrupt_one)
    assert found == [[rank != 1, rank != 1, True] for rank in range(WORLD_SIZE)]


def exchange_unequal(rank: int, world_size: int) -> None:
    channel = open_channel(world_size)
    assert channel is not None
    parts = torch.zeros(world_size, 100 + (rank == 2), dtype=torch.uint8).unbind()
    channel.exchange([parts[rank]] * world_size, parts)()


def test_unequal_parts_raise(pool: RankPool) -> None:
    failures = pool.call(exchange_unequal)
    assert failures[0] == Failure("RuntimeError", "rank 2 sends 101 bytes where 100 are expected")
    assert all(isinstance(failure, Failure) for failure in failures)


def sum_on_lanes(rank: int, world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What both kinds of lanes make of the same gradients: reduced in parts, and whole."""
    channel = open_channel(world_size)
    assert channel is not None
    results = []
    for lane in (DirectLane(channel), DirectLane(Sockets(dist.new_group(list(range(world_size)))))):
        grads = torch.randn(world_size * 1000, generator=torch.Generator().manual_seed(rank)).to(dtype)
        results.append(lane.reduce_scatter(grads.clone(), torch.float32)())
        results.append(lane.all_reduce(grads.clone(), torch.float32)())
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_in_fp32_and_in_the_order_of_ranks(dtype: torch.dtype, pool: RankPool) -> None:
    terms = [
        torch.randn(WORLD_SIZE * 1000, generator=torch.Generator().manual_seed(rank)).to(dtype).float()
        for rank in range(WORLD_SIZE)
    ]
    whole = terms[0] + terms[1] + terms[2]
    for rank, results in enumerate(pool.succeed(sum_on_lanes, dtype)):
        for part, total in zip(results[::2], results[1::2], strict=True):
            assert torch.equal(part, whole.tensor_split(WORLD_SIZE)[rank]) and torch.equal(total, whole)


# Who cannot be reached


def forbid(patch: pytest.MonkeyPatch, what: str) -> None:
    def refuse(*_: Any) -> int:
        raise (RuntimeError if what == "reads" else OSError)("Operation not permitted")

    if what == "reads":
        patch.setattr(native, "peer_read", refuse)
    elif what == "files":
        patch.setattr(os, "memfd_create", refuse)
    elif what == "memfd_create":
        patch.delattr(os, "memfd_create")
    elif what == "library":
        patch.setattr(native, "available", lambda: False)
    elif what == "machine":
        patch.setattr(neighbours.Place, "here", lambda: Place(f"host{dist.get_rank()}", "pid:[1]", os.getpid()))


def reach(rank: int, world_size: int, what: str, on: int) -> tuple[bool, bool]:
    """Whether there are channels for words and for reads, where `what` is forbidden on rank `on`."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == on:
            forbid(patch, what)
        group = dist.new_group(list(range(world_size)))
        neighbourhood = Neighbourhood(group, range(world_size))
        channels = [neighbourhood.channel(range(world_size), reads=reads) for reads in (False, True)]
    return channels[0] is not None, channels[1] is not None


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("nothing", (True, True)),
        ("memfd_create", (True, True)),
        ("reads", (True, False)),
        ("files", (False, False)),
        ("library", (False, False)),
        ("machine", (False, False)),
    ],
)
def test_all_ranks_agree_on_who_can_be_reached(what: str, expected: tuple[bool, bool], pool: RankPool) -> None:
    assert pool.succeed(reach, what, 1) == [expected] * WORLD_SIZE


def train_without(rank: int, world_size: int, case: Case, what: str) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        forbid(patch, what)
        return ranks.train(rank, world_size, case)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_sockets_give_the_same_bits(stage: int, pool: RankPool) -> None:
    case = Case({"stage": stage, "precision": "bf16"}, num_steps=3, micro_batches=2, max_norm=0.5)
    expected = pool.succeed(ranks.train, case)
    for what in ("reads", "files"):
        assert pool.succeed(train_without, case, what) == expected


# Ranks that do not come


def wait_for_nobody(rank: int, world_size: int) -> None:
    """Rank 1 never takes its turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "time_limit", lambda: timedelta(seconds=0.3))
        channel = open_channel(world_size)
    assert channel is not None
    if rank != 1:
        channel.tell([rank])


def test_who_waits_in_vain_is_told_when_time_is_up(pool: RankPool) -> None:
    found = pool.call(wait_for_nobody)
    assert found[0] == found[2] == Failure("RuntimeError", "timed out after 0.3 s") and found[1] is None


def wait_for_the_dead(rank: int, world_size: int) -> bool:
    """Rank 1's process seems gone after its first turn, which all the others hear."""
    channel = open_channel(world_size)
    assert channel is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours.Place, "state", lambda place: "gone")
        patch.setattr(neighbours, "_LOOK_EVERY_S", 30)
        heard = channel.tell([rank]) == [(0,), (1,), (2,)]
        patch.setattr(neighbours, "_LOOK_EVERY_S", 0.1)
        if rank != 1:
            channel.tell([rank])
    return heard


def test_a_process_that_is_gone_is_named_but_what_it_said_before_counts(pool: RankPool) -> None:
    found = pool.call(wait_for_the_dead)
    assert found[1] is True
    # The one of the others that is looked at first seems gone as well.
    for rank in (0, 2):
        assert isinstance(found[rank], Failure) and "is gone" in found[rank].message
