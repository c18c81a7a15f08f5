"""Modules and parameters used twice, elsewhere, or without their own forward; and how units are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero_offload as zo
from tests.helpers.models import VOCAB, WIDE, AttentionBlock, Block, TinyLM, build, tokens_of
from tests.helpers.pairwise import in_turn
from tests.helpers.twins import assert_same, train


def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    yield from train(model, optimizer, range(3))


class CalledTwice(TinyLM):
    """Every block runs twice in a forward."""

    def __init__(self) -> None:
        super().__init__(WIDE)

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(super().run_blocks(x))


class SharedBlock(TinyLM):
    """One block object under two names."""

    def __init__(self) -> None:
        super().__init__(WIDE)
        self.blocks.append(self.blocks[0])


class Borrowed(TinyLM):
    """Parameters used outside of their modules: of blocks, and of a leftover, before and after their own use."""

    def __init__(self) -> None:
        super().__init__(WIDE)
        self.scale = nn.Parameter(torch.ones(WIDE))

    def run_blocks(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.blocks[2].up.weight[:WIDE], self.blocks[0].down.bias)
        x = super().run_blocks(x * self.scale)
        return x + F.linear(x, self.blocks[0].up.weight[:WIDE]).tanh() * self.blocks[1].norm.weight.sum()


class LeftoverAttention(TinyLM):
    """MultiheadAttention outside of all blocks: its `out_proj` is never called."""

    def __init__(self) -> None:
        super().__init__(WIDE)
        self.attention = nn.MultiheadAttention(WIDE, 4, batch_first=True)

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(x + self.attention(x, x, x)[0])


class Recurrent(TinyLM):
    """LSTM keeps its parameters in a list of its own."""

    def __init__(self) -> None:
        super().__init__(WIDE)
        self.lstm = nn.LSTM(WIDE, WIDE, num_layers=2, batch_first=True)

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(self.lstm(x)[0])


class Parametrized(TinyLM):
    """Weights computed from parameters, whose backward comes after that of the block's input."""

    def __init__(self) -> None:
        super().__init__(WIDE)
        for block in self.blocks:
            nn.utils.parametrizations.weight_norm(block.up)


class Encoder(TinyLM):
    def __init__(self) -> None:
        super().__init__(WIDE, 0)
        layer = nn.TransformerEncoderLayer(WIDE, 4, 2 * WIDE, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def run_blocks(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class InSequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(VOCAB, WIDE), *(Block(WIDE) for _ in range(3)), nn.Linear(WIDE, VOCAB))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


class KeywordsAndTuples(TinyLM):
    """Blocks that take keyword arguments and return containers."""

    class Wrapped(Block):
        def forward(self, *, hidden: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:  # type: ignore[override]
            return {"x": super().forward(hidden["x"])}, 1

    def __init__(self) -> None:
        super().__init__(WIDE, block=self.Wrapped)

    def run_blocks(self, x: Tensor) -> Tensor:
        hidden = {"x": x}
        for block in self.blocks:
            hidden, _ = block(hidden=hidden)
        return hidden["x"]


MODELS = [
    CalledTwice,
    SharedBlock,
    Borrowed,
    partial(TinyLM, WIDE, 3, AttentionBlock),
    LeftoverAttention,
    Recurrent,
    Parametrized,
    Encoder,
    InSequential,
    KeywordsAndTuples,
]


@in_turn(make=MODELS, config=["nvme-fp32", "cpu-bf16", "nvme-bf16", "cpu-fp32"], indirect=["config"])
def test_trains_to_the_bits_of_the_plain_model(make: type[nn.Module], config: zo.OffloadConfig) -> None:
    assert_same(script, make, config)


def test_eval_fast_path_of_the_transformer_encoder(fp32_config: zo.OffloadConfig) -> None:
    def with_eval(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        yield from train(model, optimizer, range(3))
        model.eval()
        with torch.no_grad():
            yield model(tokens_of(7)).item()

    assert_same(with_eval, Encoder, fp32_config)


@in_turn(
    units=[["blocks"], [Block], ["blocks.0", "blocks.2"], [nn.Linear], ["blocks.1.up", "blocks.1"], [""]],
    fp32_config=["nvme", "cpu"],
    indirect=["fp32_config"],
)
def test_units_named_by_the_user(units: list[object], fp32_config: zo.OffloadConfig) -> None:
    # As one unit the blocks need more than the tight budget.
    config = zo.OffloadConfig.from_dict(fp32_config.to_dict() | {"device_memory": None})
    assert_same(script, partial(TinyLM, WIDE), config, units)


def test_unknown_units_are_all_named(fp32_config: zo.OffloadConfig) -> None:
    with pytest.raises(zo.ConfigError) as error:
        zo.offload(build(TinyLM), fp32_config, units=["block", nn.LSTM])
    assert "'block'" in str(error.value) and "LSTM" in str(error.value)


def test_a_unit_larger_than_the_budget_says_so(nvme_config: zo.OffloadConfig) -> None:
    config = zo.OffloadConfig.from_dict(nvme_config.to_dict() | {"device_memory": "2MiB"})
    with pytest.raises(zo.CapacityError, match="device_memory"):
        model = zo.offload(build(partial(TinyLM, WIDE)), config)
        model(tokens_of(0))
