"""Values of experts in groups, for units that no forward fetches whole.

Owns memory for two groups, `GroupMemory`: one is in use while the next one arrives. It is taken at the first use and
kept, for all units in turn. `GroupReader.values` has a range of experts here when it returns. The caller chooses the
order of ranges, the same on all ranks. Where they gather, each part goes from the rank that holds it to all others, in
the order of the elements. Reads ahead follow the caller, and from one call to the next the last cycle: a mistake costs
at most a read.

Values that are here anyway are used where they are: a unit that never leaves, or one inside of `zo.gathered`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_offload.base.events import Counters
from zero_offload.base.spans import Cause
from zero_offload.hardware.device import Device, Event, Handoff
from zero_offload.plan.expert_groups import GROUPS_IN_FLIGHT, GroupLayout, GroupPart, ShardRange
from zero_offload.plan.layout import ParamSlice
from zero_offload.runtime.ranks.collectives import Collectives
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.storage.files.base_file import Stretch
from zero_offload.storage.files.engine import Urgency
from zero_offload.storage.files.swap_file import Transfer
from zero_offload.storage.memory.pool import LazyRegion
from zero_offload.storage.shards.store import ShardStore


class ExpertGroup(NamedTuple):
    """A range of a unit's experts."""

    unit: Unit
    experts: range


@dataclass
class GroupMemory:
    """Memory for one group, and what it holds or is to hold."""

    landing: LazyRegion
    """Of the host: where reads end. A CPU computes on it."""
    device: Tensor | None = None
    """(bytes,) in a device's memory, once it is used."""
    group: ExpertGroup | None = None
    """The group that it holds, or that is on its way."""
    layout: GroupLayout | None = None
    arriving: list[tuple[GroupPart, ShardRange]] = field(default_factory=list)
    """Parts that come to `landing`; those of a device are uploaded then."""
    reads: list[Transfer] = field(default_factory=list)
    """On their way from a drive."""
    uploads: list[Handoff] = field(default_factory=list)
    leaves_landing: list[Event] = field(default_factory=list)
    """The last uploads from `landing`, which may be filled after them."""
    users: list[Any] = field(default_factory=list)
    """Of a device, the streams that compute with it."""
    arrival: Event | None = None
    """Of a device, when the values are there."""
    is_whole: bool = False
    """True if all values are here, and compute may use them."""

    def cancel(self) -> None:
        """Nothing is on its way any more, and it holds nothing."""
        self.group, self.layout, self.is_whole = None, None, False
        self.arriving.clear()
        while self.reads:
            self.reads[-1].wait()
            self.reads.pop()
        self.leaves_landing += [handoff.ready for handoff in self.uploads]
        self.uploads.clear()

    def free_landing(self) -> None:
        """Wait until no upload reads `landing`."""
        while self.leaves_landing:
            self.leaves_landing[-1].synchronize()
            self.leaves_landing.pop()


