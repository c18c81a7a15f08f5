"""Ranks that have not built the same model are told so, all of them, with a parameter's name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import TinyLM, tokens_of
from tests.helpers.ranks import Failure, RankPool


def other_seed(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return TinyLM()


def other_head(rank: int) -> nn.Module:
    torch.manual_seed(0)
    model = TinyLM()
    with torch.no_grad():
        model.norm.bias[3] += rank * 1e-6
    return model


def other_size(rank: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8 + rank), nn.Linear(8 + rank, 8))


def other_depth(rank: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(2 + rank)))


def other_frozen(rank: int) -> nn.Module:
    torch.manual_seed(0)
    model = TinyLM()
    model.embedding.requires_grad_(rank == 0)
    return model


def offload(rank: int, world_size: int, make: Callable[[int], nn.Module], stage: int, deferred: bool) -> None:
    with zo.deferred_init() if deferred else nullcontext():
        model = make(rank)
    try:
        zo.offload(model, zo.OffloadConfig(stage=stage))
    finally:
        model(tokens_of(0)) if not deferred and isinstance(model, TinyLM) else None  # it is as it was


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "make, deferred, words",
    [
        (other_seed, False, "embedding.weight and 12 other parameters of rank 1 differ from rank 0's"),
        (other_seed, True, "embedding.weight and 12 other parameters of rank 1 differ from rank 0's"),
        (other_head, False, "norm.bias of rank 1 differs from rank 0's"),
        (other_size, False, "0.weight and 3 other parameters of rank 1 differ from rank 0's"),
        (other_depth, False, "of 4 parameters on rank 0, and of 6 on rank 1"),
        (other_frozen, False, "embedding.weight of rank 1 differs from rank 0's"),
    ],
)
def test_ranks_that_differ(
    make: Callable[[int], nn.Module], deferred: bool, words: str, stage: int, pool: RankPool
) -> None:
    for failure in pool.call(offload, make, stage, deferred):
        assert isinstance(failure, Failure)
        assert (failure.kind, words in failure.message) == ("ConfigError", True), failure.message


def resume(rank: int, world_size: int, nvme: Path) -> bool:
    """Values that a generation replaces may be any."""
    config = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme)
    torch.manual_seed(0)
    model = zo.offload(TinyLM(), config)
    optimizer = zo.AdamW(model.parameters())
    model(tokens_of(0)).backward()
    optimizer.step()
    zo.commit(model, optimizer)
    zo.close(model)
    model = zo.offload(other_seed(rank), zo.OffloadConfig(**{**vars(config), "existing": "resume"}))
    zo.close(model)
    return True


def test_values_that_a_generation_replaces_may_differ(pool: RankPool, nvme: Path) -> None:
    assert pool.succeed(resume, nvme) == [True, True]


def skipped(rank: int, world_size: int) -> bool:
    with zo.deferred_init(values="skip"):
        model = other_seed(rank)
    zo.close(zo.offload(model, zo.OffloadConfig()))
    return True


def test_values_that_are_still_to_be_loaded_may_differ(pool: RankPool) -> None:
    assert pool.succeed(skipped) == [True, True]
