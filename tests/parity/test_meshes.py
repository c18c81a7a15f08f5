"""Four ranks as a device mesh: hybrid sharding, and several models trained by different ranks of one program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.models import TinyLM, build
from tests.helpers.pairwise import full, in_turn
from tests.helpers.ranks import Case, Failure, Outcome, RankPool, RankPools
from zero_offload.base.types import Tier

HYBRID, STRIDED = ((0, 1), (2, 3)), ((0, 2), (1, 3))
CASE = Case({"precision": "fp32"}, num_steps=4, micro_batches=2, max_norm=0.5, num_frozen=1)


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(4)


def at(stage: int, case: Case = CASE, **settings: Any) -> Case:
    return replace(case, settings=case.settings | {"stage": stage} | settings)


def check_close(one: Outcome, several: list[Outcome]) -> None:
    mean = torch.tensor([each.losses for each in several]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(one.losses), rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(torch.tensor(several[0].norms), torch.tensor(one.norms), rtol=2e-4, atol=2e-5)


@in_turn(mesh=[HYBRID, STRIDED, None], stage=[3, 1, 2], no_sync=[True, False])
def test_four_ranks_follow_one(stage: int, mesh: Any, no_sync: bool, pool: RankPool, nvme: Path) -> None:
    case = replace(at(stage), mesh=mesh, no_sync=no_sync)
    found = pool.succeed(ranks.train, case)
    check_close(ranks.train(0, 1, CASE), found)
    for each in found[1:]:
        assert all(torch.equal(each.params[name], found[0].params[name]) for name in found[0].params)
        assert each.norms == found[0].norms
    disk = at(stage, case, params="nvme", grads="nvme", optimizer="nvme", nvme=nvme, device_memory="4MiB")
    assert pool.succeed(ranks.train, disk) == found


@pytest.mark.parametrize(
    ("stage", "mesh"),
    [(3, STRIDED), *(full(*each) for each in [(1, HYBRID), (3, HYBRID), (1, STRIDED)])],
)
def test_hybrid_generations_and_checkpoints(stage: int, mesh: Any, pool: RankPool, tmp_path: Path) -> None:
    settings = {"params": "nvme", "optimizer": "nvme", "nvme": tmp_path / "run", "existing": "resume"}
    case = replace(at(stage, **settings), mesh=mesh)
    whole = pool.succeed(ranks.train, replace(at(stage), mesh=mesh, num_steps=5))
    pool.succeed(ranks.train, replace(case, num_steps=3))
    resumed = pool.succeed(ranks.train, replace(case, num_steps=5))
    for found, expected in zip(resumed, whole, strict=True):
        assert found == Outcome(expected.losses[6:], expected.norms[3:], expected.params)
    saved = pool.succeed(ranks.save, replace(at(stage), mesh=mesh), str(tmp_path / "saved"))
    one = ranks.load(0, 1, CASE, str(tmp_path / "saved"))
    assert all(torch.equal(one.params[name], saved[0].params[name]) for name in one.params)


def train_in_two_halves(rank: int, world_size: int, case: Case) -> Outcome:
    """Ranks 0 and 1 train one model, 2 and 3 another, for different times."""
    halves = DeviceMesh("cpu", list(HYBRID), mesh_dim_names=("half", "shard"))
    return ranks.train(rank % 2, 2, replace(case, mesh=halves["shard"], num_steps=case.num_steps - rank // 2))


def test_meshes_of_part_of_the_ranks(pool: RankPool, pools: RankPools) -> None:
    first, second = (pools.of(2).succeed(ranks.train, replace(CASE, num_steps=steps)) for steps in (4, 3))
    assert pool.succeed(train_in_two_halves, CASE) == first + second


def train_on_some_then_on_all(rank: int, world_size: int, case: Case) -> list[Outcome]:
    """Three of four ranks train a model, then two pairs, then all."""
    three = DeviceMesh("cpu", [0, 1, 2])
    if rank < 3:
        zo.close(zo.offload(build(TinyLM), zo.OffloadConfig(**case.settings), three))
    halves = DeviceMesh("cpu", list(HYBRID), mesh_dim_names=("half", "shard"))
    pair = ranks.train(rank % 2, 2, replace(case, mesh=halves["shard"]))
    return [pair, ranks.train(rank, 4, replace(case, mesh=DeviceMesh("cpu", [0, 1, 2, 3])))]


def test_models_on_different_ranks_one_after_the_other(pool: RankPool, pools: RankPools) -> None:
    pairs, all_ranks = pools.of(2).succeed(ranks.train, CASE), pool.succeed(ranks.train, CASE)
    found = pool.succeed(train_on_some_then_on_all, CASE)
    assert found == [[pair, whole] for pair, whole in zip(pairs * 2, all_ranks, strict=True)]


def offload_on(rank: int, world_size: int, mesh: Any, device_type: str) -> None:
    zo.offload(build(TinyLM), zo.OffloadConfig(), DeviceMesh(device_type, mesh))


def plan_on(rank: int, world_size: int, mesh: Any) -> dict[str, int]:
    config, place = zo.OffloadConfig(), None if mesh is None else DeviceMesh("cpu", mesh)
    plan = zo.plan(TinyLM(), config, mesh=place)
    zo.offload(build(TinyLM), config, place)
    return {kind.value: nbytes for (tier, kind), nbytes in plan.rest_bytes.items() if tier is Tier.CPU}


def test_a_plan_counts_what_a_mesh_divides(pool: RankPool) -> None:
    flat, hybrid = pool.succeed(plan_on, None)[0], pool.succeed(plan_on, HYBRID)[0]
    for kind, nbytes in flat.items():
        assert hybrid[kind] == pytest.approx(2 * nbytes, abs=16), kind
    failures = pool.call(plan_on, [[[0, 1], [2, 3]]])
    assert all(isinstance(each, Failure) and "mesh has 3 dimensions" in each.message for each in failures)


def test_meshes_that_cannot_be_used(pool: RankPool) -> None:
    for failure in pool.call(offload_on, [[[0, 1], [2, 3]]], "cpu"):
        assert isinstance(failure, Failure) and failure.kind == "ConfigError"
        assert "mesh has 3 dimensions" in failure.message
    results = pool.call(offload_on, [0, 1, 2], "cpu")
    assert isinstance(results[3], Failure) and "rank 3 is not in the mesh" in results[3].message
    assert results[:3] == [None] * 3
    for failure in pool.call(offload_on, [[0, 3], [2, 1]], "cpu"):
        assert isinstance(failure, Failure) and "do not ascend along a dimension" in failure.message
    with pytest.raises(zo.ConfigError, match="mesh is a str; use .*init_device_mesh"):
        zo.offload(build(TinyLM), zo.OffloadConfig(), "cpu")  # type: ignore[arg-type]
