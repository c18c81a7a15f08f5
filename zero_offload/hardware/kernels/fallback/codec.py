"""How values and states rest in memory, written once over words: csrc/simd/elements.inl, vec_scalar.h and random.inl,
and csrc/compact/blocks.inl in Python.

A *word* is an operation that `numba_words` defines for one element, and `torch_words` for a tensor. Sums, products and
shifts of 32-bit words wrap; `u32` stands where a wider result must be cut back before it is compared or shifted right.

Elements <-> fp32; random words by counter, and what is rounded by them; states as 8-bit codes of their roots; masters
of 24 bits. The stored bits are those of [Note: codes] in csrc/compact/compact.h and [Note: bits of a word] in
random.inl.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

U32 = np.uint32
MAGNITUDE, INFINITY, QUIET_NAN = U32(0x7FFFFFFF), U32(0x7F800000), U32(0x7FC00000)
_HIGH, _LOW, _UPPER_24, _SIGN = U32(0xFFFF0000), U32(0xFFFF), U32(0xFFFFFF00), U32(0x80000000)
_0, _1, _8, _11, _13, _15, _16, _24, _31 = (U32(n) for n in (0, 1, 8, 11, 13, 15, 16, 24, 31))
_BIAS = U32(112 << 23)  # between the exponents of fp32 and fp16
_TINY = np.float32(2.0**-24)
_HALF, _HALF_BITS = np.float32(0.5), U32(0x3F000000)
_ZERO, _ONE, _TWO, _SIGN_OF_A_BYTE = (np.float32(x) for x in (0.0, 1.0, 2.0, 128.0))
_SMALLEST_SCALE = U32(0x20000001).view(np.float32)  # 2^-63, and the lowest bit
_MASK64 = (1 << 64) - 1
MIDDLE = np.float32(0.5)
"""For `code_of`: the nearer of two codes."""


def make_elements(words: Any) -> SimpleNamespace:
    """The functions below over `words`. Halves come and go in the lower 16 bits of a 32-bit word."""
    function: Callable[[Callable[..., Any]], Callable[..., Any]] = words.function
    u32, bits, from_bits, select, f32 = words.u32, words.bits, words.from_bits, words.select, words.f32

    @function
    def canonical(x: Any) -> Any:
        """Every NaN becomes the same one, since processors make different ones."""
        return select(x != x, from_bits(QUIET_NAN), x)

    @function
    def widen_bf16(half: Any) -> Any:
        return u32(half << _16)

    @function
    def round_bf16(x: Any) -> Any:
        """The nearest bf16, ties to even, in the upper half of the word, and zeros below."""
        word = bits(canonical(x))
        return u32(u32(word + U32(0x7FFF) + (u32(word >> _16) & _1)) & _HIGH)

    @function
    def widen_fp16(half: Any) -> Any:
        """The bits of the fp32; a NaN becomes quiet and keeps its payload."""
        magnitude, sign = u32(half & U32(0x7FFF)), u32((half & U32(0x8000)) << _16)
        small = bits(f32(magnitude) * _TINY)  # below 2^-14 all are multiples of 2^-24
        normal = u32((magnitude << _13) + _BIAS)
        quiet = select(magnitude > U32(0x7C00), U32(0x00400000), U32(0))
        special = u32(INFINITY | (magnitude << _13) | quiet)
        return u32(select(magnitude < U32(0x0400), small, select(magnitude < U32(0x7C00), normal, special)) | sign)

    @function
    def narrow_fp16(x: Any) -> Any:
        """The nearest fp16, ties to even; the only NaN it takes is the canonical one."""
        word = bits(x)
        sign, magnitude = u32(u32(word >> _16) & U32(0x8000)), u32(word & MAGNITUDE)
        large = select(magnitude > INFINITY, U32(0x7E00), U32(0x7C00))
        small = u32(bits(from_bits(magnitude) + _HALF) - _HALF_BITS)  # an fp32 sum rounds to multiples of 2^-24
        odd = u32(magnitude >> _13) & _1
        normal = u32(u32(magnitude - _BIAS + U32(0x0FFF) + odd) >> _13)
        half = select(magnitude >= U32(0x47800000), large, select(magnitude < U32(0x38800000), small, normal))
        return u32(half | sign)

    @function
    def join_master(half: Any, residual: Any) -> Any:
        """The bits of the master that a half and a residual stand for: see zo_master_split in zero_offload.h."""
        # The residual is signed: its own sign bit, moved up, carries into the half.
        return u32((half << _16) + ((residual ^ U32(0x8000)) - U32(0x8000)))

    @function
    def half_of(word: Any) -> Any:
        """The half of a master. If the master is NaN, it is the canonical one."""
        return u32(u32(word + U32(0x8000)) >> _16)

    @function
    def split_half(x: Any) -> Any:
        """The half of any master; a rounded NaN of all ones would carry over into -0.0."""
        word = bits(x)
        return select(x != x, u32(u32(word >> _16) | U32(0x40)), half_of(word))

    @function
    def split_residual(x: Any) -> Any:
        return select(x != x, U32(0), u32(bits(x) & _LOW))

    made = [canonical, widen_bf16, round_bf16, widen_fp16, narrow_fp16]
    made += [join_master, half_of, split_half, split_residual]
    return SimpleNamespace(**{each.__name__: each for each in made})


def turns(origin: int, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Cut elements [begin, end) of arrays, which are a section's from `origin` on, where another key begins. Returned
    are where each part begins and ends, and its turn.
    """
    while begin < end:
        turn = (origin + begin) >> 32
        stop = min(end, ((turn + 1) << 32) - origin)
        yield begin, stop, turn
        begin = stop


