"""Chunks that the program has changed between steps, and that are not in their slot yet.

Neighbouring parameters share a chunk and are changed one after the other. A chunk that was changed in part waits for
the neighbour, so that each is written once. A section whose slot the committed generation names goes to its other slot
chunk by chunk. Those that nothing has changed are copied at the end. Owns which chunks these are. The calls:
`begin_move` and `hold` as the program changes something, `write_chunk` where memory for another chunk is wanted.
`write` comes before anything else uses the slot: `Shard.wait_for_writes` calls it, on any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping

import torch

from zero_offload.base.host import host_reserved
from zero_offload.storage.files.swap_file import Extent, SwapFile
from zero_offload.storage.shards.shard import Component


class Held:
    """The changes of one shard that are held back."""

    def __init__(self, disk: SwapFile) -> None:
        self._disk = disk
        self._lock = threading.Lock()
        self._slot: Mapping[Component, Extent] = {}
        """The slot that everything goes to."""
        self._before: Mapping[Component, Extent] = {}
        """The slot of chunks that are behind."""
        self._behind: set[int] = set()
        self._chunks: dict[int, dict[Component, torch.Tensor]] = {}
        """Newest arrays of chunks, in host memory."""

    def begin_move(
        self, before: Mapping[Component, Extent], slot: Mapping[Component, Extent], rows: Iterable[int]
    ) -> None:
        """The shard's slot is another one from now on; that of before has these chunks."""
        with self._lock:
            assert not (self._behind or self._chunks), f"chunks {sorted(self._behind)} are behind from the move before"
            self._before, self._slot, self._behind = before, slot, set(rows)

    def slot_before(self, row: int) -> Mapping[Component, Extent] | None:
        """The slot that a chunk is in, if the shard has another one by now."""
        return self._before if row in self._behind else None

    def hold(self, row: int, arrays: Mapping[Component, torch.Tensor], slot: Mapping[Component, Extent]) -> None:
        """These are a chunk's newest arrays, sector-aligned: all that it has, if it is behind. They stay as they are
        until the next call of `hold` or `write_chunk` for this chunk, or of `write`."""
        with self._lock:
            self._slot = slot
            self._chunks.setdefault(row, {}).update(arrays)
            self._behind.discard(row)

    def note_written(self, row: int, components: Collection[Component]) -> None:
        """A chunk was written past this, as `hold` takes it."""
        with self._lock:
            held = self._chunks.get(row, {})
            for component in components:
                held.pop(component, None)
            self._behind.discard(row)

    def write_chunk(self, row: int) -> None:
        """Write what is held of a chunk, and wait. Raises StorageError; it is held then as before."""
        with self._lock:
            self._write_chunk(row)

    def write(self) -> None:
        """Write everything, and wait. Raises StorageError; what is not written is held then as before."""
        if not (self._chunks or self._behind):
            return
        with self._lock:
            for row in list(self._chunks):
                self._write_chunk(row)
            for row in sorted(self._behind):
                self._move_chunk(row)
                self._behind.remove(row)

    def _write_chunk(self, row: int) -> None:
        arrays = self._chunks.get(row, {})
        writes = [
            self._disk.launch_write(self._slot[each], _one(row), array.data_ptr()) for each, array in arrays.items()
        ]
        for write in writes:
            write.wait()
        self._chunks.pop(row, None)

    def _move_chunk(self, row: int) -> None:
        for component, extent in self._before.items():
            block = host_reserved([int(extent.blocks[row]["nbytes"])], torch.uint8)
            self._disk.launch_read(extent, _one(row), block.data_ptr()).wait()
            self._disk.launch_write(self._slot[component], _one(row), block.data_ptr()).wait()


def _one(row: int) -> slice:
    return slice(row, row + 1)
