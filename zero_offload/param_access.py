"""What a parameter answers while it is offloaded: its data, its gradient, its states. One model's.

Reads and writes of single parameters go section by section through the store (the last section read is kept, so
that a walk over a model reads each section once). With several ranks a parameter is spread over them:
then these calls raise, naming the one that gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import torch
from torch import nn

from zero_offload.checkpoint.values import (
    Edited,
    Edits,
    completed,
    master_edits,
    master_part,
    read_master,
    read_master_part,
    read_state,
    read_values,
)
from zero_offload.errors import ConfigError, ZeroOffloadError
from zero_offload.host import host_reserved, host_zeros
from zero_offload.plan.layout import ParamSlice
from zero_offload.runtime.grads.ledger import GradLedger, check_not_updated
from zero_offload.runtime.life import ModelLife
from zero_offload.runtime.residency import Residency, replaced
from zero_offload.runtime.saved.frames import runs
from zero_offload.runtime.session import Session
from zero_offload.runtime.units.state_copy import StateCopy, again, state_copy
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.shards.registry import Touched
from zero_offload.shards.shard import Component
from zero_offload.shards.store import ShardStore
from zero_offload.types import Tier

States = Mapping[str, torch.Tensor]
"""By torch's names."""


@dataclass(frozen=True)
class Place:
    """Where a parameter is."""

    unit: Unit
    section: Section
    piece: ParamSlice

    @property
    def name(self) -> str:
        return self.piece.spec.name


