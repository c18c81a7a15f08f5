"""A model that is trained, offloaded or not, beside an average of its weights, and a plain model with its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import TinyLM, tokens_of
from tests.helpers.reference import read_masters

TIERS = ("cpu", "nvme")


class Student(nn.Module):
    """Has running statistics, a frozen layer and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = TinyLM()
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.norm(tokens[:, :8].to(self.frozen.weight.dtype)))
        return self.lm(tokens) + x.float().square().mean()


def settings(tier: str, directory: Path, precision: str) -> zo.OffloadConfig:
    return zo.OffloadConfig(precision=precision, params=tier, optimizer=tier, nvme=directory)


def trained(model: nn.Module, update: Callable[[], Any], steps: Iterable[int] = range(3)) -> None:
    """Steps, and what the program does behind each."""
    optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    for step in steps:
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        update()


def follow(shadow: nn.Module, model: nn.Module) -> None:
    """Give a plain model the values of an offloaded one: masters if it is in fp32."""
    masters = read_masters(model)
    with torch.no_grad():
        for name, param in shadow.named_parameters():
            param.copy_(masters[name])
        for kept, buffer in zip(shadow.buffers(), model.buffers(), strict=True):
            kept.copy_(buffer)


def bits(model: nn.Module) -> list[Tensor]:
    """All that an average has, masters where it is offloaded."""
    params = [param for _, param in model.named_parameters()]
    if any(type(param) is not nn.Parameter for param in params):
        params = list(read_masters(model).values())
    return [each.detach().clone() for each in (*params, *model.buffers())]


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = list(zip(bits(one), bits(other), strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
