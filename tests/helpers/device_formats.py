"""Flat ranges in every format of states for the updates on a device, and what the native kernels make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tests.helpers.any_bits import codes, floats, halves
from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.arguments import Segment, UpdateTensors, num_scales, state_dtype
from zero_offload.hardware.kernels.formats import encode_states, split_master
from zero_offload.hardware.kernels.rules import SIGNED, STATES
from zero_offload.hardware.kernels.update import UpdateBuffers, fused_update

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SEED = 0x123456789ABCDEF0


@dataclass(frozen=True)
class Case:
    rule: Rule
    value: torch.dtype
    grad: torch.dtype
    format: StateFormat


def cases(rule: Rule, format: StateFormat) -> Iterator[Case]:
    """Every dtype of values beside every dtype of gradients."""
    for value in (FP32, BF16, FP16):
        for grad in (FP32, BF16, FP16):
            yield Case(rule, value, grad, format)


Make = Callable[[Case, int], UpdateTensors]


def tame(case: Case, numel: int) -> UpdateTensors:
    """Numbers as training has them, (numel,) each: squares over eighteen powers of ten, a zero here and there."""
    draw = torch.Generator().manual_seed(numel)
    master = torch.randn(numel, generator=draw)
    value, residual = master.to(case.value), _residual_for(case, numel)
    if residual is not None:
        split_master(master, value, residual)
    states, scales = [], []
    for name in STATES[case.rule]:
        signed = name in SIGNED
        x = torch.randn(numel, generator=draw) * torch.logspace(-9, 0, numel)
        x[::5] = 0
        state = torch.zeros(numel, dtype=state_dtype(case.format, signed=signed))
        scale = torch.zeros(num_scales(case.format, numel))
        compact = case.format is StateFormat.COMPACT
        encode_states(case.format, x if signed else x**2, state, scale if compact else None, signed=signed)
        states.append(state)
        scales += [scale] * compact
    grad = torch.randn(numel, generator=draw).to(case.grad)
    beside = master if case.value is FP16 else None
    return UpdateTensors(value, residual, tuple(states), grad, beside, tuple(scales), case.format, SEED)


def wild(case: Case, numel: int) -> UpdateTensors:
    """Any bits: NaNs of all kinds, infinities, subnormal numbers and ordinary ones, at addresses off any vector's."""
    value = floats(numel, 1) if case.value is FP32 else halves(numel, 1, case.value)
    residual = _residual_for(case, numel)
    if residual is not None:
        residual = codes(numel, 2, torch.int8) if residual.dtype is torch.int8 else halves(numel, 2).view(torch.int16)
    states, scales = [], []
    for k, name in enumerate(STATES[case.rule]):
        if case.format is StateFormat.FP32:
            states.append(floats(numel, 10 + k, 1e-3))
        elif case.format is StateFormat.BF16:
            states.append(halves(numel, 10 + k))
        else:
            states.append(codes(numel, 10 + k, state_dtype(case.format, signed=name in SIGNED)))
            scales.append(floats(num_scales(case.format, numel), 20 + k, 1e-3))
    grad = floats(numel, 5) if case.grad is FP32 else halves(numel, 5, case.grad)
    beside = floats(numel, 7) if case.value is FP16 else None
    return UpdateTensors(value, residual, tuple(states), grad, beside, tuple(scales), case.format, SEED)


def _residual_for(case: Case, numel: int) -> Tensor | None:
    if case.value is not BF16:
        return None
    return torch.zeros(numel, dtype=torch.int8 if case.format is StateFormat.COMPACT else torch.int16)


def update_on_host(rule: Rule, tensors: UpdateTensors, segment: Segment) -> None:
    """By the native kernels, or what stands in for them; they take no address of nothing."""
    if segment.begin == segment.end:
        return
    buffers = UpdateBuffers(
        value=tensors.value.data_ptr(),
        residual=0 if tensors.residual is None else tensors.residual.data_ptr(),
        master=0 if tensors.master is None else tensors.master.data_ptr(),
        states=tuple(state.data_ptr() for state in tensors.states),
        grad=tensors.grad.data_ptr(),
        value_out=0,
        value_dtype=tensors.value.dtype,
        grad_dtype=tensors.grad.dtype,
        scales=tuple(scale.data_ptr() for scale in tensors.scales),
        state_format=tensors.state_format,
        seed=tensors.seed,
        origin=tensors.origin,
    )
    fused_update(rule, buffers, [segment], 1)


def each_tensor(tensors: UpdateTensors, change: Callable[[Tensor], Tensor]) -> UpdateTensors:
    """The same with what `change` makes of each."""
    made: dict[str, object] = {}
    for field in fields(tensors):
        kept = getattr(tensors, field.name)
        if isinstance(kept, Tensor):
            made[field.name] = change(kept)
        elif isinstance(kept, tuple):
            made[field.name] = tuple(change(each) for each in kept)
    return replace(tensors, **made)


def copies(tensors: UpdateTensors, device: str = "cpu") -> UpdateTensors:
    return each_tensor(tensors, lambda tensor: tensor.to(device, copy=True))


def different(actual: UpdateTensors, expected: UpdateTensors) -> list[str]:
    """The names of the tensors whose bits differ."""
    theirs = named(expected)
    return [name for name, tensor in named(actual).items() if not torch.equal(_bits(tensor), _bits(theirs[name]))]


def named(tensors: UpdateTensors) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for field in fields(tensors):
        kept = getattr(tensors, field.name)
        for k, each in enumerate(kept if isinstance(kept, tuple) else [kept]):
            if isinstance(each, Tensor):
                found[f"{field.name}[{k}]" if isinstance(kept, tuple) else field.name] = each
    return found


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)
