"""The walk of an optimizer of others over units: read | step | write, a section after the other.

Owns the order of a walk and its memory. For each section the optimizer gets fp32 masters, fp32 copies of gradients and
the states of whole parameters, as ordinary tensors. On the host, masters and states in memory are stepped in place; of
bf16 a master is a copy. Those on drives are read while the section before is stepped, and written beside later ones.
On a device (`device_sections.py`) one section comes up and one goes down beside the section that is stepped. States are
rows of the shard (`storage/shards/rows.py`), whose room grows when a step has made larger ones. The control thread
alone takes room. So a walk in which states may grow is made by that thread, and others may go on beside it
(`Updates`). Cf. `UpdatePipeline`, which has the kernels' optimizers.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_offload.base.errors import CapacityError, CheckpointError, RankError
from zero_offload.base.host import host_reserved
from zero_offload.base.spans import Opened, Track
from zero_offload.base.threads import UnitUpdate
from zero_offload.base.types import format_bytes
from zero_offload.hardware.device import Device, read_memory
from zero_offload.hardware.kernels.formats import convert, join_master, split_master
from zero_offload.hardware.probe import kernel_threads
from zero_offload.optim.device_sections import DeviceSection, DeviceSections
from zero_offload.optim.unitwise.packing import KeptStates, content_of, keep_states
from zero_offload.optim.unitwise.state_rows import unpack
from zero_offload.optim.whole_params import Peers, WholeParams
from zero_offload.plan.layout import CHUNK_NUMEL, ParamSlice
from zero_offload.plan.memory import copied_bytes
from zero_offload.standins.sources import ParamTensors, UnitStep
from zero_offload.storage.files.swap_file import Transfer
from zero_offload.storage.memory.arena import Need, Region
from zero_offload.storage.shards.grad_store import GradPiece, GradStore, as_used
from zero_offload.storage.shards.rows import Rows
from zero_offload.storage.shards.shard import Component, Shard, component_dtype, shard_bytes
from zero_offload.storage.shards.store import OpenChunks, ShardStore

READ_AHEAD = 2
"""Sections whose reads are launched or complete, with the section that is stepped. Writes of one more may go on."""
DEVICE_AHEAD, DEVICE_BEHIND = 1, 1
"""Sections that are on their way to a device, and back, beside that which is stepped there."""


class WalkedParam(NamedTuple):
    """A parameter that a step takes."""

    param: nn.Parameter
    piece: ParamSlice
    factor: float
    """Of its gradient; see [Note: factors]."""


@dataclass(frozen=True)
class WalkedSection:
    """One section's part of a walk."""

    unit: int
    name: str
    """The unit's, for a trace."""
    position: int
    """Which of the unit's sections: index into a delivery's addresses."""
    shard: Shard
    grads: GradStore
    params: Sequence[WalkedParam]
    loss_scale: float
    is_first: bool
    """True if one of the parameters has had no step."""


@dataclass
class _SectionStep:
    """A section between reads and the end of writes."""

    section: WalkedSection
    first: bool
    """True for the first one of its unit."""
    last: bool
    staging: Region | None = None
    chunks: OpenChunks | None = None
    rows: Rows | None = None
    whole: WholeParams | None = None
    master: torch.Tensor | None = None
    """(shard_numel,) fp32, where the optimizer changes it."""
    device: DeviceSection | None = None
    """Where a device steps it."""
    contents: dict[int, Any] = field(default_factory=dict)
    """`content_of` states that are views of their rows, by first element."""
    beside: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """Bytes for its rows on the host, and their places: what a download does not bring."""
    writes: list[Transfer] = field(default_factory=list)


