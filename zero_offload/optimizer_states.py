"""What optimizers keep of offloaded parameters, as they see it. One model's.

Owns how many updates each parameter has had, and what budgets leave for states that plans do not count. The states
themselves are the shards': there are none before an optimizer is built, and of each section all that its parameters'
optimizers keep.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zero_offload.abi import Rule
from zero_offload.commits import Commits
from zero_offload.errors import CapacityError, ZeroOffloadError
from zero_offload.host import host_tensor, host_zeros
from zero_offload.kernels.hyper import Hyper
from zero_offload.optim.loading import BESIDE, STEP
from zero_offload.optim.state import Entry, Readers, StateTensor, count_of, settled
from zero_offload.param_access import ParamAccess, States
from zero_offload.plan.memory import MemoryPlan
from zero_offload.shards.shard import Component, Shard, unplanned_bytes
from zero_offload.shards.store import ShardStore
from zero_offload.types import Tier, format_bytes

_SETTINGS = {Tier.DEVICE: "device_memory", Tier.CPU: "cpu_memory", Tier.NVME: "nvme_capacity"}


class OptimizerStates:
    """Implements `shards.registry.OptimizerStates`."""

    def __init__(
        self, access: ParamAccess, store: ShardStore, commits: Commits, shard_index: int, plan: MemoryPlan
    ) -> None:
        self._access = access
        self._store = store
        self._commits = commits
        self._shard_index = shard_index
        self._plan = plan
        self._unplanned = dict.fromkeys(Tier, 0)
        """Bytes of states that the plan does not count."""
        self.readers = Readers()
        self.param_steps: dict[str, int] = {}
        self.begun: set[str] = set()
        """Parameters that have states though no step is counted: those of a fake step, or that the program has set."""
        self._loaded_steps: dict[str, int] = {}
        """The counts that came with states from files or a state dict."""
        self._completed: dict[str, int] = {}
        """Those that came with what completes a value to its fp32 master."""
        self.adopt({})

    def adopt(self, param_steps: Mapping[str, int]) -> None:
        """The shards have states that were saved after so many updates of each parameter."""
        self.param_steps = {place.name: int(param_steps.get(place.name, 0)) for place in self._access.places()}
        self._loaded_steps = dict(self.param_steps)
        self._completed.clear()
        self.begun.clear()

    def grow(self, plan: MemoryPlan, param_steps: Mapping[str, int]) -> None:
        """There are further parameters, and another plan; `param_steps` as `adopt` takes them."""
        self._plan = plan
        for name in (place.name for place in self._access.places()):
            if name not in self.param_steps:
                self.param_steps[name] = self._loaded_steps[name] = int(param_steps.get(name, 0))

    def add(self, params: Iterable[nn.Parameter], names: Sequence[str]) -> None:
        params = list(params)
        places = [self._access.place(param) for param in params]
        self.ensure((place.section.shard, names) for place in places)
        # What was loaded is for the optimizer built next; what an earlier one has made of it is not.
        self._start_anew(
            param
            for param, place in zip(params, places, strict=True)
            if self.param_steps[place.name] != self._loaded_steps[place.name] or place.name in self.begun
        )

    def _start_anew(self, params: Iterable[nn.Parameter]) -> None:
        if not (params := list(params)):
            return
        self.readers.before_replacing(params)
        self._change()
        places = [self._access.place(param) for param in params]
        self._access.zero_states(places, self._shard_index)
        for place in places:
            self.param_steps[place.name] = self._loaded_steps[place.name] = 0
            self.begun.discard(place.name)

    def ensure(self, states: Iterable[tuple[Shard, Sequence[str]]]) -> None:
        """Have room for these states of shards; what there was not is zero. Raises CapacityError."""
        lacking: dict[int, tuple[Shard, dict[Component, None]]] = {}
        for shard, names in states:
            if shard.layout.trainable and not shard.keeps(names):
                lacking.setdefault(id(shard), (shard, {}))[1].update(dict.fromkeys(map(Component, names)))
        if lacking:
            self._count(lacking.values())
            self._commits.drain()
        for shard, components in lacking.values():
            self._store.add_states(shard, components)

    def _count(self, lacking: Iterable[tuple[Shard, Iterable[Component]]]) -> None:
        """Raise where these states would exceed a budget. AdamW's two are a part of the plan."""
        unplanned = dict(self._unplanned)
        for shard, components in lacking:
            nbytes = unplanned_bytes(shard.layout, shard.states, components)
            unplanned[Tier.NVME] += nbytes * len(shard.slots)
            unplanned[shard.placement.optimizer] += nbytes * (shard.placement.optimizer is not Tier.NVME)
        shared = self._plan.budget.shared_memory
        for tier, nbytes in unplanned.items():
            together = nbytes if tier is Tier.NVME or not shared else unplanned[Tier.DEVICE] + unplanned[Tier.CPU]
            if nbytes and together > (left := max(self._plan.left_bytes(tier), 0)):
                setting = _SETTINGS[Tier.CPU if shared and tier is Tier.DEVICE else tier]
                raise CapacityError(
                    f"the optimizer keeps more than two states of a parameter, which zo.plan does not count: of the "
                    f"{tier.value} tier they take {format_bytes(together)}, and {format_bytes(left)} are left. Raise "
                    f"{setting}=, place states elsewhere (optimizer=), or use an optimizer with fewer (amsgrad=False)"
                )
        self._unplanned = unplanned

    def step_of(self, param: nn.Parameter) -> int | None:
        name = self._access.name_of(param)
        return self.param_steps[name] if self.param_steps[name] or name in self.begun else None

    def kept(self, param: nn.Parameter, names: Sequence[str]) -> dict[str, torch.dtype]:
        if self.step_of(param) is None:
            return {}
        return {STEP: torch.float32} | self._access.kept_states(param, names)

    def check_readable(self, params: Iterable[nn.Parameter], call: str) -> None:
        self._access.check_readable(params, call)

    def read(self, param: nn.Parameter, name: str) -> torch.Tensor:
        if (step := self.step_of(param)) is None:
            raise ZeroOffloadError(
                f"{name} of {self._access.describe(param)} is gone: the optimizer's states were reset, and no step "
                "has made others. Take a copy before a reset (.clone())"
            )
        if name == STEP:
            return host_tensor(float(step), torch.float32)
        return self._access.read_state(param, name)

    def begin(self, hypers: Mapping[nn.Parameter, Hyper]) -> None:
        """Have states, as those of a step of zero gradients with a learning rate of 0 would be, and count no step."""
        for param, hyper in hypers.items():
            if self.step_of(param) is None:
                if hyper.rule is Rule.ADAGRAD and hyper.beta2:
                    initial = host_zeros(param.shape, torch.float32) + hyper.beta2
                    self.write(param, 0, {"sum": initial}, {})
                self.begun.add(self._access.name_of(param))

    def edit(self, param: nn.Parameter, name: str, values: torch.Tensor) -> None:
        place = self._access.place(param)
        step = count_of(values, f"{name} of {place.name}") if name == STEP else self.param_steps[place.name]
        self._change()
        if name in BESIDE:
            self._access.write_states(param, {}, {name: values})
        elif name != STEP:
            self.ensure([(place.section.shard, (name,))])
            self._access.write_states(param, {name: values}, {})
        self._count_steps(place.name, step, has_states=True)

    def write(self, param: nn.Parameter, step: int, states: Mapping[str, torch.Tensor | None], beside: States) -> None:
        place, has_states = self._access.place(param), any(state is not None for state in states.values())
        if step == 0 and self.step_of(param) is None and not has_states:
            return  # all that there is is zero
        moved, beside = _moved(states, param), _moved(beside, param)
        if not moved and not beside and step == self.step_of(param):
            return  # they are here
        self.readers.before_replacing([param], {*moved, *beside, STEP, Entry.state_name})
        self._change()
        self.ensure([(place.section.shard, tuple(moved))])
        if moved or beside:
            self._access.write_states(param, moved, beside)
        self._count_steps(place.name, step, has_states)
        self._loaded_steps[place.name] = step
        if beside:
            self._completed[place.name] = step

    def _count_steps(self, name: str, step: int, has_states: bool) -> None:
        self.param_steps[name] = step
        if has_states and step == 0:
            self.begun.add(name)
        else:
            self.begun.discard(name)

    def reset(self, params: Iterable[nn.Parameter]) -> None:
        self._start_anew(param for param in params if self.step_of(param) is not None)

    def _change(self) -> None:
        """Before the program changes states."""
        self._commits.drain()
        self._commits.set_aside()

    def values_replaced(self, names: Collection[str]) -> None:
        """A model's state dict is loaded: these parameters'. Masters that an optimizer's has completed, and no step has
        used, go."""
        self._commits.drain()  # a commit under way must not see half of it
        self._commits.set_aside()
        completed = {name: self._completed.pop(name) for name in names if name in self._completed}
        lost = [name for name, step in completed.items() if self.param_steps[name] == step]
        if lost:
            warnings.warn(
                f"model.load_state_dict replaces the fp32 master of {lost[0]}, which optimizer.load_state_dict has "
                "just completed, by its rounded value. Load the model's state dict first, then the optimizer's",
                stacklevel=2,
            )


def _moved(states: Mapping[str, Any], param: nn.Parameter) -> dict[str, Any]:
    """Those that do not rest where they belong; copies of those that rest elsewhere."""
    found = {
        name: each
        for name, each in states.items()
        if not isinstance(each, StateTensor) or not each.rests_at(param, name)
    }
    return settled(found, param)
