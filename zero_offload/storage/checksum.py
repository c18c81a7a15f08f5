"""crc32c of memory, natively or, without the native library, compiled by numba: the same numbers.

The polynomial of Castagnoli, as iSCSI (RFC 3720) and the processors' instruction use it; `seed` is the register's
start, so that equal bytes in other places have other checksums.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_offload import native

_POLYNOMIAL = 0x82F63B78
_SLICES = 8


def crc32c(seed: int, address: int, nbytes: int) -> int:
    """The checksum of `nbytes` at `address`, from `seed` on."""
    if native.available():
        return native.crc32c(seed, address, nbytes)
    return crc32c_numba(seed, address, nbytes)


def crc32c_numba(seed: int, address: int, nbytes: int) -> int:
    """The same without the native library."""
    if nbytes == 0:
        return seed
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    return int(_kernel()(np.uint32(seed), memory, _tables()))


@functools.cache
def _tables() -> npt.NDArray[np.uint32]:
    """(8, 256): what a byte adds to the register, eight to one positions before the end of a word of eight."""
    tables = np.zeros((_SLICES, 256), dtype=np.uint32)
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        tables[0, byte] = value
    for row in range(1, _SLICES):
        tables[row] = (tables[row - 1] >> 8) ^ tables[0][tables[row - 1] & 0xFF]
    return tables


@functools.cache
def _kernel() -> Callable[..., Any]:
    """Compiled at first use: importing numba takes longer than all the rest."""
    import numba

    def run(seed: Any, memory: Any, tables: Any) -> Any:
        register = ~seed & np.uint32(0xFFFFFFFF)
        words = memory.size // 8
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
        for i in range(8 * words, memory.size):
            register = tables[0, (register ^ memory[i]) & 0xFF] ^ (register >> np.uint32(8))
        return ~register & np.uint32(0xFFFFFFFF)

    compiled: Callable[..., Any] = numba.njit(nogil=True, cache=False)(run)
    return compiled
