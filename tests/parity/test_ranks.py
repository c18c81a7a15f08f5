"""Ranks on gloo: where states rest changes no bit, and how many ranks there are changes only roundings."""

from __future__ import annotations

import copy
import functools
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.disk import SWAP
from tests.helpers.pairwise import Row, all_rows, full, in_turn, label, pairwise
from tests.helpers.ranks import Case, Failure, Outcome, RankPool, RankPools
from tests.helpers.trainer import fork_server
from zero_offload.base.types import STAGES
from zero_offload.storage.files.directory import RunDirectory

TIERS = {"device": "device", "cpu": "cpu", "nvme": "nvme", "mixed": {"cpu": 0.5, "nvme": 0.5}}
PLACEMENTS: dict[str, Sequence[Any]] = {kind: list(TIERS) for kind in ("params", "grads", "optimizer")}
RECIPES: dict[str, Sequence[Any]] = {
    "stage": [3, 2, 1, 0],
    "precision": ["fp32", "bf16", "fp16"],
    "micro_batches": [1, 2],
    "max_norm": [None, 0.5],
}
MATRIX = {"world_size": [2, 1, 3, 4], **RECIPES, **PLACEMENTS}
ALL = [{"world_size": 2} | row for row in all_rows(RECIPES | PLACEMENTS)]
ALL += [
    {"world_size": size} | recipe | placement
    for size in (1, 3, 4)
    for recipe in all_rows(RECIPES)
    for placement in pairwise(PLACEMENTS)
]
"""Two ranks with every placement; other numbers with every recipe, and every two tiers of two kinds."""
ON_DISK: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "precision": "fp32"}
FP32_TOLERANCE: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-5}


class _References:
    """Everything in memory, once per recipe."""

    def __init__(self, pools: RankPools) -> None:
        self.on = functools.cache(lambda size, *key: pools.of(size).succeed(ranks.train, _case(*key)))
        self.of = functools.partial(self.on, 2)


@pytest.fixture(scope="module")
def references(pools: RankPools) -> _References:
    return _References(pools)


def _case(stage: int, precision: str, micro_batches: int, max_norm: float | None, **settings: Any) -> Case:
    return Case({"stage": stage, "precision": precision} | settings, micro_batches=micro_batches, max_norm=max_norm)


def _check(row: Row, nvme: Path, pools: RankPools, references: _References) -> None:
    key = [row[name] for name in RECIPES]
    tiers: dict[str, Any] = {kind: TIERS[row[kind]] for kind in PLACEMENTS}
    found = pools.of(row["world_size"]).succeed(ranks.train, _case(*key, **tiers, nvme=nvme))
    assert found == references.on(row["world_size"], *key)
    # Every rank has the same model, of its own rows.
    for each in found[1:]:
        assert all(torch.equal(found[0].params[name], each.params[name]) for name in found[0].params)
        assert found[0].losses != each.losses and found[0].norms == each.norms


@pytest.mark.parametrize("row", pairwise(MATRIX), ids=label)
def test_placements_are_bit_identical(row: Row, nvme: Path, pools: RankPools, references: _References) -> None:
    _check(row, nvme, pools, references)


@pytest.mark.full
@pytest.mark.parametrize("row", ALL, ids=label)
def test_all_placements_are_bit_identical(row: Row, nvme: Path, pools: RankPools, references: _References) -> None:
    _check(row, nvme, pools, references)


def test_models_of_several_chunks_and_frames(pool: RankPool, nvme: Path) -> None:
    case = Case({"precision": "bf16"}, dim=320, num_steps=3, max_norm=1.0, num_frozen=1)
    disk = replace(case, settings=case.settings | ON_DISK | {"precision": "bf16", "grads": "nvme", "nvme": nvme})
    assert pool.succeed(ranks.train, disk) == pool.succeed(ranks.train, case)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("micro_batches", "max_norm"), [(1, None), (2, 0.5)])
def test_two_ranks_follow_one_with_the_whole_batch(
    stage: int, micro_batches: int, max_norm: float | None, references: _References
) -> None:
    two = references.of(stage, "fp32", micro_batches, max_norm)
    one = ranks.train(0, 1, _case(stage, "fp32", micro_batches, max_norm))
    _check_close(one, two)


