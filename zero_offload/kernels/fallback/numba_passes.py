"""The passes over memory, compiled by numba at their first call.

Everything goes through a small block in the first-level cache: loaded as fp32, computed, stored. So a rule's arithmetic
is compiled once, whatever the dtypes, and loading and storing have functions of their own. Importing this module takes
0.5 s, the first update 3 s of compiling, 5 s with compact states, one with another rule 1 s, the first sum 1 s; in the
next process, which finds that in numba's cache of files, the first update takes 0.3 s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

from zero_offload.abi import GradMode, Rule, StateFormat
from zero_offload.kernels.fallback import numba_conversions as conversions
from zero_offload.kernels.fallback import numba_words as words
from zero_offload.kernels.fallback.calls import READ
from zero_offload.kernels.fallback.elements import MAGNITUDE
from zero_offload.kernels.fallback.numba_memory import (
    BF16,
    BLOCK,
    FP32,
    canonical,
    load,
    load_fp32,
    load_split,
    store_fp16,
    store_fp32,
    store_half,
    store_low,
)
from zero_offload.kernels.fallback.numba_states import (
    LOAD_STATE,
    STORE_STATE,
    fill_random,
    load_short,
    shorten_at_random,
    store_short_residual,
)
from zero_offload.kernels.fallback.numba_words import SOURCES, bits, function, halves_at, u32
from zero_offload.kernels.fallback.parts import CHUNK
from zero_offload.kernels.fallback.rules import GRAD_SCALE, NUM_SIGNED, NUM_STATES, make_rule

_ACCUMULATE = int(GradMode.ACCUMULATE)


# The update


def _load_master(kind: Any, arrays: Any, begin: Any, count: Any, row: Any) -> None:
    value, residual, master = arrays[:3]
    if kind == BF16:
        load_split(value, residual, begin, count, row)
    else:
        load_fp32(value if kind == FP32 else master, begin, count, row)


def _load_short_master(kind: Any, arrays: Any, begin: Any, count: Any, row: Any) -> None:
    value, residual, master = arrays[:3]
    if kind == BF16:
        load_short(value, residual, begin, count, row)
    else:
        load_fp32(value if kind == FP32 else master, begin, count, row)


def _store_value(kind: Any, address: Any, begin: Any, count: Any, row: Any) -> None:
    if kind == FP32:
        store_fp32(address, begin, count, row)
    elif kind == BF16:
        store_half(address, begin, count, row)
    else:
        store_fp16(address, begin, count, row)


def _store_master(kind: Any, arrays: Any, begin: Any, count: Any, row: Any, random: Any) -> None:
    value, residual, master = arrays[:3]
    store_value(kind, value, begin, count, row)
    if kind == BF16:
        store_low(residual, begin, count, row)
    elif kind != FP32:
        store_fp32(master, begin, count, row)


def _store_short_master(kind: Any, arrays: Any, begin: Any, count: Any, row: Any, random: Any) -> None:
    """Leaves a bf16 value's master in the row as it was stored."""
    value, residual, master = arrays[:3]
    if kind == BF16:
        shorten_at_random(count, row, random)
        store_short_residual(residual, begin, count, row)
    elif kind != FP32:
        store_fp32(master, begin, count, row)
    store_value(kind, value, begin, count, row)


store_value = function(_store_value)
_LOAD_MASTER = {short: function(body) for short, body in ((False, _load_master), (True, _load_short_master))}
_STORE_MASTER = {short: function(body) for short, body in ((False, _store_master), (True, _store_short_master))}


@functools.cache
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
load_state: Any = None
store_state: Any = None
load_master: Any = None
store_master: Any = None
"""Of the rule and the format at hand: each copy of `update` below has globals of its own in these names."""


