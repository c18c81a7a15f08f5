"""Bytes that leave the compute device between forward and backward, and come back: what a tier is, and one in a file.

Owns the file's blocks: each is leased to a piece of one tensor's memory and given back with it, so that nothing grows
once a step has taken what it needs. Decides nothing. The calls: `put` launches the way out, `arrival` stands for the
way back: `start` launches what there is room for, `finish` gives the bytes; `release` drops them.

On a GPU both ways go over the copy lanes. On the way to a file bytes pass through page-aligned host memory of constant
size, `ACTIVATION_BLOCKS_OUT` blocks; on the way back to a GPU through `ACTIVATION_BLOCKS_BACK`, and more for larger
tensors, while a CPU computes on what they were read to (`Landing`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_offload.base.errors import CapacityError, StorageError
from zero_offload.base.types import whole_sectors
from zero_offload.hardware.device import Device, Handoff
from zero_offload.plan.memory import ACTIVATION_BLOCK_BYTES, ACTIVATION_BLOCKS_BACK, ACTIVATION_BLOCKS_OUT
from zero_offload.runtime.saved.landing import Landing, Lease
from zero_offload.storage.files.engine import Urgency
from zero_offload.storage.files.swap_file import ALL_ROWS, Extent, SwapFile, Transfer
from zero_offload.storage.memory.arena import Arena

Pieces = Sequence[Any]


class Arrival(Protocol):
    """The way back of one tensor's memory."""

    def start(self) -> bool:
        """Launch what there is room for; says whether that was all."""

    def finish(self) -> Tensor:
        """(nbytes,) uint8 on the compute device, valid for compute launched from now on."""

    def abandon(self) -> None:
        """It is not wanted any more."""


class ActivationTier(Protocol):
    def put(self, source: Tensor) -> Pieces:
        """Launch the copy of `source`, (nbytes,) uint8 on the compute device, which may be freed but not changed."""

    def arrival(self, pieces: Pieces) -> Arrival: ...

    def release(self, pieces: Pieces) -> None:
        """The bytes are of no use any more. Any thread, at any time: waits for nothing."""

    def reach(self, nbytes: int) -> None:
        """So much may be fetched ahead to a device from now on."""


def _cut(source: Tensor) -> Iterator[Tensor]:
    return iter(source.split(ACTIVATION_BLOCK_BYTES))


