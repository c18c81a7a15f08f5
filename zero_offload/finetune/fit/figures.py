"""The plan of a fine-tuning run, or of a model by its name or size, as values.

They are bytes of each memory and disk, seconds, the end, and bytes written to drives. Owns which figures follow from
which, and whether the run fits. Never plans: plan.py does; text.py has the printed form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from zero_offload.base.config import OffloadConfig
from zero_offload.base.types import MIB, Tier, format_bytes
from zero_offload.finetune.fit.job import FolderJob
from zero_offload.finetune.fit.request import Planned, Request, Upgrade, drive_wear
from zero_offload.plan.forecast import NOTICED, Bottleneck, Forecast, break_even_tokens, find_bottleneck, refusals
from zero_offload.plan.step_time import Prediction, predict
from zero_offload.plan.table import ACTIVATIONS, GPU, MEMORY, NVME, PROGRAM, REFERENCE, PlanTable, by_place, shortage
from zero_offload.plan.turns import BlockTurns
from zero_offload.plan.wear import Wear

BESIDE_BYTES = 256 * MIB
"""Memory left free beside all that is counted: threads' stacks, batches, temporary memory of operations."""
_MUCH_WEAR, _FEW_DAYS = 0.05, 90


@dataclass(frozen=True)
class FileSystemNeed:
    """A file system, and what a run needs of it."""

    name: str
    needed: dict[str, int]
    """Bytes by what they are for."""
    free_bytes: int
    """Files of an earlier run in the same place included."""

    @property
    def total(self) -> int:
        return sum(self.needed.values())


@dataclass(frozen=True)
class Alternative:
    """Other flags, with which the run fits."""

    flags: tuple[str, ...]
    plan: FolderPlan


