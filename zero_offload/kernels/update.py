"""The fused updates of all optimizers, over raw memory.

Owns the shape of its arguments; never allocates or keeps memory. One pass reads gradient, master and states,
and writes states, master and, when asked, a second copy of the new value. The same bits come out on every
machine and for every number of threads. The calls in order: `segment_array` when hyperparameters change, then
`fused_update` for each shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from zero_offload import abi, native
from zero_offload.abi import Rule, StateFormat
from zero_offload.errors import ConfigError
from zero_offload.kernels.choice import kernels
from zero_offload.kernels.dtypes import kind_of

SEGMENT_DTYPE = np.dtype(abi.SegmentStruct)
SegmentArray = npt.NDArray[np.void]


STATES: dict[Rule, tuple[str, ...]] = {
    Rule.ADAMW: ("exp_avg", "exp_avg_sq"),
    Rule.ADAMW_AMSGRAD: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    Rule.ADAM: ("exp_avg", "exp_avg_sq"),
    Rule.ADAM_AMSGRAD: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    Rule.ADAGRAD: ("sum",),
    Rule.LION: ("exp_avg",),
    Rule.SGD: (),
    Rule.SGD_MOMENTUM: ("momentum_buffer",),
    Rule.SGD_NESTEROV: ("momentum_buffer",),
}
"""What a rule keeps, by torch's names, in the order of the kernels."""

SIGNED = frozenset({"exp_avg", "momentum_buffer"})
"""The states that may be below 0; the others are means, sums or maxima of squares."""


@dataclass(frozen=True)
class Segment:
    """Elements [begin, end) of every buffer share these hyperparameters; `step` counts from 1.

    For SGD, beta1 is the momentum and beta2 the dampening; for Adagrad, beta1 is lr_decay and beta2 is
    initial_accumulator_value, which the first step adds to `sum`.
    """

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
class UpdateBuffers:
    """Addresses of one shard's arrays; 0 where there is none.

    `value` is the fp32 master itself, or its bf16 half completed by `residual` (int16), or the fp16 copy of `master`
    (fp32). `value_out` receives a second copy of the new value, in the same dtype.

    States rest in fp32 or in bf16, both (numel,), or COMPACT: (numel,) codes, int8 where the state is SIGNED, else
    uint8, and in `scales` an fp32 for each STATE_BLOCK of them, counted from the start of the section; the residual
    of a bf16 value is int8 then, and the master keeps 24 bits. What is rounded is rounded at random, so that it keeps
    its mean: the same way for the same `seed`, step, and index in the section, of which `origin` is that of element 0.
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


def segment_array(segments: Sequence[Segment]) -> SegmentArray:
    """The segments as one array for `fused_update`: build it once, use it for many calls."""
    # Not by `astuple`, whose copies of numbers take longer than a launch on a device.
    return np.array([tuple(vars(segment).values()) for segment in segments], dtype=SEGMENT_DTYPE)


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
        native.UpdateArgs(
            rule=rule,
            value=buffers.value,
            residual=buffers.residual,
            master=buffers.master,
            states=buffers.states,
            grad=buffers.grad,
            value_out=buffers.value_out,
            value_kind=kind_of(buffers.value_dtype),
            grad_kind=kind_of(buffers.grad_dtype),
            segments=array.ctypes.data,
            num_segments=len(array),
            num_threads=num_threads,
            scales=buffers.scales,
            state_format=buffers.state_format,
            seed=buffers.seed,
            origin=buffers.origin,
        )
    )
