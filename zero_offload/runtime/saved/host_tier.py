"""Activations in host memory, beside a GPU.

Owns that memory, in blocks, and says how much of the device's may wait for its way there. The calls are those of
`tiers.ActivationTier`; both ways go over the copy lanes. A tensor keeps its memory on the device until its download is
done, so a host that launches ahead of the GPU must wait for downloads: all of forward would be there at once.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_offload.base.events import Counters
from zero_offload.base.types import MIB, Tier
from zero_offload.hardware.device import Device, Handoff
from zero_offload.plan.memory import ACTIVATION_BLOCK_BYTES
from zero_offload.runtime.saved.tiers import Arrival, Pieces
from zero_offload.storage.memory.arena import Arena

BYTES_OUT = 512 * MIB
"""Of the device's memory on its way to the host's at once; one storage may be larger. A link takes 10 to 20 ms for it:
so far a host may launch ahead."""
_SLAB_BLOCKS = 32
"""Blocks that are taken and registered at once. A storage is one copy in each slab that it touches."""


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
            self._grow()
        before = None
        for _ in range(count):
            number, last = heapq.heappop(self._free)
            if last is not before and last is not None:
                last.take()
            before = last
            if runs and number == runs[-1].stop and number % _SLAB_BLOCKS:
                runs[-1] = range(runs[-1].start, number + 1)
            else:
                runs.append(range(number, number + 1))

    def _grow(self) -> None:
        region = self._arena.allocate(_SLAB_BLOCKS * ACTIVATION_BLOCK_BYTES)
        first = len(self._slabs) * _SLAB_BLOCKS
        self._slabs.append(region.tensor(torch.uint8, _SLAB_BLOCKS * ACTIVATION_BLOCK_BYTES))
        for number in range(first, first + _SLAB_BLOCKS):
            heapq.heappush(self._free, (number, None))

    def memory(self, run: range) -> Tensor:
        """(all bytes of the run,) uint8."""
        slab, first = divmod(run.start, _SLAB_BLOCKS)
        return self._slabs[slab].narrow(0, first * ACTIVATION_BLOCK_BYTES, len(run) * ACTIVATION_BLOCK_BYTES)

    def give_back(self, run: range, last: Handoff | None) -> None:
        """`last` may still use it."""
        for number in run:
            heapq.heappush(self._free, (number, last))


@dataclass
class _HostPiece:
    run: range
    memory: Tensor
    last: Handoff
    """The copy that wrote it, or the latest that read it."""


class _Out(NamedTuple):
    """A storage on its way."""

    begin: int
    end: int
    """In bytes that have left since there was none on its way."""
    last: Handoff


class HostTier:
    """Pinned host memory: the most that was away at once."""

    def __init__(self, device: Device, arena: Arena, counters: Counters) -> None:
        self._device = device
        self._slabs = _Slabs(arena)
        self._counters = counters
        self._out: deque[_Out] = deque()

    def put(self, source: Tensor) -> Pieces:
        self._make_room(source.nbytes)
        runs: list[range] = []
        try:
            self._slabs.lease(source.nbytes, runs)
            return self._download(source, runs)
        except BaseException:
            for run in runs:
                self._slabs.give_back(run, None)  # what writes there next comes after, on the same lane
            raise

    def _make_room(self, nbytes: int) -> None:
        """Wait for the oldest downloads, until there are few enough."""
        while self._out and self._out[-1].end - self._out[0].begin + nbytes > BYTES_OUT:
            self._out[0].last.take_on_host()  # while it is still here: a wait can be interrupted
            self._out.popleft()

    def _download(self, source: Tensor, runs: Sequence[range]) -> Pieces:
        pieces = []
        begin = 0
        for run in runs:
            memory = self._slabs.memory(run)[: source.nbytes - begin]
            copy = self._device.download(memory, source.narrow(0, begin, memory.nbytes))
            pieces.append(_HostPiece(run, memory, copy))
            begin += memory.nbytes
        first = self._out[-1].end if self._out else 0
        self._out.append(_Out(first, first + source.nbytes, pieces[-1].last))
        self._counters.written(Tier.CPU, source.nbytes)
        return pieces

    def arrival(self, pieces: Pieces) -> Arrival:
        return _FromHost(self._device, self._counters, pieces)

    def reach(self, nbytes: int) -> None:
        """It passes through no other memory."""

    def release(self, pieces: Pieces) -> None:
        for piece in pieces:
            self._slabs.give_back(piece.run, piece.last)


class _FromHost:
    """Uploads, all at once."""

    def __init__(self, device: Device, counters: Counters, pieces: Sequence[_HostPiece]) -> None:
        self._device = device
        self._counters = counters
        self._pieces = pieces
        self._target: Tensor | None = None
        self._home: Any = None
        """The stream whose memory that is."""

    def start(self) -> bool:
        if self._target is None:
            sizes = [piece.memory.nbytes for piece in self._pieces]
            self._counters.read(Tier.CPU, sum(sizes))
            self._home = self._device.stream()
            self._target = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device.torch_device)
            for piece, part in zip(self._pieces, self._target.split(sizes), strict=True):
                # The lanes know nothing of each other: through compute, the upload comes after the download.
                piece.last.take()
                piece.last = Handoff(piece.memory, self._device.upload(part, piece.memory).ready)
        return True

    def finish(self) -> Tensor:
        self.start()
        for piece in self._pieces:
            piece.last.take()
        target, self._target = self._target, None
        assert target is not None
        self._device.use_here(target)
        return target

    def abandon(self) -> None:
        if self._target is not None:
            for piece in self._pieces:
                piece.last.take()  # what gets its memory next comes after the uploads
            self._device.join([self._device.stream()], into=self._home)
            self._target = None
