"""`zo.LiveBlocks`: the numbers of a plain loop, a kill at a switch, and the bytes that a plan says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.disk import runtime
from tests.helpers.failing import fail_at
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import full, in_turn
from tests.helpers.ranks import RankPool, read_params
from tests.helpers.scripts import Average, check, run_both, run_offloaded, run_plain
from tests.helpers.thawing import TIERS, frozen
from tests.parity.test_thaw import forget, train
from zero_offload.base.errors import CapacityError
from zero_offload.base.types import Tier
from zero_offload.standins.owners import owner_of
from zero_offload.storage.shards.store import ShardStore

STEPS, EVERY = 8, 2


def in_turns(
    model: nn.Module,
    rows: Callable[[int], Tensor],
    average: Average,
    order: str,
    num_live: int = 1,
    master: str = "keep",
) -> Iterator[float]:
    """A plain model's loop is written out: it knows the order alone. An optimizer keeps what completes a plain bf16
    parameter to its master, which goes where masters are dropped."""
    blocks, optimizer = model.blocks, zo.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    live = zo.LiveBlocks(blocks, num_live, order=order, every=EVERY, seed=3, master=master)
    for step in range(STEPS):
        if owner_of(model.norm.weight) is not None:
            live.begin_step(step, optimizer)
        elif step % EVERY == 0:
            chosen = live.at(step)
            for index, block in enumerate(blocks):
                block.requires_grad_(index in chosen)
                for param in () if index in chosen else block.parameters():
                    if master == "drop":
                        optimizer.state.pop(param, None)
                    else:
                        forget(optimizer, param)
        yield from train(model, optimizer, rows, average, range(step, step + 1))


ORDERS = ["random", "ascending", "descending"]


@in_turn(
    tier=["nvme", "cpu", "cached", "states"],
    order=ORDERS,
    num_live=[1, 2],
    precision=["bf16", "fp32"],
    master=["drop", "keep"],
)
def test_numbers_are_those_of_a_plain_loop(
    tier: str, order: str, num_live: int, precision: str, master: str, nvme: Path
) -> None:
    script = partial(in_turns, order=order, num_live=num_live, master=master)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    config = zo.OffloadConfig(precision=precision, nvme=nvme, **TIERS[tier])
    check(run_offloaded(script, frozen, config), run_plain(script, frozen, dtype=dtype))


@pytest.mark.parametrize("order", ["random", full("ascending")])
def test_on_two_ranks(order: str, nvme: Path, pool: RankPool) -> None:
    for found, expected in pool.succeed(run_both, partial(in_turns, order=order), frozen, {"nvme": nvme, "stage": 3}):
        check(found, expected)


def resumed(nvme: Path, stop: int, existing: str = "refuse") -> tuple[list[float], dict[str, Tensor]]:
    """A program that knows its steps alone."""
    config = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme, existing=existing)
    model = zo.offload(build(frozen), config)
    try:
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        found = zo.resume(model, optimizer)
        live, losses = zo.LiveBlocks(model.blocks, 1, every=EVERY, seed=3), []
        for step in range(0 if found is None else found.step, stop):
            live.begin_step(step, optimizer)
            losses += train(model, optimizer, tokens_of, lambda _: None, range(step, step + 1))
            zo.commit(model, optimizer)
        return losses, read_params(model)
    finally:
        zo.close(model)


@pytest.mark.parametrize(("name", "nth"), [("lay_anew", 2), ("drop_states", 1)])
def test_a_failure_in_the_switch_is_made_good_by_a_resume(
    name: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As others have no room yet, or as blocks rest."""
    whole = resumed(tmp_path / "whole", STEPS)
    fail_at(monkeypatch, ShardStore, name, nth, zo.StorageError("injected"))
    with pytest.raises(zo.StorageError, match="injected"):
        resumed(tmp_path / "parts", STEPS)
    monkeypatch.undo()
    losses, params = resumed(tmp_path / "parts", STEPS, "resume")
    assert 0 < len(losses) < STEPS
    check((losses, params), (whole[0][-len(losses) :], whole[1]))


# Bytes


WIDTH = 320


def measured(nvme: Path, num_steps: int, live: dict[str, Any], **settings: Any) -> tuple[Any, list[Any]]:
    """The plan of a model whose blocks take turns, and what `zo.stats` says after each step."""
    model = build(partial(TinyLM, WIDTH, 6)).requires_grad_(False)
    config = zo.OffloadConfig(nvme=nvme, existing="discard", **settings)
    turns = zo.LiveBlocks(model.blocks, **live)
    plan = zo.plan(model, config, live=turns)
    zo.offload(model, config)
    optimizer, found = zo.AdamW(model.parameters(), lr=1e-2), []
    for step in range(num_steps):
        turns.begin_step(step, optimizer)
        list(train(model, optimizer, tokens_of, lambda _: None, range(step, step + 1)))
        zo.commit(model, optimizer)
        runtime(model).drain()
        found.append(zo.stats(model))
    zo.close(model)
    return plan, found


@pytest.mark.parametrize(
    ("settings", "live"),
    [
        ({"params": "nvme", "optimizer": "nvme"}, {"num_live": 1, "order": "ascending", "every": 2}),
        ({"optimizer": "cpu"}, {"num_live": 2, "order": "random", "every": 3}),
    ],
    ids=["drives", "memory"],
)
def test_bytes_of_a_run_are_those_of_its_plan(settings: Any, live: Any, nvme: Path) -> None:
    plan, found = measured(nvme, 18, live, **settings)
    block = sum(param.numel() for param in TinyLM(WIDTH).blocks[0].parameters())
    assert max(stats.resident_bytes["nvme"] for stats in found) <= 1.01 * plan.used_bytes(Tier.NVME)
    # Of a step that switches nothing: 12 bytes per parameter that lives.
    written = min(stats.written_bytes["nvme"] for stats in found[1:])
    assert written == pytest.approx(12 * block * live["num_live"], rel=0.02)
    assert written == pytest.approx(plan.wear.bytes_per_step, rel=0.02)
    held = max(stats.resident_bytes["cpu"] for stats in found)
    assert held <= 1.05 * (plan.used_bytes(Tier.CPU) + plan.used_bytes(Tier.DEVICE)) + (8 << 20)


