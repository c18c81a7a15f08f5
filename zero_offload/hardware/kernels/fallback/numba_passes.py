"""The passes over memory, compiled by numba at their first call.

Everything goes through rows in the first-level cache: loaded as fp32, computed, stored. So a rule's arithmetic is
compiled once, whatever the dtypes. Each pass is one thread's part, and knows nothing of the others. Importing this
module takes 0.5 s. Compiling takes 5 s for the first update, 2 s for an update with another rule, 1 s for the first
sum. The next process finds the code in numba's cache of files: its first update takes 0.3 s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import STATE_BLOCK, ElementType, GradMode, Rule
from zero_offload.hardware.kernels.arguments import CHUNK, LANES
from zero_offload.hardware.kernels.fallback import numba_words as words
from zero_offload.hardware.kernels.fallback.codec import (
    MAGNITUDE,
    MIDDLE,
    first_bit,
    make_codec,
    make_codes,
    make_elements,
)
from zero_offload.hardware.kernels.fallback.numba_words import (
    bits,
    bytes_at,
    from_bits,
    function,
    halves_at,
    kept,
    u32,
    words_at,
)
from zero_offload.hardware.kernels.rules import GRAD_SCALE, SIGNED, STATES, bound, make_rule

BLOCK = 1024
"""Elements of a row; six rows are 24 KiB, which the first-level cache holds. Whole blocks of codes, and a multiple of
the sums' lanes."""
READ = -1
"""The mode of a sum that stores nothing, beside GradMode's."""
FP32, BF16, FP16 = int(ElementType.FP32), int(ElementType.BF16), int(ElementType.FP16)
_WHOLE, _HALVES, _COMPACT = int(StateFormat.FP32), int(StateFormat.BF16), int(StateFormat.COMPACT)
_ACCUMULATE = int(GradMode.ACCUMULATE)
_HALF_FIRST, _HALF_LATER = first_bit(0, 16), first_bit(1, 16)
_CODE_FIRST, _CODE_LATER = first_bit(0, 12), first_bit(1, 12)

# Numba calls globals, and no attributes.
_made = make_elements(words)
canonical, half_of, join_master = _made.canonical, _made.half_of, _made.join_master
widen_bf16, round_bf16 = _made.widen_bf16, _made.round_bf16
widen_fp16, narrow_fp16 = _made.widen_fp16, _made.narrow_fp16
split_half, split_residual = _made.split_half, _made.split_residual
_made = make_codec(words)
random_word, random_edge, random_bf16 = _made.random_word, _made.random_edge, _made.random_bf16
random_24, nearest_24 = _made.random_24, _made.nearest_24
join_short, short_residual = _made.join_short, _made.short_residual


# Numbers: `count` elements from `begin` on, to and from the start of a row of fp32


@function
def load(kind: Any, address: Any, begin: Any, count: Any, row: Any) -> None:
    source, halves = words_at(address), halves_at(address)
    if kind == FP32:
        for i in range(count):
            row[i] = from_bits(source[begin + i])
    elif kind == BF16:
        for i in range(count):
            row[i] = from_bits(widen_bf16(halves[begin + i]))
    else:
        for i in range(count):
            row[i] = from_bits(widen_fp16(u32(halves[begin + i])))


@function
def store(kind: Any, address: Any, begin: Any, count: Any, row: Any) -> None:
    """Rounded to the nearest, ties to even; a NaN comes to fp32 as it is."""
    target, halves = words_at(address), halves_at(address)
    if kind == FP32:
        for i in range(count):
            target[begin + i] = bits(row[i])
    elif kind == BF16:
        for i in range(count):
            halves[begin + i] = np.uint16(round_bf16(row[i]) >> np.uint32(16))
    else:
        for i in range(count):
            halves[begin + i] = np.uint16(narrow_fp16(canonical(row[i])))


@kept
def convert(kinds: Any, arrays: Any, begin: Any, end: Any) -> None:
    """`kinds` and `arrays` are of dst and src."""
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
        store(dst_kind, dst, at, count, row)


# Masters: whole ones, and the short ones of 24 bits that stand beside compact states


@kept
def split(master: Any, half: Any, residual: Any, begin: Any, end: Any) -> None:
    source, halves, rests = words_at(master), halves_at(half), halves_at(residual)
    for i in range(begin, end):
        x = from_bits(source[i])
        halves[i] = np.uint16(split_half(x))
        rests[i] = np.uint16(split_residual(x))


