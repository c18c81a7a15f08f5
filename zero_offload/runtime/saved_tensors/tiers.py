"""Where activations go between forward and backward: pinned host memory beside a GPU, or blocks of a file.

A tier owns memory or blocks of constant size. They are leased to pieces of one storage's bytes and given back with it.
Nothing grows once a step has taken what it needs. A tier decides nothing. The calls: `put` launches the way out. With
its result, `launch` begins the way back as far as there is room, `finish` gives the bytes, `release` drops them.

On a GPU both ways go over the copy lanes. A tensor keeps its memory on the device until its download is done. So a host
that launches ahead of the GPU waits for downloads: else all of forward would be there at once. On the way to a file
bytes pass through page-aligned host memory of constant size, `ACTIVATION_BLOCKS_OUT` blocks. On the way back to a GPU
they take `ACTIVATION_BLOCKS_BACK`, and more for larger tensors. A CPU computes on what they were read to
(`ActivationStaging`).
"""

from __future__ import annotations

import heapq
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zero_offload.base.errors import CapacityError, StorageError
from zero_offload.base.events import Counters
from zero_offload.base.types import MIB, Tier, whole_sectors
from zero_offload.hardware.device import Device, Handoff
from zero_offload.plan.memory import ACTIVATION_BLOCK_BYTES, ACTIVATION_BLOCKS_BACK, ACTIVATION_BLOCKS_OUT
from zero_offload.storage.files.engine import Urgency
from zero_offload.storage.files.swap_file import ALL_ROWS, Extent, SwapFile, Transfer
from zero_offload.storage.memory.arena import Arena, Need, Region
from zero_offload.storage.memory.staging import Staging

BYTES_OUT = 512 * MIB
"""Bytes of the device's memory on their way to the host at once; one storage may be larger. A link takes 10 to 20 ms
for it: so far a host may launch ahead."""
PINNED_SLAB_BLOCKS = 32
"""Blocks of pinned memory that are taken and registered at once. A storage is one copy in each slab that it touches."""
LANDING_SLAB_BYTES = 16 * MIB
"""Bytes of a CPU's own memory taken at once; one tensor may be larger."""


_NEED = Need(
    "activations",
    "Make batches smaller or sequences shorter; mark blocks with zo.checkpoint, which keeps their inputs alone; or "
    'activations="nvme"',
    is_planned=False,
    is_bounded=False,
)


class StoredBytes(Protocol):
    """One storage's bytes on a tier."""

    def launch(self) -> bool:
        """Launch as much of the way back as there is room for; True if that was all."""

    def finish(self) -> Tensor:
        """(nbytes,) uint8 on the compute device, valid for compute launched from now on."""

    def cancel(self) -> None:
        """The way back is not wanted any more."""

    def release(self) -> None:
        """The bytes are of no use any more. Any thread, at any time: waits for nothing but `cancel`."""


class ActivationTier(Protocol):
    def put(self, source: Tensor) -> StoredBytes:
        """Launch the copy of `source`, (nbytes,) uint8 on the compute device, which may be freed but not changed."""

    def reach(self, nbytes: int) -> None:
        """So much may be fetched ahead to a device from now on."""


# Host memory beside a GPU


