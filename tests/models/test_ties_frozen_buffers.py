"""Ties, frozen parameters and buffers keep their meaning."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import WIDE, Block, TinyLM, build, tokens_of
from tests.helpers.reference import Recipe, train_offloaded, train_plain
from tests.helpers.twins import assert_same, train

SEEDS = range(6)
Model = partial(TinyLM, WIDE)


def script(model: nn.Module, optimizer: zo.AdamW):  # type: ignore[no-untyped-def]
    yield from train(model, optimizer, SEEDS)


def test_a_tied_head(config: zo.OffloadConfig) -> None:
    assert_same(script, Model, config)


def test_a_tie_survives_offload(fp32_config: zo.OffloadConfig) -> None:
    model = zo.offload(build(Model), fp32_config)
    assert model.head.weight is model.embedding.weight
    assert [name for name, _ in model.named_parameters()].count("embedding.weight") == 1


def frozen_block() -> nn.Module:
    model = TinyLM(WIDE)
    model.blocks[1].requires_grad_(False)
    return model


def frozen_in_part() -> nn.Module:
    """Two sections in every block."""
    model = TinyLM(WIDE)
    for block in model.blocks:
        block.up.requires_grad_(False)
        block.norm.bias.requires_grad_(False)
    return model


def frozen_but_the_norm() -> nn.Module:
    model = TinyLM(WIDE)
    model.requires_grad_(False)
    model.norm.requires_grad_(True)
    return model


def test_a_frozen_block(config: zo.OffloadConfig) -> None:
    assert_same(script, frozen_block, config)


def test_units_frozen_in_part(config: zo.OffloadConfig) -> None:
    assert_same(script, frozen_in_part, config)


def test_all_blocks_frozen(config: zo.OffloadConfig) -> None:
    assert_same(script, frozen_but_the_norm, config)


def test_frozen_parameters_have_no_optimizer_state(nvme_config: zo.OffloadConfig) -> None:
    model = zo.offload(build(frozen_block), nvme_config)
    optimizer = zo.AdamW(model.parameters())
    list(train(model, optimizer, range(2)))
    names = [name for name, _ in model.named_parameters()]
    with_state = {names[index] for index in optimizer.state_dict()["state"]}
    assert with_state == {name for name, param in model.named_parameters() if param.requires_grad}


class Buffered(TinyLM):
    """Integer, float and running-mean buffers, and a frozen integer parameter."""

    def __init__(self) -> None:
        super().__init__(WIDE)
        self.positions = nn.Parameter(torch.arange(64), requires_grad=False)
        self.register_buffer("mask", torch.arange(WIDE) % 3 > 0)
        self.register_buffer("mean", torch.zeros(WIDE))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.position_embedding = nn.Embedding(64, WIDE)

    def run_blocks(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x + self.position_embedding(self.positions[: x.shape[1]])
        with torch.no_grad():
            self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
        return super().run_blocks(x * self.mask - self.mean.to(x.dtype))


def test_buffers_and_integer_parameters(config: zo.OffloadConfig) -> None:
    def with_buffers(model: nn.Module, optimizer: zo.AdamW):  # type: ignore[no-untyped-def]
        yield from train(model, optimizer, SEEDS)
        yield from (model.mean.sum().item(), model.calls.item())
        assert model.mean.dtype == torch.float32

    precision = replace(config.numerics, buffers={"mean": "fp32"})
    assert_same(with_buffers, Buffered, replace(config, precision=precision))


class Normalized(TinyLM):
    """BatchNorm: its running statistics stay fp32."""

    def __init__(self) -> None:
        super().__init__(WIDE)
        self.blocks.append(nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(WIDE), nn.Unflatten(0, (2, -1))))


def test_batch_norm_statistics(fp32_config: zo.OffloadConfig) -> None:
    def with_statistics(model: nn.Module, optimizer: zo.AdamW):  # type: ignore[no-untyped-def]
        yield from train(model, optimizer, SEEDS)
        yield model.blocks[-1][1].running_var.sum().item()
        model.eval()
        yield from train(model, optimizer, [10])

    assert_same(with_statistics, Normalized, fp32_config)


class PartlyUnused(TinyLM):
    """In every block one parameter that no forward reads; one block that only some steps use."""

    def __init__(self) -> None:
        super().__init__(WIDE)
        for block in self.blocks:
            block.spare = nn.Linear(WIDE, WIDE)
        self.extra = Block(WIDE)
        self.steps = 0

    def run_blocks(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = super().run_blocks(x)
        return self.extra(x) if self.steps % 3 == 0 else x


def test_unused_parameters_are_left_alone(config: zo.OffloadConfig) -> None:
    assert_same(script, PartlyUnused, config)


class Scaled(Block):
    """It reads a parameter that gets no gradient."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.scale = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.detach()


def test_what_forward_reads_and_no_step_changes_keeps_its_value(config: zo.OffloadConfig) -> None:
    """An update of its unit delivers it with the rest."""
    assert_same(script, partial(TinyLM, WIDE, 3, Scaled), config)


def test_the_norm_counts_sections_of_which_a_part_is_unused(config: zo.OffloadConfig) -> None:
    """No gradient completes them: the end of backward does."""
    recipe = Recipe(PartlyUnused, config.numerics.compute, num_steps=6, max_norm=0.5)
    assert train_offloaded(recipe, config) == train_plain(recipe)


def test_a_model_without_gradients_at_all(fp32_config: zo.OffloadConfig) -> None:
    model = zo.offload(build(lambda: TinyLM(WIDE).requires_grad_(False)), fp32_config)
    expected = build(Model)(tokens_of(0)).item()
    assert model(tokens_of(0)).item() == expected
    assert not model(tokens_of(0)).requires_grad


class WithEmptyParams(TinyLM):
    """Layers that a configuration has shrunk to nothing."""

    def __init__(self) -> None:
        super().__init__(WIDE)
        self.none = nn.Parameter(torch.empty(0))
        self.no_columns = nn.Parameter(torch.empty(3, 0))

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(x) + self.none.sum() + self.no_columns.sum()


def test_parameters_without_elements(config: zo.OffloadConfig) -> None:
    assert_same(script, WithEmptyParams, config)