def _check_close(one: Outcome, two: list[Outcome]) -> None:
    mean = (torch.tensor(two[0].losses) + torch.tensor(two[1].losses)) / 2
    torch.testing.assert_close(mean, torch.tensor(one.losses), **FP32_TOLERANCE)
    torch.testing.assert_close(torch.tensor(two[0].norms), torch.tensor(one.norms), **FP32_TOLERANCE)
    for name, param in one.params.items():
        torch.testing.assert_close(two[0].params[name], param, **FP32_TOLERANCE)


# Checkpoints on another number of ranks


@in_turn(stage=STAGES, num_frozen=[0, 2])
def test_a_checkpoint_of_two_ranks_loads_on_one(stage: int, num_frozen: int, pool: RankPool, tmp_path: Path) -> None:
    case = Case({"stage": stage} | ON_DISK | {"nvme": tmp_path / "two"}, num_frozen=num_frozen)
    two = pool.succeed(ranks.save, case, str(tmp_path / "saved"))
    for settings in ({"precision": "fp32"}, ON_DISK | {"nvme": tmp_path / "one"}):
        one = ranks.load(0, 1, replace(case, settings=settings), str(tmp_path / "saved"))
        assert all(torch.equal(one.params[name], two[0].params[name]) for name in two[0].params)
        _check_close(Outcome(one.losses, one.norms), [Outcome(each.losses, each.norms) for each in two])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_of_one_rank_loads_on_two(stage: int, pool: RankPool, tmp_path: Path) -> None:
    case = Case({"precision": "fp32"}, num_frozen=1)
    one = ranks.save(0, 1, case, str(tmp_path / "saved"))
    on_disk = replace(case, settings=ON_DISK | {"stage": stage, "nvme": tmp_path / "two"})
    two = pool.succeed(ranks.load, on_disk, str(tmp_path / "saved"))
    assert all(torch.equal(each.params[name], one.params[name]) for each in two for name in one.params)
    _check_close(Outcome(one.losses, one.norms), [Outcome(each.losses, each.norms) for each in two])


@in_turn(sizes=[(4, 2), (2, 4), (3, 2)], stage=[1, 3])
def test_a_checkpoint_moves_between_numbers_of_ranks(
    sizes: tuple[int, int], stage: int, pools: RankPools, tmp_path: Path
) -> None:
    saving, loading = sizes
    case = Case({"precision": "bf16", "stage": stage}, num_steps=2, num_frozen=1)
    saved = pools.of(saving).succeed(ranks.save, case, str(tmp_path / "saved"))
    other = replace(case, settings=ON_DISK | {"precision": "bf16", "stage": 4 - stage, "nvme": tmp_path / "run"})
    for found in pools.of(loading).succeed(ranks.load, other, str(tmp_path / "saved")):
        assert all(torch.equal(found.params[name], saved[0].params[name]) for name in saved[0].params)


def test_a_checkpoint_of_two_loads_on_two_exactly(pool: RankPool, tmp_path: Path) -> None:
    case = Case({"precision": "bf16"}, max_norm=1.0)
    saved = pool.succeed(ranks.save, case, str(tmp_path / "saved"))
    on_disk = replace(case, settings=ON_DISK | {"precision": "bf16", "nvme": tmp_path / "two"})
    assert pool.succeed(ranks.load, on_disk, str(tmp_path / "saved")) == saved


# Failures reach every rank, and leave the ranks in step


def _failures(results: list[Any], kind: str, words: str) -> None:
    for result in results:
        assert isinstance(result, Failure) and result.kind == kind, results
        assert words in result.message, results


def _is_in_step(pool: RankPool, references: _References) -> bool:
    return pool.succeed(ranks.train, _case(3, "fp32", 1, None)) == references.of(3, "fp32", 1, None)


def test_a_directory_in_use(pool: RankPool, nvme: Path, references: _References) -> None:
    with RunDirectory.open(nvme):
        _failures(pool.call(ranks.train, Case(ON_DISK | {"nvme": nvme})), "LockError", "in use by process")
    assert _is_in_step(pool, references)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_one_rank_cannot_make(rank: int, pool: RankPool, nvme: Path, references: _References) -> None:
    (nvme / f"rank{rank}.swap").write_bytes(b"precious")
    results = pool.call(ranks.train, Case(ON_DISK | {"nvme": nvme}))
    _failures(results, "StorageError", f"rank{rank}.swap")
    assert results[1 - rank].message.startswith(f"rank {rank}: ")
    assert (nvme / f"rank{rank}.swap").read_bytes() == b"precious"
    assert _is_in_step(pool, references)


