"""The fused updates of all optimizers: `fused_update` over host memory, `update_on_device` over tensors of a device.

Owns the shape of its arguments; never allocates or keeps memory. One pass reads gradient, master and states,
and writes states, master and, when asked, a second copy of the new value. The same bits come out on every
machine and for every number of threads. The calls in order: `segment_array` when hyperparameters change, then
`fused_update` for each shard.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import Rule, UpdateArgsStruct
from zero_offload.hardware.kernels.arguments import (
    SEGMENT_DTYPE,
    Segment,
    SegmentArray,
    UpdateTensors,
    kind_of,
    segment_array,
)
from zero_offload.hardware.kernels.choice import has_device_update, kernels


@dataclass(frozen=True)
class UpdateBuffers:
    """Addresses of one shard's arrays; 0 where there is none.

    `value` is the fp32 master itself, or its bf16 half completed by `residual` (int16), or the fp16 copy of `master`
    (fp32). `value_out` receives a second copy of the new value, in the same dtype.

    States rest in fp32 or in bf16, both (numel,), or COMPACT. COMPACT states are (numel,) codes, int8 where the state
    is SIGNED, else uint8. `scales` has an fp32 for each STATE_BLOCK of them, counted from the start of the section. The
    residual of a bf16 value is int8 then, and the master keeps 24 bits. Rounding is at random, so that the mean is
    kept. It is the same for the same `seed`, step, and index in the section; `origin` is the index of element 0.
    """

    value: int
    residual: int
    master: int
    states: tuple[int, ...]  # in the order of STATES
    grad: int  # (numel,) of grad_dtype
    value_out: int
    value_dtype: torch.dtype
    grad_dtype: torch.dtype
    scales: tuple[int, ...] = ()  # of each (ceil(numel / STATE_BLOCK),) fp32, beside compact states
    state_format: StateFormat = StateFormat.FP32
    seed: int = 0  # 64 bits, another for each section
    origin: int = 0


def fused_update(
    rule: Rule, buffers: UpdateBuffers, segments: SegmentArray | Sequence[Segment], num_threads: int
) -> None:
    """One step over sorted, disjoint segments; elements in no segment are not touched.

    Beside compact states, `origin` and where segments begin are multiples of STATE_BLOCK.
    Raises ConfigError for an argument that is missing or out of range, and for buffers that overlap.
    """
    array = segments if isinstance(segments, np.ndarray) else segment_array(segments)
    if array.dtype != SEGMENT_DTYPE or not array.flags.c_contiguous:
        raise ConfigError(f"segments are an array from segment_array(), not one of {array.dtype}")
    kernels().update(
        UpdateArgsStruct(
            size=ctypes.sizeof(UpdateArgsStruct),
            rule=rule,
            value_kind=kind_of(buffers.value_dtype),
            grad_kind=kind_of(buffers.grad_dtype),
            num_threads=num_threads,
            state_format=buffers.state_format,
            num_segments=len(array),
            value=buffers.value,
            residual=buffers.residual,
            master=buffers.master,
            states=buffers.states,
            scales=buffers.scales,
            grad=buffers.grad,
            value_out=buffers.value_out,
            segments=array.ctypes.data,
            seed=buffers.seed,
            origin=buffers.origin,
        )
    )


def update_on_device(rule: Rule, tensors: UpdateTensors, segment: Segment) -> None:
    """Launch one step of elements [segment.begin, segment.end) on the current stream of the tensors' device.

    By Triton where it is (`triton_update`), else by torch's operations (`torch_update`). Nothing waits for the device.
    Elements outside are not touched. Raises ConfigError for tensors and segments that do not fit.
    """
    if has_device_update(tensors.value):
        from zero_offload.hardware.kernels.triton_update import update_on_device as by_triton

        by_triton(rule, tensors, segment)
    else:
        from zero_offload.hardware.kernels.torch_update import update_on_device as by_torch

        by_torch(rule, tensors, segment)
