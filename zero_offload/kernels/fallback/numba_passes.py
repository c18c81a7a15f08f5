"""The passes over memory, compiled by numba at their first call.

Everything goes through a small block in the first-level cache: loaded as fp32, computed, stored. So a rule's arithmetic
is compiled once, whatever the dtypes, and loading and storing have functions of their own. Importing this module takes
0.5 s, the first update 3 s of compiling, one with another rule 1 s, the first sum 1 s; in the next process, which finds
that in numba's cache of files, the first update takes 0.3 s.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from zero_offload.abi import GradMode, Kind, Rule
from zero_offload.kernels.fallback import numba_words as words
from zero_offload.kernels.fallback.calls import READ
from zero_offload.kernels.fallback.elements import MAGNITUDE, make_elements
from zero_offload.kernels.fallback.numba_words import bits, from_bits, function, halves_at, u32, words_at
from zero_offload.kernels.fallback.parts import CHUNK
from zero_offload.kernels.fallback.rules import GRAD_SCALE, NUM_STATES, make_rule

BLOCK = 1024
"""Elements of a block: five arrays of it are 20 KiB. A multiple of the sums' 16 lanes."""
FP32, BF16 = int(Kind.FP32), int(Kind.BF16)
_ACCUMULATE = int(GradMode.ACCUMULATE)

_made = make_elements(words)
canonical, half_of, join_master = _made.canonical, _made.half_of, _made.join_master
widen_bf16, round_bf16 = _made.widen_bf16, _made.round_bf16
widen_fp16, narrow_fp16 = _made.widen_fp16, _made.narrow_fp16
split_half, split_residual = _made.split_half, _made.split_residual


def _sources() -> str:
    """A digest of this folder.

    Numba looks at one file to see whether what it has kept is stale, and at what a function has in its closure: so the
    functions below that are kept name this, and are compiled anew when any file has changed.
    """
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_SOURCES = _sources()


# Loads and stores of `count` elements from `begin` on, to and from the start of a row


def _load_fp32(address: Any, begin: Any, count: Any, row: Any) -> None:
    source = words_at(address)
    for i in range(count):
        row[i] = from_bits(source[begin + i])


def _load_bf16(address: Any, begin: Any, count: Any, row: Any) -> None:
    source = halves_at(address)
    for i in range(count):
        row[i] = from_bits(widen_bf16(source[begin + i]))


def _load_fp16(address: Any, begin: Any, count: Any, row: Any) -> None:
    source = halves_at(address)
    for i in range(count):
        row[i] = from_bits(widen_fp16(u32(source[begin + i])))


def _load(kind: Any, address: Any, begin: Any, count: Any, row: Any) -> None:
    if kind == FP32:
        load_fp32(address, begin, count, row)
    elif kind == BF16:
        load_bf16(address, begin, count, row)
    else:
        load_fp16(address, begin, count, row)


def _load_split(half: Any, residual: Any, begin: Any, count: Any, row: Any) -> None:
    halves, rests = halves_at(half), halves_at(residual)
    for i in range(count):
        row[i] = from_bits(join_master(u32(halves[begin + i]), u32(rests[begin + i])))


def _store_fp32(address: Any, begin: Any, count: Any, row: Any) -> None:
    target = words_at(address)
    for i in range(count):
        target[begin + i] = bits(row[i])


def _store_bf16(address: Any, begin: Any, count: Any, row: Any) -> None:
    target = halves_at(address)
    for i in range(count):
        target[begin + i] = np.uint16(round_bf16(row[i]) >> np.uint32(16))


def _store_fp16(address: Any, begin: Any, count: Any, row: Any) -> None:
    target = halves_at(address)
    for i in range(count):
        target[begin + i] = np.uint16(narrow_fp16(canonical(row[i])))


def _store_half(address: Any, begin: Any, count: Any, row: Any) -> None:
    """The half of a master without a NaN but the canonical one."""
    target = halves_at(address)
    for i in range(count):
        target[begin + i] = np.uint16(half_of(bits(row[i])))


def _store_low(address: Any, begin: Any, count: Any, row: Any) -> None:
    target = halves_at(address)
    for i in range(count):
        target[begin + i] = np.uint16(bits(row[i]))


load_fp32, load_bf16, load_fp16 = function(_load_fp32), function(_load_bf16), function(_load_fp16)
store_fp32, store_bf16, store_fp16 = function(_store_fp32), function(_store_bf16), function(_store_fp16)
load_split, store_half, store_low = function(_load_split), function(_store_half), function(_store_low)
load = function(_load)
load_state, store_state = load_fp32, store_fp32
"""The only format of states so far."""