def test_the_largest_set_that_may_live(nvme: Path) -> None:
    """Of one block more the plan does not fit."""
    model = build(partial(TinyLM, WIDTH, 6)).requires_grad_(False)
    tiers: dict[str, Any] = {"optimizer": "nvme", "params": "nvme", "nvme": nvme}
    whole = zo.plan(model, zo.OffloadConfig(**tiers), live=zo.LiveBlocks(model.blocks, 3))
    config = zo.OffloadConfig(**tiers, nvme_capacity=whole.used_bytes(Tier.NVME))
    for number in (1, 3, 4):
        found = zo.plan(model, config, live=zo.LiveBlocks(model.blocks, number))
        assert found.fits == (number < 4) and found.most_live == 3 and "; 3 would fit" in str(found)


def test_trained_blocks_take_no_turns() -> None:
    model = build(frozen)
    model.blocks[1].requires_grad_(True)
    with pytest.raises(zo.ConfigError, match=r"norm.weight of block 1 is trained: call block.requires_grad_\(False\)"):
        zo.plan(model, zo.OffloadConfig(), live=zo.LiveBlocks(model.blocks, 1))


# States of the turn before


def test_a_budget_for_one_turn_is_enough(nvme: Path) -> None:
    """Blocks that rest give up their room before others take it."""
    model = build(partial(TinyLM, WIDTH, 6)).requires_grad_(False)
    live = zo.LiveBlocks(model.blocks, 2, order="ascending", every=1)
    plan = zo.plan(model, zo.OffloadConfig(nvme=nvme), live=live)
    needed = plan.used_bytes(Tier.CPU) + plan.used_bytes(Tier.DEVICE)
    zo.offload(model, zo.OffloadConfig(nvme=nvme, cpu_memory=needed))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        live.begin_step(step, optimizer)
        list(train(model, optimizer, tokens_of, lambda _: None, range(step, step + 1)))
    zo.close(model)


def test_states_beyond_the_plan_are_counted_as_long_as_they_are_there(nvme: Path) -> None:
    """The third state of amsgrad, of the blocks that live."""
    model = build(partial(TinyLM, WIDTH, 6)).requires_grad_(False)
    live = zo.LiveBlocks(model.blocks, 2, order="ascending", every=1)
    plan = zo.plan(model, zo.OffloadConfig(nvme=nvme, durability="scratch"), live=live)
    third = 2 * 4 * sum(param.numel() for param in model.blocks[0].parameters())
    needed = plan.used_bytes(Tier.CPU) + plan.used_bytes(Tier.DEVICE) + third + third // 16
    zo.offload(model, zo.OffloadConfig(nvme=nvme, durability="scratch", cpu_memory=needed))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    for step in range(9):
        live.begin_step(step, optimizer)
        list(train(model, optimizer, tokens_of, lambda _: None, range(step, step + 1)))
    zo.close(model)


def switched(nvme: Path, capacity: int | None, *, commits: bool) -> int:
    """Bytes of the file after two turns."""
    model = build(partial(TinyLM, WIDTH, 3)).requires_grad_(False)
    settings: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "commit_every": 1 if commits else 1000}
    config = zo.OffloadConfig(nvme=nvme, existing="discard", nvme_capacity=capacity, **settings)
    zo.offload(model, config)
    try:
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        live = zo.LiveBlocks(model.blocks, 1, order="ascending", every=1)
        for step in range(12):
            live.begin_step(step, optimizer)
            list(train(model, optimizer, tokens_of, lambda _: None, range(step, step + 1)))
            if commits:
                zo.commit(model, optimizer)
        return zo.stats(model).resident_bytes["nvme"]
    finally:
        zo.close(model)


def test_states_that_no_generation_has_give_their_room_at_once(nvme: Path) -> None:
    """However many turns there are between two generations."""
    assert switched(nvme / "seldom", None, commits=False) <= switched(nvme / "often", None, commits=True)


def test_states_that_a_generation_has_are_counted(nvme: Path) -> None:
    """They stay until the next one, and a budget without room for them raises before anything changes."""
    model = build(partial(TinyLM, WIDTH, 3)).requires_grad_(False)
    settings: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "nvme": nvme}
    optimizer: Any = None
    plan = zo.plan(model, zo.OffloadConfig(**settings), live=zo.LiveBlocks(model.blocks, 1))
    block = sum(param.numel() for param in model.blocks[0].parameters())
    # Two slots of two states of a block less.
    capacity = plan.used_bytes(Tier.NVME) - 16 * block
    zo.offload(model, zo.OffloadConfig(nvme_capacity=capacity, **settings))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    live = zo.LiveBlocks(model.blocks, 1, order="ascending", every=1)
    with pytest.raises(CapacityError, match="before the next generation: beside them drives keep .* Call zo.commit"):
        for step in range(4):
            live.begin_step(step, optimizer)
            list(train(model, optimizer, tokens_of, lambda _: None, range(step, step + 1)))
            zo.commit(model, optimizer)
    zo.commit(model, optimizer)
    runtime(model).drain()
    assert runtime(model).store.retired_bytes == 0
    live.begin_step(step, optimizer)
    list(train(model, optimizer, tokens_of, lambda _: None, range(step, step + 1)))
    zo.close(model)