@functools.cache
def _update_of(rule: Rule, format: StateFormat) -> Callable[..., Any]:
    name, num_states, num_signed = f"{rule.name}_{format.name}", NUM_STATES[rule], NUM_SIGNED[rule]
    key, is_rounded = f"{SOURCES} {name}", format is not StateFormat.FP32

    def update(kinds: Any, arrays: Any, line: Any, begin: Any, end: Any) -> None:
        _ = key
        value_kind, grad_kind = kinds
        states, scales, (grad, value_out) = arrays[3:6], arrays[6:9], arrays[9:]
        first, places, scalars, keys = line
        block, random = np.empty((5, BLOCK), np.float32), np.empty(BLOCK, np.uint32)
        s, at = 0, begin
        while at < end:
            while first[s + 1] <= at:
                s += 1
            until = min(end, min(first[s + 1], at + BLOCK))
            i, number = at + places[s, 0], at + places[s, 2]
            count = min(until - at, places[s, 1] - i)
            load(grad_kind, grad, i, count, block[0])
            load_master(value_kind, arrays, i, count, block[1])
            for k in range(num_states):
                load_state(k < num_signed, states[k], scales[k], i, count, block[2 + k])
            compute(scalars[s], block, count)
            if is_rounded:
                fill_random(keys[s], number, count, random)
            for k in range(num_states):
                # The row of the gradient is free by now.
                store_state(k < num_signed, k, (states[k], scales[k]), i, count, block[2 + k], random, block[0])
            store_master(value_kind, arrays, i, count, block[1], random)
            if value_out != 0:
                store_value(value_kind, value_out, i, count, block[1])
            at = until

    # Another function in the closure would be strange to the cache of the next process; one among the globals is not.
    short = format is StateFormat.COMPACT
    scope = globals() | {
        "compute": _compute_of(rule),
        "load_state": LOAD_STATE[format],
        "store_state": STORE_STATE[format],
        "load_master": _LOAD_MASTER[short],
        "store_master": _STORE_MASTER[short],
    }
    bound = FunctionType(update.__code__, scope, None, None, update.__closure__)
    return function(bound, name=f"update_{name}", cache=True)


def update_part(
    rule: Rule,
    kinds: tuple[int, int, int],
    arrays: tuple[int, ...],
    line: tuple[Any, Any, Any, Any],
    begin: int,
    end: int,
) -> None:
    _update_of(rule, StateFormat(kinds[2]))(kinds[:2], arrays, line, begin, end)


# Sums


def _compute_store(kinds: Any, mode: Any, arrays: Any, begin: Any, count: Any, block: Any) -> None:
    """Leave what was stored in the first row of the block; see `Store` in csrc/reduce/kernel.inl."""
    (dst_kind, src_kind), (dst, src), row = kinds, arrays, block[0]
    load(src_kind, src, begin, count, row)
    if mode == _ACCUMULATE:
        load_fp32(dst, begin, count, block[1])
        for i in range(count):
            row[i] = canonical(block[1, i] + row[i])
    if dst_kind == FP32:
        store_fp32(dst, begin, count, row)
    elif dst_kind == BF16:
        target = halves_at(dst)
        for i in range(count):
            target[begin + i] = np.uint16(u32(bits(row[i]) >> np.uint32(16)))
    else:
        store_fp16(dst, begin, count, row)


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
    def sum_chunks(kinds: Any, mode: Any, arrays: Any, numel: Any, found: Any, first: Any, last: Any) -> None:
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
                    compute_store(kinds, mode, arrays, at, count, block)
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
    arrays: tuple[int, int],
    numel: int,
    found: tuple[Any, Any],
    first: int,
    last: int,
) -> None:
    _sum_of(SOURCES)(kinds, mode, arrays, numel, found, first, last)


# Conversions


def convert_part(kinds: tuple[int, int], arrays: tuple[int, int], begin: int, end: int) -> None:
    conversions.convert_of(SOURCES)(kinds, arrays, begin, end)


def split_part(master: int, half: int, residual: int, begin: int, end: int) -> None:
    conversions.split_of(SOURCES)(master, half, residual, begin, end)


def join_part(half: int, residual: int, master: int, begin: int, end: int) -> None:
    conversions.join_of(SOURCES)(half, residual, master, begin, end)


def short_split_part(master: int, half: int, residual: int, begin: int, end: int) -> None:
    conversions.short_split_of(SOURCES)(master, half, residual, begin, end)


def short_join_part(half: int, residual: int, master: int, begin: int, end: int) -> None:
    conversions.short_join_of(SOURCES)(half, residual, master, begin, end)


def decode_part(signed: bool, arrays: tuple[int, int, int], begin: int, end: int) -> None:
    conversions.decode_of(SOURCES)(signed, arrays, begin, end)


def encode_part(signed: bool, arrays: tuple[int, int, int], begin: int, end: int) -> None:
    conversions.encode_of(SOURCES)(signed, arrays, begin, end)
