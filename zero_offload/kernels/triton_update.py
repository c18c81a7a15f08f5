"""The fused updates of all optimizers on a GPU, compiled by Triton: csrc/optim on tensors of a device.

Imported only when `choice.has_device_update` asks for it. One pass, as on a CPU:
gradient, master and states are read, states, master and value written. The operations and their roundings are those of
[Note: rounding] in csrc/optim/rules.inl, one by one, so that the bits are those of the native kernels: `tl.fma` is the
only fused one (a launch forbids others), divisions and roots are the rounded ones, and subnormal numbers are kept.
Nothing waits for the device. Triton keeps what it has compiled in files, for the next process too.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_offload.abi import MAX_STATES, Rule, StateFormat
from zero_offload.errors import ConfigError
from zero_offload.kernels.device_update import UpdateTensors, check_update
from zero_offload.kernels.fallback import rules
from zero_offload.kernels.update import SEGMENT_DTYPE, Segment, segment_array

BLOCK = 1024
"""Elements of a program: eight for each of its 128 threads, so that halves, too, are loaded 16 bytes at a time."""
OPTIONS = {"enable_fp_fusion": False}
"""Of the compiler: a product is not fused with the sum behind it."""

# A kernel reads no globals but those that it may take for constants.
_GRAD_SCALE, _DECAY, _L2 = tl.constexpr(rules.GRAD_SCALE), tl.constexpr(rules.DECAY), tl.constexpr(rules.L2)
_BETA1, _BETA2 = tl.constexpr(rules.BETA1), tl.constexpr(rules.BETA2)
_ONE_MINUS_BETA1, _ONE_MINUS_BETA2 = tl.constexpr(rules.ONE_MINUS_BETA1), tl.constexpr(rules.ONE_MINUS_BETA2)
_INV_SQRT_BIAS2, _EPS = tl.constexpr(rules.INV_SQRT_BIAS2), tl.constexpr(rules.EPS)
_NEG_STEP_SIZE, _GRAD_SHARE = tl.constexpr(rules.NEG_STEP_SIZE), tl.constexpr(rules.GRAD_SHARE)
_FIRST_SUM = tl.constexpr(rules.FIRST_SUM)
_ADAMW, _ADAMW_AMSGRAD = tl.constexpr(int(Rule.ADAMW)), tl.constexpr(int(Rule.ADAMW_AMSGRAD))
_ADAM_AMSGRAD, _ADAGRAD = tl.constexpr(int(Rule.ADAM_AMSGRAD)), tl.constexpr(int(Rule.ADAGRAD))
_LION, _SGD = tl.constexpr(int(Rule.LION)), tl.constexpr(int(Rule.SGD))
_SGD_NESTEROV = tl.constexpr(int(Rule.SGD_NESTEROV))
_QUIET_NAN = tl.constexpr(0x7FC00000)


def update_on_device(rule: Rule, tensors: UpdateTensors, segment: Segment) -> None:
    """Launch one step of elements [segment.begin, segment.end) on the current stream of the tensors' device.

    Elements outside are not touched. Raises ConfigError for tensors and segments that do not fit.
    """
    check_update(rule, tensors, segment)
    if tensors.state_format is not StateFormat.FP32 or tensors.value.dtype is torch.float16:
        raise ConfigError(f"no kernel for {tensors.state_format.name} states beside {tensors.value.dtype}")
    if segment.begin == segment.end:
        return
    numel = segment.end - segment.begin
    value, grad = _part(tensors.value, segment), _part(tensors.grad, segment)
    residual = None if tensors.residual is None else _part(tensors.residual, segment)
    # Triton gets the bits of bf16 numbers: they are moved into place, without a conversion that has rules of its own.
    if residual is not None:
        value = value.view(torch.int16)
    has_bf16_grad = grad.dtype is torch.bfloat16
    if has_bf16_grad:
        grad = grad.view(torch.int16)
    states = [_part(state, segment) for state in tensors.states]
    absent = [None] * (MAX_STATES - len(states))
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.accelerator.device_index(tensors.value.device.index):
        _update[(triton.cdiv(numel, BLOCK),)](
            *(value, residual, *states, *absent, grad),
            _scalars(rule, segment_array([replace(segment, begin=0, end=0)]).tobytes()),
            numel,
            RULE=int(rule),
            NUM_STATES=len(states),
            IS_SPLIT=residual is not None,
            HAS_BF16_GRAD=has_bf16_grad,
            BLOCK=BLOCK,
            **OPTIONS,
        )


def try_on(device: torch.device) -> None:
    """Update a few elements there; raises what Triton does where it has no compiler or does not know the device."""
    value = torch.zeros(BLOCK, device=device)
    segment = Segment(0, BLOCK, lr=0.0, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, grad_scale=1.0, step=1)
    update_on_device(Rule.SGD, UpdateTensors(value, None, (), torch.zeros_like(value)), segment)


def _part(tensor: Tensor, segment: Segment) -> Tensor:
    # Most are whole, and a launch is short: five views would take longer than all checks.
    is_whole = segment.end - segment.begin == tensor.numel()
    return tensor if is_whole else tensor.view(-1)[segment.begin : segment.end]


@functools.lru_cache(maxsize=64)
def _scalars(rule: Rule, row: bytes) -> tuple[float, ...]:
    """Those of a segment's row, rounded to fp32 as the host does it; the same for all parameters that share a step."""
    (segment,) = np.frombuffer(row, SEGMENT_DTYPE)
    with np.errstate(over="ignore"):
        return tuple(np.array(rules.scalars_of(rule, segment), dtype=np.float32).tolist())


