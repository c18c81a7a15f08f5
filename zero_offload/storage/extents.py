"""Where arrays lie in the files of one rank: blocks, and which of them a manifest has named. Plans, and moves no byte.

An extent's table is what the file engine reads: a write stores the block's checksum in it, a read is verified against
it, and a manifest is a copy of it. Blocks are dealt to the directories by their weights, so several drives work at once
and end at the same time.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_offload.errors import IntegrityError
from zero_offload.plan.dealer import Dealer
from zero_offload.storage.engine import BLOCK_DTYPE, BlockTable
from zero_offload.types import SECTOR


@dataclass(frozen=True)
class Extent:
    """Blocks that hold one array; `blocks` has a row of `BLOCK_DTYPE` each, checksums included."""

    name: str
    blocks: BlockTable
    directories: npt.NDArray[np.int32]
    """Which directory each block is in."""
    written: npt.NDArray[np.bool_]
    """Which blocks have ever been written; the others read as zeros."""

    @property
    def nbytes(self) -> int:
        return int(self.blocks["nbytes"].sum())


ExtentRecord = dict[str, Any]
"""What a manifest keeps of an extent."""


class ExtentMap:
    """The extents of one rank in several directories."""

    def __init__(self, seed: int, weights: Sequence[float]) -> None:
        self._seed = seed
        self._dealer = Dealer(dict(enumerate(weights)))
        self.sizes = [0] * len(weights)
        """Bytes used of the file in each directory."""

    def allocate(self, names: Sequence[str], block_sizes: Sequence[int]) -> tuple[Extent, ...]:
        """Extents of blocks of these sizes (bytes, whole sectors), one after the other: where one lies says where all.

        The first of them are dealt to the directories, the others lie behind it.
        """
        extents = self._describe(names, block_sizes)
        first = extents[0]
        first.directories[:] = [self._dealer.deal(nbytes) for nbytes in block_sizes]
        for place, size in enumerate(self.sizes):
            here = first.directories == place
            first.blocks["offset"][here] = size + _begins(first.blocks["nbytes"][here])
        _place_copies(extents, 0)
        self._take_up(extents)
        return extents

    def restore_copies(
        self, names: Sequence[str], block_sizes: Sequence[int], index: int, record: Any
    ) -> tuple[Extent, ...]:
        """What `allocate` has made, of which a manifest records number `index`; the others are blank.

        Raises IntegrityError when the record does not fit.
        """
        extents = self._describe(names, block_sizes)
        extent = extents[index]
        limits = {"offset": 2**62, "crc": 2**32, "directory": len(self.sizes)}
        values = {key: _numbers(record, key, limit, extent) for key, limit in limits.items()}
        extent.blocks["offset"], extent.blocks["crc"] = values["offset"], values["crc"]
        extent.directories[:] = values["directory"]
        extent.written[:] = not record.get("blank")
        _place_copies(extents, index)
        self._take_up(extents)
        return extents

    def _describe(self, names: Sequence[str], block_sizes: Sequence[int]) -> tuple[Extent, ...]:
        """Extents that lie nowhere yet."""
        assert all(nbytes % SECTOR == 0 for nbytes in block_sizes)
        extents = []
        for name in names:
            table = np.zeros(len(block_sizes), dtype=BLOCK_DTYPE)
            table["nbytes"] = block_sizes
            # A block of another run, extent or position fails its checksum even where its bytes are valid.
            table["seed"] = [_mix(self._seed, zlib.crc32(name.encode()), i) for i in range(len(table))]
            places, written = np.zeros(len(table), dtype=np.int32), np.zeros(len(table), dtype=np.bool_)
            extents.append(Extent(name, table, places, written))
        return tuple(extents)

    def _take_up(self, extents: Sequence[Extent]) -> None:
        """What is allocated from here on must not overlap these."""
        for extent in extents:
            ends = extent.blocks["offset"] + extent.blocks["nbytes"]
            for place, size in enumerate(self.sizes):
                self.sizes[place] = max(size, int(ends[extent.directories == place].max(initial=0)))


def extent_record(extent: Extent) -> ExtentRecord:
    """What a manifest keeps of an extent: where each block is and its checksum; or that it was never written."""
    columns = {"offset": extent.blocks["offset"], "crc": extent.blocks["crc"], "directory": extent.directories}
    record = {key: values.tolist() for key, values in columns.items()}
    return record if extent.written.any() else {**record, "blank": True}


def _begins(sizes: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """Where each of these begins, one after the other from 0."""
    ends = np.cumsum(sizes, dtype=np.uint64)
    return ends - sizes


def _place_copies(extents: Sequence[Extent], known: int) -> None:
    """Copies of one shape lie behind each other in every directory: from where one is follows where all are."""
    origin = extents[known]
    for number, extent in enumerate(extents):
        extent.directories[:] = origin.directories
        for place in np.unique(origin.directories):
            here = origin.directories == place
            apart = (number - known) * int(origin.blocks["nbytes"][here].sum())
            offsets = origin.blocks["offset"][here].astype(np.int64) + apart
            if offsets.min() < 0:
                raise IntegrityError(
                    f"the manifest puts {origin.name} where {extent.name} would begin before its file; "
                    "load a checkpoint, or start over with existing='discard'"
                )
            extent.blocks["offset"][here] = offsets


def _numbers(record: Any, key: str, limit: int, extent: Extent) -> list[int]:
    """A list of a manifest's record, checked."""
    values = record.get(key) if isinstance(record, dict) else None
    valid = isinstance(values, list) and len(values) == len(extent.blocks)
    if not valid or not all(type(value) is int and 0 <= value < limit for value in values or ()):
        raise IntegrityError(
            f"the manifest's {key} list of {extent.name} is not {len(extent.blocks)} valid numbers; "
            "load a checkpoint, or start over with existing='discard'"
        )
    assert isinstance(values, list)
    return values


def _mix(*words: int) -> int:
    """Spread a few integers over 32 bits (FNV-1a over their 64-bit forms)."""
    value = 0x811C9DC5
    for word in words:
        for byte in word.to_bytes(8, "little"):
            value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value
