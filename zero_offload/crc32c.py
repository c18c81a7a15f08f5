"""crc32c of memory without the native library: compiled by numba, or in numpy where that is not to be had either.

The polynomial of Castagnoli, as iSCSI (RFC 3720) and the processors' instruction use it; `seed` is the register's
start, so that equal bytes in other places have other checksums. A *register* below is 32 bits of it between two bytes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78
_SLICES = 8
_LANES_MAX = 1 << 13
_LANE_BYTES_MIN = 256

Registers = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]


def of_memory(seed: int, address: int, nbytes: int) -> int:
    """The checksum of `nbytes` at `address`, from `seed` on. The first call compiles for about a second."""
    return _run(_kernel(), seed, address, nbytes)


def of_memory_numpy(seed: int, address: int, nbytes: int) -> int:
    """The same without numba, at a tenth of the speed."""
    return _run(_register_after, seed, address, nbytes)


def _run(kernel: Callable[..., Any], seed: int, address: int, nbytes: int) -> int:
    if nbytes == 0:
        return seed
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    return int(kernel(np.uint32(seed ^ 0xFFFFFFFF), memory, _tables())) ^ 0xFFFFFFFF


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
    try:
        import numba
    except Exception:  # a numba that does not fit the numpy beside it raises what it likes
        return _register_after

    def run(register: Any, memory: Any, tables: Any) -> Any:
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
        return register & np.uint32(0xFFFFFFFF)

    compiled: Callable[..., Any] = numba.njit(nogil=True, cache=False)(run)
    return compiled


# In numpy: a checksum is linear, so that parts are computed side by side, each from 0 on, and joined.


def _register_after(register: np.uint32, memory: Bytes, tables: npt.NDArray[np.uint32]) -> int:
    lanes = 1 << min((memory.size // _LANE_BYTES_MIN).bit_length(), _LANES_MAX.bit_length() - 1)
    lane_bytes = -(-memory.size // (lanes * 8)) * 8
    padded = np.zeros(lanes * lane_bytes, dtype=np.uint8)  # zeros in front leave a register of 0 as it is
    padded[padded.size - memory.size :] = memory
    # (words of four bytes, lanes): each step reads one row
    words = np.ascontiguousarray(padded.view("<u4").reshape(lanes, lane_bytes // 4).T)
    parts = np.zeros(lanes, dtype=np.uint32)
    for at in range(0, len(words), 2):
        low, high = parts ^ words[at], words[at + 1]
        parts = tables[7][low & 0xFF] ^ tables[3][high & 0xFF]
        for byte in range(1, 4):
            parts ^= tables[7 - byte][(low >> 8 * byte) & 0xFF] ^ tables[3 - byte][(high >> 8 * byte) & 0xFF]
    while len(parts) > 1:
        parts = _after_zeros(parts[::2], lane_bytes) ^ parts[1::2]
        lane_bytes *= 2
    start = np.array([register], dtype=np.uint32)
    return int(_after_zeros(start, memory.size)[0] ^ parts[0])


def _after_zeros(registers: Registers, nbytes: int) -> Registers:
    """What each register is after so many bytes of 0."""
    return _apply(_images_after(nbytes), registers)


def _apply(images: Registers, registers: Registers) -> Registers:
    """A linear map, (32,) of what it makes of each bit, on registers."""
    found = np.zeros_like(registers)
    for bit, image in enumerate(images):
        found ^= np.where(registers >> np.uint32(bit) & np.uint32(1), image, np.uint32(0))
    return found


@functools.lru_cache(maxsize=256)
def _images_after(nbytes: int) -> Registers:
    """(32,): what `nbytes` bytes of 0 make of each bit, by doubling."""
    if nbytes == 0:
        bits: Registers = np.uint32(1) << np.arange(32, dtype=np.uint32)
        return bits
    if nbytes % 2:
        images = _images_after(nbytes - 1)
        longer: Registers = (images >> np.uint32(8)) ^ _tables()[0][images & np.uint32(0xFF)]
        return longer
    half = _images_after(nbytes // 2)
    return _apply(half, half)
