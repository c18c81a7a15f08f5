"""Elements of `.grad` are read and changed between backward and step, on every tier: the bits of plain fp32 tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.grad_edits import BY_ELEMENT, EDITS, Twin, grad_of, same
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import full, in_turn
from tests.helpers.ranks import Case, Failure, RankPools
from tests.helpers.reference import read_masters
from zero_offload.model.api import runtime_of

SCALE = 2.0**8


def offloaded(precision: str, grads: str, nvme: Path, **settings: Any) -> tuple[nn.Module, Twin]:
    config = zo.OffloadConfig(precision=precision, grads=grads, nvme=nvme, durability="scratch", **settings)
    model = zo.offload(build(TinyLM), config)
    return model, Twin(model, read_masters(model))


def copies(model: nn.Module) -> dict[str, Tensor]:
    with zo.gathered(model, kind="grads") as grads:
        return dict(grads)


def check(model: nn.Module, twin: Twin, optimizer: torch.optim.Optimizer | None = None) -> None:
    """The same gradients, sums of squares and steps."""
    found = copies(model)
    params = dict(model.named_parameters())
    for name, param in zip(twin.names, twin.params, strict=True):
        assert (param.grad is None) == (params[name].grad is None) == (name not in found), name
        if param.grad is not None:
            assert torch.equal(found[name], param.grad), name
            norm = params[name].grad.float().norm()
            torch.testing.assert_close(norm, param.grad.double().norm().float(), rtol=2e-7, atol=0)
    zo.clip_grad_norm_(model, 1e9)
    (optimizer or zo.SGD(model.parameters(), lr=0.5)).step()
    masters = read_masters(model)
    assert all(torch.equal(masters[name], value) for name, value in twin.step().items())
    zo.close(model)


@in_turn(edit=[*EDITS], of=[("cpu", "fp32"), ("nvme", "bf16"), ("device", "fp32"), ("cpu", "bf16"), ("nvme", "fp16")])
def test_edits_are_those_of_plain_tensors(edit: str, of: tuple[str, str], nvme: Path) -> None:
    grads, precision = of
    model, twin = offloaded(precision, grads, nvme)
    model(tokens_of(0)).backward()
    seen = EDITS[edit]([*model.parameters()])
    assert same(seen, EDITS[edit](twin.params))
    check(model, twin)


@in_turn(
    edit=[*EDITS],
    of=[("cpu", "fp16"), ("nvme", "fp32"), ("cpu", "bf16"), ("nvme", "fp16")],
    after=["scale", "backward", "accumulate", "clip", "scale"],
)
def test_edits_after_what_gradients_wait_for(edit: str, of: tuple[str, str], after: str, nvme: Path) -> None:
    """A loss scale that the step divides out, sums, factors of a clip."""
    grads, precision = of
    model, twin = offloaded(precision, grads, nvme)
    optimizer, scaler = zo.SGD(model.parameters(), lr=0.5), zo.GradScaler(SCALE, enabled=after == "scale")
    batches = [tokens_of(0), tokens_of(1)]
    if after == "accumulate":
        for loss in zo.accumulate(model, batches, lambda m, tokens: m(tokens)):
            assert loss.isfinite()
    else:
        for tokens in batches if after == "backward" else batches[:1]:
            scaler.scale(model(tokens)).backward()
    scaler.unscale_(optimizer)
    factors = [1 / SCALE] if after == "scale" else []
    if after == "clip":
        factors.append(min(1.0, 0.1 / (zo.clip_grad_norm_(model, 0.1).item() + 1e-6)))
    for param in twin.params:
        for factor in factors:
            param.grad.mul_(factor)
    seen = EDITS[edit]([*model.parameters()])
    assert same(seen, EDITS[edit](twin.params))
    check(model, twin, optimizer)


# Ranks


def edit_on_ranks(rank: int, world_size: int, settings: dict[str, Any], edits: list[str]) -> list[str]:
    """Those of the edits that are not those of plain tensors."""
    wrong = []
    for edit in edits:
        case = Case(settings)
        model, _ = ranks.start(case)
        try:
            twin = Twin(model, {name: param.detach() for name, param in ranks.make_model(case).named_parameters()})
            model(ranks.rows_of(0, rank, world_size)).backward()
            params = [*model.parameters()]
            for param, plain in zip(params, twin.params, strict=True):
                dist.all_reduce(plain.grad)
                plain.grad /= world_size
                assert torch.equal(grad_of(param).clone(), plain.grad)
            seen = EDITS[edit](params)
            is_same = same(seen, EDITS[edit](twin.params))
            for param, plain in zip(params, twin.params, strict=True):
                is_same &= param.grad is None or math.isclose(param.grad.norm(), plain.grad.norm(), rel_tol=1e-6)
            zo.SGD(params, lr=0.5).step()
            found = ranks.read_params(model)
            for name, master in twin.step().items():
                # To the nearest value of 16 bits, ties away from zero.
                bits = master.view(torch.int32)
                is_same &= torch.equal(
                    found[name],
                    master if settings["precision"] == "fp32" else ((bits + 0x8000) & ~0xFFFF).view(torch.float32),
                )
            wrong += [] if is_same else [edit]
        finally:
            zo.close(model)
    return wrong


@in_turn(stage=[0, 1, 2, 3], of=[("cpu", "fp32"), ("nvme", "fp32"), ("cpu", "bf16"), ("nvme", "bf16")])
def test_ranks_edit_alike(stage: int, of: tuple[str, str], pools: RankPools, nvme: Path) -> None:
    grads, precision = of
    settings = {"stage": stage, "precision": precision, "grads": grads, "nvme": nvme, "durability": "scratch"}
    assert pools.of(2).succeed(edit_on_ranks, settings, [*EDITS][stage % 2 :: 2]) == [[], []]


def edit_alone(rank: int, world_size: int, stage: int, edit: str) -> list[str]:
    """Rank 1 edits other parameters than rank 0, or none."""
    model, optimizer = ranks.start(Case({"stage": stage, "precision": "fp32"}))
    try:
        model(ranks.rows_of(0, rank, world_size)).backward()
        first = next(model.parameters())
        if edit == "by elements":
            first.grad.add_(torch.full(first.shape, 1.0 + rank))
        if edit == "by a number":
            first.grad.add_(1.0 + rank)
        if edit == "assigned":
            first.grad = torch.full(first.shape, 1.0 + rank)
        if edit == "on one rank" and rank == 0:
            first.grad.sign_()
        if edit == "a look" and rank == 0:
            return [str(first.grad.sum())]
        optimizer.step()
        return []
    finally:
        zo.close(model)


@pytest.mark.parametrize(
    ("stage", "edit"),
    [
        *[(0, "by elements"), (3, "by elements"), (3, "assigned"), (3, "a look")],
        *[full(0, "by a number"), full(2, "by a number"), full(0, "assigned")],
        *[full(0, "on one rank"), full(3, "on one rank")],
    ],
)
def test_edits_that_differ_between_ranks_are_an_error_of_all(stage: int, edit: str, pools: RankPools) -> None:
    """Ranks would go on with models that differ, or with parts of several edits."""
    pool = pools.of(2)
    found = pool.call(edit_alone, stage, edit)
    pool.renew()
    where = "the gather of the gradient of embedding.weight" if edit == "a look" else "gradients changed by .grad"
    assert all(isinstance(each, Failure) and where in str(each) for each in found)


def count_gathers(rank: int, world_size: int, edit: str) -> int:
    model, _ = ranks.start(Case({"stage": 3, "precision": "fp32"}))
    try:
        model(ranks.rows_of(0, rank, world_size)).backward()
        before = runtime_of(model).store.counters.snapshot().get("gathered", 0.0)
        if edit == "assign":
            for param in model.parameters():
                param.grad = torch.ones(param.shape)
        else:
            EDITS[edit]([*model.parameters()])
        return int(runtime_of(model).store.counters.snapshot().get("gathered", 0.0) - before)
    finally:
        zo.close(model)


@pytest.mark.parametrize("edit", BY_ELEMENT)
def test_ranks_edit_elements_without_each_other(edit: str, pools: RankPools) -> None:
    assert pools.of(2).succeed(count_gathers, edit) == [0, 0]
