"""Calls of ranks while a commit is under way, which talks to the other ranks on a thread and a group of its own.

Commits are late on one rank and early on the other. Two threads of a rank on one group would meet in another order than
those of the other rank. gloo ends a process for bytes of another size.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.disk import drain
from tests.helpers.ranks import RankPools
from zero_offload.storage.shards.snapshot import Snapshots

AHEAD_S = 0.3
"""After its states were written, a commit waits for the other ranks."""


class Scaled(nn.Module):
    """A state dict with numbers, as libraries of quantized weights write them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor([0.1]))
        self.count = nn.Parameter(torch.tensor([-7], dtype=torch.int64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(self.first(x)) * self.scale).square().mean()  # type: ignore[no-any-return]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}numbers"] = self.scale.item(), self.count.item()


def numbers(model: nn.Module) -> Any:
    return model.state_dict()["numbers"]


def train_again(model: nn.Module) -> Any:
    return [param.requires_grad for param in model.second.requires_grad_(True).parameters()]


def call_beside_a_commit(rank: int, world_size: int, call: Callable[[nn.Module], Any], late: int, nvme: str) -> Any:
    """The outcome of `call` while a commit, late on one rank, is under way; `second` has rested for a step."""
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, params="nvme", optimizer="nvme")
    model = zo.offload(Scaled(), config, units=["first", "second"])
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    begun, may_write, write = threading.Event(), threading.Event(), Snapshots.write

    def step() -> None:
        model(torch.ones(2, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
        zo.commit(model, optimizer)

    def writes(snapshots: Snapshots, snapshot: Any) -> None:
        begun.set()
        assert may_write.wait(20)
        write(snapshots, snapshot)

    step()
    for param in model.second.requires_grad_(False).parameters():
        del optimizer.state[param]
    step()
    drain(model)
    if rank != late:
        may_write.set()
    with mock.patch.object(Snapshots, "write", writes):
        step()
        assert begun.wait(20)
        if rank != late:
            time.sleep(AHEAD_S)
        found = call(model)
        may_write.set()
        zo.close(model)
    return found


@pytest.mark.parametrize("late", [0, 1])
def test_numbers_of_a_state_dict(late: int, pools: RankPools, nvme: Path) -> None:
    found, other = pools.of(2).succeed(call_beside_a_commit, numbers, late, str(nvme))
    assert found == other and found[0] != torch.tensor(0.1).item() and found[1] == -7


@pytest.mark.parametrize("late", [0, 1])
def test_a_module_that_has_rested_is_trained_again(late: int, pools: RankPools, nvme: Path) -> None:
    assert pools.of(2).succeed(call_beside_a_commit, train_again, late, str(nvme)) == [[True, True]] * 2
