"""`zo.nn` in offloaded models: the chunked loss reads a weight that comes and goes, tiles are units of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_offload as zo
from tests.helpers.models import VOCAB, WIDE, Block, TinyLM, build, tokens_of
from tests.helpers.pairwise import in_turn
from tests.helpers.reference import placed
from tests.helpers.twins import assert_same, run_offloaded, run_plain, train
from zero_offload.plan.model_spec import ModelSpec

SEEDS = range(5)
GRADS_IN_MEMORY = ("nvme", "cpu", "nvme")
"""On the CPU, the budget for gradients on their way to disk may be lent to units; without it device_memory is exact."""
NUM_TARGETS = 16  # of tokens_of
MANY = 4096
"""A vocabulary whose embedding is a unit of its own, larger than a block."""


def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    yield from train(model, optimizer, SEEDS)


class ChunkedLM(TinyLM):
    """TinyLM, whose loss reads the tied embedding in the root's own forward."""

    chunk_tokens = 5

    def __init__(self, vocab: int = VOCAB, num_blocks: int = 3) -> None:
        super().__init__(WIDE, num_blocks)
        self.embedding = nn.Embedding(vocab, WIDE)
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.run_blocks(self.embedding(tokens[:, :-1])))
        return self.loss(x, tokens[:, 1:])

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return zo.nn.chunked_cross_entropy(x, self.embedding.weight, targets, chunk_tokens=self.chunk_tokens)


class OneChunk(ChunkedLM):
    chunk_tokens = NUM_TARGETS