@dataclass(frozen=True)
class FolderPlan:
    """The plan of a job: its bytes, its seconds, and its wear of drives."""

    job: FolderJob
    offload: OffloadConfig
    """The settings that the run is planned with: budgets leave room for what is not states."""
    planned: Planned
    prediction: Prediction
    wear: Wear
    """Of one drive."""
    num_drives: int
    activations: dict[Tier, int]
    """The most at once, of one rank."""
    places: tuple[FileSystemNeed, ...]
    program_bytes: int
    """Memory of the host that the process takes without a model."""
    host_bytes: int
    """Memory of the host that a rank may take, the program included."""
    device_bytes: int
    """Memory of a GPU; 0 where the CPU computes."""
    once_bytes: int
    """Written to drives once, by all ranks: the weights at the start and the outputs."""
    chosen_every: int | None
    """Steps between generations, where they are chosen to spare the drives."""
    problem: str
    """Why activations are not a rehearsal's; empty where they are."""
    reference_bytes: dict[Tier, int]
    """Memory of DPO's reference model, where all parameters are trained: it reads its weights from the drives."""
    adapted: tuple[str, ...]
    """Layers with adapters, by the ends of names; empty without adapters."""
    not_adapted: tuple[str, ...]
    """Linear layers that have none, likewise."""
    notes: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()
    """Modules that begin with random numbers."""
    """Parts of the folder's config that were not understood, and are guessed."""
    turns: BlockTurns | None = None
    """Set where blocks take turns."""
    most_live: int = 0
    """The largest number of them with which the run fits; 0 where none does."""
    alternatives: tuple[Alternative, ...] = ()
    """Where it does not fit."""
    by_tokens: tuple[FolderPlan, ...] = ()
    """With fewer and with more micro-batches in a step, those that fit; this one is among them."""

    # Seconds

    @functools.cached_property
    def bottleneck(self) -> Bottleneck:
        planned = self.planned
        return find_bottleneck(planned.workload, planned.placement, planned.machine, self.prediction.step_s)

    @functools.cached_property
    def one_more_drive(self) -> Prediction | None:
        """The step with one more drive of the same speed; None where it is as long, or no drive is used."""
        if not self.offload.nvme_dirs:
            return None
        machine = self.planned.machine.with_drives((self.num_drives + 1) / self.num_drives)
        found = predict(self.planned.workload, self.planned.placement, machine)
        return found if found.step_s < self.prediction.step_s * NOTICED else None

    @functools.cached_property
    def hidden_tokens(self) -> int | None:
        """Tokens of a micro-batch from which on a step is as long as without offload; None if 2^24 are too few."""
        planned = self.planned
        found = break_even_tokens(planned.workload, planned.placement, planned.machine)
        return None if found is None else math.ceil(found / planned.workload.batch.micro_batches)

    # Sizes

    @functools.cached_property
    def table(self) -> PlanTable:
        """Bytes of one rank; disks hold more than that, see `places`."""
        shared = self.planned.memory.budget.shared_memory
        beside = {
            ACTIVATIONS: by_place(self.activations, shared_memory=shared),
            # Its bytes on drives are among the outputs.
            REFERENCE: by_place({**self.reference_bytes, Tier.NVME: 0}, shared_memory=shared),
            PROGRAM: {MEMORY: self.program_bytes + BESIDE_BYTES},
        }
        swap = self.planned.memory.budget.nvme_bytes + self.activations[Tier.NVME]
        available = {MEMORY: self.host_bytes, GPU: self.device_bytes, NVME: swap * bool(self.offload.nvme_dirs)}
        return self.planned.memory.as_table(beside, available)

    @property
    def used(self) -> dict[str, int]:
        """Bytes of one rank by memory: "host", and "device" where a GPU computes."""
        return {name: self.table.total[place] for name, place in self._memories.items()}

    @property
    def _memories(self) -> dict[str, str]:
        return {"device": GPU, "host": MEMORY} if self.device_bytes else {"host": MEMORY}

    @property
    def states_bytes(self) -> int:
        """Memory of the host for what tiers hold: what `cpu_memory` bounds."""
        return self.table.states[MEMORY]

    @property
    def available(self) -> dict[str, int]:
        return {name: self.table.available[place] for name, place in self._memories.items()}

    @property
    def shortages(self) -> tuple[str, ...]:
        """One line for each place that has too little; none where it fits."""
        names = {"host": "memory", "device": "memory of the GPU"}
        found = [
            shortage(names[name], self.used[name], self.available[name])
            for name in self.used
            if self.used[name] > self.available[name]
        ]
        given = self.job.offload.budget_bytes(Tier.CPU)
        if given is not None and self.states_bytes > given:
            found.append(shortage(f"--cpu-memory {format_bytes(given)}", self.states_bytes, given))
        limit, least = self.offload.budget_bytes(Tier.DEVICE), self.planned.memory.least_bytes
        if limit is not None and least > limit:
            found.append(shortage("--device-memory for the units in use at once", least, limit))
        found += [
            shortage(each.name, each.total, each.free_bytes) for each in self.places if each.total > each.free_bytes
        ]
        return tuple(found) or tuple(refusals(self.planned.refused))

    @property
    def activations_share(self) -> float:
        """The part of the activations for which other things leave memory; 0 where they leave none."""
        tiers = {"device": Tier.DEVICE, "host": Tier.CPU} if self.device_bytes else {"host": Tier.DEVICE}
        shares = [1.0]
        for name, tier in tiers.items():
            room = self.available[name] - self.used[name] + self.activations[tier]
            if self.used[name] > self.available[name]:
                shares.append(max(room, 0) / max(self.activations[tier], 1))
        return min(shares)

    @property
    def fits(self) -> bool:
        return not self.shortages

    # Time and wear

    @property
    def step_s(self) -> float:
        return self.prediction.step_s

    @property
    def run_s(self) -> float | None:
        """Seconds of the whole run; None where its steps are not known."""
        return self.job.steps * self.step_s if self.job.steps else None

    @property
    def written_per_step(self) -> float:
        """Bytes to all drives of a machine."""
        return self.wear.bytes_per_step * self.num_drives

    @property
    def written_bytes(self) -> float | None:
        """To all drives, in the whole run."""
        return self.job.steps * self.written_per_step + self.once_bytes if self.job.steps else None

    @property
    def life_days(self) -> float | None:
        """Days until a drive is written what it is rated for, day and night; None where nothing is."""
        return self.wear.days_to(self.job.tbw, self.step_s) if self.wear.bytes_per_step else None

    @property
    def endured_share(self) -> float | None:
        """Bytes that the run writes to a drive, as a part of its rating; None where its steps are not known."""
        return None if self.written_bytes is None else self.written_bytes / self.num_drives / (self.job.tbw * 1e12)

    @property
    def wears_out(self) -> bool:
        """True if the run takes much of a drive's life; of an unknown number of steps, if a drive lasts some weeks."""
        if self.endured_share is not None:
            return self.endured_share > _MUCH_WEAR
        return self.life_days is not None and self.life_days < _FEW_DAYS

    def spares(self, other: FolderPlan) -> bool:
        """True if a token of this plan writes at most half as much as one of the other."""
        mine, others = (each.written_per_step / each.job.tokens_per_step for each in (self, other))
        return 2 * mine <= others


@dataclass(frozen=True)
class ModelPlan:
    """The plan of a model by its name or size."""

    request: Request
    planned: Planned
    found: Forecast | None
    """None where the plan does not fit."""
    suggestions: Sequence[str]
    """Ways to make it fit, where it does not."""
    offers: Sequence[Upgrade]
    tbw: float
    given_step_s: float | None
    recommended: int | None
    """Steps between generations that spare the drives; None where they make no difference."""

    @property
    def table(self) -> PlanTable:
        return self.request.table(self.planned.memory)

    @property
    def step_s(self) -> float | None:
        """Seconds that wear is counted by."""
        if self.given_step_s is not None or self.found is None:
            return self.given_step_s
        return self.found.prediction.step_s

    @property
    def wear(self) -> Wear:
        return drive_wear(self.request, self.planned.memory).at(self.step_s)

    @property
    def outgrows(self) -> bool:
        """True if at the break-even activations need memory of the GPU that this placement uses."""
        request, found = self.request, self.found
        if not request.has_gpu or found is None or found.break_even_tokens is None:
            return False
        then = request.with_tokens(found.break_even_tokens).activation_bytes()
        free = self.planned.memory.budget.of(Tier.DEVICE) - self.planned.memory.used_bytes(Tier.DEVICE)
        return then - request.activation_bytes() > free
