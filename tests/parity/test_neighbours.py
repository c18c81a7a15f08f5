"""Ranks of one machine that share pages, and those that may not: the same bits."""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers import ranks
from tests.helpers.pairwise import full
from tests.helpers.ranks import Case, Failure, Outcome, RankPool, RankPools
from zero_offload.hardware import native
from zero_offload.runtime.ranks import neighbours
from zero_offload.runtime.ranks.exchange import HostExchange
from zero_offload.runtime.ranks.neighbours import TURNS_AHEAD, Channel, open_channel
from zero_offload.runtime.ranks.watch import RankProcess

WORLD_SIZE = 3


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(WORLD_SIZE)


def channel_of(world_size: int) -> Channel | None:
    channel, machines = open_channel(dist.new_group(list(range(world_size))), range(world_size))
    assert (channel is None) == ([dist.get_rank()] in machines)
    return channel


# Turns


def tell(channel: Channel, turn: int, word: int) -> list[tuple[int, ...]]:
    """Every rank's words of that turn, which is the next one."""
    channel.post([turn, word])
    channel.wait(turn)
    return channel.words(turn)


def take_turns(rank: int, world_size: int, num_turns: int) -> bool:
    """Every rank, now and then late, tells other words each turn; whether each has heard all of them."""
    channel, delays = channel_of(world_size), random.Random(rank)
    assert channel is not None
    for turn in range(1, num_turns + 1):
        if delays.random() < 0.05:
            time.sleep(delays.random() * 0.003)
        heard = tell(channel, turn, rank * 1000 + turn)
        if heard != [(turn, other * 1000 + turn) for other in range(world_size)]:
            return False
    return True


def test_every_rank_hears_every_turn(pool: RankPool) -> None:
    assert pool.succeed(take_turns, 2000) == [True] * WORLD_SIZE


def run_ahead(rank: int, world_size: int, num_turns: int) -> bool:
    """Ranks hear each other many turns later, texts and errors too; whether each has heard what was said."""
    channel, delays, heard = channel_of(world_size), random.Random(rank), 0
    assert channel is not None
    for turn in range(1, num_turns + 1):
        report = ("ValueError", f"rank {rank} in turn {turn}") if turn % 5 == 0 else None
        channel.post([turn, rank], f"{'é' * (turn % 200)} {rank}", [rank + turn / 2] * (turn % 3), report)
        # With numbers, and with errors, all hear before the next turn.
        due = turn if turn % 5 == 0 or turn % 3 else turn - delays.randrange(TURNS_AHEAD)
        if due <= heard:
            continue
        channel.wait(due)
        for old in range(heard + 1, due + 1):
            texts = [text for text, _ in channel.texts(old)]
            whole = [f"{'é' * (old % 200)} {other}" for other in range(world_size)]
            fits = all(len(each.encode()) <= 248 for each in whole)
            if channel.words(old) != [(old, other) for other in range(world_size)]:
                return False
            if texts != (whole if fits else ["é" * 124] * world_size):
                return False
        if turn % 5 == 0 and channel.texts(due)[1][1] != ("ValueError", f"rank 1 in turn {turn}"):
            return False
        if turn % 3 and channel.numbers(turn % 3) != [[r + turn / 2] * (turn % 3) for r in range(world_size)]:
            return False
        heard = due
    return True


def test_turns_that_are_heard_later_have_their_words(pool: RankPool) -> None:
    assert pool.succeed(run_ahead, 2000) == [True] * WORLD_SIZE