class _Slabs:
    """Host memory in blocks, numbered; the lowest go first, so that what is leased together is adjacent."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._slabs: list[Tensor] = []
        self._free: list[tuple[int, Handoff | None]] = []
        """A heap: each with the copy that may still use it."""

    def lease(self, nbytes: int, runs: list[range]) -> None:
        """Blocks for so much, for copies that come after compute launched so far.

        They go to `runs`, adjacent ones together, one by one: what interrupts this leaves them there.
        """
        count = -(-nbytes // ACTIVATION_BLOCK_BYTES)
        while len(self._free) < count:
            first = len(self._slabs) * PINNED_SLAB_BLOCKS
            self._slabs.append(_allocate(self._arena, PINNED_SLAB_BLOCKS))
            for number in range(first, first + PINNED_SLAB_BLOCKS):
                heapq.heappush(self._free, (number, None))
        before = None
        for _ in range(count):
            number, last = heapq.heappop(self._free)
            if last is not before and last is not None:
                last.take()
            before = last
            if runs and number == runs[-1].stop and number % PINNED_SLAB_BLOCKS:
                runs[-1] = range(runs[-1].start, number + 1)
            else:
                runs.append(range(number, number + 1))

    def memory(self, run: range) -> Tensor:
        """(all bytes of the run,) uint8."""
        slab, first = divmod(run.start, PINNED_SLAB_BLOCKS)
        return self._slabs[slab].narrow(0, first * ACTIVATION_BLOCK_BYTES, len(run) * ACTIVATION_BLOCK_BYTES)

    def release(self, run: range, last: Handoff | None) -> None:
        """`last` may still use it."""
        for number in run:
            heapq.heappush(self._free, (number, last))


def _allocate(arena: Arena, num_blocks: int) -> Tensor:
    """(all bytes,) uint8."""
    nbytes = num_blocks * ACTIVATION_BLOCK_BYTES
    return arena.allocate(nbytes, _NEED).tensor(torch.uint8, nbytes)


class HostTier:
    """Pinned host memory: the most that was away at once."""

    def __init__(self, device: Device, arena: Arena, counters: Counters) -> None:
        self.device = device
        self.slabs = _Slabs(arena)
        self.counters = counters
        self._out: deque[tuple[int, Handoff]] = deque()
        """Bytes of each storage that may still be on its way, and its last download; the oldest first."""

    def put(self, source: Tensor) -> StoredInHost:
        while self._out and sum(nbytes for nbytes, _ in self._out) + source.nbytes > BYTES_OUT:
            self._out[0][1].take_on_host()  # while it is still here: a wait can be interrupted
            self._out.popleft()
        runs: list[range] = []
        try:
            self.slabs.lease(source.nbytes, runs)
            pieces = self._download(source, runs)
        except BaseException:
            for run in runs:
                self.slabs.release(run, None)  # what writes there next comes after, on the same lane
            raise
        self._out.append((source.nbytes, pieces[-1].last))
        self.counters.written(Tier.CPU, source.nbytes)
        return StoredInHost(self, pieces)

    def _download(self, source: Tensor, runs: Sequence[range]) -> list[_HostPiece]:
        pieces = []
        begin = 0
        for run in runs:
            memory = self.slabs.memory(run)[: source.nbytes - begin]
            copy = self.device.download(memory, source.narrow(0, begin, memory.nbytes))
            pieces.append(_HostPiece(run, memory, copy))
            begin += memory.nbytes
        return pieces

    def reach(self, nbytes: int) -> None:
        """It passes through no other memory."""


@dataclass
class _HostPiece:
    run: range
    memory: Tensor
    last: Handoff
    """The copy that wrote it, or the latest that read it."""


class StoredInHost:
    """Bytes in pinned host memory; they come back by uploads, all at once."""

    def __init__(self, tier: HostTier, pieces: Sequence[_HostPiece]) -> None:
        self._tier = tier
        self.pieces = pieces
        self._target: Tensor | None = None
        self._home: Any = None
        """The stream whose memory that is."""

    def launch(self) -> bool:
        if self._target is None:
            device = self._tier.device
            sizes = [piece.memory.nbytes for piece in self.pieces]
            self._tier.counters.read(Tier.CPU, sum(sizes))
            self._home = device.stream()
            self._target = torch.empty(sum(sizes), dtype=torch.uint8, device=device.torch_device)
            for piece, part in zip(self.pieces, self._target.split(sizes), strict=True):
                # The lanes know nothing of each other: through compute, the upload comes after the download.
                piece.last.take()
                piece.last = Handoff(piece.memory, device.upload(part, piece.memory).ready)
        return True

    def finish(self) -> Tensor:
        self.launch()
        for piece in self.pieces:
            piece.last.take()
        target, self._target = self._target, None
        assert target is not None
        self._tier.device.use_here(target)
        return target

    def cancel(self) -> None:
        if self._target is not None:
            for piece in self.pieces:
                piece.last.take()  # what gets its memory next comes after the uploads
            self._tier.device.join([self._tier.device.stream()], into=self._home)
            self._target = None

    def release(self) -> None:
        self.cancel()
        for piece in self.pieces:
            self._tier.slabs.release(piece.run, piece.last)


# A file


class _Blocks:
    """Host memory in blocks, which come back in the order in which they are likely to be free of copies."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free: deque[tuple[Tensor, Handoff | Transfer | None]] = deque()

    def grow(self, count: int) -> None:
        whole = _allocate(self._arena, count)
        self._free.extend((block, None) for block in whole.split(ACTIVATION_BLOCK_BYTES))

    def __len__(self) -> int:
        """How many blocks can be had."""
        return len(self._free)

    def lease(self) -> Tensor:
        """(ACTIVATION_BLOCK_BYTES,) uint8; there must be one."""
        block, last = self._free[0]
        # While it is still here: a wait can be interrupted.
        if isinstance(last, Transfer):
            last.wait()
        elif last is not None:
            last.take_on_host()
        self._free.popleft()
        return block

    def release(self, block: Tensor, last: Handoff | Transfer | None) -> None:
        """`last` may still use it."""
        self._free.append((block, last))


