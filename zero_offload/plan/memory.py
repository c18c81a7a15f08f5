"""The cost of a placement: bytes per tier and kind of state, buffers in flight, and SSD wear per step.

Pure arithmetic: it never measures a machine and never chooses a tier (`placement` does). The calls: `UnitNumel.of` and
`measure_units` for what one rank holds of each unit; `estimate_memory` adds that up for a `Placement`, and says whether
it fits its `Budget`.

Bytes per trained parameter (frozen ones have the value only):

    compute  value  residual  master  exp_avg  exp_avg_sq  optimizer extents  gradient held
    bf16       2        2        -       4         4              12          2, or 4 if several are summed
    fp16       2        -        4       4         4              14          2, or 4 if several are summed
    fp32       4        -        -       4         4              12          4

With overlap="backward" no gradients are held, unless several backwards are added up: `GRAD_RING_UNITS` units' pass.

With `Precision(states="bf16")` exp_avg and exp_avg_sq are 2 each; with "compact" 1 1/64 each, and the residual is 1.

Parameters that `Precision.modules` keeps in another dtype count by that one's row.

Optimizer extents are self-contained, value included, so that a generation never needs the params tier. Where params and
optimizer both rest in the same memory, that value is the parameter itself, or a part of it. A unit that a GPU updates
in its own memory has its value there too, whatever the params tier. With one shard forward uses it in place. Parameters
on a GPU that it does not update are copies of values in the host's memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from zero_offload.base.config import OffloadConfig
from zero_offload.base.types import (
    FRAME,
    Durability,
    HardwareProfile,
    StateFormat,
    StateKind,
    Tier,
    UpdateOverlap,
    format_bytes,
)
from zero_offload.hardware.abi import STATE_BLOCK
from zero_offload.plan.expert_groups import GROUPS_IN_FLIGHT, group_bytes
from zero_offload.plan.layout import CHUNK_NUMEL, SectionLayout, ShardLayout, UnitLayout
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.plan.partition import ONE_RANK, Partition
from zero_offload.plan.table import (
    GENERATIONS,
    IN_FLIGHT,
    MEMORY,
    NVME,
    STATE_ROWS,
    PlanTable,
    Row,
    by_place,
    place_of,
    shortage,
)
from zero_offload.plan.wear import Wear

PLACED_KINDS = (StateKind.PARAMS, StateKind.GRADS, StateKind.OPTIMIZER)
_VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MASTER_BYTES = {"bfloat16": 4, "float16": 6, "float32": 4}
_STATE_BYTES = {StateFormat.FP32: 4.0, StateFormat.BF16: 2.0, StateFormat.COMPACT: 1 + 4 / STATE_BLOCK}

UNITS_IN_FLIGHT = 3
"""Whole units in compute memory at once: one in use, one arriving, one leaving."""
GRADS_IN_FLIGHT = 2
"""Whole gradients of a unit in memory at once: the one backward fills, and one on its way to where it rests."""
STAGED_SECTIONS = 3
"""How many of the largest sections staging memory holds at once, while the host adds or converts their gradients."""
REDUCED_PIECE_BYTES = 64 << 20
"""Bytes on a GPU at once of the sum over ranks of experts' gradients, fp32. More makes a collective no faster."""
GRAD_RING_UNITS = 5
"""Units whose gradients are in memory at once where the update runs inside of backward. One is filled by backward, and
one is a leftover that backward completes at its end. One is still summed by a GPU, one waits for its update, and one is
updated.
"""
NEAR_ROOM = 32 << 20
"""Pages of a rank, for parameters and as many for gradients, in which it leaves bytes for other ranks of its machine.
Memory is taken when it is first used."""
NEAR_LARGEST = 12 << 20
"""Bytes of the largest buffer that ranks exchange so."""
NEAR_LEAST = 256 << 10
"""Of such pages, for the table of what lies where, and for gaps."""
BYTES_AHEAD = 2 << 20
"""Gathers of CPU ranks run ahead of their use until there are so many bytes of them, of one unit at least."""
NEAR_AT_ONCE = 4
"""Units, or times `BYTES_AHEAD` of small ones, that lie there at once: others may be as far behind as a rank is
ahead."""
WALKED_AT_ONCE = 3
"""Sections on drives that are in memory while an optimizer of others steps: one is read, one stepped, one written."""
WALKED_BY_GPU = 2
"""More of them where a GPU makes the step: one is on its way to it, and one back. With the stepped one, so many and one
more are in its memory.
"""
CHUNKS_IN_FLIGHT = 4
"""Chunks of the update pipeline: two being read, one updated, one written."""
DEVICE_CHUNKS_IN_FLIGHT = 4
"""Gradients that a device's update has uploaded and not consumed, in chunks."""
SNAPSHOT_CHUNKS_IN_FLIGHT = 2
"""Chunks of states in memory that a commit writes at once. Those on the host need no buffers, but a queue that others
stand in. Those in a device's memory need a buffer each.
"""
BASE_BUFFER_BYTES = 32 << 20
"""Host memory that values pass through which rest in files of a base."""
ACTIVATION_BLOCK_BYTES = 1 << 20
"""The size of the blocks of activations on disk."""
ACTIVATION_BLOCKS_OUT, ACTIVATION_BLOCKS_BACK = 16, 32
"""Blocks in memory on their way to the disk, and from it."""
ACTIVATIONS_AHEAD_BYTES, ACTIVATIONS_AHEAD_SHARE = 512 << 20, 16
"""The most that backward fetches ahead to a device: these bytes, and one part in so many of its budget. Two tensors
hide each other's way: 32 MiB each for 4,096 tokens of width 4,096 in bf16, 256 MiB each for 32,768.
"""
MARGIN_SHARE = 16
"""One part in so many of a device's memory stays free for fragmentation: blocks in the allocator's cache that fit no
request. A choice; vLLM leaves 1/10 by default (`gpu_memory_utilization`), which has to cover peaks as well."""
WORKSPACE_BYTES = 4 * (32 << 20)
"""For cuBLAS, which takes a workspace for each handle and stream: 32 MiB on Hopper, 4 MiB before (cuBLAS reference,
`cublasSetWorkspace`). Forward and backward have a thread each, so a handle each, and a program may add a stream."""
COMMUNICATORS = 3
"""Gathers, reductions and sums over replicas have one of NCCL's each, which connects on first use."""
COMMUNICATOR_BYTES = 688 * 10**6
"""Of one communicator, outside of torch's allocator: measured on 4 A100 with NVLink; 544 MB on 2 (NVIDIA/nccl#964)."""