def sum_on_a_lane(rank: int, world_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The sums that an exchange makes of the same gradients: reduced in parts, and whole."""
    exchange = HostExchange(dist.new_group(list(range(world_size))))
    grads = torch.randn(world_size * 1000, generator=torch.Generator().manual_seed(rank)).to(dtype)
    part = exchange.reduce_scatter(grads.clone(), torch.float32)()
    return [part, exchange.all_reduce(grads.clone(), torch.float32)()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_in_fp32_and_in_the_order_of_ranks(dtype: torch.dtype, pool: RankPool) -> None:
    terms = [
        torch.randn(WORLD_SIZE * 1000, generator=torch.Generator().manual_seed(rank)).to(dtype).float()
        for rank in range(WORLD_SIZE)
    ]
    whole = terms[0] + terms[1] + terms[2]
    for rank, (part, total) in enumerate(pool.succeed(sum_on_a_lane, dtype)):
        assert torch.equal(part, whole.tensor_split(WORLD_SIZE)[rank]) and torch.equal(total, whole)


# Who cannot be reached


def forbid(patch: pytest.MonkeyPatch, what: str) -> None:
    def refuse(*_: Any) -> int:
        raise OSError("Operation not permitted")

    if what == "files":
        patch.setattr(os, "memfd_create", refuse)
    elif what == "memfd_create":
        patch.delattr(os, "memfd_create")
    elif what == "library":
        patch.setattr(native, "available", lambda: False)
    elif what == "machine":
        patch.setattr(
            neighbours.RankProcess, "here", lambda: RankProcess(f"host{dist.get_rank()}", "pid:[1]", os.getpid())
        )


def reach(rank: int, world_size: int, what: str, on: int) -> bool:
    """Whether there is a channel, where `what` is forbidden on rank `on`."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == on:
            forbid(patch, what)
        return channel_of(world_size) is not None


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("nothing", True),
        ("memfd_create", True),
        ("files", False),
        ("library", False),
        ("machine", False),
    ],
)
def test_all_ranks_agree_on_who_can_be_reached(what: str, expected: bool, pool: RankPool) -> None:
    here = WORLD_SIZE - 1 if what == "machine" else 0  # two are on one machine
    assert pool.succeed(reach, what, 1) == [expected or (here > 0 and rank != 1) for rank in range(WORLD_SIZE)]


def train_without(rank: int, world_size: int, case: Case, what: str) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        forbid(patch, what)
        return ranks.train(rank, world_size, case)


@pytest.mark.parametrize("stage", [0, full(2), 3])
def test_sockets_give_the_same_bits(stage: int, pool: RankPool) -> None:
    case = Case({"stage": stage, "precision": "bf16"}, num_steps=3, micro_batches=2, max_norm=0.5)
    expected = pool.succeed(ranks.train, case)
    assert pool.succeed(train_without, case, "files") == expected


# Ranks that do not come


def wait_in_vain(rank: int, world_size: int) -> None:
    """Rank 1 never takes its turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "time_limit", lambda: timedelta(seconds=0.3))
        channel = channel_of(world_size)
    assert channel is not None
    if rank != 1:
        tell(channel, 1, rank)


def test_who_waits_in_vain_is_told_when_time_is_up(pool: RankPool) -> None:
    found = pool.call(wait_in_vain)
    assert found[0] == found[2] == Failure("RuntimeError", "timed out after 0.3 s") and found[1] is None


def wait_for_the_dead(rank: int, world_size: int) -> bool:
    """Rank 1's process seems gone after its first turn, which all the others hear."""
    channel = channel_of(world_size)
    assert channel is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours.RankProcess, "state", lambda place: "gone")
        patch.setattr(neighbours, "_LOOK_EVERY_S", 30)
        heard = tell(channel, 1, rank) == [(1, 0), (1, 1), (1, 2)]
        patch.setattr(neighbours, "_LOOK_EVERY_S", 0.1)
        if rank != 1:
            tell(channel, 2, rank)
    return heard


def test_a_process_that_is_gone_is_named_but_what_it_said_before_counts(pool: RankPool) -> None:
    found = pool.call(wait_for_the_dead)
    assert found[1] is True
    # The one of the others that is looked at first seems gone as well.
    for rank in (0, 2):
        assert isinstance(found[rank], Failure) and "is gone" in found[rank].message
