"""Modules that come, go and move between steps: values, states and generations follow the parameters."""

from __future__ import annotations

import copy
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers import changing
from tests.helpers.changing import UNEVEN, change, check_same, make, play, start_again, step
from tests.helpers.fresh import run_script
from tests.helpers.models import Block, build, tokens_of
from tests.helpers.pairwise import full, in_turn
from tests.helpers.ranks import RankPool, read_params, rows_of
from tests.helpers.scripts import _average as average
from tests.helpers.thawing import TIERS
from zero_offload.cli.main import main
from zero_offload.model.api import runtime_of

NVME: dict[str, Any] = TIERS["nvme"]


def start(nvme: Path, existing: str = "discard", **settings: Any) -> tuple[nn.Module, zo.AdamW]:
    model = zo.offload(build(make), zo.OffloadConfig(precision="fp32", nvme=nvme, existing=existing, **settings))
    return model, zo.AdamW(model.parameters(), lr=1e-2)


# Random programs


@in_turn(tier=list(TIERS), precision=["fp32", "bf16"])
def test_programs(tier: str, precision: str, tmp_path: Path) -> None:
    play(len(tier), tmp_path, TIERS[tier], tokens_of, precision=precision)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_programs(seed: int, tmp_path: Path) -> None:
    for tier, settings in TIERS.items():
        for precision in ("fp32", "bf16"):
            play(seed, tmp_path / tier / precision, settings, tokens_of, precision=precision)


def on_ranks(rank: int, world_size: int, seed: int, nvme: Path, settings: dict[str, Any]) -> None:
    play(seed, nvme, settings, lambda number: rows_of(number, rank, world_size), average)


@pytest.mark.parametrize(
    ("stage", "tier", "seed"),
    [(3, "nvme", 2), (1, "cpu", 5), full(0, "nvme", 3), full(2, "cached", 4)],
)
def test_programs_on_two_ranks(stage: int, tier: str, seed: int, tmp_path: Path, pool: RankPool) -> None:
    pool.succeed(on_ranks, seed, tmp_path, TIERS[tier] | {"stage": stage})


def differ(rank: int, world_size: int) -> None:
    model = zo.offload(build(make), zo.OffloadConfig())
    try:
        changing.swap(model, rank)
        zo.offload(model)
    finally:
        zo.close(model)


def test_ranks_that_differ_raise(pool: RankPool) -> None:
    for found in pool.call(differ):
        assert found.kind == "ConfigError" and "modules that were removed or moved" in found.message


# One change at a time


def test_room_is_given_back(nvme: Path) -> None:
    """A block that comes takes the room of the last that went, in files and in memory."""
    model, optimizer = start(nvme, params="cpu", optimizer="nvme")
    owner, sizes = runtime_of(model), set()
    for number in range(6):
        changing.remove(model, number)
        zo.offload(model)
        step(model, optimizer, tokens_of(number))
        zo.commit(model, optimizer)
        changing.insert(model, number)
        zo.offload(model)
        optimizer.add_param_group({"params": [p for p in model.parameters() if id(p) not in trained(optimizer)]})
        step(model, optimizer, tokens_of(number))
        zo.commit(model, optimizer)
        owner.drain()
        if number > 1:
            sizes.add((owner.store.disk.nbytes, owner.store.arena.allocated_bytes))
    assert len(sizes) == 1
    zo.close(model)


def trained(optimizer: Any) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_parameter_gets_another_shape(tier: str, nvme: Path) -> None:
    """As `resize_token_embeddings` of transformers does it: by `.data`, which the head shares."""
    plain = build(make)
    model, optimizer = start(nvme, **TIERS[tier])
    its_optimizer = zo.AdamW(plain.parameters(), lr=1e-2)
    pairs = ((model, optimizer), (plain, its_optimizer))
    assert len({step(*each, tokens_of(0)) for each in pairs}) == 1
    for each, _ in pairs:
        old = each.embedding.weight
        rows = torch.cat([old.data, torch.ones(7, UNEVEN)])
        each.embedding.weight.data = rows
        assert each.head.weight is old and old.shape == rows.shape
    with pytest.raises(zo.ConfigError, match=r"embedding\.weight.*Call zo\.offload\(model\) again"):
        zo.commit(model, optimizer)
    zo.offload(model)
    del its_optimizer.state[plain.embedding.weight]  # what was kept has another shape
    for number in range(1, 3):
        assert len({step(*each, tokens_of(number)) for each in pairs}) == 1
    zo.commit(model, optimizer)
    check_same(model, optimizer, plain, its_optimizer)
    zo.close(model)
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, existing="resume", **TIERS[tier])
    with pytest.warns(UserWarning, match="after step 1 embedding is replaced"):
        model, optimizer = start_again(plain, its_optimizer, config)
    check_same(model, optimizer, plain, its_optimizer)
    zo.close(model)


def test_rows_of_a_parameter_are_cut_off(nvme: Path) -> None:
    model, _ = start(nvme, **NVME)
    layer = model.blocks[0].up
    expected = layer.weight[:5].clone()
    layer.weight.data = layer.weight.data[:5]
    layer.bias.data = layer.bias.data[:5]
    assert type(layer.weight) is nn.Parameter and torch.equal(layer.weight, expected)
    zo.close(model)