@dataclass(eq=False)
class _DiskPiece:
    """A part of a storage's bytes, in one block of the file; on its way there in `block`, of staging."""

    disk: SwapFile
    extent: Extent
    nbytes: int
    block: Tensor
    download: Handoff | None = None
    """The download to the block."""
    last: Transfer | None = None
    """The write, or the latest read; None until the write is launched."""

    @property
    def is_idle(self) -> bool:
        """True if the file has it, and no read is under way."""
        return self.last is not None and self.last.done()

    def advance(self, *, may_wait: bool = False) -> None:
        """Launch the write if the download is done, or once it is."""
        if self.last is not None:
            return
        if self.download is not None and may_wait:
            self.download.take_on_host()
        if self.download is None or self.download.ready.done():
            # The tail of the last block is never read: whole sectors are enough.
            self.extent.blocks["nbytes"] = whole_sectors(self.nbytes)
            self.last = self.disk.launch_write(self.extent, ALL_ROWS, self.block.data_ptr())

    def wait(self) -> None:
        """Wait until the file has it, and no read is under way."""
        self.advance(may_wait=True)
        assert self.last is not None
        self.last.wait()

    def launch_read(self, address: int, urgency: Urgency) -> Transfer:
        """Called after `wait`."""
        self.last = self.disk.launch_read(self.extent, ALL_ROWS, address, urgency)
        return self.last


