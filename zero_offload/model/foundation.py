"""`Foundation`: what one offloaded model rests on, below its step.

`Builder` makes it in `zo.offload`. The parts of a step (`model/assembly.py`) take from it what they use.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_offload.base.config import OffloadConfig
from zero_offload.base.threads import FirstError
from zero_offload.checkpoint.run_files import RunFiles
from zero_offload.hardware.device import Device
from zero_offload.optim.worker import Worker
from zero_offload.plan.layout import ShardLayout
from zero_offload.plan.memory import Sizes
from zero_offload.runtime.pass_tracker import ModelLife
from zero_offload.runtime.prefetcher import ParamPrefetcher
from zero_offload.runtime.ranks.collectives import Collectives, CommitGroup
from zero_offload.runtime.ranks.group import RankGroup
from zero_offload.runtime.saved_tensors.activations import Activations
from zero_offload.runtime.units.group_reader import GroupReader
from zero_offload.runtime.units.unit import Unit
from zero_offload.standins.owners import Recipe
from zero_offload.storage.memory.resizable import FrameBudget
from zero_offload.storage.shards.ring_grads import GradRing
from zero_offload.storage.shards.store import ShardStore


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Foundation:
    """Decisions, ranks, memory, files, threads and movers of one model."""

    config: OffloadConfig
    """With the budgets that all ranks have agreed on."""
    given: OffloadConfig
    """As this rank's program has it."""
    layout: ShardLayout
    """Of the first `zo.offload`, as `sizes`: `ModelRuntime` has those of the model as it has grown."""
    sizes: Sizes
    group: RankGroup
    ranks: CommitGroup
    collectives: Collectives
    device: Device
    store: ShardStore
    frames: FrameBudget
    """Frames of the compute device's own memory, if it has any."""
    files: RunFiles
    errors: FirstError
    """Errors of updates, commits and transfers."""
    life: ModelLife
    update_worker: Worker
    commit_worker: Worker | None
    """None where there are no generations."""
    units: list[Unit]
    """One list for all that go over the units."""
    prefetcher: ParamPrefetcher
    expert_groups: GroupReader
    activations: Activations | None
    grad_ring: GradRing | None
    """With overlap="backward"."""
    without_values: dict[int, Recipe]
    """By id: parameters without values, until weights are loaded."""

    @property
    def shard_index(self) -> int:
        """Of this rank's shards."""
        return self.collectives.shard_index

    @property
    def stays_in_memory(self) -> bool:
        """True if a CPU computes, all units stay with it, and nothing of this model is on a drive."""
        shards = [section.shard for unit in self.units for section in unit.sections]
        resident = all(unit.on_host and unit.resident for unit in self.units)
        return resident and self.activations is None and all(shard.placement.all_in_memory for shard in shards)
