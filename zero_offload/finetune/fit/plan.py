"""How a run of `finetune` is planned: bytes of each memory and disk, seconds, what drives are written, what would fit.

Owns what a run takes beside the states that `zero_offload.plan` counts: activations, by a rehearsal; the program;
outputs. Never builds the model. The call: `plan_job` for a `FolderJob`; its `FolderPlan` has the settings with which
the run is as planned.

[Note: what is planned is what runs]
`zo.offload` knows neither the batch nor what else takes memory, nor what was measured. So a plan places what is "auto"
within budgets that leave room for activations, the program and outputs. The resulting shares of each kind of state are
written as fractions into the settings of the run. The run deals units by these fractions, and this dealing is counted.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zero_offload.base.config import OffloadConfig
from zero_offload.base.types import MIB, Durability, HardwareProfile, StateKind, Tier, parse_bytes
from zero_offload.checkpoint.file_list import reusable_bytes
from zero_offload.finetune.choices import LiveChoice
from zero_offload.finetune.fit.alternatives import by_tokens, find_alternatives
from zero_offload.finetune.fit.figures import BESIDE_BYTES, FileSystemNeed, FolderPlan
from zero_offload.finetune.fit.job import FolderJob
from zero_offload.finetune.fit.request import (
    GPU_SHARE,
    RAM_SHARE,
    Planned,
    Request,
    by_wear,
    drive_wear,
    find_gpu_here,
    is_automatic,
    plan_request,
)
from zero_offload.finetune.fit.work import FolderWork, with_saved
from zero_offload.hardware.machines import DRIVE_BYTES, Machine, find_gpu, gpu_memory_bytes
from zero_offload.hardware.probe import existing_parent, free_memory_bytes, nvme_free_bytes, resident_bytes
from zero_offload.plan.memory import PLACED_KINDS, UnitNumel, measure_units, value_bytes, walk_notes
from zero_offload.plan.partition import Partition
from zero_offload.plan.placement import weight
from zero_offload.plan.step_time import kept_bytes, predict
from zero_offload.plan.turns import most_live

PROGRAM_BYTES = 900 * MIB
"""Host memory of a process with torch, transformers and TRL, before it has a model."""
_ROUNDS = 4


def plan_job(job: FolderJob, out: Path | None, *, tries: bool = True, tokens: bool = False) -> FolderPlan:
    """Plan a run that writes its outputs to `out`; None where that is not known yet. No weights are read.

    With `tries` a plan that does not fit, or that wears drives out, has `alternatives`; with `tokens` a plan that fits
    has `by_tokens`. Raises what `zo.plan` raises for a model that cannot be offloaded.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that PEFT and Trainer use
        model = FolderWork(job.folder)
        plan_of = functools.partial(_plan, out=out, model=model)
        plan = plan_of(job) if job.live is None else _plan_in_turns(job, job.live, out, model)
        # Its job says how many blocks live.
        if tries and (not plan.fits or plan.wears_out):
            found = (each for each in find_alternatives(plan.job, plan_of) if not plan.fits or each.plan.spares(plan))
            plan = replace(plan, alternatives=tuple(found))
        if tokens and plan.fits:
            plan = replace(plan, by_tokens=tuple(by_tokens(plan, plan_of)))
    return plan


def _plan(job: FolderJob, *, out: Path | None, model: FolderWork) -> FolderPlan:
    return Planner(job, out, model).plan()


def _plan_in_turns(job: FolderJob, live: LiveChoice, out: Path | None, model: FolderWork) -> FolderPlan:
    """With as many blocks alive as are asked for, or as fit; and the largest number that fits."""

    def planner(num_live: int) -> Planner:
        return Planner(replace(job, live=replace(live, num_live=num_live)), out, model)

    num_blocks = len(model.blocks(job))
    most = most_live(num_blocks, lambda num_live: planner(num_live).fits_in_turns())
    given = live.num_live if isinstance(live.num_live, int) else max(most, 1)
    return replace(planner(given).plan(), turns=replace(live, num_live=given).of(num_blocks), most_live=most)


@dataclass(frozen=True)
class FolderRequest(Request):
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


