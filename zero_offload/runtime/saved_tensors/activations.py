"""Tensors that autograd keeps between forward and backward, on the tiers that `activations=` names.

Owns which tensors leave, to where, and when they come back. Memory is stored, not tensors: a storage that several nodes
or several views have saved goes once. The calls: `begin` with each outermost forward; `pack` by autograd for a tensor
it saves, `unpack` when a node reads it. Backward runs against the order of packing: what was packed before the tensor
that is wanted now is fetched ahead.

Parameters and buffers stay, and so does what is smaller than `SMALLEST_BYTES`. How many bytes a forward will save is
not known before it runs. So fractions are met storage by storage: each goes to the tier that lags most.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from zero_offload.base.config import OffloadConfig
from zero_offload.base.events import Counters
from zero_offload.base.spans import Cause
from zero_offload.base.types import MIB, Tier
from zero_offload.hardware.device import Device
from zero_offload.plan.layout import Dealer
from zero_offload.runtime.saved_tensors.tiers import ActivationTier, DiskTier, HostTier, StoredBytes
from zero_offload.standins.brought import changed_in_place
from zero_offload.storage.files.swap_file import SwapFile
from zero_offload.storage.memory.heap import ACTIVATION_TRIM_BYTES, HeapTrimmer
from zero_offload.storage.shards.store import ShardStore

SMALLEST_BYTES = 1 * MIB
"""A smaller storage stays: it saves less memory than its way costs."""
AHEAD_BYTES = 32 * MIB
"""Fetched ahead of the backward, beside what is in use; one storage may be larger. To a device two of the largest
storages, up to what the plan counts."""
_LOOK_BACK = 64
"""Storages among which those to fetch ahead are looked for."""

_Key = tuple[int, int]
"""Address and version of a storage."""
Part = tuple[int, int]
"""A part of a forward whose backward does not run against the order of packing: see `part`."""


class VersionCheck:
    """Tells if a tensor was changed in place since; keeps none of its memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape = tuple(tensor.shape)
        self._counter: Tensor | None = None
        self._version = 0
        if type(tensor) is Tensor and not tensor.is_inference():
            # A tensor shares the counter of the one it was detached from, whatever its data is replaced by.
            self._counter, self._version = tensor.detach(), tensor._version
            self._counter.data = tensor.new_empty(0)

    @property
    def changed(self) -> bool:
        return self._counter is not None and self._counter._version != self._version

    def raise_if_changed(self) -> None:
        if self.changed:
            assert self._counter is not None
            raise changed_in_place(self._shape, self._counter._version, self._version)

    def __str__(self) -> str:
        assert self._counter is not None
        return f"a tensor of shape {self._shape}, is at version {self._counter._version}, expected {self._version}"


class Stored:
    """One storage's memory, away; dies with the last node that saved a view of it."""

    def __init__(self, nbytes: int, copy: StoredBytes, number: int, part: Part) -> None:
        self.number = number
        self.part = part
        self.nbytes = nbytes
        self.num_saved = 0
        self.copy = copy
        self.here: Tensor | None = None
        """(nbytes,) uint8 on the compute device, while a node that saved it has still to read it."""
        self._num_read = 0

    def read(self) -> Tensor:
        """(nbytes,) uint8 on the compute device; kept until every node that saved it has read it."""
        memory = self.copy.finish() if self.here is None else self.here
        self._num_read = (self._num_read + 1) % self.num_saved
        self.here = memory if self._num_read else None
        return memory

    def drop_copy(self) -> None:
        """This backward reads it no more."""
        self.here, self._num_read = None, 0
        self.copy.cancel()


