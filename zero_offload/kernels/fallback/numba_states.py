"""States in every format <-> rows of fp32, and what is rounded at random beside them, compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zero_offload.abi import STATE_BLOCK, StateFormat
from zero_offload.kernels.fallback import numba_words as words
from zero_offload.kernels.fallback.codec import first_bit, make_codec, make_codes
from zero_offload.kernels.fallback.elements import MAGNITUDE
from zero_offload.kernels.fallback.numba_memory import canonical, load_bf16, load_fp32, store_fp32
from zero_offload.kernels.fallback.numba_words import bits, bytes_at, from_bits, function, halves_at, u32, words_at

_HALF_FIRST, _HALF_LATER = first_bit(0, 16), first_bit(1, 16)
_CODE_FIRST, _CODE_LATER = first_bit(0, 12), first_bit(1, 12)

_codes = {signed: make_codes(words, signed=signed) for signed in (False, True)}
_made = make_codec(words)
random_word, random_edge, random_bf16 = _made.random_word, _made.random_edge, _made.random_bf16
random_24, nearest_24 = _made.random_24, _made.nearest_24
join_short, short_residual = _made.join_short, _made.short_residual


def _fill_random(key: Any, number: Any, count: Any, random: Any) -> None:
    """The words of elements `number`, number + 1 and so on, modulo 2^32."""
    before, between = key[0], key[1]
    for i in range(count):
        random[i] = random_word(u32(number + i), before, between)


fill_random = function(_fill_random)


# Codes: `begin` starts a block. A loop from 0 on has no test for indices below 0, and becomes one over vectors


def _load_codes_of(*, signed: bool) -> Callable[..., Any]:
    value_of = _codes[signed].value_of

    def load_codes(address: Any, scales: Any, begin: Any, count: Any, row: Any) -> None:
        source, scale_bits = bytes_at(address), words_at(scales)
        for first in range(0, count, STATE_BLOCK):
            at, part = begin + first, row[first : min(first + STATE_BLOCK, count)]
            scale = from_bits(scale_bits[at // STATE_BLOCK])
            for i in range(len(part)):
                part[i] = value_of(u32(source[at + i]), scale)

    return function(load_codes, name=f"load_codes_{'signed' if signed else 'unsigned'}")


def _store_codes_of(*, signed: bool) -> Callable[..., Any]:
    made = _codes[signed]
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


def _decode_row(signed: Any, address: Any, scales: Any, begin: Any, count: Any, row: Any) -> None:
    if signed:
        load_signed(address, scales, begin, count, row)
    else:
        load_unsigned(address, scales, begin, count, row)


def _encode_row(signed: Any, address: Any, scales: Any, begin: Any, count: Any, row: Any, edges: Any) -> None:
    if signed:
        store_signed(address, scales, begin, count, row, edges)
    else:
        store_unsigned(address, scales, begin, count, row, edges)


decode_row, encode_row = function(_decode_row), function(_encode_row)


# A state of an update, which is loaded and stored alike in every format


def _load_whole(signed: Any, address: Any, scales: Any, begin: Any, count: Any, row: Any) -> None:
    load_fp32(address, begin, count, row)


def _load_half(signed: Any, address: Any, scales: Any, begin: Any, count: Any, row: Any) -> None:
    load_bf16(address, begin, count, row)


def _store_whole(
    signed: Any, state: Any, arrays: Any, begin: Any, count: Any, row: Any, random: Any, spare: Any
) -> None:
    """`arrays` are the state and its scales; `random` the words of its elements; the `spare` row may be written to."""
    store_fp32(arrays[0], begin, count, row)


def _store_half(
    signed: Any, state: Any, arrays: Any, begin: Any, count: Any, row: Any, random: Any, spare: Any
) -> None:
    target = halves_at(arrays[0])
    shift = _HALF_FIRST if state == 0 else _HALF_LATER
    for i in range(count):
        target[begin + i] = np.uint16(random_bf16(row[i], random[i], shift))


def _store_compact(
    signed: Any, state: Any, arrays: Any, begin: Any, count: Any, row: Any, random: Any, spare: Any
) -> None:
    shift = _CODE_FIRST if state == 0 else _CODE_LATER
    for i in range(count):
        spare[i] = random_edge(random[i], shift)
    encode_row(signed, arrays[0], arrays[1], begin, count, row, spare)


LOAD_STATE = {
    StateFormat.FP32: function(_load_whole),
    StateFormat.BF16: function(_load_half),
    StateFormat.COMPACT: decode_row,
}
STORE_STATE = {
    StateFormat.FP32: function(_store_whole),
    StateFormat.BF16: function(_store_half),
    StateFormat.COMPACT: function(_store_compact),
}


# Masters of 24 bits: a half, which is stored as that of 32, and a residual of 8 bits


def _load_short(half: Any, residual: Any, begin: Any, count: Any, row: Any) -> None:
    halves, rests = halves_at(half), bytes_at(residual)
    for i in range(count):
        row[i] = from_bits(join_short(u32(halves[begin + i]), u32(rests[begin + i])))


def _store_short_residual(address: Any, begin: Any, count: Any, row: Any) -> None:
    target = bytes_at(address)
    for i in range(count):
        target[begin + i] = np.uint8(short_residual(bits(row[i])))


def _shorten(count: Any, row: Any) -> None:
    for i in range(count):
        row[i] = nearest_24(canonical(row[i]))


def _shorten_at_random(count: Any, row: Any, random: Any) -> None:
    for i in range(count):
        row[i] = random_24(row[i], random[i])


load_short, store_short_residual = function(_load_short), function(_store_short_residual)
shorten, shorten_at_random = function(_shorten), function(_shorten_at_random)
