"""Where every shard's bytes are: the only one who knows.

Owns memory regions and extents of all shards of a model on this rank. It moves bytes when told and decides
nothing. The calls, and who makes them:
    `place_memory`, `write_components`         each section once (offload);
    `launch_fetch`                             parameters for forward and backward (runtime);
    `open_chunk`, the kernel, `close_chunk`, after a section `finish_update`   (optim);
    `read_component`, `write_components`       whole shards (checkpoint, gathered, state_dict);
    `snapshots`, `mark_committed`              generations (checkpoint).
Whatever is launched returns transfers; the caller waits for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zero_offload.errors import IntegrityError
from zero_offload.memory.arena import Arena
from zero_offload.memory.pool import LazyRegion
from zero_offload.plan.layout import SectionLayout, ShardLayout
from zero_offload.shards.disk import ALL_ROWS, DiskArrays
from zero_offload.shards.replica import Replica
from zero_offload.shards.shard import (
    Component,
    Shard,
    ShardPlacement,
    chunk_state_bytes,
    component_dtype,
    components_of,
)
from zero_offload.shards.snapshot import Snapshots
from zero_offload.storage.engine import Urgency
from zero_offload.storage.swap_file import Extent, SwapFile, Transfer
from zero_offload.telemetry.events import Counters
from zero_offload.types import StateKind, Tier

ChunkSource = Callable[[Component, int, int], torch.Tensor]
"""source(component, begin, end) -> (end - begin,) of the component's dtype, host: elements of the shard."""


@dataclass
class OpenChunk:
    """Elements [begin, end) of a shard made addressable for the update kernel."""

    shard: Shard
    row: int
    begin: int
    end: int
    addresses: dict[Component, int]
    reads: list[Transfer] = field(default_factory=list)
    copied: Callable[[], None] | None = None
    """The wait for a commit that still needs what is in memory."""

    def wait(self) -> None:
        """Return when the chunk may be read and changed. Raises StorageError or IntegrityError."""
        for read in self.reads:
            read.wait()
        if self.copied is not None:
            self.copied()


