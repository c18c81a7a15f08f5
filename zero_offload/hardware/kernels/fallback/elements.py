"""Elements in memory <-> fp32, written once over words: csrc/simd/elements.inl and vec_scalar.h in Python.

A *word* is an operation that `numba_words` defines for one element, and `torch_words` for a tensor. Sums, products and
shifts of 32-bit words wrap; `u32` stands where a wider result must be cut back before it is compared or shifted right.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

U32 = np.uint32
MAGNITUDE, INFINITY, QUIET_NAN = U32(0x7FFFFFFF), U32(0x7F800000), U32(0x7FC00000)
_HIGH, _LOW = U32(0xFFFF0000), U32(0xFFFF)
_1, _13, _16 = U32(1), U32(13), U32(16)
_BIAS = U32(112 << 23)  # between the exponents of fp32 and fp16
_TINY = np.float32(2.0**-24)
_HALF, _HALF_BITS = np.float32(0.5), U32(0x3F000000)


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
        """The half of a master that is no NaN, or the canonical one."""
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
