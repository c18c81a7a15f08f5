"""Numbers in memory <-> rows of fp32, compiled by numba: what its passes load and store."""

from __future__ import annotations

from typing import Any

import numpy as np

from zero_offload.abi import Kind
from zero_offload.kernels.fallback import numba_words as words
from zero_offload.kernels.fallback.elements import make_elements
from zero_offload.kernels.fallback.numba_words import bits, from_bits, function, halves_at, u32, words_at

BLOCK = 1024
"""Elements of a row; six rows are 24 KiB, which the first-level cache holds. Whole blocks of codes, and a multiple of
the sums' 16 lanes."""
FP32, BF16 = int(Kind.FP32), int(Kind.BF16)

_made = make_elements(words)
canonical, half_of, join_master = _made.canonical, _made.half_of, _made.join_master
widen_bf16, round_bf16 = _made.widen_bf16, _made.round_bf16
widen_fp16, narrow_fp16 = _made.widen_fp16, _made.narrow_fp16
split_half, split_residual = _made.split_half, _made.split_residual


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
