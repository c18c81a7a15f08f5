"""A `Request` for a plan, of a folder or of a model by its name or size: units, machine, batch; and its placement.

Never prints. Calls, in order: a `Request`; `with_budgets` for a machine that is given whole. `plan_request` plans it,
`offers` plans again with more of something, and `suggestions_of` finds changes that would fit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.base.types import Durability, HardwareProfile, StateKind, Tier, format_bytes, parse_bytes
from zero_offload.checkpoint.file_list import count_reusable
from zero_offload.finetune import gpt_config as gpt
from zero_offload.finetune.fit.measure import remembered, remembered_drives
from zero_offload.hardware.device import compute_device, on_likely_gpu
from zero_offload.hardware.machines import (
    DRIVE_BYTES,
    Cluster,
    Drives,
    Machine,
    default_machine,
    gpu_memory_bytes,
    share_of_rank,
)
from zero_offload.hardware.probe import probe_hardware
from zero_offload.hardware.rates import with_measured
from zero_offload.plan.forecast import NOTICED, next_memory
from zero_offload.plan.memory import (
    PLACED_KINDS,
    MemoryPlan,
    Placement,
    UnitNumel,
    estimate_memory,
    measure_units,
    value_bytes,
)
from zero_offload.plan.partition import Partition
from zero_offload.plan.placement import AUTO_FRACTION, Outlook, Variant, assign_tiers, suggestions_to_fit, tier_budget
from zero_offload.plan.shapes import Shape, UnitWork, equal_blocks, find_shape, usual_layers
from zero_offload.plan.step_time import (
    Prediction,
    StepBatch,
    StepWorkload,
    device_activation_bytes,
    kept_bytes,
    predict,
)
from zero_offload.plan.table import ACTIVATIONS, MEMORY, NVME, PROGRAM, PlanTable, by_place
from zero_offload.plan.wear import Wear

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([MBT])", re.IGNORECASE)
_MULTIPLE = {"m": 10**6, "b": 10**9, "t": 10**12}
SEQUENCE_USUAL = 4096
RAM_SHARE, GPU_SHARE = 0.9, 0.95
"""Shares of a machine's memory that is given whole: the rest is the system's, the program's, the driver's."""
_SELDOM = 1000
"""Steps between generations, hardly any commits."""
MORE_GIB_MAX = 64
ADAPTER_SHARE = 0.01
SUGGESTIONS_MAX = 8
LOGITS_TOKENS = 1024
"""Whose logits are in memory at once, with `zo.nn.chunked_cross_entropy`."""


class GpuHere(NamedTuple):
    """The GPU that a run on this machine would compute on."""

    name: str
    """The name as torch gives it."""
    free_bytes: int


def find_gpu_here() -> GpuHere | None:
    """None where the CPU computes."""
    with on_likely_gpu():
        device = compute_device()
        free_bytes = device.free_bytes()
    return None if free_bytes is None else GpuHere(device.name, free_bytes)


def is_automatic(config: OffloadConfig, kind: StateKind) -> bool:
    """True if a kind of state goes where the plan says."""
    return isinstance(config.placement_of(kind), str)


@dataclass(frozen=True)
class Request:
    model: str
    work: tuple[UnitWork, ...]
    vocab: int
    config: OffloadConfig
    cluster: Cluster
    batch: StepBatch
    gpu: str | None
    """The GPU by its name in the plan's table."""
    gpu_here: GpuHere | None
    """This machine's, where the plan is for it."""
    drives: Drives | None
    """None where they are directories of this machine."""
    lora: int = 0
    """Rank of adapters on all linear layers; 0 trains all parameters."""
    program_bytes: int = 0
    """Of this process, beside a budget; 0 where a machine's memory is given whole, of which `RAM_SHARE` leaves room."""
    kept: tuple[UnitNumel, ...] = ()
    """The units with the states of another optimizer than AdamW, if it is another."""

    def with_budgets(self, ram: str | None) -> Request:
        """With one rank's share of a machine that is given whole; `ram` is its memory."""
        config, here = self.config, self.cluster.ranks_per_node
        if ram is not None:
            config = replace(config, cpu_memory=self._beside_activations(int(parse_bytes(ram) * RAM_SHARE) // here))
        if self.has_gpu and config.device_memory is None:
            has = self.gpu_here.free_bytes if self.gpu_here is not None else gpu_memory_bytes(self.gpu or "")
            whole = int(has * GPU_SHARE)
            activations = self.activation_bytes()
            if activations >= whole:
                stay = Tier.DEVICE in config.activation_fractions
                raise CapacityError(
                    f"activations of {self.batch.tokens * self.batch.num_together:,} tokens take "
                    f"{format_bytes(activations)} of the {format_bytes(whole)} of the {self.gpu or 'GPU'}; make "
                    "smaller micro-batches with --accumulate N --loop" + ", or add --activations-tier cpu" * stay
                )
            config = replace(config, device_memory=whole - activations)
        if self.drives is not None and config.nvme_capacity is None:
            capacity = self.drives.count * DRIVE_BYTES // here - self.kept_bytes(Tier.NVME)
            config = replace(config, nvme_capacity=max(capacity, 1))
        return replace(self, config=config)

    def _beside_activations(self, cpu_bytes: int) -> int:
        """Bytes of a rank's share of the host's memory that activations leave."""
        kept = self.activations(shared_memory=self.computes_on_host)[MEMORY]
        if kept >= cpu_bytes:
            raise CapacityError(
                f"activations of {self.batch.tokens * self.batch.num_together:,} tokens on cpu take "
                f"{format_bytes(kept)} of the {format_bytes(cpu_bytes)} of a rank; make smaller micro-batches with "
                "--accumulate N --loop, or use --activations-tier nvme"
            )
        return cpu_bytes - kept

    @property
    def has_gpu(self) -> bool:
        """True if a GPU computes that has a name or is here."""
        return self.gpu is not None or self.gpu_here is not None

    def kept_bytes(self, tier: Tier) -> int:
        """Bytes of what is saved for backward, on this tier at once."""
        return kept_bytes(self.work, self.config, self.batch, tier)

    @property
    def computes_on_host(self) -> bool:
        """True if the CPU computes: no GPU has a name or a size."""
        return not self.has_gpu and self.config.device_memory is None

    def activations(self, *, shared_memory: bool) -> dict[str, int]:
        """The most bytes of activations at once, by place; see [Note: one memory on a CPU] in plan/table.py."""
        sizes = {tier: self.kept_bytes(tier) for tier in Tier} | {Tier.DEVICE: self.activation_bytes()}
        return by_place(sizes, shared_memory=shared_memory)

    def table(self, memory: MemoryPlan) -> PlanTable:
        """The bytes of `memory` as a table, with those beside states."""
        activations = self.activations(shared_memory=memory.budget.shared_memory)
        return memory.as_table({ACTIVATIONS: activations, PROGRAM: {MEMORY: self.program_bytes}})

    def activation_bytes(self) -> int:
        """The most bytes of activations on the device, with some logits."""
        # And in fp32, and their gradient.
        logits = min(self.batch.tokens, LOGITS_TOKENS) * self.vocab * (value_bytes(self.config) + 8)
        return device_activation_bytes(self.work, self.config, self.batch) + logits

    def with_tokens(self, tokens: int) -> Request:
        """The request with `tokens` in a rank's step, in as many micro-batches."""
        each = max(tokens // self.batch.micro_batches, 1)
        return replace(self, batch=replace(self.batch, tokens=each, sequence=min(self.batch.sequence, each)))

    def with_one_more_gpu(self) -> Request:
        """The request with one more GPU in each machine, and the same memory, drives and tokens of a rank."""
        cluster = replace(self.cluster, ranks=self.cluster.ranks + self.cluster.nodes)
        shares: dict[str, Any] = {
            name: nbytes * self.cluster.ranks_per_node // cluster.ranks_per_node
            for name, tier in (("cpu_memory", Tier.CPU), ("nvme_capacity", Tier.NVME))
            if (nbytes := self.config.budget_bytes(tier)) is not None
        }
        return replace(self, cluster=cluster, config=replace(self.config, **shares))

    @property
    def partition(self) -> Partition:
        return Partition.of(self.config, self.cluster.ranks, self.cluster.num_replicas, self.cluster.ranks_per_node)

    def machine(self) -> Machine:
        """One rank's share."""
        config, cluster = self.config, self.cluster
        drives, source = (self.drives, "") if self.drives else remembered_drives(config.nvme_dirs)
        dtype_name, here = config.compute_dtype_name, cluster.ranks_per_node
        num_cores = probe_hardware().num_cores
        if self.gpu is not None:
            found = with_measured(share_of_rank(self.gpu, drives, cluster, dtype_name), self.gpu, dtype_name, here)
        elif self.gpu_here is not None:
            found = default_machine(self.gpu_here.name, num_cores, drives, cluster, dtype_name)
            found = with_measured(found, self.gpu_here.name, dtype_name, here)
        elif config.device_memory is not None:
            found = default_machine("a GPU of no name", num_cores, drives, cluster, dtype_name)
        else:
            found = remembered(config, () if self.drives else config.nvme_dirs, max(num_cores // here, 1), cluster)
            if self.drives is None:
                return found
            found = replace(found, read_bytes=drives.read_bytes / here, write_bytes=drives.write_bytes / here)
        if self.drives is not None:
            return replace(found, source=f"{found.source}; drives as given, reads and writes taking turns")
        return replace(found, source=f"{found.source}; {source}") if source else found

    def hardware(self) -> HardwareProfile:
        """This machine's share of one rank; sizes the user gives stand in for it, larger or smaller."""
        config, here = self.config, self.cluster.ranks_per_node
        directories = () if self.drives else config.nvme_dirs
        machine = count_reusable(probe_hardware(directories), directories)
        # Budgets that are given are for states; what a machine has is for activations too.
        activations = self.activations(shared_memory=self.computes_on_host)
        cpu_memory = config.budget_bytes(Tier.CPU) or max(machine.cpu_memory_bytes // here - activations[MEMORY], 1)
        nvme_bytes = max(machine.nvme_free_bytes // here - activations[NVME], 0)
        return HardwareProfile(
            num_cores=max(machine.num_cores // here, 1),
            cpu_memory_bytes=cpu_memory,
            # Without a device's size the CPU computes, in the same memory.
            device_name="cpu" if config.device_memory is None else "device",
            device_memory_bytes=config.budget_bytes(Tier.DEVICE) or cpu_memory,
            nvme_free_bytes=config.budget_bytes(Tier.NVME) or nvme_bytes,
        )


def find_work(model: str, lora: int = 0) -> tuple[tuple[UnitWork, ...], int, bool]:
    """The units of a model, its vocabulary, and whether its blocks are usually recomputed. With `lora`, a rank, the
    model is frozen, and its linear layers have adapters."""
    if model in gpt.PRESETS:
        preset = gpt.PRESETS[model]
        tied = preset.head is gpt.Head.TIED
        shape = Shape(
            preset.num_layers,
            preset.width,
            preset.num_heads,
            4 * preset.width,
            preset.vocab_size,
            matrices=2,
            tied=tied,
        )
        return shape.units(lora), preset.vocab_size, preset.recompute is gpt.RecomputeMode.BLOCK
    if match := _COUNT.fullmatch(model):
        numel = int(float(match[1]) * _MULTIPLE[match[2].lower()])
        if numel == 0:
            raise ConfigError(f"--model {model}: a model has parameters; write for example 8B")
        return equal_blocks(numel, usual_layers(numel), lora), 0, True
    shape = find_shape(model, tuple(gpt.PRESETS))
    return shape.units(lora), shape.vocab, True


@dataclass(frozen=True)
class Planned:
    """The placement of a request, and the figures that follow from it."""

    workload: StepWorkload
    """The step as it runs with this placement."""
    placement: Placement
    machine: Machine
    memory: MemoryPlan
    refused: tuple[str, ...] = ()
    """Budgets that two states of each parameter exceed, where an optimizer has others: `zo.offload` counts two."""


def plan_request(request: Request, machine: Machine | None = None) -> Planned:
    """`machine` where it is another than the request's."""
    config, partition, machine = request.config, request.partition, machine or request.machine()
    workload = StepWorkload.of(request.work, config, partition, request.batch)
    budget = tier_budget(config, request.hardware())
    placement = assign_tiers(workload.units, config, budget, partition, Outlook(workload, machine))
    workload = workload.as_run(placement.tiers, machine)
    refused = tuple[str, ...]()
    if request.kept:
        refused = estimate_memory(workload.units, placement, config, partition).reasons
        units = measure_units(request.kept, config, partition, request.batch.micro_batches)
        workload = replace(workload, units=units)
    memory = estimate_memory(workload.units, placement, config, partition)
    wear = memory.wear.of_backwards(workload.batch.num_passes)
    activations = request.kept_bytes(Tier.NVME) * request.batch.num_passes
    memory = replace(memory, wear=replace(wear, activation_bytes=activations))
    return Planned(workload, placement, machine, memory, refused)


def suggestions_of(request: Request, planned: Planned) -> list[str]:
    """Ways to make it fit, where it does not."""
    if planned.memory.fits:
        return []
    variants = list(_variants(request))
    return suggestions_to_fit(
        planned.workload.units, request.config, request.hardware(), request.partition, variants, SUGGESTIONS_MAX
    )


def _variants(request: Request) -> Iterator[Variant]:
    """Variants of the model, in fewer bytes."""
    config, partition, batch = request.config, request.partition, request.batch
    compact = replace(config.numerics, states="compact")
    if config.numerics != compact:
        smaller = replace(config, precision=compact)
        units = StepWorkload.of(request.work, smaller, partition, batch).units
        words = f"--states compact (precision=zo.Precision({compact.compute!r}, states='compact'))"
        yield Variant(words, units, smaller)
    if request.lora:
        return
    frozen = [replace(each, numel=_with_adapters(each.numel)) for each in request.work]
    words = "LoRA, parameters frozen and adapters of 1% of them trained (peft.get_peft_model, then zo.offload)"
    yield Variant(words, StepWorkload.of(frozen, config, partition, batch).units, config)


def _with_adapters(numel: UnitNumel) -> UnitNumel:
    trained = math.ceil(ADAPTER_SHARE * numel.trained)
    return replace(numel, trained=trained, frozen=numel.frozen + numel.trained, sizes=None)


def by_wear(request: Request, tbw: float, step_s: float | None) -> int | None:
    """Steps between generations that spare the drives; None where it makes no difference, or nothing fits.

    `step_s` where it is known better than by prediction.
    """
    if not request.config.nvme_dirs or request.config.effective_durability is Durability.SCRATCH:
        return None
    # The seconds of a step with hardly any commits, since few are recommended.
    planned = plan_request(replace(request, config=replace(request.config, commit_every=_SELDOM)))
    if not planned.memory.fits or planned.memory.wear.commit_bytes == 0:
        return None
    seconds = step_s or predict(planned.workload, planned.placement, planned.machine).step_s
    return drive_wear(request, planned.memory).interval(tbw, seconds)


def drive_wear(request: Request, memory: MemoryPlan) -> Wear:
    """The wear of one drive, the fastest: bytes are dealt by speed."""
    fastest = 1.0 if request.drives is None else request.drives.fastest
    return memory.wear.of_one_drive(request.cluster.ranks_per_node, max(len(request.config.nvme_dirs), 1), fastest)


@dataclass(frozen=True)
class Upgrade:
    """Something else, such as what money buys, and the step with it; None where it changes nothing."""

    title: str
    amount: int | None
    """How much of it; None of what is a choice."""
    prediction: Prediction | None


def offers(request: Request, planned: Planned, now: Prediction) -> Iterator[Upgrade]:
    """More memory, one more drive, another mesh, one more GPU: each planned anew."""
    config, here = request.config, request.cluster.ranks_per_node
    where = " in each machine" if request.cluster.nodes > 1 else ""
    if any(is_automatic(config, kind) for kind in PLACED_KINDS):
        # Of memory that has no budget "auto" leaves a part alone, and would do so with more.
        fraction = AUTO_FRACTION if config.cpu_memory is None else 1.0
        cpu_bytes = int(planned.memory.budget.cpu_bytes * fraction)

        def with_more(nbytes: int) -> Prediction | None:
            larger = replace(config, cpu_memory=cpu_bytes + nbytes // here)
            return _predict(replace(request, config=larger))

        gib, found = next_memory(now.step_s, with_more, MORE_GIB_MAX)
        yield Upgrade(f"GiB more RAM{where}", gib, found)
    if config.nvme_dirs:
        count = (request.drives or remembered_drives(config.nvme_dirs)[0]).count
        found = _predict(request, planned.machine.with_drives((count + 1) / count))
        yield Upgrade(f"more drive{where}", 1, found if found and found.step_s < now.step_s * NOTICED else None)
    cluster = request.cluster
    if cluster.nodes > 1 and config.stage > 0 and not cluster.is_hybrid:
        found = _predict(replace(request, cluster=replace(cluster, is_hybrid=True)))
        title = "states divided within each machine (--hybrid; a mesh of (replicate, shard))"
        yield Upgrade(title, None, found if found and found.step_s < now.step_s * NOTICED else None)
    if request.has_gpu:
        larger = request.with_one_more_gpu()
        found = _predict(larger)
        yield Upgrade(
            f"more GPU{where}", 1, found if found and found.tokens_per_s * NOTICED > now.tokens_per_s else None
        )


def _predict(request: Request, machine: Machine | None = None) -> Prediction | None:
    """None where it does not fit."""
    planned = plan_request(request, machine)
    return predict(planned.workload, planned.placement, planned.machine) if planned.memory.fits else None
