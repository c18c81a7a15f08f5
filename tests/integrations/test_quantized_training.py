"""Adapters over a quantized base: the losses of the same model in memory, bit for bit, wherever the base rests."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.pairwise import in_pairs
from tests.helpers.quantized_models import KINDS, SHAPES, adapted_model
from tests.helpers.ranks import RankPools
from tests.helpers.tools import Tokens, on_ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STEPS, ROWS = 3, 4


@in_pairs(
    kind=KINDS,
    shape=SHAPES,
    where=["cpu", "nvme"],
    recompute=["", "reentrant", "not reentrant", "ours"],
    ranks=[("fp32", 1), ("bf16", 1), ("fp32", 2)],
)
def test_losses(
    kind: str, shape: str, where: str, recompute: str, ranks: tuple[str, int], pools: RankPools, nvme: Path
) -> None:
    precision, world_size = ranks
    found = on_ranks(pools, world_size, train, (kind, shape, precision), recompute, where, str(nvme))
    assert found == expected(kind, shape, precision, world_size)


def train(rank: int, world_size: int, what: tuple[str, str, str], recompute: str, where: str, nvme: str) -> list[float]:
    """The losses of this rank's rows."""
    kind, shape, precision = what
    model = adapted_model(shape, kind, DTYPES[precision])
    recomputed(model, recompute)
    settings: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "nvme": nvme} if where == "nvme" else {}
    zo.offload(model, zo.OffloadConfig(precision=precision, existing="discard", **settings))
    optimizer, found = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2), []
    for step in range(STEPS):
        loss = model(**batch(step, rank, world_size)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    zo.close(model)
    return found


@functools.cache
def expected(kind: str, shape: str, precision: str, world_size: int) -> list[list[float]]:
    """Of the model in memory, rank by rank. Half the sum of two ranks' gradients is the sum of two halves."""
    model = adapted_model(shape, kind, DTYPES[precision]).train()
    optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    found: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(STEPS):
        for rank in range(world_size):
            loss = model(**batch(step, rank, world_size)).loss
            (loss / world_size).backward()
            found[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def recomputed(model: nn.Module, how: str) -> None:
    model.train()
    if how == "ours":
        zo.checkpoint(model.base_model.model.model.layers)
    elif how:
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
        model.enable_input_require_grads()


def batch(step: int, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    data, per_rank = Tokens(), ROWS // world_size
    rows = [data[step * ROWS + rank * per_rank + i] for i in range(per_rank)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    return tmp_path / "nvme"
