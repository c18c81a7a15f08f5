"""Experts in groups compute what all experts together compute, bit for bit, on every placement."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers import experts
from tests.helpers.experts import NUM_EXPERTS, TOP_K, experts_lm, trained
from tests.helpers.models import build, tokens_of
from tests.helpers.pairwise import Row, label, pairwise
from tests.helpers.ranks import RankPools
from tests.helpers.reference import Recipe, Trajectory, param_groups, read_masters, train_offloaded, train_plain
from zero_offload.base.types import FRAME, MIB
from zero_offload.model.api import need_runtime
from zero_offload.plan.expert_groups import group_bytes
from zero_offload.plan.layout import CHUNK_NUMEL
from zero_offload.runtime.experts import GroupedExperts

MATRIX: dict[str, Any] = {
    "params": ["cpu", "nvme", {"cpu": 0.5, "nvme": 0.5}],
    "optimizer": ["cpu", "nvme"],
    "precision": ["fp32", "bf16"],
    "size": [1, 2, 4, NUM_EXPERTS],
    "micro_batches": [1, 2],
    "checkpointing": [False, True],
    "activations": ["device", "cpu", "nvme"],
    "trains": [False, True],
    "grads": ["cpu", "nvme"],
    "max_norm": [None, 0.5],
}
RANKS: dict[str, Any] = {
    "stage": [3, 2, 1, 0],
    "params": ["cpu", "nvme"],
    "precision": ["fp32", "bf16"],
    "size": [1, 4],
    "world_size": [2, 3],
    "trains": [False, True],
}


def make(size: int, *, checkpointing: bool = False, inner: int = 24, trains: bool = False) -> nn.Module:
    model = experts_lm(size=size, inner=inner, trained=trains)
    if checkpointing:
        zo.checkpoint(model.blocks)
    return model


@functools.cache
def plain(
    precision: str, micro_batches: int = 1, max_norm: float | None = None, inner: int = 24, *, trains: bool = False
) -> Trajectory:
    model = functools.partial(make, 0, inner=inner, trains=trains)
    found = train_plain(Recipe(model, precision, 3, micro_batches, max_norm))
    return found if trains else trained(found)


@pytest.mark.parametrize("row", pairwise(MATRIX), ids=label)
def test_experts_in_groups_train_to_the_bits_of_plain_tensors(row: Row, nvme: Path) -> None:
    model = functools.partial(make, row["size"], checkpointing=row["checkpointing"], trains=row["trains"])
    recipe = Recipe(model, row["precision"], 3, row["micro_batches"], row["max_norm"])
    settings = {name: row[name] for name in ("params", "grads", "optimizer", "activations", "precision")}
    found = train_offloaded(recipe, zo.OffloadConfig(nvme=nvme, durability="scratch", **settings))
    expected = plain(row["precision"], row["micro_batches"], row["max_norm"], trains=row["trains"])
    assert (found if row["trains"] else trained(found)) == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_groups_that_begin_inside_of_a_block_of_the_drive(precision: str, nvme: Path) -> None:
    inner = 9000  # of the first parameter 576,000 elements are one expert's, and 2^20 a block
    recipe = Recipe(functools.partial(make, 2, inner=inner), precision, 3)
    found = train_offloaded(recipe, zo.OffloadConfig(nvme=nvme, params="nvme", precision=precision))
    assert trained(found) == plain(precision, inner=inner)


@pytest.mark.parametrize("row", pairwise(RANKS), ids=label)
def test_ranks_gather_groups_though_their_tokens_choose_other_experts(
    row: Row, pools: RankPools, tmp_path: Path
) -> None:
    settings = {"stage": row["stage"], "precision": row["precision"], "durability": "scratch"}
    model = functools.partial(experts_lm, num_blocks=2, dim=48, inner=40, trained=row["trains"])
    pool = pools.of(row["world_size"])
    whole = pool.succeed(experts.train, functools.partial(model, size=0), settings)
    grouped = functools.partial(model, size=row["size"])
    found = pool.succeed(experts.train, grouped, settings | {"params": row["params"], "nvme": tmp_path})
    assert found == whole


@pytest.mark.parametrize("how", ["plain", "by_unit", "no_sync"])
@pytest.mark.parametrize(("stage", "trains"), [(0, True), (2, True), (3, True), (1, False), (3, False)])
@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_that_meets_no_expert_adds_zeros(
    alone: int, stage: int, how: str, pools: RankPools, *, trains: bool
) -> None:
    """To routers too. Where no rank meets one, parameters stay, without decay."""
    model = functools.partial(experts_lm, num_blocks=2, trained=trains)
    settings = {"stage": stage, "params": "cpu", "durability": "scratch"}
    job = experts.train_beside_none, functools.partial(model, size=2), settings, alone, how
    pool = pools.of(2)
    expected, _ = pool.succeed(experts.plain_beside_none, functools.partial(model, size=0), alone, how)
    for found in pool.succeed(*job):
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_goes_on_from_its_generation(precision: str, overlap: str, nvme: Path) -> None:
    def train(folder: str, span: range) -> dict[str, Tensor]:
        model = build(functools.partial(make, 2, trains=True))
        settings = {"params": "nvme", "optimizer": "nvme", "precision": precision, "overlap": overlap}
        zo.offload(model, zo.OffloadConfig(nvme=nvme / folder, existing="resume", **settings))
        optimizer = zo.AdamW(param_groups(model), lr=1e-2)
        zo.resume(model, optimizer)
        for step in span:
            model(tokens_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            zo.commit(model, optimizer)
        masters = read_masters(model)
        zo.close(model)
        return masters

    whole = train("a", range(4))
    train("b", range(2))
    found = train("b", range(2, 4))
    assert [name for name in whole if not torch.equal(whole[name], found[name])] == []
    if overlap == "backward":
        other = build(functools.partial(make, 0, trains=True))
        zo.offload(other, zo.OffloadConfig(precision=precision, durability="scratch"))
        optimizer = zo.AdamW(param_groups(other), lr=1e-2)
        for step in range(4):
            other(tokens_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = read_masters(other)
        assert [name for name in whole if not torch.equal(whole[name], expected[name])] == []


def test_experts_tied_in_part_are_an_error() -> None:
    """One module's unit would have a part of another's experts. Tied in all of them, both compute."""
    config = zo.OffloadConfig(params="cpu", precision="fp32", durability="scratch")
    model: Any = make(2, trains=True)
    model.blocks[1].experts.up = model.blocks[0].experts.up
    with pytest.raises(zo.ConfigError, match=r"blocks\.1\.experts shares some .* with blocks\.0\.experts, and has"):
        zo.offload(model, config)
    plain_model: Any = build(functools.partial(make, 0))
    found = list[float]()
    for model in (plain_model, build(functools.partial(make, 2))):
        for name, param in model.blocks[0].experts.named_parameters():
            setattr(model.blocks[1].experts, name, param)
        if model is not plain_model:
            zo.offload(model, config)
        found.append(model(tokens_of(0)).item())
    zo.close(model)
    assert found[0] == found[1]


def test_autocast(nvme: Path) -> None:
    def masters(size: int) -> dict[str, Tensor]:
        model = build(functools.partial(make, size, trains=True))
        zo.offload(model, zo.OffloadConfig(precision="fp32", params="nvme", nvme=nvme, existing="discard"))
        optimizer = zo.AdamW(param_groups(model), lr=1e-2)
        for step in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens_of(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found = read_masters(model)
        zo.close(model)
        return found

    whole, grouped = masters(0), masters(2)
    assert [name for name in whole if not torch.equal(whole[name], grouped[name])] == []


def test_without_gradients_experts_that_no_token_chooses_are_not_read(nvme: Path) -> None:
    model = build(functools.partial(experts_lm, inner=40_000, size=3, num_blocks=1)).eval()
    zo.offload(model, zo.OffloadConfig(nvme=nvme, params="nvme", precision="bf16", durability="scratch"))
    counters = need_runtime(model, "a test").store.counters
    reads = list[float]()
    for tokens in (tokens_of(0)[:1, :2], tokens_of(0)):
        before = counters.snapshot()["read.nvme"] if reads else 0
        with torch.no_grad():
            model(tokens)
        reads.append(counters.snapshot()["read.nvme"] - before)
    zo.close(model)
    experts_bytes = 2 * NUM_EXPERTS * 3 * 32 * 40_000
    assert TOP_K / NUM_EXPERTS * experts_bytes < reads[0] < 0.6 * experts_bytes < experts_bytes < reads[1]


@pytest.mark.parametrize("together", [False, True])
def test_each_micro_batch_fetches_its_groups(*, together: bool, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(functools.partial(experts_lm, size=2))
    zo.offload(model, zo.OffloadConfig(nvme=nvme, params="nvme", precision="fp32", durability="scratch"))
    fetched, fetch = list[range](), GroupedExperts.fetch

    def noted(self: GroupedExperts, call: Any, span: range, *rest: Any, **names: Any) -> dict[str, Tensor]:
        fetched.append(span)
        return fetch(self, call, span, *rest, **names)

    monkeypatch.setattr(GroupedExperts, "fetch", noted)
    batches = [tokens_of(number) for number in range(4)]
    if together:
        zo.accumulate(model, batches, lambda model, batch: model(batch))
    else:
        for batch in batches:
            model(batch).backward()
    zo.close(model)
    assert len(fetched) == 4 * 2 * 3 * NUM_EXPERTS // 2  # micro-batches, passes, blocks, groups


def test_memory_holds_two_groups_and_no_more_of_the_experts(nvme: Path) -> None:
    resident, groups = dict[int, int](), dict[int, int]()
    for size in (1, 3):
        model = build(functools.partial(experts_lm, inner=40_000, size=size, num_blocks=2))
        folder = nvme / str(size)
        config = zo.OffloadConfig(nvme=folder, params="nvme", precision="bf16", durability="scratch")
        zo.offload(model, config)
        optimizer = zo.SGD(param_groups(model), lr=1e-2)
        for step in range(2):
            model(tokens_of(step)).backward()
            optimizer.step()
        resident[size] = zo.stats(model).resident_bytes["cpu"]
        units = need_runtime(model, "a test").layout.units
        groups[size] = max(map(group_bytes, units))
        zo.close(model)
    slices = 3 * 32 * 40_000 * 2  # of one expert, in bytes
    blocks = 3 * 2 * CHUNK_NUMEL * 2  # at both ends of each of three parameters
    assert slices < groups[1] <= slices + blocks + MIB
    assert 3 * slices < groups[3] <= 3 * slices + blocks + MIB
    assert resident[1] < 2 * groups[1] + 16 * MIB
    assert abs((resident[3] - resident[1]) - 2 * (groups[3] - groups[1])) <= 4 * FRAME