def value_bytes(config: OffloadConfig) -> int:
    """Bytes of a parameter, and of an activation, as it is computed with."""
    return _VALUE_BYTES[config.compute_dtype_name]


def optimizer_state_bytes(dtype: str, states: StateFormat) -> float:
    """Bytes per element of AdamW's states, value and master included."""
    return master_bytes(dtype, states) + 2 * _STATE_BYTES[states]


def master_bytes(dtype: str, states: StateFormat) -> int:
    """Bytes per element of value and master."""
    short = states is StateFormat.COMPACT and dtype == "bfloat16"  # a residual of 8 bits
    return _MASTER_BYTES[dtype] - short


@dataclass(frozen=True)
class WalkBytes:
    """Bytes of one section that an optimizer of others steps whole."""

    rest_bytes: int
    """Values, masters and states."""
    grad_bytes: int
    """Of gradients in fp32."""
    grads_are_wide: bool
    """True if gradients are fp32 as backward makes them: in memory they are stepped where they are."""
    copied_bytes: int
    """Of masters that are copies, and of parameters that ranks bring together."""
    is_alone: bool
    """True if no optimizer of ours updates a part of the section."""
    has_products: bool = False
    """True if a GPU that computes makes the step, wherever states rest: its class multiplies matrices."""
    gpu_bytes: int = 0
    """Of a GPU's memory while that makes the step of the section, beside what rests there."""
    brought_bytes: int = 0
    """The part of `gpu_bytes` that comes from other memory, unless it rests there."""


@dataclass(frozen=True)
class UnitNumel:
    """Elements of one unit, over all ranks."""

    name: str
    trained: int
    frozen: int = 0
    sizes: tuple[int, int, int] | None = None
    """Bytes of trained values, frozen values and optimizer states, where not all is in the compute dtype."""
    frame_bytes: int = 0
    """Bytes of the host's pages under whole values, where they are fetched; every section has its own."""
    in_use_with: tuple[tuple[int, ...], ...] = ()
    """As `ModelSpec.in_use_with`."""
    is_trained_part: bool = False
    """As in `UnitSpec`."""
    group_bytes: int = 0
    """As `plan.expert_groups.group_bytes`: memory for one group, of a unit that is not fetched whole."""
    base_bytes: int = 0
    """Bytes of frozen values that rest in files of a base: drives get none of them, and they are read there."""
    resting_bytes: int = 0
    """Bytes of trained values without states and gradients."""
    resting_master_bytes: int = 0
    """The part of the last of `sizes` that is theirs: values with masters, which no step changes."""
    leaving_bytes: int = 0
    """Bytes of states, and of masters that go with them, which give their room to others' when their turn is over."""
    left_bytes: int = 0
    """Bytes of files where values lay before their first turn. These gaps are small, and hardly used again."""
    walks: tuple[WalkBytes, ...] = ()
    """Of its sections that an optimizer of others steps."""

    @classmethod
    def of(
        cls,
        unit: UnitLayout,
        in_use_with: tuple[tuple[int, ...], ...] = (),
        in_base: Container[int] = (),
        resting: Container[int] = (),
        in_turns: Container[int] = (),
        *,
        drops_masters: bool = False,
        states_of: Mapping[int, int] | None = None,
        walks: Mapping[int, WalkBytes] | None = None,
    ) -> UnitNumel:
        """As it is laid out. Sections `in_base` rest in files of a base; those `resting` have a master, and neither
        states nor gradients. Sections `in_turns` rest later, when others are trained; frozen again, with values alone
        where each `drops_masters`. `states_of` are bytes of states without masters, of each trained section; by default
        AdamW's. `walks` are those of sections that an optimizer of others steps."""
        numel, nbytes = {True: 0, False: 0}, {True: 0, False: 0}
        state_bytes = base_bytes = resting_bytes = resting_master_bytes = leaving_bytes = left_bytes = 0
        frame_bytes = sum(divide_up(section.nbytes, FRAME) * FRAME for section in unit.sections)
        for section in unit.sections:
            is_resting = section.index in resting
            numel[section.trainable and not is_resting] += section.used_numel
            nbytes[section.trainable] += section.used_numel * section.dtype.itemsize
            resting_bytes += section.used_numel * section.dtype.itemsize * is_resting
            takes_turns, is_in_base = section.index in in_turns, section.index in in_base
            has_left = section.trainable if drops_masters else not is_in_base
            left_bytes += section.used_numel * section.dtype.itemsize * (takes_turns and has_left)
            base_bytes += section.used_numel * section.dtype.itemsize * (is_in_base and not takes_turns)
            if section.trainable:
                dtype = str(section.dtype).removeprefix("torch.")
                masters = section.used_numel * master_bytes(dtype, section.state_format)
                kept = math.ceil(section.used_numel * optimizer_state_bytes(dtype, section.state_format))
                states = kept if states_of is None else masters + states_of[section.index]
                state_bytes += masters if is_resting else states
                resting_master_bytes += masters * is_resting
                leaving_bytes += (states - masters * (not drops_masters)) * (takes_turns and not is_resting)
        return cls(
            unit.name,
            numel[True],
            numel[False],
            sizes=(nbytes[True], nbytes[False], state_bytes),
            frame_bytes=frame_bytes,
            in_use_with=in_use_with,
            is_trained_part=unit.is_trained_part,
            group_bytes=group_bytes(unit),
            base_bytes=base_bytes,
            resting_bytes=resting_bytes,
            resting_master_bytes=resting_master_bytes,
            leaving_bytes=leaving_bytes,
            left_bytes=left_bytes,
            walks=tuple((walks or {})[each.index] for each in unit.sections if each.index in (walks or {})),
        )


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of a unit on one rank."""

    name: str
    params_bytes: int
    """Values in the compute dtype, frozen ones included."""
    grads_bytes: int
    optimizer_bytes: int
    """Self-contained extents: the value and everything that completes the optimizer's state."""
    frozen_bytes: int = 0
    """The part of `params_bytes` that is not trained."""
    trained_numel: int = 0
    """Trained elements, over all ranks."""
    passing_grads_bytes: int = 0
    """Gradients between backward and an update inside of it, where none are held: `grads_bytes` is 0 then."""
    frame_bytes: int = 0
    in_use_with: tuple[tuple[int, ...], ...] = ()
    """Both as in `UnitNumel`; without them nothing is known of the least that a run needs."""
    is_trained_part: bool = False
    """As in `UnitSpec`."""
    group_bytes: int = 0
    """As in `UnitNumel`; over ranks it is the same."""
    base_bytes: int = 0
    """The part of `frozen_bytes` that rests in files of a base."""
    resting_bytes: int = 0
    """The part of `trained_bytes` without states and gradients."""
    resting_master_bytes: int = 0
    """The part of `optimizer_bytes` that no step changes, as it is theirs."""
    leaving_bytes: int = 0
    left_bytes: int = 0
    walks: tuple[WalkBytes, ...] = ()
    """All three as in `UnitNumel`."""

    @functools.cached_property
    def likeness(self) -> UnitBytes:
        """Equal for units of which all but the name is."""
        return replace(self, name="", in_use_with=())

    @property
    def trained_bytes(self) -> int:
        """The part of `params_bytes` that is trained."""
        return self.params_bytes - self.frozen_bytes

    @property
    def live_bytes(self) -> int:
        """The part of `trained_bytes` that has gradients and is updated in a step."""
        return self.trained_bytes - self.resting_bytes

    @property
    def updated_bytes(self) -> int:
        """The part of `optimizer_bytes` that a step changes."""
        return self.optimizer_bytes - self.resting_master_bytes


