"""States in every format <-> fp32, and what is rounded at random beside them, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from zero_offload.abi import STATE_BLOCK, StateFormat
from zero_offload.kernels.fallback import numpy_words as words
from zero_offload.kernels.fallback.codec import first_bit, make_codec, make_codes
from zero_offload.kernels.fallback.elements import MAGNITUDE
from zero_offload.kernels.fallback.numpy_memory import bytes_at, elements, floats_at, halves_at
from zero_offload.kernels.fallback.numpy_words import Floats

Words = npt.NDArray[np.uint32]
codec = make_codec(words)
_codes = {signed: make_codes(words, signed=signed) for signed in (False, True)}


def random_words(key: Words, number: int, count: int) -> Words:
    """Of elements `number`, number + 1 and so on, modulo 2^32."""
    index = np.arange(count, dtype=np.uint32) + np.uint32(number & 0xFFFFFFFF)
    found: Words = codec.random_word(index, key[0], key[1])
    return found


def load_state(format: int, signed: bool, arrays: tuple[int, int], begin: int, count: int) -> Floats:
    """`arrays` are a state and its scales; `begin` starts a block."""
    address, scales = arrays
    if format == StateFormat.FP32:
        return floats_at(address, begin, count)
    found: Floats
    if format == StateFormat.BF16:
        found = words.from_bits(elements.widen_bf16(halves_at(address, begin, count).astype(np.uint32)))
        return found
    scale = _scales_at(scales, begin, count).repeat(STATE_BLOCK)[:count]
    found = _codes[signed].value_of(bytes_at(address, begin, count).astype(np.uint32), scale)
    return found


def store_state(
    format: int, signed: bool, state: int, arrays: tuple[int, int], begin: int, x: Floats, random: Words
) -> None:
    """`x` has no NaN but the canonical one; `random` are the words of its elements."""
    address, scales = arrays
    if format == StateFormat.FP32:
        floats_at(address, begin, len(x))[:] = x
    elif format == StateFormat.BF16:
        halves_at(address, begin, len(x))[:] = codec.random_bf16(x, random, first_bit(state, 16))
    else:
        edge = codec.random_edge(_in_blocks(random), first_bit(state, 12))
        store_codes(signed, address, scales, begin, x, edge)


def store_codes(signed: bool, address: int, scales: int, begin: int, x: Floats, edge: Any) -> None:
    made = _codes[signed]
    roots = made.root_of(_in_blocks(x))
    scale = made.scale_of((words.bits(roots) & MAGNITUDE).max(axis=1))
    codes = made.code_of(roots, made.inverse_of(scale)[:, np.newaxis], edge)
    bytes_at(address, begin, len(x))[:] = codes.reshape(-1)[: len(x)]
    _scales_at(scales, begin, len(x))[:] = scale


def _in_blocks(array: Any) -> Any:
    """(blocks, STATE_BLOCK), with zeros at the end, which change no scale."""
    return np.pad(array, (0, -len(array) % STATE_BLOCK)).reshape(-1, STATE_BLOCK)


def _scales_at(address: int, begin: int, count: int) -> Floats:
    return floats_at(address, begin // STATE_BLOCK, -(-count // STATE_BLOCK))


def load_short_master(half: int, residual: int, begin: int, count: int) -> Floats:
    halves, rests = halves_at(half, begin, count), bytes_at(residual, begin, count)
    found: Floats = words.from_bits(codec.join_short(halves.astype(np.uint32), rests.astype(np.uint32)))
    return found


def store_short_residual(residual: int, begin: int, p: Floats) -> None:
    """`p` are masters of 24 bits."""
    bytes_at(residual, begin, len(p))[:] = codec.short_residual(words.bits(p))
