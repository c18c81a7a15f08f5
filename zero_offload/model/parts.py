"""This rank's part of one parameter, element by element: its values, and its optimizer states.

torch.distributed.checkpoint reads and writes it piece by piece (`standins/checkpointed.py`). Nothing moves
between ranks. `ModelParts` knows the load that runs now, since two things depend on what else it brings:

* A bf16 value and the residual that completes it arrive in any order. So each is written by itself where the load
  brings both. A value that comes alone has the residual 0; a residual that comes alone completes the value there.
* A load that ends too early leaves a mix of two states. So the model cannot be used from the first write on, until all
  that the load was to bring is written, numbers of steps too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Container
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.checkpoint.values import (
    completed,
    master_part,
    master_parts,
    read_master,
    read_master_part,
    read_state,
    read_values,
    residual_alone,
)
from zero_offload.model.foundation import Foundation
from zero_offload.model.params import ModelPlaces, ModelStates, ParamPlace
from zero_offload.optim.state import BESIDE
from zero_offload.plan.boxes import Box, boxes_of
from zero_offload.plan.tensor_parallel import is_dtensor
from zero_offload.runtime.prefetcher import replaced
from zero_offload.runtime.saved_tensors.tensors import runs
from zero_offload.standins.part import Holder, Part, Put
from zero_offload.standins.sources import PartSource
from zero_offload.standins.state_tensor import STEP
from zero_offload.storage.shards.shard import Component, Shard
from zero_offload.storage.shards.store import ShardStore

Key = tuple[str, str]
"""A parameter's name, and that of a value or state of it."""
_HALF = "loading a checkpoint by torch.distributed.checkpoint.load"
"""The text of `ModelLife.half_written`."""


