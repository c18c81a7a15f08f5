"""The words of an array, in numpy: the operations of `numba_words`, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Function = Callable[..., Any]
Floats = npt.NDArray[np.float32]


def function(body: Function, *, name: str = "") -> Function:
    """Numpy runs it as it is, and asks for no name."""
    return body


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once.

    The product is exact in double. The sum is rounded to odd (Boldo and Melquiond 2008): where it is not exact, the
    neighbour with an odd last bit is taken, which makes the second rounding, to fp32, the right one.
    """
    product, addend = np.multiply(a, b, dtype=np.float64), np.asarray(c, dtype=np.float64)
    total = product + addend
    other = total - product
    rest = (product - (total - other)) + (addend - other)  # exact (Knuth 1969); NaN where the sum is not finite
    word = total.view(np.int64)
    is_even_and_inexact = (np.abs(rest) > 0) & (word & 1 == 0)
    toward_rest = np.where((rest > 0) == (total > 0), np.int64(1), np.int64(-1))
    word += np.where(is_even_and_inexact, toward_rest, np.int64(0))
    return total.astype(np.float32)


def sqrt(x: Any) -> Any:
    return np.sqrt(x)


def divide(a: Any, b: Any) -> Any:
    return a / b


def bits(x: Any) -> Any:
    return x.view(np.uint32)


def from_bits(word: Any) -> Any:
    return word.view(np.float32)


def u32(x: Any) -> Any:
    """Numpy keeps 32 bits by itself."""
    return x


def f32(x: Any) -> Any:
    return x.astype(np.float32)


def whole(x: Any) -> Any:
    """From 0 up to 2^31, toward zero."""
    return x.astype(np.int32).view(np.uint32)


def select(condition: Any, then: Any, otherwise: Any) -> Any:
    return np.where(condition, then, otherwise)


def greater(a: Any, b: Any) -> Any:
    return np.where(a > b, a, b)


def sign(x: Any) -> Any:
    """-1, 1, or the zero or NaN it was."""
    return np.where(x > 0, np.float32(1), np.where(x < 0, np.float32(-1), x))
