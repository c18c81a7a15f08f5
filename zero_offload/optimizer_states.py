"""What optimizers keep of offloaded parameters, as they see it. One model's.

Owns how many updates each parameter has had, and what budgets leave for states that plans do not count. The states
themselves are the shards': there are none before an optimizer is built, and of each section all that its parameters'
optimizers keep.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from zero_offload.commits import Commits
from zero_offload.errors import CapacityError
from zero_offload.host import host_tensor
from zero_offload.param_access import ParamAccess, Place, States
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
        self.param_steps: dict[str, int] = {}
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

    def add(self, params: Iterable[nn.Parameter], names: Sequence[str]) -> None:
        places = [self._access.place(param) for param in params]
        self.ensure((place.section.shard, names) for place in places)
        # What was loaded is for the optimizer built next; what an earlier one has made of it is not.
        self._start_anew([place for place in places if self.param_steps[place.name] != self._loaded_steps[place.name]])

    def _start_anew(self, places: Sequence[Place]) -> None:
        if places:
            self._commits.drain()
            self._commits.set_aside()
            self._access.zero_states(places, self._shard_index)
            for place in places:
                self.param_steps[place.name] = self._loaded_steps[place.name] = 0

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

    def read(self, wanted: Mapping[nn.Parameter, Sequence[str]]) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        steps = {param: self.param_steps[self._access.name_of(param)] for param in wanted}
        stepped = {param: names for param, names in wanted.items() if steps[param]}
        found = self._access.read_states(stepped) if stepped else {}
        return {
            param: {"step": host_tensor(float(steps[param]), torch.float32), **states}
            for param, states in found.items()
        }

    def write(self, param: nn.Parameter, step: int, states: Mapping[str, torch.Tensor | None], beside: States) -> None:
        place = self._access.place(param)
        if step == self.param_steps[place.name] == 0:
            return  # all that there is is zero
        self._commits.drain()
        self._commits.set_aside()
        self.ensure([(place.section.shard, tuple(states))])
        self._access.write_states(param, states, beside)
        self.param_steps[place.name] = self._loaded_steps[place.name] = step
        if beside:
            self._completed[place.name] = step

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
