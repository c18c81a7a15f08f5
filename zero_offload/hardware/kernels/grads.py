"""Gradients on their way to where they rest: store or accumulate, and the norm of the result, in one pass.

Owns nothing; works on addresses. A sum of squares is added up along a fixed tree, so that the same values
give the same bits on every machine and for every number of threads; it is of the values written, after
rounding. One call for each gradient: `store_grad` or `accumulate_grad`.
"""

from __future__ import annotations

import torch

from zero_offload.hardware import abi, native
from zero_offload.hardware.kernels.choice import kernels
from zero_offload.hardware.kernels.dtypes import kind_of

GradSum = native.SumOfSquares
"""(sumsq: float, finite: bool): the sum of squares in double, and whether every value is finite."""

# Looking up a member of an enumeration takes a tenth of a microsecond.
_FP32, _OVERWRITE, _ACCUMULATE = abi.Kind.FP32, abi.GradMode.OVERWRITE, abi.GradMode.ACCUMULATE


def store_grad(
    dst_address: int,
    dst_dtype: torch.dtype,
    src_address: int,
    src_dtype: torch.dtype,
    numel: int,
    *,
    num_threads: int = 1,
) -> GradSum:
    """dst = src. fp32 to 16 bits is refused: it would round a gradient that was whole."""
    kinds = kind_of(dst_dtype), kind_of(src_dtype)
    return kernels().grad_store(*kinds, _OVERWRITE, num_threads, dst_address, src_address, numel)


def accumulate_grad(
    dst_address: int, src_address: int, src_dtype: torch.dtype, numel: int, *, num_threads: int = 1
) -> GradSum:
    """dst += src, where dst is fp32; the sums are of the new dst."""
    kinds = _FP32, kind_of(src_dtype)
    return kernels().grad_store(*kinds, _ACCUMULATE, num_threads, dst_address, src_address, numel)


def sum_of_squares(address: int, dtype: torch.dtype, numel: int, *, num_threads: int = 1) -> GradSum:
    """The same sums over values that are already there."""
    return kernels().sumsq(kind_of(dtype), address, numel, num_threads)
