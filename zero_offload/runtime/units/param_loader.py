"""How a unit's values get from their tier into its flat buffers.

`HostParamLoader` reads straight into the buffers. `DeviceParamLoader` uploads. Values in CPU memory go from where they
rest. Values on disk go by way of pinned landing regions, with room for `UNITS_IN_FLIGHT` of the largest units. After
its `finish` copies may be under way for all the host knows: `Shard.last_copy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from zero_offload.base.types import Tier
from zero_offload.hardware.device import Device, Event, Handoff
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.storage.files.engine import Urgency
from zero_offload.storage.files.swap_file import Transfer
from zero_offload.storage.memory.arena import Region
from zero_offload.storage.memory.staging import Staging
from zero_offload.storage.shards.shard import Replica
from zero_offload.storage.shards.store import ShardStore


class ParamLoader(Protocol):
    def launch(self, unit: Unit, sections: Sequence[Section], urgency: Urgency) -> None:
        """Begin to fetch the values of these sections, or this rank's part of them."""

    def ahead(self, unit: Unit) -> AbstractContextManager[None]:
        """A block whose launches come after the values are in the buffers, while compute does not wait; `finish`
        follows.
        """

    def finish(self, unit: Unit) -> None:
        """Make what was launched valid for compute."""

    def launch_replica(self, unit: Unit, section: Section) -> None:
        """Launch the copy of gathered values to the section's replica, if it has one; `cancel` waits for it."""

    def cancel(self, unit: Unit) -> None:
        """End what was launched: the buffers may be detached when this returns."""


class HostParamLoader:
    """The compute device is the CPU."""

    def __init__(self, store: ShardStore, shard_index: int) -> None:
        self._store = store
        self._shard_index = shard_index
        self._transfers: dict[int, list[Transfer]] = {}

    def launch(self, unit: Unit, sections: Sequence[Section], urgency: Urgency) -> None:
        transfers = self._transfers.setdefault(unit.index, [])
        for section in sections:
            replica = section.shard.fresh_replica
            if replica is not None:
                transfers.append(replica.launch_fetch(section.flat.data_ptr(), urgency))
                continue
            address = section.flat.data_ptr() + self._shard_index * section.layout.shard_nbytes
            transfers += self._store.launch_fetch(section.shard, address, urgency)

    def launch_replica(self, unit: Unit, section: Section) -> None:
        replica = section.shard.replica
        if replica is not None:
            self._transfers.setdefault(unit.index, []).append(replica.launch_save(section.flat.data_ptr()))
            replica.fresh = True

    def ahead(self, unit: Unit) -> AbstractContextManager[None]:
        self.finish(unit)
        return nullcontext()

    def finish(self, unit: Unit) -> None:
        # Forgotten when it is over: a Ctrl-C may break off the wait, and not the transfer.
        for transfer in self._transfers.get(unit.index, ()):
            transfer.wait()
        self._transfers.pop(unit.index, None)

    cancel = finish


@dataclass
class _Streams:
    """The streams that compute with a unit's buffers."""

    home: Any
    """The allocator gives their memory to others in the order of this stream."""
    users: list[Any] = field(default_factory=list)
    """Streams that have waited for the values, and may compute with them."""
    arrival: Event | None = None
    """When the values are there; None before `arrived`."""


class UnitStreams:
    """Follows the memory of units: each stream that uses one waits for its values, and its memory goes back after the
    last use. A program may compute on streams of its own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams: dict[int, _Streams] = {}
        """Streams by unit, for units whose buffers have memory."""

    def of(self, unit: Unit) -> _Streams:
        return self._streams[unit.index]

    def attached(self, unit: Unit) -> None:
        """The buffers have memory, of this thread's stream."""
        self._streams[unit.index] = _Streams(self._device.stream())

    def arrived(self, unit: Unit) -> None:
        """All loads are finished: this thread's stream has waited for the values."""
        streams = self._streams[unit.index]
        streams.users, streams.arrival = [self._device.stream()], self._device.mark()

    def use(self, unit: Unit) -> None:
        """This thread's stream is about to compute with a unit that is here."""
        streams = self._streams.get(unit.index)
        if streams is None or streams.arrival is None:  # what never leaves has no memory of a stream's
            return
        if self._device.stream() not in streams.users:
            streams.arrival.wait()
            streams.users.append(self._device.stream())

    def release(self, unit: Unit) -> None:
        """Streams that use the unit are done with its buffers before their memory serves others."""
        streams = self._streams.pop(unit.index, None)
        if streams is not None:
            # Here, too: a gather that was given up is waited for by this stream.
            self._device.join([*streams.users, self._device.stream()], into=streams.home)

    def catch_up(self, streams: _Streams) -> None:
        """Order the launches that follow, which write to the buffers, after all that others have done with their
        memory.
        """
        self._device.join([streams.home, *streams.users])


