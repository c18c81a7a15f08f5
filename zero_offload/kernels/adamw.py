"""The fused AdamW update over raw memory.

Owns the shape of its arguments; never allocates or keeps memory. One pass reads gradient, master and moments,
and writes moments, master and, when asked, a second copy of the new value. The same bits come out on every
machine and for every number of threads. The calls in order: `segment_array` when hyperparameters change, then
`adamw_update` for each shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt
import torch

from zero_offload import abi, native
from zero_offload.errors import ConfigError
from zero_offload.kernels.dtypes import kind_of

SEGMENT_DTYPE = np.dtype(abi.AdamWSegmentStruct)
SegmentArray = npt.NDArray[np.void]


@dataclass(frozen=True)
class AdamWSegment:
    """Elements [begin, end) of every buffer share these hyperparameters; `step` counts from 1."""

    begin: int
    end: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: float
    step: int


@dataclass(frozen=True)
class AdamWBuffers:
    """Addresses of one shard's arrays; 0 where there is none.

    `value` is the fp32 master itself, or its bf16 half completed by `residual` (int16), or the fp16 copy of `master`
    (fp32). `value_out` receives a second copy of the new value, in the same dtype.
    """

    value: int
    residual: int
    master: int
    exp_avg: int  # (numel,) fp32
    exp_avg_sq: int  # (numel,) fp32
    grad: int  # (numel,) of grad_dtype
    value_out: int
    value_dtype: torch.dtype
    grad_dtype: torch.dtype


def segment_array(segments: Sequence[AdamWSegment]) -> SegmentArray:
    """The segments as one array for `adamw_update`: build it once, use it for many calls."""
    return np.array([astuple(segment) for segment in segments], dtype=SEGMENT_DTYPE)


def adamw_update(buffers: AdamWBuffers, segments: SegmentArray | Sequence[AdamWSegment], num_threads: int) -> None:
    """One AdamW step over sorted, disjoint segments; elements in no segment are not touched."""
    array = segments if isinstance(segments, np.ndarray) else segment_array(segments)
    if array.dtype != SEGMENT_DTYPE or not array.flags.c_contiguous:
        raise ConfigError(f"segments are an array from segment_array(), not one of {array.dtype}")
    native.adamw(
        native.AdamWArgs(
            value=buffers.value,
            residual=buffers.residual,
            master=buffers.master,
            exp_avg=buffers.exp_avg,
            exp_avg_sq=buffers.exp_avg_sq,
            grad=buffers.grad,
            value_out=buffers.value_out,
            value_kind=kind_of(buffers.value_dtype),
            grad_kind=kind_of(buffers.grad_dtype),
            segments=array.ctypes.data,
            num_segments=len(array),
            num_threads=num_threads,
        )
    )