class _Remains(weakref.ref[Stored]):
    """The part of a `Stored` that is given back after its death; `on_death` gets it then.

    `on_death` is a method of C. Python drops what a signal's handler raises in a finalizer: a Ctrl-C in C++ code that
    frees a graph would be lost in `__del__`.
    """

    __slots__ = ("key", "number", "part", "origin", "copy")

    def __new__(cls, stored: Stored, on_death: Callable[[Any], None], *_: Any) -> Self:
        return super().__new__(cls, stored, on_death)

    def __init__(
        self, stored: Stored, on_death: Callable[[Any], None], origin: torch.UntypedStorage, key: _Key
    ) -> None:
        self.key = key
        self.number = stored.number
        self.part = stored.part
        self.origin = weakref.ref(origin)
        self.copy = stored.copy


class OffloadedActivation(NamedTuple):
    """A saved tensor whose memory is stored."""

    stored: Stored
    check: VersionCheck
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Activations:
    """Saved tensors of one model's forwards, stored for its backwards."""

    def __init__(
        self,
        fractions: Mapping[Tier, float],
        tiers: Mapping[Tier, ActivationTier],
        counters: Counters,
        buffers: Iterable[Tensor],
        device_type: str,
        trimmer: HeapTrimmer | None = None,
        ahead_max: int = 0,
    ) -> None:
        """`tiers`: of those in `fractions`, all but the compute device's own. `buffers` stay, and so does what is not
        on a device of `device_type`. `trimmer` where tensors are in the C library's heap, which would keep what they
        leave. `ahead_max`: bytes that large storages may take ahead of the backward, on a device.
        """
        self._fractions = fractions
        self._tiers = tiers
        self._counters = counters
        self._staying: set[int] = set()
        """Storages, by address."""
        self.exempt(buffers)
        self._device_type = device_type
        self._trimmer = trimmer
        self._ahead_max = ahead_max
        self._ahead = 0
        """Bytes; less than `AHEAD_BYTES` where no storage needs more."""
        self._dealer = Dealer(fractions)
        self._by_key: dict[_Key, _Remains] = {}
        self._by_number: dict[int, _Remains] = {}
        self._dead: deque[_Remains] = deque()
        """Whose blocks are to be given back."""
        self._kept: dict[_Key, weakref.ref[torch.UntypedStorage]] = {}
        """Storages that this forward has left where they are."""
        self._num_stored = 0
        self._backward = -1
        self.part: Part = (0, 0)
        """The part that is packed now, where one backward has several parts. They are read from the last one down."""
        self._in_parts = False

    def exempt(self, buffers: Iterable[Tensor]) -> None:
        """These stay too."""
        self._staying |= {buffer.untyped_storage()._cdata for buffer in buffers}

    def begin(self) -> None:
        """An outermost forward: alike forwards place their tensors alike."""
        self._release_dead()
        self._dealer = Dealer(self._fractions)
        self._kept.clear()
        self._in_parts = False

    def pack(self, tensor: Tensor) -> OffloadedActivation | None:
        """Launch the way out; None when the tensor stays."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        if tensor.device.type != self._device_type:
            return None  # a mask on the host, beside a GPU
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None  # a part of what torch.func's transforms compute, which has no memory of its own
        storage = tensor.untyped_storage()
        is_input = tensor.is_leaf and tensor.requires_grad
        if storage.nbytes() < SMALLEST_BYTES or is_input or storage._cdata in self._staying:
            return None
        if tensor.nbytes != storage.nbytes() and not tensor._is_view():
            return None  # such parts, as cells of recurrent networks make them, count their versions each for itself
        key = (storage._cdata, tensor._version)
        kept = self._kept.get(key)
        if kept is not None and kept() is storage:
            return None
        remains = self._by_key.get(key)
        # Another storage may be at its address by now.
        stored = remains() if remains is not None and remains.origin() is storage else None
        if stored is None:
            tier = self._dealer.deal(storage.nbytes())
            self._counters.add(f"activations.{tier.value}", storage.nbytes())
            if tier not in self._tiers:
                self._kept[key] = weakref.ref(storage)
                return None
            stored = self._put(self._tiers[tier], storage, tensor.device, key)
        stored.num_saved += 1
        return OffloadedActivation(
            stored, VersionCheck(tensor), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def _put(self, tier: ActivationTier, storage: torch.UntypedStorage, device: torch.device, key: _Key) -> Stored:
        self._release_dead()
        self._num_stored += 1
        if (ahead := min(2 * storage.nbytes(), self._ahead_max)) > self._ahead:
            self._ahead = ahead
            for each in self._tiers.values():
                each.reach(ahead)
        copy = tier.put(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))
        stored = Stored(storage.nbytes(), copy, self._num_stored, self.part)
        self._count(stored)
        remains = _Remains(stored, self._dead.append, storage, key)
        self._by_key[key] = self._by_number[stored.number] = remains
        return stored

    def _release_dead(self) -> None:
        """The blocks of those that have died."""
        while self._dead:
            remains = self._dead.popleft()
            del self._by_number[remains.number]
            if self._by_key.get(remains.key) is remains:
                del self._by_key[remains.key]
            remains.copy.release()

    def unpack(self, away: OffloadedActivation) -> Tensor:
        """The tensor, for compute launched from now on."""
        self._release_dead()
        away.check.raise_if_changed()
        backward = torch._C._current_graph_task_id()
        if backward not in (-1, self._backward) and not self._in_parts:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        stored = away.stored
        if stored.here is not None:
            memory = stored.read()
        else:
            with self._counters.waiting(Cause.ACTIVATIONS):
                memory = stored.read()
            self._count(stored)
            self._fetch_ahead(stored.number)
        empty = torch.empty(0, dtype=away.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), away.offset, away.shape, away.stride)

    def _count(self, stored: Stored) -> None:
        """Count it on its way out or back: about as much has been freed, or will be freed of backward's own memory."""
        if self._trimmer is not None:
            self._trimmer.freed(stored.nbytes)

    def _fetch_ahead(self, number: int) -> None:
        left = max(self._ahead, AHEAD_BYTES)
        for earlier in range(number - 1, max(number - 1 - _LOOK_BACK, 0), -1):
            remains = self._by_number.get(earlier)
            stored = None if remains is None else remains()
            if stored is not None and stored.here is None:
                if not stored.copy.launch():
                    return
                left -= stored.nbytes
                if left <= 0:
                    return

    def begin_parts(self) -> None:
        """A backward of several parts, which for autograd are backwards of their own, until `end_backward`."""
        self._release_dead()
        self._in_parts = True
        ordered = sorted(self._by_number.values(), key=lambda remains: (remains.part, remains.number))
        self._by_number = dict(enumerate(ordered, start=1))
        for number, remains in self._by_number.items():
            remains.number = number
            if (stored := remains()) is not None:
                stored.number = number

    def end_backward(self) -> None:
        """Free what some nodes that saved it have not read: the graph may stay for long."""
        self._in_parts = False
        self._release_dead()
        for remains in list(self._by_number.values()):
            stored = remains()
            if stored is not None:
                stored.drop_copy()


def open_activations(
    config: OffloadConfig,
    device: Device,
    store: ShardStore,
    scratch: SwapFile | None,
    buffers: Iterable[Tensor],
    ahead_max: int,
) -> Activations | None:
    """The activations of one model; None when every tensor stays where it is: a CPU computes on the cpu tier itself."""
    fractions, counters = config.activation_fractions, store.counters
    tiers: dict[Tier, ActivationTier] = {}
    if Tier.CPU in fractions and not device.is_host:
        tiers[Tier.CPU] = HostTier(device, store.arena, counters)
    if Tier.NVME in fractions:
        assert scratch is not None
        tiers[Tier.NVME] = DiskTier(device, store.arena, scratch)
    if not tiers:
        return None
    trimmer = HeapTrimmer(ACTIVATION_TRIM_BYTES) if device.is_host else None
    return Activations(fractions, tiers, counters, buffers, device.torch_device.type, trimmer, ahead_max)
