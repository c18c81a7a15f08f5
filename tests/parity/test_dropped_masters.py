"""`zo.LiveBlocks(master="drop")`: masters are rounded at a switch, as a plain loop over fp32 masters rounds them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.disk import runtime
from tests.helpers.failing import fail_at
from tests.helpers.fresh import run_script
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import full, in_turn
from tests.helpers.ranks import RankPool
from tests.helpers.scripts import check
from tests.helpers.thawing import TIERS, dropping, frozen
from zero_offload.base.types import Tier
from zero_offload.cli.main import main
from zero_offload.hardware.kernels.formats import split_master
from zero_offload.storage.shards.store import ShardStore

STEPS = 9
"""Four turns of two steps and a half: of three blocks all come back."""
Result = tuple[list[float], dict[str, Tensor]]


def written_out(
    order: str,
    num_live: int,
    blocks_of: Callable[[nn.Module], Iterable[nn.Module]] = lambda model: model.blocks,
) -> Result:
    """Losses, and fp32 masters at the end. All parameters of a step are rounded from masters, which are rounded
    themselves when their turn is over."""
    model = build(frozen).bfloat16()
    blocks = list(blocks_of(model))
    masters = {name: nn.Parameter(param.detach().float()) for name, param in model.named_parameters()}
    optimizer = zo.AdamW(masters.values(), lr=1e-2, weight_decay=0.1)
    turns, losses = zo.LiveBlocks(blocks, num_live, order=order, every=2, seed=3), list[float]()
    for step in range(STEPS):
        for index, block in enumerate(blocks):
            block.requires_grad_(index in turns.at(step))
        for name, param in model.named_parameters():
            if not param.requires_grad:
                masters[name].data.copy_(param)
                optimizer.state.pop(masters[name], None)
        loss = model(tokens_of(step))
        loss.backward()
        losses.append(loss.item())
        for name, param in model.named_parameters():
            masters[name].grad = None if param.grad is None else param.grad.float()
        optimizer.step()
        model.zero_grad()
        for name, param in model.named_parameters():
            value, residual = torch.empty_like(param), torch.empty(param.shape, dtype=torch.int16)
            split_master(masters[name].detach(), value, residual)
            param.data.copy_(value)
    return losses, {name: master.detach().clone() for name, master in masters.items()}


@in_turn(tier=["nvme", "cpu", "cached", "states"], order=["random", "ascending", "descending"], num_live=[1, 2])
def test_numbers_are_those_of_masters_that_are_rounded(tier: str, order: str, num_live: int, tmp_path: Path) -> None:
    found = dropping(tmp_path, STEPS, order=order, num_live=num_live, **TIERS[tier])
    check(found, written_out(order, num_live))
    assert main(["verify", str(tmp_path)]) == 0


def test_they_differ_from_masters_that_are_kept(tmp_path: Path) -> None:
    kept = dropping(tmp_path, STEPS, order="ascending", num_live=1, master="keep")
    assert kept[0] != written_out("ascending", 1)[0]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Two of each block, which is one unit: they share a section."""
    return [layer for block in model.blocks for layer in (block.up, block.down)]


@pytest.mark.parametrize("tier", ["nvme", "cpu", *map(full, ("cached", "states"))])
def test_blocks_that_share_a_section_round_theirs_alone(tier: str, tmp_path: Path) -> None:
    found = dropping(tmp_path, STEPS, order="random", blocks=layers_of, **TIERS[tier])
    check(found, written_out("random", 1, layers_of))


# Several ranks


def _on_ranks(rank: int, world_size: int, nvme: Path, settings: dict[str, Any]) -> tuple[Result, Result]:
    """All ranks have the same rows: the mean of their gradients is each one's. The loop runs here too, since products
    in bf16 depend on the threads of a process."""
    return dropping(nvme, STEPS, order="ascending", num_live=1, **settings), written_out("ascending", 1)


