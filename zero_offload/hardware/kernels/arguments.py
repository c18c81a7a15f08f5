"""Arguments of kernels: dtypes and addresses, hyperparameters, segments, their scalars, and tensors of an update.

Values and checks only: it runs nothing, and imports no kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import StateFormat
from zero_offload.hardware import abi
from zero_offload.hardware.abi import STATE_BLOCK, ElementType, Rule
from zero_offload.hardware.kernels.rules import FORMULAS, SIGNED, STATES, scalars_of_row

CHUNK = 16384
"""Elements: kChunk of csrc/util/chunks.h, what one thread takes at once; sums depend on it."""
LANES = 16
"""Sums of a chunk that are added up side by side; see [Note: the tree] in csrc/reduce/reduce.h."""

SEGMENT_DTYPE = np.dtype(abi.SegmentStruct)
SegmentArray = npt.NDArray[np.void]


class _Kinds(dict[torch.dtype, ElementType]):
    def __missing__(self, dtype: torch.dtype) -> ElementType:
        raise ConfigError(f"the kernels take torch.float32, torch.bfloat16 and torch.float16, not {dtype}")


_KINDS = _Kinds({torch.float32: ElementType.FP32, torch.bfloat16: ElementType.BF16, torch.float16: ElementType.FP16})
FLOATS = tuple(_KINDS)
kind_of = _KINDS.__getitem__
"""The kernel kind of a dtype. Raises ConfigError for any but float32, bfloat16 and float16. Twice for each gradient, so
it is a look-up and no function."""


def address_of(tensor: torch.Tensor, *dtypes: torch.dtype) -> int:
    """The address of a contiguous CPU tensor of one of these dtypes. Raises ConfigError otherwise."""
    if tensor.dtype not in dtypes or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ConfigError(
            f"a CPU kernel needs a contiguous CPU tensor of {' or '.join(map(str, dtypes))}, got "
            f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()} on {tensor.device}"
        )
    return tensor.data_ptr()


@dataclass(frozen=True)
class Segment:
    """Elements [begin, end) of every buffer share these hyperparameters; `step` counts from 1.

    For SGD, beta1 is the momentum and beta2 the dampening. For Adagrad, beta1 is lr_decay. beta2 is
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
class Hyper:
    """Hyperparameters of one update. `Segment` says how a rule without betas uses `beta1` and `beta2`."""

    rule: Rule
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool

    @property
    def states(self) -> tuple[str, ...]:
        """The states of the rule, by torch's names."""
        return STATES[self.rule]

    @property
    def initial(self) -> float:
        """The state's value before the first step: Adagrad's sum has one."""
        return self.beta2 if FORMULAS[self.rule].begins_at_beta2 else 0.0

    def first(self) -> Hyper:
        """Hyperparameters where the states are new, whatever the step: SGD's momentum begins without dampening."""
        return replace(self, beta2=0.0) if FORMULAS[self.rule].begins_without_beta2 else self

    def going_on(self) -> Hyper:
        """Hyperparameters where there are states already, whatever the step: Adagrad's sum has its initial value."""
        return replace(self, beta2=0.0) if FORMULAS[self.rule].begins_at_beta2 else self

    def segment(self, begin: int, end: int, grad_scale: float, step: int) -> Segment:
        """Elements [begin, end), whose gradient is multiplied by `grad_scale` first, in their step number `step`."""
        scale = -grad_scale if self.maximize else grad_scale
        return Segment(begin, end, self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, scale, step)


def segment_array(segments: Sequence[Segment]) -> SegmentArray:
    """The segments as one array for `fused_update`: build it once, use it for many calls."""
    # Not by `astuple`, whose copies of numbers take longer than a launch on a device.
    return np.array([tuple(vars(segment).values()) for segment in segments], dtype=SEGMENT_DTYPE)


def scalars_of(rule: Rule, segment: Segment) -> tuple[float, ...]:
    """Scalars of a segment, which are the same for all elements, rounded to fp32 once."""
    # The same for all parameters that share a step, whatever their sizes.
    return _scalars(rule, segment_array([replace(segment, begin=0, end=0)]).tobytes())


@functools.lru_cache(maxsize=64)
def _scalars(rule: Rule, row: bytes) -> tuple[float, ...]:
    (segment,) = np.frombuffer(row, SEGMENT_DTYPE)
    with np.errstate(over="ignore"):
        return tuple(np.array(scalars_of_row(rule, segment), dtype=np.float32).tolist())


def state_dtype(format: StateFormat, *, signed: bool) -> torch.dtype:
    """The dtype of a state's elements, codes or not."""
    if format is StateFormat.COMPACT:
        return torch.int8 if signed else torch.uint8
    return torch.bfloat16 if format is StateFormat.BF16 else torch.float32


def num_scales(format: StateFormat, numel: int) -> int:
    """How many fp32 scales stand beside a state of `numel` elements."""
    return -(-numel // STATE_BLOCK) if format is StateFormat.COMPACT else 0


@dataclass(frozen=True)
class UpdateTensors:
    """A flat range in the memory of one device. Each tensor is contiguous and has the same number of elements, in any
    shape. Compact states have scales beside them, one for each STATE_BLOCK of elements. A bf16 value is the half of a
    master, and its residual stands beside it. An fp16 value has its master beside it; an fp32 value is the master.
    `seed` and `origin` are those of `UpdateBuffers`.
    """

    value: Tensor  # fp32, bf16 or fp16
    residual: Tensor | None  # int16, or int8 beside compact states; None but for a bf16 value
    states: tuple[Tensor, ...]  # in the order of STATES: fp32, or bf16, or compact codes, int8 or uint8
    grad: Tensor  # fp32, bf16 or fp16
    master: Tensor | None = None  # fp32; None but for an fp16 value
    scales: tuple[Tensor, ...] = ()  # of compact states: (ceil(numel / STATE_BLOCK),) fp32 each
    state_format: StateFormat = StateFormat.FP32
    seed: int = 0
    origin: int = 0


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
                f"{name}: an update takes {wanted}, got {got}. Move a model before the first step of its optimizer, or "
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


def check_apart(call: str, spans: Iterable[tuple[str, int, int]]) -> None:
    """No element of one buffer may lie in another: the pass would read what it has just written.

    A span is a name and the addresses of the first byte and of that behind the last.
    """
    for (a, a_first, a_last), (b, b_first, b_last) in itertools.combinations(spans, 2):
        if a_last > b_first and b_last > a_first:
            raise ConfigError(f"{call}: {a} and {b} overlap; give each memory of its own")
