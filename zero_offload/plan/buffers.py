"""Where the flat buffers of sections are while their units are not in use, and the frames of memory that they take.

Pure functions of what was decided: a `BufferPlan` for one layout and placement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from zero_offload.base.config import OffloadConfig
from zero_offload.base.types import FRAME, StateKind, Tier, whole_sectors
from zero_offload.plan.expert_groups import GROUPS_IN_FLIGHT, group_bytes
from zero_offload.plan.layout import SectionLayout, ShardLayout
from zero_offload.plan.memory import (
    GRADS_IN_FLIGHT,
    Placement,
    UnitNumel,
    activations_ahead_bytes,
    beside_made_bytes,
    divide_up,
    in_flight_sum,
    measure_units,
    ring_bytes,
    sent_grad_bytes,
)
from zero_offload.plan.partition import Partition

UNLIMITED_FRAMES = 1 << 40


def is_on_device(section: SectionLayout, tiers: Mapping[StateKind, Tier], *, is_host: bool) -> bool:
    """True if a section's shard is in the compute device's own memory, where it is updated."""
    return section.trainable and tiers[StateKind.OPTIMIZER] is Tier.DEVICE and not is_host


class Home(Enum):
    """Where a section's flat buffer is while the unit is not in use."""

    IN_PLACE = "in place"  # it is the shard, or a part of it is: in the memory that compute works on
    ON_DEVICE = "on device"  # filled once, refreshed after updates
    AWAY = "away"  # no memory under them


class FrameLimits(NamedTuple):
    """Frames of one memory."""

    chosen: int
    """Used by choice."""
    most: int
    """Taken by a use that cannot wait (a checkpointed segment needs all of its units at once)."""
    kept: int = 0
    """Frames of the chosen ones for gradients alone: units that are fetched ahead would have them all."""
    least: int = 0
    """On a device, the frames that uses need at once."""


@dataclass(frozen=True)
class BufferPlan:
    """The buffers of one rank. `is_host`: the compute device is the CPU."""

    layout: ShardLayout
    placement: Placement
    partition: Partition
    config: OffloadConfig
    is_host: bool

    def home(self, section: SectionLayout) -> Home:
        tiers = self.placement.tiers[section.unit]
        params, on_device = tiers[StateKind.PARAMS], is_on_device(section, tiers, is_host=self.is_host)
        on_device = on_device and not section.is_thawed  # its shard may be there; its buffer stays where it was
        if section.num_shards == 1 and on_device:
            return Home.IN_PLACE
        if params is Tier.NVME or self.partition.param_shards > 1:
            return Home.AWAY
        if self.is_host or (params is Tier.DEVICE and on_device):
            return Home.IN_PLACE
        return Home.ON_DEVICE if params is Tier.DEVICE else Home.AWAY

    def frame_limits(self, state_bytes: Callable[[SectionLayout], int]) -> tuple[FrameLimits, FrameLimits]:
        """Limits on the host and on the device: for units on their way through, and for gradients on theirs.

        `state_bytes`: what a shard takes where it is updated, with AdamW's states.
        """
        config, sums = self.config, self.partition.world_size > 1
        frames = {home: [0] * len(self.layout.units) for home in Home}
        for section in self.layout.sections:
            home = self.home(section)
            if home is not Home.AWAY or self.layout.units[section.unit].experts is None:
                frames[home][section.unit] += divide_up(section.nbytes, FRAME)
        passing = frames[Home.AWAY]
        in_flight = units = in_flight_sum(passing, self.layout.units)
        if (budget := config.budget_bytes(Tier.DEVICE)) is not None:
            budget_frames = divide_up(budget, FRAME)
            most = budget_frames - divide_up(self._device_bytes_at_rest(state_bytes), FRAME)
            units = min(sum(passing), max(min(units, budget_frames), most))
        staying = sum(frames[Home.ON_DEVICE])
        grads = 0
        on_drives = any(
            self.placement.tiers[section.unit][StateKind.GRADS] is Tier.NVME
            for section in self.layout.sections
            if section.trainable
        )
        if sums or on_drives:
            # One buffer is filled or reduced; with both, a rank's own sums may be open beside it.
            trained = ((s for s in unit.sections if s.trainable) for unit in self.layout.units)
            unit_frames = (sum(divide_up(s.numel * 4, FRAME) for s in sections) for sections in trained)
            grads = GRADS_IN_FLIGHT * (1 + (sums and on_drives)) * max(unit_frames)
        unlimited = config.device_memory is None and config.cpu_memory is None
        host = grads + (units if self.is_host else 0)
        # One rank on a CPU keeps frames in backward only, of the units' own where it can (`MemoryPool`).
        kept = 0 if self.is_host and not sums else grads
        there, least = units + staying, min(in_flight, units) + staying
        return (
            FrameLimits(host - grads + kept, UNLIMITED_FRAMES if unlimited else host, kept=kept),
            FrameLimits(there, UNLIMITED_FRAMES if config.device_memory is None else there, least=least),
        )

    def _device_bytes_at_rest(self, state_bytes: Callable[[SectionLayout], int]) -> int:
        """Bytes in a device's memory: gradients at rest or on their way to the host, activations fetched ahead, and
        states that are updated there."""
        if self.is_host:
            return 0
        grads, passing, sent, states = 0, [], [], 0
        units = measure_units(map(UnitNumel.of, self.layout.units), self.config, self.partition)
        for layout, unit, tiers in zip(self.layout.units, units, self.placement.tiers, strict=True):
            stays = tiers[StateKind.GRADS] is Tier.DEVICE
            grads += unit.grads_bytes * stays
            passing.append(unit.passing_grads_bytes * stays)
            sent.append(sent_grad_bytes(unit, self.partition) * (not stays))
            states += sum(state_bytes(s) for s in layout.sections if is_on_device(s, tiers, is_host=False))
        ahead = activations_ahead_bytes(self.config, self.placement.budget)
        ahead += GROUPS_IN_FLIGHT * self.group_bytes()
        return grads + ring_bytes(passing) + beside_made_bytes(sent, sent) + states + ahead

    def group_bytes(self) -> int:
        """Memory for one group of experts, the largest of units that have no memory of their own."""
        away = (unit for unit in self.layout.units if any(self.home(s) is Home.AWAY for s in unit.sections))
        return max(map(group_bytes, away), default=0)

    def landing_bytes(self) -> int:
        """Host memory for units on their way to a device."""
        whole = self.partition.replicates_params
        sizes = [
            sum(s.nbytes if whole else s.shard_nbytes for s in unit.sections) * (unit.experts is None)
            for unit in self.layout.units
        ]
        return in_flight_sum(sizes, self.layout.units)

    def grad_ring_bytes(self) -> int:
        """Host memory for the gradients that pass through while backward updates."""
        unit_bytes = [0] * len(self.layout.units)
        for section in self.layout.sections:
            stays = self.placement.tiers[section.unit][StateKind.GRADS] is Tier.DEVICE and not self.is_host
            if section.trainable and not stays:
                itemsize = 4 if self.partition.world_size > 1 else section.dtype.itemsize
                unit_bytes[section.unit] += whole_sectors(section.shard_numel * itemsize)
        return ring_bytes(unit_bytes)
