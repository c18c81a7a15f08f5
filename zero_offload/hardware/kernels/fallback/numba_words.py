"""The words of one element, for numba: machine operations of IEEE 754, each rounded once."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from zero_offload.hardware.kernels import rules

Function = Callable[..., Any]
_ZERO, _ONE = np.float32(0), np.float32(1)


def function(body: Function, *, name: str = "", cache: bool = False) -> Function:
    """Compile at the first call, to run without the interpreter's lock.

    Nothing is contracted or reordered, and a division by 0 is an infinity. A caller that makes several functions of one
    `def` gives each a `name`. numba's symbols have a name and a number, which begins anew in each process. So a symbol
    from a file would be taken for one of this process with the same name.

    With `cache` the result is kept in a file for the next process, where numba finds a folder that it may write to.
    Numba looks at one file only to see whether what it has kept is stale. So names of functions that are kept end in a
    digest of their sources, and a change of any file compiles them anew.
    """
    name = name or body.__name__
    body.__name__ = body.__qualname__ = f"{name}_{sources()}" if cache else name
    try:
        compiled: Function = njit(nogil=True, error_model="numpy", fastmath=False, cache=cache)(body)
    except RuntimeError:  # neither the package's folder nor the user's can be written to
        return function(body, name=name)
    return compiled


@functools.cache
def sources() -> str:
    """A digest of this folder's files, and of the rules."""
    files = [*sorted(Path(__file__).parent.glob("*.py")), Path(rules.__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def kept(body: Function) -> Function:
    """`function` with a `cache`, as a decorator."""
    return function(body, cache=True)


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


@function
def divide(a: Any, b: Any) -> Any:
    return a / b


@function
def u32(x: Any) -> Any:
    return np.uint32(x)


@function
def f32(x: Any) -> Any:
    return np.float32(x)


@function
def whole(x: Any) -> Any:
    """From 0 up to 2^31, toward zero."""
    return np.uint32(np.int32(x))


@function
def select(condition: Any, then: Any, otherwise: Any) -> Any:
    return then if condition else otherwise


@function
def sign(x: Any) -> Any:
    return select(x > _ZERO, _ONE, select(x < _ZERO, -_ONE, x))
