"""The passes over memory in plain numpy, a block at a time: for where neither the library nor numba is to be had.

The bits are those of the other passes; the arrays between the operations cost the time.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from zero_offload.abi import GradMode, Kind, Rule, StateFormat
from zero_offload.kernels.fallback import numpy_words as words
from zero_offload.kernels.fallback.calls import READ
from zero_offload.kernels.fallback.codec import MIDDLE
from zero_offload.kernels.fallback.elements import MAGNITUDE
from zero_offload.kernels.fallback.numpy_memory import BLOCK, blocks, elements, floats_at, halves_at, load, words_at
from zero_offload.kernels.fallback.numpy_states import (
    Words,
    codec,
    load_short_master,
    load_state,
    random_words,
    store_codes,
    store_short_residual,
    store_state,
)
from zero_offload.kernels.fallback.numpy_words import Floats
from zero_offload.kernels.fallback.parts import CHUNK
from zero_offload.kernels.fallback.rules import GRAD_SCALE, NUM_SIGNED, NUM_STATES, make_rule

_16 = np.uint32(16)


def update_part(
    rule: Rule,
    kinds: tuple[int, int, int],
    arrays: tuple[int, ...],
    line: tuple[Any, Any, Any, Any],
    begin: int,
    end: int,
) -> None:
    first, places, scalars, keys = line
    s, at = 0, begin
    with np.errstate(all="ignore"):
        while at < end:
            while first[s + 1] <= at:
                s += 1
            until = min(end, int(first[s + 1]), at + BLOCK)
            shift, stop, number = places[s].tolist()
            count = min(until - at, stop - at - shift)
            # Whole states need no random words.
            random = random_words(keys[s], at + number, 0 if kinds[2] == StateFormat.FP32 else count)
            _update_block(rule, kinds, arrays, (scalars[s], random), at + shift, count)
            at = until


def _update_block(
    rule: Rule,
    kinds: tuple[int, int, int],
    arrays: tuple[int, ...],
    row: tuple[Floats, Words],
    begin: int,
    count: int,
) -> None:
    (value_kind, grad_kind, format), (scalars, random) = kinds, row
    *_, grad, value_out = arrays
    short = value_kind == Kind.BF16 and format == StateFormat.COMPACT
    kept = [(k < NUM_SIGNED[rule], (arrays[3 + k], arrays[6 + k])) for k in range(NUM_STATES[rule])]
    states = [load_state(format, signed, addresses, begin, count) for signed, addresses in kept]
    g = load(grad_kind, grad, begin, count) * scalars[GRAD_SCALE]
    p = (
        load_short_master(arrays[0], arrays[1], begin, count)
        if short
        else _load_master(value_kind, arrays, begin, count)
    )
    p, *new = _rule(rule)(scalars, g, p, *(*states, None, None, None)[:3])
    for k, (signed, addresses) in enumerate(kept):
        store_state(format, signed, k, addresses, begin, elements.canonical(new[k]), random)
    p = elements.canonical(p)
    if short:
        p = codec.random_24(p, random)
        _store_value(value_kind, arrays[0], begin, count, p)
        store_short_residual(arrays[1], begin, p)
    else:
        _store_master(value_kind, arrays, begin, count, p)
    if value_out:
        _store_value(value_kind, value_out, begin, count, p)


def _load_master(kind: int, arrays: tuple[int, ...], begin: int, count: int) -> Floats:
    value, residual, master = arrays[:3]
    if kind != Kind.BF16:
        return floats_at(value if kind == Kind.FP32 else master, begin, count)
    halves, rests = halves_at(value, begin, count), halves_at(residual, begin, count)
    found: Floats = words.from_bits(elements.join_master(halves.astype(np.uint32), rests.astype(np.uint32)))
    return found


def _store_master(kind: int, arrays: tuple[int, ...], begin: int, count: int, p: Floats) -> None:
    value, residual, master = arrays[:3]
    _store_value(kind, value, begin, count, p)
    if kind == Kind.BF16:
        halves_at(residual, begin, count)[:] = words.bits(p)  # the low half of each word
    elif kind == Kind.FP16:
        floats_at(master, begin, count)[:] = p


def _store_value(kind: int, address: int, begin: int, count: int, p: Floats) -> None:
    if kind == Kind.FP32:
        floats_at(address, begin, count)[:] = p
    else:
        half = elements.half_of(words.bits(p)) if kind == Kind.BF16 else elements.narrow_fp16(p)
        halves_at(address, begin, count)[:] = half


_rule = functools.cache(functools.partial(make_rule, words))


def sum_part(
    kinds: tuple[int, int],
    mode: int,
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
            x = _stored(kinds, mode, arrays, begin, count)
            squares = np.zeros((-(-count // 16), 16))
            squares.reshape(-1)[:count] = x
            squares *= squares
            lanes = np.cumsum(squares, axis=0)[-1]  # one after the other, which `sum` does not promise
            while len(lanes) > 1:
                lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
            sums[chunk], tops[chunk] = lanes[0], (words.bits(x) & MAGNITUDE).max()


def _stored(kinds: tuple[int, int], mode: int, arrays: tuple[int, int], begin: int, count: int) -> Floats:
    """What was stored; see `Store` in csrc/reduce/kernel.inl."""
    (dst_kind, src_kind), (dst, src) = kinds, arrays
    x = load(src_kind, src, begin, count)
    if mode == READ:
        return x
    if mode == GradMode.ACCUMULATE:
        x = elements.canonical(floats_at(dst, begin, count) + x)
    if dst_kind == Kind.FP32:
        words_at(dst, begin, count)[:] = words.bits(x)
    elif dst_kind == Kind.BF16:
        halves_at(dst, begin, count)[:] = words.bits(x) >> _16
    else:
        halves_at(dst, begin, count)[:] = elements.narrow_fp16(elements.canonical(x))
    return x


def convert_part(kinds: tuple[int, int], arrays: tuple[int, int], begin: int, end: int) -> None:
    (dst_kind, src_kind), (dst, src) = kinds, arrays
    with np.errstate(all="ignore"):
        for at, count in blocks(begin, end):
            if dst_kind == Kind.FP32:
                words_at(dst, at, count)[:] = words.bits(load(src_kind, src, at, count))
            elif dst_kind == src_kind:
                halves_at(dst, at, count)[:] = halves_at(src, at, count)
            elif dst_kind == Kind.BF16:
                halves_at(dst, at, count)[:] = elements.round_bf16(floats_at(src, at, count)) >> _16
            else:
                halves_at(dst, at, count)[:] = elements.narrow_fp16(elements.canonical(floats_at(src, at, count)))


def split_part(master: int, half: int, residual: int, begin: int, end: int) -> None:
    for at, count in blocks(begin, end):
        x = floats_at(master, at, count)
        halves_at(half, at, count)[:] = elements.split_half(x)
        halves_at(residual, at, count)[:] = elements.split_residual(x)


def join_part(half: int, residual: int, master: int, begin: int, end: int) -> None:
    for at, count in blocks(begin, end):
        high, low = halves_at(half, at, count).astype(np.uint32), halves_at(residual, at, count).astype(np.uint32)
        words_at(master, at, count)[:] = elements.join_master(high, low)


def decode_part(signed: bool, arrays: tuple[int, int, int], begin: int, end: int) -> None:
    codes, scales, fp32 = arrays
    with np.errstate(all="ignore"):
        for at, count in blocks(begin, end):
            x = load_state(StateFormat.COMPACT, signed, (codes, scales), at, count)
            floats_at(fp32, at, count)[:] = elements.canonical(x)


def encode_part(signed: bool, arrays: tuple[int, int, int], begin: int, end: int) -> None:
    codes, scales, fp32 = arrays
    with np.errstate(all="ignore"):
        for at, count in blocks(begin, end):
            store_codes(signed, codes, scales, at, floats_at(fp32, at, count), MIDDLE)


def short_split_part(master: int, half: int, residual: int, begin: int, end: int) -> None:
    with np.errstate(all="ignore"):
        for at, count in blocks(begin, end):
            p = codec.nearest_24(elements.canonical(floats_at(master, at, count)))
            halves_at(half, at, count)[:] = elements.half_of(words.bits(p))
            store_short_residual(residual, at, p)


def short_join_part(half: int, residual: int, master: int, begin: int, end: int) -> None:
    for at, count in blocks(begin, end):
        words_at(master, at, count)[:] = words.bits(load_short_master(half, residual, at, count))