@pytest.mark.parametrize("stage", [3, 1, *map(full, (0, 2))])
@pytest.mark.parametrize("tier", ["nvme", "cpu", full("cached")])
def test_on_two_ranks(stage: int, tier: str, nvme: Path, pool: RankPool) -> None:
    for found, expected in pool.succeed(_on_ranks, nvme, TIERS[tier] | {"stage": stage}):
        check(found, expected)


def _drop_otherwise(rank: int, world_size: int) -> None:
    model = zo.offload(build(frozen), zo.OffloadConfig())
    optimizer = zo.AdamW(model.parameters())
    live = zo.LiveBlocks(model.blocks, 1, order="ascending", every=1, master="keep" if rank else "drop")
    try:
        for step in range(2):
            live.begin_step(step, optimizer)
            model(tokens_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        zo.close(model)


def test_ranks_that_drop_differently(pool: RankPool) -> None:
    found = pool.call(_drop_otherwise)
    assert all("the end of 6 masters (the first: that of blocks.0.norm.weight)" in each.message for each in found)


# Generations


@pytest.mark.parametrize("tier", ["nvme", "cached", *map(full, ("cpu", "states"))])
def test_a_resume_at_each_step(tier: str, tmp_path: Path) -> None:
    """Before a switch, behind it and within a turn."""
    whole, losses = dropping(tmp_path / "whole", STEPS, **TIERS[tier]), list[float]()
    for stop in range(1, STEPS + 1):
        more, masters = dropping(tmp_path / "parts", stop, existing="resume", **TIERS[tier])
        assert len(more) == 1
        losses += more
    check((losses, masters), whole)
    assert main(["verify", str(tmp_path / "parts")]) == 0


KILLED = """
import sys
from pathlib import Path
from tests.helpers.thawing import TIERS, dropping, killed_at
dropping(Path(sys.argv[1]), 9, before=killed_at(4, int(sys.argv[3])), **TIERS[sys.argv[2]])
"""


@pytest.mark.parametrize("num_writes", [0, 1, 4, *map(full, (2, 3, 9, 15))])
@pytest.mark.parametrize("tier", ["nvme", *map(full, ("cpu", "cached", "states"))])
def test_a_kill_in_the_switch(tier: str, num_writes: int, tmp_path: Path) -> None:
    """The generation before has the masters as they were."""
    whole = dropping(tmp_path / "whole", STEPS, **TIERS[tier])
    killed = run_script(KILLED, str(tmp_path / "parts"), tier, str(num_writes))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    losses, masters = dropping(tmp_path / "parts", STEPS, existing="resume", **TIERS[tier])
    assert 4 <= len(losses) <= 6
    check((losses, masters), (whole[0][-len(losses) :], whole[1]))
    assert main(["verify", str(tmp_path / "parts")]) == 0


@pytest.mark.parametrize("tier", ["nvme", "cpu", "cached", "states"])
@pytest.mark.parametrize("name", ["lay_anew", "write_components"])
def test_an_error_on_the_way_undoes_it(name: str, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call is made again, in the same process."""

    def before(step: int) -> None:
        if step == 4:
            fail_at(monkeypatch, ShardStore, name, 1, zo.StorageError("injected"))

    found = dropping(tmp_path, STEPS, before=before, retries=zo.StorageError, **TIERS[tier])
    check(found, written_out("ascending", 1))


# Bytes


WIDTH = 320


@pytest.mark.parametrize(
    "settings",
    [{"params": "nvme", "optimizer": "nvme"}, {"optimizer": "cpu"}, {"params": "nvme", "optimizer": "cpu"}],
    ids=["drives", "memory", "states in memory"],
)
def test_bytes_are_those_of_the_frozen_model_and_of_what_lives(settings: dict[str, Any], nvme: Path) -> None:
    """In files when the turn before has left, and as the plan says until then; however many turns there are."""
    model = build(partial(TinyLM, WIDTH, 6)).requires_grad_(False)
    config = zo.OffloadConfig(nvme=nvme, **settings)
    live = zo.LiveBlocks(model.blocks, 1, order="ascending", every=1, master="drop")
    plan = zo.plan(model, config, live=live)
    zo.offload(model, config)
    optimizer, owner, files, held = zo.AdamW(model.parameters(), lr=1e-2), runtime(model), list[int](), list[int]()
    values, block = (sum(param.numel() for param in each.parameters()) * 2 for each in (model, model.blocks[0]))
    for step in range(18):
        live.begin_step(step, optimizer)
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        zo.commit(model, optimizer)
        owner.drain()
        files.append(zo.stats(model).resident_bytes["nvme"])
        held.append(zo.stats(model).resident_bytes["cpu"])
        # Two slots of 12 bytes per parameter that lives, and a cache of its values beside states in memory.
        lives = (24 + 2 * (settings == {"params": "nvme", "optimizer": "cpu"})) * block // 2
        at_rest = sum(nbytes for shard in owner.store.shards for nbytes in _in_files(shard))
        assert at_rest == pytest.approx(values - block + lives, rel=0.02)
    assert max(files) <= 1.01 * plan.used_bytes(Tier.NVME)
    assert files[8:] == [files[-1]] * 10 and held[2:] == [held[-1]] * 16
    assert max(held) <= 1.05 * (plan.used_bytes(Tier.CPU) + plan.used_bytes(Tier.DEVICE)) + (4 << 20)
    for each in model.blocks:
        each.requires_grad_(False)
        for param in each.parameters():
            optimizer.state.pop(param, None)
    owner.drop_masters(model.parameters())
    assert sum(nbytes for shard in owner.store.shards for nbytes in _in_files(shard)) == pytest.approx(values, rel=0.02)
    zo.close(model)


def _in_files(shard: Any) -> list[int]:
    extents = [extent for slot in shard.slots for extent in slot.values()]
    return [int(each.blocks["nbytes"].sum()) for each in (*extents, *filter(None, [shard.cache]))]


def _memory_after_a_resume(rank: int, world_size: int, nvme: Path) -> tuple[int, int]:
    """In the second turn: of a run that has stopped in the first one, and of a run that has not."""
    found = list[int]()
    for name, stops in (("parts", (1, 3)), ("whole", (3,))):
        for stop in stops:
            note = partial(_note_memory, found) if stop == 3 else lambda _: None
            dropping(nvme / name, stop, existing="resume", last=note)
    return found[0], found[1]


def _note_memory(found: list[int], model: nn.Module) -> None:
    found.append(runtime(model).store.arena.allocated_bytes)


def test_memory_after_a_resume(nvme: Path, pool: RankPool) -> None:
    """Values and masters of what a generation has thawed lie in one piece of memory, where ranks divide both."""
    for resumed, whole in pool.succeed(_memory_after_a_resume, nvme):
        assert resumed <= whole


def test_turns_between_two_generations_take_no_more_room(nvme: Path) -> None:
    def files_of(every: int) -> int:
        model = build(partial(TinyLM, WIDTH, 3)).requires_grad_(False)
        settings: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "existing": "discard"}
        zo.offload(model, zo.OffloadConfig(nvme=nvme, commit_every=every, **settings))
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        live = zo.LiveBlocks(model.blocks, 1, order="ascending", every=1, master="drop")
        for step in range(12):
            live.begin_step(step, optimizer)
            model(tokens_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            zo.commit(model, optimizer)
        files = zo.stats(model).resident_bytes["nvme"]
        zo.close(model)
        return files

    assert files_of(1000) <= files_of(1)


# Refused


def test_blocks_that_were_trained_at_first() -> None:
    model = zo.offload(build(frozen).requires_grad_(True), zo.OffloadConfig())
    live = zo.LiveBlocks(model.blocks, 1, master="drop")
    with pytest.raises(zo.ConfigError, match=r"was trained when zo.offload was called.*Freeze all blocks before"):
        live.begin_step(0, zo.AdamW(model.parameters()))
    model.blocks[0].requires_grad_(True)
    with pytest.raises(zo.ConfigError, match=r"blocks\.0\.norm\.weight requires a gradient; call requires_grad_"):
        runtime(model).drop_masters(model.blocks[0].parameters())
