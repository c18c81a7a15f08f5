"""Where every shard's bytes are: nothing else knows.

Owns memory regions and extents of all shards of a model on this rank. It moves bytes when told and decides
nothing. The calls, and what makes them:
    `lay_out`, or `restore` each section of a generation; `place_memory`, `write_components`   (offload);
    `rest_in_base`                             a frozen shard that files have as it is (load, resume);
    `grow`                                     when further parameters are offloaded (offload);
    `lay_anew`, then `retire`                  when a section is trained from now on, or frozen again (thaw);
    `vacate`                                   when the model has none of a section's parameters any more (offload);
    `add_states`, `drop_states`                when an optimizer says what it keeps, and when it is not wanted;
    `launch_fetch`, `launch_fetch_parts`       parameters for forward and backward (runtime);
    `open_chunks`, the kernel, `close_chunks`, after a section `finish_update`   (optim);
    `read_component`, `write_components`       whole shards (checkpoint, gathered, state_dict);
    `snapshots`, `mark_committed`              generations (checkpoint).
Whatever is launched returns transfers; the caller waits for them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from zero_offload.base.errors import CapacityError, IntegrityError, ZeroOffloadError
from zero_offload.base.events import Counters
from zero_offload.base.host import host_empty, host_reserved
from zero_offload.base.types import StateKind, Tier, format_bytes
from zero_offload.hardware.device import Device, HostDevice
from zero_offload.plan.buffers import is_on_device
from zero_offload.plan.layout import CHUNK_NUMEL, SectionLayout, ShardLayout
from zero_offload.storage.files.base_file import BaseFile, BaseSpan, Stretch, missing_text
from zero_offload.storage.files.base_files import BaseFiles
from zero_offload.storage.files.engine import Urgency
from zero_offload.storage.files.swap_file import Extent, SwapFile, Transfer
from zero_offload.storage.memory.arena import Arena, Need
from zero_offload.storage.memory.pool import LazyRegion
from zero_offload.storage.shards.held import Held
from zero_offload.storage.shards.shard import (
    Component,
    InBase,
    Replica,
    Shard,
    ShardPlacement,
    array_bytes,
    array_numel,
    array_range,
    block_sizes,
    component_dtype,
    in_order,
    master_components,
    shard_bytes,
)
from zero_offload.storage.shards.snapshot import DeviceStaging, Snapshots

HOST = HostDevice()
_STATES = Need("states of a section", fills_late=True)
KEPT_CHUNKS = 2
"""Those in which a parameter begins and ends: its neighbours have the rest of them."""
ChunkSource = Callable[[Component, int, int], torch.Tensor]
"""source(component, begin, end) -> the component's array of the chunk [begin, end), host."""


@dataclass
class OpenChunks:
    """Neighbouring chunks, elements [begin, end) of a shard, made addressable for the update kernel."""

    shard: Shard
    rows: range
    begin: int
    end: int
    addresses: dict[Component, int]
    """Addresses of the first chunk's arrays."""
    memory_bytes: int = 0
    """Bytes of what rests in memory."""
    reads: list[Transfer] = field(default_factory=list)
    copied: list[Callable[[], None]] = field(default_factory=list)
    """The waits for a commit that still needs what is in memory."""
    kept: list[torch.Tensor] = field(default_factory=list)
    """Memory that writes need until they are complete."""

    def wait(self) -> None:
        """Return when the chunks may be read and changed. Raises StorageError or IntegrityError."""
        for read in self.reads:
            read.wait()
        for copied in self.copied:
            copied()
        self.shard.wait_for_copies()

    def addresses_of(self, row: int) -> dict[Component, int]:
        """Addresses of the arrays of one of the chunks."""
        if row == self.rows.start:
            return self.addresses
        return {
            each: address + (row - self.rows.start) * self._strides[each] for each, address in self.addresses.items()
        }

    @cached_property
    def _strides(self) -> dict[Component, int]:
        """Bytes from a chunk's array to the next one's: only the last of a shard is shorter."""
        return {each: array_bytes(self.shard.layout, [each], CHUNK_NUMEL) for each in self.addresses}


class LazyRead:
    """Elements [begin, end) of a shard's values, to be read into `out` at the first use or before they change."""

    def __init__(self, store: ShardStore, shard: Shard, begin: int, out: torch.Tensor) -> None:
        """`out`: of the values' dtype, contiguous, host."""
        self._store: ShardStore | None = store
        self._shard = shard
        self._begin = begin
        self._out = out
        self.follows = False
        """True if it is to have what is written now."""

    @property
    def is_read(self) -> bool:
        return self._store is None

    def overlaps(self, shard: Shard, spans: Iterable[tuple[int, int]]) -> bool:
        """True if it has some of these elements of a shard."""
        end = self._begin + self._out.numel()
        return self._shard is shard and any(low < end and self._begin < high for low, high in spans)

    def read(self) -> None:
        """Read, unless that is done. After an error the next call tries again: the values are not there yet."""
        if self._store is not None:
            self._store.read_range(self._shard, self._begin, self._out.view(-1))
            self._store = None