class WholeLogits(ChunkedLM):
    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(x, self.embedding.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LossHead(nn.Module):
    """Holds the tied weight, so that the weight's use ends with this module's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return zo.nn.chunked_cross_entropy(x, self.weight, targets, chunk_tokens=5)


class WithLossHead(ChunkedLM):
    def __init__(self, vocab: int = VOCAB, num_blocks: int = 3) -> None:
        super().__init__(vocab, num_blocks)
        self.head = LossHead(self.embedding.weight)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.head(x, targets)
        return loss


class Checkpointed(WithLossHead):
    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = checkpoint(super().loss, x, targets, use_reentrant=False)
        return loss


class FrozenEmbedding(WithLossHead):
    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)


class Autocast(WithLossHead):
    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(x, targets)


MODELS = [ChunkedLM, OneChunk, WithLossHead, Checkpointed, FrozenEmbedding, Autocast]


@in_turn(model=MODELS, config=["nvme-fp32", "cpu-bf16", "nvme-bf16", "cpu-fp32"], indirect=["config"])
def test_a_chunked_loss_of_an_offloaded_weight(model: type[nn.Module], config: zo.OffloadConfig) -> None:
    assert_same(script, model, config)


def test_one_chunk_trains_like_whole_logits(config: zo.OffloadConfig) -> None:
    chunked = run_offloaded(script, OneChunk, config)
    whole = run_plain(script, WholeLogits, config.numerics.compute)
    assert chunked.losses == whole.losses
    assert chunked == whole


class EarlyLoss(WithLossHead):
    """Its loss is taken half way; the blocks that follow, forward and back, push the weight out of memory."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks[:2]:
            x = block(x)
        early = self.loss(self.norm(x), tokens[:, 1:])
        for block in self.blocks[2:]:
            x = block(x)
        return early + x.float().square().mean()


class EarlyTouch(EarlyLoss):
    """The same in the root's own forward, which only touches the weight."""

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return ChunkedLM.loss(self, x, targets)


def test_a_weight_that_leaves_between_forward_and_backward(nvme: Path) -> None:
    # Three frames for the embedding, two for a block.
    assert_same(script, partial(EarlyLoss, MANY, 6), placed("fp32", GRADS_IN_MEMORY, nvme, "10MiB"))


def test_a_touched_weight_that_is_read_again_in_backward(nvme: Path) -> None:
    # A touched unit stays until the outermost forward, or the backward, ends: room for it beside two blocks.
    assert_same(script, partial(EarlyTouch, MANY, 6), placed("fp32", GRADS_IN_MEMORY, nvme, "14MiB"))


def test_outside_of_the_forward_it_is_the_same(nvme_config: zo.OffloadConfig) -> None:
    model = zo.offload(build(ChunkedLM), nvme_config)
    model(tokens_of(0)).backward()
    x, targets = torch.randn(2, WIDE), torch.tensor([1, 2])
    found, expected = (
        zo.nn.chunked_cross_entropy(x, each.embedding.weight, targets) for each in (model, build(ChunkedLM))
    )
    assert found.item() == expected.item()


# Tiles.


class TiledLM(TinyLM):
    """An untied head in tiles."""

    def __init__(self, vocab: int = VOCAB, tiles: int = 3, in_tiles: int = 1) -> None:
        super().__init__(WIDE)
        self.head = zo.nn.TiledLinear(WIDE, vocab, bias=True, tiles=tiles, in_tiles=in_tiles)


class TiledBlock(Block):
    """Its projections are tiled, which the unit finder leaves inside the block."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.up = zo.nn.TiledLinear.from_linear(self.up, tiles=4)
        self.down = zo.nn.TiledLinear.from_linear(self.down, tiles=1, in_tiles=4)


def test_tiles_are_units_of_an_offloaded_model(config: zo.OffloadConfig) -> None:
    make = partial(TiledLM, MANY, 8)
    names = [unit.name for unit in ModelSpec.from_module(build(make)).units]
    assert [name for name in names if name.startswith("head")] == [f"head.tiles.{index}" for index in range(8)]
    assert_same(script, make, config)


@pytest.mark.parametrize("named", [False, True])
def test_tiles_inside_blocks(named: bool, config: zo.OffloadConfig) -> None:
    units = [TiledBlock, zo.nn.TiledLinear, nn.Linear] if named else None
    assert_same(script, partial(TinyLM, WIDE, 3, TiledBlock), config, units)


def test_both_directions_of_tiles(config: zo.OffloadConfig) -> None:
    assert_same(script, partial(TiledLM, VOCAB, 2, 3), config)


def test_a_head_larger_than_the_budget_trains_in_tiles(nvme: Path) -> None:
    """20 MiB of head in 8 MiB of device memory: in one piece it is refused."""
    vocab = 16384

    def make(head: str) -> nn.Module:
        model = TiledLM(vocab, 10)
        if head == "linear":
            model.head = model.head.to_linear()
        return model

    with pytest.raises(zo.CapacityError, match="head needs 22 MiB"):
        run_offloaded(script, partial(make, "linear"), placed("fp32", GRADS_IN_MEMORY, nvme / "linear"))
    tiled = run_offloaded(script, partial(make, "tiled"), placed("fp32", GRADS_IN_MEMORY, nvme / "tiled"))
    assert tiled == run_plain(script, partial(make, "tiled"), "fp32")
    # Another order of additions in the gradient of the head's input, amplified by training.
    linear = run_plain(script, partial(make, "linear"), "fp32")
    assert tiled.losses == pytest.approx(linear.losses, rel=1e-4)


class Regression(nn.Module):
    """The layer comes first: its input needs no gradient, so no sum over tiles is taken."""

    def __init__(self, tiles: int) -> None:
        super().__init__()
        first = nn.Linear(WIDE, 1024)
        self.first: nn.Module = zo.nn.TiledLinear.from_linear(first, tiles=tiles) if tiles else first
        self.second = nn.Linear(1024, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.sin(torch.arange(WIDE) * tokens.flatten()[:16, None] / 61)
        dtype = self.second.weight.dtype
        return self.second(F.gelu(self.first(x.to(dtype)))).float().square().mean()


def test_tiles_without_a_sum_train_like_linear_bit_for_bit(config: zo.OffloadConfig) -> None:
    plain = run_plain(script, partial(Regression, 0), config.numerics.compute)
    tiled = run_offloaded(script, partial(Regression, 4), config)
    if tiled.losses[0] != plain.losses[0]:
        pytest.skip("this CPU's products with fewer columns round differently")
    assert tiled.losses == plain.losses
    names = [f"first.tiles.{index}" for index in range(4)]
    for kind in ("weight", "bias"):
        assert torch.equal(torch.cat([tiled.params[f"{n}.{kind}"] for n in names]), plain.params[f"first.{kind}"])
        assert torch.equal(tiled.params[f"second.{kind}"], plain.params[f"second.{kind}"])


def test_an_offloaded_layer_back_to_linear(nvme_config: zo.OffloadConfig) -> None:
    expected = build(TiledLM).head.to_linear().state_dict()
    model = zo.offload(build(TiledLM), nvme_config)
    for context in (nullcontext(), zo.gathered(model.head)):
        with context:
            found = model.head.to_linear().state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
