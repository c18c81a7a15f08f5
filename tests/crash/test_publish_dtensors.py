"""Published checkpoints of tensor-parallel models: a start without drives has the bits, whatever mesh divides it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import zero_offload as zo
from tests.crash.test_publish import names, wait_until_published
from tests.helpers.models import build
from tests.helpers.pairwise import full, in_turn
from tests.helpers.ranks import Failure, RankPools
from tests.helpers.reference import read_masters
from tests.parity.test_tensor_parallel import ROWS, Case, Model, Outcome, at, go_on, start, train, whole_params

NVME = {"params": "nvme", "optimizer": "nvme", "existing": "resume", "publish_every": 1}


def case_of(tmp_path: Path, nvme: str, **settings: Any) -> Case:
    return Case({"precision": "fp32", **NVME, "nvme": tmp_path / nvme, "publish": tmp_path / "out", **settings})


def train_slowly(rank: int, size: int, case: Case) -> tuple[int, Outcome]:
    """Train; each step waits until the one before is published. Gives the first step, too."""
    model, optimizer = start(case)
    try:
        resumed, out = zo.resume(model, optimizer), Outcome()
        first = 0 if resumed is None else resumed.extra
        for step in range(first, case.num_steps):
            each = go_on(rank, case, model, optimizer, range(step, step + 1))
            out.losses, out.norms = out.losses + each.losses, out.norms + each.norms
            wait_until_published(model)
        out.params = whole_params(model)
        return first, out
    finally:
        zo.close(model)


def published(tmp_path: Path) -> dict[str, Tensor]:
    """The newest checkpoint as torch reads it, whole."""
    state = {f"model.{name}": torch.empty_like(each) for name, each in build(Model).state_dict().items()}
    kinds = ("exp_avg", "exp_avg_sq")
    params = build(Model).named_parameters()
    state |= {f"optimizer.state.{name}.{kind}": torch.empty_like(each) for name, each in params for kind in kinds}
    dcp.load(state, checkpoint_id=str(max((tmp_path / "out").iterdir())), no_dist=True)
    return state


@in_turn(stage=[3, 1, 0], plan=["sequence", "vocabulary", "matrices"], precision=["fp32", "bf16"])
def test_a_start_without_drives_has_every_part(
    stage: int, plan: str, precision: str, pools: RankPools, tmp_path: Path
) -> None:
    case = replace(case_of(tmp_path, "run", stage=stage, precision=precision), plan=plan)
    pool = pools.of(4)
    expected = pool.succeed(train, at(case, nvme=tmp_path / "whole", publish=None))
    pool.succeed(train_slowly, replace(case, num_steps=2))
    found_by_rank = pool.succeed(train_slowly, at(case, nvme=tmp_path / "new"))
    for (first, found), whole in zip(found_by_rank, expected, strict=True):
        assert first == 2 and found == Outcome(whole.losses[2:], whole.norms[2:], whole.params)
    assert names(tmp_path / "out") == ["2", "3"]


@pytest.mark.parametrize(("plan", "stage"), [("sequence", 3), full("vocabulary", 1), full("matrices", 3)])
def test_other_meshes_go_on(plan: str, stage: int, pools: RankPools, tmp_path: Path) -> None:
    """Two by two, then each other mesh: of fewer ranks, and none at all."""
    case = replace(case_of(tmp_path, "run", stage=stage), plan=plan, num_steps=2)
    (_, out), *_ = pools.of(4).succeed(train_slowly, case)
    state = published(tmp_path)
    assert all(torch.equal(state[f"model.{name}"], values) for name, values in out.params.items())
    # As it was then, for all that start from there.
    case = at(case, publish_every="1h")
    after: list[dict[str, Tensor]] = []
    for shape in ((2, 2), (1, 4), (4, 1), (1, 2)):
        other = replace(at(case, nvme=tmp_path / f"run {shape}"), shape=shape)
        for first, found in pools.of(shape[0] * shape[1]).succeed(train_slowly, other):
            assert first == 2 and all(torch.equal(found.params[name], each) for name, each in out.params.items())
        # A step of other masters, or other states, would be off by about the learning rate, 1e-2.
        (_, found), *_ = pools.of(shape[0] * shape[1]).succeed(train_slowly, replace(other, num_steps=3))
        after.append(found.params)
    for each in after:
        for name, values in after[0].items():
            torch.testing.assert_close(each[name], values, rtol=2e-4, atol=5e-5)
    model = zo.offload(build(Model), zo.OffloadConfig(**case.settings | {"nvme": tmp_path / "none"}))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    assert (resumed := zo.resume(model, optimizer)) is not None and resumed.extra == 2
    found_states = {f"model.{name}": values for name, values in read_masters(model).items()}
    for name, param in model.named_parameters():
        found_states |= {
            f"optimizer.state.{name}.{kind}": optimizer.state[param][kind].clone() for kind in ("exp_avg", "exp_avg_sq")
        }
    assert found_states.keys() == state.keys()
    assert all(torch.equal(found_states[name].view_as(state[name]), state[name]) for name in state)
    zo.close(model)


def start_otherwise(rank: int, size: int, case: Case) -> None:
    model = torch.nn.Sequential(build(Model), torch.nn.Linear(ROWS, ROWS))
    zo.offload(model, zo.OffloadConfig(**case.settings))


def test_another_model_is_refused(pools: RankPools, tmp_path: Path) -> None:
    case = replace(case_of(tmp_path, "run"), num_steps=1, shape=(1, 2))
    pools.of(2).succeed(train_slowly, case)
    for failure in pools.of(2).call(start_otherwise, at(case, nvme=tmp_path / "other")):
        assert isinstance(failure, Failure) and failure.kind == "CheckpointError", failure
        assert "holds another model" in failure.message or "does not come into this one: only one of" in failure.message
