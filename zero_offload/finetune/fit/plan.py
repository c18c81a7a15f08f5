"""The plan of a fine-tuning run: bytes per tier and on disks, seconds, the end, what drives are written, whether it
fits, and what would.

Owns what a run of `finetune` takes beside the states that `zero_offload.plan` counts: activations, by a rehearsal; the
program; outputs. Never builds the model. The call: `plan_job` for a `FolderJob`; its `FolderPlan` has the settings
with which the run is as planned. text.py has the printed form.

[Note: what is planned is what runs]
`zo.offload` knows neither the batch nor what else takes memory, nor what was measured. So a plan places what is "auto"
within budgets that leave room for activations, the program and outputs. Where that put each kind of state is written
as fractions into the settings of the run, and the run's own dealing of units by these fractions is what is counted.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.types import GIB, MIB, Durability, HardwareProfile, StateKind, Tier, format_bytes, parse_bytes
from zero_offload.checkpoint.file_list import reusable_bytes
from zero_offload.finetune.fit.rehearsal import Rehearsal, rehearse
from zero_offload.finetune.fit.request import (
    GPU_SHARE,
    RAM_SHARE,
    Planned,
    Request,
    by_wear,
    drive_wear,
    find_gpu_here,
    plan_request,
)
from zero_offload.finetune.model.folder import Lora, ModelFolder, group_frozen_experts, meta_model
from zero_offload.finetune.model.targets import adapted, not_adapted
from zero_offload.finetune.settings import FinetuneConfig
from zero_offload.hardware.machines import DRIVE_BYTES, Cluster, Drives, Machine, find_gpu, gpu_memory_bytes
from zero_offload.hardware.probe import existing_parent, free_memory_bytes, is_remote, nvme_free_bytes, resident_bytes
from zero_offload.integrations.quantize import INT8, NF4, find_missing
from zero_offload.plan.dtypes import resolve
from zero_offload.plan.forecast import NOTICED, Bottleneck, break_even_tokens, find_bottleneck
from zero_offload.plan.layout import SectionLayout, UnitLayout, make_layout
from zero_offload.plan.memory import PLACED_KINDS, UnitNumel, measure_units, value_bytes
from zero_offload.plan.model_spec import ModelSpec, ParamSpec
from zero_offload.plan.partition import Partition
from zero_offload.plan.placement import weight
from zero_offload.plan.shapes import UnitWork, work_of
from zero_offload.plan.step_time import Batch, Prediction, kept_bytes, predict
from zero_offload.plan.table import (
    ACTIVATIONS,
    GPU,
    MEMORY,
    NVME,
    PROGRAM,
    REFERENCE,
    PlanTable,
    by_place,
    shortage,
)
from zero_offload.plan.wear import TBW_USUAL, Wear
from zero_offload.runtime.hooks import experts_in

if TYPE_CHECKING:
    from zero_offload.finetune.data.prepare import Prepared  # brings datasets and TRL

PROGRAM_BYTES = 900 * MIB
"""Host memory of a process with torch, transformers and TRL, before it has a model."""
BESIDE_BYTES = 256 * MIB
"""What is left free beside all that is counted: threads' stacks, batches, what operations take within themselves."""
_ROUNDS = 4
_INSIDE_WIDTHS = 50
"""Values of a token that a block keeps, over its width: 26 in Llama-8B, 40 in Qwen3, by rehearsals; and some more."""
_LORA = Lora(16, 32.0)
_QUANTIZED = (INT8, NF4)
"""What is tried, the least change first."""
_SEQ_LEAST = 128
_MUCH_WEAR, _FEW_DAYS = 0.05, 90
_TOKEN_FACTORS = (0.25, 0.5, 1, 2, 4, 8)
"""Micro-batches of a step, over those that were asked for."""
_MORE = "MORE"
"""Stands for a size that follows from a plan."""


