"""What optimizers keep of offloaded parameters, as they see it. One model's.

Owns how many updates each parameter has had. The states themselves are the shards': there are none before an optimizer
is built, and of each section all that its parameters' optimizers keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from zero_offload.commits import Commits
from zero_offload.param_access import ParamAccess
from zero_offload.shards.shard import Component, Shard
from zero_offload.shards.store import ShardStore


class OptimizerStates:
    """Implements `shards.registry.OptimizerStates`."""

    def __init__(self, access: ParamAccess, store: ShardStore, commits: Commits) -> None:
        self._access = access
        self._store = store
        self._commits = commits
        self.param_steps = {place.name: 0 for place in access.places()}

    def add(self, params: Iterable[nn.Parameter], names: Sequence[str]) -> None:
        self.ensure((self._access.place(param).section.shard, names) for param in params)

    def ensure(self, states: Iterable[tuple[Shard, Sequence[str]]]) -> None:
        """Have room for these states of shards; what there was not is zero."""
        lacking = [(shard, names) for shard, names in states if shard.layout.trainable and not shard.keeps(names)]
        if lacking:
            self._commits.drain()
        for shard, names in lacking:
            self._store.add_states(shard, map(Component, names))

    def read(self, param: nn.Parameter, names: Sequence[str]) -> dict[str, torch.Tensor]:
        steps = self.param_steps[self._access.name_of(param)]
        if steps == 0:
            return {}
        return {"step": torch.tensor(float(steps)), **self._access.read_states(param, names)}

    def write(self, param: nn.Parameter, step: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        self._commits.drain()
        self._commits.set_aside()
        self.add([param], tuple(states))
        self._access.write_states(param, states)
        self.param_steps[self._access.name_of(param)] = int(step)
