"""Gradients at rest on a drive.

They have pages in host memory only while backward writes the array, and until that is on the drive; `DriveRoom` says
which sections have them. A large gradient that is its section's only one is written through four chunks, without a copy
of all of it. `chunks` runs on any thread, and waits for what was launched before; the rest is the control thread's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from zero_offload.base.events import Counters
from zero_offload.base.spans import Cause
from zero_offload.base.types import Tier
from zero_offload.hardware.kernels.grads import sum_of_squares
from zero_offload.plan.layout import CHUNK_NUMEL, SectionLayout
from zero_offload.plan.memory import GRADS_IN_FLIGHT
from zero_offload.storage.files.swap_file import ALL_ROWS, Extent, Transfer
from zero_offload.storage.memory.arena import MovableBuffer, Region
from zero_offload.storage.shards import grad_store
from zero_offload.storage.shards.grad_downloads import GradDownloads
from zero_offload.storage.shards.grad_store import Gathered, GradMemory, GradPiece, HostGrads, Wait

STREAM_CHUNKS = 4
"""Chunks of memory that a gradient is streamed through."""

AttachBuffer = Callable[[MovableBuffer], None]
"""Puts pages under a buffer, evicting others if need be. Raises CapacityError."""


class DriveRoom:
    """Which sections whose gradients rest on a drive have pages, and which give theirs back first.

    Backward fills the pages of a section while those of the unit before are written. Sections that wait for their last
    gradients (some never come) rest on their drive until those arrive. The calls: `make_room` before a gradient is put
    in its place. `launch_writes` when the section is complete, or `drop`. `detach_pages` when the pages are wanted
    elsewhere. The outcome depends on the order of the calls alone, never on what is complete, so that it is the same on
    all ranks.
    """

    def __init__(self, counters: Counters, downloads: GradDownloads | None) -> None:
        """`downloads`: from a GPU, which sections wait for before they leave."""
        self._counters = counters
        self.downloads = downloads
        # Weak: stores hold this object, and a cycle would outlive a dropped model.
        self._stores: dict[int, list[weakref.ref[DriveGrads]]] = {}
        """Stores by the section's index: with several ranks it has two, which leave together."""
        self._units: dict[int, int] = {}
        """The unit of each section."""
        self._open: list[int] = []
        """Sections with pages to fill, the longest unused first."""
        self._writing: list[int] = []
        """Sections with pages that are being written, the oldest first."""

    def add(self, store: DriveGrads) -> None:
        self._stores.setdefault(store.layout.index, []).append(weakref.ref(store))
        self._units[store.layout.index] = store.layout.unit

    def make_room(self, section: int) -> None:
        """There is room for this section's pages."""
        if self._open and self._open[-1] == section and len(self._writing) < GRADS_IN_FLIGHT:
            return  # the next gradient of the same section
        self._remove(section)
        while self._num_units([*self._open, section]) > GRADS_IN_FLIGHT:
            self.launch_writes(self._open[0])
        while self._num_units(self._writing) >= GRADS_IN_FLIGHT:
            self._detach_oldest()
        self._open.append(section)

    def launch_writes(self, section: int) -> None:
        """Launch the writes of this section's pages."""
        self._remove(section)
        for store in self._of(section):
            store.launch_write()
        self._writing.append(section)

    def drop(self) -> None:
        """Drop gradients whose writes are not launched."""
        while self._open:
            for store in self._of(self._open[-1]):
                store.end_view()
            self._open.pop()

    def detach_pages(self) -> bool:
        """Wait for the writes that are launched, and give back their pages. True if there were any."""
        if self.downloads is not None:
            self.downloads.advance()
        found = bool(self._writing)
        while self._writing:
            self._detach_oldest()
        return found

    def _detach_oldest(self) -> None:
        stores = self._of(self._writing[0])
        with self._counters.waiting(Cause.GRADS, stores[0].unit):
            for store in stores:
                store.detach_pages()
        self._writing.pop(0)

    def _remove(self, section: int) -> None:
        self._open = [each for each in self._open if each != section]
        self._writing = [each for each in self._writing if each != section]

    def _num_units(self, sections: Iterable[int]) -> int:
        return len({self._units[each] for each in sections})

    def _of(self, section: int) -> list[DriveGrads]:
        return [store for store in (each() for each in self._stores[section]) if store is not None]


