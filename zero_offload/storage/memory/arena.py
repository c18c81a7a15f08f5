"""All host memory this package takes, counted: permanent regions, and frames that move between buffers.

Owns every page, and alone calls mremap, mprotect and madvise. Two ways to get memory: `Arena.allocate` gives a
permanent `Region` (a shard that rests in CPU memory, gradients, staging). `Arena.lease_frames` gives 2 MiB frames.
`MovableBuffer.attach` puts them under a reserved address range and `detach` takes them back. So any unit can use any
free frame: no fragmentation, no copy, no growth. A region is returned to the system when the last tensor that views it
dies.

Both first compare with what is left (`Arena.look`): where memory is short, the kernel kills a process without a word.

Addresses are in steps of `FRAME` (2 MiB), a huge page; what is allocated takes no memory behind its end. No range is
inherited by forked children: a DataLoader worker must neither copy nor hold these pages.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import mmap
import os
import platform
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from zero_offload.base.checks import DEAR_CHECKS
from zero_offload.base.errors import CapacityError
from zero_offload.base.types import FRAME as FRAME
from zero_offload.base.types import MIB, format_bytes
from zero_offload.hardware.probe import least_free

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
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

LOOK_BYTES = 16 * MIB
"""So much may be taken between two looks at what is left. A look takes some 0.5 ms, filling so much with zeros 4."""
SPARE_BYTES = 256 * MIB
"""Memory beyond the plan leaves this much to the program and the system."""

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
    """Bytes of the host's memory that a range from `allocate` takes."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def untouched_bytes(address: int, nbytes: int) -> int:
    """Of a range that `allocate` gave, what no one has written or read: the system counts it as free."""
    pages = bytearray(-(-nbytes // mmap.PAGESIZE))
    if _libc.mincore(address, nbytes, (ctypes.c_char * len(pages)).from_buffer(pages)) != 0:
        return 0
    return pages.count(0) * mmap.PAGESIZE


def prefer_node(address: int, nbytes: int, node: int) -> None:
    """Ask for pages of a NUMA node, as long as it has any; before they are touched."""
    _ask_for_nodes(address, nbytes, _MPOL_PREFERRED, [node])


def spread_over_nodes(address: int, nbytes: int, nodes: Sequence[int]) -> None:
    """Ask for pages of these NUMA nodes in turn; before they are touched.

    Threads of several nodes work on the same ranges, one behind the other, and are not bound to their cores. So such
    memory is near to none of them; spread, it has the bandwidth of all.
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


def protect(address: int, nbytes: int, protection: int = _PROT_NONE) -> None:
    """Forbid access to a range whose pages have moved away, or allow it."""
    if _libc.mprotect(address, -(-nbytes // FRAME) * FRAME, protection) != 0:
        raise _failure("mprotect", nbytes)


def move_frame(source: int, target: int) -> None:
    """Move the page(s) of one frame to another reserved address, without a copy; `source` stays reserved.

    Where the system cannot (`moves_pages`), `source` gives its pages back, with what they hold, and `target` gets new
    ones on first touch. That takes no more memory, but the time to fill it with zeros.
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
    """True if the system moves pages and leaves their addresses reserved: Linux does from 5.7 on, gVisor does not."""
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


@dataclass(frozen=True)
class Region:
    """A range of host memory and the object whose life keeps it."""

    address: int
    nbytes: int
    owner: ctypes.Array[ctypes.c_char] = field(repr=False)

    def tensor(self, dtype: torch.dtype, numel: int, offset_bytes: int = 0) -> torch.Tensor:
        """View (numel,) `dtype` of this memory, host, no copy; keeps the region alive."""
        return torch.frombuffer(self.owner, dtype=dtype, count=numel, offset=offset_bytes)

    def part(self, begin: int, nbytes: int) -> Region:
        """`nbytes` of this memory from byte `begin` on; keeps the whole alive."""
        return Region(self.address + begin, nbytes, (ctypes.c_char * nbytes).from_buffer(self.owner, begin))


class _Viewed:
    """Regions that still have views.

    None of them tells Python when it goes: what a signal's handler raises in a finalizer is dropped, and a Ctrl-C with
    it. The dead are forgotten when the next one comes.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._regions: dict[int, tuple[weakref.ref[ctypes.Array[ctypes.c_char]], int]] = {}

    def add(
        self, owner: ctypes.Array[ctypes.c_char], nbytes: int, end: Callable[[object], object] | None = None
    ) -> None:
        """`end`, which must not be Python's, is called when the last view is gone."""
        for number in [number for number, (life, _) in self._regions.copy().items() if life() is None]:
            self._regions.pop(number, None)
        self._regions[next(self._numbers)] = weakref.ref(owner, end), nbytes

    @property
    def nbytes(self) -> int:
        return sum(nbytes for life, nbytes in self._regions.copy().values() if life() is not None)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Address and bytes of each; it stays mapped until the next one is asked for."""
        for life, nbytes in self._regions.copy().values():
            if (owner := life()) is not None:
                yield ctypes.addressof(owner), nbytes

    def clear(self) -> None:
        """Drop the record of all pages, in a forked child that has none of them: other memory at their addresses must
        stay mapped."""
        self._regions.clear()


_mapped = _Viewed()
os.register_at_fork(after_in_child=_mapped.clear)


def _region(address: int, nbytes: int) -> Region:
    size = num_frames(nbytes) * FRAME
    owner = (ctypes.c_char * size).from_address(address)
    # Tensors hold `owner` through the buffer protocol, so its end comes after the last of them is gone.
    _mapped.add(owner, size, releaser(address, size))
    return Region(address, nbytes, owner)


class Need(NamedTuple):
    """The use of memory, as the error of a failed allocation names it."""

    what: str = "a buffer"
    advice: str = (
        'Place less on the cpu tier: params=, grads=, optimizer= and activations= take "nvme", or "device" where a GPU '
        'has room; precision=zo.Precision(states="compact") takes fewer bytes'
    )
    is_planned: bool = True
    """True if the plan counts it."""
    is_bounded: bool = True
    """False for what `cpu_memory` does not bound: activations."""
    fills_late: bool = False
    """True of states, which nothing writes before the first update."""


A_BUFFER = Need()
_FRAMES = Need("units on their way", "Lower device_memory=, or name smaller units with units=")


class Pinner(Protocol):
    """Registers host memory with a device; for a CPU there is nothing to do."""

    numa_node: int | None
    """The node of host memory that is nearest to the device, if it is known."""

    def pin(self, address: int, nbytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...


class Lease:
    """The frames that a buffer has of an arena; it may claim those that are kept. This list is what counts: where a
    Ctrl-C breaks an exchange off, the arena finds by it which frames are free."""

    __slots__ = ("__weakref__", "claims", "frames")

    def __init__(self, claims: bool) -> None:
        self.claims = claims
        self.frames: list[int] | None = None
        """Their addresses; None where it has none."""


class Arena:
    """The host memory of one offloaded model."""

    def __init__(
        self,
        frame_limit: int,
        frame_limit_max: int | None = None,
        pinner: Pinner | None = None,
        *,
        num_kept: int = 0,
        most_bytes: int | None = None,
    ) -> None:
        """`frame_limit_max` is how far `raise_limit` may go; None is not at all. `pinner` registers regions.

        Of the limit `num_kept` frames are for claims that the rest cannot serve. Regions that no plan counts are taken
        up to `most_bytes` of all.
        """
        self._pinner = pinner
        self._most_bytes = most_bytes
        self._unlooked_bytes = 0
        """Taken since the last look at what is left."""
        self._num_kept = num_kept
        self.claimed_frames = 0
        """Frames that are claimed now."""
        self.frame_limit = frame_limit
        """Frames that may be taken from the system."""
        self.free_frames = 0
        """Frames that `lease_frames` can give now without a claim."""
        self.kept_frames = 0
        """Frames that it can give beside those to claims."""
        self._frame_limit_max = frame_limit if frame_limit_max is None else frame_limit_max
        self._blocks: list[Region] = []
        self._leases: list[weakref.ref[Lease]] = []
        self._free: list[int] = []
        self._num_frames = 0
        self._count()
        self._allocated, self._unbounded, self._filled_late = _Viewed(), _Viewed(), _Viewed()
        self.num_mappings = 0
        """Ranges of addresses asked of the system so far, reserved ones included. Frames that move ask for none."""
        self.num_registrations = 0
        """Those of them that the pinner was given. Both stand still once training has settled."""

    def allocate(self, nbytes: int, need: Need = A_BUFFER, *, replaced_bytes: int = 0) -> Region:
        """Take memory for good: zero-filled, aligned to 2 MiB. Raises CapacityError, and has taken nothing, where less
        is left. `replaced_bytes` of what is taken now go at once."""
        if self._most_bytes is not None and need.is_bounded and not need.is_planned:
            self._check_budget(self._most_bytes, nbytes, need, replaced_bytes)
        self.look(nbytes, need)
        region, taken = self._place(allocate(nbytes), nbytes), taken_bytes(nbytes)
        self._allocated.add(region.owner, taken)
        if not need.is_bounded:
            self._unbounded.add(region.owner, taken)
        if need.fills_late and self._pinner is None:
            self._filled_late.add(region.owner, taken)
        if self._pinner is not None:
            # Runs before the pages go: what was hung on an object last runs first.
            weakref.finalize(region.owner, self._pinner.unpin, region.address).atexit = False
            self._pinner.pin(region.address, taken)
            self.num_registrations += 1
        return region

    @property
    def taken(self) -> tuple[int, int]:
        """Mappings and registrations so far, for `zo.stats`."""
        return self.num_mappings, self.num_registrations

    def reserve(self, nbytes: int) -> Region:
        """Addresses without memory, aligned to 2 MiB."""
        self.num_mappings += 1
        return _region(reserve(nbytes), nbytes)

    def array(self, dtype: torch.dtype, numel: int, need: Need = A_BUFFER, *, replaced_bytes: int = 0) -> torch.Tensor:
        """(numel,) zeros on the host, in memory of their own; as `allocate`."""
        return self.allocate(numel * dtype.itemsize, need, replaced_bytes=replaced_bytes).tensor(dtype, numel)

    def _check_budget(self, most: int, nbytes: int, need: Need, replaced_bytes: int) -> None:
        then = self._allocated.nbytes - self._unbounded.nbytes + taken_bytes(nbytes) - replaced_bytes
        if then > most:
            raise CapacityError(
                f"{need.what}: with {format_bytes(nbytes)} more the cpu tier takes {format_bytes(then)}, and "
                f"cpu_memory= allows {format_bytes(most)}. Raise it if the machine has more. {need.advice}"
            )

    def look(self, nbytes: int, need: Need) -> None:
        """Raise CapacityError where the system or its groups have less left. They count as free what states have taken
        and nothing has filled."""
        self._unlooked_bytes += nbytes
        if self._unlooked_bytes < LOOK_BYTES:
            return
        try:
            left = least_free()
        except OSError:  # as many files are open as may be, and the check can wait
            return
        self._unlooked_bytes = promised = 0
        spare = 0 if need.is_planned else SPARE_BYTES
        if nbytes + self._filled_late.nbytes + spare > left.free_bytes:
            promised = sum(untouched_bytes(*each) for each in self._filled_late.ranges())
        if nbytes + promised + spare > left.free_bytes:
            beside = f", beside {format_bytes(promised)} for states that are not filled yet" if promised else ""
            stays = f", and {format_bytes(spare)} are to stay free" if spare else ""
            raise CapacityError(
                f"{need.what}: {format_bytes(nbytes)} of CPU memory are needed{beside}, "
                f"{format_bytes(left.free_bytes)} are left ({left.source}){stays}. {need.advice}"
            )

    @property
    def allocated_bytes(self) -> int:
        """Bytes in regions that are still viewed, in whole pages."""
        return self._allocated.nbytes

    def keep(self, count: int) -> None:
        """Keep `count` frames of the limit for claims from now on, claimed ones among them."""
        self._num_kept = count
        self._count()

    def raise_limit(self, count: int, *, claimed: bool = False) -> bool:
        """Allow `count` frames more; False when that would exceed the budget.

        First those that are kept, unless they are `claimed`: then they are taken anyway, and come back.
        """
        spared = 0 if claimed else min(count, self.kept_frames)
        if self.frame_limit + count - spared > self._frame_limit_max:
            return False
        self._num_kept -= spared
        self.frame_limit += count - spared
        self._count()
        return True

    def widen(self, chosen: int, most: int, kept: int) -> None:
        """Add so many frames to the limit, to how far it may go, and to those that are kept."""
        self.frame_limit += chosen
        self._frame_limit_max += most
        self._num_kept += kept
        self._count()

    @property
    def frame_bytes(self) -> int:
        """Bytes in frames, leased or free."""
        return self._num_frames * FRAME

    def lease(self, *, claims: bool = False) -> Lease:
        """For a buffer; without frames."""
        lease = Lease(claims)
        self._leases = [*(each for each in self._leases if each() is not None), weakref.ref(lease)]
        return lease

    def lease_frames(self, count: int, lease: Lease) -> bool:
        """Give `count` frames to a lease that has none. False, and nothing given, when the budget is used up."""
        assert lease.frames is None
        if count > self.free_frames + self.kept_frames * lease.claims:
            return False
        try:
            while len(self._free) < count:
                self._grow(count - len(self._free))
            left = len(self._free) - count
            lease.frames = self._free[left:]
            del self._free[left:]
            self.claimed_frames += count * lease.claims
            self._count()
        except BaseException:
            self._recount()
            raise
        return True

    def release_frames(self, lease: Lease) -> None:
        """Take a lease's frames back."""
        assert lease.frames is not None
        try:
            frames, lease.frames = lease.frames, None
            self._free.extend(frames)
            self.claimed_frames -= len(frames) * lease.claims
            self._count()
        except BaseException:
            self._recount()
            raise
        assert len(self._free) <= self._num_frames and self.claimed_frames >= 0, "frames were given back twice"
        if DEAR_CHECKS:
            self._check_frames()

    def _check_frames(self) -> None:
        """Every frame is free, or is one lease's."""
        leases = [lease for ref in self._leases if (lease := ref()) is not None]
        held = [*self._free, *(frame for lease in leases for frame in lease.frames or ())]
        frames = [block.address + at for block in self._blocks for at in range(0, block.nbytes, FRAME)]
        assert sorted(held) == sorted(frames), f"{len(held)} frames are free or leased, and {len(frames)} there"
        claimed = sum(len(lease.frames or ()) for lease in leases if lease.claims)
        assert self.claimed_frames == claimed, f"{self.claimed_frames} frames count as claimed, and {claimed} are"

    def _recount(self) -> None:
        """Something struck in the midst of an exchange: free is what no lease has."""
        leases = [lease for ref in self._leases if (lease := ref()) is not None]
        taken = {frame for lease in leases for frame in lease.frames or ()}
        frames = [block.address + at for block in self._blocks for at in range(0, block.nbytes, FRAME)]
        self._num_frames, self._free = len(frames), [frame for frame in frames if frame not in taken]
        self.claimed_frames = sum(len(lease.frames or ()) for lease in leases if lease.claims)
        self._count()

    def _count(self) -> None:
        self.kept_frames = max(self._num_kept - self.claimed_frames, 0)
        self.free_frames = self.frame_limit - self._num_frames + len(self._free) - self.kept_frames

    def _place(self, address: int, nbytes: int) -> Region:
        self.num_mappings += 1
        if self._pinner is None and len(nodes := nodes_of_threads()) > 1:
            spread_over_nodes(address, nbytes, nodes)
        elif self._pinner is not None and self._pinner.numa_node is not None:
            prefer_node(address, nbytes, self._pinner.numa_node)
        return _region(address, nbytes)

    def _grow(self, count: int) -> None:
        self.look(count * FRAME, _FRAMES)
        region = self._place(allocate_movable(count), count * FRAME)
        self._blocks.append(region)
        self._num_frames += count
        self._free.extend(region.address + i * FRAME for i in range(count))


class MovableBuffer:
    """A reserved address range; pages are under it only between `attach` and `detach`.

    The address never changes, so tensors that view it stay valid while the pages are away. Touching them then is a
    fault, which the guard class and the hooks prevent.
    """

    def __init__(self, arena: Arena, nbytes: int, *, claims: bool = False) -> None:
        """`claims` the frames that are kept."""
        self._arena = arena
        self._lease = arena.lease(claims=claims)
        self.region = arena.reserve(nbytes)
        self.num_frames = num_frames(nbytes)
        begin = self.region.address
        self._places = range(begin, begin + self.num_frames * FRAME, FRAME)
        """The address of each frame while it is here."""
        self._is_moving = False
        """True while pages move: where a Ctrl-C has struck, they are at either address."""

    @property
    def attached(self) -> bool:
        return self._lease.frames is not None

    def attach(self) -> bool:
        """Put pages under the range; False when the arena has too few. The contents are undefined.

        Raises CapacityError, and has taken nothing, where the system refuses.
        """
        if self.attached:  # a Ctrl-C has struck between `attach` and the note of it, or in `detach`
            self.detach()
        self._is_moving = True
        if not self._arena.lease_frames(self.num_frames, self._lease):
            self._is_moving = False
            return False
        assert self._lease.frames is not None
        try:
            _move_all(self._lease.frames, self._places)
        except BaseException:
            protect(self.region.address, self.region.nbytes)
            self._arena.release_frames(self._lease)
            raise
        self._is_moving = False
        return True

    def detach(self) -> None:
        """Take the pages back. Their bytes are worth nothing, so after a Ctrl-C it may be done twice."""
        assert self._lease.frames is not None
        if self._is_moving:
            # A page that moves to a frame's address brings its protection along.
            protect(self.region.address, self.region.nbytes, _PROT_READ_WRITE)
        self._is_moving = True
        _move_all(self._places, self._lease.frames, undone=CapacityError)
        protect(self.region.address, self.region.nbytes)
        self._arena.release_frames(self._lease)
        self._is_moving = False


def _move_all(sources: Sequence[int], targets: Sequence[int], undone: type[BaseException] = BaseException) -> None:
    """Move frames, all of them or, where such an error ends it, none."""
    moved: list[tuple[int, int]] = []
    try:
        for move in zip(sources, targets, strict=True):
            move_frame(*move)
            moved.append(move)
    except undone:
        for source, target in reversed(moved):
            move_frame(target, source)
        raise
