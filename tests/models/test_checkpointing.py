"""Gradient checkpointing in both modes: a forward inside backward, around a block, inside one, over several."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import zero_offload as zo
from tests.helpers.models import WIDE, AttentionBlock, Block, TinyLM, tokens_of
from tests.helpers.pairwise import in_turn
from tests.helpers.twins import assert_same, train


class Checkpointed(TinyLM):
    def __init__(self, reentrant: bool, num_blocks: int = 3) -> None:
        super().__init__(WIDE, num_blocks, self.block)
        self.reentrant = reentrant

    def block(self, dim: int) -> nn.Module:
        return Block(dim)

    def again(self, function: object, *args: object) -> Tensor:
        return checkpoint(function, *args, use_reentrant=self.reentrant)


class AroundBlocks(Checkpointed):
    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.again(block, x)
        return x


class AroundSome(Checkpointed):
    def run_blocks(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x) if i % 2 else self.again(block, x)
        return x


class InsideBlock(Block):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(self.inner, self.norm(x), use_reentrant=self.reentrant)
        return x + F.linear(inner, self.down.weight, self.down.bias)

    def inner(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))


class InsideBlocks(Checkpointed):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant)
        for block in self.blocks:
            block.reentrant = reentrant

    def block(self, dim: int) -> nn.Module:
        return InsideBlock(dim)


class OverSegment(Checkpointed):
    """Two blocks are recomputed together, then two more."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(reentrant, num_blocks=4)

    def run_blocks(self, x: Tensor) -> Tensor:
        for first in range(0, len(self.blocks), 2):
            x = self.again(self.segment, x, first)
        return x

    def segment(self, x: Tensor, first: int) -> Tensor:
        return self.blocks[first + 1](self.blocks[first](x))


class OverAll(OverSegment):
    """Every block at once, some of them twice."""

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.again(self.all_blocks, x)

    def all_blocks(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, self.blocks[1]]:
            x = block(x)
        return x


class Nested(OverSegment):
    """Checkpoints within a checkpoint."""

    def segment(self, x: Tensor, first: int) -> Tensor:
        return self.again(self.blocks[first + 1], self.again(self.blocks[first], x))


class Borrowing(Checkpointed):
    """The recomputed function reads parameters of other modules."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.again(self.with_others, block, x)
        return x

    def with_others(self, block: nn.Module, x: Tensor) -> Tensor:
        return F.linear(block(x), self.blocks[2].up.weight[:WIDE]) * self.norm.weight


class InChunks(Checkpointed):
    def run_blocks(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=self.reentrant)


class WithAttention(AroundBlocks):
    def block(self, dim: int) -> nn.Module:
        return AttentionBlock(dim)


def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    yield from train(model, optimizer, range(3))


CONFIGS = ["cpu-bf16", "nvme-fp32", "nvme-bf16", "cpu-fp32"]


@in_turn(
    model=[*itertools.product([AroundBlocks, AroundSome, InsideBlocks, WithAttention], [True, False])],
    config=CONFIGS,
    indirect=["config"],
)
def test_of_one_block_at_a_time(model: tuple[type[nn.Module], bool], config: zo.OffloadConfig) -> None:
    make, reentrant = model
    assert_same(script, partial(make, reentrant), roomy(config, "16MiB") if make is WithAttention else config)


@in_turn(
    model=[*itertools.product([OverSegment, Nested, InChunks], [True, False])], config=CONFIGS, indirect=["config"]
)
def test_of_two_blocks_at_a_time(model: tuple[type[nn.Module], bool], config: zo.OffloadConfig) -> None:
    make, reentrant = model
    assert_same(script, partial(make, reentrant), roomy(config, "16MiB"))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_that_reads_parameters_of_other_modules(reentrant: bool, fp32_config: zo.OffloadConfig) -> None:
    # In fp32: a reentrant backward delivers such a gradient in parts, which plain torch would add up in bf16.
    assert_same(script, partial(Borrowing, reentrant), roomy(fp32_config, "16MiB"))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_of_all_blocks_without_a_budget(reentrant: bool, config: zo.OffloadConfig) -> None:
    assert_same(script, partial(OverAll, reentrant), roomy(config, None))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_of_the_whole_model(reentrant: bool, config: zo.OffloadConfig) -> None:
    def whole(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        anchor = torch.ones((), requires_grad=True)
        for seed in range(3):
            loss = checkpoint(lambda one, x: model(x) * one.detach(), anchor, tokens_of(seed), use_reentrant=reentrant)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    assert_same(whole, partial(TinyLM, WIDE), roomy(config, None))


def roomy(config: zo.OffloadConfig, device_memory: str | None) -> zo.OffloadConfig:
    if not config.nvme_dirs:
        return config
    return zo.OffloadConfig.from_dict(config.to_dict() | {"device_memory": device_memory})
