"""The C library's heap: gives back the holes that freed activations and small gradients leave in it.

glibc reuses freed blocks of up to 32 MiB but does not return their pages, and backward frees some of every size.
The calls: `begin` with each backward, `freed` with what it is through with.
"""

from __future__ import annotations

import os
from pathlib import Path

from zero_offload.memory.pages import trim_heap
from zero_offload.types import MIB

TRIM_BYTES = 128 * MIB
"""Bytes of parameters between two trims, each of which costs tens of ms."""
ACTIVATION_LOOK_BYTES, ACTIVATION_GROWTH_BYTES = 16 * MIB, 128 * MIB
"""Of activations that leave or come back between two looks, and what the process may grow by until the heap is trimmed:
what is given back has to be taken again, page by page."""


class HeapTrimmer:
    """Trims as forward, backward or whatever else frees large tensors goes on."""

    def __init__(self, interval_bytes: int | None = None, growth_bytes: int = 0) -> None:
        """Looks whenever `interval_bytes` were freed; trims if the process has grown by `growth_bytes` since."""
        self._interval_bytes = interval_bytes
        self._growth_bytes = growth_bytes
        self._least_bytes: int | None = None
        """Resident memory when it was least, since the last trim."""
        self._untrimmed_bytes = 0

    def begin(self) -> None:
        self._untrimmed_bytes = 0

    def freed(self, nbytes: int) -> None:
        """`nbytes` of tensors were freed, or will be soon."""
        self._untrimmed_bytes += nbytes
        if self._untrimmed_bytes >= (self._interval_bytes or TRIM_BYTES):
            self._untrimmed_bytes = 0
            if self._has_grown():
                trim_heap()
                self._least_bytes = None

    def _has_grown(self) -> bool:
        if self._growth_bytes == 0:
            return True
        resident = _resident_bytes()
        self._least_bytes = min(self._least_bytes or resident, resident)
        return resident - self._least_bytes >= self._growth_bytes


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
