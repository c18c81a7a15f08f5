"""What optimizers keep of offloaded parameters, as they see it. One model's.

Owns how many updates each parameter has had. The states themselves are the shards': there are none before an optimizer
is built, and of each section all that its parameters' optimizers keep.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from zero_offload.commits import Commits
from zero_offload.param_access import ParamAccess, Place, States
from zero_offload.shards.shard import Component, Shard
from zero_offload.shards.store import ShardStore


class OptimizerStates:
    """Implements `shards.registry.OptimizerStates`."""

    def __init__(self, access: ParamAccess, store: ShardStore, commits: Commits, shard_index: int) -> None:
        self._access = access
        self._store = store
        self._commits = commits
        self._shard_index = shard_index
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
        """Have room for these states of shards; what there was not is zero."""
        lacking = [(shard, names) for shard, names in states if shard.layout.trainable and not shard.keeps(names)]
        if lacking:
            self._commits.drain()
        for shard, names in lacking:
            self._store.add_states(shard, map(Component, names))

    def read(self, wanted: Mapping[nn.Parameter, Sequence[str]]) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        steps = {param: self.param_steps[self._access.name_of(param)] for param in wanted}
        stepped = {param: names for param, names in wanted.items() if steps[param]}
        found = self._access.read_states(stepped) if stepped else {}
        return {param: {"step": torch.tensor(float(steps[param])), **states} for param, states in found.items()}

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

    def values_replaced(self) -> None:
        """A model's state dict is loaded. Masters that an optimizer's has completed, and no step has used, go."""
        self._commits.drain()  # a commit under way must not see half of it
        self._commits.set_aside()
        lost = [name for name, step in self._completed.items() if self.param_steps[name] == step]
        self._completed.clear()
        if lost:
            warnings.warn(
                f"model.load_state_dict replaces the fp32 master of {lost[0]}, which optimizer.load_state_dict has "
                "just completed, by its rounded value. Load the model's state dict first, then the optimizer's",
                stacklevel=2,
            )