class _Blocks:
    """Host memory in blocks, which come back in the order in which they are likely to be free of copies."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._free: deque[tuple[Tensor, Handoff | Transfer | None]] = deque()

    def grow(self, count: int) -> None:
        region = self._arena.allocate(count * ACTIVATION_BLOCK_BYTES)
        whole = region.tensor(torch.uint8, count * ACTIVATION_BLOCK_BYTES)
        self._free.extend((block, None) for block in whole.split(ACTIVATION_BLOCK_BYTES))

    @property
    def available(self) -> bool:
        return bool(self._free)

    def lease(self) -> Tensor:
        """(ACTIVATION_BLOCK_BYTES,) uint8; there must be one."""
        block, last = self._free[0]
        _wait(last)  # while it is still here: a wait can be interrupted
        self._free.popleft()
        return block

    def give_back(self, block: Tensor, last: Handoff | Transfer | None) -> None:
        """`last` may still use it."""
        self._free.append((block, last))


def _wait(last: Handoff | Transfer | None) -> None:
    if isinstance(last, Transfer):
        last.wait()
    elif last is not None:
        last.take_on_host()


@dataclass
class _DiskPiece:
    extent: Extent
    nbytes: int
    staged: _Leaving | None = None
    """On its way out."""
    last: Transfer | None = None
    """The write, or the latest read."""

    def settle(self) -> None:
        """Wait until the file has it, and no read is under way."""
        if self.staged is not None:
            self.staged.finish()
        if self.last is not None:
            self.last.wait()


@dataclass
class _Leaving:
    """A block of staging on its way to the file."""

    disk: SwapFile
    block: Tensor
    piece: _DiskPiece
    download: Handoff | None

    @property
    def written(self) -> bool:
        return self.piece.last is not None and self.piece.last.done()

    def advance(self) -> None:
        """Launch the write if the download is done."""
        if self.piece.staged is not None and (self.download is None or self.download.ready.done()):
            self._launch()

    def finish(self) -> None:
        """Launch it whatever it takes."""
        if self.piece.staged is not None:
            if self.download is not None:
                self.download.take_on_host()
            self._launch()

    def _launch(self) -> None:
        self.piece.staged = None
        # The tail of the last block is never read: whole sectors are enough.
        self.piece.extent.blocks["nbytes"] = whole_sectors(self.piece.nbytes)
        self.piece.last = self.disk.launch_write(self.piece.extent, ALL_ROWS, self.block.data_ptr())


class DiskTier:
    """Blocks of a file of this rank's own, without a name: nothing of it outlives the process."""

    def __init__(self, device: Device, arena: Arena, disk: SwapFile) -> None:
        self._device = device
        self._disk = disk
        self._staging = _Blocks(arena)
        self._leaving: deque[_Leaving] = deque()
        self.landing = _Blocks(arena)
        """On the way to a GPU."""
        self._num_landing = 0
        self._slabs = Landing(arena)
        """Where a CPU computes."""
        self._free: deque[_DiskPiece] = deque()
        self._num_extents = 0
        self.arrivals: list[_FromDisk] = []
        """That hold landing blocks."""

    def put(self, source: Tensor) -> Pieces:
        if self._num_extents == 0:
            self._staging.grow(ACTIVATION_BLOCKS_OUT)
            self._grow_landing(ACTIVATION_BLOCKS_BACK)
        return [self._put(part) for part in _cut(source)]

    def reach(self, nbytes: int) -> None:
        self._grow_landing(nbytes // ACTIVATION_BLOCK_BYTES)

    def _grow_landing(self, num_blocks: int) -> None:
        if num_blocks > self._num_landing and not self._device.is_host:
            self.landing.grow(num_blocks - self._num_landing)
            self._num_landing = num_blocks

    def _put(self, part: Tensor) -> _DiskPiece:
        piece = _DiskPiece(self._lease_extent(), part.nbytes)
        piece.staged = leaving = _Leaving(self._disk, self._lease_staging(), piece, None)
        self._leaving.append(leaving)  # at once: whatever interrupts the rest, the block comes back
        target = leaving.block[: part.nbytes]
        if self._device.is_host:
            target.copy_(part)
        else:
            leaving.download = self._device.download(target, part)
        leaving.advance()
        return piece

    def _lease_extent(self) -> Extent:
        if self._free:
            piece = self._free[0]
            piece.settle()
            self._free.popleft()
            return piece.extent
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
        for leaving in self._leaving:
            leaving.advance()
        while self._leaving and (self._leaving[0].written or not self._staging.available):
            oldest = self._leaving[0]
            oldest.finish()
            self._leaving.popleft()
            self._staging.give_back(oldest.block, oldest.piece.last)
        if not self._staging.available:
            self._staging.grow(1)  # a Ctrl-C between two lines has cost one
        return self._staging.lease()

    def arrival(self, pieces: Pieces) -> Arrival:
        if self._device.is_host:
            return _ToPlace(self._slabs, self._disk, pieces)
        return _FromDisk(self, self._device, self._disk, pieces)

    def room(self, arrival: _FromDisk) -> None:
        """Make sure that a landing block is available, at the cost of what was fetched ahead."""
        while not self.landing.available:
            victim = next((each for each in reversed(self.arrivals) if each is not arrival), None)
            if victim is None:
                self.landing.grow(1)  # a Ctrl-C between two lines has cost one
            else:
                victim.abandon()

    def release(self, pieces: Pieces) -> None:
        self._free.extend(pieces)


class _ToPlace:
    """Reads to where a CPU computes."""

    def __init__(self, landing: Landing, disk: SwapFile, pieces: Sequence[_DiskPiece]) -> None:
        self._landing = landing
        self._disk = disk
        self._pieces = pieces
        self._lease: Lease | None = None

    def start(self) -> bool:
        # Nothing is waited for ahead of time.
        if any(piece.staged is not None or not (piece.last and piece.last.done()) for piece in self._pieces):
            return False
        self._start(Urgency.NORMAL)
        return True

    def _start(self, urgency: Urgency) -> Lease:
        if self._lease is None or None in self._lease.reads:  # an unrecorded read may be under way there
            self._lease = self._landing.lease(sum(piece.nbytes for piece in self._pieces))
        region, reads = self._lease
        for piece in self._pieces[len(reads) :]:
            piece.settle()
            address = region.address + len(reads) * ACTIVATION_BLOCK_BYTES
            reads.append(None)
            reads[-1] = piece.last = self._disk.launch_read(piece.extent, ALL_ROWS, address, urgency)
        return self._lease

    def finish(self) -> Tensor:
        region, reads = self._start(Urgency.URGENT)
        for read in filter(None, reads):
            read.wait()
        self._lease = None
        return region.tensor(torch.uint8, sum(piece.nbytes for piece in self._pieces))

    def abandon(self) -> None:
        self._lease = None


class _FromDisk:
    """Reads into landing blocks, as many as are free; from there to a GPU."""

    def __init__(self, tier: DiskTier, device: Device, disk: SwapFile, pieces: Sequence[_DiskPiece]) -> None:
        self._tier = tier
        self._device = device
        self._disk = disk
        self._pieces = pieces
        self._launched: deque[tuple[_DiskPiece, Tensor, Transfer]] = deque()
        self._next = 0
        self._target: Tensor | None = None
        self._uploads: list[Handoff] = []
        """To the parts of the target, in order."""

    def start(self) -> bool:
        return self._start(Urgency.NORMAL)

    def _start(self, urgency: Urgency) -> bool:
        while self._next < len(self._pieces):
            piece = self._pieces[self._next]
            if not self._tier.landing.available:
                return False
            if urgency is Urgency.NORMAL and (piece.staged is not None or not (piece.last and piece.last.done())):
                return False  # nothing is waited for ahead of time
            piece.settle()
            block = self._tier.landing.lease()
            try:
                piece.last = self._disk.launch_read(piece.extent, ALL_ROWS, block.data_ptr(), urgency)
            except BaseException:
                self._tier.landing.give_back(block, None)
                raise
            if not self._launched:
                self._tier.arrivals.append(self)
            self._launched.append((piece, block, piece.last))
            self._next += 1
        return True

    def finish(self) -> Tensor:
        if self._uploads:
            self.abandon()
        nbytes = sum(piece.nbytes for piece in self._pieces)
        self._target = torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)
        for part in _cut(self._target):
            if not self._launched:
                self._tier.room(self)
            self._start(Urgency.URGENT)
            piece, block, read = self._launched[0]
            read.wait()
            self._uploads.append(self._device.upload(part, block[: piece.nbytes]))
            self._take()
            self._tier.landing.give_back(block, self._uploads[-1])
        for upload in self._uploads:
            upload.take()
        target, self._target, self._uploads, self._next = self._target, None, [], 0
        return target

    def _take(self) -> tuple[_DiskPiece, Tensor, Transfer]:
        first = self._launched.popleft()
        if not self._launched:
            self._tier.arrivals.remove(self)
        return first

    def abandon(self) -> None:
        for upload in self._uploads:  # `finish` was broken off: memory on both sides is in use
            upload.take_on_host()
        self._target, self._uploads = None, []
        while self._launched:
            _, block, read = self._take()
            self._tier.landing.give_back(block, read)
        self._next = 0
