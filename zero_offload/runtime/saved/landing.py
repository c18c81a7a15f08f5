"""Memory of a CPU's own under activations that came back from a file.

Owns slabs, of which each tensor's memory is a part. The C library's heap would do, but tensors of all sizes leave holes
there, which are given back to the system, and the page faults cost more than reading the drive. The calls: `lease`,
then reads to the address. A part is free again when no tensor views it and nothing is read to it any more, which is
seen when the next one is leased: what a finalizer is told may be lost.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

from zero_offload.base.types import MIB
from zero_offload.storage.files.swap_file import Transfer
from zero_offload.storage.memory.arena import Arena, Region
from zero_offload.storage.memory.pool import SpanPool

SLAB_BYTES = 16 * MIB
"""Taken at once; one tensor may be larger."""


class Lease(NamedTuple):
    """Memory for one tensor."""

    region: Region
    reads: list[Transfer | None]
    """What is read to it; None while one is launched, and where an exception came between."""


class _Leased(NamedTuple):
    slab: SpanPool
    address: int
    nbytes: int
    life: weakref.ref[object]
    reads: list[Transfer | None]

    @property
    def is_over(self) -> bool:
        return self.life() is None and all(read is not None and read.done() for read in self.reads)


class Landing:
    """The most that was in use at once."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._slabs: list[SpanPool] = []
        self._leased: list[_Leased] = []

    def lease(self, nbytes: int) -> Lease:
        """(nbytes,), sector-aligned, up to the end of its last sector."""
        self._collect()
        slab = next((each for each in self._slabs if each.fits(nbytes)), None) or self._grow(nbytes)
        region, reads = slab.lease(nbytes), list[Transfer | None]()
        self._leased.append(_Leased(slab, region.address, region.nbytes, weakref.ref(region.owner), reads))
        return Lease(region, reads)

    def _collect(self) -> None:
        for leased in [each for each in self._leased if each.is_over]:
            self._leased.remove(leased)
            leased.slab.release(leased)

    def _grow(self, nbytes: int) -> SpanPool:
        # Those that are too small for ever larger tensors must not add up.
        self._slabs = [slab for slab in self._slabs if slab.in_use]
        self._slabs.append(SpanPool(self._arena, max(nbytes, SLAB_BYTES)))
        return self._slabs[-1]
