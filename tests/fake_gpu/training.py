"""Offloaded training on the device, compared with training on plain tensors."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.reference import Recipe, Trajectory, read_masters, train_offloaded, train_plain

Schedule = tuple[Policy, int]
"""A policy and its seed."""

EVERY: tuple[Schedule, ...] = (
    (Policy.LATE, 0),
    (Policy.SIDE_EARLY, 0),
    (Policy.SIDE_LATE, 0),
    (Policy.RANDOM, 1),
    (Policy.RANDOM, 2),
)

SOME = (EVERY[0], EVERY[2])
"""Everything late, and copies late beside compute that is not: where several placements are tried."""


@functools.cache
def plain(recipe: Recipe) -> Trajectory:
    """On the CPU, whose kernels the device runs."""
    return train_plain(recipe)


def check(recipe: Recipe, schedules: Iterable[Schedule] = EVERY, **settings: Any) -> None:
    """The bits of plain tensors, and no race, whatever runs late."""
    for policy, seed in schedules:
        device.policy(policy, seed)
        trajectory = train_offloaded(recipe, zo.OffloadConfig(precision=recipe.precision, **settings))
        races = device.take_races()
        assert races == [], (policy, seed)
        assert trajectory == plain(recipe), (policy, seed)


def plainly(model: nn.Module, tokens: Tensor, step: int) -> Tensor:
    """Forward and backward of a step; returns the loss."""
    loss: Tensor = model(tokens)
    loss.backward()
    return loss


def four_blocks() -> nn.Module:
    return TinyLM(num_blocks=4)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return zo.AdamW(params, lr=1e-2)


def muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Steps matrices on the device."""
    return zo.unitwise(torch.optim.Muon([param for param in params if param.dim() == 2], 1e-2))


def run(
    body: Callable[[nn.Module, Tensor, int], Tensor] = plainly,
    make: Callable[[], nn.Module] = four_blocks,
    num_steps: int = 3,
    step_with: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw,
    **settings: Any,
) -> list[Tensor]:
    """Train a model whose units come and go; losses and fp32 masters, in host memory.

    No step waits for what it has launched, so that all of it may be late.
    """
    settings = {"precision": "fp32", "device_memory": "8MiB", "durability": "scratch"} | settings
    with tempfile.TemporaryDirectory() as nvme:
        if "nvme" in settings.values():
            settings["nvme"] = nvme
        model = build(make)
        zo.offload(model, zo.OffloadConfig(**settings))
        optimizer = step_with([*model.parameters()])
        found = []
        for step in range(num_steps):
            found.append(body(model, tokens_of(step).to(TYPE), step).detach())
            optimizer.step()
            optimizer.zero_grad()
        found += read_masters(model).values()
        zo.close(model)
    return [each.cpu() for each in found]


def check_run(expected: list[Tensor], *arguments: Any, schedules: Iterable[Schedule] = SOME, **settings: Any) -> None:
    """`run` gives these bits, and no race, whatever runs late."""
    for schedule in schedules:
        device.policy(*schedule)
        found = run(*arguments, **settings)
        assert device.take_races() == [], schedule
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), schedule
