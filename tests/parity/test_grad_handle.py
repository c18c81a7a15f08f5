"""`.grad` of gradients at rest: other people's clipping works on every placement, and changes no bit where it clips
nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.models import Branching, TinyLM, build, tokens_of
from tests.helpers.pairwise import Row, label, pairwise
from tests.helpers.ranks import Case, Failure, Outcome, RankPool
from tests.helpers.reference import placed, read_masters

NUM_STEPS, LR, MAX_NORM = 4, 1e-3, 0.5
SCALE = 2.0**8
PLACEMENTS = [("cpu", "cpu", "cpu"), ("device", "cpu", "nvme"), ("nvme", "nvme", "nvme")]

Clip = Callable[[nn.Module], float]


def no_clip(model: nn.Module) -> float:
    return 0.0


def by_torch(model: nn.Module) -> float:
    return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()


def by_parts(model: nn.Module, norm_type: float = 2.0) -> float:
    norm = nn.utils.get_total_norm([param.grad for param in model.parameters()], norm_type)
    nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm)
    return norm.item()


def by_largest(model: nn.Module) -> float:
    return by_parts(model, math.inf)


def by_value(model: nn.Module) -> float:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return 0.0


def by_zo(model: nn.Module) -> float:
    return zo.clip_grad_norm_(model, MAX_NORM).item()


CLIPS: dict[str, Clip] = {
    "none": no_clip,
    "torch": by_torch,
    "parts": by_parts,
    "largest": by_largest,
    "value": by_value,
    "zo": by_zo,
}
EXACT = ("none", "value", "largest")
"""Those whose numbers do not depend on how squares are added up."""


def train(model: nn.Module, clip: Clip, scales: bool, micro_batches: int) -> tuple[list[float], dict[str, Tensor]]:
    optimizer, norms = zo.AdamW(model.parameters(), lr=LR), []
    scaler = zo.GradScaler(SCALE, enabled=scales)
    for step in range(NUM_STEPS):
        for micro in range(micro_batches):
            scaler.scale(model(tokens_of(2 * step + micro))).backward()
        scaler.unscale_(optimizer)
        norms.append(clip(model))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return norms, {name: value.clone() for name, value in model.state_dict().items()}


def check_near(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    """torch adds up squares in fp32, so the factor may differ in its last bit: the weights by 2e-7, or their own."""
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert math.isclose(mine, theirs, rel_tol=1e-6)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1.2e-7, atol=2e-7)


def same(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> bool:
    return found[0] == expected[0] and all(torch.equal(found[1][name], value) for name, value in expected[1].items())


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", ["none", "torch", "parts", "largest", "value"])
def test_clipping_has_the_same_bits_on_all_placements(name: str, micro_batches: int, nvme: Path) -> None:
    """And those of plain torch, as far as its sums of squares are exact."""
    clip, expected = CLIPS[name], None
    plain = train(build(TinyLM), clip, False, micro_batches)
    for index, placement in enumerate(PLACEMENTS):
        model = zo.offload(build(TinyLM), placed("fp32", placement, nvme))
        found = train(model, clip, bool(index), micro_batches)  # a power of two changes no bit
        zo.close(model)
        expected = expected or found
        assert same(found, expected)
    assert expected is not None
    check_near(expected, plain)
    assert name not in EXACT or same(expected, plain)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_clipping_in_16_bits_has_the_same_bits_on_all_placements(precision: str, nvme: Path) -> None:
    found = []
    for placement in PLACEMENTS:
        model = zo.offload(build(TinyLM), placed(precision, placement, nvme))
        found.append(train(model, by_torch, True, 1) + (read_masters(model),))
        zo.close(model)
    (norms, _, masters), *others = found
    for other_norms, _, other in others:
        assert other_norms == norms and all(torch.equal(other[name], master) for name, master in masters.items())


# Ranks


def train_ranks(rank: int, world_size: int, case: Case, clip: str, scales: bool) -> Outcome:
    model, optimizer = ranks.start(case)
    out, scaler = Outcome(), zo.GradScaler(SCALE, enabled=scales)
    try:
        for step in range(case.num_steps):
            for micro in range(case.micro_batches):
                scaler.scale(model(ranks.rows_of(2 * step + micro, rank, world_size))).backward()
            scaler.unscale_(optimizer)
            out.norms.append(CLIPS[clip](model))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        out.params = ranks.read_params(model)
        return out
    finally:
        zo.close(model)


FACTORS: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3],
    "grads": ["cpu", "nvme"],
    "clip": ["torch", "largest", "value"],
    "scales": [False, True],
    "micro_batches": [1, 2],
}


@pytest.fixture
def pool(pools: Any) -> RankPool:
    found: RankPool = pools.of(2)
    return found


def settings_of(row: Row, nvme: Path) -> dict[str, Any]:
    return {"stage": row["stage"], "precision": "fp32", "grads": row["grads"], "nvme": nvme, "existing": "discard"}


EXPECTED: dict[tuple[str, int, bool], Outcome] = {}


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=label)
def test_ranks_clip_alike(row: Row, pool: RankPool, nvme: Path) -> None:
    """The same bits on both ranks, at every stage and placement. Where a sum over micro-batches is reduced once they
    differ from those where each is.
    """
    case = Case(settings_of(row, nvme), num_steps=2, micro_batches=row["micro_batches"])
    first, second = pool.succeed(train_ranks, case, row["clip"], row["scales"])
    assert first == second
    key = row["clip"], row["micro_batches"], row["stage"] == 1
    expected = EXPECTED.setdefault(key, first)
    assert first == expected


@pytest.mark.parametrize("stage", [1, 3])
def test_torchs_clip_on_ranks_is_ours_to_a_rounding(stage: int, pool: RankPool) -> None:
    case = Case({"stage": stage, "precision": "fp32"}, num_steps=2)
    ours, theirs = (pool.succeed(train_ranks, case, clip, False)[0] for clip in ("zo", "torch"))
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-6)
    for name, value in ours.params.items():
        torch.testing.assert_close(theirs.params[name], value, rtol=1.2e-7, atol=2e-7)


def look_alone(rank: int, world_size: int, stage: int, act: str) -> list[float]:
    """Rank 0 alone looks at gradients, or changes one."""
    model, optimizer = ranks.start(Case({"stage": stage, "precision": "fp32"}))
    try:
        model(ranks.rows_of(0, rank, world_size)).backward()
        params = list(model.parameters())
        if rank == 0 and act == "scale":
            params[0].grad.mul_(0.5)
        if act == "clamp":
            params[0].grad.clamp_(-1e-3 * (rank + 1), 1e-3)
        if rank == 0 and act == "zero":
            params[0].grad.zero_()
        if rank == 0 and act == "drop":
            params[0].grad = None
        if rank == 0 and act == "largest":
            params[0].grad.norm(math.inf)
        norms = [param.grad.norm().item() for param in params] if rank == 0 and act == "look" else []
        optimizer.step()
        model(ranks.rows_of(1, rank, world_size)).backward()
        optimizer.step()
        return norms
    finally:
        zo.close(model)


@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_may_look_alone_after_a_backward_that_has_reduced(stage: int, pool: RankPool) -> None:
    mine, others = pool.succeed(look_alone, stage, "look")
    assert all(norm > 0 for norm in mine) and others == []


@pytest.mark.parametrize(
    ("stage", "act", "where"),
    [
        (1, "look", "a look at .grad, which reduces"),
        (3, "largest", "a norm of order inf of .grad"),
        (3, "scale", "AdamW.step with gradients changed by .grad"),
        (3, "clamp", "AdamW.step with gradients changed by .grad"),
        (3, "zero", "AdamW.step with gradients changed by .grad"),
        (3, "drop", "AdamW.step with gradients changed by .grad"),
    ],
)
def test_what_one_rank_does_alone_is_an_error_of_all(stage: int, act: str, where: str, pool: RankPool) -> None:
    """Its first look would reduce; a factor of its own would scale its shard alone."""
    found = pool.call(look_alone, stage, act)
    pool.renew()
    assert all(isinstance(each, Failure) and f"rank 0 is at {where}" in str(each) for each in found)


def look_in_no_sync(rank: int, world_size: int) -> Iterable[str]:
    model, _ = ranks.start(Case({"stage": 3, "precision": "fp32"}))
    try:
        with zo.no_sync(model):
            model(ranks.rows_of(0, rank, world_size)).backward()
            with pytest.raises(zo.ZeroOffloadError, match="is not reduced inside of zo.no_sync"):
                _ = next(iter(model.parameters())).grad
        first = [param.grad.norm().item() for param in model.parameters()]
        model(ranks.rows_of(1, rank, world_size)).backward()
        return [str(first), str([param.grad.norm().item() for param in model.parameters()])]
    finally:
        zo.close(model)


def test_gradients_held_back_are_reduced_by_the_first_look_of_all(pool: RankPool) -> None:
    first, second = pool.succeed(look_in_no_sync)
    assert first == second and first[0] != first[1]


def gradients_of_one_rank(rank: int, world_size: int, stage: int) -> list[float]:
    """The second backward reaches a layer on rank 0 alone, after zeros or after a clip."""
    model = zo.offload(build(Branching), zo.OffloadConfig(stage=stage, precision="fp32", branches="any"))
    optimizer = zo.SGD(model.parameters(), lr=0.1)
    try:
        model(torch.ones(2, 8), both=True).backward()
        model.zero_grad(set_to_none=False)
        model(torch.ones(2, 8), both=rank == 0).backward()
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 1e-2).item()]
        model(torch.full((2, 8), 0.5), both=rank == 0).backward()
        norms += [param.grad.norm().item() for param in model.parameters()]
        optimizer.step()
        return [*norms, *(value.norm().item() for value in ranks.read_params(model).values())]
    finally:
        zo.close(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_that_one_rank_alone_adds(stage: int, pool: RankPool) -> None:
    first, second = pool.succeed(gradients_of_one_rank, stage)
    model = build(Branching)
    params = list(model.parameters())

    def mean_of(x: Tensor) -> None:
        for both in (True, False):
            (model(x, both) / 2).backward()

    mean_of(torch.ones(2, 8))
    norms = [nn.utils.clip_grad_norm_(params, 1e-2).item()]
    mean_of(torch.full((2, 8), 0.5))
    norms += [param.grad.norm().item() for param in params if param.grad is not None]
    torch.optim.SGD(params, lr=0.1).step()
    assert first == second == pytest.approx([*norms, *(param.norm().item() for param in params)], rel=1e-5)
