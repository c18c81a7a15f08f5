"""The words of numba against arithmetic without rounding."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zero_offload.hardware.kernels.fallback import numba_words

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
ULP = 2.0**-23


def rounded_once(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    """a * b + c in exact arithmetic, then to the nearest fp32, ties to even."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    with np.errstate(over="ignore"):
        near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    around = [each for each in around if np.isfinite(each)]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1))


@given(floats, floats, floats)
@example(2.0**-24 * (1 - ULP), 1 + ULP, 1 + ULP)  # double rounding through fp64 would end a unit higher
@example(2.0**-24 * (1 + ULP), 1 + ULP, 1.0)
@example(-(2.0**-24) * (1 - ULP), 1 + ULP, 1 + 3 * ULP)
@example(2.0**-75 * (1 + ULP), 2.0**-75 * (1 + ULP), 2.0**-149)  # below the smallest
@settings(max_examples=300, deadline=None)
def test_a_fused_multiply_add_is_rounded_once(a: float, b: float, c: float) -> None:
    x, y, z = np.float32(a), np.float32(b), np.float32(c)
    if abs(Fraction(a) * Fraction(b) + Fraction(c)) >= Fraction(2) ** 127:
        return  # near where infinity begins
    expected = rounded_once(x, y, z)
    out = np.empty(1, dtype=np.float32)
    fma_each(np.array([x]), np.array([y]), np.array([z]), out)
    assert out.view(np.uint32)[0] & 0x7FFFFFFF == expected.view(np.uint32) & 0x7FFFFFFF and out[0] == expected


@numba_words.function
def fma_each(a: np.ndarray, b: np.ndarray, c: np.ndarray, out: np.ndarray) -> None:
    for i in range(a.size):
        out[i] = numba_words.fma(a[i], b[i], c[i])
