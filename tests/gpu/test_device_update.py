"""On the GPU here, the update that Triton compiles returns the bits of the native kernels, and waits for nothing."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.accelerator import TYPE, on_gpu, waiting_for_nothing, with_triton
from tests.helpers.device_updates import (
    FLOATS,
    GRADS,
    SEGMENT,
    VALUES,
    Kept,
    copies,
    same_bits,
    tame,
    update_by,
    update_on_host,
    wild,
)
from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import STATE_BLOCK, Rule

pytestmark = [*on_gpu, with_triton]

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (zo.AdamW, {"amsgrad": True}),
    (zo.Adam, {"weight_decay": 0.1, "maximize": True}),
    (zo.Adagrad, {"initial_accumulator_value": 0.5}),
    (zo.Lion, {"weight_decay": 0.1}),
    (zo.SGD, {"momentum": 0.9, "dampening": 0.3}),
]


@pytest.mark.parametrize("make", [tame, wild])
@pytest.mark.parametrize("format", StateFormat, ids=lambda format: format.name)
@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name)
def test_the_bits_of_the_native_kernels(rule: Rule, format: StateFormat, make: Any) -> None:
    """From within the arrays on, over the end of a turn of random words, and with ends within a block of codes."""
    triton_update = pytest.importorskip("zero_offload.hardware.kernels.triton_update", exc_type=ImportError)
    grain = STATE_BLOCK if format is StateFormat.COMPACT else 1
    # With one rule every gradient's dtype beside every value's: each pair is a kernel, and some seconds of compiling.
    pairs = [
        (value_dtype, grad_dtype)
        for (i, value_dtype), (k, grad_dtype) in itertools.product(enumerate(FLOATS), enumerate(GRADS))
        if rule is Rule.ADAMW or (i + k + rule + format) % len(GRADS) == 0
    ]
    for numel, (value_dtype, grad_dtype) in itertools.product((1, 7, 1024, 100_003), pairs):
        kept = Kept(format, origin=(1 << 32) - numel // 2 // grain * grain)
        for step in (1, 1000):
            arrays = make(rule, numel, value_dtype, grad_dtype, format)
            there = copies(arrays, TYPE)
            segment = replace(SEGMENT, begin=numel // 3 // grain * grain, end=numel - numel // 100, step=step)
            update_on_host(rule, arrays, segment, kept)
            update_by(triton_update, rule, there, segment, kept)
            assert same_bits(there, arrays) == [], (numel, value_dtype, grad_dtype, step)


@pytest.mark.parametrize("format", StateFormat, ids=lambda format: format.name)
def test_the_bits_after_many_steps(format: StateFormat) -> None:
    """Values that are rounded at random are rounded alike for as long as one looks, and no step waits."""
    triton_update = pytest.importorskip("zero_offload.hardware.kernels.triton_update", exc_type=ImportError)
    kept = Kept(format)
    for rule, value_dtype in itertools.product((Rule.ADAMW, Rule.SGD_MOMENTUM), FLOATS):
        arrays = tame(rule, 50_000, value_dtype, torch.bfloat16, format)
        there = copies(arrays, TYPE)
        segment = replace(SEGMENT, end=50_000, step=1)
        update_by(triton_update, rule, there, segment, kept)  # compiles
        with waiting_for_nothing():
            for step in range(2, 40):
                update_by(triton_update, rule, there, replace(segment, step=step), kept)
        for step in range(1, 40):
            update_on_host(rule, arrays, replace(segment, step=step), kept)
        assert same_bits(there, arrays) == [], (rule, value_dtype)


def train(optimizer: torch.optim.Optimizer, seeds: range) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    for seed in seeds:
        grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
        param.grad = grad.to(param.device, param.dtype)
        optimizer.step()


def bits_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    (param,) = optimizer.param_groups[0]["params"]
    kept = {name: each for name, each in optimizer.state[param].items() if isinstance(each, torch.Tensor)}
    return {"value": param.detach()} | kept


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: case[0].__name__)
def test_optimizers_and_a_move_between_devices(case: tuple[Any, dict[str, Any]], dtype: torch.dtype) -> None:
    """A state dict from a CPU goes on here with the bits that it would have had there."""
    pytest.importorskip("triton")
    make, options = case
    value = torch.randn(37, 1001).to(dtype)
    params = [nn.Parameter(value.clone()), nn.Parameter(value.to(TYPE))]
    host, device = (make([param], lr=1e-2, **options) for param in params)
    for optimizer in (host, device):
        train(optimizer, range(5))
    assert same_bits(bits_of(device), bits_of(host)) == []
    moved = make([nn.Parameter(params[0].detach().to(TYPE))], lr=1e-2, **options)
    moved.load_state_dict(copy.deepcopy(host.state_dict()))
    for optimizer in (host, moved):
        train(optimizer, range(5, 8))
    assert same_bits(bits_of(moved), bits_of(host)) == []


def test_a_step_waits_for_nothing() -> None:
    """Not even after the state dict of torch's fused optimizer, which counts steps on the device."""
    pytest.importorskip("triton")
    param = nn.Parameter(torch.randn(1000, device=TYPE))
    theirs = torch.optim.AdamW([param], fused=True)
    param.grad = torch.ones_like(param)
    theirs.step()
    ours = zo.AdamW([param])
    ours.load_state_dict(theirs.state_dict())
    ours.step()  # compiles
    with waiting_for_nothing():
        ours.step()
    assert ours.state[param]["step"].item() == 3


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="one GPU")
def test_a_parameter_on_another_device_than_the_current() -> None:
    pytest.importorskip("triton")
    value = torch.randn(5000)
    params = [nn.Parameter(value.clone()), nn.Parameter(value.to(f"{TYPE}:1"))]
    optimizers = [zo.AdamW([param]) for param in params]
    with torch.accelerator.device_index(0):
        for optimizer in optimizers:
            train(optimizer, range(3))
    assert same_bits(bits_of(optimizers[1]), bits_of(optimizers[0])) == []
