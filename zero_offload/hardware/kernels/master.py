"""fp32 masters as a bf16 half and a residual, and conversions between fp32 and 16 bits.

The half is what the model computes with; a 16-bit residual completes it to the master bit for bit, in 4 bytes
together instead of 6, and one of 8 bits to the master rounded to its upper 24 bits, which is what stands beside compact
states. Half-way cases round away from zero. A NaN stays a NaN.
"""

from __future__ import annotations

import torch

from zero_offload.base.errors import ConfigError
from zero_offload.hardware.kernels.choice import kernels
from zero_offload.hardware.kernels.dtypes import FLOATS, address_of, kind_of


def split_master(master: torch.Tensor, half: torch.Tensor, residual: torch.Tensor, *, num_threads: int = 1) -> None:
    """Write the two parts of `master` (fp32) to `half` (bf16) and `residual` (int16, or int8: 24 bits of it)."""
    _check_same_numel(master, half, residual)
    found = kernels()
    split = found.short_master_split if residual.dtype is torch.int8 else found.master_split
    split(
        address_of(master, torch.float32),
        address_of(half, torch.bfloat16),
        address_of(residual, torch.int16, torch.int8),
        master.numel(),
        num_threads,
    )


def join_master(half: torch.Tensor, residual: torch.Tensor, master: torch.Tensor, *, num_threads: int = 1) -> None:
    """Write to `master` (fp32) what `half` (bf16) and `residual` (int16 or int8) stand for."""
    _check_same_numel(master, half, residual)
    found = kernels()
    join = found.short_master_join if residual.dtype is torch.int8 else found.master_join
    join(
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
