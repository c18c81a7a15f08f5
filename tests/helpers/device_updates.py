"""Flat ranges for the update on a device, and what the native kernels make of them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers.any_bits import floats, halves
from zero_offload.abi import Rule
from zero_offload.kernels.master import split_master
from zero_offload.kernels.update import SIGNED, STATES, Segment, UpdateBuffers, fused_update

MODULE = "zero_offload.kernels.triton_update"
SEGMENT = Segment(0, 0, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, grad_scale=0.5, step=3)
VALUES = (torch.float32, torch.bfloat16)
GRADS = (torch.float32, torch.bfloat16, torch.float16)
Arrays = dict[str, Tensor]
"""By name: value, residual (bf16 values), grad, and the states of a rule."""


def tame(rule: Rule, numel: int, value_dtype: torch.dtype, grad_dtype: torch.dtype) -> Arrays:
    """Numbers as training has them, (numel,) each."""
    draw = torch.Generator().manual_seed(numel)
    master = torch.randn(numel, generator=draw)
    arrays = {"value": master}
    if value_dtype is torch.bfloat16:
        arrays = {"value": master.bfloat16(), "residual": torch.empty(numel, dtype=torch.int16)}
        split_master(master, arrays["value"], arrays["residual"])
    arrays["grad"] = torch.randn(numel, generator=draw).to(grad_dtype)
    for name in STATES[rule]:
        state = 0.1 * torch.randn(numel, generator=draw)
        arrays[name] = state if name in SIGNED else state.abs()
    return arrays


def wild(rule: Rule, numel: int, value_dtype: torch.dtype, grad_dtype: torch.dtype) -> Arrays:
    """NaNs of all kinds, infinities, subnormal numbers and ordinary ones, at addresses off any vector's."""
    whole = value_dtype is torch.float32
    arrays = {"value": floats(numel, 1) if whole else halves(numel, 1)}
    if not whole:
        arrays["residual"] = halves(numel, 2).view(torch.int16)
    arrays["grad"] = floats(numel, 5) if grad_dtype is torch.float32 else halves(numel, 5, grad_dtype)
    for seed, name in enumerate(STATES[rule]):
        state = floats(numel, 10 + seed, 1e-3)
        arrays[name] = state if name in SIGNED else state.abs()
    return arrays


def update_on_host(rule: Rule, arrays: Arrays, segment: Segment) -> None:
    """By the native kernels, or what stands in for them; they take no address of nothing."""
    if segment.begin == segment.end:
        return
    buffers = UpdateBuffers(
        value=arrays["value"].data_ptr(),
        residual=arrays["residual"].data_ptr() if "residual" in arrays else 0,
        master=0,
        states=tuple(arrays[name].data_ptr() for name in STATES[rule]),
        grad=arrays["grad"].data_ptr(),
        value_out=0,
        value_dtype=arrays["value"].dtype,
        grad_dtype=arrays["grad"].dtype,
    )
    fused_update(rule, buffers, [segment], 1)


def update_by(module: Any, rule: Rule, arrays: Arrays, segment: Segment) -> None:
    """By `module`, which is triton_update."""
    states = tuple(arrays[name] for name in STATES[rule])
    tensors = module.UpdateTensors(arrays["value"], arrays.get("residual"), states, arrays["grad"])
    with np.errstate(all="ignore"):  # an interpreter computes the masked elements of a block too
        module.update_on_device(rule, tensors, segment)


def copies(arrays: Arrays, device: str = "cpu") -> Arrays:
    return {name: array.to(device, copy=True) for name, array in arrays.items()}


def bits(array: Tensor) -> Tensor:
    return array.detach().cpu().reshape(-1).view(torch.uint8)


def same_bits(actual: Arrays, expected: Arrays) -> list[str]:
    """The arrays that differ."""
    assert actual.keys() == expected.keys()
    return [name for name in expected if not torch.equal(bits(actual[name]), bits(expected[name]))]


def import_triton_update(patch: pytest.MonkeyPatch, interpreted: str) -> ModuleType:
    return import_triton_module(patch, "triton_update", interpreted)


def import_triton_module(patch: pytest.MonkeyPatch, name: str, interpreted: str) -> ModuleType:
    """One of the kernels' modules anew, since Triton looks at this variable when a kernel is declared."""
    pytest.importorskip("triton", reason="triton is not installed: pip install 'zero_offload[triton]'")
    patch.setenv("TRITON_INTERPRET", interpreted)
    module = f"zero_offload.kernels.{name}"
    before = sys.modules.pop(module, None)
    try:
        return importlib.import_module(module)
    finally:
        sys.modules.pop(module, None)
        if before is not None:
            sys.modules[module] = before
