"""Host memory that bytes pass through, between the tensors of a model and where they rest.

`Staging` owns slabs, parts of which are leased. The calls: `lease`, after `fits` where the caller can wait for leases
of its own. `release` when the bytes have passed, with the copies that may still read the part. `free_oldest` where
memory is short.

[Note: memory that is no staging]
A part is leased, filled, emptied and given back. Memory with another life stays with its owner. A CPU computes on
groups of experts where they land (`runtime/units/group_reader.py`). The number of regions bounds the chunks of an
update that are under way (`optim/pipeline.py`, `optim/device_pass.py`). Activations on their way have blocks of one
size: a GPU's are numbered, for few copies, and wait for each other on a lane (`runtime/saved_tensors/tiers.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from zero_offload.hardware.device import Event
from zero_offload.storage.memory.arena import A_BUFFER, Arena, Need, Region
from zero_offload.storage.memory.pool import ByteRange, SpanPool


class Staging:
    """Slabs, taken from the arena as they are used, and kept. One thread at a time."""

    def __init__(self, arena: Arena, need: Need = A_BUFFER, *, slab_bytes: int = 0) -> None:
        """A slab that is taken because a part does not fit has `slab_bytes` or more."""
        self._arena = arena
        self._need = need
        self._slab_bytes = slab_bytes
        self._slabs: list[SpanPool] = []
        self._returning: deque[tuple[ByteRange, Sequence[Event]]] = deque()
        """Parts that copies may still read, in the order in which they came back."""

    @property
    def part_max_bytes(self) -> int:
        """Bytes of the largest part that needs no further slab, once all is given back."""
        return max((slab.nbytes for slab in self._slabs), default=0)

    def widen(self, nbytes: int) -> None:
        """Have a slab of so many bytes, in the place of those of which nothing is leased."""
        self._slabs = [*(slab for slab in self._slabs if slab.in_use), SpanPool(self._arena, nbytes, self._need)]

    def fits(self, nbytes: int) -> bool:
        """True if a lease of so many bytes needs no further slab."""
        while self._returning and all(copy.done() for copy in self._returning[0][1]):
            self._free(self._returning.popleft()[0])
        return nbytes == 0 or any(slab.fits(nbytes) for slab in self._slabs)

    def lease(self, nbytes: int) -> Region:
        """A sector-aligned region of at least one byte."""
        nbytes = max(nbytes, 1)
        if not self.fits(nbytes):
            # Slabs that are too small for ever larger parts must not add up.
            self.widen(max(nbytes, self._slab_bytes))
        # The smallest slab: larger ones are for what fits nowhere else.
        return min((slab for slab in self._slabs if slab.fits(nbytes)), key=lambda slab: slab.nbytes).lease(nbytes)

    def release(self, part: ByteRange, copies: Sequence[Event] = ()) -> None:
        """`copies` may still read it."""
        if copies:
            self._returning.append((part, copies))
        else:
            self._free(part)

    def free_oldest(self) -> bool:
        """Wait for the copies of the part that came back first; False if there is none."""
        if not self._returning:
            return False
        for copy in self._returning[0][1]:
            copy.synchronize()
        self._free(self._returning.popleft()[0])
        return True

    def _free(self, part: ByteRange) -> None:
        slab = next((slab for slab in self._slabs if slab.holds(part)), None)
        assert slab is not None, "a part comes back once, and a slab stays while a part of it is leased"
        slab.release(part)
