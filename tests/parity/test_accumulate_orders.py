"""Micro-batches on several ranks that come to units in orders of their own, or not all to all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.accumulating import away, loop
from tests.helpers.models import build
from tests.helpers.ranks import RankPools, read_params
from tests.parity.test_accumulate import Sparing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIDTH, NUM_BLOCKS, SPARED = 544, 12, 6
"""A block's gradient has pages that come and go, two at once: small ones share a reduction."""


class Batch(NamedTuple):
    seed: int
    spares: bool = False
    """The second block's backward makes no gradient."""
    turned: bool = False
    """Blocks run from the last to the first."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor, spares: bool) -> Tensor:
        return Sparing.apply(x, self.weight, spares)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(batch.seed)).to(dtype)
        for number in range(NUM_BLOCKS)[:: -1 if batch.turned else 1]:
            x = self.blocks[number](x, batch.spares and number == SPARED)
        return x.float().square().mean()


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def stepped(
    rank: int, world_size: int, nvme: Path, batches: list[list[Batch]], precision: str, grads: str, by_unit: bool
) -> dict[str, Tensor]:
    settings = {"precision": precision, "device_memory": "8MiB", "grads": grads}
    model = zo.offload(build(Blocks), away(nvme / str(by_unit), **settings))
    optimizer, dtype = zo.AdamW(model.parameters(), lr=1e-2), DTYPES[precision]

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(batch, dtype) / 3
        return loss

    if by_unit:
        zo.accumulate(model, batches[rank], loss_fn)
    else:
        with zo.no_sync(model):
            loop(model, batches[rank][:-1], loss_fn)
        loop(model, batches[rank][-1:], loss_fn)
    zo.clip_grad_norm_(model, 0.1)
    optimizer.step()
    try:
        return read_params(model)
    finally:
        zo.close(model)


def turned(rank: int) -> list[Batch]:
    return [Batch(10 * rank), Batch(10 * rank + 1, turned=True), Batch(10 * rank + 2)]


def sparing_first(rank: int) -> list[Batch]:
    """The first rank adds up one gradient less."""
    return [Batch(10 * rank + number, spares=rank == number == 0) for number in range(2)]


def set_aside_twice(rank: int) -> list[Batch]:
    """Orders that set sums aside again and again; the last micro-batch brings nothing for one of them."""
    return [Batch(10 * rank), Batch(10 * rank + 1, turned=True), Batch(10 * rank + 2, spares=True)]


@pytest.mark.parametrize("grads", ["cpu", "nvme"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("batches", [turned, sparing_first, set_aside_twice])
def test_trains_as_the_loop(
    batches: Callable[[int], list[Batch]], precision: str, grads: str, nvme: Path, pools: RankPools
) -> None:
    given = [batches(rank) for rank in range(2)]
    expected, found = (
        pools.of(2).succeed(stepped, nvme, given, precision, grads, by_unit) for by_unit in (False, True)
    )
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())