class ModelParts(PartSource):
    """The parts of all parameters and states that this rank has."""

    def __init__(self, base: Foundation, places: ModelPlaces, states: ModelStates) -> None:
        self._places = places
        self._states = states
        self._store = base.store
        self._prefetcher = base.prefetcher
        self._life = base.life
        self._shard_index = base.shard_index
        self.folder = base.config.nvme_dirs[0] if base.config.nvme_dirs else None
        """Has room for copies."""
        self._reading = threading.Lock()
        """Held by the thread that reads: a writer of checkpoints may have several, and all read into one staging."""
        self._load: _Load | None = None
        """The load that was planned last."""
        self._lacking: dict[Key, int] = {}
        """How many elements of what has been written to in part are not loaded yet."""

    def is_divided(self, param: nn.Parameter) -> bool:
        return self._places[param].is_divided

    def of(self, param: nn.Parameter, name: str, dtype: torch.dtype, holder: Holder) -> Part:
        self._life.check_alive()
        place = self._places[param]
        if name == STEP:
            return StepPart(self, param, dtype, [Box((), (), 0)], (0, 1), holder)
        begin, end = place.span(self._shard_index)
        offset = place.section.layout.shard_numel * self._shard_index - place.piece.begin
        span = begin + offset, end + offset
        return ShardPart(self, param, name, dtype, _boxes(place, *span), span, begin, holder)

    def read(self, param: nn.Parameter, name: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of this rank's shard. From any thread."""
        self._life.check_usable()
        place = self._places[param]
        shard = place.section.shard
        with self._reading:
            place.unit.wait_for_update()
            if name == Component.VALUE:
                return read_values(self._store, shard, (begin, end))
            if name in master_part(shard.layout):
                return read_master_part(self._store, shard, (begin, end))
            return read_state(self._store, shard, Component(name), (begin, end))

    def read_step(self, param: nn.Parameter) -> torch.Tensor:
        """(1,) fp32."""
        return self._states.read(param, STEP).reshape(1)

    # Loading

    def plan_load(self, call: FrameType, param: nn.Parameter, name: str, numel: int, holder: Holder) -> None:
        if self._load is None or self._load.call is not call:
            self._load = _Load(call)
            if self._life.half_written != _HALF:
                self._life.check_usable()
                self._lacking.clear()
            # On all ranks alike, whatever each of them will have to write.
            self._states.change()
            for unit in {place.unit.index: place.unit for place in self._places.all()}.values():
                self._prefetcher.invalidate(unit)
        key = self._places.name_of(param), name
        self._load.planned[key] = self._load.planned.get(key, 0) + numel  # a tied one comes by each of its names
        self._load.holders.setdefault(key, []).append(holder)

    def write(self, part: ShardPart, span: tuple[int, int], values: torch.Tensor, put: Put | None) -> None:
        """Elements `span` of this rank's shard; see `Part.write`."""
        place = self._places[part.param]
        load = self._begin_writing()
        place.unit.wait_for_update()
        change = _ElementWrite(self._store, place.section.shard, span, values, put)
        arrays = self._arrays(place, part.name, change, load.planned)
        with ExitStack() as written:
            if Component.VALUE in arrays:
                for holder in [part.holder, *load.holders.get((place.name, Component.VALUE), ())]:
                    written.enter_context(holder.following())
            if arrays:
                self._states.replace_elements(place, {each: [(*span, array)] for each, array in arrays.items()})
            if Component.VALUE in arrays:
                replaced(self._prefetcher, [(place.unit, place.param)])
        self._end_writing((place.name, part.name), values.numel())

    def write_step(self, param: nn.Parameter, step: torch.Tensor) -> None:
        """`step` has one element."""
        self._begin_writing()
        self._states.edit(param, STEP, step.reshape(()))
        self._end_writing((self._places.name_of(param), STEP), 1)

    def _arrays(
        self, place: ParamPlace, name: str, change: _ElementWrite, planned: Container[Key]
    ) -> dict[Component, torch.Tensor]:
        """The components that change, of these elements."""
        layout = place.section.layout
        beside = master_part(layout) if layout.trainable else {}
        if name == Component.VALUE:
            if change.values.dtype == layout.dtype:
                if (place.name, Component.MASTER) in planned:
                    return {}  # rounded, the master is the value
                if (place.name, Component.RESIDUAL) in planned and Component.RESIDUAL in beside:
                    return {Component.VALUE: change.of(read_values, layout.dtype)}
            dtype = torch.float32 if layout.trainable else layout.dtype
            return master_parts(layout, change.of(read_master, dtype))
        if name in beside:
            part = change.of(read_master_part, beside[name])
            if name == Component.RESIDUAL and (place.name, Component.VALUE) in planned:
                return {Component.RESIDUAL: residual_alone(layout, part)}
            master = completed(self._store, place.section.shard, {name: part}, change.span)
            assert master is not None
            return master_parts(layout, master)
        component = Component(name)
        return {component: change.of(partial(read_state, component=component), torch.float32)}

    def _begin_writing(self) -> _Load:
        """The load that runs now."""
        load = self._load
        if load is None or not runs(load.call):
            self._load = None
            return _Load(sys._getframe())
        if not load.has_begun:
            named = {name for name, _ in load.planned}
            self._states.reserve(place.section.shard for place in self._places.all() if place.name in named)
            load.has_begun = True
            self._lacking |= {key: numel for key, numel in load.planned.items() if numel}
            self._life.half_written = _HALF
            self._states.values_replaced(load.values_alone)
            self._states.readers.before_loading(each for holders in load.holders.values() for each in holders)
        return load

    def _end_writing(self, key: Key, numel: int) -> None:
        if key in self._lacking:
            self._lacking[key] -= numel
            if self._lacking[key] <= 0:
                del self._lacking[key]
            if not self._lacking:
                self._life.half_written = ""
                if self._load is not None:
                    self._states.masters_completed(self._load.masters_alone)
                self._load = None


@dataclass
class _ElementWrite:
    """A write to elements of a shard."""

    store: ShardStore
    shard: Shard
    span: tuple[int, int]
    values: torch.Tensor
    put: Put | None

    def of(self, read: Callable[..., torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """(n,) of the elements as they are to be, of which `read` gives those that are there."""
        if self.put is None:
            return self.values.reshape(-1).to(dtype)
        elements = read(self.store, self.shard, span=self.span)
        self.put(elements)
        return elements


@dataclass
class _Load:
    """One `dcp.load`."""

    call: FrameType
    planned: dict[Key, int] = field(default_factory=dict)
    """How many elements it brings this rank."""
    holders: dict[Key, list[Holder]] = field(default_factory=dict)
    """The tensors that it loads into."""
    has_begun: bool = False
    """True if some of it is written."""

    @property
    def values_alone(self) -> list[str]:
        """Parameters whose values come without what completes them to the master."""
        return [
            name
            for name, kind in self.planned
            if kind == Component.VALUE and not any((name, each) in self.planned for each in BESIDE)
        ]

    @property
    def masters_alone(self) -> list[str]:
        """Parameters of which only that comes."""
        return [name for name, kind in self.planned if kind in BESIDE and (name, Component.VALUE) not in self.planned]


def _boxes(place: ParamPlace, begin: int, end: int) -> list[Box]:
    """The boxes of elements [begin, end) of what this rank's mesh has of a parameter, in the whole of it."""
    if place.piece.spec.order:
        raise ZeroOffloadError(
            f"{place.name} does not lie in the order of its dimensions, which torch.distributed.checkpoint asks for; "
            "save it by zo.save_checkpoint(model, optimizer, path)"
        )
    boxes = boxes_of(place.piece.spec.shape, begin, end)
    if not is_dtensor(param := place.param) or not param.placements[0].is_shard():  # type: ignore[attr-defined]
        return boxes
    dtensor: Any = param
    dim = dtensor.placements[0].dim
    offset = dtensor.device_mesh.get_local_rank() * place.piece.spec.shape[dim]
    return [box.moved(dim, offset) for box in boxes]


@dataclass
class ShardPart:
    """The part of a parameter in this rank's shard. Implements `standins.part.Part`."""

    parts: ModelParts
    param: nn.Parameter
    name: str
    dtype: torch.dtype
    boxes: list[Box]
    span: tuple[int, int]
    first: int
    """The shard's element that is the part's first one."""
    holder: Holder

    @property
    def folder(self) -> Path | None:
        return self.parts.folder

    @cached_property
    def _offset(self) -> int:
        return self.first - self.span[0]

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self.parts.read(self.param, self.name, begin + self._offset, end + self._offset)

    def plan_load(self, call: FrameType) -> None:
        self.parts.plan_load(call, self.param, self.name, self.span[1] - self.span[0], self.holder)

    def write(self, begin: int, end: int, values: torch.Tensor, put: Put | None) -> None:
        self.parts.write(self, (begin + self._offset, end + self._offset), values, put)


@dataclass
class StepPart:
    """A parameter's number of updates, which every rank has. Implements `standins.part.Part`."""

    parts: ModelParts
    param: nn.Parameter
    dtype: torch.dtype
    boxes: list[Box]
    span: tuple[int, int]
    holder: Holder

    @property
    def folder(self) -> Path | None:
        return self.parts.folder

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self.parts.read_step(self.param)[begin:end]

    def plan_load(self, call: FrameType) -> None:
        self.parts.plan_load(call, self.param, STEP, 1, self.holder)

    def write(self, begin: int, end: int, values: torch.Tensor, put: Put | None) -> None:
        self.parts.write_step(self.param, values)
