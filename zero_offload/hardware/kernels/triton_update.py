"""The fused updates of all optimizers on a GPU, compiled by Triton: csrc/optim on tensors of a device.

Imported, and triton with it, only when `choice.has_device_update` asks for it. One pass, as on a CPU: gradient, master
and states are read, states, master and value written, in whatever format they rest. The operations and their roundings
are those of [Note: rounding] in csrc/optim/rules.inl, one by one. So the bits are those of the native kernels. `tl.fma`
is the only fused operation (a launch forbids others). Divisions and roots are rounded correctly, and subnormal numbers
are kept. Nothing waits for the device. Triton keeps what it has compiled in files, for the next process too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import MAX_STATES, STATE_BLOCK, ElementType, Rule
from zero_offload.hardware.kernels import rules
from zero_offload.hardware.kernels.arguments import Segment, UpdateTensors, check_update, kind_of, scalars_of
from zero_offload.hardware.kernels.fallback.codec import random_key, turns

BLOCK = 1024
"""Elements of a program: eight for each of its 128 threads, so that halves, too, are loaded 16 bytes at a time.
A warp's are one block of codes, which finds its scale without the others."""
OPTIONS = {"enable_fp_fusion": False}
"""Options of the compiler: a product is not fused with the sum behind it."""

# A kernel reads no globals but those that it may take for constants.
_FP32, _BF16 = tl.constexpr(int(ElementType.FP32)), tl.constexpr(int(ElementType.BF16))
_WHOLE, _HALVES = tl.constexpr(int(StateFormat.FP32)), tl.constexpr(int(StateFormat.BF16))
_COMPACT = tl.constexpr(int(StateFormat.COMPACT))
_STATE_BLOCK = tl.constexpr(STATE_BLOCK)
_MAGNITUDE, _INFINITY, _QUIET_NAN = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)
_QUIET_HALF_NAN = tl.constexpr(0x7E00)
_SMALLEST_SCALE = tl.constexpr(0x20000001)  # the bits of 2^-63, and the lowest one
_UPPER_24 = tl.constexpr(-0x100)
_GRAD_SCALE = tl.constexpr(rules.GRAD_SCALE)


