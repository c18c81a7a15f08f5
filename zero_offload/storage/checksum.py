"""crc32c of memory, natively or, without the native library, by its portable twin: the same numbers."""

from __future__ import annotations

from zero_offload import crc32c as portable
from zero_offload import native


def crc32c(seed: int, address: int, nbytes: int) -> int:
    """The checksum of `nbytes` at `address`, from `seed` on."""
    return native.crc32c(seed, address, nbytes) if native.available() else portable.of_memory(seed, address, nbytes)
