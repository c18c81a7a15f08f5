"""Sections too large for a bucket, in 16 bits: what ranks send has one dtype, whatever each of them has gathered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import build
from tests.helpers.ranks import Failure, RankPool, RankPools
from zero_offload.base.types import STAGES
from zero_offload.runtime.grads.section import BUCKET_BYTES

WORLD_SIZE = 2
DIM = 520
Uses = Sequence[Sequence[tuple[int, ...]]]
"""By rank and micro-batch: the layers that this micro-batch has gradients of."""


class Layers(nn.Module):
    """A sum of layers, of which some are without gradient."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor, trained: Sequence[int], others: bool) -> Tensor:
        """The others are used all the same, or not at all."""
        terms = [
            layer(x) if index in trained else layer(x).detach()
            for index, layer in enumerate(self.layers)
            if index in trained or others
        ]
        return torch.stack(terms).sum(0)


def loss_of(model: nn.Module, rank: int, micro: int, trained: Sequence[int], others: bool) -> Tensor:
    x = torch.randn(4, model.dim, generator=torch.Generator().manual_seed(10 * rank + micro)).bfloat16()
    loss: Tensor = model(x, trained, others).float().square().mean()
    return loss


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(WORLD_SIZE)


def norm_on_ranks(rank: int, world_size: int, stage: int, branches: str, uses: Uses) -> float:
    config = zo.OffloadConfig(stage=stage, precision="bf16", branches=branches)
    model = build(Layers)
    zo.offload(model, config, units=list(model.layers))
    try:
        for micro, trained in enumerate(uses[rank]):
            last = micro == len(uses[rank]) - 1
            with nullcontext() if last or branches == "any" else zo.no_sync(model):
                loss_of(model, rank, micro, trained, branches == "same").backward()
        return float(zo.clip_grad_norm_(model, 1e9))
    finally:
        zo.close(model)


def plain_norm(uses: Uses, branches: str) -> float:
    model = build(Layers).bfloat16()
    total = [torch.zeros_like(param, dtype=torch.float32) for param in model.parameters()]
    for rank, micro_batches in enumerate(uses):
        for micro, trained in enumerate(micro_batches):
            model.zero_grad()
            loss_of(model, rank, micro, trained, branches == "same").backward()
            for sum_, param in zip(total, model.parameters(), strict=True):
                if param.grad is not None:
                    sum_ += param.grad.float() / WORLD_SIZE
    return math.sqrt(sum(float(sum_.double().square().sum()) for sum_ in total))


@pytest.mark.parametrize(
    ("branches", "uses"),
    [
        ("any", [[(0, 2)], [(1, 2)]]),
        ("any", [[(0, 2), (0,)], [(1,), (1, 2)]]),
        # Rank 1 has no gradient of layer 0 in the first micro-batch, which adds up on each rank.
        ("same", [[(0, 1, 2), (0, 1, 2)], [(1, 2), (0, 1, 2)]]),
    ],
    ids=["experts", "experts of two micro-batches", "a gradient that comes later"],
)
@pytest.mark.parametrize("stage", STAGES)
def test_what_ranks_have_gathered_may_differ(stage: int, branches: str, uses: Uses, pool: RankPool) -> None:
    assert DIM * DIM * 4 > BUCKET_BYTES
    expected = plain_norm(uses, branches)
    for norm in pool.succeed(norm_on_ranks, stage, branches, uses):
        assert norm == pytest.approx(expected, rel=2e-3)


def lack_a_gradient(rank: int, world_size: int, dim: int) -> None:
    model = build(partial(Layers, dim))
    zo.offload(model, zo.OffloadConfig(stage=2, precision="bf16"), units=list(model.layers))
    loss_of(model, rank, 0, (0, 1, 2) if rank == 0 else (1, 2), others=True).backward()
    zo.clip_grad_norm_(model, 1.0)


@pytest.mark.parametrize("dim", [16, DIM], ids=["in a bucket", "alone"])
def test_a_gradient_that_one_rank_lacks_raises_on_all(dim: int, pool: RankPool) -> None:
    for failure in pool.call(lack_a_gradient, dim):
        assert isinstance(failure, Failure) and failure.kind == "ZeroOffloadError"
        assert "rank 0 is at the reduction of gradients of layers.0" in failure.message


class Halves(nn.Module):
    """One section of two parameters, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(300))

    def forward(self, x: Tensor, *, both: bool) -> Tensor:
        y = x * self.second
        return (y + x * self.first if both else y).square().mean()


def leave_a_gradient(rank: int, world_size: int, stage: int, overlap: str) -> list[float]:
    """Rank 1 alone has a gradient of `first`, in a backward that is not reduced; the norm, and what a step makes."""
    model = zo.offload(Halves(), zo.OffloadConfig(stage=stage, precision="fp32", overlap=overlap))
    optimizer = zo.SGD(model.parameters(), lr=1.0)
    x, norms = torch.ones(300), []
    try:
        with zo.no_sync(model):
            model(x, both=rank == 1).backward()
        model(x, both=False).backward()
        if overlap != "backward":
            norms.append(float(zo.clip_grad_norm_(model, 1e9)))
        optimizer.step()
        optimizer.zero_grad()
        # A step later nothing of it is left.
        model(x, both=False).backward()
        optimizer.step()
        with zo.gathered(model) as values:
            return [*norms, float(values["first"][0]), float(values["second"][0])]
    finally:
        zo.close(model)


@pytest.mark.parametrize("overlap", ["auto", "backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_one_rank_has_left_counts_on_all(stage: int, overlap: str, pool: RankPool) -> None:
    """The backward that reduces uses another parameter of the section only."""
    # Rank 0 sees 2/300 of `second` in both; rank 1 sees (1 + 1) * 2/300 of each, and then 2/300 of `second`.
    of_first, of_second = 2 / 300, (2 + 3) / 300
    norm = math.sqrt(300 * (of_first**2 + of_second**2))
    second = 1 - of_second
    expected = [norm] * (overlap != "backward") + [1 - of_first, second - 2 * second / 300]
    for found in pool.succeed(leave_a_gradient, stage, overlap):
        assert found == pytest.approx(expected, rel=1e-6)