class ShardStore:
    """All shards of one model on one rank."""

    def __init__(
        self,
        layout: ShardLayout,
        placements: Sequence[Mapping[StateKind, Tier]],
        arena: Arena,
        swap: SwapFile | None,
        num_slots: int,
    ) -> None:
        """`placements` is one mapping per unit; `num_slots` the slots of each trainable shard on disk."""
        self.arena = arena
        self.swap = swap
        self.counters = Counters()
        self.disk = DiskArrays(swap, self.counters)
        self.state_staging_bytes = max(chunk_state_bytes(section) for section in layout.sections)
        """Staging that `open_chunk` may use."""
        self.staging = LazyRegion(arena, self.state_staging_bytes)
        """For whole-shard calls; dropped when they are over, it is taken again by the next."""
        self.shards = tuple(Shard(section, ShardPlacement.of(placements[section.unit])) for section in layout.sections)
        self.snapshots = Snapshots(self.shards, self.disk, self.counters)
        self._generations = num_slots > 1
        for shard in self.shards:
            self._place(shard, num_slots)

    def _place(self, shard: Shard, num_slots: int) -> None:
        """Plan a shard's extents; its memory is taken by `initialize`, section by section."""
        layout, place = shard.layout, shard.placement
        trainable_on_disk = layout.trainable and (place.optimizer is Tier.NVME or self._generations)
        value_on_disk = place.params is Tier.NVME and (not layout.trainable or place.optimizer is Tier.NVME)
        frozen_on_disk = not layout.trainable and (value_on_disk or self._generations)
        if trainable_on_disk or frozen_on_disk:
            count = num_slots if layout.trainable else 1
            shard.slots = tuple(self._slot(layout, slot) for slot in range(count))

    def _slot(self, layout: SectionLayout, slot: int) -> dict[Component, Extent]:
        return {
            component: self.disk.allocate(
                f"section {layout.index} {component.value}.{slot}",
                layout.block_sizes(component_dtype(layout, component)),
            )
            for component in components_of(layout)
        }

    def place_memory(self, shard: Shard, existing: Mapping[Component, torch.Tensor]) -> None:
        """Take memory for the components that rest in memory; `existing` brings those that have it already."""
        place, layout = shard.placement, shard.layout
        shard.memory.update(existing)
        optimizer_rests = place.optimizer is not Tier.NVME and layout.trainable
        dtypes = {
            component: component_dtype(layout, component)
            for component in components_of(layout)
            if optimizer_rests or (component is Component.VALUE and place.value_in_memory)
        }
        # One region for all: rounded up to huge pages once. A shard's arrays are whole sectors long.
        missing = [component for component in dtypes if component not in existing]
        if not missing:
            return
        region = self.arena.allocate(sum(dtypes[each].itemsize for each in missing) * layout.shard_numel)
        offset = 0
        for component in missing:
            shard.memory[component] = region.tensor(dtypes[component], layout.shard_numel, offset)
            offset += shard.memory[component].nbytes

    def place_replica(self, shard: Shard) -> None:
        """Keep the section whole on this rank too, on the tier of its parameters; before `place_memory`."""
        layout, in_memory = shard.layout, shard.placement.value_in_memory
        memory = self.arena.array(layout.dtype, layout.numel) if in_memory else None
        shard.replica = Replica(layout, self.disk, memory)

    # Parameters for forward and backward

    def launch_fetch(self, shard: Shard, address: int, urgency: Urgency) -> list[Transfer]:
        """Bring this rank's values, `shard_nbytes`, to host memory at `address`."""
        value = self.value_in_memory(shard)
        if value is not None:
            if address != value.data_ptr():
                ctypes.memmove(address, value.data_ptr(), shard.layout.shard_nbytes)
            return []
        shard.settle()
        extent = shard.cache or shard.slots[shard.current][Component.VALUE]
        return [self.disk.launch_read(extent, ALL_ROWS, address, urgency)]

    def value_in_memory(self, shard: Shard) -> torch.Tensor | None:
        """(shard_numel,) of the values where they rest in host memory; None where a fetch goes to disk."""
        if shard.cache is not None or Component.VALUE not in shard.memory:
            return None
        self.counters.read(Tier.CPU, shard.layout.shard_nbytes)
        return shard.memory[Component.VALUE]

    # The optimizer's update, chunk by chunk

    def open_chunk(self, shard: Shard, row: int, staging: int) -> OpenChunk:
        """Make chunk `row` addressable; what rests on disk is read into `staging` (`state_staging_bytes` long).

        It is to be used after `OpenChunk.wait`.
        """
        begin, end = shard.layout.chunks()[row]
        chunk, rows = OpenChunk(shard, row, begin, end, {}), slice(row, row + 1)
        for component in components_of(shard.layout):
            dtype = component_dtype(shard.layout, component)
            if component in shard.memory:
                address = shard.memory[component].data_ptr() + begin * dtype.itemsize
                self.counters.read(Tier.CPU, (end - begin) * dtype.itemsize)
            else:
                address, staging = staging, staging + (end - begin) * dtype.itemsize
                chunk.reads.append(self.disk.launch_read(shard.slots[shard.current][component], rows, address))
            chunk.addresses[component] = address
        chunk.copied = self.snapshots.ask(shard, row)
        return chunk

    def close_chunk(self, chunk: OpenChunk) -> list[Transfer]:
        """Write the chunk where it rests; its memory may be reused when the transfers are done.

        A slot is written when the commit under way is complete: before, both may be needed.
        """
        shard, rows = chunk.shard, slice(chunk.row, chunk.row + 1)
        writes: list[Transfer] = []
        if shard.on_disk:
            self.snapshots.wait_for_slots()
        for component in components_of(shard.layout):
            if shard.on_disk:
                extent = shard.slots[shard.writable_slot()][component]
                writes.append(self.disk.launch_write(extent, rows, chunk.addresses[component]))
            if component in shard.memory:
                itemsize = component_dtype(shard.layout, component).itemsize
                self.counters.written(Tier.CPU, (chunk.end - chunk.begin) * itemsize)
        if shard.cache is not None:
            writes.append(self.disk.launch_write(shard.cache, rows, chunk.addresses[Component.VALUE]))
        shard.writes += writes
        return writes

    def finish_update(self, shard: Shard) -> None:
        """All chunks of the shard are closed: its newest values are what was written."""
        if shard.on_disk:
            shard.current = shard.writable_slot()
        shard.dirty = True

    # Whole shards

    def read_chunk(self, shard: Shard, component: Component, row: int) -> torch.Tensor:
        """(end - begin,) of one chunk, host: a view of where it rests, or of staging until the next read."""
        begin, end = shard.layout.chunks()[row]
        if component in shard.memory:
            return shard.memory[component][begin:end]
        shard.settle()
        extent = shard.slots[shard.current][component]
        return self.disk.read_block(extent, row, component_dtype(shard.layout, component), self.staging.region)

    def read_component(self, shard: Shard, component: Component) -> torch.Tensor:
        """(shard_numel,) of the component, host: a view where it rests in memory, else a copy."""
        if component in shard.memory:
            return shard.memory[component]
        out = torch.empty(shard.layout.shard_numel, dtype=component_dtype(shard.layout, component))
        for row, (begin, end) in enumerate(shard.layout.chunks()):
            out[begin:end] = self.read_chunk(shard, component, row)
        return out

    def write_components(self, shard: Shard, source: ChunkSource) -> None:
        """Replace every component of a shard, after a commit under way; what rests on disk goes to a slot that no
        generation needs.
        """
        self.snapshots.wait_for_slots()
        self._make_writable(shard)
        self._ensure_cache(shard)
        staging = self.staging.region
        for row, (begin, end) in enumerate(shard.layout.chunks()):
            chunk = OpenChunk(shard, row, begin, end, {})
            used = 0
            for component in components_of(shard.layout):
                values = source(component, begin, end)
                if component in shard.memory:
                    target = shard.memory[component][begin:end]
                else:
                    target = staging.tensor(values.dtype, end - begin, used)
                    used += values.nbytes
                target.copy_(values)
                chunk.addresses[component] = target.data_ptr()
            self.close_chunk(chunk)
            shard.settle()
        self.finish_update(shard)
        shard.writes.clear()

    def _ensure_cache(self, shard: Shard) -> None:
        """A cache belongs to no generation: it comes after the slots, which must lie alike for every placement."""
        on_disk = shard.placement.params is Tier.NVME and shard.replica is None
        if shard.cache is None and on_disk and Component.VALUE in shard.memory:
            shard.cache = self.disk.allocate(
                f"section {shard.layout.index} cache", shard.layout.block_sizes(shard.layout.dtype)
            )

    def _make_writable(self, shard: Shard) -> None:
        """A frozen shard has one slot; once that is committed, a change needs a second."""
        if shard.slots and len(shard.slots) == 1 and shard.committed is not None:
            self.ensure_slot(shard, 1)

    # Generations

    def ensure_slot(self, shard: Shard, slot: int) -> None:
        """Have extents for `slot`; a frozen shard gets its second one only when it was changed."""
        if slot == 1 and len(shard.slots) == 1:
            shard.slots = (*shard.slots, self._slot(shard.layout, 1))
        if not 0 <= slot < len(shard.slots):
            raise IntegrityError(
                f"a manifest puts section {shard.layout.index} in slot {slot}, which does not exist; "
                "load a checkpoint, or start over with existing='discard'"
            )

    def load_memory(self, shard: Shard, slot: int) -> None:
        """Fill what rests in memory, and a cache, from a slot; every shard's slots are known by now."""
        self._ensure_cache(shard)
        for component, array in shard.memory.items():
            self.disk.read_array(shard.slots[slot][component], array)
        if shard.cache is not None:
            self.disk.write_array(shard.cache, shard.memory[Component.VALUE])
        shard.dirty = False

    def mark_committed(self, slots: Sequence[int]) -> None:
        """The generation that names these slots (one per shard) is durable; older slots may be reused."""
        for shard, slot in zip(self.shards, slots, strict=True):
            shard.committed = slot
