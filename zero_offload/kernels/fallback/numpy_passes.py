"""The passes over memory in plain numpy, a block at a time: for where neither the library nor numba is to be had.

The bits are those of the other passes; the arrays between the operations cost the time.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_offload.abi import GradMode, Kind, Rule
from zero_offload.kernels.fallback import numpy_words as words
from zero_offload.kernels.fallback.calls import READ
from zero_offload.kernels.fallback.elements import MAGNITUDE, make_elements
from zero_offload.kernels.fallback.parts import CHUNK
from zero_offload.kernels.fallback.rules import GRAD_SCALE, NUM_STATES, make_rule

BLOCK = 4096
"""Elements that the arrays between two operations have."""
_16 = np.uint32(16)
_e = make_elements(words)

Floats = npt.NDArray[np.float32]


def update_part(
    rule: Rule,
    kinds: tuple[int, int],
    arrays: tuple[int, ...],
    line: tuple[Any, Any, Any],
    begin: int,
    end: int,
) -> None:
    first, shift, scalars = line
    s, at = 0, begin
    with np.errstate(all="ignore"):
        while at < end:
            while first[s + 1] <= at:
                s += 1
            until = min(end, int(first[s + 1]), at + BLOCK)
            _update_block(rule, kinds, arrays, scalars[s], at + int(shift[s]), until - at)
            at = until


def _update_block(
    rule: Rule, kinds: tuple[int, int], arrays: tuple[int, ...], scalars: Floats, begin: int, count: int
) -> None:
    value_kind, grad_kind = kinds
    *_, grad, value_out = arrays
    states = [_floats(address, begin, count) for address in arrays[3 : 3 + NUM_STATES[rule]]]
    g = _load(grad_kind, grad, begin, count) * scalars[GRAD_SCALE]
    p = _load_master(value_kind, arrays, begin, count)
    p, *new = _rule(rule)(scalars, g, p, *(*states, None, None, None)[:3])
    for state, values in zip(states, new, strict=False):
        state[:] = _e.canonical(values)
    p = _e.canonical(p)
    _store_master(value_kind, arrays, begin, count, p)
    if value_out:
        _store_value(value_kind, value_out, begin, count, p)


def _load_master(kind: int, arrays: tuple[int, ...], begin: int, count: int) -> Floats:
    value, residual, master = arrays[:3]
    if kind != Kind.BF16:
        return _floats(value if kind == Kind.FP32 else master, begin, count)
    halves, rests = _halves(value, begin, count), _halves(residual, begin, count)
    found: Floats = words.from_bits(_e.join_master(halves.astype(np.uint32), rests.astype(np.uint32)))
    return found


def _store_master(kind: int, arrays: tuple[int, ...], begin: int, count: int, p: Floats) -> None:
    value, residual, master = arrays[:3]
    _store_value(kind, value, begin, count, p)
    if kind == Kind.BF16:
        _halves(residual, begin, count)[:] = words.bits(p)  # the low half of each word
    elif kind == Kind.FP16:
        _floats(master, begin, count)[:] = p


def _store_value(kind: int, address: int, begin: int, count: int, p: Floats) -> None:
    if kind == Kind.FP32:
        _floats(address, begin, count)[:] = p
    else:
        _halves(address, begin, count)[:] = _e.half_of(words.bits(p)) if kind == Kind.BF16 else _e.narrow_fp16(p)


_rule = functools.cache(functools.partial(make_rule, words))


def sum_part(
    kinds: tuple[int, int],
    mode: int,
    scale: np.float32,
    arrays: tuple[int, int],
    numel: int,
    found: tuple[Any, Any],
    first: int,
    last: int,
) -> None:
    sums, tops = found
    with np.errstate(all="ignore"):
        for chunk in range(first, last):
            begin = chunk * CHUNK
            count = min(CHUNK, numel - begin)
            x = _stored(kinds, mode, scale, arrays, begin, count)
            squares = np.zeros((-(-count // 16), 16))
            squares.reshape(-1)[:count] = x
            squares *= squares
            lanes = np.cumsum(squares, axis=0)[-1]  # one after the other, which `sum` does not promise
            while len(lanes) > 1:
                lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
            sums[chunk], tops[chunk] = lanes[0], (words.bits(x) & MAGNITUDE).max()


def _stored(
    kinds: tuple[int, int], mode: int, scale: np.float32, arrays: tuple[int, int], begin: int, count: int
) -> Floats:
    """What was stored; see the operations in csrc/reduce/kernel.inl."""
    (dst_kind, src_kind), (dst, src) = kinds, arrays
    x = _load(src_kind, src, begin, count)
    if mode == READ:
        return x
    scaled = scale != 1
    if scaled:
        x = x * scale
    if mode == GradMode.ACCUMULATE:
        x = _floats(dst, begin, count) + x
    if dst_kind == Kind.FP32:
        x = _e.canonical(x) if scaled or mode == GradMode.ACCUMULATE else x
        words.bits(_floats(dst, begin, count))[:] = words.bits(x)
    elif dst_kind == Kind.BF16:
        word = _e.round_bf16(x) if scaled else words.bits(x)
        _halves(dst, begin, count)[:] = word >> _16
        x = words.from_bits(word)
    else:
        half = _e.narrow_fp16(_e.canonical(x))
        _halves(dst, begin, count)[:] = half
        x = words.from_bits(_e.widen_fp16(half))
    return x


def convert_part(kinds: tuple[int, int], arrays: tuple[int, int], begin: int, end: int) -> None:
    (dst_kind, src_kind), (dst, src) = kinds, arrays
    with np.errstate(all="ignore"):
        for at, count in _blocks(begin, end):
            if dst_kind == Kind.FP32:
                _words(dst, at, count)[:] = words.bits(_load(src_kind, src, at, count))
            elif dst_kind == src_kind:
                _halves(dst, at, count)[:] = _halves(src, at, count)
            elif dst_kind == Kind.BF16:
                _halves(dst, at, count)[:] = _e.round_bf16(_floats(src, at, count)) >> _16
            else:
                _halves(dst, at, count)[:] = _e.narrow_fp16(_e.canonical(_floats(src, at, count)))


def split_part(master: int, half: int, residual: int, begin: int, end: int) -> None:
    for at, count in _blocks(begin, end):
        x = _floats(master, at, count)
        _halves(half, at, count)[:] = _e.split_half(x)
        _halves(residual, at, count)[:] = _e.split_residual(x)


def join_part(half: int, residual: int, master: int, begin: int, end: int) -> None:
    for at, count in _blocks(begin, end):
        high, low = _halves(half, at, count).astype(np.uint32), _halves(residual, at, count).astype(np.uint32)
        _words(master, at, count)[:] = _e.join_master(high, low)


def _blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for at in range(begin, end, BLOCK):
        yield at, min(BLOCK, end - at)


# Memory as arrays


def _load(kind: int, address: int, begin: int, count: int) -> Floats:
    """As fp32; that of fp32 is the memory itself."""
    if kind == Kind.FP32:
        return _floats(address, begin, count)
    halves = _halves(address, begin, count).astype(np.uint32)
    widen = _e.widen_bf16 if kind == Kind.BF16 else _e.widen_fp16
    found: Floats = words.from_bits(widen(halves))
    return found


def _floats(address: int, begin: int, count: int) -> Floats:
    return _words(address, begin, count).view(np.float32)


def _words(address: int, begin: int, count: int) -> npt.NDArray[np.uint32]:
    return np.frombuffer(memoryview((ctypes.c_uint32 * count).from_address(address + 4 * begin)), np.uint32)


def _halves(address: int, begin: int, count: int) -> npt.NDArray[np.uint16]:
    return np.frombuffer(memoryview((ctypes.c_uint16 * count).from_address(address + 2 * begin)), np.uint16)
