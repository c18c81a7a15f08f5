"""The fused updates of all optimizers on tensors in a device's memory: csrc/optim and csrc/compact, with their bits.

Owns what such a call takes, the numbers that its segment stands for, and what it refuses before anything is touched.
`update_on_device` launches: Triton's kernels where they are to be had (`triton_update`), else torch's operations
(`torch_update`). Nothing waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from zero_offload.abi import STATE_BLOCK, Rule, StateFormat
from zero_offload.errors import ConfigError
from zero_offload.kernels.choice import has_device_update
from zero_offload.kernels.dtypes import FLOATS, kind_of
from zero_offload.kernels.fallback import rules
from zero_offload.kernels.fallback.checks import check_apart
from zero_offload.kernels.states import num_scales, state_dtype
from zero_offload.kernels.update import SEGMENT_DTYPE, SIGNED, STATES, Segment, segment_array


@dataclass(frozen=True)
class UpdateTensors:
    """A flat range in the memory of one device: each tensor is contiguous and has the same number of elements, in any
    shape; compact states have scales beside them, one for each STATE_BLOCK of elements. Beside a bf16 value, which is
    the half of a master, stands its residual; beside an fp16 value its master; an fp32 value is the master. `seed` and
    `origin` are those of `UpdateBuffers`."""

    value: Tensor  # fp32, bf16 or fp16
    residual: Tensor | None  # int16, or int8 beside compact states; None but for a bf16 value
    states: tuple[Tensor, ...]  # in the order of STATES: fp32, or bf16, or compact codes, int8 or uint8
    grad: Tensor  # fp32, bf16 or fp16
    master: Tensor | None = None  # fp32; None but for an fp16 value
    scales: tuple[Tensor, ...] = ()  # of compact states: (ceil(numel / STATE_BLOCK),) fp32 each
    state_format: StateFormat = StateFormat.FP32
    seed: int = 0
    origin: int = 0


def update_on_device(rule: Rule, tensors: UpdateTensors, segment: Segment) -> None:
    """Launch one step of elements [segment.begin, segment.end) on the current stream of the tensors' device.

    Elements outside are not touched. Raises ConfigError for tensors and segments that do not fit.
    """
    if has_device_update(tensors.value):
        from zero_offload.kernels.triton_update import update_on_device as by_triton

        by_triton(rule, tensors, segment)
    else:
        from zero_offload.kernels.torch_update import update_on_device as by_torch

        by_torch(rule, tensors, segment)


def scalars_of(rule: Rule, segment: Segment) -> tuple[float, ...]:
    """What does not depend on the element, rounded to fp32 as the host does it; see `rules`."""
    # The same for all parameters that share a step, whatever their sizes.
    return _scalars(rule, segment_array([replace(segment, begin=0, end=0)]).tobytes())


@functools.lru_cache(maxsize=64)
def _scalars(rule: Rule, row: bytes) -> tuple[float, ...]:
    (segment,) = np.frombuffer(row, SEGMENT_DTYPE)
    with np.errstate(over="ignore"):
        return tuple(np.array(rules.scalars_of(rule, segment), dtype=np.float32).tolist())


def check_update(rule: Rule, tensors: UpdateTensors, segment: Segment) -> None:
    """Raises ConfigError for what no kernel takes."""
    numel, device = tensors.value.numel(), tensors.value.device
    compact = tensors.state_format is StateFormat.COMPACT
    kind_of(tensors.grad.dtype)
    if not 0 <= segment.begin <= segment.end <= numel or segment.step < 1:
        raise ConfigError(
            f"an update of [{segment.begin}, {segment.end}) of {numel} elements in step {segment.step}; give a range "
            "inside of them, and count steps from 1"
        )
    grain = STATE_BLOCK if compact else 1
    if tensors.origin < 0 or tensors.origin % grain or segment.begin % grain:
        raise ConfigError(
            f"an update that begins at {segment.begin} of elements from {tensors.origin} on; both are 0 or more, and "
            f"beside compact states multiples of {STATE_BLOCK}"
        )
    spans = []
    for name, tensor, count, dtypes in _expected(rule, tensors):
        there = tensor.device == device and tensor.numel() == count and tensor.is_contiguous()
        if not there or tensor.dtype not in dtypes:
            wanted = f"{count} contiguous elements of {' or '.join(map(str, dtypes))} on {device}"
            got = f"{tensor.numel()} of {tensor.dtype} with strides {tensor.stride()} on {tensor.device}"
            raise ConfigError(
                f"{name}: an update takes {wanted}, got {got}; move a model before the first step of its optimizer, or "
                "load the optimizer's state dict after it has moved"
            )
        spans.append((name, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
    if device.type != "meta":  # which has no addresses
        check_apart("an update", spans)


def _expected(rule: Rule, tensors: UpdateTensors) -> Iterator[tuple[str, Tensor, int, tuple[torch.dtype, ...]]]:
    """Each tensor with its name, and the elements and dtypes it is to have."""
    numel, names, format = tensors.value.numel(), STATES[rule], tensors.state_format
    compact = format is StateFormat.COMPACT
    yield "value", tensors.value, numel, FLOATS
    yield "gradient", tensors.grad, numel, FLOATS
    parts = (
        ("residual", tensors.residual, torch.bfloat16, torch.int8 if compact else torch.int16),
        ("master", tensors.master, torch.float16, torch.float32),
    )
    for name, part, of, dtype in parts:
        if (tensors.value.dtype is of) != (part is not None):
            verb = "needs a" if part is None else "has no"
            raise ConfigError(f"a value of {tensors.value.dtype} {verb} {name}; values of {of} alone have one")
        if part is not None:
            yield name, part, numel, (dtype,)
    for what, found, count in (
        ("states", tensors.states, len(names)),
        ("scales", tensors.scales, compact * len(names)),
    ):
        if len(found) != count:
            raise ConfigError(f"{rule.name} keeps {count} {what} ({', '.join(names[:count])}), got {len(found)}")
    for name, state in zip(names, tensors.states, strict=True):
        yield name, state, numel, (state_dtype(format, signed=name in SIGNED),)
    for name, scales in zip(names, tensors.scales, strict=False):
        yield f"the scales of {name}", scales, num_scales(format, numel), (torch.float32,)
