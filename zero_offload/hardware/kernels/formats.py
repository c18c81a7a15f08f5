"""Masters and states as tensors, between fp32 and the formats that they rest in.

A bf16 half is what the model computes with. A 16-bit residual completes it to the fp32 master bit for bit, in 4 bytes
together instead of 6. Beside compact states the residual has 8 bits: it completes the half to the master rounded to its
upper 24 bits. Half-way cases round away from zero. A NaN stays a NaN.

A compact state is one 8-bit code for each element and one fp32 scale for each block of STATE_BLOCK. With q the scale of
its block, code c stands for (c q)^2, or for c |c| q^2 where the state is signed. Codes are roots, so a block holds
values from its largest to 1/16129 of that, or to 1/65025 without a sign. Encoding takes the nearest code, but never 0
for what is above 0 in a state without a sign, since its root is divided by. Values that are decoded and encoded again
come back bit for bit. A block with a NaN or an infinity decodes to NaN, all of it.
"""

from __future__ import annotations

import torch

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import StateFormat
from zero_offload.hardware.kernels.arguments import FLOATS, address_of, kind_of, num_scales, state_dtype
from zero_offload.hardware.kernels.choice import kernels


def split_master(master: torch.Tensor, half: torch.Tensor, residual: torch.Tensor, *, num_threads: int = 1) -> None:
    """Write the two parts of `master` (fp32) to `half` (bf16) and `residual` (int16, or int8: 24 bits of it)."""
    _check_same_numel(master, half, residual)
    kernels().master_split(
        residual.dtype is torch.int8,
        address_of(master, torch.float32),
        address_of(half, torch.bfloat16),
        address_of(residual, torch.int16, torch.int8),
        master.numel(),
        num_threads,
    )


def join_master(half: torch.Tensor, residual: torch.Tensor, master: torch.Tensor, *, num_threads: int = 1) -> None:
    """Write to `master` (fp32) what `half` (bf16) and `residual` (int16 or int8) stand for."""
    _check_same_numel(master, half, residual)
    kernels().master_join(
        residual.dtype is torch.int8,
        address_of(half, torch.bfloat16),
        address_of(residual, torch.int16, torch.int8),
        address_of(master, torch.float32),
        master.numel(),
        num_threads,
    )


def convert(dst: torch.Tensor, src: torch.Tensor, *, num_threads: int = 1) -> None:
    """dst = src between fp32 and bf16 or fp16, rounding to nearest, ties to even, as torch does."""
    _check_same_numel(dst, src)
    kernels().convert(
        address_of(dst, *FLOATS),
        kind_of(dst.dtype),
        address_of(src, *FLOATS),
        kind_of(src.dtype),
        dst.numel(),
        num_threads,
    )


def _check_same_numel(*tensors: torch.Tensor) -> None:
    counts = [tensor.numel() for tensor in tensors]
    if len(set(counts)) != 1:
        raise ConfigError(f"the tensors of one call need the same number of elements, got {counts}")


def decode_states(
    format: StateFormat,
    states: torch.Tensor,
    scales: torch.Tensor | None,
    fp32: torch.Tensor,
    *,
    signed: bool,
    num_threads: int = 1,
) -> None:
    """Write to `fp32` what `states`, of `state_dtype`, and `scales` (compact only, else None) stand for.

    The first element of each is that of a block. Raises ConfigError for tensors that do not fit.
    """
    kernels().states_decode(*_arguments(format, states, scales, fp32, signed, num_threads))


def encode_states(
    format: StateFormat,
    fp32: torch.Tensor,
    states: torch.Tensor,
    scales: torch.Tensor | None,
    *,
    signed: bool,
    num_threads: int = 1,
) -> None:
    """Write to `states` and `scales` what is nearest to `fp32`; otherwise as `decode_states`."""
    kernels().states_encode(*_arguments(format, states, scales, fp32, signed, num_threads))


def _arguments(
    format: StateFormat,
    states: torch.Tensor,
    scales: torch.Tensor | None,
    fp32: torch.Tensor,
    signed: bool,
    num_threads: int,
) -> tuple[StateFormat, bool, int, int, int, int, int]:
    numel, expected = fp32.numel(), num_scales(format, fp32.numel())
    found = 0 if scales is None else scales.numel()
    if states.numel() != numel or found != expected:
        raise ConfigError(
            f"{format.name} states of {numel} elements have {numel} in their own array and {expected} scales, "
            f"got {states.numel()} and {found}"
        )
    return (
        format,
        signed,
        address_of(states, state_dtype(format, signed=signed)),
        0 if scales is None else address_of(scales, torch.float32),
        address_of(fp32, torch.float32),
        numel,
        num_threads,
    )
