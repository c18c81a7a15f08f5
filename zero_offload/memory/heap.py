"""The C library's heap: gives back the holes that freed activations and small gradients leave in it.

glibc reuses freed blocks of up to 32 MiB but does not return their pages, and backward frees some of every size.
The calls: `begin` with each backward, `freed` with what it is through with.
"""

from __future__ import annotations

from zero_offload.memory.pages import trim_heap
from zero_offload.types import MIB

TRIM_BYTES = 128 * MIB
"""Bytes of parameters between two trims, each of which costs tens of ms."""
ACTIVATION_TRIM_BYTES = 64 * MIB
"""The same of activations that leave or come back: their tensors are of the sizes that glibc keeps."""


class HeapTrimmer:
    """Trims as forward, backward or whatever else frees large tensors goes on."""

    def __init__(self, interval_bytes: int | None = None) -> None:
        self._interval_bytes = interval_bytes
        self._untrimmed_bytes = 0

    def begin(self) -> None:
        self._untrimmed_bytes = 0

    def freed(self, nbytes: int) -> None:
        """`nbytes` of tensors were freed, or will be soon."""
        self._untrimmed_bytes += nbytes
        if self._untrimmed_bytes >= (self._interval_bytes or TRIM_BYTES):
            self._untrimmed_bytes = 0
            trim_heap()