class Planner:
    """Plans one job of a folder."""

    def __init__(self, job: FolderJob, out: Path | None, model: FolderWork) -> None:
        self._job, self._out = job, out
        config = job.offload
        work = model.work(job, Partition.of(config, job.ranks).optimizer_shards)
        self._adapted, self._notes = model.adapted[job.lora, job.folder.quantize], model.notes
        self._drawn = model.drawn
        self._rehearsal = model.rehearsal(job)
        self._kept = model.kept(job, Partition.of(config, job.ranks).optimizer_shards)
        self._work = with_saved(work, self._rehearsal, value_bytes(config), recompute=job.recompute)
        self._here = job.cluster.ranks_per_node
        self._gpu_here = None if job.gpu is not None else find_gpu_here()

    def plan(self) -> FolderPlan:
        limits = self._budgets(self._job.offload)
        if self._job.live is None:
            return self._plan_within(limits)
        found = [self._plan_within(each) for each in self._in_turns(limits)]
        return min(found, key=lambda plan: (not plan.fits, plan.step_s if plan.fits else sum(plan.used.values())))

    def fits_in_turns(self) -> bool:
        """True if a run whose blocks take turns fits on some tiers."""
        settings = list(self._in_turns(self._budgets(self._job.offload)))
        return any(self._plan_within(each).fits for each in reversed(settings))  # drives first

    def _in_turns(self, limits: OffloadConfig) -> Iterator[OffloadConfig]:
        """The tiers that a run may have whose blocks take turns. It deals shares of gradients and states by what is
        trained as it begins, so each kind has one tier."""
        kinds: list[str] = [kind.value for kind in (StateKind.GRADS, StateKind.OPTIMIZER) if is_automatic(limits, kind)]
        tiers: list[Any] = ["device"] * bool(self._device_bytes) + ["cpu"] + ["nvme"] * bool(limits.nvme_dirs)
        chosen = itertools.combinations_with_replacement(tiers, len(kinds))
        for each in chosen:
            yield replace(limits, **dict(zip(kinds, each, strict=True)))

    def _plan_within(self, limits: OffloadConfig) -> FolderPlan:
        drives: dict[str, Any] = {kind.value: Tier.NVME.value for kind in PLACED_KINDS if is_automatic(limits, kind)}
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
        prediction = predict(planned.workload, planned.placement, planned.machine)
        wear = drive_wear(request, planned.memory).at(prediction.step_s)
        return FolderPlan(
            job,
            config,
            planned,
            prediction,
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
            *self._adapted,
            (*self._notes, *walk_notes(planned.workload.units, planned.placement)),
            self._drawn,
        )

    def _request(self, config: OffloadConfig) -> FolderRequest:
        job = self._job
        name = job.folder.path.name or str(job.folder.path)
        gpu = None if job.gpu is None else find_gpu(job.gpu)[0]
        return FolderRequest(
            name,
            self._work,
            0,
            config,
            job.cluster,
            job.micro_batch(),
            gpu,
            self._gpu_here,
            job.drives,
            kept=self._kept,
        )

    def _with_fractions(self, config: OffloadConfig) -> OffloadConfig:
        """With the tiers, in place of "auto", on which a kind of state is best."""
        automatic = [kind for kind in PLACED_KINDS if is_automatic(config, kind)]
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
        """Bytes that a rank may take of the host's memory, the program included."""
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
        return replace(
            config, params=params, durability="scratch", commit_every=1, publish=None, nvme_capacity=None, **in_memory
        )

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
        memory = plan_request(replace(self._request(config), work=frozen, kept=())).memory
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
        """Bytes that swap files may take of the directories' disks, which outputs may share."""
        paths, outputs = self._job.offload.nvme_dirs, sum(self._outputs.values())
        if self._job.drives is not None:
            return self._job.drives.count * DRIVE_BYTES - outputs
        shares = {_device(path) for path in paths}
        is_shared = self._out is None or _device(self._out) in shares
        return nvme_free_bytes(paths) + reusable_bytes(paths) - outputs * is_shared

    def _places(self, planned: Planned) -> tuple[FileSystemNeed, ...]:
        job, swap = self._job, planned.memory.used_bytes(Tier.NVME) * self._here
        kept = self._activations[Tier.NVME] * self._here
        if job.drives is not None:
            needed = {"swap files": swap, "activations": kept, **self._outputs}
            return (FileSystemNeed("drives", needed, job.drives.count * DRIVE_BYTES),)
        places: dict[int, FileSystemNeed] = {}

        def add(path: Path, what: dict[str, int], reusable: int = 0) -> None:
            key = _device(path)
            known = places.get(key) or FileSystemNeed(f"disk of {path}", {}, nvme_free_bytes([path]))
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
        for unit, at in zip(planned.workload.units, planned.placement.tiers, strict=True):
            if at[StateKind.OPTIMIZER] is Tier.NVME:
                found += unit.optimizer_bytes * self._here
            if at[StateKind.PARAMS] is Tier.NVME or keeps_generations:
                found += (unit.frozen_bytes - unit.base_bytes) * self._here
        return found


def _device(path: Path) -> int:
    return existing_parent(path).stat().st_dev
