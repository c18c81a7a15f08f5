"""How states rest where they are not fp32, written once over words: csrc/compact/blocks.inl and csrc/simd/random.inl in
Python.

Random words by counter, what is rounded by them, states as 8-bit codes of their roots, masters of 24 bits. What is
stored is what [Note: codes] in csrc/compact/compact.h and [Note: bits of a word] in random.inl say. For words see
`elements`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from zero_offload.hardware.kernels.fallback.elements import INFINITY, MAGNITUDE, QUIET_NAN, U32

_MASK64 = (1 << 64) - 1
_UPPER_24 = U32(0xFFFFFF00)
_SIGN = U32(0x80000000)
_0, _1, _8, _11, _15, _16, _24, _31 = (U32(n) for n in (0, 1, 8, 11, 15, 16, 24, 31))
_ZERO, _ONE, _TWO, _SIGN_OF_A_BYTE = (np.float32(x) for x in (0.0, 1.0, 2.0, 128.0))
_SMALLEST_SCALE = U32(0x20000001).view(np.float32)  # 2^-63, and the lowest bit
MIDDLE = np.float32(0.5)
"""For `code_of`: the nearer of two codes."""


def turns(origin: int, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Elements [begin, end) of arrays that are a section's from `origin` on, cut where another key begins: where each
    part begins and ends, and its turn."""
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
        """The bf16 below x or above it, by 16 bits of a random word; x is no NaN but the canonical one."""
        return u32(u32(bits(x) + (u32(word >> shift) & U32(0xFFFF))) >> _16)

    @function
    def random_edge(word: Any, shift: Any) -> Any:
        """Where in [0, 1) the edge between two codes lies, by 12 bits of a random word: (n + 1/2) / 4096."""
        twelve = u32(u32(u32(word >> shift) << _11) & U32(0x007FF800))
        return from_bits(u32(twelve | U32(0x3F800400))) - _ONE

    @function
    def random_24(x: Any, word: Any) -> Any:
        """x in its upper 24 bits, by the upper 8 of a random word; x is no NaN but the canonical one."""
        return from_bits(u32(u32(bits(x) + u32(word >> _24)) & _UPPER_24))

    @function
    def nearest_24(x: Any) -> Any:
        """Half-way cases away from zero; x is no NaN but the canonical one."""
        return from_bits(u32(u32(bits(x) + U32(0x80)) & _UPPER_24))

    @function
    def join_short(half: Any, residual: Any) -> Any:
        """The bits of the master of 24 bits that a half and a residual of 8 stand for."""
        return u32((half << _16) + (((residual ^ U32(0x80)) - U32(0x80)) << _8))

    @function
    def short_residual(word: Any) -> Any:
        """Of a master of 24 bits, in the lower 8 bits."""
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
        """With the sign of x; below 0 there is none where the state has no sign."""
        if signed:
            word = bits(x)
            return from_bits(u32(bits(sqrt(from_bits(u32(word & MAGNITUDE)))) | u32(word & _SIGN)))
        return from_bits(u32(bits(sqrt(x)) & MAGNITUDE))

    def scale_of(top: Any) -> Any:
        """From the bits of a block's root of the largest magnitude."""
        root = from_bits(top)
        scale = from_bits(u32(bits(divide(root, largest)) | _1))
        scale = select(scale > _SMALLEST_SCALE, scale, _SMALLEST_SCALE)
        is_nothing = root < _SMALLEST_SCALE if signed else top == _0
        return select(top >= INFINITY, from_bits(QUIET_NAN), select(is_nothing, _ZERO, scale))

    def inverse_of(scale: Any) -> Any:
        """What a root is multiplied with to be in units of its scale; 0 where all codes of the block are 0."""
        return select(scale > _ZERO, divide(_ONE, scale), _ZERO)

    def code_of(root: Any, inverse: Any, at_least: Any) -> Any:
        """The integer c below the root or the one above it: that, where the square has come the share `at_least` of
        the way from c^2 to (c + 1)^2. Without a sign, no root above 0 gets 0."""
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