# The update


def _load_master(kind: Any, arrays: Any, begin: Any, count: Any, row: Any) -> None:
    value, residual, master = arrays[:3]
    if kind == BF16:
        load_split(value, residual, begin, count, row)
    else:
        load_fp32(value if kind == FP32 else master, begin, count, row)


def _store_value(kind: Any, address: Any, begin: Any, count: Any, row: Any) -> None:
    if kind == FP32:
        store_fp32(address, begin, count, row)
    elif kind == BF16:
        store_half(address, begin, count, row)
    else:
        store_fp16(address, begin, count, row)


def _store_master(kind: Any, arrays: Any, begin: Any, count: Any, row: Any) -> None:
    value, residual, master = arrays[:3]
    store_value(kind, value, begin, count, row)
    if kind == BF16:
        store_low(residual, begin, count, row)
    elif kind != FP32:
        store_fp32(master, begin, count, row)


store_value = function(_store_value)
load_master, store_master = function(_load_master), function(_store_master)


def _compute_of(rule: Rule) -> Callable[..., Any]:
    step, num_states = function(make_rule(words, rule), name=f"step_{rule.name}"), NUM_STATES[rule]

    def compute(c: Any, block: Any, count: Any) -> None:
        """Rows: gradient, parameter, states."""
        for i in range(count):
            g = block[0, i] * c[GRAD_SCALE]
            p, s0, s1, s2 = step(c, g, block[1, i], block[2, i], block[3, i], block[4, i])
            block[1, i] = canonical(p)
            if num_states > 0:
                block[2, i] = canonical(s0)
            if num_states > 1:
                block[3, i] = canonical(s1)
            if num_states > 2:
                block[4, i] = canonical(s2)

    return function(compute, name=f"compute_{rule.name}")


compute: Any = None
"""Of the rule at hand: each copy of `update` below has a global of its own in this name."""


@functools.cache
def _update_of(rule: Rule) -> Callable[..., Any]:
    key, num_states = f"{_SOURCES} {rule.name}", NUM_STATES[rule]

    def update(kinds: Any, arrays: Any, line: Any, begin: Any, end: Any) -> None:
        _ = key
        value_kind, grad_kind = kinds
        first, shift, scalars = line
        block = np.empty((5, BLOCK), np.float32)
        s, at = 0, begin
        while at < end:
            while first[s + 1] <= at:
                s += 1
            until = min(end, min(first[s + 1], at + BLOCK))
            i, count = at + shift[s], until - at
            load(grad_kind, arrays[6], i, count, block[0])
            load_master(value_kind, arrays, i, count, block[1])
            for k in range(num_states):
                load_state(arrays[3 + k], i, count, block[2 + k])
            compute(scalars[s], block, count)
            for k in range(num_states):
                store_state(arrays[3 + k], i, count, block[2 + k])
            store_master(value_kind, arrays, i, count, block[1])
            if arrays[7] != 0:
                store_value(value_kind, arrays[7], i, count, block[1])
            at = until

    # Another function in the closure would be strange to the cache of the next process; one among the globals is not.
    scope = globals() | {"compute": _compute_of(rule)}
    bound = FunctionType(update.__code__, scope, None, None, update.__closure__)
    return function(bound, name=f"update_{rule.name}", cache=True)


def update_part(
    rule: Rule,
    kinds: tuple[int, int],
    arrays: tuple[int, ...],
    line: tuple[Any, Any, Any],
    begin: int,
    end: int,
) -> None:
    _update_of(rule)(kinds, arrays, line, begin, end)


# Sums


def _compute_store(kinds: Any, mode: Any, scale: Any, arrays: Any, begin: Any, count: Any, block: Any) -> None:
    """Leave what was stored in the first row of the block; see the operations in csrc/reduce/kernel.inl."""
    (dst_kind, src_kind), (dst, src), row = kinds, arrays, block[0]
    load(src_kind, src, begin, count, row)
    scaled = scale != np.float32(1.0)
    if scaled:
        for i in range(count):
            row[i] = row[i] * scale
    if mode == _ACCUMULATE:
        load_fp32(dst, begin, count, block[1])
        for i in range(count):
            row[i] = block[1, i] + row[i]
    if dst_kind == FP32:
        if scaled or mode == _ACCUMULATE:
            for i in range(count):
                row[i] = canonical(row[i])
        store_fp32(dst, begin, count, row)
    elif dst_kind == BF16:
        if scaled:
            for i in range(count):
                row[i] = from_bits(round_bf16(row[i]))
        target = halves_at(dst)
        for i in range(count):
            target[begin + i] = np.uint16(u32(bits(row[i]) >> np.uint32(16)))
    else:
        store_fp16(dst, begin, count, row)
        load_fp16(dst, begin, count, row)


