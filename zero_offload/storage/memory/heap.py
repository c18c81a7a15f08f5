"""The C library's heap: gives back the holes in it where memory is short, and keeps one where it is not.

glibc reuses freed blocks of up to 32 MiB but does not return their pages, and backward frees some of every size. Where
units leave memory, `HeapTrimmer` returns them (`begin` with each backward, `freed` with what it is through with).
Larger blocks are mapped anew each time, unless a hole takes them. Where all is in memory, `HeapHole` keeps one (`begin`
with each step; it goes with the object).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import weakref
from collections import deque
from collections.abc import Callable

from zero_offload.base.types import MIB

TRIM_BYTES = 128 * MIB
"""Bytes of parameters between two trims, each of which costs tens of ms."""
ACTIVATION_TRIM_BYTES = 64 * MIB
"""Bytes of activations, out or back, between two trims: their tensors are of the sizes that glibc keeps."""
ROOM_MIN_BYTES = 64 * MIB
"""Less than that of new pages in a step is not worth a hole: some 10 ms."""
BLOCK_BYTES = 16 * MIB
"""The size of the blocks of a hole."""
_HEADER_BYTES = 16
"""Bytes of glibc's header before each block."""
_STRAY_BLOCKS_MAX = 64
"""Blocks that go into holes that are there already: after so many the heap is not glibc's."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 32 * MIB
"""Where glibc's own rule ends: larger blocks have pages of their own, and twice as much may be free at the heap's end.
"""

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_libc.free.restype = None
_libc.free.argtypes = [ctypes.c_void_p]


def trim_heap() -> None:
    """Give back what the C library keeps of freed memory: it reuses, but does not return, blocks of some MiB."""
    if hasattr(_libc, "malloc_trim"):  # glibc's
        _libc.malloc_trim(0)


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


class HeapHole:
    """A hole in the heap that stays, for the large tensors that come and go with each step: logits, their gradients.

    A program that holds its gradients to the end of a step has such holes where they were. A hole is addresses: it
    takes memory as far as something was in it, and then keeps it. As a rule, half of what the system gives anew in a
    step is there at once. So the hole is half of what the lesser of the last two steps took anew. It is larger where
    the gradients that a step leaves in the heap are more. If steps still take more anew than the hole's size, it grows
    by so much.
    """

    def __init__(self, grad_bytes: int, free_bytes: Callable[[], int]) -> None:
        """`free_bytes` tells what may be taken; a hole is a quarter of it at most."""
        self._grad_bytes = grad_bytes
        self._free_bytes = free_bytes
        self.nbytes = 0
        self._num_faults: int | None = None
        self._taken: deque[int] = deque(maxlen=2)
        """Bytes that the system gave in the last steps."""
        self._is_possible = True
        self._pin: weakref.finalize[[int], HeapHole] | None = None
        """Frees the block behind the hole, which keeps it from being the heap's end, and so from being given back."""

    def begin(self) -> None:
        """A step begins."""
        num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        if self._num_faults is not None:
            self._taken.append((num_faults - self._num_faults) * mmap.PAGESIZE)
        self._num_faults = num_faults
        if self._is_possible and len(self._taken) == 2 and min(self._taken) > max(ROOM_MIN_BYTES, self.nbytes):
            taken = min(self._taken)
            wanted = self.nbytes + taken if self.nbytes else min(taken, max(self._grad_bytes, taken // 2))
            wanted = min(wanted, self._free_bytes() // 4)
            if wanted > self.nbytes:
                self._make(wanted)

    def _make(self, nbytes: int) -> None:
        self._taken.clear()  # the next step takes the hole's own pages
        if self._pin is not None:
            self._pin()
        pin = _make_hole(nbytes)
        self._is_possible = pin is not None
        if pin is not None:
            self.nbytes = nbytes
            self._pin = weakref.finalize(self, _libc.free, pin)
            self._pin.atexit = False


def _make_hole(nbytes: int) -> int | None:
    """Make a hole of `nbytes` in the heap; returns the block behind it, or None if this heap takes none."""
    if not hasattr(_libc, "mallopt") or _is_told_what_to_map():
        return None
    # From a hole that is made now, blocks are taken as they are once the program has freed one of that size.
    _libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    _libc.mallopt(_M_TRIM_THRESHOLD, 2 * _MMAP_THRESHOLD_BYTES)
    blocks: list[int] = []
    run_bytes = 0
    for _ in range(-(-nbytes // BLOCK_BYTES) + 1 + _STRAY_BLOCKS_MAX):
        block = _libc.malloc(BLOCK_BYTES)
        if block is None:
            break
        follows = bool(blocks) and block == blocks[-1] + BLOCK_BYTES + _HEADER_BYTES
        run_bytes = run_bytes + BLOCK_BYTES if follows else 0
        blocks.append(block)
        if run_bytes >= nbytes:
            break
    pin = blocks.pop() if run_bytes >= nbytes else None
    for block in blocks:
        _libc.free(block)
    return pin


def _is_told_what_to_map() -> bool:
    """True if the program's user has set which blocks have pages of their own: that stays as it is."""
    return "MALLOC_MMAP_THRESHOLD_" in os.environ or "malloc.mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