@kept
def join(half: Any, residual: Any, master: Any, begin: Any, end: Any) -> None:
    halves, rests, target = halves_at(half), halves_at(residual), words_at(master)
    for i in range(begin, end):
        target[i] = join_master(u32(halves[i]), u32(rests[i]))


@kept
def short_split(master: Any, half: Any, residual: Any, begin: Any, end: Any) -> None:
    source, halves, rests = words_at(master), halves_at(half), bytes_at(residual)
    for i in range(begin, end):
        word = bits(nearest_24(canonical(from_bits(source[i]))))
        halves[i] = np.uint16(half_of(word))
        rests[i] = np.uint8(short_residual(word))


@kept
def short_join(half: Any, residual: Any, master: Any, begin: Any, end: Any) -> None:
    halves, rests, target = halves_at(half), bytes_at(residual), words_at(master)
    for i in range(begin, end):
        target[i] = join_short(u32(halves[i]), u32(rests[i]))


@function
def load_master(kind: Any, format: Any, arrays: Any, begin: Any, count: Any, row: Any) -> None:
    """`arrays` are those of an update."""
    value, residual, master = arrays[0], arrays[1], arrays[2]
    halves, rests, short_rests = halves_at(value), halves_at(residual), bytes_at(residual)
    if kind == FP32:
        load(FP32, value, begin, count, row)
    elif kind == FP16:
        load(FP32, master, begin, count, row)
    elif format == _COMPACT:
        for i in range(count):
            row[i] = from_bits(join_short(u32(halves[begin + i]), u32(short_rests[begin + i])))
    else:
        for i in range(count):
            row[i] = from_bits(join_master(u32(halves[begin + i]), u32(rests[begin + i])))


@function
def store_value(kind: Any, address: Any, begin: Any, count: Any, row: Any) -> None:
    """NaNs in the row are the canonical one. A bf16 value is the half of its master."""
    if kind != BF16:
        store(kind, address, begin, count, row)
        return
    halves = halves_at(address)
    for i in range(count):
        halves[begin + i] = np.uint16(half_of(bits(row[i])))


@function
def store_master(kind: Any, format: Any, arrays: Any, begin: Any, count: Any, row: Any, random: Any) -> None:
    """Leaves the master in the row as it was stored."""
    value, residual, master = arrays[0], arrays[1], arrays[2]
    rests, short_rests = halves_at(residual), bytes_at(residual)
    if kind == FP16:
        store(FP32, master, begin, count, row)
    elif kind == BF16 and format == _COMPACT:
        for i in range(count):
            row[i] = random_24(row[i], random[i])
            short_rests[begin + i] = np.uint8(short_residual(bits(row[i])))
    elif kind == BF16:
        for i in range(count):
            rests[begin + i] = np.uint16(bits(row[i]))
    store_value(kind, value, begin, count, row)


# States in every format. Codes: `begin` starts a block. A loop from 0 on has no test for indices below 0, and becomes
# one over vectors