@dataclass(frozen=True)
class FolderJob:
    """A run of `finetune`, on this machine or on another."""

    folder: ModelFolder
    offload: OffloadConfig
    lora: Lora | None = None
    batch: int = 4
    """Samples (with packing: sequences; with DPO: pairs) per micro-batch and rank."""
    accumulate: int = 4
    seq: int = 1024
    steps: int = 0
    """Of the whole run; 0 where it is not known."""
    rows: int = 0
    """Samples, with packing sequences, of an epoch, likewise."""
    has_own_steps: bool = False
    """True if the steps do not follow from the data."""
    ranks: int = 1
    nodes: int = 1
    method: str = "sft"
    packing: bool = True
    recompute: bool = True
    merge: bool = False
    evaluates: bool = False
    longest: int = 0
    """Tokens of the longest sample, where samples do not share sequences; 0 is `seq`."""
    mean_tokens: float = 0.0
    """Tokens of a sample on average, likewise."""
    words: tuple[str, ...] = ()
    """What the command has behind `finetune`, where it is to be printed."""
    gpu: str | None = None
    """A GPU by name, for each rank, where it is another machine."""
    ram: str | None = None
    """Memory of each machine, likewise."""
    drives: Drives | None = None
    """Drives of each machine; None where they are directories here."""
    tbw: float = TBW_USUAL

    @classmethod
    def of(cls, config: FinetuneConfig, folder: ModelFolder, prepared: Prepared | None, ranks: int) -> FolderJob:
        """Without data the number of steps may not be known, and rows are taken to be full."""
        job = cls(
            folder,
            config.offload,
            config.adapters(),
            batch=config.batch,
            accumulate=config.accumulate,
            seq=config.seq,
            steps=config.steps,
            has_own_steps=config.steps > 0,
            ranks=ranks,
            method="sft" if config.method == "auto" else config.method,
            packing=config.packing,
            recompute=config.recompute == "block",
            merge=config.merge,
            evaluates=bool(config.eval_data) or config.split > 0,
        )
        if prepared is None:
            return job
        counts, rows = prepared.counts, len(prepared.train)
        return replace(
            job,
            method=prepared.method,
            packing="seq_lengths" in prepared.train.column_names,
            steps=config.num_steps(rows, ranks),
            rows=rows,
            longest=counts.longest,
            mean_tokens=counts.tokens / counts.samples,
        )

    @property
    def is_packed(self) -> bool:
        """True if rows are full: samples share them."""
        return self.method == "sft" and self.packing

    @property
    def samples(self) -> int:
        """Of a micro-batch: a pair is two."""
        return self.batch * (2 if self.method == "dpo" else 1)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens of each, of the largest micro-batch."""
        return self.samples, self.seq if self.is_packed else min(self.longest or self.seq, self.seq)

    @property
    def mean_length(self) -> float:
        """Tokens of a sample on average."""
        return self.seq if self.is_packed else min(self.mean_tokens or self.shape[1], self.shape[1])

    @property
    def tokens(self) -> int:
        """Of a micro-batch, on average."""
        return max(round(self.samples * self.mean_length), 1)

    def shorter(self, seq: int) -> FolderJob:
        """With sequences of so many tokens; of a packed epoch there are more then."""
        more = self.seq / seq if self.is_packed else 1.0
        steps = self.steps if self.has_own_steps else math.ceil(self.steps * more)
        return replace(self, seq=seq, steps=steps, rows=math.ceil(self.rows * more))

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.tokens * self.accumulate * self.ranks

    @property
    def is_elsewhere(self) -> bool:
        return self.gpu is not None or self.ram is not None or self.drives is not None

    def micro_batch(self) -> Batch:
        # Samples that share a row are told apart by a mask: attention computes all of it.
        sequence, has_reference = max(round(self.mean_length), 1), self.method == "dpo"
        return Batch(self.tokens, self.accumulate, sequence, self.recompute, has_reference=has_reference)


@dataclass(frozen=True)
class Place:
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
class Way:
    """Other flags, with which the run fits."""

    flags: tuple[str, ...]
    plan: FolderPlan


@dataclass(frozen=True)
class _FolderRequest(Request):
    """A request for a machine on which `device_memory` bounds units in flight, if the CPU computes."""

    @property
    def device_name(self) -> str:
        return self.gpu or (self.gpu_here.name if self.gpu_here is not None else "cpu")

    def machine(self) -> Machine:
        if self.has_gpu:
            return super().machine()
        # To a CPU `device_memory` is a bound on units in flight.
        return Request.machine(replace(self, config=replace(self.config, device_memory=None)))

    def hardware(self) -> HardwareProfile:
        found = super().hardware()
        memory = found.device_memory_bytes if self.has_gpu else found.cpu_memory_bytes
        return replace(found, device_name=self.device_name, device_memory_bytes=memory)


@dataclass(frozen=True)
class FolderPlan:
    """What a job takes."""

    job: FolderJob
    offload: OffloadConfig
    """The settings that the run is planned with: budgets leave room for what is not states."""
    planned: Planned
    prediction: Prediction
    bottleneck: Bottleneck
    wear: Wear
    """Of one drive."""
    num_drives: int
    activations: dict[Tier, int]
    """The most at once, of one rank."""
    places: tuple[Place, ...]
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
    one_more_drive: Prediction | None
    """The step with one more drive of the same speed; None where it is as long, or no drive is used."""
    hidden_tokens: int | None
    """Tokens of a micro-batch from which on a step is as long as without offload; None if 2^24 are too few."""
    adapted: tuple[str, ...]
    """What has adapters, by the ends of names; empty without adapters."""
    not_adapted: tuple[str, ...]
    """Linear layers that have none, likewise."""
    notes: tuple[str, ...] = ()
    """Parts of the folder's config that were not understood, and are guessed."""
    ways: tuple[Way, ...] = ()
    """Where it does not fit."""
    by_tokens: tuple[FolderPlan, ...] = ()
    """With fewer and with more micro-batches in a step, those that fit; this one is among them."""

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
        return tuple(found)

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
        """What the run writes to a drive, as a part of what it is rated for; None where its steps are not known."""
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