@triton.jit
def _update(
    value: tl.tensor,
    residual: tl.tensor,
    state0: tl.tensor,
    state1: tl.tensor,
    state2: tl.tensor,
    grad: tl.tensor,
    c: tl.tuple,
    numel: tl.tensor,
    RULE: tl.constexpr,
    NUM_STATES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_BF16_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One block; `c` are the scalars of `rules.scalars_of`. `value` points to the bits of halves if IS_SPLIT, `grad` to
    those of bf16 numbers if HAS_BF16_GRAD."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numel
    g = tl.load(grad + i, mask=inside)
    if HAS_BF16_GRAD:
        g = (g.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    g = g.to(tl.float32) * c[_GRAD_SCALE]
    if IS_SPLIT:
        # The residual is signed and may carry into the half.
        half = tl.load(value + i, mask=inside).to(tl.int32) << 16
        p = (half + tl.load(residual + i, mask=inside).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        p = tl.load(value + i, mask=inside)
    # Where a rule has fewer states, the others stand for nothing and come back as they are.
    s0, s1, s2 = g, g, g
    if NUM_STATES > 0:
        s0 = tl.load(state0 + i, mask=inside)
    if NUM_STATES > 1:
        s1 = tl.load(state1 + i, mask=inside)
    if NUM_STATES > 2:
        s2 = tl.load(state2 + i, mask=inside)
    if RULE <= _ADAM_AMSGRAD:
        p, s0, s1, s2 = _adam(c, g, p, s0, s1, s2, RULE <= _ADAMW_AMSGRAD, NUM_STATES == 3)
    elif RULE == _ADAGRAD:
        p, s0 = _adagrad(c, g, p, s0)
    elif RULE == _LION:
        p, s0 = _lion(c, g, p, s0)
    else:
        p, s0 = _sgd(c, g, p, s0, RULE)
    if NUM_STATES > 0:
        _store(state0 + i, s0, inside)
    if NUM_STATES > 1:
        _store(state1 + i, s1, inside)
    if NUM_STATES > 2:
        _store(state2 + i, s2, inside)
    if IS_SPLIT:
        word = _canonical_bits(p)
        tl.store(value + i, ((word + 0x8000) >> 16).to(tl.int16), mask=inside)
        tl.store(residual + i, word.to(tl.int16), mask=inside)
    else:
        _store(value + i, p, inside)


@triton.jit
def _canonical_bits(x: tl.tensor) -> tl.tensor:
    """See `canonical` in csrc/simd/elements.inl: a GPU makes NaNs of its own."""
    return tl.where(x != x, _QUIET_NAN, x.to(tl.int32, bitcast=True))


@triton.jit
def _store(to: tl.tensor, x: tl.tensor, inside: tl.tensor) -> None:
    tl.store(to, _canonical_bits(x).to(tl.float32, bitcast=True), mask=inside)


# The rules, with the formulas and sources of csrc/optim/rules.inl.


@triton.jit
def _adam(
    c: tl.tuple,
    g: tl.tensor,
    p: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    x: tl.tensor,
    DECOUPLED: tl.constexpr,
    AMSGRAD: tl.constexpr,
) -> tl.tuple:
    if DECOUPLED:
        p = p * c[_DECAY]
    else:
        g = tl.fma(c[_L2], p, g)
    m = tl.fma(c[_ONE_MINUS_BETA1], g - m, m)
    v = tl.fma(c[_BETA2], v, c[_ONE_MINUS_BETA2] * (g * g))
    if AMSGRAD:
        x = tl.where(v > x, v, x)
    root = tl.math.sqrt_rn(x if AMSGRAD else v)
    p = tl.fma(c[_NEG_STEP_SIZE], tl.math.div_rn(m, tl.fma(root, c[_INV_SQRT_BIAS2], c[_EPS])), p)
    return p, m, v, x


@triton.jit
def _adagrad(c: tl.tuple, g: tl.tensor, p: tl.tensor, total: tl.tensor) -> tl.tuple:
    g = tl.fma(c[_L2], p, g)
    total = tl.fma(g, g, total + c[_FIRST_SUM])
    p = tl.fma(c[_NEG_STEP_SIZE], tl.math.div_rn(g, tl.math.sqrt_rn(total) + c[_EPS]), p)
    return p, total


@triton.jit
def _lion(c: tl.tuple, g: tl.tensor, p: tl.tensor, m: tl.tensor) -> tl.tuple:
    apart = g - m
    mixed = tl.fma(c[_ONE_MINUS_BETA1], apart, m)
    # -1, 1, or the zero or NaN it was.
    sign = tl.where(mixed > 0.0, 1.0, tl.where(mixed < 0.0, -1.0, mixed))
    p = tl.fma(c[_NEG_STEP_SIZE], sign, p * c[_DECAY])
    m = tl.fma(c[_ONE_MINUS_BETA2], apart, m)
    return p, m


@triton.jit
def _sgd(c: tl.tuple, g: tl.tensor, p: tl.tensor, b: tl.tensor, RULE: tl.constexpr) -> tl.tuple:
    g = tl.fma(c[_L2], p, g)
    if RULE != _SGD:
        b = tl.fma(c[_BETA1], b, c[_GRAD_SHARE] * g)
        g = b if RULE != _SGD_NESTEROV else tl.fma(c[_BETA1], b, g)
    p = tl.fma(c[_NEG_STEP_SIZE], g, p)
    return p, b