class UnitPass:
    """Runs walks, one at a time."""

    def __init__(
        self, store: ShardStore, device: Device, add_states: Callable[[Shard, Component], None], peers: Peers
    ) -> None:
        """`add_states` takes room for further rows of a shard, or raises CapacityError. `peers` divide sections."""
        self._store, self._device, self._peers = store, device, peers
        self._sections = DeviceSections(store, device)
        self._add_states = add_states
        self._spans = store.counters.spans
        self._free: list[Region] = []
        self._staging_bytes = 0
        """Bytes of each region for states on drives: what the largest section so far needed."""
        self._grad_staging: Region | None = None
        self._writing: deque[_SectionStep] = deque()
        self._behind: deque[_SectionStep] = deque()
        """Sections that were stepped on a device, whose downloads are under way."""
        self._delivery: tuple[int, ...] | None = None
        """Where new values of the unit go too, whose sections are taken."""
        self._failure: Exception | None = None
        """The error of this rank in a pass that it has to end with others."""

    def walk(
        self, sections: Sequence[WalkedSection], updates: Mapping[int, UnitUpdate], stepper: UnitStep
    ) -> Iterator[Collection[nn.Parameter]]:
        """Step the sections in their order; one after the other, or all in one step. Yields the parameters that were
        stepped, after each; another thread may go on then.

        `updates`: of each unit, by its index. Ends when the last write is complete.
        """
        opened = self._spans.open(Track.UPDATE, "update")
        tasks = _tasks(sections)
        together = len(tasks) if stepper.steps_all else 1
        is_divided = any(section.shard.layout.num_shards > 1 for section in sections)
        on_device = stepper.device.type != "cpu"
        self._take_staging(sections, max(READ_AHEAD, together) + 1 + on_device * (DEVICE_AHEAD + DEVICE_BEHIND))
        if stepper.steps_all and not on_device:
            self._look_for_room(sections)
        buffers = _Buffers(sections, shared=together == 1)
        ahead, reading, ready = deque(tasks), deque[_SectionStep](), deque[_SectionStep]()
        unit: Opened | None = None
        while ahead or reading or ready:
            while ahead and len(reading) < max(READ_AHEAD, together):
                reading.append(self._launch_reads(ahead.popleft()))
            while reading and len(ready) < together + on_device * DEVICE_AHEAD:
                if on_device and not self._load(reading[0], updates, may_wait=len(ready) >= together):
                    break
                ready.append(reading.popleft())
            stepped = [ready.popleft() for _ in range(together)]
            states: Mapping[nn.Parameter, Any] = {}  # those of before go
            while self._behind and not self._has_room_beside(stepped[0]):
                self._take(self._behind.popleft(), updates)
            given = dict[nn.Parameter, ParamTensors]()
            try:
                for task in stepped:
                    if task.first:
                        unit = self._spans.open(Track.UPDATE, task.section.name)
                    given |= self._give(task, stepper, buffers)
                compute = self._spans.open(Track.UPDATE, "compute")
                with self._meeting(stepped[0]):
                    states = stepper.step(given) if given and self._failure is None else {}
                self._spans.close(compute)
                for task in stepped:
                    self._keep(task, stepper, states)
            except torch.OutOfMemoryError as error:
                raise self._no_room(stepped[0]) from error
            for task in stepped:
                self._behind.append(task)
                while len(self._behind) > on_device * DEVICE_BEHIND:
                    self._take(self._behind.popleft(), updates)
                if task.last:
                    self._spans.close(unit)
            yield list(given)
        while self._behind:
            self._take(self._behind.popleft(), updates)
        while self._writing:
            self._end_oldest_write()
        if is_divided:
            self._merge_numbers(stepper)
        if any(section.shard.on_device for section in sections):
            self._store.snapshots.staging.updated()
        self._spans.close(opened)

    @contextmanager
    def _meeting(self, task: _SectionStep) -> Iterator[None]:
        """A block that may raise on one rank alone, which goes on: others wait for its parts. The pass ends in the
        error."""
        try:
            yield
        except Exception as error:
            if task.section.shard.layout.num_shards == 1 or isinstance(error, RankError):
                raise
            is_short = isinstance(error, torch.OutOfMemoryError)
            self._failure = self._failure or (self._no_room(task) if is_short else error)

    def _merge_numbers(self, stepper: UnitStep) -> None:
        """All ranks have stepped their parameters, or all raise."""
        failure, self._failure = self._failure, None
        with self._peers.together("the step of parameters by the ranks that have most of them"):
            if failure is not None:
                raise failure
            mine = stepper.pack_numbers()
        stepper.merge_numbers(self._peers.gather_rows(mine, "numbers that parameters share in a step"))

    def _launch_reads(self, task: _SectionStep) -> _SectionStep:
        shard = task.section.shard
        # The last update's writes must have landed before they are read.
        shard.wait_for_writes()
        shard.writes.clear()
        if shard.on_device:
            return task
        task.staging = self._lease() if shard.on_disk else None
        address = 0 if task.staging is None else task.staging.address
        rows = range(len(shard.layout.chunks()))
        task.chunks = self._store.open_chunks(shard, rows, address, self._staging_bytes)
        return task

    def _arrays_on_host(self, task: _SectionStep) -> dict[Component, torch.Tensor]:
        """The arrays of a section whose reads are launched, where they may be used; none of a shard on the device."""
        if task.chunks is None:
            return {}
        opened = self._spans.open(Track.UPDATE, "wait for reads")
        task.chunks.wait()
        self._spans.close(opened)
        return _arrays(task.chunks, task.staging)

    def _load(self, task: _SectionStep, updates: Mapping[int, UnitUpdate], *, may_wait: bool) -> bool:
        """Launch the uploads of a section whose reads are launched. False where the device has too little room beside
        those that are there, and it `may_wait` for these."""
        if may_wait and not self._has_room_beside(task):
            return False
        arrays = self._arrays_on_host(task)
        while True:
            try:
                task.device = self._sections.load(task.section.shard, task.section.grads, arrays)
                return True
            except torch.OutOfMemoryError as error:
                if self._behind:
                    self._take(self._behind.popleft(), updates)
                elif may_wait:
                    return False
                else:
                    raise self._no_room(task) from error

    def _has_room_beside(self, task: _SectionStep) -> bool:
        """True if the device has room for a section's copies and as much again, for what a step makes."""
        memory = read_memory(self._device.torch_device)
        return memory is None or memory.free + memory.reserved - memory.allocated >= 2 * self._copied_bytes(task)

    def _copied_bytes(self, task: _SectionStep) -> int:
        """Bytes of a device's memory for a section's gradients, and for what does not rest there."""
        shard, grads = task.section.shard, task.section.grads
        rows_bytes = 0 if shard.rows is None else shard_bytes(shard.layout, [shard.rows])
        return copied_bytes(shard.layout, grads.dtype.itemsize, rows_bytes, on_device=shard.on_device)

    def _no_room(self, task: _SectionStep) -> CapacityError:
        nbytes, where = format_bytes(self._copied_bytes(task)), self._device.torch_device
        return CapacityError(
            f"{task.section.name}: the optimizer steps on {where}. Copies of a section take {nbytes} there, beside "
            "what the step itself makes, and so much is not free. Leave more of its memory free by a smaller "
            "device_memory=, or place less there (params=, grads=, optimizer=)"
        )

    def _give(self, task: _SectionStep, stepper: UnitStep, buffers: _Buffers) -> dict[nn.Parameter, ParamTensors]:
        """The parameters of a section whose reads, or uploads, are launched, as the optimizer gets them."""
        section, device = task.section, task.device
        memory: torch.Tensor | None = None
        if device is None:
            arrays = self._arrays_on_host(task)
            grads = self._grads_of(section, buffers)
            master = _master_of(arrays, buffers.masters(section))
        else:
            arrays = {} if task.chunks is None else _arrays(task.chunks, task.staging)
            master, grads = device.take(), device.grads
            memory = None if section.shard.rows is None else device.arrays[section.shard.rows]
        if section.shard.on_device and device is not None:
            task.rows = rows = self._sections.rows_at_rest(section.shard, device.arrays)
        else:
            task.rows = rows = _rows_of(section.shard, arrays)
        task.master = master
        task.whole = WholeParams(
            section.shard.layout, [each.piece for each in section.params], self._peers, section.name
        )
        factors = {piece.begin: factor for _, piece, factor in section.params}

        def grad_of(piece: ParamSlice, begin: int, end: int) -> torch.Tensor:
            return as_used(_part_of(grads, begin, end), factors[piece.begin], section.loss_scale)

        whole = task.whole.gather(master, grad_of)
        given = dict[nn.Parameter, ParamTensors]()
        with self._meeting(task):
            for param, piece, _ in section.params:
                if (found := whole.get(piece.begin)) is None:
                    continue
                state = None
                if rows is not None and piece.begin in rows:
                    _check_kind(rows, piece, stepper.kind)
                    state = unpack(rows[piece.begin], stepper.packages, _row_of(rows, piece, memory))
                    if device is None:
                        task.contents[piece.begin] = content_of(state)
                given[param] = ParamTensors(piece.spec.view(found.master), piece.spec.view(found.grad), state)
        return given

    def _keep(self, task: _SectionStep, stepper: UnitStep, states: Mapping[nn.Parameter, Any]) -> None:
        """Keep the states of a section that was stepped; launch its downloads."""
        section, device = task.section, task.device
        shard, whole = section.shard, task.whole
        assert task.master is not None and whole is not None
        whole.hand_back(task.master)
        kinds = {
            piece.begin: (states.get(param), stepper.kind) for param, piece, _ in section.params if whole.steps(piece)
        }
        # A state that was changed in its row alone is there.
        for key, before in task.contents.items():
            if before is not None and key in kinds and content_of(kinds[key][0]) == before:
                del kinds[key]
        memory = None if device is None or shard.rows is None else device.arrays[shard.rows]
        kept = KeptStates(None, [])
        with self._meeting(task):
            num_chunks = len(shard.layout.chunks())
            kept = keep_states(task.rows, kinds, memory, is_on_device=device is not None, num_chunks=num_chunks)
            if kept.array is not None:
                self._grow(task, kept.array, stepper)
        if device is None:
            return
        device.put()
        task.master = task.whole = None
        rows = task.rows if kept.array is None else None
        if not shard.on_device:
            assert task.chunks is not None
            begin = None if rows is None else min((row.begin for row in rows.directory.values()), default=None)
            self._sections.download(device, _arrays(task.chunks, task.staging), begin)
            task.beside = kept.beside
        elif rows is not None:
            self._sections.write_rows(shard, rows, kept.beside)

    def _take(self, task: _SectionStep, updates: Mapping[int, UnitUpdate]) -> None:
        """Launch the writes of a section that was stepped, when its downloads are here; of its unit's last one the unit
        is complete then."""
        section, chunks, device = task.section, task.chunks, task.device
        if task.first:
            self._delivery = updates[section.unit].begin()
        opened = self._spans.open(Track.UPDATE, "write")
        if device is not None:
            device.wait_on_host()
        if chunks is not None:
            arrays = _arrays(chunks, task.staging)
            if device is None:
                assert task.master is not None
                _split_master(arrays, task.master)
            elif Component.MASTER in arrays:
                _split_master(arrays, arrays[Component.MASTER])
            for begin, part in task.beside:
                assert section.shard.rows is not None
                arrays[section.shard.rows][begin : begin + part.numel()].copy_(part)
            if self._delivery is not None:
                value = arrays[Component.VALUE]
                ctypes.memmove(self._delivery[section.position], value.data_ptr(), value.nbytes)
            task.writes = self._store.close_chunks(chunks)
            self._writing.append(task)
        self._spans.close(opened)
        task.device = task.master = task.whole = None
        self._store.finish_update(section.shard)
        section.grads.release()
        if task.last:
            updates[section.unit].complete()

    def _grads_of(self, section: WalkedSection, buffers: _Buffers) -> list[GradPiece]:
        """The section's gradients, fp32, in host memory that the optimizer may change; copies, unless they rest so."""
        grads, layout = section.grads, section.shard.layout
        together = not (grads.on_disk or grads.on_device)
        count = len(layout.chunks())
        if together and grads.dtype == torch.float32 and grads.may_change:
            pieces, waits = grads.chunks(range(count))
            for wait in waits:
                wait()
            return pieces
        out = buffers.grads(section)
        for rows in [range(count)] if together else [range(row, row + 1) for row in range(count)]:
            pieces, waits = grads.chunks(rows, None if together else self._staging_of_grads())
            for wait in waits:
                wait()
            begin, _ = layout.elements(rows)
            for piece in pieces:
                out[begin + piece.begin : begin + piece.end].copy_(piece.grad)
        return [GradPiece(0, layout.shard_numel, out)]

    def _grow(self, task: _SectionStep, array: torch.Tensor, stepper: UnitStep) -> None:
        """Let a new array be the section's rows; in rows with more room, where it does not fit."""
        shard, chunks = task.section.shard, task.chunks
        if task.device is not None:
            task.device.wait_on_host()  # its rows may be on their way up
        component = shard.rows
        if component is None or array.numel() > shard_bytes(shard.layout, [component]):
            if component is not None and chunks is not None:
                del chunks.addresses[component]
            stepper.note_growth()
            component = Component.rows(array.numel(), len(shard.layout.chunks()))
            self._add_states(shard, component)
        if chunks is None:
            shard.memory[component][: array.numel()].copy_(array)
        else:
            self._put(shard, chunks, component, array)

    def _put(self, shard: Shard, chunks: OpenChunks, component: Component, array: torch.Tensor) -> None:
        """Let a new array be the shard's rows, up to its end; behind it they stay as they are."""
        if component in shard.memory:
            target = shard.memory[component]
            target[: array.numel()].copy_(array)
        elif component in chunks.addresses:
            ctypes.memmove(chunks.addresses[component], array.data_ptr(), array.nbytes)
            return
        else:  # rows that are new, on a drive
            assert array.numel() == shard_bytes(shard.layout, [component])
            target = array
            chunks.kept.append(target)
        chunks.addresses[component] = target.data_ptr()

    # Staging

    def _look_for_room(self, sections: Sequence[WalkedSection]) -> None:
        """Raise CapacityError where the host has no room for the copies of all sections."""
        copied = (each.shard.layout for each in sections)
        nbytes = sum(layout.shard_numel * 4 * (1 + (layout.dtype == torch.bfloat16)) for layout in copied)
        self._store.arena.look(nbytes, Need("one step of all parameters together (units='all')", is_planned=False))

    def _take_staging(self, sections: Sequence[WalkedSection], count: int) -> None:
        """Take the memory that sections on drives pass through. Nothing is under way."""
        wanted = [shard_bytes(each.shard.layout, each.shard.components) for each in sections if each.shard.on_disk]
        if not wanted or (max(wanted) <= self._staging_bytes and len(self._free) >= count):
            return
        self._staging_bytes, self._free = max(wanted), []  # before others are taken
        self._free = [self._store.arena.allocate(self._staging_bytes) for _ in range(count)]

    def _staging_of_grads(self) -> Region:
        if self._grad_staging is None:
            self._grad_staging = self._store.arena.allocate(CHUNK_NUMEL * 4)
        return self._grad_staging

    def _lease(self) -> Region:
        """Staging for a section, waiting for the oldest write when all of it is in use."""
        while not self._free:
            self._end_oldest_write()
        return self._free.pop()

    def _end_oldest_write(self) -> None:
        task = self._writing.popleft()
        opened = self._spans.open(Track.UPDATE, "wait for writes")
        for write in task.writes:
            write.wait()
        self._spans.close(opened)
        task.chunks = task.rows = None  # new rows are in memory of their own
        if task.staging is not None:
            self._free.append(task.staging)