class DiskTier:
    """Blocks of a file of this rank's own, without a name: nothing of it outlives the process."""

    def __init__(self, device: Device, arena: Arena, disk: SwapFile) -> None:
        self.device = device
        self._disk = disk
        self._staging = _Blocks(arena)
        self._leaving: deque[_DiskPiece] = deque()
        """Those with a block of staging."""
        self.landing = _Blocks(arena)
        """Blocks on the way to a GPU."""
        self._num_landing = 0
        self._slabs = ActivationStaging(arena)
        """Slabs, used where a CPU computes."""
        self.free: deque[_DiskPiece] = deque()
        """Whose extents are leased again."""
        self._num_extents = 0
        self.arrivals: list[_ReadToDevice] = []
        """Arrivals that hold landing blocks."""

    def put(self, source: Tensor) -> StoredBytes:
        if self._num_extents == 0:
            self._staging.grow(ACTIVATION_BLOCKS_OUT)
            self.reach(ACTIVATION_BLOCKS_BACK * ACTIVATION_BLOCK_BYTES)
        pieces = [self._put(part) for part in source.split(ACTIVATION_BLOCK_BYTES)]
        return _ReadToHost(self, self._slabs, pieces) if self.device.is_host else _ReadToDevice(self, pieces)

    def reach(self, nbytes: int) -> None:
        num_blocks = nbytes // ACTIVATION_BLOCK_BYTES
        if num_blocks > self._num_landing and not self.device.is_host:
            self.landing.grow(num_blocks - self._num_landing)
            self._num_landing = num_blocks

    def _put(self, part: Tensor) -> _DiskPiece:
        piece = _DiskPiece(self._disk, self._lease_extent(), part.nbytes, self._lease_staging())
        self._leaving.append(piece)  # at once: whatever interrupts the rest, the block comes back
        target = piece.block[: part.nbytes]
        if self.device.is_host:
            target.copy_(part)
        else:
            piece.download = self.device.download(target, part)
        piece.advance()
        return piece

    def _lease_extent(self) -> Extent:
        if self.free:
            self.free[0].wait()
            return self.free.popleft().extent
        self._num_extents += 1
        try:
            return self._disk.allocate(f"activations {self._num_extents}", [ACTIVATION_BLOCK_BYTES])
        except CapacityError as error:
            raise StorageError(
                f"no room for activations on the NVMe tier: {error}. Free some, use a smaller batch, mark blocks with "
                "zo.checkpoint, or set activations='device'"
            ) from error

    def _lease_staging(self) -> Tensor:
        """A block for the way out, waiting for the oldest write if all are in use."""
        for piece in self._leaving:
            piece.advance()
        while self._leaving and (self._leaving[0].is_idle or not self._staging):
            oldest = self._leaving[0]
            oldest.advance(may_wait=True)
            self._leaving.popleft()
            self._staging.release(oldest.block, oldest.last)
        if not self._staging:
            self._staging.grow(1)  # a Ctrl-C between two lines has cost one
        return self._staging.lease()

    def make_room(self, arrival: _ReadToDevice) -> None:
        """Make sure that a landing block is available, at the cost of what was fetched ahead."""
        while not self.landing:
            victim = next((each for each in reversed(self.arrivals) if each is not arrival), None)
            if victim is None:
                self.landing.grow(1)  # a Ctrl-C between two lines has cost one
            else:
                victim.cancel()


class _ReadToHost:
    """Bytes in the file; they are read to where a CPU computes."""

    def __init__(self, tier: DiskTier, landing: ActivationStaging, pieces: Sequence[_DiskPiece]) -> None:
        self._tier = tier
        self._landing = landing
        self._pieces = pieces
        self._nbytes = sum(piece.nbytes for piece in pieces)
        self._lease: TensorLease | None = None

    def launch(self) -> bool:
        # Nothing is waited for ahead of time.
        if not all(piece.is_idle for piece in self._pieces):
            return False
        self._launch(Urgency.NORMAL)
        return True

    def _launch(self, urgency: Urgency) -> TensorLease:
        if self._lease is None or None in self._lease.reads:  # an unrecorded read may be under way there
            self._lease = self._landing.lease(self._nbytes)
        region, reads = self._lease
        for piece in self._pieces[len(reads) :]:
            address = region.address + len(reads) * ACTIVATION_BLOCK_BYTES
            piece.wait()
            reads.append(None)
            reads[-1] = piece.launch_read(address, urgency)
        return self._lease

    def finish(self) -> Tensor:
        region, reads = self._launch(Urgency.URGENT)
        for read in filter(None, reads):
            read.wait()
        self._lease = None
        return region.tensor(torch.uint8, self._nbytes)

    def cancel(self) -> None:
        self._lease = None

    def release(self) -> None:
        self.cancel()
        self._tier.free.extend(self._pieces)