class GroupReader:
    """Brings groups of experts to the compute device."""

    def __init__(self, store: ShardStore, collectives: Collectives, device: Device, nbytes: int) -> None:
        """`nbytes`: of the largest group."""
        self._store = store
        self._counters: Counters = store.counters
        self._collectives = collectives
        self._device = device
        self._nbytes = nbytes
        self._memory = self._new_memory()
        self._last: tuple[ExpertGroup, bool] | None = None
        """The group used last, and whether a backward used it."""
        self._next: dict[tuple[ExpertGroup, bool], ExpertGroup] = {}
        """By group and direction: the group used after it in the last cycle."""

    def _new_memory(self) -> list[GroupMemory]:
        """In the order of their last uses."""
        return [GroupMemory(LazyRegion(self._store.arena, self._nbytes)) for _ in range(GROUPS_IN_FLIGHT)]

    def widen(self, nbytes: int) -> None:
        """Further units have groups of so many bytes."""
        if nbytes <= self._nbytes:
            return
        for memory in self._memory:
            memory.cancel()
            memory.free_landing()
        self._nbytes = nbytes
        self._memory = self._new_memory()

    @property
    def gathers(self) -> bool:
        """True if all ranks have to ask for the same groups in the same order."""
        return self._collectives.num_shards > 1

    def values(
        self, group: ExpertGroup, following: ExpertGroup | None, *, in_backward: bool, keeps_order: bool
    ) -> dict[str, Tensor]:
        """The values of these experts, each of shape (experts, ...), by the last part of the parameter's name; valid
        until the next call. The unit's update is over.

        `following` is what comes next; None at the end of a call. With `keeps_order` the next call will have the same.
        """
        unit = group.unit
        if is_here(unit):
            return self._here(group)
        with self._counters.waiting(Cause.PARAMS, unit.name):
            memory = self._fetch(group)
        if keeps_order:
            following = following or self._next.get((group, in_backward))
            if self._last is not None:
                self._next[self._last] = group
            self._last = group, in_backward
        other = next(each for each in self._memory if each is not memory)
        held = [each.group for each in self._memory]
        if following is not None and following not in held and not following.unit.is_updating:
            self._launch(other, following, Urgency.NORMAL)
        assert memory.layout is not None
        whole = self._whole(memory)
        return {_name_of(part.piece): _view(whole, part) for part in memory.layout.parts}

    def _here(self, group: ExpertGroup) -> dict[str, Tensor]:
        """Views of the unit's own buffers."""
        first, last = group.experts.start, group.experts.stop
        return {
            _name_of(piece): section.own_view(piece)[first:last]
            for section in group.unit.sections
            for piece in section.layout.params
        }

    def advance(self) -> None:
        """Upload what was read meanwhile."""
        for memory in self._memory if not self._device.is_host else ():
            if memory.arriving and all(each.done() for each in memory.reads):
                self._upload(memory)

    def outdate(self, units: Iterable[Unit]) -> None:
        """These units get other values: what was read of them is not used."""
        changed = {*units}
        for memory in self._memory:
            if memory.group is not None and memory.group.unit in changed:
                memory.cancel()

    def _fetch(self, group: ExpertGroup) -> GroupMemory:
        memory = next((each for each in self._memory if each.group == group), None)
        if memory is None:
            memory = next((each for each in self._memory if each.group is None), self._memory[0])
            self._launch(memory, group, Urgency.URGENT)
        if not memory.is_whole:
            self._finish(memory)
        if memory.arrival is not None and self._device.stream() not in memory.users:
            memory.arrival.wait()
            memory.users.append(self._device.stream())
        # The one used last is at the end: the first one is free for what comes.
        self._memory = [*(each for each in self._memory if each is not memory), memory]
        return memory

    def _launch(self, memory: GroupMemory, group: ExpertGroup, urgency: Urgency) -> None:
        """Begin to fill the memory with this rank's part of a group."""
        memory.cancel()
        if not self._device.is_host:
            if memory.device is None:
                memory.device = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device.torch_device)
            self._device.join(memory.users)
            memory.users.clear()
            mark = self._device.mark()
        layout = GroupLayout.of(group.unit.layout, group.experts)
        assert layout.nbytes <= self._nbytes
        sections = {section.layout.index: section for section in group.unit.sections}
        memory.group, memory.layout = group, layout
        try:
            for part in layout.parts:
                section = sections[part.section.index]
                for piece in part.shards:
                    if piece.shard != self._collectives.shard_index and part.section.num_shards > 1:
                        continue
                    value = None if self._device.is_host else self._store.value_in_memory(section.shard)
                    if value is None:
                        memory.arriving.append((part, piece))
                        continue
                    self._counters.read(section.shard.memory_tier, (piece.end - piece.begin) * value.itemsize)
                    target, source = _stretch(memory.device, part, piece), value[piece.begin : piece.end]
                    if section.shard.on_device:
                        target.copy_(source)
                    else:
                        memory.uploads.append(self._device.upload(target, source, after=mark))
                        section.shard.last_copy = memory.uploads[-1].ready
            if memory.arriving:
                self._read(memory, sections.values(), urgency)
        except BaseException:
            memory.cancel()
            raise

    def _read(self, memory: GroupMemory, sections: Iterable[Section], urgency: Urgency) -> None:
        """All parts of a section together: a block of a file may have some of each."""
        memory.free_landing()
        at = memory.landing.region.address
        for section in sections:
            index, itemsize = section.layout.index, section.layout.dtype.itemsize
            parts = [
                Stretch(piece.begin, piece.end, at + piece.place(itemsize))
                for part, piece in memory.arriving
                if part.section.index == index
            ]
            for transfer in self._store.launch_fetch_parts(section.shard, parts, urgency) if parts else ():
                memory.reads.append(transfer)

    def _upload(self, memory: GroupMemory) -> None:
        """Wait for the reads, and launch the uploads of what they bring."""
        for transfer in memory.reads:
            transfer.wait()
        memory.reads.clear()
        for part, piece in memory.arriving:
            if not self._device.is_host:
                numel, at = piece.end - piece.begin, piece.place(part.section.dtype.itemsize)
                source = memory.landing.region.tensor(part.section.dtype, numel, at)
                memory.uploads.append(self._device.upload(_stretch(memory.device, part, piece), source))
        memory.arriving.clear()

    def _finish(self, memory: GroupMemory) -> None:
        assert memory.layout is not None and memory.group is not None
        try:
            self._upload(memory)
        except BaseException:
            memory.cancel()
            raise
        for handoff in memory.uploads:
            handoff.take()
        memory.leaves_landing += [handoff.ready for handoff in memory.uploads]
        memory.uploads.clear()
        if self._collectives.num_shards > 1:
            experts = memory.group.experts
            name = f"experts {experts.start} to {experts.stop - 1} of {memory.group.unit.name}"
            self._gather(memory, name, memory.layout.parts)
        if not self._device.is_host:
            memory.arrival = self._device.mark()
        memory.is_whole = True

    def _gather(self, memory: GroupMemory, name: str, parts: Sequence[GroupPart]) -> None:
        whole = self._whole(memory)
        pieces = [(_stretch(whole, part, piece), piece.shard) for part in parts for piece in part.shards]
        self._collectives.agreement.announce(f"the gather of {name}")
        self._collectives.launch_spread(pieces, name)()

    def _whole(self, memory: GroupMemory) -> Tensor:
        """The memory that compute uses, (bytes,)."""
        found = memory.landing.region.tensor(torch.uint8, self._nbytes) if self._device.is_host else memory.device
        assert found is not None
        return found


def is_here(unit: Unit) -> bool:
    """True if the unit's values are used where they are, once `ParamPrefetcher.fetch_for_access` has them there."""
    return unit.resident or unit.gathered_uses > 0


def _name_of(piece: ParamSlice) -> str:
    return piece.spec.name.rpartition(".")[2]


def _stretch(memory: Tensor | None, part: GroupPart, piece: ShardRange) -> Tensor:
    """A shard's elements of a part, (elements,), where they land."""
    assert memory is not None
    at, itemsize = piece.place(part.section.dtype.itemsize), part.section.dtype.itemsize
    return memory[at : at + (piece.end - piece.begin) * itemsize].view(part.section.dtype)


def _view(memory: Tensor, part: GroupPart) -> Tensor:
    dtype = part.section.dtype
    nbytes = torch.Size(part.shape).numel() * dtype.itemsize
    return memory[part.offset : part.offset + nbytes].view(dtype).view(part.shape)
