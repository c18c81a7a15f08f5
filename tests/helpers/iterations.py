"""Loops whose iterations have several steps or backwards, on ordinary and on offloaded models."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import zero_offload as zo
from zero_offload.model.api import runtime_of

Pause = Callable[[], None]
Optimizers = Sequence[torch.optim.Optimizer]


class Pair(nn.Module):
    """A critic, and what it judges."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.critic, self.actor = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor, *, joined: bool = True) -> torch.Tensor:
        made = self.actor(x)
        return self.critic(made if joined else made.detach())


def _loss(model: nn.Module, number: int, *, joined: bool = True) -> torch.Tensor:
    x = torch.arange(32.0).view(4, 8).mul(number + 1).sin()
    return model(x, joined=joined).square().mean()


def _zero(optimizers: Optimizers) -> None:
    for each in optimizers:
        each.zero_grad()


def _accumulate(model: nn.Module, optimizers: Optimizers, number: int, pause: Pause) -> None:
    for part in range(3):
        _loss(model, number + part).backward()
        if part == 1:
            pause()
    optimizers[0].step()
    _zero(optimizers)


def _two_after_one(model: nn.Module, optimizers: Optimizers, number: int, pause: Pause) -> None:
    _loss(model, number).backward()
    optimizers[0].step()
    pause()
    optimizers[1].step()
    _zero(optimizers)


def _adversaries(model: nn.Module, optimizers: Optimizers, number: int, pause: Pause) -> None:
    _loss(model, number, joined=False).backward()
    optimizers[0].step()
    _zero(optimizers)
    _loss(model, number).neg().backward()
    pause()
    optimizers[1].step()
    _zero(optimizers)


def _delayed(model: nn.Module, optimizers: Optimizers, number: int, pause: Pause) -> None:
    _loss(model, number, joined=False).backward()
    optimizers[0].step()
    _zero(optimizers)
    if number % 2:
        _loss(model, number).neg().backward()
        pause()
        optimizers[1].step()
        _zero(optimizers)


def _many_critics(model: nn.Module, optimizers: Optimizers, number: int, pause: Pause) -> None:
    for part in range(3):
        _loss(model, number + part, joined=False).backward()
        optimizers[0].step()
        _zero(optimizers)
        if part == 1:
            pause()
    _loss(model, number).neg().backward()
    optimizers[1].step()
    _zero(optimizers)


LOOPS = {
    "accumulate": _accumulate,
    "two after one": _two_after_one,
    "adversaries": _adversaries,
    "delayed": _delayed,
    "many critics": _many_critics,
}
ENDS = ("commit", "row", "both")


def optimizers_of(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    if kind == "accumulate":
        return [zo.AdamW(model.parameters(), lr=1e-2)]
    return [zo.AdamW(part.parameters(), lr=1e-2) for part in (model.critic, model.actor)]


def trained(kind: str, num_iterations: int) -> dict[str, torch.Tensor]:
    """Plain training."""
    model = Pair()
    optimizers = optimizers_of(model, kind)
    for number in range(num_iterations):
        LOOPS[kind](model, optimizers, number, lambda: None)
    return {name: param.detach() for name, param in model.named_parameters()}


def run(where: Path, kind: str, ends: str, num_iterations: int, killed_in: int = -1) -> tuple[int, nn.Module]:
    """Start or go on, and end iterations as `ends` says; the count that it went on from."""
    model = Pair()
    settings = zo.OffloadConfig(
        precision="fp32", params="nvme", optimizer="nvme", nvme=where / "swap", existing="resume"
    )
    zo.offload(model, settings)
    optimizers = optimizers_of(model, kind)
    resumed = zo.resume(model, optimizers[0])
    begin = 0 if resumed is None else resumed.step
    log = None if ends == "commit" else zo.RunLog(where / "log", model)
    assert log is None or log.committed_step == begin

    def pause() -> None:
        if number == killed_in:
            owner = runtime_of(model)
            assert owner is not None
            owner.drain()
            os._exit(9)

    for number in range(begin, num_iterations):
        LOOPS[kind](model, optimizers, number, pause)
        if log is not None:
            log.step(number + 1)
        if ends != "row":
            zo.commit(model, optimizers[0])
    assert zo.stats(model).step == num_iterations
    if log is not None:
        log.close()
    return begin, model
