"""A device tensor whose memory comes and goes while the tensor stays, within a budget.

Autograd keeps views of a unit's flat buffer, so the tensor is never replaced: its storage is resized to nothing and
back. Storages over parts of it (`part`) are pointed at the new memory each time. The counterpart of
`arena.MovableBuffer` for devices that cannot compute on host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch

from zero_offload.hardware.device import aliased
from zero_offload.storage.memory.arena import num_frames
from zero_offload.storage.memory.exchange import exchanger, storage_over


class FrameAllocator(Protocol):
    """Hands out frames: `Arena` on a CPU, `FrameBudget` on a GPU."""

    @property
    def free_frames(self) -> int: ...

    @property
    def frame_limit(self) -> int: ...

    def raise_limit(self, count: int, *, claimed: bool = False) -> bool: ...


class Buffer(Protocol):
    """Memory under a tensor of constant identity; `MovableBuffer` or `ResizableBuffer`."""

    num_frames: int
    """Frames that it takes while it is attached."""

    @property
    def attached(self) -> bool: ...

    def attach(self) -> bool: ...

    def detach(self) -> None: ...


class FrameBudget:
    """Counts frames of device memory; the device's own allocator provides them."""

    def __init__(self, frame_limit: int, frame_limit_max: int, least: int | None = None) -> None:
        """`frame_limit` may fall to `least` (the same, by default), and rise to `frame_limit_max`."""
        self._frame_limit = frame_limit
        self._frame_limit_max = frame_limit_max
        self.least = frame_limit if least is None else least
        """The least that uses need at once; with less they would evict each other."""
        self.taken = 0

    @property
    def frame_limit(self) -> int:
        return self._frame_limit

    @property
    def free_frames(self) -> int:
        """Below 0 where the limit has fallen, until units above it have left."""
        return self._frame_limit - self.taken

    def limit_to(self, count: int) -> None:
        self._frame_limit = max(min(count, self._frame_limit_max), self.least)

    def raise_limit(self, count: int, *, claimed: bool = False) -> bool:
        """Allow `count` frames more; False when that would exceed the budget."""
        if self._frame_limit + count > self._frame_limit_max:
            return False
        self._frame_limit += count
        self.least = max(self.least, self._frame_limit)
        return True

    def widen(self, chosen: int, most: int, least: int) -> None:
        """Add so many frames to the limit, to how far it may go, and to how far it may fall."""
        self._frame_limit += chosen
        self._frame_limit_max += most
        self.least += least

    def take(self, count: int) -> None:
        assert count <= self.free_frames
        self.taken += count

    def release(self, count: int) -> None:
        assert count <= self.taken, f"{count} frames come back, and {self.taken} are taken"
        self.taken -= count


class ResizableBuffer:
    """Attaches and detaches the memory of `tensor`, (numel,) on the device, which has none at first."""

    def __init__(self, budget: FrameBudget, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._budget = budget
        # An alias may be longer than its memory: so none is taken yet, not even for a moment.
        empty = torch.empty(0, dtype=dtype, device=device)
        self.tensor: torch.Tensor = torch.ops.aten._reshape_alias(empty, (numel,), (1,))
        self._storage = self.tensor.untyped_storage()
        self._nbytes = numel * dtype.itemsize
        self.num_frames = num_frames(self._nbytes)
        self._attached = False
        self._parts: list[tuple[Callable[[torch.UntypedStorage], None], torch.Tensor]] = []
        """Calls that give a storage over a part of the memory that of another one, with those parts of the tensor."""

    @property
    def attached(self) -> bool:
        return self._attached

    def part(self, begin: int, end: int) -> tuple[torch.UntypedStorage, int]:
        """A storage over elements [begin, end) alone, and the element of it where they begin.

        Its memory comes and goes with the buffer's. It is the buffer's own where torch cannot point a storage at other
        memory.
        """
        at_begin = torch.empty(0, dtype=self.tensor.dtype, device=self.tensor.device)
        if (exchange := exchanger()) is None or (storage := storage_over(at_begin)) is None:
            return self._storage, begin
        assert not self._attached
        at_begin.set_(self._storage, begin, (0,), (1,))
        elements = torch.ops.aten._reshape_alias(at_begin, (end - begin,), (1,)).view(torch.uint8)
        self._parts.append((functools.partial(exchange, storage), elements))
        return storage, 0

    def attach(self) -> bool:
        """Take memory; False when the budget has too little. The contents are undefined.

        Raises torch.OutOfMemoryError, and has taken nothing, where the device has less than it promised: the budget
        does not count activations, nor whatever else computes there.
        """
        if self._attached:  # a Ctrl-C has struck between `attach` and the note of it, or in `detach`
            self.detach()
        if self.num_frames > self._budget.free_frames:
            return False
        self._storage.resize_(self._nbytes)
        self._budget.take(self.num_frames)
        self._attached = True
        with torch._C._DisableFuncTorch():  # its transforms wrap tensors that an operation makes
            for point_at, elements in self._parts:
                point_at(aliased(elements).untyped_storage())
        return True

    def detach(self) -> None:
        """Free the memory; kernels already launched may still use it, as with any freed tensor."""
        assert self._attached
        for point_at, elements in self._parts:
            point_at(elements.new_empty(0).untyped_storage())
        self._storage.resize_(0)
        self._budget.release(self.num_frames)
        self._attached = False