def numels_in_turns(
    layout: ShardLayout,
    spec: ModelSpec,
    blocks: Sequence[Collection[str]],
    num_live: int,
    in_base: Collection[int],
    master: str,
) -> list[UnitNumel]:
    """Units of a model whose `blocks`, by the names of their parameters, take turns, when all have been trained.

    They are frozen in `layout`. The largest live, the others have masters alone or, with `master` "drop", values.
    Sections `in_base` rest in files of a base unless they take turns.
    """
    sections = [
        [each for each in layout.sections if any(piece.spec.name in names for piece in each.params)] for names in blocks
    ]
    largest = sorted(sections, key=lambda found: sum(each.used_numel for each in found), reverse=True)
    turns = {each.index for found in sections for each in found}
    live = {each.index for found in largest[:num_live] for each in found}
    thawed = live if master == "drop" else turns
    laid_out = layout.thawed({each.index for each in layout.sections if each.index in thawed and not each.trainable})
    return [
        UnitNumel.of(unit, spec.in_use_with(index), in_base, thawed - live, turns, drops_masters=master == "drop")
        for index, unit in enumerate(laid_out.units)
    ]


def measure_units(
    units: Iterable[UnitNumel], config: OffloadConfig, partition: Partition = ONE_RANK, num_micro_batches: int = 1
) -> tuple[UnitBytes, ...]:
    """One rank's bytes of each unit; `Partition` says what its stage divides."""
    value = value_bytes(config)
    state = optimizer_state_bytes(config.compute_dtype_name, config.state_format)
    # Sums of gradients, over micro-batches or over ranks, are kept in fp32.
    sums = partition.world_size > 1 or num_micro_batches > 1
    passes = config.overlap == UpdateOverlap.BACKWARD and num_micro_batches == 1
    measured = []
    for unit in units:
        trained, frozen, states = unit.sizes or (
            unit.trained * value,
            unit.frozen * value,
            math.ceil(unit.trained * state),
        )
        summed = unit.trained * 4 if sums else trained - unit.resting_bytes
        bytes_of = UnitBytes(
            name=unit.name,
            params_bytes=divide_up(trained + frozen, partition.param_shards),
            grads_bytes=0 if passes else _grads_bytes(unit.trained, summed, partition),
            optimizer_bytes=divide_up(states, partition.optimizer_shards),
            frozen_bytes=divide_up(frozen, partition.param_shards),
            trained_numel=unit.trained,
            passing_grads_bytes=divide_up(summed, partition.optimizer_shards) if passes else 0,
            frame_bytes=unit.frame_bytes,
            in_use_with=unit.in_use_with,
            is_trained_part=unit.is_trained_part,
            group_bytes=unit.group_bytes,
            base_bytes=divide_up(unit.base_bytes, partition.param_shards),
            resting_bytes=divide_up(unit.resting_bytes, partition.param_shards),
            resting_master_bytes=divide_up(unit.resting_master_bytes, partition.optimizer_shards),
            leaving_bytes=divide_up(unit.leaving_bytes, partition.optimizer_shards),
            left_bytes=divide_up(unit.left_bytes, partition.optimizer_shards),
            walks=unit.walks,
        )
        measured.append(bytes_of)
    return tuple(measured)


def _grads_bytes(numel: int, held_bytes: int, partition: Partition) -> int:
    """Where the reduction is deferred, a rank's own sums are whole, and its shard of their mean is beside them."""
    held = divide_up(held_bytes, partition.grad_shards)
    return held + divide_up(numel * 4, partition.optimizer_shards) * partition.defers_reduction


