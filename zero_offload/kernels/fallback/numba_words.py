"""The words of one element, for numba: machine operations of IEEE 754, each rounded once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

Function = Callable[..., Any]


def sources() -> str:
    """A digest of this folder.

    Numba looks at one file to see whether what it has kept is stale, and at what a function has in its closure: so
    functions that are kept name this, and are compiled anew when any file has changed.
    """
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


SOURCES = sources()


def function(body: Function, *, name: str = "", cache: bool = False) -> Function:
    """Compile at the first call, to run without the interpreter's lock.

    Nothing is contracted or reordered, and a division by 0 is an infinity. With `cache` the result is kept in a file
    for the next process, where numba finds a folder that it may write to. Who makes several functions of one `def`
    gives each a `name`: numba's symbols have names and a number, which begins anew in each process, and a symbol from
    a file is taken for one of this process that is called the same.
    """
    if name:
        body.__name__ = body.__qualname__ = name
    try:
        compiled: Function = njit(nogil=True, error_model="numpy", fastmath=False, cache=cache)(body)
    except RuntimeError:  # neither the package's folder nor the user's can be written to
        return function(body)
    return compiled


def _fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


def _sqrt(context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.sqrt", [ir.FloatType()]), arguments)

    return types.float32(types.float32), generate


def _bits(context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def _from_bits(context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _pointer_to(element: Any) -> Function:
    pointer_type: Any = types.CPointer(element)  # type: ignore[no-untyped-call]

    def pointer(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return pointer_type(types.uint64), generate

    return pointer


fma: Function = intrinsic(_fma)
"""fma(a, b, c): a * b + c, rounded once."""
sqrt: Function = intrinsic(_sqrt)
bits: Function = intrinsic(_bits)
from_bits: Function = intrinsic(_from_bits)
"""The same 32 bits as the other type."""
halves_at: Function = intrinsic(_pointer_to(types.uint16))
words_at: Function = intrinsic(_pointer_to(types.uint32))
bytes_at: Function = intrinsic(_pointer_to(types.uint8))
"""Memory at an address, as elements of 16, 32 or 8 bits."""


def _divide(a: Any, b: Any) -> Any:
    return a / b


def _u32(x: Any) -> Any:
    return np.uint32(x)


def _f32(x: Any) -> Any:
    return np.float32(x)


def _whole(x: Any) -> Any:
    """From 0 up to 2^31, toward zero."""
    return np.uint32(np.int32(x))


def _select(condition: Any, then: Any, otherwise: Any) -> Any:
    return then if condition else otherwise


def _greater(a: Any, b: Any) -> Any:
    return a if a > b else b


def _sign(x: Any) -> Any:
    """-1, 1, or the zero or NaN it was."""
    return np.float32(1.0) if x > np.float32(0.0) else np.float32(-1.0) if x < np.float32(0.0) else x


u32, f32, whole, select = function(_u32), function(_f32), function(_whole), function(_select)
divide, greater, sign = function(_divide), function(_greater), function(_sign)
