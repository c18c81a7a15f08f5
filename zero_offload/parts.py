"""What one offloaded model is made of: built by `offload()`, tied together by `OffloadedModel`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zero_offload.checkpoint.generation import GenerationKeeper, Ranks
from zero_offload.config import OffloadConfig
from zero_offload.device import Device
from zero_offload.optim.worker import Worker
from zero_offload.plan.layout import ShardLayout
from zero_offload.runtime.ranks.collectives import Collectives
from zero_offload.runtime.residency import Residency
from zero_offload.runtime.saved.activations import Activations
from zero_offload.runtime.units.unit import Unit
from zero_offload.shards.registry import Recipe
from zero_offload.shards.store import ShardStore
from zero_offload.shards.update_board import UpdateBoard
from zero_offload.storage.swap_file import SwapFile


@dataclass(frozen=True)
class Parts:
    """What `offload()` has built for one model."""

    config: OffloadConfig
    layout: ShardLayout
    ranks: Ranks
    collectives: Collectives
    device: Device
    store: ShardStore
    board: UpdateBoard
    update_worker: Worker
    commit_worker: Worker | None
    """None where there are no generations."""
    units: tuple[Unit, ...]
    residency: Residency
    keeper: GenerationKeeper | None
    scratch: SwapFile | None
    activations: Activations | None
    left_out: dict[int, Recipe]
    """By id: parameters without values, until weights are loaded."""
    close_files: Callable[[], None]

    @property
    def stay_in_memory(self) -> bool:
        """Whether a CPU computes, all units stay with it, and nothing of this model is on a drive."""
        shards = [section.shard for unit in self.units for section in unit.sections]
        resident = all(unit.on_host and unit.resident for unit in self.units)
        return resident and self.activations is None and all(shard.placement.all_in_memory for shard in shards)