class _Buffers:
    """Memory of fp32 gradients and masters that are copies: of one section at a time, or of all."""

    def __init__(self, sections: Sequence[WalkedSection], *, shared: bool) -> None:
        """`shared`: one section at a time."""
        self._numel = max((section.shard.layout.shard_numel for section in sections), default=0)
        self._shared: dict[str, torch.Tensor] | None = {} if shared else None

    def _of(self, use: str, numel: int) -> torch.Tensor:
        if self._shared is None:
            return host_reserved([numel], torch.float32)
        if use not in self._shared:
            self._shared[use] = host_reserved([self._numel], torch.float32)
        return self._shared[use][:numel]

    def grads(self, section: WalkedSection) -> torch.Tensor:
        """(shard_numel,) fp32."""
        return self._of("grads", section.shard.layout.shard_numel)

    def masters(self, section: WalkedSection) -> torch.Tensor:
        """(shard_numel,) fp32; empty where masters rest as fp32."""
        layout = section.shard.layout
        return self._of("masters", layout.shard_numel * (layout.dtype == torch.bfloat16))


def _part_of(grads: Sequence[GradPiece], begin: int, end: int) -> torch.Tensor:
    """Elements [begin, end) of a shard's gradients, those of one parameter, which are in one of these."""
    held = next(each for each in grads if each.begin <= begin and end <= each.end)
    return held.grad[begin - held.begin : end - held.begin]


