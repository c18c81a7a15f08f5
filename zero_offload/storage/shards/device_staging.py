"""Host memory through which states in a device's memory pass on their way to a drive.

Owns the regions, and the moment after which the device's states are those of the last update. The calls: `updated` when
an update, or whatever else changes states without a wait, is launched, on its thread; `bring` and `give_back` on the
commit's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_offload.base.types import whole_sectors
from zero_offload.hardware.device import Device, Event
from zero_offload.storage.memory.arena import Arena, Region


class DeviceStaging:
    """As many regions as are leased at once; kept."""

    def __init__(self, device: Device, arena: Arena) -> None:
        self._device = device
        self._arena = arena
        self._free: list[Region] = []
        self._newest: Event | None = None if device.is_host else device.mark()

    def updated(self) -> None:
        """The updates of all states are launched."""
        self._newest = self._device.mark()

    def bring(self, arrays: Sequence[torch.Tensor]) -> tuple[Region, list[int]]:
        """Copies of the arrays, each on sectors of its own, and their addresses; the arrays may change then."""
        region = self._lease(sum(map(_room, arrays)))
        addresses, copies, offset = [], [], 0
        for array in arrays:
            addresses.append(region.address + offset)
            target = region.tensor(array.dtype, array.numel(), offset)
            copies.append(self._device.download(target, array, after=self._newest))
            offset += _room(array)
        for copy in copies:
            copy.take_on_host()
        return region, addresses

    def give_back(self, region: Region) -> None:
        self._free.append(region)

    def _lease(self, nbytes: int) -> Region:
        # States that came later make chunks larger: what is too small goes.
        self._free = [region for region in self._free if region.nbytes >= nbytes]
        return self._free.pop() if self._free else self._arena.allocate(nbytes)


def _room(array: torch.Tensor) -> int:
    return whole_sectors(array.nbytes)
