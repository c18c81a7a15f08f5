"""How values and states rest in the memory of a GPU, for Triton: csrc/optim/masters.inl, csrc/compact/blocks.inl and
csrc/simd/random.inl, with their bits.

Functions of `triton_update`'s kernel, which has no others: load, compute, store. Numbers come and go as fp32, and
elements outside of the update as whatever they are; they are never stored, and change no scale. Random words, what is
rounded by them, and codes are those of `fallback/codec.py`, where their formulas are explained. Pointers to
bf16 numbers point to their bits; the one conversion that rounds, to fp16, takes the nearest, ties to even, and its NaN
is set.
"""

from __future__ import annotations

import triton
import triton.language as tl

from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import STATE_BLOCK, Kind

# A kernel reads no globals but those that it may take for constants.
_FP32, _BF16 = tl.constexpr(int(Kind.FP32)), tl.constexpr(int(Kind.BF16))
_WHOLE, _HALVES = tl.constexpr(int(StateFormat.FP32)), tl.constexpr(int(StateFormat.BF16))
_COMPACT = tl.constexpr(int(StateFormat.COMPACT))
_STATE_BLOCK = tl.constexpr(STATE_BLOCK)
_MAGNITUDE, _INFINITY, _QUIET_NAN = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000)
_QUIET_HALF_NAN = tl.constexpr(0x7E00)
_SMALLEST_SCALE = tl.constexpr(0x20000001)  # the bits of 2^-63, and the lowest one
_UPPER_24 = tl.constexpr(-0x100)


@triton.jit
def random_words(number: tl.tensor, before: tl.tensor, between: tl.tensor) -> tl.tensor:
    """Of elements with these numbers, modulo 2^32, by the two halves of a key. All come as int32."""
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
    """Of blocks, from the bits of their largest roots. The inverse is 0 where all codes of the block are."""
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
