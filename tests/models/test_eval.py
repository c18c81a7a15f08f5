"""Forwards and backwards in other orders than one of each per step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import WIDE, TinyLM, tokens_of
from tests.helpers.pairwise import in_turn
from tests.helpers.twins import Script, assert_same, train

Model = partial(TinyLM, WIDE)


def step(optimizer: zo.AdamW) -> None:
    optimizer.step()
    optimizer.zero_grad()


def eval_between_steps(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):
        yield from train(model, optimizer, [seed])
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                yield model.eval()(tokens_of(20 + seed)).item()
        model.train()


def eval_between_forward_and_backward(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):
        loss = model(tokens_of(seed))
        with torch.no_grad():
            yield model(tokens_of(20 + seed)).item()
        loss.backward()
        with torch.inference_mode():
            yield model(tokens_of(30 + seed)).item()
        step(optimizer)


def two_forwards_one_backward(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):
        loss = model(tokens_of(seed)) + model(tokens_of(seed + 10)) * 0.5
        loss.backward()
        step(optimizer)
        yield loss.item()


def two_losses_backward_in_reverse(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):
        first, second = model(tokens_of(seed)), model(tokens_of(seed + 10))
        second.backward()
        first.backward()
        step(optimizer)
        yield first.item() + second.item()


def two_losses_of_one_forward(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):
        loss = model(tokens_of(seed))
        (loss * 0.25).backward(retain_graph=True)
        loss.square().backward()
        step(optimizer)
        yield loss.item()


def retain_graph(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):
        loss = model(tokens_of(seed))
        for _ in range(3):
            loss.backward(retain_graph=True)
        step(optimizer)
        yield loss.item()


def forwards_without_backward(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):
        yield model(tokens_of(seed + 40)).item()
        yield from train(model, optimizer, [seed])


def gradients_of_inputs(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):
        x = torch.randn(2, 5, WIDE, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        out = model.blocks[1](model.blocks[0](x))
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        yield grad.sum().item()
        yield from train(model, optimizer, [seed])


def growing_and_shrinking_batches(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for batch, length in ((1, 3), (4, 17), (2, 9)):
        loss = model(tokens_of(batch, batch, length))
        loss.backward()
        step(optimizer)
        yield loss.item()


def steps_without_gradients(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    step(optimizer)
    yield from train(model, optimizer, range(2))
    step(optimizer)
    with torch.no_grad():
        model(tokens_of(5))
    step(optimizer)
    yield from train(model, optimizer, range(2, 4))


def dropped_gradients(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):
        model(tokens_of(seed + 60)).backward()
        optimizer.zero_grad()
        yield from train(model, optimizer, [seed])


def some_blocks_only(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    """Steps that update part of the model leave the rest alone, moments too."""
    x = torch.randn(2, 5, WIDE, generator=torch.Generator().manual_seed(0))
    for seed in range(3):
        model.blocks[seed % 3](x).square().mean().backward()
        step(optimizer)
        yield from train(model, optimizer, [seed])


SCRIPTS: list[Script] = [
    eval_between_steps,
    eval_between_forward_and_backward,
    two_forwards_one_backward,
    two_losses_backward_in_reverse,
    two_losses_of_one_forward,
    retain_graph,
    forwards_without_backward,
    gradients_of_inputs,
    growing_and_shrinking_batches,
    steps_without_gradients,
    dropped_gradients,
    some_blocks_only,
]


@in_turn(script=SCRIPTS, fp32_config=["cpu", "nvme"], indirect=["fp32_config"])
def test_the_same_bits_as_plain_torch(script: Script, fp32_config: zo.OffloadConfig) -> None:
    assert_same(script, Model, fp32_config)


@pytest.mark.parametrize("script", [eval_between_forward_and_backward, dropped_gradients], ids=lambda s: s.__name__)
def test_the_same_bits_in_bf16(script: Script, config: zo.OffloadConfig) -> None:
    assert_same(script, Model, config)
