"""The words of a tensor on any device that has fp64, by torch's operations: with the bits of `numba_words`.

[Note: torch's operations] A 32-bit word is an int64, which keeps products, sums and differences right modulo 2^32 for
`u32` to cut. fp32 and fp64 numbers see +, -, *, quotients of two tensors and conversions: those torch rounds correctly
on a GPU too, subnormal numbers included. Each is a kernel of its own, so nothing is fused. Of roots only those in fp64
are taken; see `sqrt`. Calls that look alike and are not used: `addcmul`, `lerp` and `rsqrt` round as they like; a GPU
divides by a number of the host with a product of its reciprocal. A `where` of such a number makes the host wait until
it is copied there. Both get a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

Function = Callable[..., Any]
_MASK = 0xFFFFFFFF
_ONE = np.float32(1)


def function(body: Function, *, name: str = "") -> Function:
    """Torch runs it as it is, and asks for no name."""
    return body


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once; a or b is a tensor."""
    product, addend = _fp64(a) * _fp64(b), _fp64(c)
    total = product + addend
    other = total - product
    rest = (product - (total - other)) + (addend - other)
    # Rounded to odd: cut off toward zero, then the last bit is set where anything was cut off. In few launches: a
    # product of the two is below zero where their signs differ, and is neither above nor below zero for NaN.
    apart = total * rest
    is_less = apart < 0
    cut = torch.add(total.view(torch.int64), is_less, alpha=-1)
    return (cut | (is_less | (apart > 0))).view(torch.float64).to(torch.float32)


def sqrt(x: Any) -> Any:
    """A root in fp64 that is one or two units off is rounded to the right fp32. The root of an fp32 is at least four
    units away from the middle of two neighbouring fp32. A root in fp32 may be wrong: on a CPU torch asks a library that
    is a unit off.
    """
    return torch.sqrt(x.to(torch.float64)).to(torch.float32)


def divide(a: Any, b: Any) -> Any:
    """a / b; one of them is a tensor."""
    like = a if isinstance(a, Tensor) else b
    return _tensor(a, like) / _tensor(b, like)


def bits(x: Any) -> Any:
    return x.view(torch.int32).to(torch.int64) & _MASK


def from_bits(word: Any) -> Any:
    if isinstance(word, Tensor):
        return word.to(torch.int32).view(torch.float32)
    return word.view(np.float32)


def u32(x: Any) -> Any:
    return x & _MASK


def f32(x: Any) -> Any:
    return x.to(torch.float32)


def whole(x: Any) -> Any:
    """From 0 up to 2^31, toward zero."""
    return x.to(torch.int64)


def select(condition: Any, then: Any, otherwise: Any) -> Any:
    return torch.where(condition, _tensor(then, condition), _tensor(otherwise, condition))


def sign(x: Any) -> Any:
    """-1, 1, or the zero or NaN it was."""
    return select(x > 0, _ONE, select(x < 0, -_ONE, x))


def _fp64(x: Any) -> Any:
    return x.to(torch.float64) if isinstance(x, Tensor) else float(x)


def _tensor(x: Any, like: Tensor) -> Tensor:
    """A number becomes one where `like` is, by a kernel that has it as an argument."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, float | np.floating):
        return torch.full((), float(x), dtype=torch.float32, device=like.device)
    return torch.full((), int(x), dtype=torch.int64, device=like.device)
