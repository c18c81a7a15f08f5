"""Micro-batches on several ranks that come to units in orders of their own, or not all to all of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.accumulating import away, loop
from tests.helpers.models import build
from tests.helpers.pairwise import in_turn
from tests.helpers.ranks import RankPools, read_params
from tests.parity.test_accumulate import Sparing

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIDTH, NUM_BLOCKS, SPARED = 400, 12, 12
"""A block's gradients have pages that come and go, two at once: small ones share a reduction."""


class Batch(NamedTuple):
    seed: int
    spared: frozenset[int] = frozenset()
    """Weights that get no gradient, two of each block."""
    order: tuple[int, ...] = tuple(range(NUM_BLOCKS))
    """In which the blocks run."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(2))

    def forward(self, x: Tensor, spared: set[int]) -> Tensor:
        for number, weight in enumerate(self.weights):
            x = Sparing.apply(x, weight, number in spared)
        return x


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(batch.seed)).to(dtype)
        for number in batch.order:
            x = self.blocks[number](x, {each - 2 * number for each in batch.spared})
        return x.float().square().mean()


Steps = list[list[Batch]]
"""Of one rank: the micro-batches of each step."""


def trained(
    rank: int, world_size: int, nvme: Path, steps: list[Steps], precision: str, grads: str, by_unit: bool
) -> dict[str, Tensor]:
    settings = {"precision": precision, "device_memory": "8MiB", "grads": grads}
    model = zo.offload(build(Blocks), away(nvme / str(by_unit), **settings))
    optimizer, dtype = zo.AdamW(model.parameters(), lr=1e-2), DTYPES[precision]

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(batch, dtype) / 3
        return loss

    try:
        for batches in steps[rank]:
            if by_unit:
                zo.accumulate(model, batches, loss_fn)
            else:
                with zo.no_sync(model):
                    loop(model, batches[:-1], loss_fn)
                loop(model, batches[-1:], loss_fn)
            zo.clip_grad_norm_(model, 0.1)
            optimizer.step()
        return read_params(model)
    finally:
        zo.close(model)


UP = tuple(range(NUM_BLOCKS))
DOWN = UP[::-1]


def turned(rank: int) -> Steps:
    return [[Batch(10 * rank), Batch(10 * rank + 1, order=DOWN), Batch(10 * rank + 2)]]


def sparing_first(rank: int) -> Steps:
    """The first rank adds up one gradient less."""
    spared = frozenset[int]() if rank else frozenset([SPARED])
    return [[Batch(10 * rank, spared), Batch(10 * rank + 1)]] * 2


def sparing_all(rank: int) -> Steps:
    """The second rank alone has gradients of the block, in its first micro-batch."""
    both = frozenset([SPARED, SPARED + 1])
    return [[Batch(10 * rank, frozenset() if rank else both), Batch(10 * rank + 1, both)]] * 2


def no_rank_has_any(rank: int) -> Steps:
    both = frozenset([SPARED, SPARED + 1])
    return [[Batch(10 * rank, both), Batch(10 * rank + 1, both)], [Batch(10 * rank + 2), Batch(10 * rank + 3)]]


def set_aside_twice(rank: int) -> Steps:
    """Orders that set sums aside again and again; the last micro-batch brings nothing for one of them."""
    spared = frozenset([SPARED, SPARED + 1])
    return [[Batch(10 * rank), Batch(10 * rank + 1, order=DOWN), Batch(10 * rank + 2, spared)]]


def scattered(seed: int, rank: int) -> Steps:
    """Ranks have the orders in common, and what the last micro-batch spares, as a loop wants it."""
    common, own = random.Random(seed), random.Random(100 * seed + rank)

    def spared(chance: random.Random) -> frozenset[int]:
        return frozenset(number for number in range(2 * NUM_BLOCKS) if chance.random() < 0.3)

    steps = []
    for _ in range(2):
        orders = [tuple(common.sample(UP, NUM_BLOCKS)) for _ in range(common.randint(2, 4))]
        batches = [Batch(own.randrange(1000), spared(own), order) for order in orders]
        steps.append([*batches[:-1], batches[-1]._replace(spared=spared(common))])
    return steps


ORDERS: dict[str, Callable[[int], Steps]] = {
    **{each.__name__: each for each in (turned, sparing_first, sparing_all, no_rank_has_any, set_aside_twice)},
    **{f"scattered {seed}": partial(scattered, seed) for seed in range(3)},
}


@in_turn(order=list(ORDERS), precision=["fp32", "bf16"], grads=["cpu", "nvme"])
def test_trains_as_the_loop(order: str, precision: str, grads: str, nvme: Path, pools: RankPools) -> None:
    steps = ORDERS[order]
    given = [steps(rank) for rank in range(2)]
    expected, found = (
        pools.of(2).succeed(trained, nvme, given, precision, grads, by_unit) for by_unit in (False, True)
    )
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())
