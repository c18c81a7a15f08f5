"""The walk of an optimizer of others over units: read | step | write, a section after the other.

Owns the order of a walk and its memory. For each section the optimizer gets fp32 masters, fp32 copies of gradients and
the states of whole parameters, as ordinary tensors on the host. Masters and states in memory are stepped in place; of
bf16 a master is a copy. Those on drives are read while the section before is stepped, and written beside later ones.
States are rows of the shard (`storage/shards/rows.py`), whose room grows when a step has made
larger ones. Runs on the control thread: rows may take room. Cf. `UpdatePipeline`, which has the kernels' optimizers.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_offload.base.errors import CheckpointError, RankError
from zero_offload.base.host import host_reserved
from zero_offload.base.spans import Opened, Track
from zero_offload.base.threads import UnitUpdate
from zero_offload.hardware.kernels.formats import convert, join_master, split_master
from zero_offload.hardware.probe import kernel_threads
from zero_offload.optim.unitwise.packing import keep_states
from zero_offload.optim.unitwise.state_rows import unpack
from zero_offload.optim.whole_params import Peers, WholeParams
from zero_offload.plan.layout import CHUNK_NUMEL, ParamSlice
from zero_offload.standins.sources import ParamTensors, UnitStep
from zero_offload.storage.files.swap_file import Transfer
from zero_offload.storage.memory.arena import Need, Region
from zero_offload.storage.shards.grad_store import GradPiece, GradStore, as_used
from zero_offload.storage.shards.rows import Rows
from zero_offload.storage.shards.shard import Component, Shard, component_dtype, shard_bytes
from zero_offload.storage.shards.store import OpenChunks, ShardStore

READ_AHEAD = 2
"""Sections whose reads are launched or complete, with the section that is stepped. Writes of one more may go on."""


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


@dataclass
class _SectionStep:
    """A section between reads and the end of writes."""

    section: WalkedSection
    first: bool
    """True for the first one of its unit."""
    last: bool
    staging: Region | None = None
    chunks: OpenChunks | None = None
    delivery: tuple[int, ...] | None = None
    """Where the unit's new values go too."""
    rows: Rows | None = None
    whole: WholeParams | None = None
    master: torch.Tensor | None = None
    """(shard_numel,) fp32, where the optimizer changes it."""
    writes: list[Transfer] = field(default_factory=list)


