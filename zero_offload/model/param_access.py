"""What a parameter answers while it is offloaded: its data and its gradient. One model's.

Reads and writes of single parameters go section by section through the store (the last section read is kept, so
that a walk over a model reads each section once). With several ranks a parameter is spread over them:
then these calls raise, naming the one that gathers.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from types import FrameType

import torch
from torch import nn

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.host import host_reserved
from zero_offload.checkpoint.values import (
    read_master,
    read_values,
)
from zero_offload.model.optimizer_states import OptimizerStates
from zero_offload.model.param_places import ParamPlaces, need_whole
from zero_offload.plan.layout import ParamSlice
from zero_offload.runtime.grads.gradients import Gradients, check_not_updated
from zero_offload.runtime.pass_tracker import ModelLife, PassTracker
from zero_offload.runtime.prefetcher import ParamPrefetcher, replaced
from zero_offload.runtime.saved.tensors import runs
from zero_offload.runtime.units.state_copy import StateCopy, again, state_copy
from zero_offload.storage.shards.registry import Touched
from zero_offload.storage.shards.store import ShardStore


class ParamAccess:
    """Implements `shards.registry.ParamAccess`."""

    def __init__(
        self,
        places: ParamPlaces,
        states: OptimizerStates,
        store: ShardStore,
        grads: Gradients,
        tracker: PassTracker,
        life: ModelLife,
        prefetcher: ParamPrefetcher,
    ) -> None:
        self._places = places
        self._states = states
        self._prefetcher = prefetcher
        self._store = store
        self._grads = grads
        self._tracker = tracker
        self._life = life
        self._walk: FrameType | None = None
        self._walks_over: nn.Module | None = None
        self._copies: dict[int, StateCopy] = {}
        self._writes: dict[int, dict[ParamSlice, torch.Tensor]] = {}

    # Data

    def touch(self, params: Sequence[nn.Parameter]) -> Touched:
        """Inside a forward or backward parameters are fetched; outside they are read if they are here."""
        self._life.check_usable()
        units = list({self._places[param].unit.index: self._places[param].unit for param in params}.values())
        if self._tracker.active:
            self._tracker.touch(units)
            return Touched.OPEN
        if not all(unit.gathered_uses > 0 or unit.readable for unit in units):
            return Touched.AWAY
        for unit in units:
            if unit.gathered_uses > 0:
                self._prefetcher.bring(unit)  # a step or a load may have replaced its values meanwhile
            else:
                unit.wait_for_update()
                if self._prefetcher.streams is not None:
                    self._prefetcher.streams.use(unit)
        return Touched.FOR_READING

    def is_gathered(self, param: nn.Parameter) -> bool:
        return self._places[param].unit.gathered_uses > 0

    def begin_walk(self, module: nn.Module, call: FrameType) -> None:
        """Until `end_walk` of the module, `detach` gives copies and `copy_` writes: what state_dict and
        load_state_dict do. Those of modules inside of it belong to the same walk. `call` may be left by an exception,
        and `end_walk` not come."""
        if self.walking:
            return
        self._life.check_usable()
        # What a backward that broke off has left in use would be read and written as a plain parameter.
        self._tracker.settle()
        need_whole(self._places.all(), "model.state_dict()", "zo.save_checkpoint(model, optimizer, path)")
        self._walk, self._walks_over = call, module
        self._writes.clear()
        self._copies.clear()

    def end_walk(self, module: nn.Module, *, has_masters: bool = False) -> None:
        """Write what was copied in, section by section, if anything was. `has_masters`: where values are what they
        were, fp32 masters were copied in."""
        if self._walks_over is not module:
            return
        self._walk, self._walks_over = None, None
        if self._writes:
            names = {piece.spec.name for values in self._writes.values() for piece in values}
            self._states.values_replaced(() if has_masters else names)
        self._copies.clear()
        places = self._places.all()
        sections = {id(place.section): place for place in places}
        try:
            for key, values in self._writes.items():
                self._states.write_masters(sections[key], values)
        finally:
            written = [place for place in places if place.piece in self._writes.get(id(place.section), {})]
            replaced(self._prefetcher, [(place.unit, place.param) for place in written])
            self._writes.clear()

    @property
    def walking(self) -> bool:
        return self._walk is not None and runs(self._walk)

    def copy_out(self, param: nn.Parameter) -> torch.Tensor:
        """The parameter's value, a `StateCopy`, host; one for all of its names. In a walk no update comes between."""
        if id(param) not in self._copies:
            place = self._places[param]
            place.unit.wait_for_update()
            with torch.inference_mode(False):  # whose tensors count no changes
                values = host_reserved(place.piece.spec.shape, place.section.layout.dtype)
                lazy = self._store.read_lazily(place.section.shard, place.piece.begin, values)
            self._copies[id(param)] = state_copy(param, place.name, values, lazy.read)
        return again(self._copies[id(param)])

    def copy_in(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """Take new values, of the parameter's shape; written when the walk ends."""
        place = self._places[param]
        self._writes.setdefault(id(place.section), {})[place.piece] = values

    def write_param(self, param: nn.Parameter, values: torch.Tensor) -> None:
        """As load_state_dict does, but what stays as it was keeps its fp32 master. Inside of a walk, at its end."""
        walk = nn.Module()
        self.begin_walk(walk, sys._getframe())
        with torch.no_grad():
            param.copy_(self._with_masters(param, values))
        self.end_walk(walk, has_masters=True)

    def _with_masters(self, param: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        """The parameter's new values; where they are what they were, its fp32 master."""
        place = self._places[param]
        shard = place.section.shard
        if not shard.layout.trainable or shard.layout.dtype == torch.float32:
            return values
        place.unit.wait_for_update()
        span, shape = (place.piece.begin, place.piece.end), place.piece.spec.shape
        old = read_values(self._store, shard, span).view(shape)
        return torch.where(old == values, read_master(self._store, shard, span).view(shape), values.float())

    # Gradients

    def read_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        with torch._C.DisableTorchFunctionSubclass():
            if param.grad is not None:
                return param.grad  # on its way from autograd to us: a hook of the user's looks at it
        place = self._places[param]
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
                f"the gradient of {self._places.describe(param)} cannot be assigned; only None, which drops it, or "
                "zeros"
            )
        self.drop_grads([param])
        if grad is not None and self._places[param].section.layout.trainable:
            self._grads.zeroed.add(param)

    def drop_grads(self, params: Collection[nn.Parameter]) -> None:
        if not self._grads.updated.isdisjoint(params):
            self._life.check_usable()
            for param in params:
                check_not_updated(self._grads, param, self._places.name_of(param))
        with torch._C.DisableTorchFunctionSubclass():
            for param in params:
                param.grad = None
        self._grads.forget(params)
