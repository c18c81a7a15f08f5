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
    ranks=[("fp32", 1), ("bf16", 1), ("fp32", 2), ("bf16", 2)],
)
def test_losses(
    kind: str, shape: str, where: str, recompute: str, ranks: tuple[str, int], pools: RankPools, nvme: Path
) -> None:
    precision, world_size = ranks
    if world_size > 1:
        torch.set_num_threads(1)  # as ranks have: products of experts depend on it from torch 2.15 on
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


@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "torchao int8", "torchao fp8"])
def test_weights_that_adapters_read(kind: str, nvme: Path) -> None:
    """peft's DoRA dequantizes what has the library's class by name."""

    def losses(*, is_offloaded: bool) -> list[float]:
        model = adapted_model("llama", kind, torch.bfloat16, dora=True).train()
        if is_offloaded:
            zo.offload(model, zo.OffloadConfig(precision="bf16", params="nvme", nvme=str(nvme), optimizer="cpu"))
        optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        found = []
        for step in range(STEPS):
            loss = model(**batch(step, 0, 1)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(is_offloaded=True) == losses(is_offloaded=False)


def test_eight_bits_that_adapters_read() -> None:
    """Before a step DoRA computes what LoRA does, up to rounding. (Plain bitsandbytes fails in its first forward.)"""
    found = []
    for dora in (True, False):
        model = adapted_model("llama", "int8", dora=dora).train()
        zo.offload(model, zo.OffloadConfig(precision="fp32"))
        found.append(model(**batch(0, 0, 1)).loss.item())
    assert found[0] == pytest.approx(found[1], abs=2e-3)


@functools.cache
def expected(kind: str, shape: str, precision: str, world_size: int) -> list[list[float]]:
    """Of the model in memory, rank by rank. Half the sum of two ranks' gradients is the sum of two halves, in fp32."""
    model = adapted_model(shape, kind, DTYPES[precision]).train()
    trained = [param for param in model.parameters() if param.requires_grad]
    for param in trained:
        param.grad_dtype = torch.float32
    optimizer = zo.AdamW(trained, lr=1e-2)
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