def _row_of(rows: Rows, piece: ParamSlice, memory: torch.Tensor | None) -> torch.Tensor | None:
    """(nbytes,) of a parameter's row in a device's memory, where that has them."""
    row = rows.directory[piece.begin]
    return None if memory is None else memory[row.begin : row.begin + row.nbytes]


def _tasks(sections: Sequence[WalkedSection]) -> list[_SectionStep]:
    units = [section.unit for section in sections]
    return [
        _SectionStep(
            section, i == 0 or units[i - 1] != section.unit, i == len(units) - 1 or units[i + 1] != section.unit
        )
        for i, section in enumerate(sections)
    ]


def _arrays(chunks: OpenChunks, staging: Region | None) -> dict[Component, torch.Tensor]:
    """The shard's arrays that are open, host."""
    shard, found = chunks.shard, dict[Component, torch.Tensor]()
    for component, address in chunks.addresses.items():
        if component in shard.memory:
            found[component] = shard.memory[component]
        elif staging is not None and staging.address <= address < staging.address + staging.nbytes:
            dtype = component_dtype(shard.layout, component)
            numel = shard_bytes(shard.layout, [component]) // dtype.itemsize
            found[component] = staging.tensor(dtype, numel, address - staging.address)
    return found


def _rows_of(shard: Shard, arrays: Mapping[Component, torch.Tensor]) -> Rows | None:
    component = shard.rows
    return None if component is None else Rows.read(arrays[component], f"section {shard.layout.index}")


def _check_kind(rows: Rows, piece: ParamSlice, kind: str) -> None:
    if (made_by := rows.directory[piece.begin].kind) != kind:
        raise CheckpointError(
            f"the state of {piece.spec.name} was made by {made_by}, and {kind} steps it. Call zo.resume(model, "
            f"optimizer) with an optimizer of that class, or drop the states: optimizer.state.clear()"
        )


def _master_of(arrays: Mapping[Component, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """(shard_numel,) fp32 of the masters: where they rest, or in `out`."""
    if Component.MASTER in arrays:
        return arrays[Component.MASTER]
    if Component.RESIDUAL not in arrays:
        return arrays[Component.VALUE]
    join_master(arrays[Component.VALUE], arrays[Component.RESIDUAL], out, num_threads=kernel_threads())
    return out


def _split_master(arrays: Mapping[Component, torch.Tensor], master: torch.Tensor) -> None:
    """Write the masters where they rest, and the values that are rounded from them."""
    if Component.MASTER in arrays:
        convert(arrays[Component.VALUE], master, num_threads=kernel_threads())
    elif Component.RESIDUAL in arrays:
        split_master(master, arrays[Component.VALUE], arrays[Component.RESIDUAL], num_threads=kernel_threads())