class ParamAccess:
    """Implements `shards.registry.ParamAccess`."""

    def __init__(
        self,
        units: Sequence[Unit],
        store: ShardStore,
        grads: GradLedger,
        session: Session,
        life: ModelLife,
        residency: Residency,
    ) -> None:
        self._units = units
        self._residency = residency
        self._store = store
        self._grads = grads
        self._session = session
        self._life = life
        self._places: dict[int, Place] = {}
        self.grow(units)
        self._walk: FrameType | None = None
        self._walks_over: nn.Module | None = None
        self._copies: dict[int, StateCopy] = {}
        self._writes: dict[int, dict[ParamSlice, torch.Tensor]] = {}

    def grow(self, units: Iterable[Unit]) -> None:
        """Answer for the parameters of further units."""
        self._places |= {
            id(param): Place(unit, section, piece) for unit in units for section, piece, param in unit.placed_params
        }

    def place(self, param: nn.Parameter) -> Place:
        return self._places[id(param)]

    def has(self, param: nn.Parameter) -> bool:
        """Whether it is this model's."""
        return id(param) in self._places

    def places(self) -> list[Place]:
        return list(self._places.values())

    def name_of(self, param: nn.Parameter) -> str:
        return self.place(param).name

    def describe(self, param: nn.Parameter) -> str:
        """Name and tier, for repr and messages."""
        place, shard = self.place(param), self.place(param).section.shard
        return f"{place.name}, offloaded to {(Tier.DEVICE if shard.on_device else shard.placement.params).value}"

    # Data

    def touch(self, params: Sequence[nn.Parameter]) -> Touched:
        """Inside a forward or backward parameters are fetched; outside they are read if they are here."""
        self._life.check_usable()
        units = list({self.place(param).unit.index: self.place(param).unit for param in params}.values())
        if self._session.active:
            self._session.touch(units)
            return Touched.OPEN
        if not all(unit.gathered_uses > 0 or unit.readable for unit in units):
            return Touched.AWAY
        for unit in units:
            if unit.gathered_uses > 0:
                self._residency.bring(unit)  # a step or a load may have replaced its values meanwhile
            else:
                unit.wait_for_update()
                self._residency.use(unit)
        return Touched.FOR_READING

    def is_gathered(self, param: nn.Parameter) -> bool:
        return self.place(param).unit.gathered_uses > 0

    def begin_walk(self, module: nn.Module, call: FrameType) -> None:
        """Until `end_walk` of the module, `detach` gives copies and `copy_` writes: what state_dict and
        load_state_dict do. Those of modules inside of it belong to the same walk. `call` may be left by an exception,
        and `end_walk` not come."""
        if self.walking:
            return
        self._life.check_usable()
        # What a backward that broke off has left in use would be read and written as a plain parameter.
        self._session.settle()
        _need_whole(self._places.values(), "model.state_dict()", "zo.save_checkpoint(model, optimizer, path)")
        self._walk, self._walks_over = call, module
        self._writes.clear()
        self._copies.clear()

    def end_walk(self, module: nn.Module, before_writing: Callable[[Collection[str]], None]) -> None:
        """Write what was copied in, section by section; if anything was. `before_writing` gets the names."""
        if self._walks_over is not module:
            return
        self._walk, self._walks_over = None, None
        if self._writes:
            before_writing({piece.spec.name for values in self._writes.values() for piece in values})
        self._copies.clear()
        sections = {id(place.section): place for place in self._places.values()}
        try:
            for key, values in self._writes.items():
                self.write_section(sections[key].section, values, {})
        finally:
            placed = [(unit, *each) for unit in self._units for each in unit.placed_params]
            written = [each for each in placed if each[2] in self._writes.get(id(each[1]), {})]
            replaced(self._residency, [(unit, param) for unit, _, _, param in written])
            self._writes.clear()

    @property
    def walking(self) -> bool:
        return self._walk is not None and runs(self._walk)

    def copy_out(self, param: nn.Parameter) -> torch.Tensor:
        """The parameter's value, a `StateCopy`, host; one for all of its names. In a walk no update comes between."""
        if id(param) not in self._copies:
            place = self.place(param)
            place.unit.wait_for_update()
            with torch.inference_mode(False):  # whose tensors count no changes
                values = host_reserved(place.piece.spec.shape, place.section.layout.dtype)
                lazy = self._store.read_lazily(place.section.shard, place.piece.begin, values)
            self._copies[id(param)] = state_copy(param, place.name, values, lazy.read)
        return again(self._copies[id(param)])

    def copy_in(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """Take new values, of the parameter's shape; written when the walk ends."""
        place = self.place(param)
        self._writes.setdefault(id(place.section), {})[place.piece] = values

    def with_masters(self, param: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        """The parameter's new values; where they are what they were, its fp32 master."""
        place = self.place(param)
        shard = place.section.shard
        if not shard.layout.trainable or shard.layout.dtype == torch.float32:
            return values
        place.unit.wait_for_update()
        span, shape = (place.piece.begin, place.piece.end), place.piece.spec.shape
        old = read_values(self._store, shard, span).view(shape)
        return torch.where(old == values, read_master(self._store, shard, span).view(shape), values.float())

    def write_section(
        self,
        section: Section,
        masters: Mapping[ParamSlice, torch.Tensor],
        states: Mapping[tuple[ParamSlice, Component], torch.Tensor],
    ) -> None:
        """Replace masters (fp32 or compute dtype) and optimizer states of some parameters of a section."""
        edits: Edits = {}
        for piece, values in masters.items():
            for component, array in master_edits(section.shard, values).items():
                edits.setdefault(component, []).append((piece.begin, piece.end, array))
        for (piece, component), values in states.items():
            edits.setdefault(component, []).append((piece.begin, piece.end, values.detach().reshape(-1)))
        self._edit(section, edits)

    def _edit(self, section: Section, edits: Edits) -> None:
        self._life.check_usable()
        shard = section.shard
        self._units[shard.layout.unit].wait_for_update()
        source = Edited(self._store, shard, edits)
        self._store.write_components(shard, source, (source.rows, list(edits)))

    # Gradients

    def check_requires_grad(self, param: nn.Parameter, value: object) -> None:
        """What was trained at `zo.offload` may be frozen and thawed; what was frozen then stays so."""
        place = self.place(param)
        if value and not place.section.layout.trainable:
            raise ConfigError(
                f"{place.name} was frozen when zo.offload was called: it has no optimizer state and cannot be trained "
                "now. Let what is to be trained later require a gradient at zo.offload, and freeze it right after: "
                "requires_grad_(False) then holds until requires_grad_(True)"
            )

    def check_frozen(self, params: Iterable[nn.Parameter]) -> None:
        """The same for parameters that an optimizer steps: they may have been thawed while no guard saw it. And whether
        there is a step to be had at all."""
        self._life.check_usable()
        for param in params:
            if not self._places[id(param)].section.layout.trainable and param.requires_grad:
                self.check_requires_grad(param, True)

    def read_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            if param.grad is not None:
                return param.grad  # on its way from autograd to us: a hook of the user's looks at it
        place = self.place(param)
        check_not_updated(self._grads, param, place.name)
        if param in self._grads.zeroed:
            return torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)  # which refuses writes
        if not place.section.layout.trainable or not self._grads.held(param):
            return None
        view = self._grads.view(param)
        if view is None:
            raise ZeroOffloadError(
                f"the gradient of {place.name} rests on {place.section.shard.placement.grads.value} and waits for the "
                "optimizer's step; .grad does not have it. Step with zo.AdamW (or zo.SGD, ...), not torch.optim's; "
                "clip with zo.clip_grad_norm_(model, max_norm) or zo.clip_grad_value_(model, clip_value) instead of "
                "torch's; unscale with zo.GradScaler; drop it with optimizer.zero_grad(), or where no optimizer has it "
                "with param.grad = None. On one rank a copy is read by "
                f'\'with zo.gathered(model, kind="grads") as grads: grads["{place.name}"]\''
            )
        if self._grads.loss_scale != 1.0:
            raise ZeroOffloadError(
                f"the gradient of {place.name} is unscaled by the step itself: in memory it still has the loss scale. "
                'Clip with zo.clip_grad_norm_(model, max_norm), or read a copy with zo.gathered(module, kind="grads")'
            )
        return view

    def write_grad(self, param: nn.Parameter, grad: torch.Tensor | None) -> None:
        if grad is not None and (grad.shape != param.shape or bool(grad.any())):
            raise ZeroOffloadError(
                f"the gradient of {self.describe(param)} cannot be assigned; only None, which drops it, or zeros"
            )
        self.drop_grads([param])
        if grad is not None and self.place(param).section.layout.trainable:
            self._grads.zeroed.add(param)

    def drop_grads(self, params: Collection[nn.Parameter]) -> None:
        if not self._grads.updated.isdisjoint(params):
            self._life.check_usable()
            for param in params:
                check_not_updated(self._grads, param, self.name_of(param))
        with torch._C.DisableTorchFunctionSubclass():
            for param in params:
                param.grad = None
        self._grads.forget(params)

    # Optimizer states

    def check_readable(self, params: Iterable[nn.Parameter], call: str) -> None:
        """Raise where states of these cannot be read."""
        self._life.check_usable()
        instead = "zo.save_checkpoint(model, optimizer, path), and optimizer.state.clear() on all ranks to reset states"
        _need_whole(map(self.place, params), call, instead)

    def kept_states(self, param: nn.Parameter, names: Iterable[str]) -> dict[str, torch.dtype]:
        """Which of these there are, and what its value lacks of the master, with the dtypes of `read_state`."""
        shard = self.place(param).section.shard
        return {name: torch.float32 for name in names if shard.keeps([name])} | master_part(shard.layout)

    def read_state(self, param: nn.Parameter, name: str) -> torch.Tensor:
        """A copy of one of those, of the parameter's shape."""
        self.check_readable([param], f"{name} of {self.name_of(param)} in optimizer.state")
        place = self.place(param)
        piece, shard = place.piece, place.section.shard
        place.unit.wait_for_update()
        span = piece.begin, piece.end
        if name in master_part(shard.layout):
            return read_master_part(self._store, shard, span).view(piece.spec.shape)
        return read_state(self._store, shard, Component(name), span).view(piece.spec.shape)

    def write_states(self, param: nn.Parameter, states: Mapping[str, torch.Tensor | None], beside: States) -> None:
        """Replace these states, each of the parameter's shape; None is zeros. `beside` the value stands what completes
        it to the master, as `read_state` returns it, or nothing: then the master stays as it is."""
        place, zeros = self.place(param), host_zeros(1, torch.float32)
        call = f"changing the optimizer's states of {place.name}, by load_state_dict too,"
        _need_whole([place], call, "zo.load_checkpoint(model, optimizer, path)")
        piece, shard = place.piece, place.section.shard
        place.unit.wait_for_update()
        master = completed(self._store, shard, beside, (piece.begin, piece.end)) if beside else None
        values = {Component(name): zeros if state is None else state for name, state in states.items()}
        if master is None:
            span = piece.begin, piece.end
            edits = {each: [(*span, state.detach().reshape(-1))] for each, state in values.items()}
            self._edit(place.section, edits)
            return
        self.write_section(
            place.section, {piece: master}, {(piece, component): values[component] for component in values}
        )
        # In bf16 what completes a value leaves it as it is; in fp16 it is its master, rounded.
        if shard.layout.dtype == torch.float16:
            replaced(self._residency, [(place.unit, param)])

    def zero_states(self, places: Sequence[Place], shard_index: int) -> None:
        """Of these parameters' states all that this rank has."""
        zeros = host_zeros(1, torch.float32)
        by_section: dict[int, list[Place]] = {}
        for place in places:
            by_section.setdefault(id(place.section), []).append(place)
        for of_section in by_section.values():
            section = of_section[0].section
            edits = [(*section.layout.in_shard(place.piece, shard_index), zeros) for place in of_section]
            self._edit(section, dict.fromkeys(section.shard.states, edits))


def _need_whole(places: Iterable[Place], call: str, instead: str) -> None:
    if any(place.section.layout.num_shards > 1 or place.piece.spec.division for place in places):
        raise ZeroOffloadError(f"{call} works on one rank; with several use {instead}")
