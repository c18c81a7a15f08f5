"""What one offloaded model is made of: built by `offload()`, tied together by `OffloadedModel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zero_offload.checkpoint.generation import GenerationKeeper, Ranks
from zero_offload.config import OffloadConfig
from zero_offload.device import Device
from zero_offload.memory.resizable import FrameBudget
from zero_offload.optim.worker import Worker
from zero_offload.plan.layout import ShardLayout
from zero_offload.plan.memory import MemoryPlan, Placement
from zero_offload.plan.unit_bytes import UnitBytes
from zero_offload.run_files import RunFiles
from zero_offload.runtime.ranks.collectives import Collectives
from zero_offload.runtime.ranks.group import RankGroup
from zero_offload.runtime.residency import Residency
from zero_offload.runtime.saved.activations import Activations
from zero_offload.runtime.units.unit import Unit
from zero_offload.shards.registry import Recipe
from zero_offload.shards.store import ShardStore
from zero_offload.storage.swap_file import SwapFile
from zero_offload.threads import FirstError
from zero_offload.types import HardwareProfile


@dataclass(frozen=True)
class Sizes:
    """What units take, where they were placed by that, and what it adds up to."""

    hardware: HardwareProfile
    """As ranks agreed on it at the first `zo.offload`."""
    unit_bytes: Sequence[UnitBytes]
    placement: Placement
    plan: MemoryPlan
    """What budgets were compared with."""


@dataclass
class Parts:
    """What `offload()` has built for one model, and adds to where it adopts further parameters."""

    config: OffloadConfig
    layout: ShardLayout
    sizes: Sizes
    group: RankGroup
    ranks: Ranks
    collectives: Collectives
    device: Device
    store: ShardStore
    frames: FrameBudget
    """Of the compute device's own memory, if it has any."""
    errors: FirstError
    """Of updates, commits and transfers."""
    update_worker: Worker
    commit_worker: Worker | None
    """None where there are no generations."""
    units: list[Unit]
    """One list for all that go over the units."""
    residency: Residency
    files: RunFiles
    activations: Activations | None
    left_out: dict[int, Recipe]
    """By id: parameters without values, until weights are loaded."""
    close_files: Callable[[], None]

    @property
    def keeper(self) -> GenerationKeeper | None:
        return self.files.keeper

    @property
    def scratch(self) -> SwapFile | None:
        return self.files.scratch

    @property
    def stay_in_memory(self) -> bool:
        """Whether a CPU computes, all units stay with it, and nothing of this model is on a drive."""
        shards = [section.shard for unit in self.units for section in unit.sections]
        resident = all(unit.on_host and unit.resident for unit in self.units)
        return resident and self.activations is None and all(shard.placement.all_in_memory for shard in shards)