def plan_job(job: FolderJob, out: Path | None, *, tries: bool = True, tokens: bool = False) -> FolderPlan:
    """Plan a run that writes its outputs to `out`; None where that is not known yet. No weights are read.

    With `tries` a plan that does not fit, or that wears drives out, has `ways`; with `tokens` one that fits has
    `by_tokens`. Raises what `zo.plan` raises for a model that cannot be offloaded.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that PEFT and Trainer use
        known = _Known(job.folder)
        plan = _Planner(job, out, known).plan()
        if tries and (not plan.fits or plan.wears_out):
            ways = (way for way in _ways(job, out, known) if not plan.fits or way.plan.spares(plan))
            plan = replace(plan, ways=tuple(ways))
        if tokens and plan.fits:
            plan = replace(plan, by_tokens=tuple(_by_tokens(plan, out, known)))
    return plan


class _Planner:
    def __init__(self, job: FolderJob, out: Path | None, known: _Known) -> None:
        self._job, self._out = job, out
        config = job.offload
        work = known.work(job, Partition.of(config, job.ranks).optimizer_shards)
        self._adapted, self._notes = known.adapted[job.lora, job.folder.quantize], known.notes
        self._rehearsal = known.rehearsal(job)
        self._work = _with_saved(work, self._rehearsal, value_bytes(config), recompute=job.recompute)
        self._here = Cluster(job.ranks, job.nodes).ranks_per_node
        self._gpu_here = None if job.gpu is not None else find_gpu_here()

    def plan(self) -> FolderPlan:
        limits = self._budgets(self._job.offload)
        drives: dict[str, Any] = {kind.value: Tier.NVME.value for kind in PLACED_KINDS if _is_automatic(limits, kind)}
        if not drives:
            return self._plan_with(limits)
        # All of it on drives takes the least memory: what does not fit then never does.
        least = self._plan_with(replace(limits, **drives)) if limits.nvme_dirs else None
        if least is not None and not least.fits:
            return least
        best = self._plan_with(self._without_automatic(limits))
        return best if best.fits or least is None else least

    def _without_automatic(self, limits: OffloadConfig) -> OffloadConfig:
        """With tiers chosen within these budgets."""
        budgets = config = limits
        for _ in range(_ROUNDS):
            config = self._with_fractions(budgets)
            smaller = self._without_excess(budgets, limits, plan_request(self._request(config)))
            if smaller is None:
                break
            budgets = smaller
        given: dict[str, Any] = {name: getattr(limits, name) for name in ("device_memory", "cpu_memory")}
        return replace(config, **given)

    def _plan_with(self, config: OffloadConfig) -> FolderPlan:
        """With tiers that are all given."""
        job = self._job
        chosen = by_wear(self._request(config), job.tbw, None) if config.commit_every == "auto" else None
        config = config if chosen is None else replace(config, commit_every=chosen)
        planned = plan_request(self._request(config))
        request = self._request(config)
        prediction = predict(planned.job, planned.placement, planned.machine)
        wear = drive_wear(request, planned.memory).at(prediction.step_s)
        return FolderPlan(
            job,
            config,
            planned,
            prediction,
            find_bottleneck(planned.job, planned.placement, planned.machine, prediction.step_s),
            wear,
            self._num_drives,
            self._activations,
            self._places(planned),
            self._program_bytes,
            self._host_bytes,
            self._device_bytes,
            self._once_bytes(planned),
            chosen,
            self._rehearsal.problem,
            self._reference_bytes,
            self._with_one_more_drive(planned, prediction) if config.nvme_dirs else None,
            self._hidden_tokens(planned),
            *self._adapted,
            self._notes,
        )

    def _with_one_more_drive(self, planned: Planned, now: Prediction) -> Prediction | None:
        machine = planned.machine.with_drives((self._num_drives + 1) / self._num_drives)
        found = predict(planned.job, planned.placement, machine)
        return found if found.step_s < now.step_s * NOTICED else None

    def _hidden_tokens(self, planned: Planned) -> int | None:
        found = break_even_tokens(planned.job, planned.placement, planned.machine)
        return None if found is None else math.ceil(found / planned.job.batch.micro_batches)

    def _request(self, config: OffloadConfig) -> _FolderRequest:
        job = self._job
        name = job.folder.path.name or str(job.folder.path)
        gpu = None if job.gpu is None else find_gpu(job.gpu)[0]
        cluster = Cluster(job.ranks, job.nodes)
        return _FolderRequest(name, self._work, 0, config, cluster, job.micro_batch(), gpu, self._gpu_here, job.drives)

    def _with_fractions(self, config: OffloadConfig) -> OffloadConfig:
        """With the tiers, in place of "auto", on which a kind of state is best."""
        automatic = [kind for kind in PLACED_KINDS if _is_automatic(config, kind)]
        tiers = plan_request(self._request(config)).placement.tiers
        # Weights are those by which the run deals.
        units = measure_units([each.numel for each in self._work], config, Partition.of(config, self._job.ranks))
        changes: dict[str, Any] = {}
        for kind in automatic:
            sums = dict.fromkeys(Tier, 0)
            for unit, at in zip(units, tiers, strict=True):
                sums[at[kind]] += weight(unit, kind)
            # Rounded up: trained parts are to fit into the share of the fastest tier.
            whole = sum(sums.values()) or 1
            shares = {tier.value: math.ceil(1e4 * nbytes / whole) / 1e4 for tier, nbytes in sums.items()}
            largest = max(shares, key=lambda name: shares[name])
            shares[largest] = 1.0 - sum(share for name, share in shares.items() if name != largest)
            parts = {name: share for name, share in shares.items() if share}
            changes[kind.value] = largest if len(parts) == 1 else parts
        return replace(config, **changes)

    def _without_excess(self, budgets: OffloadConfig, limits: OffloadConfig, planned: Planned) -> OffloadConfig | None:
        """Budgets less what states take beyond `limits`; None where they take no more, or nothing would be left."""
        memory, smaller = planned.memory, dict[str, Any]()
        used = {tier: memory.used_bytes(tier) for tier in (Tier.DEVICE, Tier.CPU)}
        if not self._device_bytes:
            used = {Tier.CPU: sum(used.values())}
        for tier, name in ((Tier.DEVICE, "device_memory"), (Tier.CPU, "cpu_memory")):
            over = used.get(tier, 0) - (limits.budget_bytes(tier) or used.get(tier, 0))
            if over > 0:
                smaller[name] = (budgets.budget_bytes(tier) or 0) - over
        return replace(budgets, **smaller) if smaller and min(smaller.values()) > 0 else None

    # Budgets

    @functools.cached_property
    def _program_bytes(self) -> int:
        return max(resident_bytes()[0], PROGRAM_BYTES)

    @functools.cached_property
    def _host_bytes(self) -> int:
        """What a rank may take of the host's memory, the program included."""
        if self._job.ram is not None:
            return int(parse_bytes(self._job.ram) * RAM_SHARE) // self._here
        return free_memory_bytes() // self._here + resident_bytes()[1]

    @functools.cached_property
    def _device_bytes(self) -> int:
        if self._job.gpu is not None:
            return int(gpu_memory_bytes(self._job.gpu) * GPU_SHARE)
        return 0 if self._gpu_here is None else int(self._gpu_here.free_bytes * GPU_SHARE)

    @functools.cached_property
    def _activations(self) -> dict[Tier, int]:
        config, batch = self._job.offload, self._job.micro_batch()
        largest = replace(batch, tokens=math.prod(self._job.shape))
        # A rehearsal has no groups: without recompute it keeps more of experts.
        kept = sum(work.saved_values(True) for work in self._work if work.in_groups) * batch.recompute
        peak = self._rehearsal.peak_bytes + largest.tokens * kept * value_bytes(config)
        away = {tier: kept_bytes(self._work, config, largest, tier) for tier in (Tier.CPU, Tier.NVME)}
        if not self._device_bytes:
            away[Tier.CPU] = 0  # the same memory
        return {**away, Tier.DEVICE: max(peak - sum(away.values()), 0)}

    def _budgets(self, config: OffloadConfig) -> OffloadConfig:
        activations, reference = self._activations, self._reference_bytes
        beside = self._program_bytes + BESIDE_BYTES + activations[Tier.CPU] + reference[Tier.CPU]
        if not self._device_bytes:
            beside += activations[Tier.DEVICE] + reference[Tier.DEVICE]
        limits = {"cpu_memory": (Tier.CPU, self._host_bytes - beside)}
        if self._device_bytes:
            limits["device_memory"] = (
                Tier.DEVICE,
                self._device_bytes - activations[Tier.DEVICE] - reference[Tier.DEVICE],
            )
        if config.nvme_dirs:
            limits["nvme_capacity"] = (Tier.NVME, self._swap_bytes // self._here - activations[Tier.NVME])
        given = {name: config.budget_bytes(tier) for name, (tier, _) in limits.items()}
        budgets: dict[str, Any] = {name: max(min(given[name] or most, most), 1) for name, (_, most) in limits.items()}
        return replace(config, **budgets)

    # The reference of DPO

    @functools.cached_property
    def _reference(self) -> OffloadConfig | None:
        job, config = self._job, self._job.offload
        if job.method != "dpo" or job.lora is not None or job.folder.adapter is not None:
            return None
        in_memory: dict[str, Any] = {"grads": "cpu", "optimizer": "cpu", "device_memory": None, "cpu_memory": None}
        params = "nvme" if config.nvme_dirs else "cpu"
        return replace(config, params=params, durability="scratch", commit_every=1, nvme_capacity=None, **in_memory)

    @functools.cached_property
    def _reference_bytes(self) -> dict[Tier, int]:
        """Memory that the reference takes."""
        config = self._reference
        if config is None:
            return dict.fromkeys(Tier, 0)
        frozen = tuple(
            replace(unit, numel=UnitNumel(unit.numel.name, 0, unit.numel.trained + unit.numel.frozen))
            for unit in self._work
        )
        memory = plan_request(replace(self._request(config), work=frozen)).memory
        return {tier: memory.used_bytes(tier) for tier in Tier}

    # Disks

    @property
    def _num_drives(self) -> int:
        drives = self._job.drives
        return drives.count if drives is not None else max(len(self._job.offload.nvme_dirs), 1)

    @functools.cached_property
    def _outputs(self) -> dict[str, int]:
        """Bytes of what the run writes beside its swap files."""
        job, nbytes = self._job, value_bytes(self._job.offload)
        trained = sum(each.numel.trained for each in self._work)
        whole = sum(each.numel.trained + each.numel.frozen for each in self._work)
        is_adapter = job.lora is not None or job.folder.adapter is not None
        found = {"adapter" if is_adapter else "model": (trained if is_adapter else whole) * nbytes}
        if job.evaluates:
            found["best evaluation"] = next(iter(found.values()))
        if job.merge:
            found["merged model"] = whole * nbytes
            found["merging"] = whole * nbytes
        if self._reference is not None:
            found["reference"] = self._reference_bytes[Tier.NVME]
        return found

    @functools.cached_property
    def _swap_bytes(self) -> int:
        """What swap files may take of the directories' disks, which outputs may share."""
        paths, outputs = self._job.offload.nvme_dirs, sum(self._outputs.values())
        if self._job.drives is not None:
            return self._job.drives.count * DRIVE_BYTES - outputs
        shares = {_device(path) for path in paths}
        is_shared = self._out is None or _device(self._out) in shares
        return nvme_free_bytes(paths) + reusable_bytes(paths) - outputs * is_shared

    def _places(self, planned: Planned) -> tuple[Place, ...]:
        job, swap = self._job, planned.memory.used_bytes(Tier.NVME) * self._here
        kept = self._activations[Tier.NVME] * self._here
        if job.drives is not None:
            needed = {"swap files": swap, "activations": kept, **self._outputs}
            return (Place("drives", needed, job.drives.count * DRIVE_BYTES),)
        places: dict[int, Place] = {}

        def add(path: Path, what: dict[str, int], reusable: int = 0) -> None:
            key = _device(path)
            known = places.get(key) or Place(f"disk of {path}", {}, nvme_free_bytes([path]))
            sums = {name: known.needed.get(name, 0) + what.get(name, 0) for name in (*known.needed, *what)}
            places[key] = replace(known, needed=sums, free_bytes=known.free_bytes + reusable)

        dirs = job.offload.nvme_dirs
        for index, path in enumerate(dirs):
            parts = {"swap files": swap // len(dirs), "activations": kept // len(dirs)}
            add(path, parts, reusable_bytes(dirs) if index == 0 else 0)
        add(self._out or (dirs[0] if dirs else Path()), self._outputs)
        return tuple(places.values())

    def _once_bytes(self, planned: Planned) -> int:
        found = sum(self._outputs.values())
        keeps_generations = self._job.offload.effective_durability is not Durability.SCRATCH
        for unit, at in zip(planned.job.units, planned.placement.tiers, strict=True):
            if at[StateKind.OPTIMIZER] is Tier.NVME:
                found += unit.optimizer_bytes * self._here
            if at[StateKind.PARAMS] is Tier.NVME or keeps_generations:
                found += (unit.frozen_bytes - unit.base_bytes) * self._here
        return found


def _is_automatic(config: OffloadConfig, kind: StateKind) -> bool:
    """True if it goes where the plan says."""
    return isinstance(config.placement_of(kind), str)


def _device(path: Path) -> int:
    return existing_parent(path).stat().st_dev


# What is made once for a model


class _Known:
    """What is made once for a folder, and used by plans with other settings."""

    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder
        self._work: dict[object, tuple[UnitWork, ...]] = {}
        self._rehearsals: dict[object, Rehearsal] = {}
        self.adapted: dict[object, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        """By adapter and quantization, what has adapters and what has none."""
        self.notes: tuple[str, ...] = ()
        """Parts of the folder's config that were not understood."""

    def work(self, job: FolderJob, shards: int) -> tuple[UnitWork, ...]:
        """Of each unit, as `zo.offload` finds it."""
        folder, config = job.folder, job.offload
        key = (job.lora, folder.quantize, folder.group_size, str(config.numerics), shards)
        if key not in self._work:
            model = meta_model(folder, job.lora, getattr(torch, config.compute_dtype_name))
            group_frozen_experts(model, folder)
            self.adapted[job.lora, folder.quantize] = adapted(model), not_adapted(model)
            spec = ModelSpec.from_module(model, experts=experts_in(model))
            layout = make_layout(spec, resolve(model, config), shards)
            found = work_of(model, spec)
            self.notes = found.notes
            self._work[key] = tuple(
                replace(each, numel=self._numel(each, unit, spec.in_use_with(index)))
                for index, (each, unit) in enumerate(zip(found.units, layout.units, strict=True))
            )
        return self._work[key]

    def _numel(self, work: UnitWork, unit: UnitLayout, in_use_with: tuple[tuple[int, ...], ...]) -> UnitNumel:
        """Bytes of a unit as it is laid out, and elements of the weights that quantized ones stand for."""
        frozen = [section for section in unit.sections if not section.trainable]
        in_base = {section.index for section in frozen if self._is_in_files(section)}
        return replace(UnitNumel.of(unit, in_use_with, in_base), frozen=work.numel.frozen)

    def _is_in_files(self, section: SectionLayout) -> bool:
        """True if the folder's files have a frozen section as it is used."""

        def is_stored(spec: ParamSpec) -> bool:
            if spec.keeps_dtype:  # an offset is in the files' words on its weight, and no tensor of theirs
                return self._folder.quantization is not None and not spec.name.endswith("offset")
            return section.dtype == self._stored

        return self._stored is not None and all(is_stored(piece.spec) for piece in section.params)

    @functools.cached_property
    def _stored(self) -> torch.dtype | None:
        """The dtype of the folder's files, as its config says, if they are on a drive that is read each time."""
        dtype = getattr(self._folder.config, "dtype", None)
        return dtype if isinstance(dtype, torch.dtype) and not is_remote(self._folder.path) else None

    def rehearsal(self, job: FolderJob) -> Rehearsal:
        dtype, (rows, seq) = getattr(torch, job.offload.compute_dtype_name), job.shape
        few = min(rows, max(_TOKENS_MAX // seq, 1))
        key = (job.lora, job.folder.quantize, dtype, rows, seq, job.recompute)
        if key not in self._rehearsals:
            try:
                found = rehearse(job.folder, job.lora, dtype, few, seq, recompute=job.recompute).of_rows(rows)
            except ZeroOffloadError:
                raise
            except Exception as error:  # of any model's code: some asks for values, which there are none of
                found = _by_arithmetic(self.work(job, 1), job, type(error).__name__)
            self._rehearsals[key] = found
        return self._rehearsals[key]


_TOKENS_MAX = 1 << 17
"""Of a rehearsal: the loss takes some time for each thousand. More rows take as much more memory."""


def _by_arithmetic(work: Sequence[UnitWork], job: FolderJob, problem: str) -> Rehearsal:
    """As much as models are known to keep at most, without experts."""
    rows, seq = job.shape
    nbytes = rows * seq * value_bytes(job.offload)
    inside = {unit.numel.name: _INSIDE_WIDTHS * unit.boundary_values * nbytes for unit in work}
    kept = {
        unit.numel.name: unit.boundary_values * nbytes if unit.keeps_inputs(job.recompute) else inside[unit.numel.name]
        for unit in work
    }
    tables = max((unit.numel.trained + unit.numel.frozen for unit in work if not unit.attention_width), default=0)
    return Rehearsal(rows, seq, sum(kept.values()) + max(inside.values()) + 8 * tables, {**kept, "": 0}, problem)


def _with_saved(
    work: Sequence[UnitWork], rehearsal: Rehearsal, nbytes: int, *, recompute: bool
) -> tuple[UnitWork, ...]:
    """With what the rehearsal has saved for backward; what no unit has is the last one's."""
    tokens = rehearsal.rows * rehearsal.seq * nbytes
    found = []
    for index, unit in enumerate(work):
        saved = rehearsal.saved_bytes.get(unit.numel.name, 0) + rehearsal.saved_bytes[""] * (index == len(work) - 1)
        values = -(-saved // tokens)
        if unit.keeps_inputs(recompute):
            found.append(replace(unit, boundary_values=values))
        else:
            found.append(unit if unit.in_groups else replace(unit, inside_values=values))
    return tuple(found)


# What would fit


@dataclass(frozen=True)
class _Change:
    """Other settings of a job and of its `offload`, and the flags that give them."""

    flags: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    offload: dict[str, Any] = field(default_factory=dict)

    def __add__(self, other: _Change) -> _Change:
        return _Change(self.flags + other.flags, {**self.settings, **other.settings}, {**self.offload, **other.offload})

    def of(self, job: FolderJob) -> FolderJob:
        return replace(job, **self.settings, offload=replace(job.offload, **self.offload))


def _ways(job: FolderJob, out: Path | None, known: _Known) -> Iterator[Way]:
    """Other settings under which the run fits, each as near to what was asked as it can be."""
    for changes in _changes(job):
        tried = ((change.flags, _first_that_fits(change.of(job), out, known)) for change in changes)
        if (found := next(((flags, *fitting) for flags, fitting in tried if fitting is not None), None)) is not None:
            flags, smaller, plan = found
            states = f"{-(-plan.states_bytes // GIB)}GiB"
            yield Way((*(states if word == _MORE else word for word in flags), *smaller), plan)


def _changes(job: FolderJob) -> Iterator[list[_Change]]:
    """Kinds of change, the least first. Of a kind the first that makes the run fit is taken."""
    config, folder = job.offload, job.folder
    is_adapter = job.lora is not None or folder.adapter is not None
    tiers = _automatic_tiers(config)

    def also_with_tiers(change: _Change) -> list[_Change]:
        return [change, tiers + change] if tiers.flags else [change]

    yield [_Change()]
    if tiers.flags:
        yield [tiers]
    if config.cpu_memory is not None:
        yield [_Change(("--cpu-memory", _MORE), offload={"cpu_memory": None})]
    if folder.has_experts and folder.group_size != 1 and is_adapter:
        yield [_Change(("--group-size", "1"), {"folder": replace(folder, group_size=1)})]
    activations = "cpu" if job.gpu is not None or find_gpu_here() is not None else "nvme"
    if set(config.activation_fractions) == {Tier.DEVICE} and (activations == "cpu" or config.nvme_dirs):
        yield [_Change(("--activations-tier", activations), offload={"activations": activations})]
    compact = replace(config.numerics, states="compact")
    if config.numerics != compact:
        yield also_with_tiers(_Change(("--states", "compact"), offload={"precision": compact}))
    lora = _Change() if is_adapter else _Change(("--lora", str(_LORA.rank)), {"lora": _LORA})
    kinds = () if folder.is_quantized or find_missing(NF4) else _QUANTIZED
    quantized = [_Change(("--quantize", kind), {"folder": replace(folder, quantize=kind)}) for kind in kinds]
    # Quantized where adapters alone do not fit.
    if less := [*([] if is_adapter else also_with_tiers(lora)), *(lora + each for each in quantized)]:
        yield less


def _automatic_tiers(config: OffloadConfig) -> _Change:
    """The tiers that were given are left to the plan. No change without drives: none is better then."""
    given = [kind.value for kind in PLACED_KINDS if not _is_automatic(config, kind)] if config.nvme_dirs else []
    flags = tuple(word for kind in given for word in (f"--{kind}-tier", "auto"))
    return _Change(flags, offload=dict.fromkeys(given, "auto"))


def _first_that_fits(job: FolderJob, out: Path | None, known: _Known) -> tuple[tuple[str, ...], FolderPlan] | None:
    """The job itself, or with a smaller batch in more micro-batches, or with shorter sequences."""
    flags: dict[str, str] = {}
    while True:
        plan = _Planner(job, out, known).plan()
        if plan.fits:
            return tuple(word for pair in flags.items() for word in pair), plan
        tokens, share = math.prod(job.shape), plan.activations_share
        if not 0 < share < 1:
            return None
        # Activations of half the tokens take half the bytes at least: what cannot fit is passed over.
        while math.prod(job.shape) == tokens or math.prod(job.shape) > tokens * share:
            if job.batch > 1:
                job = replace(job, batch=job.batch // 2, accumulate=job.accumulate * 2)
                flags |= {"--batch": str(job.batch), "--accumulate": str(job.accumulate)}
            elif job.seq > _SEQ_LEAST:
                job = job.shorter(max(job.seq // 2, _SEQ_LEAST))
                flags |= {"--seq": str(job.seq)}
            else:
                return None


def _by_tokens(plan: FolderPlan, out: Path | None, known: _Known) -> Iterator[FolderPlan]:
    """In each step so many times as many tokens, over the same data."""
    job = plan.job
    for factor in _TOKEN_FACTORS:
        accumulate = round(job.accumulate * factor)
        if factor == 1:
            yield plan
        elif accumulate >= 1 and accumulate == job.accumulate * factor:
            steps = math.ceil(job.steps / factor)
            found = _Planner(replace(job, accumulate=accumulate, steps=steps), out, known).plan()
            if found.fits:
                yield found
