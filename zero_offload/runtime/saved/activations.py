"""Tensors that autograd keeps between forward and backward, on the tiers that `activations=` names.

Owns which tensors leave, to where, and when they come back. What is stored is memory, not tensors: a storage that
several nodes or several views have saved goes once. The calls: `begin` with each outermost forward; `pack` by autograd
for a tensor it saves, `unpack` when a node reads it. Backward runs against the order of packing: what was packed
before the tensor that is wanted now is fetched ahead.

Parameters and buffers stay, and so does what is smaller than `SMALLEST_BYTES`. How many bytes a forward will save is
not known before it runs, so fractions are met storage by storage: each goes to the tier that lags most.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zero_offload.config import OffloadConfig
from zero_offload.device import Device
from zero_offload.memory.heap import ACTIVATION_TRIM_BYTES, HeapTrimmer
from zero_offload.plan.dealer import Dealer
from zero_offload.runtime.saved.tensors import VersionCheck
from zero_offload.runtime.saved.tiers import ActivationTier, DiskTier, HostTier, Pieces
from zero_offload.shards.disk import DiskArrays
from zero_offload.shards.store import ShardStore
from zero_offload.storage.swap_file import SwapFile
from zero_offload.telemetry.events import Counters
from zero_offload.types import MIB, Tier

SMALLEST_BYTES = 1 * MIB
"""A smaller storage stays: it saves less memory than its way costs."""
AHEAD_BYTES = 32 * MIB
"""Fetched ahead of the backward, beside what is in use; one storage may be larger."""
_LOOK_BACK = 64
"""Storages among which those to fetch ahead are looked for."""


class Stored:
    """One storage's memory, away; dies with the last node that saved a view of it."""

    def __init__(self, tier: ActivationTier, storage: torch.UntypedStorage, pieces: Pieces, number: int) -> None:
        self.number = number
        self.nbytes = storage.nbytes()
        # Holds the address, so that no other storage can be taken for this one, but not the memory.
        self.origin = StorageWeakRef(storage)
        self.num_saved = 0
        self._tier = tier
        self._pieces = pieces
        self._arrival = tier.arrival(pieces)
        self._here: Tensor | None = None
        self._num_read = 0

    @property
    def here(self) -> bool:
        return self._here is not None

    def start(self) -> bool:
        return self._arrival.start()

    def read(self) -> Tensor:
        """(nbytes,) uint8 on the compute device; kept until all who saved it have read it."""
        here = self._here if self._here is not None else self._arrival.finish()
        self._num_read += 1
        self._here = here if self._num_read < self.num_saved else None
        if self._here is None:
            self._num_read = 0
        return here

    def leave(self) -> None:
        """This backward reads it no more."""
        self._here, self._num_read = None, 0
        self._arrival.abandon()

    def __del__(self) -> None:
        self._arrival.abandon()
        self._tier.release(self._pieces)


class Away(NamedTuple):
    """A saved tensor whose memory is stored."""

    stored: Stored
    check: VersionCheck
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Activations:
    """What one model's forwards keep for their backwards."""

    def __init__(
        self,
        fractions: Mapping[Tier, float],
        tiers: Mapping[Tier, ActivationTier],
        counters: Counters,
        staying: Collection[int],
        trimmer: HeapTrimmer | None = None,
    ) -> None:
        """`tiers`: of those in `fractions`, the ones that are elsewhere. `staying`: storages of buffers, by address.
        `trimmer` where tensors are in the C library's heap, which would keep what they leave."""
        self._fractions = fractions
        self._tiers = tiers
        self._counters = counters
        self._staying = staying
        self._trimmer = trimmer
        self._dealer = Dealer(fractions)
        self._stored: weakref.WeakValueDictionary[tuple[int, int], Stored] = weakref.WeakValueDictionary()
        """By address and version of the storage."""
        self._numbered: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        self._kept: dict[tuple[int, int], StorageWeakRef] = {}
        """Storages that this forward has left where they are."""
        self._num_stored = 0
        self._backward = -1

    def begin(self) -> None:
        """An outermost forward: alike forwards place their tensors alike."""
        self._dealer = Dealer(self._fractions)
        self._kept.clear()

    def pack(self, tensor: Tensor) -> Away | None:
        """Launch the way out; None when the tensor stays."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        is_input = tensor.is_leaf and tensor.requires_grad
        if storage.nbytes() < SMALLEST_BYTES or is_input or storage._cdata in self._staying:
            return None
        key = (storage._cdata, tensor._version)
        if key in self._kept:
            return None
        stored = self._stored.get(key)
        if stored is None:
            tier = self._dealer.deal(storage.nbytes())
            self._counters.add(f"activations.{tier.value}", storage.nbytes())
            if tier not in self._tiers:
                self._kept[key] = StorageWeakRef(storage)
                return None
            self._num_stored += 1
            pieces = self._tiers[tier].put(_bytes_of(tensor, storage))
            stored = Stored(self._tiers[tier], storage, pieces, self._num_stored)
            self._count(stored)
            self._stored[key] = self._numbered[stored.number] = stored
        stored.num_saved += 1
        return Away(
            stored, VersionCheck(tensor), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def unpack(self, away: Away) -> Tensor:
        """The tensor, for compute launched from now on."""
        away.check.raise_if_changed()
        self._note_backward()
        if not away.stored.here:
            with self._counters.timed("stall_s"):
                memory = away.stored.read()
            self._count(away.stored)
            self._fetch_ahead(away.stored.number)
        else:
            memory = away.stored.read()
        empty = torch.empty(0, dtype=away.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), away.offset, away.shape, away.stride)

    def _count(self, stored: Stored) -> None:
        """On its way out or back: about as much has been freed."""
        if self._trimmer is not None:
            self._trimmer.freed(stored.nbytes)

    def _fetch_ahead(self, number: int) -> None:
        left = AHEAD_BYTES
        for earlier in range(number - 1, max(number - 1 - _LOOK_BACK, 0), -1):
            stored = self._numbered.get(earlier)
            if stored is not None and not stored.here:
                if not stored.start():
                    return
                left -= stored.nbytes
                if left <= 0:
                    return

    def _note_backward(self) -> None:
        backward = torch._C._current_graph_task_id()
        if backward not in (-1, self._backward):
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """Memory of what was not read by all who saved it goes: the graph may stay for long."""
        for stored in list(self._numbered.values()):
            stored.leave()


def _bytes_of(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """(nbytes,) uint8, all of the storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def open_activations(
    config: OffloadConfig, device: Device, store: ShardStore, scratch: SwapFile | None, buffers: Iterable[Tensor]
) -> Activations | None:
    """For one model; None when every tensor stays where it is: a CPU computes on the cpu tier itself."""
    fractions, counters = config.activation_fractions, store.counters
    tiers: dict[Tier, ActivationTier] = {}
    if Tier.CPU in fractions and not device.is_host:
        tiers[Tier.CPU] = HostTier(device, store.arena, counters)
    if Tier.NVME in fractions:
        tiers[Tier.NVME] = DiskTier(device, store.arena, DiskArrays(scratch, counters))
    if not tiers:
        return None
    staying = frozenset(buffer.untyped_storage()._cdata for buffer in buffers)
    trimmer = HeapTrimmer(ACTIVATION_TRIM_BYTES) if device.is_host else None
    return Activations(fractions, tiers, counters, staying, trimmer)