def _load_codes_of(*, signed: bool) -> Callable[..., Any]:
    value_of = make_codes(words, signed=signed).value_of

    def load_codes(address: Any, scales: Any, begin: Any, count: Any, row: Any) -> None:
        source, scale_bits = bytes_at(address), words_at(scales)
        for first in range(0, count, STATE_BLOCK):
            at, part = begin + first, row[first : min(first + STATE_BLOCK, count)]
            scale = from_bits(scale_bits[at // STATE_BLOCK])
            for i in range(len(part)):
                part[i] = value_of(u32(source[at + i]), scale)

    return function(load_codes, name=f"load_codes_{'signed' if signed else 'unsigned'}")


def _store_codes_of(*, signed: bool) -> Callable[..., Any]:
    made = make_codes(words, signed=signed)
    root_of, scale_of, inverse_of, code_of = made.root_of, made.scale_of, made.inverse_of, made.code_of

    def store_codes(address: Any, scales: Any, begin: Any, count: Any, row: Any, edges: Any) -> None:
        """Leaves roots in the row."""
        target, scale_bits = bytes_at(address), words_at(scales)
        for first in range(0, count, STATE_BLOCK):
            at, top = begin + first, np.uint32(0)
            part, edge = row[first : min(first + STATE_BLOCK, count)], edges[first:]
            for i in range(len(part)):
                part[i] = root_of(part[i])
                top = max(top, u32(bits(part[i]) & MAGNITUDE))
            scale = scale_of(top)
            inverse = inverse_of(scale)
            scale_bits[at // STATE_BLOCK] = bits(scale)
            for i in range(len(part)):
                target[at + i] = np.uint8(code_of(part[i], inverse, edge[i]))

    return function(store_codes, name=f"store_codes_{'signed' if signed else 'unsigned'}")


load_signed, load_unsigned = _load_codes_of(signed=True), _load_codes_of(signed=False)
store_signed, store_unsigned = _store_codes_of(signed=True), _store_codes_of(signed=False)


@function
def load_state(format: Any, signed: Any, address: Any, scales: Any, begin: Any, count: Any, row: Any) -> None:
    if format == _WHOLE:
        load(FP32, address, begin, count, row)
    elif format == _HALVES:
        load(BF16, address, begin, count, row)
    elif signed:
        load_signed(address, scales, begin, count, row)
    else:
        load_unsigned(address, scales, begin, count, row)


@function
def store_codes(signed: Any, address: Any, scales: Any, begin: Any, count: Any, row: Any, edges: Any) -> None:
    if signed:
        store_signed(address, scales, begin, count, row, edges)
    else:
        store_unsigned(address, scales, begin, count, row, edges)


@function
def store_state(
    format: Any, state: Any, signed: Any, arrays: Any, begin: Any, count: Any, row: Any, random: Any, spare: Any
) -> None:
    """`arrays` are the state and its scales; `random` the words of its elements; the `spare` row may be written to."""
    if format == _WHOLE:
        store(FP32, arrays[0], begin, count, row)
    elif format == _HALVES:
        target = halves_at(arrays[0])
        shift = _HALF_FIRST if state == 0 else _HALF_LATER
        for i in range(count):
            target[begin + i] = np.uint16(random_bf16(row[i], random[i], shift))
    else:
        shift = _CODE_FIRST if state == 0 else _CODE_LATER
        for i in range(count):
            spare[i] = random_edge(random[i], shift)
        store_codes(signed, arrays[0], arrays[1], begin, count, row, spare)


@kept
def decode(signed: Any, arrays: Any, begin: Any, end: Any) -> None:
    """Decode compact states: `arrays` are of codes, scales and fp32; `begin` starts a block."""
    codes, scales, fp32 = arrays
    row = np.empty(BLOCK, np.float32)
    for at in range(begin, end, BLOCK):
        count = min(end - at, BLOCK)
        load_state(_COMPACT, signed, codes, scales, at, count, row)
        for i in range(count):
            row[i] = canonical(row[i])
        store(FP32, fp32, at, count, row)


@kept
def encode(signed: Any, arrays: Any, begin: Any, end: Any) -> None:
    """Encode what `decode` decodes."""
    codes, scales, fp32 = arrays
    row, edges = np.empty(BLOCK, np.float32), np.full(BLOCK, MIDDLE)
    for at in range(begin, end, BLOCK):
        count = min(end - at, BLOCK)
        load(FP32, fp32, at, count, row)
        store_codes(signed, codes, scales, at, count, row, edges)


# The update


def _compute_of(rule: Rule) -> Callable[..., Any]:
    step, num_states = function(make_rule(words, rule), name=f"step_{rule.name}"), len(STATES[rule])

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
"""The arithmetic of the current rule: each copy of `update` below has globals of its own in this name."""


@functools.cache
def update_of(rule: Rule) -> Callable[..., Any]:
    """update(kinds, arrays, line, begin, end): places [begin, end) of the line on which all segments lie end to end.

    `kinds` are of value and gradient, and the format of states. `arrays` has the addresses of value, residual, master,
    three states, their scales, gradient and value_out. For the line see `calls`. Beside compact states `begin` starts a
    block.
    """
    num_states, num_signed = len(STATES[rule]), len(SIGNED.intersection(STATES[rule]))

    def update(kinds: Any, arrays: Any, line: Any, begin: Any, end: Any) -> None:
        value_kind, grad_kind, format = kinds
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
            load_master(value_kind, format, arrays, i, count, block[1])
            for k in range(num_states):
                load_state(format, k < num_signed, states[k], scales[k], i, count, block[2 + k])
            compute(scalars[s], block, count)
            if format != _WHOLE:
                before, between = keys[s, 0], keys[s, 1]
                for k in range(count):
                    random[k] = random_word(u32(number + k), before, between)
            for k in range(num_states):
                # The row of the gradient is free by now.
                here = (states[k], scales[k])
                store_state(format, k, k < num_signed, here, i, count, block[2 + k], random, block[0])
            store_master(value_kind, format, arrays, i, count, block[1], random)
            if value_out != 0:
                store_value(value_kind, value_out, i, count, block[1])
            at = until

    return function(bound(update, {"compute": _compute_of(rule)}), name=f"update_{rule.name}", cache=True)


# Sums


@function
def store_grad(kinds: Any, mode: Any, arrays: Any, begin: Any, count: Any, block: Any) -> None:
    """Leave what was stored in the first row of the block; see `Store` in csrc/reduce/kernel.inl."""
    (dst_kind, src_kind), (dst, src), row = kinds, arrays, block[0]
    load(src_kind, src, begin, count, row)
    if mode == _ACCUMULATE:
        load(FP32, dst, begin, count, block[1])
        for i in range(count):
            row[i] = canonical(block[1, i] + row[i])
    if dst_kind == BF16:  # from bf16: a NaN keeps its bits
        target = halves_at(dst)
        for i in range(count):
            target[begin + i] = np.uint16(u32(bits(row[i]) >> np.uint32(16)))
    else:
        store(dst_kind, dst, begin, count, row)


@function
def add_squares(row: Any, count: Any, lanes: Any) -> None:
    """Element i to lane i % LANES; a square of an fp32 is exact in double."""
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        for k in range(LANES):
            x = np.float64(row[i + k])
            lanes[k] += x * x
    for i in range(whole, count):
        x = np.float64(row[i])
        lanes[i - whole] += x * x


@function
def largest(row: Any, count: Any) -> Any:
    top = np.uint32(0)
    for i in range(count):
        top = max(top, u32(bits(row[i]) & MAGNITUDE))
    return top


@kept
def sum_chunks(kinds: Any, mode: Any, arrays: Any, numel: Any, found: Any, first: Any, last: Any) -> None:
    """Chunks [first, last) of dst and src, (numel,) each: store src as `mode` says, and fill their rows of `found`.
    Those are sums of squares (chunks,) fp64, and the largest bits of a magnitude (chunks,) uint32."""
    sums, tops = found
    block, lanes = np.empty((2, BLOCK), np.float32), np.empty(LANES, np.float64)
    for chunk in range(first, last):
        lanes[:] = 0.0
        at, end = chunk * CHUNK, min((chunk + 1) * CHUNK, numel)
        while at < end:
            count = min(end - at, BLOCK)
            if mode == READ:
                load(kinds[1], arrays[1], at, count, block[0])
            else:
                store_grad(kinds, mode, arrays, at, count, block)
            add_squares(block[0], count, lanes)
            tops[chunk] = max(tops[chunk], largest(block[0], count))
            at += count
        apart = LANES // 2
        while apart > 0:
            for k in range(apart):
                lanes[k] += lanes[k + apart]
            apart //= 2
        sums[chunk] = lanes[0]


# Checksums: CRC-32C (Castagnoli), eight bytes at a time. `seed` is the register's start


@functools.cache
def crc_tables() -> Any:
    """(8, 256) uint32: what a byte adds to the register, eight to one positions before the end of a word of eight."""
    tables = np.zeros((8, 256), dtype=np.uint32)
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        tables[0, byte] = value
    for row in range(1, 8):
        tables[row] = (tables[row - 1] >> 8) ^ tables[0][tables[row - 1] & 0xFF]
    return tables


@kept
def crc32c(register: Any, address: Any, nbytes: Any, tables: Any) -> Any:
    """The register after these bytes."""
    memory, words = bytes_at(address), nbytes // 8
    for i in range(words):
        at = 8 * i
        low = (
            register
            ^ np.uint32(memory[at])
            ^ (np.uint32(memory[at + 1]) << np.uint32(8))
            ^ (np.uint32(memory[at + 2]) << np.uint32(16))
            ^ (np.uint32(memory[at + 3]) << np.uint32(24))
        )
        register = (
            tables[7, low & 0xFF]
            ^ tables[6, (low >> np.uint32(8)) & 0xFF]
            ^ tables[5, (low >> np.uint32(16)) & 0xFF]
            ^ tables[4, low >> np.uint32(24)]
            ^ tables[3, memory[at + 4]]
            ^ tables[2, memory[at + 5]]
            ^ tables[1, memory[at + 6]]
            ^ tables[0, memory[at + 7]]
        )
    for i in range(8 * words, nbytes):
        register = tables[0, (register ^ memory[i]) & 0xFF] ^ (register >> np.uint32(8))
    return register & np.uint32(0xFFFFFFFF)