def update_on_device(rule: Rule, tensors: UpdateTensors, segment: Segment) -> None:
    """Launch one step of elements [segment.begin, segment.end) on the current stream of the tensors' device.

    Elements outside are not touched. Raises ConfigError for tensors and segments that do not fit.
    """
    check_update(rule, tensors, segment)
    beside = tensors.residual if tensors.master is None else tensors.master
    arrays = (tensors.grad, tensors.value, beside, *_padded(tensors.states))
    scales = _padded(tensors.scales)
    scalars, kernel = scalars_of(rule, segment), kernel_of(rule)
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.accelerator.device_index(tensors.value.device.index):
        for begin, end, numbering in _runs(tensors, segment):
            kernel[(triton.cdiv(end - begin, BLOCK),)](
                *(_part(array, begin) for array in arrays),
                *(_part(scale, begin // STATE_BLOCK) for scale in scales),
                scalars,
                end - begin,
                *numbering,
                RULE=int(rule),
                NUM_STATES=len(tensors.states),
                NUM_SIGNED=len(rules.FORMULAS[rule].signed),
                VALUE=int(kind_of(tensors.value.dtype)),
                HAS_BF16_GRAD=tensors.grad.dtype is torch.bfloat16,
                FORMAT=int(tensors.state_format),
                BLOCK=BLOCK,
                **OPTIONS,
            )


def try_on(device: torch.device) -> None:
    """Update a few elements there; raises what Triton does where it has no compiler or does not know the device."""
    value = torch.zeros(BLOCK, dtype=torch.float32, device=device)
    segment = Segment(0, BLOCK, lr=0.0, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, grad_scale=1.0, step=1)
    update_on_device(Rule.SGD, UpdateTensors(value, None, (), torch.zeros_like(value)), segment)


def _runs(tensors: UpdateTensors, segment: Segment) -> Iterator[tuple[int, int, tuple[int, int, int]]]:
    """Ranges of the segment, each of one launch; the number of its first element, and the key of its random words.

    Words are numbered modulo 2^32, and which turn it is is a part of their key. All come as int32, whatever their
    highest bit: of a type that depended on the number there would be one more kernel to compile.
    """
    for begin, end, turn in turns(tensors.origin, segment.begin, segment.end):
        before = between = 0  # where nothing is rounded at random
        if tensors.state_format is not StateFormat.FP32:
            before, between = random_key(tensors.seed, segment.step, turn)
        yield begin, end, (int32(tensors.origin + begin), int32(before), int32(between))


def int32(word: int) -> int:
    """The int32 with the same lower 32 bits."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def _padded(tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    return (*tensors, *(None,) * (MAX_STATES - len(tensors)))


def _part(tensor: Tensor | None, begin: int) -> Tensor | None:
    """The tensor from an element on."""
    if tensor is None:
        return None
    # Triton gets the bits of bf16 numbers: they are moved into place, without a conversion that has rules of its own.
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    # Most are whole, and a launch is short: five views would take longer than all checks.
    return tensor.view(-1)[begin:] if begin else tensor


# Words are functions: the interpreter replaces operations in `tl`, not those that were taken from there before.


@triton.jit
def _fma(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    return tl.fma(a, b, c)


@triton.jit
def _sqrt(x: tl.tensor) -> tl.tensor:
    return tl.math.sqrt_rn(x)


@triton.jit
def _divide(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.math.div_rn(a, b)


@triton.jit
def _select(condition: tl.tensor, then: tl.tensor, otherwise: tl.tensor) -> tl.tensor:
    return tl.where(condition, then, otherwise)


@triton.jit
def _sign(x: tl.tensor) -> tl.tensor:
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, x))


_words = SimpleNamespace(fma=_fma, sqrt=_sqrt, divide=_divide, select=_select, sign=_sign)
step: Any = None
"""The rule's step: each copy of `update_elements` has another in this name."""


@functools.cache
def kernel_of(rule: Rule) -> Any:
    """`update_elements` with the step of this rule."""
    # Triton looks up its language too, and the type of a step's arguments.
    step = rules.bound(rules.make_rule(_words, rule, tl.constexpr), {"tl": tl, "Word": tl.tensor})
    scope = {"step": triton.jit(step)}
    # The first element's number and the key change from step to step: no kernel is made for special values of them.
    return triton.jit(do_not_specialize=["number", "before", "between"])(rules.bound(update_elements, scope))


def update_elements(
    grad: tl.tensor,
    value: tl.tensor,
    beside: tl.tensor,
    state0: tl.tensor,
    state1: tl.tensor,
    state2: tl.tensor,
    scales0: tl.tensor,
    scales1: tl.tensor,
    scales2: tl.tensor,
    c: tl.tuple,
    numel: tl.tensor,
    number: tl.tensor,
    before: tl.tensor,
    between: tl.tensor,
    RULE: tl.constexpr,
    NUM_STATES: tl.constexpr,
    NUM_SIGNED: tl.constexpr,
    VALUE: tl.constexpr,
    HAS_BF16_GRAD: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One block; `c` are the scalars of `scalars_of`. VALUE is an ElementType, FORMAT a StateFormat. `beside` has the
    residuals or masters. Pointers to bf16 numbers point to their bits. `number` is the first element's; `before` and
    `between` are the key of random words. RULE keeps rules of one text apart in Triton's files."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numel
    # Where nothing is rounded at random, the compiler drops this.
    random = random_words(i.to(tl.int32) + number, before, between)
    g = tl.load(grad + i, mask=inside)
    if HAS_BF16_GRAD:
        g = (g.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    g = g.to(tl.float32) * c[_GRAD_SCALE]
    p = load_master(value, beside, i, inside, VALUE, FORMAT)
    # Where a rule has fewer states, the others stand for nothing and come back as they are.
    s0, s1, s2 = g, g, g
    if NUM_STATES > 0:
        s0 = load_state(state0, scales0, i, numel, NUM_SIGNED > 0, FORMAT, BLOCK)
    if NUM_STATES > 1:
        s1 = load_state(state1, scales1, i, numel, NUM_SIGNED > 1, FORMAT, BLOCK)
    if NUM_STATES > 2:
        s2 = load_state(state2, scales2, i, numel, NUM_SIGNED > 2, FORMAT, BLOCK)
    # The rule.
    p, s0, s1, s2 = step(c, g, p, s0, s1, s2)
    if NUM_STATES > 0:
        store_state(state0, scales0, i, s0, random, numel, NUM_SIGNED > 0, True, FORMAT, BLOCK)
    if NUM_STATES > 1:
        store_state(state1, scales1, i, s1, random, numel, NUM_SIGNED > 1, False, FORMAT, BLOCK)
    if NUM_STATES > 2:
        store_state(state2, scales2, i, s2, random, numel, NUM_SIGNED > 2, False, FORMAT, BLOCK)
    store_master(value, beside, i, p, random, inside, VALUE, FORMAT)


# How values and states rest, with the bits of csrc/optim/masters.inl, csrc/compact/blocks.inl and
# csrc/simd/random.inl. Numbers come and go as fp32. Elements outside of the update come as whatever they are; they are
# never stored, and change no scale. `fallback/codec.py` explains the formulas of random words and codes. The one
# conversion that rounds, to fp16, takes the nearest, ties to even, and its NaN is set.


@triton.jit
def random_words(number: tl.tensor, before: tl.tensor, between: tl.tensor) -> tl.tensor:
    """Random words of elements with these numbers, modulo 2^32, by the two halves of a key. All come as int32."""
    x = number.to(tl.uint32, bitcast=True) ^ before.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) + between.to(tl.uint32, bitcast=True)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


# The value and what completes it: a residual beside a bf16 half, the master beside an fp16 copy


@triton.jit
def load_master(
    value: tl.tensor,
    beside: tl.tensor,
    i: tl.tensor,
    inside: tl.tensor,
    VALUE: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tensor:
    if VALUE == _BF16:
        # A residual is signed and may carry into the half.
        half = tl.load(value + i, mask=inside).to(tl.int32) << 16
        residual = tl.load(beside + i, mask=inside).to(tl.int32)
        p = (half + ((residual << 8) if FORMAT == _COMPACT else residual)).to(tl.float32, bitcast=True)
    else:
        p = tl.load((value if VALUE == _FP32 else beside) + i, mask=inside)
    return p


@triton.jit
def store_master(
    value: tl.tensor,
    beside: tl.tensor,
    i: tl.tensor,
    p: tl.tensor,
    random: tl.tensor,
    inside: tl.tensor,
    VALUE: tl.constexpr,
    FORMAT: tl.constexpr,
) -> None:
    word = _canonical_bits(p)
    if VALUE == _FP32:
        tl.store(value + i, word.to(tl.float32, bitcast=True), mask=inside)
    elif VALUE != _BF16:
        half = tl.where(p != p, _QUIET_HALF_NAN, p.to(tl.float16).to(tl.int16, bitcast=True))
        tl.store(value + i, half.to(tl.int16).to(tl.float16, bitcast=True), mask=inside)
        tl.store(beside + i, word.to(tl.float32, bitcast=True), mask=inside)
    else:
        if FORMAT == _COMPACT:
            word = (word + (random >> 24).to(tl.int32)) & _UPPER_24
            tl.store(beside + i, (word >> 8).to(tl.int8), mask=inside)
        else:
            tl.store(beside + i, word.to(tl.int16), mask=inside)
        tl.store(value + i, ((word + 0x8000) >> 16).to(tl.int16), mask=inside)


# States


@triton.jit
def load_state(
    state: tl.tensor,
    scales: tl.tensor,
    i: tl.tensor,
    numel: tl.tensor,
    SIGNED: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """`scales` of compact states alone, else None. A program has whole blocks of codes, BLOCK elements in all."""
    x = tl.load(state + i, mask=i < numel)
    if FORMAT == _HALVES:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if FORMAT == _COMPACT:
        block = _blocks(BLOCK)
        scale = tl.load(scales + block, mask=block * _STATE_BLOCK < numel)
        root = x.to(tl.float32) * _for_each_element(scale, BLOCK)
        x = root * (tl.abs(root) if SIGNED else root)
    return x


@triton.jit
def store_state(
    state: tl.tensor,
    scales: tl.tensor,
    i: tl.tensor,
    x: tl.tensor,
    random: tl.tensor,
    numel: tl.tensor,
    SIGNED: tl.constexpr,
    IS_FIRST: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The first of a rule's states takes other bits of the random words than the later ones."""
    inside = i < numel
    if FORMAT == _WHOLE:
        tl.store(state + i, _canonical_bits(x).to(tl.float32, bitcast=True), mask=inside)
    elif FORMAT == _HALVES:
        bits = (random & 0xFFFF) if IS_FIRST else (random >> 16)
        # A sum of unsigned words: the bits of a negative number are among the larger ones.
        word = _canonical_bits(x).to(tl.uint32, bitcast=True) + bits
        tl.store(state + i, (word >> 16).to(tl.int16), mask=inside)
    else:
        edge = _random_edge(random, IS_FIRST)
        _store_codes(state, scales, i, x, edge, numel, SIGNED, BLOCK)


@triton.jit
def _store_codes(
    state: tl.tensor,
    scales: tl.tensor,
    i: tl.tensor,
    x: tl.tensor,
    edge: tl.tensor,
    numel: tl.tensor,
    SIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    inside = i < numel
    # Bits of magnitudes are ordered as the magnitudes are, and those of infinities and NaNs come last.
    root = tl.math.sqrt_rn(tl.abs(x) if SIGNED else x).to(tl.int32, bitcast=True) & _MAGNITUDE
    root = tl.where(inside, root, 0)
    top = tl.max(tl.reshape(root, (BLOCK // _STATE_BLOCK, _STATE_BLOCK)), axis=1)
    scale, inverse = _scale_and_inverse(top, SIGNED)
    block = _blocks(BLOCK)
    tl.store(scales + block, scale, mask=block * _STATE_BLOCK < numel)

    inverse = _for_each_element(inverse, BLOCK)
    # Where all codes are 0 the root may be anything, of which some have no integer below.
    y = tl.where(inverse > 0.0, root, 0).to(tl.float32, bitcast=True) * inverse
    below = y.to(tl.int32)
    c = below.to(tl.float32)
    at_least = tl.fma(c, tl.fma(tl.full((BLOCK,), 2.0, tl.float32), edge, c), edge)
    code = below + (y * y >= at_least).to(tl.int32)
    if SIGNED:
        code = tl.where(x.to(tl.int32, bitcast=True) < 0, -code, code)
        tl.store(state + i, code.to(tl.int8), mask=inside)
    else:
        code = tl.where((root > 0) & (inverse > 0.0), tl.maximum(code, 1), code)  # no root above 0 gets 0
        tl.store(state + i, code.to(tl.uint8), mask=inside)


@triton.jit
def _scale_and_inverse(top: tl.tensor, SIGNED: tl.constexpr) -> tl.tuple:
    """Scales of blocks and inverses, from the bits of the largest roots. An inverse is 0 where all codes of the block
    are."""
    largest: tl.constexpr = 127.0 if SIGNED else 255.0
    nothing: tl.constexpr = _SMALLEST_SCALE if SIGNED else 1
    has_codes = (top >= nothing) & (top < _INFINITY)
    share = tl.math.div_rn(top.to(tl.float32, bitcast=True), tl.full(top.shape, largest, tl.float32))
    word = tl.maximum(share.to(tl.int32, bitcast=True) | 1, _SMALLEST_SCALE)
    word = tl.where(has_codes, word, tl.where(top < nothing, 0, _QUIET_NAN))
    scale = word.to(tl.float32, bitcast=True)
    inverse = tl.math.div_rn(tl.full(top.shape, 1.0, tl.float32), scale)
    return scale, tl.where(has_codes, inverse, 0.0)


@triton.jit
def _random_edge(random: tl.tensor, IS_FIRST: tl.constexpr) -> tl.tensor:
    fraction = (random << 11) if IS_FIRST else (random >> 1)
    return ((fraction & 0x007FF800) | 0x3F800400).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _blocks(BLOCK: tl.constexpr) -> tl.tensor:
    """The numbers of a program's blocks of codes."""
    count: tl.constexpr = BLOCK // _STATE_BLOCK
    return tl.program_id(0).to(tl.int64) * count + tl.arange(0, count)


@triton.jit
def _for_each_element(x: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """(BLOCK,) from a number for each of a program's blocks of codes."""
    count: tl.constexpr = BLOCK // _STATE_BLOCK
    return tl.reshape(tl.broadcast_to(tl.expand_dims(x, 1), (count, _STATE_BLOCK)), (BLOCK,))


@triton.jit
def _canonical_bits(x: tl.tensor) -> tl.tensor:
    """See `canonical` in csrc/simd/elements.inl: a GPU makes NaNs of its own."""
    return tl.where(x != x, _QUIET_NAN, x.to(tl.int32, bitcast=True))