class ShardStore:
    """All shards of one model on one rank."""

    def __init__(
        self,
        layout: ShardLayout,
        placements: Sequence[Mapping[StateKind, Tier]],
        arena: Arena,
        swap: SwapFile | None,
        num_slots: int,
        device: Device = HOST,
        counters: Counters | None = None,
        base: BaseFiles | None = None,
    ) -> None:
        """`placements` is one mapping per unit; `num_slots` the slots of each trainable shard on disk; `base` the files
        that frozen shards may rest in."""
        self.arena = arena
        self.swap = swap
        self._lazy: weakref.WeakSet[LazyRead] = weakref.WeakSet()
        self.counters = counters or Counters()
        self.base = base or BaseFiles(self.counters)
        self._device = device
        self._num_slots = num_slots
        self.shards = [_new_shard(section, placements[section.unit], device) for section in layout.sections]
        """The shards of all sections, by index; `grow` adds to it."""
        self.snapshots = Snapshots(self.shards, swap, self.counters, DeviceStaging(device, arena))
        self._reserved: dict[int, tuple[dict[Component, Extent], ...]] = {}
        """The slots of sections that a generation has and no shard yet; by index."""
        self._retired: list[Extent] = []
        """Extents that the committed generation alone names."""
        self._kept: dict[tuple[int, int], dict[Component, torch.Tensor]] = {}
        """Arrays of the chunks that `read_chunk` keeps, by section and row: the newest of what rests on disk."""
        self._held: dict[int, Held] = {}
        """Changes that wait to be written, by section; their chunks are kept."""
        self._size_staging()

    @property
    def disk(self) -> SwapFile:
        """The swap file, where something rests on disk."""
        assert self.swap is not None
        return self.swap

    def _size_staging(self) -> None:
        self.state_staging_bytes = max(array_bytes(s.layout, s.components, CHUNK_NUMEL) for s in self.shards)
        """Staging that `open_chunks` may use."""
        self._drop_kept()  # shards have changed
        self.staging = LazyRegion(self.arena, self.state_staging_bytes)
        """For whole-shard calls; dropped when they are over, it is taken again by the next."""

    def grow(self, sections: Sequence[SectionLayout], placements: Sequence[Mapping[StateKind, Tier]]) -> list[Shard]:
        """Add shards for further sections, which `shrink` takes back. No update and no commit may be under way."""
        added = [_new_shard(section, placements[section.unit], self._device) for section in sections]
        self.shards += added
        self._size_staging()
        return added

    def shrink(self, num_shards: int) -> None:
        """Forget the shards that came behind the first `num_shards`. Their room on disk stays taken."""
        del self.shards[num_shards:]
        self._size_staging()

    def lay_anew(self, shard: Shard, layout: SectionLayout) -> Shard:
        """Let a shard be trained that was frozen, or the other way round, as `layout` has it; `write_components`
        follows. It has no states. Returns the shard as it was, from which values are read until `retire` or, after an
        error, `lay_back`.

        Raises CapacityError, and changes nothing, where there is no room. No update may be under way.
        """
        self.read_lazy()
        self.snapshots.wait_for_slots()
        shard.wait_for_writes()
        before = replace(shard, memory=dict(shard.memory), writes=[])
        tiers = {StateKind.OPTIMIZER: shard.placement.optimizer}
        shard.layout, shard.on_device = layout, is_on_device(layout, tiers, is_host=self._device.is_host)
        shard.memory = self._values_that_stay(shard, before)
        shard.slots, shard.cache, shard.current, shard.committed = (), None, 0, None
        shard.base, shard.awaits_base = None, False
        self._forget_held(shard)
        try:
            self._take_memory(shard, shard.components)
            self._lay_out([(shard, shard.components)])
            self._size_staging()
        except BaseException:
            self.lay_back(shard, before)
            raise
        return before

    def _values_that_stay(self, shard: Shard, before: Shard) -> dict[Component, torch.Tensor]:
        """The memory of values that rest where they did `before`."""
        if not shard.placement.value_in_memory or before.on_device or shard.on_device:
            return {}
        return {each: array for each, array in before.memory.items() if each is Component.VALUE}

    def lay_back(self, shard: Shard, before: Shard) -> None:
        """Let a shard that `lay_anew` has changed be again as it was; no generation has it otherwise."""
        extents = _extents_of(shard)
        for each in fields(Shard):
            setattr(shard, each.name, getattr(before, each.name))
        self._free(extents)
        if shard.replica is not None and shard.base is not None and shard.replica.memory is None:
            shard.replica.base = replace(shard.base, layout=shard.layout.whole(), shard_index=0)
            shard.replica.outdate()
        self._size_staging()

    def vacate(self, shard: Shard, layout: SectionLayout) -> None:
        """Give up all that a shard has: `layout` has no parameter. Its room on disk is free when a generation is made
        without it. No update may be under way.
        """
        self.read_lazy()
        self.snapshots.wait_for_slots()
        shard.wait_for_writes()
        shard.wait_for_copies()
        if shard.on_device:
            self._device.mark().synchronize()
        self._retire(_extents_of(shard))
        self._forget_held(shard)
        if shard.replica is not None:
            self._retire(shard.replica.take_extents())
        emptied = Shard(layout, shard.placement, shard.on_device, dirty=False)
        for each in fields(Shard):
            setattr(shard, each.name, getattr(emptied, each.name))
        self._size_staging()

    def retire(self, before: Shard) -> None:
        """The shard was this, and is another. Its room on disk is free when a generation names the other; at once
        where none has named this. None has a cache."""
        self._free([] if before.cache is None else [before.cache])
        before.cache = None
        if before.committed is None:
            self._free(_extents_of(before))
        else:
            self._retire(_extents_of(before))

    def _retire(self, extents: Iterable[Extent]) -> None:
        """These belong to no shard. A generation that is committed may name them, until the next one is."""
        self._retired += extents
        if self._num_slots == 1:
            self._free_retired()  # there are no generations

    @property
    def retired_bytes(self) -> int:
        """Bytes on disk of what the committed generation alone names; the next one gives them back."""
        return sum(int(extent.blocks["nbytes"].sum()) for extent in self._retired)

    def _free_retired(self) -> None:
        self._free(self._retired)
        self._retired = []

    def _free(self, extents: Sequence[Extent]) -> None:
        if extents and self.swap is not None:
            self.swap.free(extents)

    # Components of shards, and where they are: memory and extents, taken when there is something to put there

    def lay_out(self, shards: Iterable[Shard], later: Container[int] = ()) -> None:
        """Plan the extents of shards, anew; of the sections `later`, which are frozen, when they are written.

        Raises CapacityError where there is no room for all of them, and plans none.
        """
        self._lay_out([(shard, shard.components) for shard in shards if shard.layout.index not in later])

    def bytes_of_slots(self, shards: Iterable[Shard]) -> int:
        """Bytes that `lay_out` takes for these shards."""
        return sum(shard_bytes(shard.layout, shard.components) * self._slots_on_disk(shard) for shard in shards)

    def _lay_out(self, wanted: Iterable[tuple[Shard, Sequence[Component]]]) -> None:
        lots = [(shard, each) for shard, components in wanted if self._slots_on_disk(shard) for each in components]
        if not lots:
            return
        found = self.disk.allocate_groups(
            _named(shard.layout, each, range(self._slots_on_disk(shard))) for shard, each in lots
        )
        for (shard, component), extents in zip(lots, found, strict=True):
            shard.slots = shard.slots or tuple({} for _ in extents)
            for slot, extent in zip(shard.slots, extents, strict=True):
                slot[component] = extent

    def _slots_on_disk(self, shard: Shard) -> int:
        kept = self._num_slots > 1  # in generations
        if shard.layout.trainable:
            return self._num_slots if kept or shard.placement.optimizer is Tier.NVME else 0
        return int(kept or shard.placement.params is Tier.NVME)

    def restore(self, shard: Shard, slot: int, records: Mapping[str, Any], spare: Any) -> None:
        """Take what a generation's manifest records, in its slot; the other slot lies beside it.

        `records` are those of extents, by component. `spare` is the record of a frozen shard's other slot, which was
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
        self._size_staging()

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
            problem = f"has no {lacking[0]} of" if lacking else f"names slot {slot}, which does not exist, for"
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
                where = together.index(origin), found[component]
                extents = self.disk.restore_copies(*_named(layout, component, together), *where)
                for number, extent in zip(together, extents, strict=True):
                    slots[number][component] = extent
        return slots

    def place_memory(self, shard: Shard, existing: Mapping[Component, torch.Tensor]) -> None:
        """Take memory for the components that rest in memory; `existing` has those that have it already."""
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
        if layout.is_thawed and sizes.keys() > {Component.VALUE}:  # it stays when the master goes
            self._take_memory(shard, [Component.VALUE])
            del sizes[Component.VALUE]
        # One region for all: rounded up to huge pages once. A shard's arrays are whole sectors long.
        region = self.arena.allocate(sum(sizes.values()), _STATES)
        offset = 0
        for component, nbytes in sizes.items():
            dtype = component_dtype(layout, component)
            shard.memory[component] = region.tensor(dtype, nbytes // dtype.itemsize, offset)
            offset += nbytes

    def memory_of(self, shard: Shard, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """(numel,) zeros where the shard's components in memory are: on the host, or on the device."""
        if not shard.on_device:
            return self.arena.array(dtype, numel)
        try:
            return torch.zeros(numel, dtype=dtype, device=self._device.torch_device)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"section {shard.layout.index}: {format_bytes(numel * dtype.itemsize)} are not free on "
                f"{self._device.torch_device}; place fewer optimizer states there, for example optimizer='cpu' or "
                "optimizer={'device': 0.5, 'cpu': 0.5}"
            ) from error

    def add_states(self, shard: Shard, states: Iterable[Component]) -> None:
        """Add these states, all zero, where the optimizer's states rest; after updates and commits under way. Rows take
        the place of the rows that there are, which go.

        Raises CapacityError, and has none of them, where there is no room.
        """
        missing = [each for each in dict.fromkeys(states) if each not in shard.states]
        if not missing or not shard.layout.trainable:
            return
        self.snapshots.wait_for_slots()
        shard.wait_for_writes()
        rested_in_memory = not shard.on_disk
        replaced = [shard.rows] if shard.rows is not None and any(each.is_rows for each in missing) else []
        try:
            # Memory first: a manifest names every extent that a slot has, and a resume takes memory for each.
            self._take_memory(shard, missing)
            self._lay_out([(shard, missing)])
        except BaseException:
            for component in missing:
                shard.memory.pop(component, None)
            raise
        self._keep(shard, missing)
        shard.uncommitted |= {*missing}
        if rested_in_memory and shard.on_disk:
            self._fill_slot(shard)
        if shard.on_device:
            self.snapshots.staging.updated()  # their zeros are launched, and may be committed before any update
        if replaced:
            self.drop_states(shard, replaced)
        self._size_staging()

    def drop_states(self, shard: Shard, dropped: Iterable[Component] | None = None) -> None:
        """Give up the room of states, by default of all; the master stays. After updates and commits under way."""
        self.snapshots.wait_for_slots()
        shard.wait_for_writes()
        if shard.on_device:
            self._device.mark().synchronize()  # an update on the device may be under way
        gone = set(shard.states if dropped is None else dropped)
        for component in gone:
            shard.memory.pop(component, None)
            extents = [slot.pop(component) for slot in shard.slots if component in slot]
            if extents and component in shard.uncommitted:
                self.disk.free(extents)
            else:
                self._retire(extents)
        shard.states, shard.dirty = tuple(each for each in shard.states if each not in gone), True
        shard.uncommitted -= gone
        self._size_staging()

    def _fill_slot(self, shard: Shard) -> None:
        """A generation is from now on what the slots hold. An update writes them, but the first one may come late."""
        slot = shard.writable_slot()
        for component, array in shard.memory.items():
            self.disk.write_array(shard.slots[slot][component], array)
        shard.current = slot

    def _keep(self, shard: Shard, states: Iterable[Component]) -> None:
        """There is room for them."""
        shard.states = in_order([*shard.states, *states])
        shard.dirty = True

    def place_replica(self, shard: Shard) -> None:
        """Keep the section whole on this rank too, on the tier of its parameters; before `place_memory`."""
        layout, in_memory = shard.layout, shard.placement.value_in_memory
        memory = self.arena.array(layout.dtype, layout.numel) if in_memory else None
        shard.replica = Replica(layout, self.swap, memory)

    def ensure_cache(self, shard: Shard) -> None:
        """A cache belongs to no generation: it comes after what a manifest names."""
        on_disk = shard.placement.params is Tier.NVME and shard.replica is None and not shard.on_device
        if shard.cache is None and on_disk and Component.VALUE in shard.memory:
            shard.cache = self.disk.allocate(
                f"section {shard.layout.index} cache", shard.layout.block_sizes(shard.layout.dtype)
            )

    def rest_in_base(self, shard: Shard, spans: Sequence[BaseSpan], shard_index: int) -> None:
        """From now on a frozen shard's values are those of files, which have all of its section; after a commit under
        way. Values in memory are replaced by the files', unless a file is gone: `read_base` follows then.
        """
        self.read_lazy()
        self.snapshots.wait_for_slots()
        base = InBase(shard.layout, tuple(sorted(spans, key=lambda span: span.begin)), shard_index, self.base)
        shard.base, shard.awaits_base, shard.dirty = base, Component.VALUE in shard.memory, False
        if shard.replica is not None and shard.replica.memory is None:
            shard.replica.base = replace(base, layout=shard.layout.whole(), shard_index=0)
            shard.replica.outdate()
        if all(file.is_open for file in base.used()):
            self._load_from_base(shard)

    def _load_from_base(self, shard: Shard) -> None:
        """Fill what rests in memory, unless it is there."""
        if shard.base is not None and shard.awaits_base:
            shard.wait_for_copies()
            shard.base.read(shard.memory[Component.VALUE].data_ptr())
            shard.awaits_base = False

    def read_base(self) -> None:
        """Read what rests in memory and has awaited its files. Raises IntegrityError where some are still gone, or have
        other bytes than before."""
        if lost := [file for file in self.base_files if not file.is_open]:
            raise IntegrityError(missing_text(lost))
        for shard in self.shards:
            self._load_from_base(shard)

    def _leave_base(self, shard: Shard) -> None:
        """The shard's values are here."""
        shard.base, shard.awaits_base = None, False
        if shard.replica is not None and shard.replica.base is not None:
            shard.replica.base = None
            shard.replica.outdate()

    @property
    def base_files(self) -> list[BaseFile]:
        """The files that shards rest in."""
        return list(
            dict.fromkeys(each for shard in self.shards if shard.base is not None for each in shard.base.used())
        )

    def bytes_to_make_writable(self, shard: Shard) -> int:
        """Bytes of the slots that `make_writable` would add."""
        if shard.layout.trainable:
            return 0
        if not shard.slots:
            return self.bytes_of_slots([shard])
        lacks = shard.committed is not None and not any(shard.slots[1 - shard.committed :][:1])
        return shard_bytes(shard.layout, [Component.VALUE]) * lacks

    def make_writable(self, shard: Shard) -> None:
        """A frozen shard gets a slot when it is written; once that is committed, a change needs a second."""
        if shard.layout.trainable:
            return
        if not shard.slots:
            self._lay_out([(shard, shard.components)])
        if shard.committed is None:
            return
        slots = [*shard.slots, {}][:2]
        other = 1 - shard.committed
        if not slots[other]:
            (extent,) = self.disk.allocate_copies(*_named(shard.layout, Component.VALUE, [other]))
            slots[other][Component.VALUE] = extent
        shard.slots = tuple(slots)

    # Parameters for forward and backward

    def launch_fetch(self, shard: Shard, address: int, urgency: Urgency) -> list[Transfer]:
        """Bring this rank's values, `shard_nbytes`, to host memory at `address`."""
        return list(self.launch_fetch_parts(shard, [Stretch(0, shard.layout.shard_numel, address)], urgency))

    def launch_fetch_parts(self, shard: Shard, parts: Sequence[Stretch], urgency: Urgency) -> Iterator[Transfer]:
        """Bring stretches of elements of this rank's values to host memory, as the transfers are asked for.

        Files of a base are read once for all parts. A swap file gives whole chunks: memory around has room for them,
        and the first one of a part lands at a sector.
        """
        value, itemsize = self.value_in_memory(shard), shard.layout.dtype.itemsize
        if value is not None:
            for begin, end, address in parts:
                part = value[begin:end]
                if address != part.data_ptr():
                    self.counters.read(shard.memory_tier, part.nbytes)
                    ctypes.memmove(address, part.data_ptr(), part.nbytes)
            return
        if shard.base is not None:
            yield shard.base.launch_fetch(parts, urgency)
            return
        shard.wait_for_writes()
        for begin, end, address in parts:
            if not shard.slots and shard.cache is None:
                ctypes.memset(address, 0, (end - begin) * itemsize)  # it was never written
                continue
            extent = shard.cache or shard.slots[shard.current][Component.VALUE]
            rows = slice(begin // CHUNK_NUMEL, -(-end // CHUNK_NUMEL))
            yield self.disk.launch_read(extent, rows, address - begin % CHUNK_NUMEL * itemsize, urgency)

    def value_in_memory(self, shard: Shard) -> torch.Tensor | None:
        """(shard_numel,) of the values where they rest in memory, the device's if the shard is `on_device`; None where
        a fetch goes to disk. The caller that uploads them counts that, and leaves the event in `Shard.last_copy`."""
        return None if shard.cache is not None else shard.memory.get(Component.VALUE)

    @property
    def device_bytes(self) -> int:
        """Bytes of shards in the device's own memory."""
        return sum(array.nbytes for shard in self.shards if shard.on_device for array in shard.memory.values())

    # The optimizer's update: chunk by chunk, or all of a shard's at once

    def open_on_device(self, shard: Shard, rows: range) -> dict[Component, torch.Tensor]:
        """The arrays of neighbouring chunks of a shard that is `on_device`, when they may be changed; `finish_update`
        follows. Of packed states a chunk has its own: then `rows` is one."""
        for row in rows:
            if (copied := self.snapshots.ask(shard, row)) is not None:
                copied()
        layout, (begin, end) = shard.layout, shard.layout.elements(rows)
        found = {each: shard.memory[each][array_range(layout, each, begin, end)] for each in shard.components}
        nbytes = sum(array.nbytes for array in found.values())
        self.counters.read(Tier.DEVICE, nbytes)
        self.counters.written(Tier.DEVICE, nbytes)
        return found

    def may_open_all(self, shard: Shard) -> bool:
        """True if all chunks of a shard in host memory may be opened together. Then there is nothing to read, to write,
        or to wait for, until the next commit begins.
        """
        return not (shard.on_disk or shard.cache is not None or shard.on_device or self.snapshots.needs(shard))

    def open_chunks(self, shard: Shard, rows: range, staging: int, nbytes: int | None = None) -> OpenChunks:
        """Make chunks addressable; what rests on disk is read into `staging`, `nbytes` long (without it, the
        `state_staging_bytes` of one chunk). To be used after `OpenChunks.wait`.
        """
        opened = OpenChunks(shard, rows, *shard.layout.elements(rows), {})
        end = staging + (self.state_staging_bytes if nbytes is None else nbytes)
        for component in shard.components:
            if component in shard.memory:
                array = shard.memory[component][array_range(shard.layout, component, opened.begin, opened.end)]
                opened.addresses[component] = array.data_ptr()
                opened.memory_bytes += array.nbytes
            else:
                assert self.swap is not None
                extent = shard.slots[shard.current][component]
                opened.reads.append(self.swap.launch_read(extent, _slice(rows), staging))
                opened.addresses[component] = staging
                part = array_range(shard.layout, component, opened.begin, opened.end)
                staging += (part.stop - part.start) * component_dtype(shard.layout, component).itemsize
        assert staging <= end, f"section {shard.layout.index}: chunks take {staging - end} bytes more than staging has"
        self.counters.read(Tier.CPU, opened.memory_bytes)
        asked = (self.snapshots.ask(shard, row) for row in rows)
        opened.copied = [copied for copied in asked if copied is not None]
        return opened

    def close_chunks(self, opened: OpenChunks) -> list[Transfer]:
        """Write the chunks where they rest; their memory may be reused when the transfers are done.

        A slot is written when the commit under way is complete: before, both may be needed.
        """
        shard, rows = opened.shard, _slice(opened.rows)
        writes: list[Transfer] = []
        if shard.on_disk:
            self.snapshots.wait_for_slots()
            slot = shard.slots[shard.writable_slot()]
            writes += [self.disk.launch_write(slot[each], rows, address) for each, address in opened.addresses.items()]
        self.counters.written(shard.memory_tier, opened.memory_bytes)
        if shard.cache is not None and Component.VALUE in opened.addresses:
            writes.append(self.disk.launch_write(shard.cache, rows, opened.addresses[Component.VALUE]))
        shard.writes += writes
        return writes

    def finish_update(self, shard: Shard) -> None:
        """All chunks of the shard are closed: its newest values are what was written."""
        if shard.on_disk:
            shard.current = shard.writable_slot()
        shard.dirty = True

    # Whole shards

    def read_chunk(self, shard: Shard, component: Component, row: int, *, keeps: bool = False) -> torch.Tensor:
        """The array of one chunk, on the host: a copy of a device's memory, or a view of host memory where it rests. A
        chunk on disk becomes a view of staging, valid until the next read. With `keeps` the next reads of it come from
        memory, as do those of one chunk more, and its changes wait there. `read_lazy` ends that: a forward or an update
        begins.
        """
        if component in shard.memory:
            return _on_host(shard, shard.array(component, row))
        if shard.base is not None or not shard.slots:
            begin, end = shard.layout.chunks()[row]
            values = self.staging.region.tensor(shard.layout.dtype, end - begin)
            if shard.base is None:
                return values.zero_()  # it was never written
            shard.base.launch_fetch([Stretch(begin, end, values.data_ptr())], Urgency.URGENT).wait()
            return values
        key = shard.layout.index, row
        if (array := self._kept.get(key, {}).get(component)) is not None:
            return array
        shard.wait_for_launched()
        if keeps and key not in self._kept:
            self._make_room_to_keep()
        held = self._held.get(shard.layout.index)
        slot = (held.slot_before(row) if held is not None else None) or shard.slots[shard.current]
        dtype = component_dtype(shard.layout, component)
        array = self.disk.read_block(slot[component], row, dtype, self.staging.region)
        if keeps:
            self._kept.setdefault(key, {})[component] = host_reserved(array.shape, array.dtype).copy_(array)
        return array

    def _make_room_to_keep(self) -> None:
        """Write the chunk that was kept first, if it waits, and keep it no more."""
        while len(self._kept) >= KEPT_CHUNKS:
            section, row = next(iter(self._kept))
            if section in self._held:
                self._held[section].write_chunk(row)
            del self._kept[section, row]

    def _drop_kept(self) -> None:
        """Write what waits, of all shards, and keep no chunk. Raises StorageError."""
        for held in self._held.values():
            held.write()
        self._kept.clear()

    def _forget_held(self, shard: Shard) -> None:
        """The shard has no slots of before any more; nothing waits for them."""
        shard.write_held = None
        self._held.pop(shard.layout.index, None)

    def read_range(self, shard: Shard, begin: int, out: torch.Tensor) -> None:
        """Values from element `begin` of the shard on, into `out`, (n,) of their dtype, host."""
        end = begin + out.numel()
        for row, (first, last) in enumerate(shard.layout.chunks()):
            low, high = max(first, begin), min(last, end)
            if low < high:
                values = self.read_chunk(shard, Component.VALUE, row)
                out[low - begin : high - begin].copy_(values[low - first : high - first])

    def read_lazily(self, shard: Shard, begin: int, out: torch.Tensor) -> LazyRead:
        """Plan to read values into `out`: when `read` of the result is called, or before any value changes."""
        lazy = LazyRead(self, shard, begin, out)
        self._lazy.add(lazy)
        return lazy

    def read_lazy(self) -> None:
        """Read all lazy values now, and keep no chunk: they are about to change, or to be out of reach."""
        self._drop_kept()
        for lazy in list(self._lazy):
            lazy.read()
        self._lazy.clear()

    def read_lazy_in(self, shard: Shard, spans: Sequence[tuple[int, int]]) -> None:
        """The same of these elements of a shard."""
        for lazy in [each for each in self._lazy if not each.follows and each.overlaps(shard, spans)]:
            lazy.read()
            self._lazy.discard(lazy)

    def drop_lazy(self) -> None:
        self._lazy.clear()

    def read_component(self, shard: Shard, component: Component) -> torch.Tensor:
        """The component's array, host: a view where it rests in host memory, else a copy."""
        if component in shard.memory:
            return _on_host(shard, shard.memory[component])
        layout, dtype = shard.layout, component_dtype(shard.layout, component)
        out = host_empty(shard_bytes(layout, [component]) // dtype.itemsize, dtype)
        for row, (begin, end) in enumerate(layout.chunks()):
            out[array_range(layout, component, begin, end)] = self.read_chunk(shard, component, row)
        return out

    def writes_in_place(self, shard: Shard, row: int) -> bool:
        """True if what is written of a chunk takes the place of its newest values: no generation names it."""
        if not shard.on_disk:
            return True
        if shard.base is not None or not shard.slots:
            return False
        held = self._held.get(shard.layout.index)
        is_behind = held is not None and held.slot_before(row) is not None
        return not is_behind and shard.writable_slot() == shard.current

    def write_components(
        self, shard: Shard, source: ChunkSource, changed: tuple[Collection[int], Collection[Component]] | None = None
    ) -> None:
        """Replace every component of a shard, after a commit under way; what rests on disk goes to a slot that no
        generation needs. With `changed`, chunks and components, `source` has all others as they are: they are
        written only where that slot has older ones. The caller has read lazily what it changes of values. Chunks that
        `read_chunk` keeps may wait to be written.

        Raises ZeroOffloadError where the source gives an array of another dtype, size or device than the component's.
        """
        if changed is None:
            self.read_lazy()
        self.snapshots.wait_for_slots()
        comes_to_slot = shard.on_disk and (shard.base is not None or not shard.slots)
        self.make_writable(shard)
        self.ensure_cache(shard)
        shard.wait_for_copies()
        rows: Collection[int] = range(len(shard.layout.chunks()))
        components: Collection[Component] = ()
        if changed is not None and not comes_to_slot:
            rows, components = changed
            self._begin_move(shard)
        if not shard.on_disk:
            self._leave_base(shard)  # before its values in memory are others than the files'
        for row, (begin, end) in enumerate(shard.layout.chunks()):
            if row in rows:
                mine = components if components and self.writes_in_place(shard, row) else shard.components
                if not self._hold(shard, row, mine, source):
                    self._write_chunk(shard, OpenChunks(shard, range(row, row + 1), begin, end, {}), mine, source)
        if shard.on_device:
            self.snapshots.staging.updated()
        self.finish_update(shard)
        self._leave_base(shard)

    def _begin_move(self, shard: Shard) -> None:
        """A generation names the shard's slot: what changes goes to another one, and the rest before that is used."""
        if shard.on_disk and shard.writable_slot() != shard.current:
            before, shard.current = shard.slots[shard.current], shard.writable_slot()
            rows = range(len(shard.layout.chunks()))
            self._held_of(shard).begin_move(before, shard.slots[shard.current], rows)

    def _held_of(self, shard: Shard) -> Held:
        held = self._held.setdefault(shard.layout.index, Held(self.disk))
        shard.write_held = held.write
        return held

    def _hold(self, shard: Shard, row: int, components: Collection[Component], source: ChunkSource) -> bool:
        """Change a chunk that is kept, and let it wait to be written. False where it is not, or not all of it."""
        kept = self._kept.get((shard.layout.index, row), {})
        if not kept.keys() >= set(components) or not shard.slots:
            return False
        begin, end = shard.layout.chunks()[row]
        for component in components:
            values = source(component, begin, end)
            _check_array(shard, component, values, end - begin)
            kept[component].copy_(values)
        self._held_of(shard).hold(row, {each: kept[each] for each in components}, shard.slots[shard.writable_slot()])
        return True

    def _write_chunk(
        self, shard: Shard, chunk: OpenChunks, components: Iterable[Component], source: ChunkSource
    ) -> None:
        """Write a chunk where it rests, and what is kept of it."""
        staging, used, row = self.staging.region, 0, chunk.rows.start
        written = dict[Component, torch.Tensor]()
        for component in components:
            values = source(component, chunk.begin, chunk.end)
            _check_array(shard, component, values, chunk.end - chunk.begin)
            if component in shard.memory:
                target = shard.array(component, row)
                chunk.memory_bytes += target.nbytes
            else:
                target = staging.tensor(values.dtype, values.numel(), used)
                used += values.nbytes
            target.copy_(values)
            chunk.addresses[component] = target.data_ptr()
            written[component] = target
        kept = self._kept.pop((shard.layout.index, row), None)
        self.close_chunks(chunk)
        shard.wait_for_launched()
        shard.writes.clear()
        if shard.layout.index in self._held:
            self._held[shard.layout.index].note_written(row, written)
        if kept is not None:
            for component in kept.keys() & written.keys():
                kept[component].copy_(written[component])
            self._kept[shard.layout.index, row] = kept

    # Generations

    def load_memory(self, shard: Shard, slot: int) -> None:
        """Fill what rests in memory, and a cache, from a slot; every shard's slots are known by now."""
        self.ensure_cache(shard)
        shard.wait_for_copies()
        for component, array in shard.memory.items():
            extent = shard.slots[slot][component]
            if not shard.on_device:
                self.disk.read_array(extent, array)
                continue
            for row in range(len(shard.layout.chunks())):
                shard.array(component, row).copy_(self.disk.read_block(extent, row, array.dtype, self.staging.region))
        if shard.on_device:
            self.snapshots.staging.updated()
        if shard.cache is not None:
            self.disk.write_array(shard.cache, shard.memory[Component.VALUE])
        shard.dirty = False

    def mark_committed(self, slots: Sequence[int]) -> None:
        """The generation that names these slots (one per shard) is durable; older slots may be reused."""
        for shard, slot in zip(self.shards, slots, strict=True):
            shard.committed = slot if shard.base is None and shard.slots else None
            assert shard.committed is None or 0 <= slot < len(shard.slots), f"section {shard.layout.index}, slot {slot}"
            shard.uncommitted = frozenset()
        if not self.snapshots.holds:  # else the next commit frees them
            self._free_retired()


def _extents_of(shard: Shard) -> list[Extent]:
    """All that it has on disk."""
    cache = [] if shard.cache is None else [shard.cache]
    return [*(extent for slot in shard.slots for extent in slot.values()), *cache]


def _new_shard(layout: SectionLayout, tiers: Mapping[StateKind, Tier], device: Device) -> Shard:
    return Shard(layout, ShardPlacement.of(tiers), is_on_device(layout, tiers, is_host=device.is_host))


def _named(layout: SectionLayout, component: Component, slots: Sequence[int]) -> tuple[list[str], list[int]]:
    """The names of a component's extents, and the bytes of the blocks of each."""
    names = [f"section {layout.index} {component}.{slot}" for slot in slots]
    return names, block_sizes(layout, component)


def _check_array(shard: Shard, component: Component, values: torch.Tensor, numel: int) -> None:
    """Raise for what is not a component's array of `numel` elements: bytes on a drive say no dtype."""
    dtype, size = component_dtype(shard.layout, component), array_numel(shard.layout, component, numel)
    if (values.dtype, values.numel(), values.device.type) != (dtype, size, "cpu"):
        raise ZeroOffloadError(
            f"unit {shard.layout.unit}: {component} is {size} elements of {dtype} on cpu, and was to be replaced "
            f"by {values.numel()} of {values.dtype} on {values.device}; nothing was written there. This is an error of "
            "zero_offload: please report it with this message"
        )


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


def _on_host(shard: Shard, array: torch.Tensor) -> torch.Tensor:
    return array.to("cpu", copy=True) if shard.on_device else array
