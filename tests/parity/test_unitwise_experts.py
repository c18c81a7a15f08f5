"""`zo.unitwise` over experts that move in groups: the bits of the plain optimizer, on one rank and on several."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_offload as zo
from tests.helpers.experts import experts_lm
from tests.helpers.models import build
from tests.helpers.ranks import RankPools, rows_of
from tests.helpers.reference import read_masters

MAKE = partial(experts_lm, size=2, trained=True)
TIERS: dict[str, dict[str, Any]] = {
    "cpu": {"params": "cpu", "optimizer": "cpu", "grads": "cpu"},
    "nvme": {"params": "nvme", "optimizer": "nvme", "grads": "nvme"},
}


def plain(rank: int, world_size: int, num_ranks: int) -> dict[str, Tensor]:
    """The model's parameters after three steps over the rows of all ranks; a job, since ranks compute with a thread."""
    model = build(MAKE)
    optimizer = torch.optim.Adafactor(model.parameters(), 1e-2)
    for step in range(3):
        grads = []
        for number in range(num_ranks):
            model(rows_of(step, number, num_ranks)).backward()
            grads.append([param.grad for param in model.parameters()])
            optimizer.zero_grad()
        for param, first, *others in zip(model.parameters(), *grads, strict=True):
            assert first is not None
            param.grad = sum(others, start=first) / num_ranks
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def offloaded(rank: int, world_size: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    model = build(MAKE)
    zo.offload(model, zo.OffloadConfig(precision="fp32", **settings))
    optimizer = zo.unitwise(torch.optim.Adafactor(model.parameters(), 1e-2))
    for step in range(3):
        model(rows_of(step, rank, world_size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = read_masters(model)
    zo.close(model)
    return found


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_bits_of_the_plain_optimizer(num_ranks: int, tier: str, pools: RankPools, tmp_path: Path) -> None:
    expected = pools.of(2).succeed(plain, num_ranks)[0]
    settings = {**TIERS[tier], "nvme": tmp_path}
    if num_ranks == 1:
        torch.set_num_threads(1)
        found = [offloaded(0, 1, settings)]
    else:
        found = pools.of(num_ranks).succeed(offloaded, settings)
    for masters in found:
        assert [name for name in expected if not torch.equal(masters[name], expected[name])] == []