def random_key(seed: int, step: int, turn: int) -> tuple[int, int]:
    """Two words of 32 bits, of the elements of a section from turn * 2^32 on."""
    key = _mixed(_mixed(_mixed(seed & _MASK64) ^ step) ^ turn)
    return key & 0xFFFFFFFF, key >> 32


def _mixed(x: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK64
    return x ^ (x >> 31)


def make_codec(words: Any) -> SimpleNamespace:
    """Random words and what is rounded by them, over `words`.

    `shift` is where the bits of a state begin in its element's random word; see `first_bit`.
    """
    function: Callable[[Callable[..., Any]], Callable[..., Any]] = words.function
    u32, bits, from_bits = words.u32, words.bits, words.from_bits

    @function
    def random_word(index: Any, before: Any, between: Any) -> Any:
        """The mixing steps of "lowbias32" (C. Wellons 2018), with the two halves of a key."""
        x = u32(index ^ before)
        x = u32(u32(x ^ u32(x >> _16)) * U32(0x7FEB352D))
        x = u32(u32(x ^ u32(x >> _15)) + between)
        x = u32(x * U32(0x846CA68B))
        return u32(x ^ u32(x >> _16))

    @function
    def random_bf16(x: Any, word: Any, shift: Any) -> Any:
        """The bf16 below x or above it, by 16 bits of a random word. If x is NaN, it is the canonical one."""
        return u32(u32(bits(x) + (u32(word >> shift) & U32(0xFFFF))) >> _16)

    @function
    def random_edge(word: Any, shift: Any) -> Any:
        """Where in [0, 1) the edge between two codes lies, by 12 bits of a random word: (n + 1/2) / 4096."""
        twelve = u32(u32(u32(word >> shift) << _11) & U32(0x007FF800))
        return from_bits(u32(twelve | U32(0x3F800400))) - _ONE

    @function
    def random_24(x: Any, word: Any) -> Any:
        """x in its upper 24 bits, by the upper 8 of a random word. If x is NaN, it is the canonical one."""
        return from_bits(u32(u32(bits(x) + u32(word >> _24)) & _UPPER_24))

    @function
    def nearest_24(x: Any) -> Any:
        """Half-way cases away from zero. If x is NaN, it is the canonical one."""
        return from_bits(u32(u32(bits(x) + U32(0x80)) & _UPPER_24))

    @function
    def join_short(half: Any, residual: Any) -> Any:
        """The bits of the master of 24 bits that a half and a residual of 8 stand for."""
        return u32((half << _16) + (((residual ^ U32(0x80)) - U32(0x80)) << _8))

    @function
    def short_residual(word: Any) -> Any:
        """The residual of a master of 24 bits, in the lower 8 bits."""
        return u32(u32(word >> _8) & U32(0xFF))

    made = [random_word, random_bf16, random_edge, random_24, nearest_24, join_short, short_residual]
    return SimpleNamespace(**{each.__name__: each for each in made})


def first_bit(state: int, width: int) -> Any:
    """The first state takes the lowest `width` bits of a random word, the others the next ones."""
    return U32(0 if state == 0 else width)


def make_codes(words: Any, *, signed: bool) -> SimpleNamespace:
    """Values of a state <-> codes, over `words`. Codes come and go in the lower 8 bits of a 32-bit word."""
    u32, bits, from_bits, select, f32 = words.u32, words.bits, words.from_bits, words.select, words.f32
    fma, sqrt, divide, whole = words.fma, words.sqrt, words.divide, words.whole
    largest = np.float32(127 if signed else 255)

    def value_of(code: Any, scale: Any) -> Any:
        if signed:
            root = (f32(u32(code ^ U32(0x80))) - _SIGN_OF_A_BYTE) * scale
            return root * from_bits(u32(bits(root) & MAGNITUDE))
        root = f32(code) * scale
        return root * root

    def root_of(x: Any) -> Any:
        """The root with the sign of x. A state without a sign has no x below 0."""
        if signed:
            word = bits(x)
            return from_bits(u32(bits(sqrt(from_bits(u32(word & MAGNITUDE)))) | u32(word & _SIGN)))
        return from_bits(u32(bits(sqrt(x)) & MAGNITUDE))

    def scale_of(top: Any) -> Any:
        """The scale, from the bits of a block's root of the largest magnitude."""
        root = from_bits(top)
        scale = from_bits(u32(bits(divide(root, largest)) | _1))
        scale = select(scale > _SMALLEST_SCALE, scale, _SMALLEST_SCALE)
        is_nothing = root < _SMALLEST_SCALE if signed else top == _0
        return select(top >= INFINITY, from_bits(QUIET_NAN), select(is_nothing, _ZERO, scale))

    def inverse_of(scale: Any) -> Any:
        """The factor that brings a root to units of its scale; 0 where all codes of the block are 0."""
        return select(scale > _ZERO, divide(_ONE, scale), _ZERO)

    def code_of(root: Any, inverse: Any, at_least: Any) -> Any:
        """The integer c below the root, or c + 1. It is c + 1 where the square has come the share `at_least` of the way
        from c^2 to (c + 1)^2. Without a sign, no root above 0 gets 0.
        """
        word = select(inverse > _ZERO, bits(root), _0)
        y = from_bits(u32(word & MAGNITUDE)) * inverse
        below = whole(y)
        c = f32(below)
        edge = fma(c, fma(_TWO, at_least, c), at_least)
        code = u32(below + select(y * y >= edge, _1, _0))
        if signed:
            return select(u32(word >> _31) == _1, u32(_0 - code), code)
        return select(word == _0, _0, select(code > _1, code, _1))

    kind = "signed" if signed else "unsigned"
    made = [value_of, root_of, scale_of, inverse_of, code_of]
    return SimpleNamespace(**{each.__name__: words.function(each, name=f"{each.__name__}_{kind}") for each in made})
