"""Flat ranges for the update on a device, and what the native kernels make of them."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers import device_formats
from tests.helpers.device_formats import SEED, Case
from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.arguments import Segment, UpdateTensors
from zero_offload.hardware.kernels.rules import STATES

MODULE = "zero_offload.hardware.kernels.triton_update"
SUMS = "zero_offload.hardware.kernels.triton_sums"
MODULES = (MODULE, SUMS)
"""Those with kernels."""
SEGMENT = Segment(0, 0, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, grad_scale=0.5, step=3)
VALUES = (torch.float32, torch.bfloat16)
"""Of ordinary parameters."""
FLOATS = GRADS = (torch.float32, torch.bfloat16, torch.float16)
Arrays = dict[str, Tensor]
"""By name: value, residual (bf16 values), master (fp16 values), grad, and the states of a rule, where they are codes
with their scales."""


@dataclass(frozen=True)
class Kept:
    """How a section keeps its states, and what its random words are made from."""

    format: StateFormat = StateFormat.FP32
    seed: int = SEED
    origin: int = 0


WHOLE = Kept()


def scales_of(name: str) -> str:
    """The name of the scales of a state."""
    return f"scales of {name}"


def tame(
    rule: Rule,
    numel: int,
    value_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    format: StateFormat = StateFormat.FP32,
) -> Arrays:
    """Numbers as training has them, (numel,) each."""
    return _by_name(rule, device_formats.tame(Case(rule, value_dtype, grad_dtype, format), numel))


def wild(
    rule: Rule,
    numel: int,
    value_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    format: StateFormat = StateFormat.FP32,
) -> Arrays:
    """Any bits, at addresses off any vector's."""
    return _by_name(rule, device_formats.wild(Case(rule, value_dtype, grad_dtype, format), numel))


def _by_name(rule: Rule, tensors: UpdateTensors) -> Arrays:
    arrays = {name: getattr(tensors, name) for name in ("value", "residual", "master", "grad")}
    arrays |= dict(zip(STATES[rule], tensors.states, strict=True))
    arrays |= {scales_of(name): scales for name, scales in zip(STATES[rule], tensors.scales, strict=False)}
    return {name: array for name, array in arrays.items() if array is not None}


def update_on_host(rule: Rule, arrays: Arrays, segment: Segment, kept: Kept = WHOLE) -> None:
    device_formats.update_on_host(rule, _tensors(rule, arrays, kept), segment)


def update_by(module: Any, rule: Rule, arrays: Arrays, segment: Segment, kept: Kept = WHOLE) -> None:
    """By `module`, which is triton_update."""
    with np.errstate(all="ignore"):  # an interpreter computes the masked elements of a block too
        module.update_on_device(rule, _tensors(rule, arrays, kept), segment)


def _tensors(rule: Rule, arrays: Arrays, kept: Kept) -> UpdateTensors:
    return UpdateTensors(
        value=arrays["value"],
        residual=arrays.get("residual"),
        states=tuple(arrays[name] for name in STATES[rule]),
        grad=arrays["grad"],
        master=arrays.get("master"),
        scales=_scales(rule, arrays),
        state_format=kept.format,
        seed=kept.seed,
        origin=kept.origin,
    )


def _scales(rule: Rule, arrays: Arrays) -> tuple[Tensor, ...]:
    return tuple(arrays[scales_of(name)] for name in STATES[rule] if scales_of(name) in arrays)


def copies(arrays: Arrays, device: str = "cpu") -> Arrays:
    return {name: array.to(device, copy=True) for name, array in arrays.items()}


def bits(array: Tensor) -> Tensor:
    return array.detach().cpu().reshape(-1).view(torch.uint8)


def same_bits(actual: Arrays, expected: Arrays) -> list[str]:
    """The arrays that differ."""
    assert actual.keys() == expected.keys()
    return [name for name in expected if not torch.equal(bits(actual[name]), bits(expected[name]))]


def import_triton_update(patch: pytest.MonkeyPatch, interpreted: str) -> ModuleType:
    return import_triton_module(patch, MODULE, interpreted)


def import_triton_module(patch: pytest.MonkeyPatch, name: str, interpreted: str) -> ModuleType:
    """One of the kernels' modules, and what it calls, anew: Triton looks at this variable when a kernel is declared."""
    triton = pytest.importorskip("triton", reason="triton is not installed: pip install 'zero_offload[triton]'")
    patch.setenv("TRITON_INTERPRET", interpreted)
    if interpreted == "1":
        # The kernel's function itself was declared when triton was imported; it calls this.
        tl = triton.language
        patch.setattr(tl, "max", lambda x, axis: tl.reduce(x, axis, tl.standard._elementwise_max))
    before = {each: sys.modules.pop(each) for each in MODULES if each in sys.modules}
    try:
        return importlib.import_module(name)
    finally:
        for each in MODULES:
            sys.modules.pop(each, None)
        sys.modules.update(before)
