"""Plans of what is frozen: quantized weights, experts in groups, a base that rests in its files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from zero_offload.base.config import OffloadConfig
from zero_offload.base.types import StateKind, Tier
from zero_offload.hardware.machines import Machine, Resource
from zero_offload.plan.dtypes import resolve
from zero_offload.plan.expert_groups import GROUPS_IN_FLIGHT
from zero_offload.plan.layout import CHUNK_NUMEL, make_layout
from zero_offload.plan.memory import (
    BASE_BUFFER_BYTES,
    CHUNKS_IN_FLIGHT,
    Budget,
    Placement,
    UnitNumel,
    estimate_memory,
    measure_units,
)
from zero_offload.plan.model_spec import ExpertGroups, ModelSpec
from zero_offload.plan.partition import ONE_RANK, Partition
from zero_offload.plan.shapes import UnitWork, plain_block, work_of
from zero_offload.plan.step_time import StepBatch, StepWorkload, Work, predict, unit_seconds

GPU = Machine(False, 1e14, 1e12, 25e9, 25e9, 50e9, 50e9, 10e9, 5e9, True, 0.0)
NUMEL = 10**8
ON_NVME = {StateKind.PARAMS: Tier.NVME, StateKind.GRADS: Tier.DEVICE, StateKind.OPTIMIZER: Tier.DEVICE}
ROOMY = Budget(1 << 40, 1 << 40, 1 << 40, False)
UPDATE_BYTES = CHUNKS_IN_FLIGHT * CHUNK_NUMEL * 4
READ, UPLOAD, DOWNLOAD = map(list(Resource).index, (Resource.READ, Resource.UPLOAD, Resource.DOWNLOAD))


def config(**settings: Any) -> OffloadConfig:
    return OffloadConfig(**({"params": "nvme", "nvme": "x", "durability": "scratch"} | settings))


def frozen(**numel: Any) -> UnitWork:
    unit = replace(plain_block(UnitNumel("0", 0, NUMEL)), frozen_matmul_numel=float(NUMEL))
    return replace(unit, numel=replace(unit.numel, **numel))


def read_s(work: UnitWork, batch: StepBatch) -> float:
    """Seconds that drives read for a step of several such units, none of which stays."""
    workload = StepWorkload.of([work] * 8, config(device_memory="1GiB"), ONE_RANK, batch)
    placement = Placement((ON_NVME,) * 8, replace(ROOMY, device_bytes=1 << 30))
    found = predict(workload, placement, GPU)
    return found.busy[Resource.READ] * found.step_s / 8


@pytest.mark.parametrize("durability", ["scratch", "process"])
@pytest.mark.parametrize("tier", [Tier.NVME, Tier.CPU])
def test_a_base_in_its_files_takes_a_buffer_and_nothing_of_drives(durability: str, tier: Tier) -> None:
    settings = config(durability=durability)
    placement = Placement(({**ON_NVME, StateKind.PARAMS: tier},), ROOMY)

    def planned(base_bytes: int) -> Any:
        return estimate_memory(
            measure_units([UnitNumel("0", 0, NUMEL, base_bytes=base_bytes)], settings), placement, settings
        )

    own, base, half = planned(0), planned(2 * NUMEL), planned(NUMEL)
    copies = tier is Tier.NVME or durability != "scratch"
    assert own.used_bytes(Tier.NVME) == 2 * NUMEL * copies and base.used_bytes(Tier.NVME) == 0
    assert half.used_bytes(Tier.NVME) == NUMEL * copies
    assert base.used_bytes(Tier.CPU) - own.used_bytes(Tier.CPU) == BASE_BUFFER_BYTES
    assert base.wear.bytes_per_step == own.wear.bytes_per_step == 0


def test_experts_in_groups_are_fetched_for_each_forward_and_backward() -> None:
    sizes = {"sizes": (0, 2 * NUMEL, 0), "group_bytes": NUMEL // 4}
    experts = replace(frozen(**sizes), in_groups=True, attention_width=0, share_met=1 / 16)
    whole_s, many = 2 * NUMEL / GPU.read_bytes, StepBatch(2048, 1, 2048)
    assert read_s(experts, many) == pytest.approx(2 * whole_s)
    assert read_s(experts, replace(many, recompute=False)) == pytest.approx(2 * whole_s)
    assert read_s(experts, replace(many, micro_batches=3)) == pytest.approx(6 * whole_s)
    # zo.accumulate takes turns at units, and each micro-batch fetches its own groups.
    assert read_s(experts, replace(many, micro_batches=3, by_unit=True)) == pytest.approx(6 * whole_s)
    # Units that are fetched whole stay for all of them.
    assert read_s(frozen(), replace(many, micro_batches=3, by_unit=True)) <= 2 * whole_s


def test_trained_experts_in_groups_are_fetched_too() -> None:
    numel = UnitNumel("0", NUMEL, 0, group_bytes=NUMEL // 4)
    work = replace(frozen(), numel=numel, in_groups=True, attention_width=0, share_met=1 / 16)
    at = {StateKind.PARAMS: Tier.NVME, StateKind.GRADS: Tier.CPU, StateKind.OPTIMIZER: Tier.CPU}
    workload = StepWorkload.of([work], config(), ONE_RANK, StepBatch(2048, 1, 2048))
    found = unit_seconds(workload, 0, at, GPU)[:, READ]
    assert found.sum() == pytest.approx(2 * 2 * NUMEL / GPU.read_bytes)


def test_ranks_fetch_what_has_left_to_add_it_up() -> None:
    numel = UnitNumel("0", NUMEL, 0, group_bytes=NUMEL // 4)
    work = replace(frozen(), numel=numel, in_groups=True, attention_width=0)
    at = {StateKind.PARAMS: Tier.NVME, StateKind.GRADS: Tier.CPU, StateKind.OPTIMIZER: Tier.CPU}
    found = list[Any]()
    for each in (work, replace(work, numel=replace(numel, group_bytes=0), in_groups=False)):
        workload = StepWorkload.of([each], config(), Partition(3, 2), StepBatch(2048, 1, 2048))
        found.append(unit_seconds(workload, 0, at, GPU)[Work.GRADS, [UPLOAD, DOWNLOAD]])
    assert found[0] - found[1] == pytest.approx([2 * NUMEL / GPU.upload_bytes, 2 * NUMEL / GPU.download_bytes])
    assert found[1] == pytest.approx([0, 4 * NUMEL // 2 / GPU.download_bytes])


def test_few_tokens_touch_few_experts() -> None:
    experts = replace(frozen(), share_met=1 / 16)
    assert experts.share_touched(1) == pytest.approx(1 / 16)
    assert experts.share_touched(16) == pytest.approx(1 - (15 / 16) ** 16)
    assert experts.share_touched(512) == pytest.approx(1.0)
    groups = replace(experts, in_groups=True, numel=replace(experts.numel, group_bytes=NUMEL))
    one, many = (read_s(groups, StepBatch(tokens, 1, tokens)) for tokens in (1, 512))
    assert one == pytest.approx(many / 16, rel=1e-3)


def test_memory_has_two_groups_and_not_the_unit() -> None:
    units = measure_units([UnitNumel("0", 0, NUMEL, group_bytes=1000), UnitNumel("1", 0, NUMEL // 10)], config())
    plan = estimate_memory(units, Placement((ON_NVME, ON_NVME), ROOMY), config())
    assert plan.staging_bytes[Tier.DEVICE] == 2 * NUMEL // 10 + GROUPS_IN_FLIGHT * 1000


@pytest.mark.parametrize(
    ("placed", "world_size", "made", "sent", "staged"),
    [
        ("cpu", 1, 2 * 1000, 1000, 2 * NUMEL),
        ("nvme", 1, 2 * 1000, 1000, 2 * NUMEL + 2 * 2 * NUMEL + UPDATE_BYTES),  # and pages on their way to the drive
        ("device", 1, 2 * NUMEL, 0, UPDATE_BYTES),
        ("cpu", 2, 2 * 1000 + 3 * 2 * 1000, 1000, 2 * NUMEL + 3 * 4 * NUMEL // 2),  # and pieces of a sum in fp32
        ("device", 2, 3 * 4 * NUMEL, 0, UPDATE_BYTES),
    ],
)
def test_gradients_of_trained_experts_leave_a_gpu_group_by_group(
    placed: str, world_size: int, made: int, sent: int, staged: int
) -> None:
    """A group's are made, and a group's leave; the host has a layer's. On the GPU it is whole."""
    partition = Partition(3, world_size)
    units = measure_units([UnitNumel("0", NUMEL, group_bytes=1000)] * 3, config(), partition)
    tiers = {**ON_NVME, StateKind.GRADS: Tier(placed), StateKind.OPTIMIZER: Tier.CPU}
    plan = estimate_memory(units, Placement((tiers,) * 3, ROOMY), config(), partition)
    assert plan.staging_bytes[Tier.DEVICE] == GROUPS_IN_FLIGHT * 1000 + made + sent
    assert plan.staging_bytes[Tier.CPU] == GROUPS_IN_FLIGHT * 1000 + staged


