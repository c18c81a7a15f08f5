"""Conversions of numbers, masters and states, compiled by numba at their first call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from zero_offload.kernels.fallback.codec import MIDDLE
from zero_offload.kernels.fallback.numba_memory import (
    BF16,
    BLOCK,
    FP32,
    canonical,
    join_master,
    load,
    load_fp32,
    split_half,
    split_residual,
    store_bf16,
    store_fp16,
    store_fp32,
    store_half,
)
from zero_offload.kernels.fallback.numba_states import (
    decode_row,
    encode_row,
    load_short,
    shorten,
    store_short_residual,
)
from zero_offload.kernels.fallback.numba_words import from_bits, function, halves_at, u32, words_at


@functools.cache
def convert_of(sources: str) -> Callable[..., Any]:
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
def split_of(sources: str) -> Callable[..., Any]:
    def split(master: Any, half: Any, residual: Any, begin: Any, end: Any) -> None:
        source, halves, rests = words_at(master), halves_at(half), halves_at(residual)
        for i in range(begin, end):
            x = from_bits(source[i])
            halves[i] = np.uint16(split_half(x))
            rests[i] = np.uint16(split_residual(x))
        _ = sources

    return function(split, cache=True)


@functools.cache
def join_of(sources: str) -> Callable[..., Any]:
    def join(half: Any, residual: Any, master: Any, begin: Any, end: Any) -> None:
        halves, rests, target = halves_at(half), halves_at(residual), words_at(master)
        for i in range(begin, end):
            target[i] = join_master(u32(halves[i]), u32(rests[i]))
        _ = sources

    return function(join, cache=True)


@functools.cache
def short_split_of(sources: str) -> Callable[..., Any]:
    def short_split(master: Any, half: Any, residual: Any, begin: Any, end: Any) -> None:
        row = np.empty(BLOCK, np.float32)
        for at in range(begin, end, BLOCK):
            count = min(end - at, BLOCK)
            load_fp32(master, at, count, row)
            shorten(count, row)
            store_half(half, at, count, row)
            store_short_residual(residual, at, count, row)
        _ = sources

    return function(short_split, cache=True)


@functools.cache
def short_join_of(sources: str) -> Callable[..., Any]:
    def short_join(half: Any, residual: Any, master: Any, begin: Any, end: Any) -> None:
        row = np.empty(BLOCK, np.float32)
        for at in range(begin, end, BLOCK):
            count = min(end - at, BLOCK)
            load_short(half, residual, at, count, row)
            store_fp32(master, at, count, row)
        _ = sources

    return function(short_join, cache=True)


@functools.cache
def decode_of(sources: str) -> Callable[..., Any]:
    def decode(signed: Any, arrays: Any, begin: Any, end: Any) -> None:
        codes, scales, fp32 = arrays
        row = np.empty(BLOCK, np.float32)
        for at in range(begin, end, BLOCK):
            count = min(end - at, BLOCK)
            decode_row(signed, codes, scales, at, count, row)
            for i in range(count):
                row[i] = canonical(row[i])
            store_fp32(fp32, at, count, row)
        _ = sources

    return function(decode, cache=True)


@functools.cache
def encode_of(sources: str) -> Callable[..., Any]:
    def encode(signed: Any, arrays: Any, begin: Any, end: Any) -> None:
        codes, scales, fp32 = arrays
        row, edges = np.empty(BLOCK, np.float32), np.full(BLOCK, MIDDLE)
        for at in range(begin, end, BLOCK):
            count = min(end - at, BLOCK)
            load_fp32(fp32, at, count, row)
            encode_row(signed, codes, scales, at, count, row, edges)
        _ = sources

    return function(encode, cache=True)
