"""Where each section's gradients rest, and what holds them while backward makes them: chosen once, by tier, device and
number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero_offload.base.types import Tier, whole_sectors
from zero_offload.hardware.device import Device
from zero_offload.plan.layout import SectionLayout
from zero_offload.plan.memory import (
    REDUCED_PIECE_BYTES,
    grad_staging_bytes,
    reduced_grad_bytes,
    sliced_grad_bytes,
    staged_grad_bytes,
)
from zero_offload.plan.model_spec import ExpertGroups
from zero_offload.runtime.grads.section import DevicePartial, FreshGrads, GradSection, HostPartial, StagedPartial
from zero_offload.runtime.prefetcher import MemoryPool
from zero_offload.runtime.ranks.collectives import Collectives
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.storage.shards.device_grads import DeviceGrads
from zero_offload.storage.shards.drive_grads import DriveGrads
from zero_offload.storage.shards.grad_store import GradMemory, GradStore, HostGrads
from zero_offload.storage.shards.ring_grads import GradRing, RingDriveGrads, RingGrads


class GradSections:
    """Makes a model's `GradSection` objects, and staging for those whose gradients leave a GPU."""

    def __init__(
        self, memory: GradMemory, pool: MemoryPool, collectives: Collectives, device: Device, ring: GradRing | None
    ) -> None:
        """`ring`: with overlap="backward"."""
        self._memory = memory
        self._attach = pool.attach
        self._drive_room = pool.drive_room
        self._downloads = pool.drive_room.downloads
        self._collectives = collectives
        self._device = device
        self._ring = ring

    def resize_staging(self, sections: Sequence[GradSection]) -> None:
        """Room for what leaves a GPU of all these."""
        if self._downloads is not None:
            leaving = [section for section in sections if not self.rest_on_device(section.section)]
            self._downloads.resize(self._staging_bytes(leaving), [self._sent_bytes(each) for each in leaving])

    def section(self, unit: Unit, section: Section) -> GradSection:
        store, local = self._new_store(section, section.layout, unit.name, self._ring, sums_up=True), None
        if self._collectives.world_size > 1:
            local = self._new_store(section, section.layout.whole(), unit.name, None, sums_up=False)
        downloads = self._downloads
        fresh = None if downloads is None else FreshGrads(local or store, self._device, downloads)
        return GradSection(unit, section, store, local, fresh, self._new_partial(section, unit.layout.experts))

    def _new_partial(
        self, section: Section, experts: ExpertGroups | None
    ) -> HostPartial | DevicePartial | StagedPartial:
        layout, downloads = section.layout, self._downloads
        if self._device.is_host or downloads is None:
            return HostPartial(layout, self._memory.store.arena, self._attach)
        if experts is None or self.rest_on_device(section):
            return DevicePartial(layout, self._device)
        of_group = layout.numel // experts.num_experts * experts.size
        return StagedPartial(layout, self._device, downloads, min(of_group, REDUCED_PIECE_BYTES // 4))

    def _new_store(
        self, section: Section, layout: SectionLayout, unit: str, ring: GradRing | None, *, sums_up: bool
    ) -> GradStore:
        """`sums_up` where sums of squares of what rests there are wanted."""
        memory, tier = self._memory, section.shard.placement.grads
        if self.rest_on_device(section):
            return DeviceGrads(memory, layout, unit, sums_up=sums_up)
        if tier is Tier.NVME:
            if ring is not None:
                return RingDriveGrads(ring, self._drive_room, self._attach, memory, layout, unit, sums_up=sums_up)
            return DriveGrads(self._drive_room, self._attach, memory, layout, unit, sums_up=sums_up)
        if ring is not None:
            return RingGrads(ring, memory, layout, tier, unit, sums_up=sums_up)
        return HostGrads(memory, layout, tier, unit, sums_up=sums_up)

    def rest_on_device(self, section: Section) -> bool:
        return section.shard.placement.grads is Tier.DEVICE and not self._device.is_host

    def _staging_bytes(self, leaving: Sequence[GradSection]) -> int:
        """Staging for these sections."""
        whole, sliced, partition = list[int](), dict[int, int](), self._collectives.partition
        for section in leaving:
            if self.in_slices(section):
                sizes = (
                    whole_sectors(sliced_grad_bytes(numel, numel * section.layout.dtype.itemsize, partition))
                    for numel in (each.spec.numel for each in section.layout.params)
                )
                sliced[section.unit.index] = sliced.get(section.unit.index, 0) + sum(sizes)
                whole.append(reduced_grad_bytes(section.layout.numel, partition))
            else:
                whole.append(self._staged_bytes(section.layout))
        return grad_staging_bytes(whole, sliced.values())

    def _staged_bytes(self, section: SectionLayout) -> int:
        """Bytes of staging that a section's gradients take on their way from a GPU."""
        return staged_grad_bytes(section.numel, section.nbytes, self._collectives.partition)

    def _sent_bytes(self, section: GradSection) -> int:
        """Bytes of the GPU that they take meanwhile."""
        experts = section.unit.layout.experts
        if experts is None or not self.in_slices(section):
            return self._staged_bytes(section.layout)
        return section.layout.nbytes // experts.num_experts * experts.size

    def in_slices(self, section: GradSection) -> bool:
        """True if gradients leave a GPU before they are whole: experts', which rest elsewhere."""
        return isinstance(section.partial, StagedPartial)