@dataclass
class _UnitUpload:
    """One unit's values on their way through a landing region; `uploads` is empty until the reads are done."""

    region: Region | None
    streams: _Streams
    reads: list[tuple[torch.Tensor, int, list[Transfer]]] = field(default_factory=list)
    """Tensors to fill on the device, from which byte of the region, once these reads are done."""
    uploads: list[Handoff] = field(default_factory=list)

    def arrived(self) -> bool:
        return all(transfer.done() for _, _, transfers in self.reads for transfer in transfers)


@dataclass
class _ReplicaWrite:
    """Gathered values on their way to a replica: down to the host, and where it rests on disk, by way of a region."""

    replica: Replica
    download: Handoff
    region: Region | None
    write: Transfer | None = None


class DeviceParamLoader:
    """The compute device has memory of its own."""

    def __init__(self, store: ShardStore, device: Device, staging: Staging, shard_index: int) -> None:
        self._store = store
        self._counters = store.counters
        self._device = device
        self._staging = staging
        self._shard_index = shard_index
        self._flying: dict[int, _UnitUpload] = {}
        self._keeping: dict[int, list[_ReplicaWrite]] = {}
        self.streams = UnitStreams(device)

    def ready(self, unit: Unit) -> bool:
        """True if there is memory for the unit's values to land in."""
        self._advance_kept()
        return self._staging.fits(self._landing_bytes(unit.sections))

    def launch(self, unit: Unit, sections: Sequence[Section], urgency: Urgency) -> None:
        landing = self._flying[unit.index] = _UnitUpload(None, self.streams.of(unit))
        self.streams.catch_up(landing.streams)
        offset, nbytes = 0, self._landing_bytes(sections)
        mark: Event | None = None  # one for all: nothing that uses the targets is launched meanwhile
        for section in sections:
            target, source = self._ends(section)
            if section.shard.on_device and section.shard.fresh_replica is None:
                assert source is not None
                self._copy_within(target, source)
                continue
            if source is not None:
                self._counters.read(Tier.CPU, source.nbytes)
                mark = mark or self._device.mark()
                landing.uploads.append(self._device.upload(target, source, after=mark))
                section.shard.last_copy = landing.uploads[-1].ready
                continue
            landing.region = landing.region or self._lease(nbytes)
            address = landing.region.address + offset
            landing.reads.append((target, offset, self._launch_reads(section, address, urgency)))
            offset += target.nbytes
        assert offset == nbytes, f"unit {unit.name}: reads of {offset} bytes, and room for {nbytes}"

    def _copy_within(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy in the device's memory, in the order of compute, which has updated the source. Both may be the same."""
        if target.data_ptr() != source.data_ptr():
            self._counters.read(Tier.DEVICE, source.nbytes)
            target.copy_(source)

    def _landing_bytes(self, sections: Sequence[Section]) -> int:
        """Bytes of what comes from disk."""
        ends = [self._ends(section) for section in sections]
        return sum(target.nbytes for target, source in ends if source is None)

    def _ends(self, section: Section) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tensor to fill on the device, and its source in memory; None where the values rest on disk."""
        replica = section.shard.fresh_replica
        if replica is not None:
            return section.flat, replica.memory
        begin, end = self._own(section)
        return section.flat[begin:end], self._store.value_in_memory(section.shard)

    def _own(self, section: Section) -> tuple[int, int]:
        """The elements of the section that are this rank's."""
        numel = section.layout.shard_numel
        return self._shard_index * numel, (self._shard_index + 1) * numel

    def _launch_reads(self, section: Section, address: int, urgency: Urgency) -> list[Transfer]:
        replica = section.shard.fresh_replica
        if replica is not None:
            return [replica.launch_fetch(address, urgency)]
        return self._store.launch_fetch(section.shard, address, urgency)

    def advance(self, unit: Unit) -> None:
        """Upload what was read."""
        landing = self._flying.get(unit.index)
        if landing is not None and landing.arrived():
            self._upload(landing)

    def ahead(self, unit: Unit) -> AbstractContextManager[None]:
        landing = self._flying[unit.index]
        self._upload(landing)
        return self._device.following([handoff.ready for handoff in landing.uploads])

    def finish(self, unit: Unit) -> None:
        landing = self._flying[unit.index]
        self._upload(landing)
        for handoff in landing.uploads:
            handoff.take()
        if landing.region is not None:
            # Without the tensors: a tensor on the unit's buffer would keep the unit here.
            self._staging.release(landing.region, [handoff.ready for handoff in landing.uploads])
        del self._flying[unit.index]

    def launch_replica(self, unit: Unit, section: Section) -> None:
        replica = section.shard.replica
        if replica is None:
            return
        if replica.memory is None:
            region = self._lease(section.flat.nbytes)
            landed = region.tensor(section.flat.dtype, section.flat.numel())
            keeping = _ReplicaWrite(replica, self._device.download(landed, section.flat), region)
        else:
            parts = [slice(None)]
            if not section.shard.on_device:
                # This rank's part rests here: a save or a commit may read it while the others' come down.
                begin, end = self._own(section)
                parts = [part for part in (slice(begin), slice(end, None)) if section.flat[part].numel()]
            for part in parts:
                self._counters.written(Tier.CPU, section.flat[part].nbytes)
                download = self._device.download(replica.memory[part], section.flat[part])
            keeping = _ReplicaWrite(replica, download, None)  # the last one: a lane keeps the order
        self._keeping.setdefault(unit.index, []).append(keeping)
        replica.fresh = True

    def cancel(self, unit: Unit) -> None:
        for keeping in self._keeping.pop(unit.index, []):
            self._finish_replica(keeping)
        landing = self._flying.get(unit.index)
        if landing is None:
            return
        for _, _, transfers in landing.reads:
            for transfer in transfers:
                transfer.wait()
        self._finish_upload(landing)
        del self._flying[unit.index]

    def make_room(self, nbytes: int) -> None:
        """Let units on their way take so many bytes of host memory from now on."""
        if nbytes <= self._staging.part_max_bytes:
            return
        while (oldest := self._oldest_kept()) is not None:
            self._finish_replica(oldest)
        for flying in self._flying.values():
            self._upload(flying)
            self._finish_upload(flying)
        while self._staging.free_oldest():
            pass
        self._staging.widen(nbytes)

    def _finish_replica(self, keeping: _ReplicaWrite) -> None:
        keeping.download.take_on_host()
        if keeping.region is not None:
            if keeping.write is None:
                keeping.write = keeping.replica.launch_save(keeping.region.address)
            keeping.write.wait()
            self._staging.release(keeping.region)

    def _upload(self, landing: _UnitUpload) -> None:
        if not landing.reads:
            return
        self.streams.catch_up(landing.streams)
        mark = self._device.mark()
        while landing.reads:
            target, offset, transfers = landing.reads[0]
            for transfer in transfers:
                transfer.wait()
            assert landing.region is not None
            source = landing.region.tensor(target.dtype, target.numel(), offset)
            landing.uploads.append(self._device.upload(target, source, after=mark))
            landing.reads.pop(0)

    def _lease(self, nbytes: int) -> Region:
        """A landing region, waiting for the oldest replicas or uploads while too much is in use."""
        self._advance_kept()
        self.make_room(nbytes)  # for a unit of experts, which is read in groups otherwise
        while not self._staging.fits(nbytes):
            if (oldest := self._oldest_kept()) is not None:
                self._finish_replica(oldest)
            elif not self._staging.free_oldest():
                flying = next(each for each in self._flying.values() if each.region is not None)
                self._upload(flying)
                self._finish_upload(flying)
        return self._staging.lease(nbytes)

    def _oldest_kept(self) -> _ReplicaWrite | None:
        """Taken off the list."""
        for kept in self._keeping.values():
            for keeping in kept:
                if keeping.region is not None:
                    kept.remove(keeping)
                    return keeping
        return None

    def _advance_kept(self) -> None:
        """Launch the writes of replicas that have come down."""
        for kept in self._keeping.values():
            for keeping in kept:
                if keeping.region is not None and keeping.write is None and keeping.download.ready.done():
                    keeping.write = keeping.replica.launch_save(keeping.region.address)

    def _finish_upload(self, landing: _UnitUpload) -> None:
        """Wait for the uploads and give the region back."""
        for upload in landing.uploads:
            upload.take_on_host()
        if landing.region is not None:
            self._staging.release(landing.region)
            landing.region = None