def test_a_view_of_what_is_to_go(nvme: Path) -> None:
    model, optimizer = start(nvme)
    loss = model(tokens_of(0))
    del model.blocks[1]
    with pytest.raises(zo.ConfigError, match=r"blocks\.1\.norm\.weight is in the model no more, .*Let it go"):
        zo.offload(model)
    loss.backward()
    del loss
    optimizer.zero_grad()
    zo.offload(model)
    zo.close(model)


def test_what_is_gone_says_so(nvme: Path) -> None:
    model, optimizer = start(nvme)
    gone = model.blocks[1]
    del model.blocks[1]
    zo.offload(model)
    step(model, optimizer, tokens_of(1))  # which has them still, without a gradient
    for use in (lambda: gone.up.weight.norm(), lambda: gone(torch.ones(1, UNEVEN)), lambda: zo.SGD(gone.parameters())):
        with pytest.raises(zo.ZeroOffloadError, match="was in no module of it when zo.offload was called again"):
            use()
    assert gone.up.weight.grad is None
    zo.close(model)


def test_generations_are_not_made_of_what_was(nvme: Path) -> None:
    model, optimizer = start(nvme)
    step(model, optimizer, tokens_of(0))
    zo.commit(model, optimizer)
    model.loss = nn.CrossEntropyLoss()
    model.blocks.append(nn.Sequential())
    step(model, optimizer, tokens_of(1))
    zo.commit(model, optimizer)
    changing.swap(model, 0)
    step(model, optimizer, tokens_of(2))
    for call in (lambda: zo.commit(model, optimizer), lambda: zo.save_checkpoint(model, optimizer, nvme / "saved")):
        with pytest.raises(zo.ConfigError, match=r"12 parameters were moved.*\(blocks\.0\.norm\.weight, .*again"):
            call()
    zo.offload(model)
    zo.commit(model, optimizer)
    zo.close(model)


def test_a_program_that_never_commits_is_told_at_the_step(nvme: Path) -> None:
    model, optimizer = start(nvme)
    step(model, optimizer, tokens_of(0))
    del model.blocks[0]
    model(tokens_of(1)).backward()
    with pytest.raises(zo.ConfigError, match=r"^step\(\): 18 parameters were moved"):
        optimizer.step()
    zo.close(model)


# Resumes


def changed(nvme: Path) -> tuple[nn.Module, Any]:
    """A plain model as it was at the last commit, and its optimizer."""
    plain = build(make)
    model, optimizer = start(nvme, **NVME)
    its_optimizer = zo.AdamW(plain.parameters(), lr=1e-2)
    for number, how in enumerate((changing.insert, changing.remove, changing.swap, changing.new_head)):
        for each, its, is_plain in ((plain, its_optimizer, True), (model, optimizer, False)):
            change(each, its, how, number + 1, is_plain=is_plain)
            step(each, its, tokens_of(number))
        zo.commit(model, optimizer)
    zo.close(model)
    return plain, its_optimizer


def test_a_resume_says_what_became_of_each(nvme: Path) -> None:
    plain, its_optimizer = changed(nvme)
    assert main(["verify", str(nvme)]) == 0
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, existing="resume", **NVME)
    history = (
        r"after step 0 blocks\.1 is blocks\.2 \(6 parameters\), blocks\.2 is blocks\.3 \(6 parameters\), blocks\.1 is "
        r"new \(6 parameters\); after step 1 blocks\.3 is blocks\.2 \(6 parameters\), blocks\.2 is removed \(6 "
        r"parameters\); after step 2 blocks\.0 is blocks\.1 .*; after step 3 head is new"
    )
    others: dict[str, nn.Module] = {
        r"this model lacks: head": build(make),
        r"head\.weight has shape=\[": copy.deepcopy(plain),
    }
    others[r"head\.weight has shape=\["].head = nn.Linear(UNEVEN, 3, bias=False)
    files = {path.name: path.read_bytes() for path in nvme.iterdir() if path.suffix == ".json"}
    for words, model in others.items():
        with pytest.raises(zo.CheckpointError, match=f"{words}.*Build the model as it was"):
            zo.offload(model.float(), config)
        with pytest.raises(zo.CheckpointError, match=history):
            zo.offload(model.float(), config)
    assert {name: (nvme / name).read_bytes() for name in files} == files
    with pytest.warns(UserWarning, match=history):
        model, optimizer = start_again(plain, its_optimizer, config)
    check_same(model, optimizer, plain, its_optimizer)
    zo.close(model)
    model, optimizer = start_again(plain, its_optimizer, config)  # where the model has its parameters
    check_same(model, optimizer, plain, its_optimizer)
    changing.swap(model, 0)
    zo.offload(model)
    zo.close(model)