def rest_bytes(
    unit: UnitBytes, kind: StateKind, tiers: Mapping[StateKind, Tier], partition: Partition, shared_memory: bool
) -> int:
    """Bytes one copy of `kind` takes on the tier that `tiers` gives it; `shared_memory` as in `Budget`."""
    params_tier, optimizer_tier = tiers[StateKind.PARAMS], tiers[StateKind.OPTIMIZER]
    if kind is StateKind.GRADS:
        return unit.grads_bytes
    if kind is StateKind.PARAMS:
        # With both on NVMe the value inside the optimizer's extents serves the forward too, if it is whole. So does a
        # value that a device updates.
        on_device = optimizer_tier is Tier.DEVICE is not params_tier and not shared_memory
        inside = (params_tier is optimizer_tier is Tier.NVME or on_device) and not partition.replicates_params
        return unit.frozen_bytes if inside else unit.params_bytes
    in_memory = Tier.NVME not in (params_tier, optimizer_tier)
    if in_memory and (shared_memory or params_tier is optimizer_tier):
        inside_bytes = divide_up(unit.trained_bytes * partition.param_shards, partition.optimizer_shards)
        return unit.optimizer_bytes - inside_bytes
    return unit.optimizer_bytes


def resting(
    unit: UnitBytes, tiers: Mapping[StateKind, Tier], partition: Partition, shared_memory: bool
) -> Iterator[tuple[Tier, StateKind, int]]:
    """Where one copy of each kind rests, and its bytes there; `shared_memory` as in `Budget`."""
    for kind in PLACED_KINDS:
        nbytes = rest_bytes(unit, kind, tiers, partition, shared_memory)
        if kind is StateKind.PARAMS and tiers[kind] is Tier.DEVICE and not shared_memory:
            yield from _params_of_device(unit, nbytes, tiers[StateKind.OPTIMIZER], partition)
        else:
            in_files = kind is StateKind.PARAMS and tiers[kind] is Tier.NVME
            yield tiers[kind], kind, nbytes - unit.base_bytes * in_files


def _params_of_device(
    unit: UnitBytes, nbytes: int, optimizer: Tier, partition: Partition
) -> Iterator[tuple[Tier, StateKind, int]]:
    """Values that a device does not update itself come to it from the host's memory. Where ranks gather parameters for
    each use, they rest in that memory alone.
    """
    trained, frozen = (
        divide_up(whole * partition.param_shards, partition.optimizer_shards)
        for whole in (unit.trained_bytes, unit.frozen_bytes)
    )
    is_gathered = partition.param_shards > 1
    brought = frozen if optimizer is Tier.DEVICE else nbytes
    yield Tier.DEVICE, StateKind.PARAMS, nbytes - brought * is_gathered
    # Beside optimizer states in the host's memory the trained values are a part of them.
    yield Tier.CPU, StateKind.PARAMS, frozen + trained * (optimizer is Tier.NVME)


