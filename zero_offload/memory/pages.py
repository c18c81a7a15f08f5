"""Virtual memory: reserve addresses, put pages under them, move pages, give them back.

The only caller of mmap, mremap, mprotect and madvise. Knows addresses and bytes, nothing of tensors.
Everything is in steps of `FRAME` (2 MiB): huge pages make O_DIRECT reads twice as fast as 4 KiB pages.
No range is inherited by forked children (a DataLoader worker must neither copy nor hold these pages).
"""

from __future__ import annotations

import ctypes
import os

from zero_offload.errors import CapacityError
from zero_offload.types import format_bytes

FRAME = 2 << 20

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x02 | 0x20 | 0x4000
_MREMAP_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4
_MADV_DONTFORK, _MADV_HUGEPAGE = 10, 14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_FAILED = ctypes.c_void_p(-1).value


def num_frames(nbytes: int) -> int:
    """Frames that `nbytes` need."""
    return -(-nbytes // FRAME)


def reserve(nbytes: int) -> int:
    """Take a range of addresses, aligned to `FRAME`, with no page under it: touching it is a fault."""
    return _map(nbytes, _PROT_NONE)


def allocate(nbytes: int) -> int:
    """Take a readable and writable range, aligned to `FRAME`; pages (huge ones, if any) come on first touch."""
    address = _map(nbytes, _PROT_READ_WRITE)
    # Both are advice: without transparent huge pages the call fails and 4 KiB pages serve.
    _libc.madvise(address, num_frames(nbytes) * FRAME, _MADV_HUGEPAGE)
    return address


def release(address: int, nbytes: int) -> None:
    """Give a whole range from `reserve` or `allocate` back to the system."""
    _check(_libc.munmap(address, num_frames(nbytes) * FRAME), "munmap", nbytes)


def protect(address: int, nbytes: int) -> None:
    """Forbid access to a range whose pages have moved away."""
    _check(_libc.mprotect(address, num_frames(nbytes) * FRAME, _PROT_NONE), "mprotect", nbytes)


def move_frame(source: int, target: int) -> None:
    """Move the page(s) of one frame to another reserved address, without a copy; `source` stays reserved."""
    moved = _libc.mremap(source, FRAME, FRAME, _MREMAP_MAYMOVE_FIXED_DONTUNMAP, target)
    if moved == _FAILED:
        raise _failure("mremap", FRAME)


def trim_heap() -> None:
    """Give back what the C library keeps of freed memory: it reuses, but does not return, blocks of some MiB."""
    if hasattr(_libc, "malloc_trim"):  # glibc's
        _libc.malloc_trim(0)


def _map(nbytes: int, protection: int) -> int:
    size = num_frames(nbytes) * FRAME
    # One frame more than asked for, so that an aligned range fits; the edges go back at once.
    raw = _libc.mmap(None, size + FRAME, protection, _MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
    if raw is None or raw == _FAILED:
        raise _failure("mmap", nbytes)
    address = -(-int(raw) // FRAME) * FRAME
    head, tail = address - raw, raw + FRAME - address
    if head:
        _libc.munmap(raw, head)
    if tail:
        _libc.munmap(address + size, tail)
    _check(_libc.madvise(address, size, _MADV_DONTFORK), "madvise", nbytes)
    return address


def _check(status: int, call: str, nbytes: int) -> None:
    if status != 0:
        raise _failure(call, nbytes)


def _failure(call: str, nbytes: int) -> CapacityError:
    reason = os.strerror(ctypes.get_errno())
    return CapacityError(
        f"{call} of {format_bytes(nbytes)} failed: {reason}. Place fewer states on the cpu tier, "
        "or raise the limits shown by 'ulimit -v' and /proc/sys/vm/max_map_count"
    )
