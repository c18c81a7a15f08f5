"""`zero_grad(set_to_none=False)` and gradients that are assigned zeros: a step takes them, as plain torch does."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import Branching, build
from tests.helpers.pairwise import in_turn
from tests.helpers.ranks import RankPool, RankPools
from tests.helpers.reference import read_masters


def by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def by_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad(set_to_none=False)


def by_assignment(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = torch.zeros(param.shape)


Zero = Callable[[nn.Module, torch.optim.Optimizer], None]
ZEROS: list[Zero] = [by_optimizer, by_module, by_assignment]


def train(model: nn.Module, zero: Zero, kind: Any = zo.AdamW) -> torch.optim.Optimizer:
    """The second layer is used in the first step alone, and in the last one; zeros come before and after steps."""
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.1)
    for step, uses_both in enumerate((True, False, False, True)):
        if step == 2:
            model(torch.ones(2, 8), both=True).backward()
            zero(model, optimizer)
        model(torch.full((2, 8), step + 1.0), both=uses_both).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        zero(model, optimizer)
    return optimizer


@in_turn(zero=ZEROS, grads=["cpu", "nvme", "device"], kind=[zo.AdamW, zo.AdamW, zo.SGD])
def test_a_step_moves_what_has_zeros(zero: Zero, grads: str, kind: Any, nvme: Path) -> None:
    """By moments and weight decay."""
    plain = build(Branching)
    train(plain, zero, kind)
    config = zo.OffloadConfig(precision="fp32", grads=grads, nvme=nvme, durability="scratch")
    model = zo.offload(build(Branching), config)
    optimizer = train(model, zero, kind)
    masters = read_masters(model)
    assert all(torch.equal(masters[name], param) for name, param in plain.named_parameters())
    assert zo.stats(model).step == 4
    assert all(float(optimizer.state[param]["step"]) == 4 for param in model.parameters()) or kind is zo.SGD
    zo.close(model)


def test_none_leaves_a_parameter_out() -> None:
    model = zo.offload(build(Branching), zo.OffloadConfig(precision="fp32"))
    optimizer = train(model, lambda _, optimizer: optimizer.zero_grad(), zo.AdamW)
    assert [float(optimizer.state[param]["step"]) for param in model.parameters()] == [4, 4, 2, 2]
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad is None for param in model.parameters())
    optimizer.step()
    assert zo.stats(model).step == 4


def test_gradients_of_a_skipped_step_become_zeros_too() -> None:
    """A step that a NaN has stopped keeps them in torch."""
    model = zo.offload(build(Branching), zo.OffloadConfig(precision="fp32"))
    optimizer = zo.AdamW(model.parameters(), lr=0.1)
    for factor in (1.0, math.nan):
        model(torch.ones(2, 8) * factor, both=True).backward()
        with pytest.warns(UserWarning, match="NaN") if math.isnan(factor) else torch.no_grad():
            optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    before = read_masters(model)
    optimizer.step()
    assert not any(torch.equal(before[name], value) for name, value in read_masters(model).items())


def test_updates_in_backward_take_no_zeros() -> None:
    """A step would have to update parameters that no backward reaches."""
    model = zo.offload(build(Branching), zo.OffloadConfig(precision="fp32", overlap="backward"))
    optimizer = zo.AdamW(model.parameters(), lr=0.1)
    for uses_both in (True, True, False):
        model(torch.ones(2, 8), both=uses_both).backward()
        if not uses_both:
            with pytest.raises(zo.ConfigError, match=r"layers.1.weight was set to zeros.*overlap='forward'"):
                optimizer.step()
            return
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def train_ranks(rank: int, world_size: int, stage: int) -> dict[str, torch.Tensor]:
    model = zo.offload(build(Branching), zo.OffloadConfig(precision="fp32", stage=stage, branches="any"))
    train(model, by_optimizer)
    with zo.gathered(model) as params:
        found = {name: param.detach().clone() for name, param in params.items()}
    zo.close(model)
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_move_what_has_zeros(stage: int, pools: RankPools) -> None:
    pool: RankPool = pools.of(2)
    plain = build(Branching)
    train(plain, by_optimizer)
    for found in pool.succeed(train_ranks, stage):
        assert all(torch.equal(found[name], param) for name, param in plain.named_parameters())
