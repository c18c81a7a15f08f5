"""The update pass: read | compute | write, for every chunk of every unit, with bounded staging.

Owns the order of an update and its staging memory. Chunks whose states rest on disk are read, updated by one fused
kernel pass, and written back while the next ones are computed. At most `CHUNKS_IN_FLIGHT` are under way. Gradients on a
disk, or in the memory of a GPU, come by staging too. States in memory are updated in place, a whole shard in one pass.
Python takes as long for a chunk as for a shard, and the thread that drives a GPU waits meanwhile. While a commit needs
the shard, the update goes chunk by chunk. `run` works on whatever thread calls it, and completes the future of each
unit.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from zero_offload.base.spans import Opened, Track
from zero_offload.base.threads import UnitUpdate
from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.arguments import SegmentArray
from zero_offload.hardware.kernels.rules import STATES
from zero_offload.hardware.kernels.update import UpdateBuffers, fused_update
from zero_offload.plan.layout import CHUNK_NUMEL
from zero_offload.plan.memory import CHUNKS_IN_FLIGHT
from zero_offload.storage.files.swap_file import Transfer
from zero_offload.storage.memory.arena import Region
from zero_offload.storage.shards.grad_store import GradPiece, GradStore, Wait
from zero_offload.storage.shards.shard import Component, Shard, is_packed
from zero_offload.storage.shards.store import OpenChunks, ShardStore


@dataclass(frozen=True)
class SectionUpdate:
    """One section's part of an update; `segments` of each rule are in elements of the shard, sorted, disjoint."""

    unit: int
    name: str
    """The unit's, for a trace."""
    position: int
    """Which of the unit's sections: index into a delivery's addresses."""
    shard: Shard
    grads: GradStore
    segments: Mapping[Rule, SegmentArray]
    origin: int
    """The index in its section of the shard's first element."""
    complete: bool
    """True if the segments cover every parameter of the section."""


@dataclass
class _Task:
    """A chunk, or all of a shard's, between reads and the end of writes."""

    section: SectionUpdate
    rows: range
    first: bool
    """True for the first one of its unit."""
    last: bool
    staging: Region | None = None
    chunks: OpenChunks | None = None
    grads: list[GradPiece] = field(default_factory=list)
    grad_waits: Sequence[Wait] = ()
    writes: list[Transfer] = field(default_factory=list)


class UpdatePipeline:
    """Runs updates, one at a time."""

    def __init__(self, store: ShardStore) -> None:
        self._store = store
        self._spans = store.counters.spans
        self._laps = store.counters.laps("update_s")
        self._unit: Opened | None = None
        """The update of a unit, where it is recorded."""
        self._num_threads = 1
        self._free: list[Region] = []
        self._staging_bytes = 0
        """Bytes of each region: what the largest chunk of any update so far needed."""
        self._writing: deque[_Task] = deque()

    def run(self, sections: Sequence[SectionUpdate], updates: Mapping[int, UnitUpdate], num_threads: int) -> None:
        """Update the sections, which are in order of first use, all sections of a unit together.

        `updates`: of each unit, by its index. Returns when the last write is complete.
        """
        self._num_threads = num_threads
        opened = self._spans.open(Track.UPDATE, "update")
        self._laps = self._store.counters.laps("update_s")
        self._take_staging(sections)
        tasks = self._tasks(sections)
        reading: deque[_Task] = deque()
        delivery: tuple[int, ...] | None = None
        exhausted = False
        while reading or not exhausted:
            while not exhausted and len(reading) < CHUNKS_IN_FLIGHT - 1:
                task = next(tasks, None)
                exhausted = task is None
                if task is not None:
                    self._launch_reads(task)
                    reading.append(task)
            if not reading:
                break
            task = reading.popleft()
            if task.first:
                self._unit = self._spans.open(Track.UPDATE, task.section.name)
                delivery = updates[task.section.unit].begin()
            self._compute(task, delivery)
            if task.last:
                self._spans.close(self._unit)
                updates[task.section.unit].complete()
            self._reap(all_of_them=False)
        self._reap(all_of_them=True)
        self._spans.close(opened)

    def _tasks(self, sections: Sequence[SectionUpdate]) -> Iterator[_Task]:
        for i, section in enumerate(sections):
            first = i == 0 or sections[i - 1].unit != section.unit
            last = i == len(sections) - 1 or sections[i + 1].unit != section.unit
            count = len(section.shard.layout.chunks())
            together = self._store.may_open_all(section.shard) and not _are_elsewhere(section.grads)
            for rows in [range(count)] if together else _each(range(count)):
                yield _Task(section, rows, first and rows.start == 0, last and rows.stop == count)

    def _launch_reads(self, task: _Task) -> None:
        """Launch the reads."""
        shard, grads = task.section.shard, task.section.grads
        if task.rows.start == 0:
            # The last update's writes must have landed before they are read.
            shard.wait_for_writes()
            shard.writes.clear()
        state_bytes = self._store.state_staging_bytes if shard.on_disk else 0
        if shard.on_disk or _are_elsewhere(grads):
            task.staging = self._lease()
        task.chunks = self._store.open_chunks(shard, task.rows, task.staging.address if task.staging is not None else 0)
        task.grads, task.grad_waits = grads.chunks(task.rows, task.staging, state_bytes)

    def _compute(self, task: _Task, delivery: tuple[int, ...] | None) -> None:
        """Update what was read and launch its writes."""
        chunks, section = task.chunks, task.section
        assert chunks is not None
        opened = self._spans.open(Track.UPDATE, "wait for reads")
        chunks.wait()
        for wait in task.grad_waits:
            wait()
        self._spans.close(opened)
        opened = self._spans.open(Track.UPDATE, "compute")
        dtype = section.shard.layout.dtype
        out = 0 if delivery is None else delivery[section.position] + chunks.begin * dtype.itemsize
        if delivery is not None and not section.complete:
            # The kernel writes segments only; parameters that this step leaves alone are delivered too.
            ctypes.memmove(out, chunks.addresses[Component.VALUE], (chunks.end - chunks.begin) * dtype.itemsize)
        for each in _passes(section, chunks, task.grads, out):
            fused_update(*each, self._num_threads)
        self._spans.close(opened)
        opened = self._spans.open(Track.UPDATE, "write")
        task.writes = self._store.close_chunks(chunks)
        self._spans.close(opened)
        self._writing.append(task)
        if task.rows.stop == len(section.shard.layout.chunks()):
            self._store.finish_update(section.shard)
            section.grads.release()

    def _lease(self) -> Region:
        """Staging for a chunk, waiting for the oldest write when all of it is in use."""
        while not self._free:
            self._release(self._writing.popleft())
        return self._free.pop()

    def _take_staging(self, sections: Sequence[SectionUpdate]) -> None:
        """Take the staging memory that their chunks need. Nothing is under way."""
        # An optimizer that was built since the last update may have added states.
        state_bytes = self._store.state_staging_bytes * any(section.shard.on_disk for section in sections)
        grad_bytes = CHUNK_NUMEL * 4 * any(section.grads.comes_by_staging for section in sections)  # fp32
        if state_bytes + grad_bytes <= self._staging_bytes:
            return
        self._staging_bytes = state_bytes + grad_bytes
        self._free = [self._store.arena.allocate(self._staging_bytes) for _ in range(CHUNKS_IN_FLIGHT)]
        if self._store.swap is not None:
            for region in self._free:
                self._store.swap.add_memory(region)

    def _reap(self, *, all_of_them: bool) -> None:
        while self._writing and (all_of_them or all(w.done() for w in self._writing[0].writes)):
            self._release(self._writing.popleft())

    def _release(self, task: _Task) -> None:
        opened = self._spans.open(Track.UPDATE, "wait for writes")
        for write in task.writes:
            write.wait()
        self._laps.lap()
        self._spans.close(opened)
        if task.staging is not None:
            self._free.append(task.staging)


