"""How a unit's values get from their tier into its flat buffers.

`HostCarrier` reads straight into the buffers. `DeviceCarrier` uploads: values in CPU memory go from where they rest,
values on disk by way of pinned landing regions, at most `UNITS_IN_FLIGHT` of them. Both launch without waiting;
`advance` pushes on what can go on, `finish` makes the values valid for compute, `abandon` ends it so that the
buffers may be detached or their source changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from zero_offload.device import Device, Handoff
from zero_offload.memory.arena import Region
from zero_offload.memory.pool import RegionPool
from zero_offload.runtime.unit import Section, Unit
from zero_offload.shards.store import ShardStore
from zero_offload.storage.engine import Urgency
from zero_offload.storage.swap_file import Transfer


class Carrier(Protocol):
    def ready(self) -> bool:
        """Whether a launch would find all it needs."""

    def launch(self, unit: Unit, sections: Sequence[Section], urgency: Urgency) -> None: ...

    def advance(self, unit: Unit) -> None: ...

    def finish(self, unit: Unit) -> None: ...

    def abandon(self, unit: Unit) -> None: ...


class HostCarrier:
    """The compute device is the CPU."""

    def __init__(self, store: ShardStore, shard_index: int) -> None:
        self._store = store
        self._shard_index = shard_index
        self._transfers: dict[int, list[Transfer]] = {}

    def ready(self) -> bool:
        return True

    def launch(self, unit: Unit, sections: Sequence[Section], urgency: Urgency) -> None:
        transfers = self._transfers.setdefault(unit.index, [])
        for section in sections:
            address = section.flat.data_ptr() + self._shard_index * section.layout.shard_nbytes
            transfers += self._store.launch_fetch(section.shard, address, urgency)

    def advance(self, unit: Unit) -> None:
        pass

    def finish(self, unit: Unit) -> None:
        for transfer in self._transfers.pop(unit.index, []):
            transfer.wait()

    abandon = finish


@dataclass
class _Landing:
    """One unit's values on their way through a landing region; `uploads` is empty until the reads are done."""

    region: Region | None
    reads: list[tuple[Section, int, list[Transfer]]] = field(default_factory=list)
    uploads: list[Handoff] = field(default_factory=list)

    def arrived(self) -> bool:
        return all(transfer.done() for _, _, transfers in self.reads for transfer in transfers)


class DeviceCarrier:
    """The compute device has memory of its own."""

    def __init__(self, store: ShardStore, device: Device, pool: RegionPool, shard_index: int) -> None:
        self._store = store
        self._device = device
        self._pool = pool
        self._shard_index = shard_index
        self._flying: dict[int, _Landing] = {}
        self._landed: list[_Landing] = []
        """Uploads that compute may still be waiting for; their regions are reused once they are done."""

    def ready(self) -> bool:
        self._reclaim()
        return self._pool.available

    def launch(self, unit: Unit, sections: Sequence[Section], urgency: Urgency) -> None:
        landing = _Landing(None)
        self._flying[unit.index] = landing
        offset = 0
        for section in sections:
            source = self._store.value_in_memory(section.shard)
            if source is not None:
                landing.uploads.append(self._device.upload(self._target(section), source))
                continue
            landing.region = landing.region or self._lease()
            address = landing.region.address + offset
            transfers = self._store.launch_fetch(section.shard, address, urgency)
            landing.reads.append((section, offset, transfers))
            offset += section.layout.shard_nbytes

    def advance(self, unit: Unit) -> None:
        landing = self._flying.get(unit.index)
        if landing is not None and landing.arrived():
            self._upload(landing)

    def finish(self, unit: Unit) -> None:
        landing = self._flying.pop(unit.index)
        self._upload(landing)
        for handoff in landing.uploads:
            handoff.take()
        self._landed.append(landing)

    def abandon(self, unit: Unit) -> None:
        landing = self._flying.pop(unit.index, None)
        if landing is None:
            return
        for _, _, transfers in landing.reads:
            for transfer in transfers:
                transfer.wait()
        self._land(landing)

    def _upload(self, landing: _Landing) -> None:
        reads, landing.reads = landing.reads, []
        for section, offset, transfers in reads:
            for transfer in transfers:
                transfer.wait()
            assert landing.region is not None
            source = landing.region.tensor(section.layout.dtype, section.layout.shard_numel, offset)
            landing.uploads.append(self._device.upload(self._target(section), source))

    def _target(self, section: Section) -> torch.Tensor:
        numel = section.layout.shard_numel
        return section.flat[self._shard_index * numel : (self._shard_index + 1) * numel]

    def _lease(self) -> Region:
        """A landing region, waiting for the oldest upload if all are in use."""
        self._reclaim()
        if not self._pool.available:
            if not self._landed:
                oldest = next(each for each in self._flying.values() if each.region is not None)
                self._upload(oldest)
                self._land(oldest)
                oldest.region = None
            else:
                self._land(self._landed.pop(0))
        return self._pool.lease()

    def _reclaim(self) -> None:
        while self._landed and all(handoff.ready.done() for handoff in self._landed[0].uploads):
            self._land(self._landed.pop(0))

    def _land(self, landing: _Landing) -> None:
        """Wait for the uploads and give the region back."""
        for handoff in landing.uploads:
            handoff.take_on_host()
        if landing.region is not None:
            self._pool.release(landing.region)