def test_a_checkpoint_is_not_overwritten(pool: RankPool, tmp_path: Path, references: _References) -> None:
    path = tmp_path / "saved"
    results = pool.call(ranks.save_twice, Case({"precision": "fp32"}), str(path))
    _failures(results, "CheckpointError", "holds a checkpoint already")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rank1.swap").write_bytes(b"precious")
    _failures(
        pool.call(ranks.save_twice, Case({"precision": "fp32"}), str(tmp_path / "other")), "StorageError", "rank1.swap"
    )
    assert _is_in_step(pool, references)


def test_a_damaged_shard_of_one_rank(pool: RankPool, nvme: Path, references: _References) -> None:
    case = Case(ON_DISK | {"nvme": nvme, "existing": "resume"}, num_steps=2)
    pool.succeed(ranks.train, case)
    whole = (nvme / "rank1.swap").read_bytes()
    (nvme / "rank1.swap").write_bytes(whole[:4096])
    _failures(pool.call(ranks.train, replace(case, num_steps=4)), "IntegrityError", "truncated")
    (nvme / "rank1.swap").write_bytes(whole)
    longer = replace(case, num_steps=4)
    whole_run = replace(longer, settings={"precision": "fp32"})
    found, expected = pool.succeed(ranks.train, longer), pool.succeed(ranks.train, whole_run)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == Outcome(theirs.losses[2:], theirs.norms, theirs.params)
    assert _is_in_step(pool, references)


def test_a_rank_that_is_gone_ends_the_others() -> None:
    pool = RankPool(2)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as nvme:
        for connection in pool.connections:
            connection.send((ranks.fail_alone, (Case(ON_DISK | {"nvme": nvme}),)))
        survivor = pool._receive(pool.connections[0])
    assert isinstance(survivor, Failure), survivor
    assert time.monotonic() - began < ranks.TIMEOUT_S
    pool.processes[1].join(10)
    assert pool.processes[1].exitcode == 3
    pool.close()


# The whole job is killed


