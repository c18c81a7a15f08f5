"""Bytes that one rank holds of a unit, by kind of state, and where they rest.

Owns the byte table. Pure arithmetic. The calls: `UnitNumel.of`, `measure_units`; then `resting` for the tiers that a
placement gives a unit.

Bytes per trained parameter (frozen ones have the value only):

    compute  value  residual  master  exp_avg  exp_avg_sq  optimizer extents  gradient held
    bf16       2        2        -       4         4              12          2, or 4 if several are summed
    fp16       2        -        4       4         4              14          2, or 4 if several are summed
    fp32       4        -        -       4         4              12          4

With overlap="backward" no gradients are held, unless several backwards are added up: `GRAD_RING_UNITS` units' pass.

With `Precision(states="bf16")` exp_avg and exp_avg_sq are 2 each; with "compact" 1 1/64 each, and the residual is 1.

Parameters that `Precision.modules` keeps in another dtype count by that one's row.

Optimizer extents are self-contained, value included, so that a generation never needs the params tier.
Where params and optimizer both rest in the same memory, that value is the parameter itself, or a part of it. What a GPU
updates in its own memory has its value there too, whatever the params tier; with one shard forward uses it in place.
Parameters on a GPU that it does not update are copies of values in the host's memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from zero_offload.base.config import OffloadConfig
from zero_offload.base.types import FRAME, StateFormat, StateKind, Tier, UpdateOverlap
from zero_offload.hardware.abi import STATE_BLOCK
from zero_offload.plan.layout import UnitLayout
from zero_offload.plan.partition import ONE_RANK, Partition

PLACED_KINDS = (StateKind.PARAMS, StateKind.GRADS, StateKind.OPTIMIZER)
_VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MASTER_BYTES = {"bfloat16": 4, "float16": 6, "float32": 4}
_STATE_BYTES = {StateFormat.FP32: 4.0, StateFormat.BF16: 2.0, StateFormat.COMPACT: 1 + 4 / STATE_BLOCK}


def value_bytes(config: OffloadConfig) -> int:
    """Of a parameter, and of an activation, as it is computed with."""
    return _VALUE_BYTES[config.compute_dtype_name]


def optimizer_state_bytes(dtype: str, states: StateFormat) -> float:
    """Bytes per element of AdamW's states, value and master included."""
    short = states is StateFormat.COMPACT and dtype == "bfloat16"  # a residual of 8 bits
    return _MASTER_BYTES[dtype] - short + 2 * _STATE_BYTES[states]


@dataclass(frozen=True)
class UnitNumel:
    """Elements of one unit, over all ranks."""

    name: str
    trained: int
    frozen: int = 0
    sizes: tuple[int, int, int] | None = None
    """Bytes of trained values, frozen values and optimizer states, where not all is in the compute dtype."""
    frame_bytes: int = 0
    """Of the host's pages under whole values, where they are fetched; every section has its own."""
    in_use_with: tuple[tuple[int, ...], ...] = ()
    """As `ModelSpec.in_use_with`."""

    @classmethod
    def of(cls, unit: UnitLayout, in_use_with: tuple[tuple[int, ...], ...] = ()) -> UnitNumel:
        numel, nbytes, state_bytes = {True: 0, False: 0}, {True: 0, False: 0}, 0
        frame_bytes = sum(divide_up(section.nbytes, FRAME) * FRAME for section in unit.sections)
        for section in unit.sections:
            numel[section.trainable] += section.used_numel
            nbytes[section.trainable] += section.used_numel * section.dtype.itemsize
            if section.trainable:
                dtype = str(section.dtype).removeprefix("torch.")
                state_bytes += math.ceil(section.used_numel * optimizer_state_bytes(dtype, section.state_format))
        sizes = (nbytes[True], nbytes[False], state_bytes)
        return cls(unit.name, numel[True], numel[False], sizes, frame_bytes, in_use_with)


@dataclass(frozen=True)
class UnitBytes:
    """What one rank holds of a unit."""

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
        summed = unit.trained * 4 if sums else trained
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
        # With both on NVMe the value inside the optimizer's extents serves the forward too, if it is the whole one; as
        # does one that a device updates.
        on_device = optimizer_tier is Tier.DEVICE is not params_tier and not shared_memory
        inside = (params_tier is optimizer_tier is Tier.NVME or on_device) and not partition.replicates_params
        return unit.frozen_bytes if inside else unit.params_bytes
    in_memory = Tier.NVME not in (params_tier, optimizer_tier)
    if in_memory and (shared_memory or params_tier is optimizer_tier):
        trained_bytes = (unit.params_bytes - unit.frozen_bytes) * partition.param_shards
        return unit.optimizer_bytes - divide_up(trained_bytes, partition.optimizer_shards)
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
            yield tiers[kind], kind, nbytes


def _params_of_device(
    unit: UnitBytes, nbytes: int, optimizer: Tier, partition: Partition
) -> Iterator[tuple[Tier, StateKind, int]]:
    """A device is brought what it does not update itself from the host's memory; where ranks gather parameters for
    each use, that is the only place that they rest in.
    """
    trained, frozen = (
        divide_up(whole * partition.param_shards, partition.optimizer_shards)
        for whole in (unit.params_bytes - unit.frozen_bytes, unit.frozen_bytes)
    )
    is_gathered = partition.param_shards > 1
    brought = frozen if optimizer is Tier.DEVICE else nbytes
    yield Tier.DEVICE, StateKind.PARAMS, nbytes - brought * is_gathered
    # Beside optimizer states in the host's memory the trained values are a part of them.
    yield Tier.CPU, StateKind.PARAMS, frozen + trained * (optimizer is Tier.NVME)


def divide_up(value: int, parts: int) -> int:
    return -(-value // parts)
