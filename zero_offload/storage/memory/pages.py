"""Virtual memory: reserve addresses, put pages under them, move pages, give them back.

The only caller of mremap, mprotect and madvise. Knows addresses and bytes, nothing of tensors.
Addresses are in steps of `FRAME` (2 MiB), a huge page; what is allocated takes no memory behind its end.
No range is inherited by forked children (a DataLoader worker must neither copy nor hold these pages).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from zero_offload.base.errors import CapacityError
from zero_offload.base.types import FRAME as FRAME
from zero_offload.base.types import format_bytes

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x02 | 0x20 | 0x4000
_MAP_PRIVATE_ANONYMOUS_HUGETLB = 0x02 | 0x20 | 0x40000 | 21 << 26  # of 2 MiB
MREMAP_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 4, 10, 14, 15

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
_munmap_and_more = ctypes.CDLL(None)["munmap"]
_munmap_and_more.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.py_object]  # the last is not looked at
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

TRANSPARENT_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
_MPOL_PREFERRED, _MPOL_INTERLEAVE = 1, 3
_NODES = Path("/sys/devices/system/node")

_FAILED = ctypes.c_void_p(-1).value


def num_frames(nbytes: int) -> int:
    """Frames that `nbytes` need."""
    return -(-nbytes // FRAME)


def reserve(nbytes: int) -> int:
    """Take a range of addresses, aligned to `FRAME`, with no page under it: touching it is a fault."""
    return _map(nbytes, _PROT_NONE)


def allocate(nbytes: int) -> int:
    """Take a readable and writable range, aligned to `FRAME`; pages (huge ones, if any) come on first touch."""
    if not _has_transparent_huge_pages() and (reserved := _map_reserved_huge_pages(nbytes)) is not None:
        return reserved
    address, whole = _map(nbytes, _PROT_READ_WRITE), nbytes // FRAME * FRAME
    # Both are advice: without transparent huge pages the calls fail and 4 KiB pages serve.
    if whole:
        _libc.madvise(address, whole, _MADV_HUGEPAGE)
    if whole < nbytes:  # a huge page would take more than is asked for
        _libc.madvise(address + whole, FRAME, _MADV_NOHUGEPAGE)
    return address


def allocate_movable(count: int) -> int:
    """So many frames, on pages that `move_frame` can move, which those of vm.nr_hugepages are not."""
    address = _map(count * FRAME, _PROT_READ_WRITE)
    _libc.madvise(address, count * FRAME, _MADV_HUGEPAGE)
    return address


def taken_bytes(nbytes: int) -> int:
    """What a range that `allocate` gives takes of the host's memory."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def prefer_node(address: int, nbytes: int, node: int) -> None:
    """Ask for pages of a NUMA node, as long as it has any; before they are touched."""
    _ask_for_nodes(address, nbytes, _MPOL_PREFERRED, [node])


def spread_over_nodes(address: int, nbytes: int, nodes: Sequence[int]) -> None:
    """Ask for pages of these NUMA nodes in turn; before they are touched.

    What threads of several nodes work on, one behind the other on the same ranges and not bound to their cores, is near
    to none of them: spread, it has the bandwidth of all.
    """
    _ask_for_nodes(address, nbytes, _MPOL_INTERLEAVE, nodes)


def _ask_for_nodes(address: int, nbytes: int, policy: int, nodes: Sequence[int]) -> None:
    mask = ctypes.c_ulong(sum(1 << node for node in nodes))
    if _SYS_MBIND is not None:
        # Advice: a kernel without NUMA, or a sandbox, refuses, and any node serves.
        _libc.syscall(
            ctypes.c_long(_SYS_MBIND),
            ctypes.c_void_p(address),
            ctypes.c_ulong(num_frames(nbytes) * FRAME),
            ctypes.c_int(policy),
            ctypes.byref(mask),
            ctypes.c_ulong(8 * ctypes.sizeof(mask)),
            ctypes.c_uint(0),
        )


@functools.cache
def nodes_of_threads(root: Path = _NODES) -> tuple[int, ...]:
    """NUMA nodes on whose processors this process may run; none where the system does not say."""
    cores = os.sched_getaffinity(0)
    try:
        lists = {int(path.parent.name[4:]): path.read_text() for path in root.glob("node[0-9]*/cpulist")}
        return tuple(sorted(node for node, text in lists.items() if cores & set(_listed(text))))
    except (OSError, ValueError):
        return ()


def _listed(text: str) -> Iterator[int]:
    """The numbers of a list such as "0-3,8"."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def release(address: int, nbytes: int) -> None:
    """Give a whole range from `reserve` or `allocate` back to the system."""
    _check(_libc.munmap(address, num_frames(nbytes) * FRAME), "munmap", nbytes)


def releaser(address: int, nbytes: int) -> Callable[[object], object]:
    """`release` as the callback of a weak reference, in C from end to end.

    It takes milliseconds, and Python drops what a signal's handler raises in a finalizer: a Ctrl-C would be lost.
    """
    return functools.partial(_munmap_and_more, address, num_frames(nbytes) * FRAME)


def protect(address: int, nbytes: int) -> None:
    """Forbid access to a range whose pages have moved away."""
    if _libc.mprotect(address, -(-nbytes // FRAME) * FRAME, _PROT_NONE) != 0:
        raise _failure("mprotect", nbytes)


def move_frame(source: int, target: int) -> None:
    """Move the page(s) of one frame to another reserved address, without a copy; `source` stays reserved.

    Where the system cannot (`moves_pages`), `source` gives its pages back, with what they hold, and `target` gets new
    ones on first touch: as little memory, and the time to fill it with zeros.
    """
    if moves_pages():
        if _libc.mremap(source, FRAME, FRAME, MREMAP_MAYMOVE_FIXED_DONTUNMAP, target) == _FAILED:
            raise _failure("mremap", FRAME)
    else:
        _check(_libc.mprotect(target, FRAME, _PROT_READ_WRITE), "mprotect", FRAME)
        _libc.madvise(target, FRAME, _MADV_HUGEPAGE)
        _check(_libc.madvise(source, FRAME, _MADV_DONTNEED), "madvise", FRAME)


@functools.cache
def moves_pages() -> bool:
    """Whether the system moves pages and leaves their addresses reserved: Linux does from 5.7 on, gVisor does not."""
    source = _map(FRAME, _PROT_READ_WRITE)
    try:
        target = _map(FRAME, _PROT_NONE)
        try:
            size = mmap.PAGESIZE
            if _libc.mremap(source, size, size, MREMAP_MAYMOVE_FIXED_DONTUNMAP, target) != _FAILED:
                return True
            if ctypes.get_errno() == errno.ENOMEM:  # of now, not of the system
                raise _failure("mremap", size)
            return False
        finally:
            release(target, FRAME)
    finally:
        release(source, FRAME)


def _has_transparent_huge_pages() -> bool:
    try:
        return "[never]" not in TRANSPARENT_HUGE_PAGES.read_text()
    except OSError:
        return False


def _map_reserved_huge_pages(nbytes: int) -> int | None:
    """A range on pages that the administrator has set aside (vm.nr_hugepages); None where too few are left."""
    size = num_frames(nbytes) * FRAME
    raw = _libc.mmap(None, size, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS_HUGETLB, -1, 0)
    if raw is None or raw == _FAILED:
        return None
    _check(_libc.madvise(raw, size, _MADV_DONTFORK), "madvise", nbytes)
    return int(raw)


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