def _start(case: Case, out: Path) -> list[Any]:
    store = str(out / f"store{time.monotonic_ns()}")
    processes = [
        fork_server().Process(target=ranks.train_and_record, args=(rank, 2, store, case, str(out))) for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    return processes


def _start_and_kill(case: Case, out: Path, num_rows: int, delay_s: float) -> None:
    """Let the ranks record some steps, and a little more."""
    before = len(_records(out))
    processes = _start(case, out)
    # A run may be over before it is killed.
    ranks.wait_until(lambda: len(_records(out)) >= before + num_rows or not any(each.is_alive() for each in processes))
    time.sleep(delay_s)
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _records(out: Path) -> list[Any]:
    path = out / "records.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("stage", [*map(full, (0, 1, 2)), 3])
def test_both_ranks_killed_and_resumed(stage: int, tmp_path: Path) -> None:
    case = Case(ON_DISK | {"stage": stage, "existing": "resume"}, num_steps=14, max_norm=1.0)
    outs = {name: tmp_path / name for name in ("killed", "whole")}
    for name, out in outs.items():
        out.mkdir()
        moments = random.Random(stage)
        here = replace(case, settings=case.settings | {"nvme": out / "nvme"})
        for kill in range(3) if name == "killed" else ():
            _start_and_kill(here, out, num_rows=2 * kill, delay_s=moments.random() * 0.05)
        for process in _start(here, out):
            process.join(6 * ranks.TIMEOUT_S)
            assert process.exitcode == 0
    whole, killed = _records(outs["whole"]), _records(outs["killed"])
    assert [step for step, *_ in whole] == list(range(case.num_steps))
    # A step that was done twice was the same twice.
    assert {json.dumps(record) for record in killed} == {json.dumps(record) for record in whole}
    expected, found = (torch.load(outs[name] / "params.pt") for name in ("whole", "killed"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(killed) >= len(whole)


def test_names_of_files(pool: RankPool, nvme: Path) -> None:
    pool.succeed(ranks.train, Case(ON_DISK | {"nvme": nvme}, num_steps=2))
    names = {path.name for path in nvme.iterdir()}
    assert {
        SWAP,
        "rank1.swap",
        "rank0-0.json",
        "rank1-1.json",
        "generation-0.json",
        "generation-1.json",
        "run.json",
        "LOCK",
    } <= names


def offload_beside_other_groups(rank: int, world_size: int) -> None:
    """Ranks are in different numbers of process groups, and an older group goes away."""
    other = dist.new_group([0, 1], use_local_synchronization=True)
    dist.new_group([0])  # as torch wants it, by every rank
    for group in (other, None):
        model = zo.offload(nn.Linear(8, 8), zo.OffloadConfig(stage=3, precision="fp32"))
        model(torch.ones(1, 8)).sum().backward()
        zo.close(model)
        if group is not None:
            dist.destroy_process_group(group)


def test_other_process_groups_may_come_and_go(pool: RankPool) -> None:
    pool.succeed(offload_beside_other_groups)


def ask_on_several_ranks(rank: int, world_size: int, stage: int) -> str:
    """Gradients, masters and writes in blocks are those of a plain model; and the error inside of `zo.no_sync`."""
    torch.manual_seed(0)
    plain = nn.Linear(100, 100)
    model = zo.offload(copy.deepcopy(plain), zo.OffloadConfig(stage=stage, precision="fp32"))
    optimizer, own = zo.SGD(model.parameters(), lr=0.5), zo.SGD(plain.parameters(), lr=0.5)
    try:
        model(torch.full((1, 100), rank + 1.0)).square().sum().backward()
        for x in (1.0, 2.0):
            (plain(torch.full((1, 100), x)).square().sum() / 2).backward()
        with zo.gathered(model, kind="grads") as grads:
            assert all(torch.equal(grads[name], param.grad) for name, param in plain.named_parameters())
        optimizer.step()
        own.step()
        optimizer.zero_grad()
        for kind in ("params", "master"):
            with zo.gathered(model, kind=kind, mode="write") as values, torch.no_grad():
                values["weight"][1:3] *= 2.0
                values["bias"] = torch.ones(100)
            with torch.no_grad():
                plain.weight[1:3] *= 2.0
                plain.bias.fill_(1.0)
        with zo.gathered(model, kind="master") as values:
            assert all(torch.equal(values[name], param) for name, param in plain.named_parameters())
        with zo.no_sync(model):
            model(torch.ones(1, 100)).sum().backward()
            with pytest.raises(zo.ZeroOffloadError) as found, zo.gathered(model, kind="grads"):
                pass
        with zo.gathered(model, kind="grads") as grads:
            assert grads["bias"].eq(1.0).all()
        return str(found.value)
    finally:
        zo.close(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_masters_and_writes_of_several_ranks(stage: int, pool: RankPool) -> None:
    for message in pool.succeed(ask_on_several_ranks, stage):
        assert "is not reduced inside of zo.no_sync" in message


def edit_states_on_several_ranks(rank: int, world_size: int, stage: int) -> list[Any]:
    """Calls that one rank alone may make, and a reset of all ranks beside a new optimizer."""
    found: list[Any] = []
    for resets in (True, False):
        torch.manual_seed(0)
        model = zo.offload(nn.Linear(4, 4), zo.OffloadConfig(stage=stage, precision="fp32"))
        optimizer = zo.AdamW(model.parameters(), 0.1)
        losses = []
        for step in range(4):
            loss = model(torch.full((1, 4), rank + 1.0)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == 1 and resets:
                optimizer.state.clear()
            elif step == 1:
                optimizer = zo.AdamW(model.parameters(), 0.1)
        found.append(losses)
        moment = optimizer.state[model.weight]["exp_avg"]
        if rank == 0:
            assert len(optimizer.state) == 2 and float(optimizer.state[model.weight]["step"]) == 2
            assert moment.shape == (4, 4) and "exp_avg" in str(optimizer.state)
            try:
                found.append(tuple(moment.mul(1).shape))
            except zo.ZeroOffloadError as error:
                found.append(str(error))
        zo.close(model)
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_states_of_several_ranks_are_reset_and_not_read(stage: int, pool: RankPool) -> None:
    (reset, message, new, again), (other, other_new) = pool.succeed(edit_states_on_several_ranks, stage)
    assert reset == new and other == other_new and message == again
    if stage == 0:
        assert message == (4, 4)
    else:
        assert message.startswith("exp_avg of weight is divided over ranks")
        assert "optimizer.state.clear() on all ranks" in message