def test_changes_come_after_the_resume(nvme: Path) -> None:
    plain, _ = changed(nvme)
    model = zo.offload(copy.deepcopy(plain), zo.OffloadConfig(precision="fp32", nvme=nvme, existing="resume", **NVME))
    changing.swap(model, 0)
    with pytest.raises(zo.ConfigError, match=r"modules were moved \(blocks\.0.* before zo\.resume has given back"):
        zo.offload(model)
    zo.close(model)


def test_checkpoints_go_by_names(tmp_path: Path) -> None:
    """A model that has changed loads them, and a model that was built so; another one raises."""
    model, optimizer = start(tmp_path / "nvme", **NVME)
    for number, how in enumerate((changing.insert, changing.remove, changing.new_head)):
        change(model, optimizer, how, number + 1, is_plain=False)
        step(model, optimizer, tokens_of(number))
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    expected = read_params(model)
    step(model, optimizer, tokens_of(9))
    zo.load_checkpoint(model, optimizer, tmp_path / "saved")
    assert all(torch.equal(values, expected[name]) for name, values in read_params(model).items())
    other = build(make)
    other.head = nn.Linear(UNEVEN, model.head.weight.shape[0], bias=False)
    zo.offload(other, zo.OffloadConfig(precision="fp32"))
    zo.load_checkpoint(other, None, tmp_path / "saved")
    assert all(torch.equal(values, expected[name]) for name, values in read_params(other).items())
    with pytest.raises(zo.CheckpointError, match="this model lacks"):
        zo.load_checkpoint(zo.offload(build(make), zo.OffloadConfig(precision="fp32")), None, tmp_path / "saved")
    zo.close(model)


def test_a_resumed_model_grows_after_several_commits(nvme: Path) -> None:
    """Generations that a resume has found are written over by then."""
    for _ in range(2):
        model, optimizer = start(nvme, existing="resume", **NVME)
        zo.resume(model, optimizer)
        for number in range(3):
            step(model, optimizer, tokens_of(number))
            zo.commit(model, optimizer)
        if runtime_of(model).keeper.found is not None:  # type: ignore[union-attr]
            model.blocks.append(Block(UNEVEN))
            zo.offload(model)
        zo.close(model)


KILLED = """
import os, signal, sys
from pathlib import Path
import zero_offload as zo
from tests.helpers.changing import change, insert, make, new_head, remove, step
from tests.helpers.models import build, tokens_of
from tests.helpers.thawing import TIERS
from zero_offload.checkpoint import generation
from zero_offload.storage.files.swap_file import SwapFile
nvme, tier, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def counted(call):
    def run(*args):
        global count
        count -= 1
        if count < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args)
    return run
model = zo.offload(build(make), zo.OffloadConfig(precision="bf16", nvme=nvme, existing="discard", **TIERS[tier]))
optimizer = zo.AdamW(model.parameters(), lr=1e-2)
for number in range(3):  # the last one is in the first slot, which a block that comes writes first
    step(model, optimizer, tokens_of(number))
    zo.commit(model, optimizer)
from zero_offload.model.api import runtime_of
runtime_of(model).drain()
SwapFile.launch_write = counted(SwapFile.launch_write)
generation.write_manifest = counted(generation.write_manifest)
for how in (remove, insert, new_head):
    change(model, optimizer, how, 1, is_plain=False)
step(model, optimizer, tokens_of(3))
zo.commit(model, optimizer)
runtime_of(model).drain()
print(count, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("tier", ["nvme", full("cpu"), full("cached")])
def test_kills_in_the_first_commit_after_a_change(tier: str, tmp_path: Path) -> None:
    """Until the commit point the generation before is whole, with all that is gone since; after it, the new one."""
    whole = run_script(KILLED, str(tmp_path / "whole"), tier, "1000")
    num_calls = 1000 - int(whole.stdout)
    plain = build(make)
    optimizer = zo.AdamW(plain.bfloat16().parameters(), lr=1e-2)
    for number in range(3):
        step(plain, optimizer, tokens_of(number))
    after, its_optimizer = copied(plain, optimizer)
    for how in (changing.remove, changing.insert, changing.new_head):
        change(after, its_optimizer, how, 1, is_plain=True)
    step(after, its_optimizer, tokens_of(3))
    for count in dict.fromkeys((0, num_calls // 2, num_calls - 2, num_calls - 1, 1000)):
        nvme = tmp_path / str(count)
        killed = run_script(KILLED, str(nvme), tier, str(count))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        config = zo.OffloadConfig(precision="bf16", nvme=nvme, existing="resume", **TIERS[tier])
        expected = (plain, optimizer) if count < num_calls else (after, its_optimizer)
        model, resumed = start_again(*expected, config)
        check_same(model, resumed, *expected)
        zo.close(model)


def copied(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    twin = copy.deepcopy(model)
    its = zo.AdamW(twin.parameters(), lr=1e-2)
    its.load_state_dict(optimizer.state_dict())
    return twin, its


# Refused


def test_what_cannot_follow(nvme: Path) -> None:
    model = zo.offload(build(make), zo.OffloadConfig(overlap="backward", params="nvme", optimizer="nvme", nvme=nvme))
    del model.blocks[0]
    with pytest.raises(zo.ConfigError, match="overlap='backward'"):
        zo.offload(model)
    zo.close(model)
