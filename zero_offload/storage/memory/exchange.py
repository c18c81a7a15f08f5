"""Two storages exchange their memory: `exchanger` has torch's function, or does what it does. So `storage_over` gives a
part of a tensor a storage of its own on any device.

[Note: memory of torch's storages]
torch has a function for it since March 2026 (`UntypedStorage._swap_data_ptr_`, pytorch/pytorch#177449; 2.13 has it).
In an older one some bytes of both storage objects are exchanged. They say where memory is, how it is freed and how
large it is. The address lies in them as `data_ptr()` gives it, with the size behind. A trial on storages of its own
shows that each has the other's memory then. If something is not as expected, there is no exchange.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any

import torch

from zero_offload.hardware.accelerators import ACCELERATORS
from zero_offload.hardware.device import aliased

_READ = 80
"""Bytes of a storage object in which this lies; fewer than any version of it has."""
_MEMORY = struct.Struct("PPPq")
"""Address, what is freed, the function that frees it, and the device."""
_NBYTES = _MEMORY.size + 8
"""With the size."""

Exchange = Callable[[torch.UntypedStorage, torch.UntypedStorage], None]


@functools.cache
def exchanger() -> Exchange | None:
    """A function that exchanges the memory of two storages of one device; None where there is none."""
    of_torch: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)
    return of_torch or by_bytes()


def storage_over(elements: torch.Tensor) -> torch.UntypedStorage | None:
    """A storage over the memory of these elements alone, which it keeps; None where there is none.

    That of a DLPack capsule, which cannot be resized. A device type with storages of its own gets one of these, with
    the memory of the capsule's.
    """
    alias = aliased(elements.view(torch.uint8)).untyped_storage()
    accelerator = ACCELERATORS.get(elements.device.type)
    if accelerator is None or accelerator.has_aliases:
        return alias
    if (exchange := exchanger()) is None:
        return None
    storage = elements.new_empty(0).untyped_storage()
    exchange(storage, alias)
    return storage


def by_bytes() -> Exchange | None:
    """See [Note: memory of torch's storages]."""
    tensors = [torch.arange(numel, dtype=torch.int64, device="cpu") for numel in (3, 5)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    places = {place for storage in storages for place in _places(storage)}
    if len(places) != 1:
        return None
    exchange = functools.partial(_exchange, places.pop())
    addresses = [storage.data_ptr() for storage in storages]
    exchange(*storages)
    found = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
    exchange(*storages)
    is_right = found == [(addresses[1], 40), (addresses[0], 24)]
    return exchange if is_right and [tensor.tolist() for tensor in tensors] == [[0, 1, 2], [0, 1, 2, 3, 4]] else None


def _places(storage: torch.UntypedStorage) -> list[int]:
    """Where in a storage object the address of its memory lies, with the size behind it."""
    words = struct.unpack(f"{_READ // 8}Q", ctypes.string_at(storage._cdata, _READ))
    sought, behind = (storage.data_ptr(), storage.nbytes()), _MEMORY.size // 8
    return [8 * place for place in range(len(words) - behind) if (words[place], words[place + behind]) == sought]


def _exchange(place: int, one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    at = one._cdata + place, other._cdata + place
    values = ctypes.string_at(at[1], _NBYTES), ctypes.string_at(at[0], _NBYTES)
    # In one call of C: a Ctrl-C in between would leave two storages that free the same memory.
    collections.deque(map(ctypes.memmove, at, values, (_NBYTES, _NBYTES)), maxlen=0)