def divide_up(value: int, parts: int) -> int:
    return -(-value // parts)


@dataclass(frozen=True)
class Budget:
    """The most one rank may use of each tier."""

    device_bytes: int
    cpu_bytes: int
    nvme_bytes: int
    shared_memory: bool
    """True if the compute device is the CPU: device and cpu tiers fill the same memory, limited by `cpu_bytes`. There
    `device_bytes` limits the memory for fetched units.
    """

    def of(self, tier: Tier) -> int:
        limits = {Tier.DEVICE: self.device_bytes, Tier.CPU: self.cpu_bytes, Tier.NVME: self.nvme_bytes}
        return limits[tier]


@dataclass(frozen=True)
class Placement:
    """unit x kind -> tier, and the budget it was made for."""

    tiers: tuple[Mapping[StateKind, Tier], ...]
    budget: Budget


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank under a placement. Without activations, whose bytes depend on the batch; the buffers that they
    pass through are counted."""

    rest_bytes: Mapping[tuple[Tier, StateKind], int]
    """At rest. On NVMe with all slots, and with the snapshots of states that rest in memory. Values that are a part of
    an optimizer's extents, and have no copy elsewhere, are parameters."""
    generation_bytes: Mapping[StateKind, int]
    """The part on NVMe that is there for generations: second slots, and copies of what rests in memory."""
    staging_bytes: Mapping[Tier, int]
    """Buffers that data passes through on its way to the compute device and the update."""
    wear: Wear
    budget: Budget
    least_bytes: int
    """Bytes of `device_memory` for the units in use at once, where the CPU computes. With less a step runs only where
    it uses units in parts. The rest of `staging_bytes` for units is for those fetched ahead, and shrinks to the budget.
    """
    kept_params_bytes: int
    """Bytes of parameters that come to a device and may stay there, those in flight included. Without a `device_memory`
    they may from the second step on, less the bytes of activations. 0 where the CPU computes.
    """
    near_bytes: int
    """The part of `staging_bytes` that is pages in which ranks of one machine leave bytes for each other."""

    @property
    def nvme_written_bytes_per_step(self) -> int:
        return int(self.wear.bytes_per_step)

    def used_bytes(self, tier: Tier) -> int:
        at_rest = sum(nbytes for (place, _), nbytes in self.rest_bytes.items() if place is tier)
        return at_rest + self.staging_bytes[tier]

    def left_bytes(self, tier: Tier) -> int:
        """Bytes of the budget beside that; where the compute device is the CPU, of the memory that both tiers fill."""
        if self.budget.shared_memory and tier is not Tier.NVME:
            return self.budget.cpu_bytes - self.used_bytes(Tier.DEVICE) - self.used_bytes(Tier.CPU)
        return self.budget.of(tier) - self.used_bytes(tier)

    @property
    def reasons(self) -> tuple[str, ...]:
        """One line per budget exceeded; none when the plan fits."""
        return self.shortages(self.as_table())

    def shortages(self, table: PlanTable) -> tuple[str, ...]:
        """The same of a table of this plan."""
        shared = self.budget.shared_memory
        names = {place_of(tier, shared_memory=False): f"{tier.value} tier" for tier in Tier}
        names |= {MEMORY: "memory (the compute device is the CPU)"} if shared else {}
        return tuple(
            shortage(names[place], needed, table.available[place])
            for place, needed in table.total.items()
            if needed > table.available[place]
        )

    @property
    def fits(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return self.table()

    def as_table(self, beside: Mapping[str, Row] | None = None, available: Row | None = None) -> PlanTable:
        """By what it is and by place; see [Note: one memory on a CPU] in table.py.

        `beside`: rows of other things than states, such as activations. Budgets are for states: what stands beside them
        is available too, unless `available` says it all.
        """
        shared, beside = self.budget.shared_memory, beside or {}
        rows: dict[str, Row] = {}
        for kind, name in STATE_ROWS.items():
            sizes = {tier: self.rest_bytes[tier, kind] for tier in Tier}
            sizes[Tier.NVME] -= self.generation_bytes.get(kind, 0)
            rows[name] = by_place(sizes, shared_memory=shared)
        rows[GENERATIONS] = {NVME: sum(self.generation_bytes.values())}
        rows[IN_FLIGHT] = by_place(self.staging_bytes, shared_memory=shared)
        if available is None:
            budgets = {place_of(tier, shared_memory=shared): self.budget.of(tier) for tier in Tier}  # cpu's, if shared
            available = {
                place: nbytes + sum(row.get(place, 0) for row in beside.values()) for place, nbytes in budgets.items()
            }
        return PlanTable.of({**rows, **beside}, available)

    def table(self) -> str:
        """A text table: one line per kind, one column per place, then totals, budgets and wear."""
        return "\n".join(self.lines(self.as_table()))

    def lines(self, table: PlanTable, title: str = "") -> list[str]:
        """The lines of a table of this plan, and what is to be said of it."""
        lines = list(table.lines(title))
        if self.kept_params_bytes:
            lines.append(
                f"parameters on the device: up to {format_bytes(self.kept_params_bytes)}, less what activations take"
            )
        if self.near_bytes:
            shown = format_bytes(self.near_bytes)
            lines.append(f"of {IN_FLIGHT}, up to {shown} are pages in which ranks of one machine leave bytes")
        lines.append(f"written to NVMe per step: {format_bytes(self.nvme_written_bytes_per_step)}")
        if self.least_bytes and self.fits and self.used_bytes(Tier.DEVICE) > self.budget.device_bytes:
            lines.append(self._of_units_at_once())
        return [*lines, *self.shortages(table), "it fits" if self.fits else "it does not fit"]

    def _of_units_at_once(self) -> str:
        needed, given = format_bytes(self.least_bytes), format_bytes(self.budget.device_bytes)
        # A run takes whole frames, one at least.
        if self.least_bytes > divide_up(self.budget.device_bytes, FRAME) * FRAME:
            return (
                f"device_memory is {given}, units in use at once take {needed}: a step that uses them whole will fail"
            )
        return f"device_memory holds the {needed} in use at once; more fetches ahead"


@dataclass(frozen=True)
class Sizes:
    """The bytes of units, their placement by these bytes, and the sums."""

    hardware: HardwareProfile
    """As ranks agreed on it at the first `zo.offload`."""
    unit_bytes: Sequence[UnitBytes]
    placement: Placement
    plan: MemoryPlan
    """The plan that budgets were compared with."""


def estimate_memory(
    units: Sequence[UnitBytes], placement: Placement, config: OffloadConfig, partition: Partition = ONE_RANK
) -> MemoryPlan:
    """Add up what one rank needs on every tier."""
    rest = {(tier, kind): 0 for tier in Tier for kind in PLACED_KINDS}
    generations = {StateKind.PARAMS: 0, StateKind.OPTIMIZER: 0}
    keeps_generations = config.effective_durability is not Durability.SCRATCH
    shared = placement.budget.shared_memory
    written = committed = grads = 0
    for unit, tiers in zip(units, placement.tiers, strict=True):
        for tier, kind, nbytes in resting(unit, tiers, partition, shared):
            rest[tier, kind] += nbytes
        inside = rest_bytes(unit, StateKind.PARAMS, tiers, partition, shared) == unit.frozen_bytes
        if inside:
            rest[tiers[StateKind.OPTIMIZER], StateKind.PARAMS] += unit.trained_bytes
            rest[tiers[StateKind.OPTIMIZER], StateKind.OPTIMIZER] -= unit.trained_bytes
        if tiers[StateKind.OPTIMIZER] is Tier.NVME:
            written += unit.updated_bytes
            generations[StateKind.OPTIMIZER] += unit.optimizer_bytes * keeps_generations  # second slot
        elif keeps_generations:
            committed += unit.updated_bytes
            generations[StateKind.OPTIMIZER] += 2 * unit.optimizer_bytes  # snapshots, in two slots
        # Both slots of states whose turn is over stay until the next generation, beside those of the next turn.
        generations[StateKind.OPTIMIZER] += 2 * unit.leaving_bytes * keeps_generations
        has_file = keeps_generations or tiers[StateKind.PARAMS] is Tier.NVME
        generations[StateKind.PARAMS] += unit.left_bytes * has_file
        if tiers[StateKind.PARAMS] is not Tier.NVME and keeps_generations:
            # Of frozen values one slot, written once.
            whole = (unit.frozen_bytes - unit.base_bytes) * partition.param_shards
            generations[StateKind.PARAMS] += divide_up(whole, partition.optimizer_shards)
        if tiers[StateKind.PARAMS] is Tier.NVME:
            written += 0 if inside else unit.live_bytes
        if tiers[StateKind.GRADS] is Tier.NVME:
            grads += unit.grads_bytes
    for kind, nbytes in generations.items():
        rest[Tier.NVME, kind] += nbytes
    wear = Wear(written + grads, committed, config.commit_every, grads)
    staging = _staging_bytes(units, placement, config, partition, rest)
    near = near_bytes(units, partition) if shared else 0
    staging[Tier.CPU] += near
    least = _least_bytes(units, placement, partition)
    plan = MemoryPlan(rest, generations, staging, wear, placement.budget, least, 0, near)
    if shared:
        return plan
    return replace(plan, kept_params_bytes=_kept_params_bytes(plan, units, placement, config, partition))


def _kept_params_bytes(
    plan: MemoryPlan, units: Sequence[UnitBytes], placement: Placement, config: OffloadConfig, partition: Partition
) -> int:
    """Bytes of a device that all else there leaves, and no more than all parameters that come and go."""
    arriving = _arriving(units, placement, partition)
    in_flight = in_flight_sum(arriving, units)
    whole = plan.budget.device_bytes
    margin = margin_bytes(whole, partition.world_size, is_measured=False) if config.device_memory is None else 0
    return max(min(sum(arriving), in_flight + plan.left_bytes(Tier.DEVICE) - margin), min(in_flight, whole))


def _comes(tiers: Mapping[StateKind, Tier], placement: Placement, partition: Partition) -> bool:
    """True if a unit with these tiers comes to the compute device for its uses."""
    params, shared = tiers[StateKind.PARAMS], placement.budget.shared_memory
    return partition.param_shards > 1 or not (params is Tier.DEVICE or (shared and params is Tier.CPU))


def _groups_bytes(units: Sequence[UnitBytes], placement: Placement, partition: Partition) -> int:
    """Memory for groups of experts that come to the compute device."""
    found = zip(units, placement.tiers, strict=True)
    comes = (unit.group_bytes for unit, tiers in found if _comes(tiers, placement, partition))
    return GROUPS_IN_FLIGHT * max(comes, default=0)


def _arriving(units: Sequence[UnitBytes], placement: Placement, partition: Partition) -> list[int]:
    """Bytes of each unit on the compute device, whole, for its uses; 0 for a unit that is always there."""
    shared, found = placement.budget.shared_memory, list[int]()
    for unit, tiers in zip(units, placement.tiers, strict=True):
        stays = tiers[StateKind.OPTIMIZER] is Tier.DEVICE and not shared and partition.optimizer_shards == 1
        comes = _comes(tiers, placement, partition) and not unit.group_bytes
        found.append(comes * (unit.frozen_bytes if stays else unit.params_bytes * partition.param_shards))
    return found


def _least_bytes(units: Sequence[UnitBytes], placement: Placement, partition: Partition) -> int:
    """Pages under the units in use at once, where the CPU computes."""
    if not placement.budget.shared_memory:
        return 0
    fetched = [
        unit.frame_bytes * (partition.param_shards > 1 or tiers[StateKind.PARAMS] is Tier.NVME) * (not unit.group_bytes)
        for unit, tiers in zip(units, placement.tiers, strict=True)
    ]
    return max((sum(fetched[index] for index in used) for unit in units for used in unit.in_use_with), default=0)


def _staging_bytes(
    units: Sequence[UnitBytes],
    placement: Placement,
    config: OffloadConfig,
    partition: Partition,
    rest: Mapping[tuple[Tier, StateKind], int],
) -> dict[Tier, int]:
    shared = placement.budget.shared_memory
    landing = list[int]()
    made, staged, sliced, sent, to_drives, on_device, on_host = ([0] for _ in range(7))
    sources_of_device = set()
    """Where gradients rest, of each unit that a device updates in its own memory."""
    reads_states = reads_grads = lands_groups = False
    for unit, tiers in zip(units, placement.tiers, strict=True):
        params, grads, optimizer = (tiers[kind] for kind in PLACED_KINDS)
        made_bytes = unit.live_bytes * partition.param_shards
        lands = params is Tier.NVME and not shared
        landing.append(unit.params_bytes * (lands and not unit.group_bytes))
        lands_groups |= lands and bool(unit.group_bytes)
        leaves = grads is not Tier.DEVICE and not shared
        in_slices = bool(unit.group_bytes) and leaves
        if in_slices:
            staged.append(reduced_grad_bytes(unit.trained_numel, partition))
            sliced.append(sliced_grad_bytes(unit.trained_numel, made_bytes, partition))
        else:
            staged.append(staged_grad_bytes(unit.trained_numel, made_bytes, partition) * leaves)
        sent.append(sent_grad_bytes(unit, partition) * leaves)
        (on_device if grads is Tier.DEVICE and not shared else on_host).append(unit.passing_grads_bytes)
        # Backward makes a unit's gradient whole before it moves to its tier; over ranks it is summed in fp32, beside
        # what arrives from them. A GPU adds up a unit's gradients of all micro-batches before they leave. Of experts
        # one group's are made while another's leave, and come back in pieces to be summed.
        summed_bytes = unit.trained_numel * 4 * (partition.world_size > 1)
        if in_slices:
            groups_made = min(GROUPS_IN_FLIGHT * unit.group_bytes, made_bytes)
            piece_bytes = min(summed_bytes, REDUCED_PIECE_BYTES, 2 * unit.group_bytes)  # of 16-bit values in fp32
            made.append(groups_made + (GRADS_IN_FLIGHT + 1) * piece_bytes)
        elif summed_bytes:
            made.append((GRADS_IN_FLIGHT + 1) * summed_bytes)
        else:
            made.append(made_bytes + unit.grads_bytes * (unit.grads_bytes > made_bytes and leaves))
        # On their way to a drive they have pages of their own.
        to_drives.append(unit.grads_bytes * (grads is Tier.NVME))
        if unit.trained_numel == 0:
            continue
        if optimizer is Tier.DEVICE and not shared:
            sources_of_device.add(grads)
        if unit.walks and all(each.is_alone for each in unit.walks):
            continue
        reads_states |= optimizer is Tier.NVME
        reads_grads |= grads is Tier.NVME or (grads is Tier.DEVICE is not optimizer and not shared)
    dtypes = {config.compute_dtype_name, *config.compute_exceptions.values()}
    state = max(optimizer_state_bytes(name, config.state_format) for name in dtypes)
    chunk_bytes = int(CHUNK_NUMEL * (state + 4))  # and an fp32 gradient
    update_bytes = chunk_bytes if reads_states else CHUNK_NUMEL * 4 * reads_grads
    commits_device = bool(sources_of_device) and config.effective_durability is not Durability.SCRATCH
    to_drives_bytes = sum_of_largest(to_drives, GRADS_IN_FLIGHT)
    ahead_bytes = activations_ahead_bytes(config, placement.budget)
    blocks_back = max(ahead_bytes // ACTIVATION_BLOCK_BYTES, ACTIVATION_BLOCKS_BACK)
    activation_bytes = ACTIVATION_BLOCK_BYTES * (ACTIVATION_BLOCKS_OUT + blocks_back)
    groups_bytes = _groups_bytes(units, placement, partition)
    on_its_host, by_gpu = _walked(units, placement)
    on_device_bytes = (
        in_flight_sum(_arriving(units, placement, partition), units)
        + groups_bytes
        + to_drives_bytes * shared
        + ring_bytes(on_device)
        + DEVICE_CHUNKS_IN_FLIGHT * CHUNK_NUMEL * 4 * bool(sources_of_device - {Tier.DEVICE})
    )
    at_rest = sum(nbytes for (tier, _), nbytes in rest.items() if tier is Tier.DEVICE)
    room = placement.budget.device_bytes - at_rest - on_device_bytes
    return {
        # Gradients and activations of backward are gone when a step begins.
        Tier.DEVICE: on_device_bytes
        + max(max(made) + beside_made_bytes(made, sent) + ahead_bytes, gpu_walk_bytes(by_gpu, room)),
        Tier.CPU: in_flight_sum(landing, units)
        + groups_bytes * lands_groups
        + BASE_BUFFER_BYTES * any(unit.base_bytes for unit in units)
        + grad_staging_bytes(staged, sliced)
        + to_drives_bytes * (not shared)
        + ring_bytes(on_host)
        + CHUNKS_IN_FLIGHT * update_bytes
        + walk_bytes(on_its_host, by_gpu)
        + SNAPSHOT_CHUNKS_IN_FLIGHT * chunk_bytes * commits_device
        + activation_bytes * (Tier.NVME in config.activation_fractions),
        Tier.NVME: 0,
    }


def near_bytes(units: Iterable[UnitBytes], partition: Partition) -> int:
    """Pages in which a rank leaves bytes for others of its machine, where CPUs compute. Between machines each rank
    hands parts of others on, too. A rank leaves no more there than two steps do, since others are as far by then.
    """
    sharers, shards = partition.world_size // partition.num_replicas, partition.optimizer_shards
    here = min(partition.num_here, sharers)
    if here < 2:
        return 0
    machines, gathered, reduced = divide_up(sharers, here), [0], [0]
    for unit in units:
        trained, frozen = (nbytes * partition.param_shards for nbytes in (unit.trained_bytes, unit.frozen_bytes))
        # Forward and backward gather all that is divided, and one update what each rank has changed.
        buffers = [trained, trained, frozen, frozen] if partition.divides_params else [trained] * (shards > 1)
        gathered += [divide_up(nbytes * machines, sharers) for nbytes in buffers if nbytes <= NEAR_LARGEST]
        if trained <= NEAR_LARGEST:
            sums = unit.trained_numel * 4
            reduced.append(divide_up(sums * (here - 1 + machines * (shards == 1)), sharers))
    found = [reduced] if shards == 1 else [gathered, reduced]
    at_once = (NEAR_AT_ONCE * max(*each, BYTES_AHEAD) for each in found)
    return sum(min(NEAR_LEAST + min(2 * sum(each), most), NEAR_ROOM) for each, most in zip(found, at_once, strict=True))


_Walked = tuple[WalkBytes, Tier, Tier]
"""A section that an optimizer of others steps, with the tiers of its gradients and states."""


def _walked(units: Sequence[UnitBytes], placement: Placement) -> tuple[list[_Walked], list[_Walked]]:
    """Sections that the host steps, and those that a GPU does: by the class, or all if some states rest there."""
    placed = [
        (each, tiers[StateKind.GRADS], tiers[StateKind.OPTIMIZER])
        for unit, tiers in zip(units, placement.tiers, strict=True)
        for each in unit.walks
    ]
    has_gpu = not placement.budget.shared_memory
    rests_there = any(
        tiers[StateKind.OPTIMIZER] is Tier.DEVICE and unit.trained_numel
        for unit, tiers in zip(units, placement.tiers, strict=True)
    )
    by_gpu = [has_gpu and (rests_there or each.has_products) for each, _, _ in placed]
    found = [[each for each, by in zip(placed, by_gpu, strict=True) if by is which] for which in (False, True)]
    return found[0], found[1]


def gpu_walk_bytes(sections: Sequence[_Walked], room: int) -> int:
    """A GPU's memory for steps of an optimizer of others. The step itself makes as much again as one section has. With
    less than `room` for all three sections a step has fewer there at once, and one at least.
    """
    sizes = [each.gpu_bytes - each.brought_bytes * (optimizer is Tier.DEVICE) for each, _, optimizer in sections]
    largest = max(sizes, default=0)
    return max(min(sum_of_largest(sizes, 1 + WALKED_BY_GPU) + largest, room), 2 * largest)


def walk_bytes(sections: Sequence[_Walked], by_gpu: Sequence[_Walked] = ()) -> int:
    """Host memory for steps of an optimizer of others, of sections with the tiers of their gradients and states.
    Sections `by_gpu` are stepped by one: no copy of them is on the host.
    """
    read, through = (
        max((each.rest_bytes for each, _, optimizer in some if optimizer is Tier.NVME), default=0)
        for some in (sections, by_gpu)
    )
    copied = [
        each.grad_bytes * (not each.grads_are_wide or grads is not Tier.CPU) + each.copied_bytes
        for each, grads, _ in sections
    ]
    from_drive = any(grads is not Tier.CPU for _, grads, _ in sections) or any(
        grads is Tier.NVME for _, grads, _ in by_gpu
    )
    regions = max(WALKED_AT_ONCE * read, (WALKED_AT_ONCE + WALKED_BY_GPU) * through)
    return regions + max(copied, default=0) + CHUNK_NUMEL * 4 * from_drive


def copied_bytes(section: SectionLayout, grad_bytes: int, rows_bytes: int, *, on_device: bool) -> int:
    """Bytes of a GPU's memory for a section while it is stepped there. They are gradients as they come, `grad_bytes` of
    each element, and in fp32. Beside them are joined masters of bf16, and what does not rest `on_device`."""
    joined = 4 * (section.dtype == torch.bfloat16)
    copies = section.shard_numel * (4 + grad_bytes + joined)
    return copies + (0 if on_device else section.shard_numel * 4 + rows_bytes)


def walk_notes(units: Sequence[UnitBytes], placement: Placement) -> Iterator[str]:
    """Lines about sections on a drive that an optimizer of others steps, and about a GPU that makes the step."""
    read = [
        (each.rest_bytes, unit.name)
        for unit, tiers in zip(units, placement.tiers, strict=True)
        for each in unit.walks
        if tiers[StateKind.OPTIMIZER] is Tier.NVME
    ]
    _, by_gpu = _walked(units, placement)
    if read:
        nbytes, name = max(read)
        yield (
            f"a step has values, masters and states of {WALKED_AT_ONCE + WALKED_BY_GPU * bool(by_gpu)} sections in "
            f"memory at once; the largest is of {name}, {format_bytes(nbytes)}"
        )
    if by_gpu:
        most = gpu_walk_bytes(by_gpu, placement.budget.device_bytes)
        yield (
            f"the GPU makes the step: {format_bytes(most)} of its memory hold {1 + WALKED_BY_GPU} sections, and what "
            f"is made of one. With less there are fewer at once; the least is {format_bytes(gpu_walk_bytes(by_gpu, 0))}"
        )


def grad_staging_bytes(whole: Iterable[int], sliced: Iterable[int]) -> int:
    """Host memory that gradients pass through on their way from a device. It has the `STAGED_SECTIONS` largest of the
    sections or units that leave `whole`, and the largest of those that leave in slices. When the last slice of those is
    made, most of them have left.
    """
    return sum_of_largest(whole, STAGED_SECTIONS) + max(sliced, default=0)


def staged_grad_bytes(numel: int, nbytes: int, partition: Partition) -> int:
    """Host memory that the gradients of so many elements take on their way from a device. Over ranks it is this rank's
    part of their sum, fp32. On one rank, and where the sum is deferred, it is at least `nbytes`, as backward makes
    them.
    """
    reduced = reduced_grad_bytes(numel, partition)
    return max(nbytes, reduced) if partition.world_size == 1 or partition.defers_reduction else reduced


def reduced_grad_bytes(numel: int, partition: Partition) -> int:
    """This rank's part of a sum over ranks, fp32."""
    return divide_up(numel * 4, partition.optimizer_shards) * (partition.world_size > 1)


def sliced_grad_bytes(numel: int, nbytes: int, partition: Partition) -> int:
    """Host memory that the gradients of one layer's experts take, where they leave a device slice by slice. It is
    `nbytes`, as backward makes them, or fp32 where several backwards add up before ranks do. `nbytes` as backward makes
    them; fp32 where several backwards add up before ranks do.
    """
    return max(nbytes, numel * 4) if partition.defers_reduction else nbytes


def sent_grad_bytes(unit: UnitBytes, partition: Partition) -> int:
    """Bytes of a device's memory that a unit's gradients take while they are sent to the host's. They are as backward
    makes them, or fp32 for a sum of micro-batches that take turns or of ranks. Experts' leave one by one; a group's may
    be under way.
    """
    nbytes = unit.live_bytes * partition.param_shards
    if unit.group_bytes:
        return min(unit.group_bytes, nbytes)
    sums = unit.grads_bytes if partition.world_size == 1 else 0
    return max(staged_grad_bytes(unit.trained_numel, nbytes, partition), sums)


def leaving_bytes(sent: Iterable[int]) -> int:
    """So much may be on its way from a device at once; what is larger goes alone. Sections or units send so many bytes
    each. The limit is as much as most of them have, since an embedding beside small blocks would double it.
    """
    sizes = sorted(nbytes for nbytes in sent if nbytes)
    return sizes[len(sizes) // 2] if sizes else 0


def beside_made_bytes(made: Sequence[int], sent: Sequence[int]) -> int:
    """Bytes that gradients on their way take beside the largest that backward makes. Units are in the order of the
    model: each unit's gradients leave while a neighbour's are made.
    """
    usual = leaving_bytes(sent)
    beside = [
        max([usual, *sent[max(index - 1, 0) : index], *sent[index + 1 : index + 2]]) for index in range(len(sent))
    ]
    return max(map(sum, zip(made, beside, strict=True)), default=0) - max(made, default=0)


def activations_ahead_bytes(config: OffloadConfig, budget: Budget) -> int:
    """Bytes of a device for activations that come back before backward reads them; 0 where none leave."""
    leave = any(tier is not Tier.DEVICE for tier in config.activation_fractions) and not budget.shared_memory
    return min(ACTIVATIONS_AHEAD_BYTES, budget.device_bytes // ACTIVATIONS_AHEAD_SHARE) * leave


def margin_bytes(total_bytes: int, num_ranks: int, *, is_measured: bool) -> int:
    """Bytes of a device's memory that parameters leave free beside the peak of all else, for later or uneven needs.

    `is_measured`: after a step, whose communicators have their memory already. One more may connect.
    """
    communicators = (1 if is_measured else COMMUNICATORS) * (num_ranks > 1)
    return total_bytes // MARGIN_SHARE + WORKSPACE_BYTES + communicators * COMMUNICATOR_BYTES


def ring_bytes(unit_bytes: Iterable[int]) -> int:
    """Gradients in memory at once, of units that are updated inside of backward and have so many each."""
    return sum_of_largest(unit_bytes, GRAD_RING_UNITS)


def in_flight_sum(sizes: Sequence[int], units: Sequence[UnitBytes | UnitLayout]) -> int:
    """The sum of the `UNITS_IN_FLIGHT` largest sizes of units; each has its trained part beside it."""
    is_part = [unit.is_trained_part for unit in units]
    return sum(
        sum_of_largest((size for size, part in zip(sizes, is_part, strict=True) if part is which), UNITS_IN_FLIGHT)
        for which in (False, True)
    )


def sum_of_largest(sizes: Iterable[int], count: int) -> int:
    """The sum of the `count` largest sizes."""
    return sum(sorted(sizes)[-count:])
