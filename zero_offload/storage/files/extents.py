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

from zero_offload.base.errors import IntegrityError
from zero_offload.base.types import SECTOR
from zero_offload.plan.dealer import Dealer
from zero_offload.storage.files.engine import BLOCK_DTYPE, BlockTable


@dataclass(frozen=True)
class Extent:
    """Blocks that hold one array; `blocks` has a row of `BLOCK_DTYPE` each, checksums included."""

    name: str
    blocks: BlockTable
    directories: npt.NDArray[np.int32]
    """Which directory each block is in."""
    written: npt.NDArray[np.bool_]
    """Which blocks have ever been written; the others read as zeros."""

    def nbytes_in(self, place: int) -> int:
        """Bytes of it in one directory."""
        return int(self.blocks["nbytes"][self.directories == place].sum())


ExtentRecord = dict[str, Any]
"""What a manifest keeps of an extent."""


class ExtentMap:
    """The extents of one rank in several directories."""

    def __init__(self, seed: int, weights: Sequence[float]) -> None:
        self._seed = seed
        self._dealer = Dealer(dict(enumerate(weights)))
        self.sizes = [0] * len(weights)
        """Bytes of the file in each directory."""
        self._restored: list[Extent] = []
        """Between them there may be room."""
        self._gaps: list[list[tuple[int, int]]] = [[] for _ in weights]
        """Of each directory, where nothing lies that a manifest names: (begin, end)."""

    def allocate(self, names: Sequence[str], block_sizes: Sequence[int]) -> tuple[Extent, ...]:
        """Extents of blocks of these sizes (bytes, whole sectors), one after the other: where one lies says where all.

        The blocks of the first are dealt to the directories; in each, the other extents lie behind it. They go where an
        earlier run had what no manifest names, if they fit there, else to the end.
        """
        self._find_gaps()
        extents = self._describe(names, block_sizes)
        first = extents[0]
        first.directories[:] = [self._dealer.deal(nbytes) for nbytes in block_sizes]
        for place in range(len(self.sizes)):
            here = first.directories == place
            begins = _begins(first.blocks["nbytes"][here])
            first.blocks["offset"][here] = begins + self._take(place, len(names) * first.nbytes_in(place))
        _place_copies(extents, 0)
        return extents

    def _take(self, place: int, nbytes: int) -> int:
        """Where so many bytes in a row are free in a directory; they are taken."""
        for number, (begin, end) in enumerate(self._gaps[place]):
            if end - begin >= nbytes:
                self._gaps[place][number] = (begin + nbytes, end)
                return begin
        self.sizes[place] += nbytes
        return self.sizes[place] - nbytes

    def _find_gaps(self) -> None:
        """After the last of `restore_copies`."""
        if not self._restored:
            return
        for place in range(len(self.sizes)):
            spans: list[tuple[int, int]] = []
            for extent in self._restored:
                here = extent.directories == place
                begins = extent.blocks["offset"][here]
                spans += zip(begins.tolist(), (begins + extent.blocks["nbytes"][here]).tolist(), strict=True)
            free_from = 0
            for begin, end in sorted(spans):
                if begin > free_from:
                    self._gaps[place].append((free_from, begin))
                free_from = max(free_from, end)
        self._restored = []

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
        for each in extents:
            ends = each.blocks["offset"] + each.blocks["nbytes"]
            for place, size in enumerate(self.sizes):
                self.sizes[place] = max(size, int(ends[each.directories == place].max(initial=0)))
        self._restored += extents
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
            apart = (number - known) * origin.nbytes_in(place)
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