def _are_elsewhere(grads: GradStore) -> bool:
    """True if the gradients are not in the host's memory."""
    return grads.on_disk or grads.on_device


def _each(rows: range) -> list[range]:
    """One by one."""
    return [range(row, row + 1) for row in rows]


def _passes(
    section: SectionUpdate, chunks: OpenChunks, grads: Sequence[GradPiece], value_out: int
) -> Iterator[tuple[Rule, UpdateBuffers, SegmentArray]]:
    """The kernel's calls, as few as the arrays allow: each chunk of packed states has scales behind its codes."""
    layout = section.shard.layout
    for rule, segments in section.segments.items():
        kept = [Component(name) for name in STATES[rule]]
        packed = any(is_packed(layout, each) for each in kept)
        for rows in _each(chunks.rows) if packed else [chunks.rows]:
            first, last = layout.elements(rows)
            for piece in grads:
                begin, end = max(first, chunks.begin + piece.begin), min(last, chunks.begin + piece.end)
                inside = cut_segments(segments, first, begin, end)
                if len(inside):  # between two gradients that were kept there may be none
                    grad = piece.grad.data_ptr() - piece.begin * piece.grad.itemsize
                    buffers = _buffers(section, chunks, rows, kept, (grad, value_out))
                    yield rule, buffers, inside


def _buffers(
    section: SectionUpdate, chunks: OpenChunks, rows: range, states: Sequence[Component], beside: tuple[int, int]
) -> UpdateBuffers:
    """Addresses for some of the chunks. `beside` has those of element 0 of the gradients and of the second copy."""
    layout, at = section.shard.layout, chunks.addresses_of(rows[0])
    (begin, end), (grad, value_out) = layout.elements(rows), beside
    ahead = begin - chunks.begin
    return UpdateBuffers(
        value=at[Component.VALUE],
        residual=at.get(Component.RESIDUAL, 0),
        master=at.get(Component.MASTER, 0),
        states=tuple(at[each] for each in states),
        grad=grad + ahead * section.grads.dtype.itemsize,
        value_out=value_out and value_out + ahead * layout.dtype.itemsize,
        value_dtype=layout.dtype,
        grad_dtype=section.grads.dtype,
        # Behind the codes.
        scales=tuple(at[each] + end - begin for each in states if is_packed(layout, each)),
        state_format=layout.state_format,
        seed=layout.index,
        origin=section.origin + begin,
    )


def cut_segments(segments: SegmentArray, origin: int, begin: int, end: int) -> SegmentArray:
    """The parts of sorted segments inside [begin, end), counted from `origin`."""
    inside = segments[(segments["begin"] < end) & (segments["end"] > begin)]  # a copy
    inside["begin"] = np.maximum(inside["begin"], begin) - origin
    inside["end"] = np.minimum(inside["end"], end) - origin
    return inside