def _add_squares(row: Any, count: Any, lanes: Any) -> None:
    """Element i to lane i % 16; a square of an fp32 is exact in double."""
    whole = count - count % 16
    for i in range(0, whole, 16):
        for k in range(16):
            x = np.float64(row[i + k])
            lanes[k] += x * x
    for i in range(whole, count):
        x = np.float64(row[i])
        lanes[i - whole] += x * x


def _largest(row: Any, count: Any) -> Any:
    top = np.uint32(0)
    for i in range(count):
        top = max(top, u32(bits(row[i]) & MAGNITUDE))
    return top


compute_store, add_squares, largest = function(_compute_store), function(_add_squares), function(_largest)


@functools.cache
def _sum_of(sources: str) -> Callable[..., Any]:
    def sum_chunks(
        kinds: Any, mode: Any, scale: Any, arrays: Any, numel: Any, found: Any, first: Any, last: Any
    ) -> None:
        sums, tops = found
        block, lanes = np.empty((2, BLOCK), np.float32), np.empty(16, np.float64)
        for chunk in range(first, last):
            lanes[:] = 0.0
            at, end = chunk * CHUNK, min((chunk + 1) * CHUNK, numel)
            while at < end:
                count = min(end - at, BLOCK)
                if mode == READ:
                    load(kinds[1], arrays[1], at, count, block[0])
                else:
                    compute_store(kinds, mode, scale, arrays, at, count, block)
                add_squares(block[0], count, lanes)
                tops[chunk] = max(tops[chunk], largest(block[0], count))
                at += count
            apart = 8
            while apart > 0:
                for k in range(apart):
                    lanes[k] += lanes[k + apart]
                apart //= 2
            sums[chunk] = lanes[0]
        _ = sources

    return function(sum_chunks, cache=True)


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
    _sum_of(_SOURCES)(kinds, mode, scale, arrays, numel, found, first, last)


# Conversions


@functools.cache
def _convert_of(sources: str) -> Callable[..., Any]:
    def convert(kinds: Any, arrays: Any, begin: Any, end: Any) -> None:
        _ = sources
        (dst_kind, src_kind), (dst, src) = kinds, arrays
        if dst_kind == src_kind and dst_kind != FP32:
            source, target = halves_at(src), halves_at(dst)
            for i in range(begin, end):
                target[i] = source[i]
            return
        row = np.empty(BLOCK, np.float32)
        for at in range(begin, end, BLOCK):
            count = min(end - at, BLOCK)
            load(src_kind, src, at, count, row)
            if dst_kind == FP32:
                store_fp32(dst, at, count, row)
            elif dst_kind == BF16:
                store_bf16(dst, at, count, row)
            else:
                store_fp16(dst, at, count, row)

    return function(convert, cache=True)


@functools.cache
def _split_of(sources: str) -> Callable[..., Any]:
    def split(master: Any, half: Any, residual: Any, begin: Any, end: Any) -> None:
        source, halves, rests = words_at(master), halves_at(half), halves_at(residual)
        for i in range(begin, end):
            x = from_bits(source[i])
            halves[i] = np.uint16(split_half(x))
            rests[i] = np.uint16(split_residual(x))
        _ = sources

    return function(split, cache=True)


@functools.cache
def _join_of(sources: str) -> Callable[..., Any]:
    def join(half: Any, residual: Any, master: Any, begin: Any, end: Any) -> None:
        halves, rests, target = halves_at(half), halves_at(residual), words_at(master)
        for i in range(begin, end):
            target[i] = join_master(u32(halves[i]), u32(rests[i]))
        _ = sources

    return function(join, cache=True)


def convert_part(kinds: tuple[int, int], arrays: tuple[int, int], begin: int, end: int) -> None:
    _convert_of(_SOURCES)(kinds, arrays, begin, end)


def split_part(master: int, half: int, residual: int, begin: int, end: int) -> None:
    _split_of(_SOURCES)(master, half, residual, begin, end)


def join_part(half: int, residual: int, master: int, begin: int, end: int) -> None:
    _join_of(_SOURCES)(half, residual, master, begin, end)
