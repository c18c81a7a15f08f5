"""Memory at an address as numpy arrays, and numbers in it as fp32."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from zero_offload.abi import Kind
from zero_offload.kernels.fallback import numpy_words as words
from zero_offload.kernels.fallback.elements import make_elements
from zero_offload.kernels.fallback.numpy_words import Floats

BLOCK = 4096
"""Elements that the arrays between two operations have: whole blocks of codes."""

elements = make_elements(words)


def blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Where each block of [begin, end) begins, and how many elements it has."""
    for at in range(begin, end, BLOCK):
        yield at, min(BLOCK, end - at)


def load(kind: int, address: int, begin: int, count: int) -> Floats:
    """As fp32; that of fp32 is the memory itself."""
    if kind == Kind.FP32:
        return floats_at(address, begin, count)
    halves = halves_at(address, begin, count).astype(np.uint32)
    widen = elements.widen_bf16 if kind == Kind.BF16 else elements.widen_fp16
    found: Floats = words.from_bits(widen(halves))
    return found


def floats_at(address: int, begin: int, count: int) -> Floats:
    return words_at(address, begin, count).view(np.float32)


def words_at(address: int, begin: int, count: int) -> npt.NDArray[np.uint32]:
    return np.frombuffer(memoryview((ctypes.c_uint32 * count).from_address(address + 4 * begin)), np.uint32)


def halves_at(address: int, begin: int, count: int) -> npt.NDArray[np.uint16]:
    return np.frombuffer(memoryview((ctypes.c_uint16 * count).from_address(address + 2 * begin)), np.uint16)


def bytes_at(address: int, begin: int, count: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(memoryview((ctypes.c_uint8 * count).from_address(address + begin)), np.uint8)
