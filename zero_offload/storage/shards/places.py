"""What a shard has and where: memory and extents, taken when there is something to put there.

Owns which components of a shard rest in memory and how many slots it has on disk; moves no byte. The calls: `lay_out`,
or `restore` what a manifest names, and `reserve` what it names of sections without a shard; `place_memory`; later
`add_states`, `make_writable`, `ensure_cache`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from zero_offload.base.errors import CapacityError, IntegrityError
from zero_offload.base.types import Tier, format_bytes
from zero_offload.hardware.device import Device
from zero_offload.plan.layout import SectionLayout
from zero_offload.storage.files.extents import Extent
from zero_offload.storage.memory.arena import Arena
from zero_offload.storage.shards.disk import DiskArrays
from zero_offload.storage.shards.replica import Replica
from zero_offload.storage.shards.shard import (
    Component,
    Shard,
    block_sizes,
    component_dtype,
    master_components,
    shard_bytes,
)


class Places:
    """Of the shards of a store."""

    def __init__(self, arena: Arena, device: Device, disk: DiskArrays, num_slots: int) -> None:
        self._arena = arena
        self._device = device
        self._disk = disk
        self._num_slots = num_slots
        self._reserved: dict[int, tuple[dict[Component, Extent], ...]] = {}
        """The slots of sections that a generation has and no shard yet; by index."""

    def lay_out(self, shards: Iterable[Shard]) -> None:
        """Plan the extents of shards, anew."""
        for shard in shards:
            self._lay_out(shard, shard.components)

    def _lay_out(self, shard: Shard, components: Sequence[Component]) -> None:
        count = self._slots_on_disk(shard)
        if count == 0:
            return
        planned = {each: self._disk.allocate_copies(*_named(shard.layout, each, range(count))) for each in components}
        slots = shard.slots or tuple({} for _ in range(count))
        for number, slot in enumerate(slots):
            slot.update({component: extents[number] for component, extents in planned.items()})
        shard.slots = slots

    def _slots_on_disk(self, shard: Shard) -> int:
        kept = self._num_slots > 1  # in generations
        if shard.layout.trainable:
            return self._num_slots if kept or shard.placement.optimizer is Tier.NVME else 0
        return int(kept or shard.placement.params is Tier.NVME)

    def restore(self, shard: Shard, slot: int, records: Mapping[str, Any], spare: Any) -> None:
        """Have what a generation's manifest records, in its slot; the other slot lies beside it.

        `records` are those of extents, by component; `spare` is that of the other slot of a frozen shard, which was
        made later and somewhere else, or None. Raises IntegrityError for a slot that cannot be.
        """
        layout = shard.layout
        shard.slots = self._reserved.pop(layout.index, ()) or self._find(
            layout, slot, records, spare, self._slots_on_disk(shard)
        )
        shard.current = slot
        states = [each for each in map(Component, records) if each not in master_components(layout)]
        self._take_memory(shard, states)
        self._keep(shard, states)

    def has_reserved(self, section: int) -> bool:
        return section in self._reserved

    def reserve(self, layout: SectionLayout, slot: int, records: Mapping[str, Any], spare: Any) -> None:
        """Leave alone what a manifest records of a section that has no shard yet; see `restore`, which takes it."""
        count = self._num_slots if layout.trainable else 1
        self._reserved[layout.index] = self._find(layout, slot, records, spare, count)

    def _find(
        self, layout: SectionLayout, slot: int, records: Mapping[str, Any], spare: Any, count: int
    ) -> tuple[dict[Component, Extent], ...]:
        """The extents of each of `count` slots, or of as many as are recorded."""
        components = [Component(name) for name in records]
        lacking = sorted(set(master_components(layout)) - set(components))
        if lacking or not 0 <= slot < 2:
            problem = f"has no {lacking[0].value} of" if lacking else f"names slot {slot}, which does not exist, for"
            raise IntegrityError(
                f"a manifest {problem} section {layout.index}; load a checkpoint, or start over with existing='discard'"
            )
        known = {slot: records}
        if not layout.trainable and spare is not None:
            known[1 - slot] = spare
        slots: tuple[dict[Component, Extent], ...] = tuple({} for _ in range(max(count, 1 + max(known))))
        for origin, found in known.items():
            together = range(count) if layout.trainable else [origin]
            for component in components:
                where = together.index(origin), found[component.value]
                extents = self._disk.restore_copies(*_named(layout, component, together), *where)
                for number, extent in zip(together, extents, strict=True):
                    slots[number][component] = extent
        return slots

    def place_memory(self, shard: Shard, existing: Mapping[Component, torch.Tensor]) -> None:
        """Take memory for the components that rest in memory; `existing` brings those that have it already."""
        shard.memory.update(existing)
        self._take_memory(shard, shard.components)

    def _take_memory(self, shard: Shard, components: Iterable[Component]) -> None:
        place, layout = shard.placement, shard.layout
        optimizer_rests = place.optimizer is not Tier.NVME and layout.trainable
        missing = [
            component
            for component in components
            if (optimizer_rests or (component is Component.VALUE and place.value_in_memory))
            and component not in shard.memory
        ]
        if not missing:
            return
        sizes = {component: shard_bytes(layout, [component]) for component in missing}
        if shard.on_device:
            memory = self.memory_of(shard, torch.uint8, sum(sizes.values()))
            for component, part in zip(sizes, memory.split(list(sizes.values())), strict=True):
                shard.memory[component] = part.view(component_dtype(layout, component))
            return
        # One region for all: rounded up to huge pages once. A shard's arrays are whole sectors long.
        region = self._arena.allocate(sum(sizes.values()))
        offset = 0
        for component, nbytes in sizes.items():
            dtype = component_dtype(layout, component)
            shard.memory[component] = region.tensor(dtype, nbytes // dtype.itemsize, offset)
            offset += nbytes

    def memory_of(self, shard: Shard, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """(numel,) zeros where the shard's components in memory are: on the host, or on the device."""
        if not shard.on_device:
            return self._arena.array(dtype, numel)
        try:
            return torch.zeros(numel, dtype=dtype, device=self._device.torch_device)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"section {shard.layout.index}: {format_bytes(numel * dtype.itemsize)} are not free on "
                f"{self._device.torch_device}; place fewer optimizer states there, for example optimizer='cpu' or "
                "optimizer={'device': 0.5, 'cpu': 0.5}"
            ) from error

    def add_states(self, shard: Shard, states: Sequence[Component]) -> None:
        """Room for further states, all zero. Raises CapacityError, and has none of them, where there is none."""
        try:
            # Memory first: a manifest names every extent that a slot has, and a resume takes memory for each.
            self._take_memory(shard, states)
            self._lay_out(shard, states)
        except BaseException:
            for component in states:
                shard.memory.pop(component, None)
            raise
        self._keep(shard, states)

    def _keep(self, shard: Shard, states: Iterable[Component]) -> None:
        """There is room for them."""
        shard.states = tuple(each for each in Component if each in {*shard.states, *states})
        shard.dirty = True

    def place_replica(self, shard: Shard) -> None:
        """Keep the section whole on this rank too, on the tier of its parameters; before `place_memory`."""
        layout, in_memory = shard.layout, shard.placement.value_in_memory
        memory = self._arena.array(layout.dtype, layout.numel) if in_memory else None
        shard.replica = Replica(layout, self._disk, memory)

    def ensure_cache(self, shard: Shard) -> None:
        """A cache belongs to no generation: it comes after what a manifest names."""
        on_disk = shard.placement.params is Tier.NVME and shard.replica is None and not shard.on_device
        if shard.cache is None and on_disk and Component.VALUE in shard.memory:
            shard.cache = self._disk.allocate(
                f"section {shard.layout.index} cache", shard.layout.block_sizes(shard.layout.dtype)
            )

    def make_writable(self, shard: Shard) -> None:
        """A frozen shard has one slot; once that is committed, a change needs a second."""
        if shard.layout.trainable or shard.committed is None:
            return
        slots = [*shard.slots, {}][:2]
        other = 1 - shard.committed
        if not slots[other]:
            (extent,) = self._disk.allocate_copies(*_named(shard.layout, Component.VALUE, [other]))
            slots[other][Component.VALUE] = extent
        shard.slots = tuple(slots)


def _named(layout: SectionLayout, component: Component, slots: Sequence[int]) -> tuple[list[str], list[int]]:
    """The names of a component's extents, and the bytes of the blocks of each."""
    names = [f"section {layout.index} {component.value}.{slot}" for slot in slots]
    return names, block_sizes(layout, component)