class DriveGrads(HostGrads):
    """The gradients of one shard, on a drive."""

    comes_by_staging = True

    def __init__(
        self,
        room: DriveRoom,
        attach: AttachBuffer,
        memory: GradMemory,
        layout: SectionLayout,
        unit: str,
        *,
        sums_up: bool,
    ) -> None:
        super().__init__(memory, layout, Tier.NVME, unit, sums_up=sums_up)
        self._room = room
        self._attach = attach
        self._pages: MovableBuffer | None = None
        """The pages under the array."""
        self._stream_pages: MovableBuffer | None = None
        self._writes: tuple[Transfer, ...] = ()
        """Those out of attached pages which may be under way."""
        self._extents: dict[torch.dtype, Extent] = {}
        room.add(self)

    # From backward

    def add(self, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        self._write(index, grad.contiguous(), adds=adds)

    def add_shard(self, new: Gathered) -> None:
        downloads = self._memory.downloads
        if downloads is None:
            self._store_flat(new.parts, new.adds, new.flat)
        else:
            self._stage(downloads, new)

    def take_pages(self) -> None:
        self.widen()
        self.writable_array()

    def complete(self) -> None:
        self._room.launch_writes(self.layout.index)

    def end_view(self, changed: Collection[int] = ()) -> None:
        super().end_view(changed)
        if changed:
            self._room.launch_writes(self.layout.index)
        else:
            self._drop_array()
            self._detach_pages()

    def _write(self, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        self._room.make_room(self.layout.index)
        if adds or not self._may_stream(grad):
            super()._write(index, grad, adds=adds)
            return
        self.factors.pop(index, None)
        with self._store.counters.waiting(Cause.GRADS, self.unit):
            self.stream(grad.reshape(-1))
        threads = self._memory.num_threads
        self.sums[index] = sum_of_squares(grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads)
        self.held = True

    def _may_stream(self, grad: torch.Tensor) -> bool:
        """True if a gradient is large, and rests on a drive as it is, and alone."""
        alone = len(self.layout.params) == 1 and self._array is None
        return self._has_sums and alone and grad.nbytes >= grad_store.LARGE_BYTES and grad.dtype == self.dtype

    def stream(self, grad: torch.Tensor) -> None:
        """Write `grad`, the shard's elements from the first on, chunk after chunk; the last few are under way then."""
        self._detach_pages()
        nbytes = CHUNK_NUMEL * grad.itemsize
        self._stream_pages = self._attached(self._stream_pages, nbytes * STREAM_CHUNKS)
        for row, (begin, end) in enumerate(self.layout.chunks()):
            if len(self._writes) == STREAM_CHUNKS:
                self._writes[0].wait()
            part = self._stream_pages.region.tensor(grad.dtype, end - begin, row % STREAM_CHUNKS * nbytes)
            piece = grad[begin:end]
            part[: len(piece)].copy_(piece)
            write = self._store.disk.launch_write(self._extent(grad.dtype), slice(row, row + 1), part.data_ptr())
            self._writes = (*self._writes[1 - STREAM_CHUNKS :], write)

    # Pages

    @property
    def on_disk(self) -> bool:
        return self._array is None

    def writable_array(self) -> torch.Tensor:
        if self._array is None:
            self._room.make_room(self.layout.index)
        return super().writable_array()

    def _fetch_array(self) -> torch.Tensor:
        numel = self.layout.shard_numel
        if self._pages is not None and self._pages.attached and self._writes:
            self._wait_for_writes()  # what they write must not change
            self._writes = ()
            return self._pages.region.tensor(self.dtype, numel)
        self._detach_pages()
        self._pages = self._attached(self._pages, numel * self.dtype.itemsize)
        array = self._pages.region.tensor(self.dtype, numel)
        if self.held:
            self._store.disk.read_array(self._extent(self.dtype), array)
        return array

    def _widen_array(self) -> None:
        self._widen_in_turn()

    def _begin_wide(self) -> None:
        super()._begin_wide()
        self._detach_pages()

    def launch_write(self) -> None:
        """Launch the write of the open array."""
        if self._array is not None:
            self._wait_for_writes()
            write = self._store.disk.launch_write(self._extent(self.dtype), ALL_ROWS, self._array.data_ptr())
            self._writes = (write,)
            self._drop_array()

    def detach_pages(self) -> None:
        """Wait for the write that `launch_write` launched, and give back its pages."""
        if self._array is None:
            self._detach_pages()

    def _detach_pages(self) -> None:
        """Wait for writes under way, and give back all pages."""
        self._wait_for_writes()
        for pages in (self._pages, self._stream_pages):
            if pages is not None and pages.attached:
                pages.detach()
        self._writes = ()

    def _wait_for_writes(self) -> None:
        for write in self._writes:
            write.wait()

    def _attached(self, pages: MovableBuffer | None, nbytes: int) -> MovableBuffer:
        """The buffer with pages attached; its addresses are reserved once for each size."""
        if pages is None or pages.region.nbytes != nbytes:
            pages = MovableBuffer(self._store.arena, nbytes, claims=True)
        self._attach(pages)
        return pages

    def _extent(self, dtype: torch.dtype) -> Extent:
        if dtype not in self._extents:
            name = f"grads {self.layout.index} of {self.layout.num_shards}"
            self._extents[dtype] = self._store.disk.allocate(name, self.layout.block_sizes(dtype))
        return self._extents[dtype]

    def drop_room(self) -> None:
        super().drop_room()
        self._wait_for_writes()
        self._store.disk.free([*self._extents.values()])
        self._extents.clear()

    # To the update

    def chunks(
        self, rows: range, staging: Region | None = None, offset: int = 0
    ) -> tuple[list[GradPiece], Sequence[Wait]]:
        if staging is None or not self.on_disk:
            return super().chunks(rows)
        begin, end = self.layout.elements(rows)
        self._wait_for_writes()
        extent, address = self._extent(self.dtype), staging.address + offset
        read = self._store.disk.launch_read(extent, slice(rows.start, rows.stop), address)
        return [GradPiece(0, end - begin, staging.tensor(self.dtype, end - begin, offset))], [read.wait]