class _ReadToDevice:
    """Bytes in the file; they are read into landing blocks, as many as are free, and go from there to a GPU."""

    def __init__(self, tier: DiskTier, pieces: Sequence[_DiskPiece]) -> None:
        self._tier = tier
        self._pieces = pieces
        self._launched: deque[tuple[_DiskPiece, Tensor, Transfer]] = deque()
        self._next = 0
        self._target: Tensor | None = None
        self._uploads: list[Handoff] = []
        """Uploads to the parts of the target, in order."""

    def launch(self) -> bool:
        return self._launch(Urgency.NORMAL)

    def _launch(self, urgency: Urgency) -> bool:
        landing = self._tier.landing
        while self._next < len(self._pieces):
            piece = self._pieces[self._next]
            if not landing or (urgency is Urgency.NORMAL and not piece.is_idle):
                return False  # nothing is waited for ahead of time
            piece.wait()
            block = landing.lease()
            try:
                read = piece.launch_read(block.data_ptr(), urgency)
            except BaseException:
                landing.release(block, None)
                raise
            if not self._launched:
                self._tier.arrivals.append(self)
            self._launched.append((piece, block, read))
            self._next += 1
        return True

    def finish(self) -> Tensor:
        if self._uploads:
            self.cancel()
        device = self._tier.device
        nbytes = sum(piece.nbytes for piece in self._pieces)
        self._target = torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)
        for part in self._target.split(ACTIVATION_BLOCK_BYTES):
            if not self._launched:
                self._tier.make_room(self)
            self._launch(Urgency.URGENT)
            piece, block, read = self._launched[0]
            read.wait()
            self._uploads.append(device.upload(part, block[: piece.nbytes]))
            self._take()
            self._tier.landing.release(block, self._uploads[-1])
        for upload in self._uploads:
            upload.take()
        target, self._target, self._uploads, self._next = self._target, None, [], 0
        return target

    def _take(self) -> tuple[_DiskPiece, Tensor, Transfer]:
        first = self._launched.popleft()
        if not self._launched:
            self._tier.arrivals.remove(self)
        return first

    def cancel(self) -> None:
        for upload in self._uploads:  # `finish` was broken off: memory on both sides is in use
            upload.take_on_host()
        self._target, self._uploads = None, []
        while self._launched:
            _, block, read = self._take()
            self._tier.landing.release(block, read)
        self._next = 0

    def release(self) -> None:
        self.cancel()
        self._tier.free.extend(self._pieces)


# Memory where a CPU computes on what came back from a file


class TensorLease(NamedTuple):
    """Memory for one tensor."""

    region: Region
    reads: list[Transfer | None]
    """Reads into it; None while one is launched, and where an exception came between."""


class _Leased(NamedTuple):
    address: int
    nbytes: int
    life: weakref.ref[object]
    reads: list[Transfer | None]

    @property
    def is_over(self) -> bool:
        return self.life() is None and all(read is not None and read.done() for read in self.reads)


class ActivationStaging:
    """Staging for tensors: the most that was in use at once.

    The C library's heap would do, but tensors of all sizes leave holes there. Those are given back to the system, and
    the page faults cost more than reading the drive. A part is free again when no tensor views it and nothing is read
    to it any more. That is seen when the next one is leased: what a finalizer is told may be lost.
    """

    def __init__(self, arena: Arena) -> None:
        self._staging = Staging(arena, _NEED, slab_bytes=LANDING_SLAB_BYTES)
        self._leased: list[_Leased] = []

    def lease(self, nbytes: int) -> TensorLease:
        """(nbytes,), sector-aligned, up to the end of its last sector."""
        for leased in [each for each in self._leased if each.is_over]:
            self._leased.remove(leased)
            self._staging.release(leased)
        region, reads = self._staging.lease(nbytes), list[Transfer | None]()
        self._leased.append(_Leased(region.address, region.nbytes, weakref.ref(region.owner), reads))
        return TensorLease(region, reads)