def test_a_quantized_weight_is_made_for_each_use() -> None:
    plain, quantized = frozen(), replace(frozen(), quantized_numel=float(NUMEL))
    batch = StepBatch(2048, 1, 2048)

    def seconds(work: UnitWork, recompute: bool) -> Any:
        workload = StepWorkload.of([work], config(), ONE_RANK, replace(batch, recompute=recompute))
        return unit_seconds(workload, 0, ON_NVME, GPU)[:2, list(Resource).index(Resource.COMPUTE)]

    made_s = 2 * 2 * NUMEL / GPU.device_bytes
    assert seconds(quantized, True) - seconds(plain, True) == pytest.approx([made_s, 2 * made_s])
    assert seconds(quantized, False) - seconds(plain, False) == pytest.approx([made_s, made_s])


class Packed(nn.Module):
    """A layer of 64 x 32 in 4 bits, and its scales."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = 32, 64
        self.weight = nn.Parameter(torch.zeros(64 * 32 // 2, 1, dtype=torch.uint8), requires_grad=False)


class Mixture(nn.Module):
    """Eight experts in one parameter, and maybe an expert that sees every token."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.zeros(8, 4, 16), requires_grad=False)
        if shared:
            self.shared_experts = nn.Linear(4, 16)


class Named(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.config = type("Config", (), {"hidden_size": 32, "num_attention_heads": 2, "num_experts_per_tok": 2})()


def test_work_of_a_quantized_layer_is_that_of_what_it_stands_for() -> None:
    model = Named(Packed(), Packed())
    spec = ModelSpec.from_module(model, ["blocks.0", "blocks.1"])
    for work in work_of(model, spec).units:
        assert work.matmul_numel == work.frozen_matmul_numel == work.quantized_numel == 64 * 32
        assert work.numel.frozen == 64 * 32
    layout = make_layout(spec, resolve(model, config()), 1)
    assert UnitNumel.of(layout.units[0]).sizes == (0, 64 * 32 // 2, 0)


@pytest.mark.parametrize("shared", [False, True])
def test_work_of_experts_in_groups(shared: bool) -> None:
    model = Named(Mixture(shared), Mixture(shared))
    experts = {f"blocks.{index}.experts": ExpertGroups(8, 2) for index in range(2)}
    spec = ModelSpec.from_module(model, ["blocks.0", "blocks.1"], experts=experts)
    found = {work.numel.name: work for work in work_of(model, spec).units}["blocks.0.experts"]
    assert found.in_groups and found.keeps_output is shared and found.share_met == 2 / 8
    assert found.matmul_numel == found.frozen_matmul_numel == 8 * 4 * 16 * 2 / 8
    assert found.attention_width == 0 and not found.keeps_inputs(True)
    assert [found.rerun_share(128, recompute) for recompute in (False, True)] == [1.0, 1.0]
    assert [found.saved_values(recompute) for recompute in (False, True)] == [32, 32 if shared else 0]


def test_backward_of_trained_experts_makes_gradients_of_them_too() -> None:
    model = Named(Mixture(False), Mixture(False))
    model.blocks[1].requires_grad_(True)
    experts = {f"blocks.{index}.experts": ExpertGroups(8, 2) for index in range(2)}
    found = work_of(model, ModelSpec.from_module(model, ["blocks.0", "blocks.1"], experts=experts)).units
    assert [work.backward_share(128) for work in found] == [1.0, 2.0]
