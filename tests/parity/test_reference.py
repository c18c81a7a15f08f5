"""The reference that every placement is compared with is itself right: against torch.optim.AdamW, and by hand."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import WIDE, AttentionBlock, TinyLM, build
from tests.helpers.reference import (
    BETAS,
    EPS,
    INIT_SCALE,
    MasterParam,
    Recipe,
    Trajectory,
    learning_rate,
    micro_batches_of,
    param_groups,
    train_offloaded,
    train_plain,
)


def train_with_torch(recipe: Recipe, model: nn.Module) -> Trajectory:
    """fp32, torch's optimizer and torch's clipping."""
    trajectory = Trajectory()
    optimizer = torch.optim.AdamW(param_groups(model), lr=learning_rate(0), betas=BETAS, eps=EPS)
    for step in range(recipe.num_steps):
        for tokens in micro_batches_of(recipe, step):
            loss = model(tokens) / recipe.micro_batches
            loss.backward()
            trajectory.losses.append(loss.item())
        if recipe.max_norm is not None:
            trajectory.norms.append(nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
    trajectory.params = {name: param.detach() for name, param in model.named_parameters()}
    return trajectory


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_fp32_is_torch_within_rounding(micro_batches: int, max_norm: float | None) -> None:
    recipe = Recipe(TinyLM, micro_batches=micro_batches, max_norm=max_norm)
    ours, torchs = train_plain(recipe), train_with_torch(recipe, build(TinyLM))
    np.testing.assert_allclose(ours.losses, torchs.losses, rtol=2e-5)
    np.testing.assert_allclose(ours.norms, torchs.norms, rtol=2e-4)
    assert min(ours.losses) < ours.losses[0] * 0.95, "it learns"
    for name, param in ours.params.items():
        torch.testing.assert_close(param, torchs.params[name], rtol=1e-3, atol=2e-4)


def test_bf16_follows_fp32_at_the_distance_of_bf16() -> None:
    fp32, bf16 = train_plain(Recipe(TinyLM, "fp32")), train_plain(Recipe(TinyLM, "bf16"))
    np.testing.assert_allclose(bf16.losses, fp32.losses, rtol=2e-2)
    assert bf16.losses != fp32.losses


def test_fp16_overflows_at_first_grows_back_and_learns() -> None:
    """Until the first step that is taken the model is that of the start; the scale goes down and up."""
    fp16 = train_plain(Recipe(TinyLM, "fp16", num_steps=24))
    moves = [after / before for before, after in zip(fp16.scales, fp16.scales[1:], strict=False)]
    assert set(moves) == {0.5, 1.0, 2.0} and fp16.scales[0] == INIT_SCALE / 2
    assert 0.5 in moves[moves.index(2.0) :], "it grows until it must back off again"
    assert fp16.losses[-1] < fp16.losses[0] * 0.5


def test_masters_move_by_less_than_a_bf16_step() -> None:
    """The loss of bf16 parameters alone: 100 updates far below their resolution add up in the master."""
    param = nn.Parameter(torch.ones(256))
    master = MasterParam(param)
    for _ in range(100):
        master.grad = torch.ones(256)
        master.update(learning_rate(39), grad_scale=1.0)
    moved = 1 - master.master()
    assert torch.all(moved > 0.02) and torch.all(moved < 0.03), "100 steps of 2.5e-4"
    assert torch.equal(param.data, master.half) and torch.all(param.data.float() < 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dropped", [{0}, {3, 4}, {19}])
def test_dropped_steps_leave_no_trace(dropped: set[int], precision: str) -> None:
    recipe = Recipe(TinyLM, precision, micro_batches=2, max_norm=0.5, skipped=frozenset(dropped))
    config = zo.OffloadConfig(precision=precision)
    assert train_offloaded(recipe, config) == train_plain(recipe)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_attention_blocks_of_several_frames(precision: str) -> None:
    recipe = Recipe(partial(TinyLM, WIDE, 2, AttentionBlock), precision, num_steps=6, micro_batches=2, max_norm=0.5)
    plain = train_plain(recipe)
    assert train_offloaded(recipe, zo.OffloadConfig(precision=precision)) == plain
