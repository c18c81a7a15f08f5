"""Which elements a range of experts has, on which shards they are, and where they land in memory for one group.

Experts lie one behind the other in each parameter, so a range of them is one stretch of a section's flat buffer for
each parameter. Drives give whole blocks: `GroupPart.reads` are rounded to chunks, and memory for a group has room for
them. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_offload.base.types import whole_sectors
from zero_offload.plan.layout import CHUNK_NUMEL, ParamSlice, SectionLayout, UnitLayout

GROUPS_IN_FLIGHT = 2
"""Groups in memory at once: the one in use, and one arriving."""


@dataclass(frozen=True)
class ShardRange:
    """The part of one shard: elements [begin, end) of it, inside of whole chunks [first, last)."""

    shard: int
    begin: int
    end: int
    first: int
    last: int
    offset: int
    """Where the element `first` lands, in bytes of the group's memory; a multiple of a sector."""

    def place(self, itemsize: int) -> int:
        """Where the element `begin` lands, in bytes."""
        return self.offset + (self.begin - self.first) * itemsize


@dataclass(frozen=True)
class GroupPart:
    """One parameter's elements of a range of experts."""

    section: SectionLayout
    piece: ParamSlice
    begin: int
    """Its first element in the section's flat buffer."""
    shape: tuple[int, ...]
    """(experts, ...)"""
    shards: tuple[ShardRange, ...]
    """In the order of the elements, which lie in memory without gaps."""

    @property
    def offset(self) -> int:
        """Where it lands, in bytes of the group's memory."""
        return self.shards[0].place(self.section.dtype.itemsize)


@dataclass(frozen=True)
class GroupLayout:
    """The parts of a range of experts, and the bytes of memory that they take."""

    parts: tuple[GroupPart, ...]
    nbytes: int

    @classmethod
    def of(cls, unit: UnitLayout, experts: range) -> GroupLayout:
        assert unit.experts is not None
        parts, nbytes = list[GroupPart](), 0
        for section in unit.sections:
            itemsize = section.dtype.itemsize
            for piece in section.params:
                numel = piece.spec.numel // unit.experts.num_experts
                begin = piece.begin + experts.start * numel
                shards = _shard_parts(section, begin, begin + len(experts) * numel, nbytes)
                if shards:
                    parts.append(GroupPart(section, piece, begin, (len(experts), *piece.spec.shape[1:]), shards))
                    nbytes = whole_sectors(shards[-1].offset + (shards[-1].last - shards[-1].first) * itemsize)
        return cls(tuple(parts), nbytes)


def _shard_parts(section: SectionLayout, begin: int, end: int, offset: int) -> tuple[ShardRange, ...]:
    """The shards' parts of elements [begin, end) of the flat buffer, the first of which lands at `offset` or behind."""
    found, size, origin = list[ShardRange](), section.shard_numel, 0
    for shard in range(begin // size, -(-end // size) if end > begin else 0):
        low, high = max(begin - shard * size, 0), min(end - shard * size, size)
        first, last = low // CHUNK_NUMEL * CHUNK_NUMEL, min(-(-high // CHUNK_NUMEL) * CHUNK_NUMEL, size)
        if not found:
            origin = shard * size + first
        at = offset + (shard * size + first - origin) * section.dtype.itemsize
        found.append(ShardRange(shard, low, high, first, last, at))
    return tuple(found)


def group_bytes(unit: UnitLayout) -> int:
    """Bytes of memory that any of the unit's groups needs; 0 where it is fetched whole."""
    if unit.experts is None:
        return 0
    groups = (unit.experts.group(index) for index in range(unit.experts.num_groups))
    return max(GroupLayout.of(unit, group).nbytes for group in groups)
