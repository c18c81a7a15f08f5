"""Optimizer states as tensors, between fp32 and the formats they rest in.

A compact state is one 8-bit code for each element and one fp32 scale for each block of STATE_BLOCK. With q the scale
of its block, code c stands for (c q)^2, or for c |c| q^2 where the state is signed: roots, so that a block holds
values from its largest to 1/16129 of that, or to 1/65025 where there is no sign. Encoding takes the nearest code, but
never 0 for what is above 0 in a state without a sign, since its root is divided by. What is decoded and encoded again
comes back bit for bit. A block with a NaN or an infinity decodes to NaN, all of it.
"""

from __future__ import annotations

import torch

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import StateFormat
from zero_offload.hardware.kernels.choice import kernels
from zero_offload.hardware.kernels.dtypes import address_of
from zero_offload.hardware.kernels.words import num_scales, state_dtype


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