class UnitPass:
    """Runs walks, one at a time."""

    def __init__(self, store: ShardStore, add_states: Callable[[Shard, Component], None], peers: Peers) -> None:
        """`add_states` takes room for further rows of a shard, or raises CapacityError. `peers` divide sections."""
        self._store, self._peers = store, peers
        self._add_states = add_states
        self._spans = store.counters.spans
        self._free: list[Region] = []
        self._staging_bytes = 0
        """Bytes of each region for states on drives: what the largest section so far needed."""
        self._grad_staging: Region | None = None
        self._writing: deque[_SectionStep] = deque()
        self._failure: Exception | None = None
        """The error of this rank in a pass that it has to end with others."""

    def run(self, sections: Sequence[WalkedSection], updates: Mapping[int, UnitUpdate], stepper: UnitStep) -> None:
        """Step the sections, which are in order of first use; one after the other, or all in one step.

        `updates`: of each unit, by its index. Returns when the last write is complete.
        """
        opened = self._spans.open(Track.UPDATE, "update")
        tasks = _tasks(sections)
        together = len(tasks) if stepper.steps_all else 1
        is_divided = any(section.shard.layout.num_shards > 1 for section in sections)
        self._take_staging(sections, max(READ_AHEAD, together) + 1)
        if stepper.steps_all:
            self._look_for_room(sections)
        buffers, ahead, reading = _Buffers(sections, shared=together == 1), deque(tasks), deque[_SectionStep]()
        unit: Opened | None = None
        delivery: tuple[int, ...] | None = None
        while ahead or reading:
            while ahead and len(reading) < max(READ_AHEAD, together):
                reading.append(self._launch_reads(ahead.popleft()))
            stepped = [reading.popleft() for _ in range(together)]
            given = dict[nn.Parameter, ParamTensors]()
            for task in stepped:
                if task.first:
                    unit = self._spans.open(Track.UPDATE, task.section.name)
                    delivery = updates[task.section.unit].begin()
                task.delivery = delivery
                given |= self._give(task, stepper, buffers)
            compute = self._spans.open(Track.UPDATE, "compute")
            with self._meeting(is_divided):
                states = stepper.step(given) if given and self._failure is None else {}
            self._spans.close(compute)
            for task in stepped:
                self._take(task, stepper.kind, states)
                if task.last:
                    self._spans.close(unit)
                    updates[task.section.unit].complete()
        while self._writing:
            self._end_oldest_write()
        if is_divided:
            self._merge_numbers(stepper)
        self._spans.close(opened)

    @contextmanager
    def _meeting(self, is_divided: bool) -> Iterator[None]:
        """A block that may raise on one rank alone, which goes on: others wait for its parts. The pass ends in the
        error."""
        try:
            yield
        except Exception as error:
            if not is_divided or isinstance(error, RankError):
                raise
            self._failure = self._failure or error

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
        task.staging = self._lease() if shard.on_disk else None
        address = 0 if task.staging is None else task.staging.address
        rows = range(len(shard.layout.chunks()))
        task.chunks = self._store.open_chunks(shard, rows, address, self._staging_bytes)
        return task

    def _give(self, task: _SectionStep, stepper: UnitStep, buffers: _Buffers) -> dict[nn.Parameter, ParamTensors]:
        """The parameters of a section whose reads are launched, as the optimizer gets them."""
        section, chunks = task.section, task.chunks
        assert chunks is not None
        opened = self._spans.open(Track.UPDATE, "wait for reads")
        chunks.wait()
        self._spans.close(opened)
        arrays, masters = _arrays(chunks, task.staging), buffers.masters(section)
        grads = self._grads_of(section, buffers)
        task.master = master = _master_of(arrays, masters)
        task.rows = rows = _rows_of(section.shard, arrays)
        task.whole = WholeParams(
            section.shard.layout, [each.piece for each in section.params], self._peers, section.name
        )
        factors = {piece.begin: factor for _, piece, factor in section.params}

        def grad_of(piece: ParamSlice, begin: int, end: int) -> torch.Tensor:
            return as_used(_part_of(grads, begin, end), factors[piece.begin], section.loss_scale)

        whole = task.whole.gather(master, grad_of)
        given = dict[nn.Parameter, ParamTensors]()
        with self._meeting(section.shard.layout.num_shards > 1):
            for param, piece, _ in section.params:
                if (found := whole.get(piece.begin)) is None:
                    continue
                state = None
                if rows is not None and piece.begin in rows:
                    _check_kind(rows, piece, stepper.kind)
                    state = unpack(rows[piece.begin], stepper.packages)
                given[param] = ParamTensors(piece.spec.view(found.master), piece.spec.view(found.grad), state)
        return given

    def _take(self, task: _SectionStep, kind: str, states: Mapping[nn.Parameter, Any]) -> None:
        """Launch the writes of a section that was stepped."""
        section, chunks = task.section, task.chunks
        assert chunks is not None and task.master is not None and task.whole is not None
        opened = self._spans.open(Track.UPDATE, "write")
        task.whole.hand_back(task.master)
        mine = (each for each in section.params if task.whole.steps(each.piece))
        with self._meeting(section.shard.layout.num_shards > 1):
            self._keep_states(task, chunks, {piece.begin: (states.get(param), kind) for param, piece, _ in mine})
        arrays = _arrays(chunks, task.staging)
        _split_master(arrays, task.master)
        if task.delivery is not None:
            value = arrays[Component.VALUE]
            ctypes.memmove(task.delivery[section.position], value.data_ptr(), value.nbytes)
        task.writes = self._store.close_chunks(chunks)
        self._spans.close(opened)
        self._writing.append(task)
        self._store.finish_update(section.shard)
        section.grads.release()

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

    def _keep_states(self, task: _SectionStep, chunks: OpenChunks, states: Mapping[int, tuple[Any, str]]) -> None:
        """Write new states to the rows; in rows with more room, where the old ones do not fit."""
        shard = task.section.shard
        array = keep_states(task.rows, states)
        if array is None:
            return
        component = shard.rows
        if component is None or array.numel() > shard_bytes(shard.layout, [component]):
            if component is not None:
                del chunks.addresses[component]
            component = Component.rows(array.numel(), len(shard.layout.chunks()))
            self._add_states(shard, component)
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
            target = host_reserved([shard_bytes(shard.layout, [component])], torch.uint8)
            target[: array.numel()].copy_(array)
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
