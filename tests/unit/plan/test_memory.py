from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from zero_offload.base.config import OffloadConfig, Precision
from zero_offload.base.types import GIB, MIB, StateKind, Tier
from zero_offload.plan.dtypes import ComputeDtypes
from zero_offload.plan.layout import CHUNK_NUMEL, make_layout
from zero_offload.plan.memory import (
    CHUNKS_IN_FLIGHT,
    GRADS_IN_FLIGHT,
    PLACED_KINDS,
    Budget,
    MemoryPlan,
    Placement,
    UnitNumel,
    WalkBytes,
    estimate_memory,
    gpu_walk_bytes,
    margin_bytes,
    measure_units,
    walk_bytes,
    walk_notes,
)
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.plan.partition import ONE_RANK, Partition
from zero_offload.plan.table import PlanTable
from zero_offload.storage.shards.shard import planned_components, shard_bytes

ROOMY = Budget(device_bytes=80 * GIB, cpu_bytes=80 * GIB, nvme_bytes=800 * GIB, shared_memory=True)
GPU = Budget(device_bytes=80 * GIB, cpu_bytes=80 * GIB, nvme_bytes=800 * GIB, shared_memory=False)
N = 1000
PARAMS, GRADS, OPTIMIZER = PLACED_KINDS


def estimate(
    tiers: tuple[str, str, str], budget: Budget = ROOMY, world_size: int = 1, frozen: int = 0, **settings: Any
) -> MemoryPlan:
    config = OffloadConfig(**({"nvme": "x"} | settings))
    partition = Partition(config.stage, world_size)
    units = measure_units([UnitNumel("a", N, frozen), UnitNumel("b", 2 * N)], config, partition)
    placed = {kind: Tier(tier) for kind, tier in zip(PLACED_KINDS, tiers, strict=True)}
    return estimate_memory(units, Placement((placed, placed), budget), config, partition)


def used(plan: MemoryPlan) -> dict[tuple[str, str], int]:
    return {(tier.value, kind.value): n for (tier, kind), n in plan.rest_bytes.items() if n}


def test_bf16_in_memory_of_one_rank_is_12_bytes_and_the_gradient() -> None:
    plan = estimate(("cpu", "cpu", "cpu"), durability="scratch")
    assert used(plan) == {
        ("cpu", "params"): 2 * 3 * N,
        ("cpu", "grads"): 2 * 3 * N,
        ("cpu", "optimizer"): 10 * 3 * N,
    }
    assert plan.nvme_written_bytes_per_step == 0


def test_fp16_has_a_master_beside_its_value() -> None:
    memory = estimate(("cpu", "cpu", "cpu"), durability="scratch", precision="fp16")
    assert used(memory) == {
        ("cpu", "params"): 2 * 3 * N,
        ("cpu", "grads"): 2 * 3 * N,
        ("cpu", "optimizer"): 12 * 3 * N,
    }
    nvme = estimate(("nvme", "cpu", "nvme"), precision="fp16")
    assert used(nvme) == {
        ("cpu", "grads"): 2 * 3 * N,
        ("nvme", "params"): 2 * 3 * N,  # in the optimizer's extents
        ("nvme", "optimizer"): (2 * 14 - 2) * 3 * N,
    }
    assert nvme.nvme_written_bytes_per_step == 14 * 3 * N
    assert nvme.staging_bytes[Tier.CPU] == CHUNKS_IN_FLIGHT * 18 * MIB


@pytest.mark.parametrize("states", ["fp32", "bf16", "compact"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_table_is_what_shards_have(precision: str, states: str) -> None:
    config = OffloadConfig(precision=Precision(compute=precision, states=states))
    spec = ModelSpec.from_module(nn.Linear(512, 512, bias=False))
    dtypes = ComputeDtypes(getattr(torch, config.compute_dtype_name), states=config.state_format)
    (section,) = make_layout(spec, dtypes, 1).sections
    (unit,) = measure_units([UnitNumel("a", section.numel)], config)
    expected = shard_bytes(section, planned_components(section))
    assert (unit.optimizer_bytes, unit.params_bytes) == (expected, section.nbytes)


def test_fp32_has_the_parameter_as_its_master() -> None:
    plan = estimate(("cpu", "cpu", "cpu"), durability="scratch", precision="fp32")
    assert used(plan) == {
        ("cpu", "params"): 4 * 3 * N,
        ("cpu", "grads"): 4 * 3 * N,
        ("cpu", "optimizer"): 8 * 3 * N,
    }


@pytest.mark.parametrize(("durability", "slots"), [("scratch", 1), ("process", 2), ("commit", 2)])
def test_optimizer_on_nvme_is_self_contained_and_has_slots(durability: str, slots: int) -> None:
    plan = estimate(("cpu", "cpu", "nvme"), durability=durability)
    assert used(plan)["nvme", "optimizer"] == slots * 12 * 3 * N
    assert used(plan)["cpu", "params"] == 2 * 3 * N
    assert plan.nvme_written_bytes_per_step == 12 * 3 * N


def test_states_in_memory_are_snapshotted_into_two_slots() -> None:
    plan = estimate(("cpu", "cpu", "cpu"), commit_every=10)
    assert used(plan)["nvme", "optimizer"] == 2 * 12 * 3 * N
    assert plan.nvme_written_bytes_per_step == 12 * 3 * N // 10


def test_without_a_directory_nothing_is_on_nvme() -> None:
    plan = estimate(("cpu", "cpu", "cpu"), nvme=None)
    assert plan.used_bytes(Tier.NVME) == 0


def test_params_on_nvme_live_in_the_optimizers_extents_or_in_a_cache() -> None:
    both = estimate(("nvme", "cpu", "nvme"), durability="scratch")
    assert used(both) == {
        ("cpu", "grads"): 2 * 3 * N,
        ("nvme", "params"): 2 * 3 * N,
        ("nvme", "optimizer"): 10 * 3 * N,
    }
    assert both.used_bytes(Tier.NVME) == 12 * 3 * N
    cache = estimate(("nvme", "cpu", "cpu"), durability="scratch")
    assert used(cache)["nvme", "params"] == 2 * 3 * N
    assert used(cache)["cpu", "optimizer"] == 12 * 3 * N
    assert cache.nvme_written_bytes_per_step == 2 * 3 * N


def test_grads_on_nvme_are_written_every_step() -> None:
    plan = estimate(("cpu", "nvme", "cpu"), durability="scratch")
    assert used(plan)["nvme", "grads"] == plan.nvme_written_bytes_per_step == 2 * 3 * N


@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_a_generation_has_frozen_values_once(params: str) -> None:
    memory = estimate((params, "cpu", "cpu"), frozen=500)
    cache = 3 * N * 2 * (params == "nvme")  # of trained values, which the optimizer's extents have as well
    assert memory.rest_bytes[Tier.NVME, StateKind.PARAMS] == 500 * 2 + cache
    assert estimate((params, "cpu", "cpu"), frozen=500).wear == estimate((params, "cpu", "cpu")).wear


def test_frozen_parameters_have_a_value_only() -> None:
    memory = estimate(("cpu", "cpu", "cpu"), frozen=500, durability="scratch")
    assert used(memory) == {
        ("cpu", "params"): 2 * (3 * N + 500),
        ("cpu", "grads"): 2 * 3 * N,
        ("cpu", "optimizer"): 10 * 3 * N,
    }
    nvme = estimate(("nvme", "cpu", "nvme"), frozen=500, durability="scratch")
    assert used(nvme)["nvme", "params"] == 2 * (3 * N + 500)
    assert nvme.nvme_written_bytes_per_step == 12 * 3 * N
    cache = estimate(("nvme", "cpu", "cpu"), frozen=500, durability="scratch")
    assert used(cache)["nvme", "params"] == 2 * (3 * N + 500)
    assert cache.nvme_written_bytes_per_step == 2 * 3 * N


def test_several_ranks_share_everything_in_stage_3_and_nothing_in_stage_0() -> None:
    sharded = estimate(("cpu", "cpu", "cpu"), world_size=2, durability="scratch")
    assert used(sharded) == {
        ("cpu", "params"): 2 * 3 * N // 2,
        ("cpu", "grads"): 4 * 3 * N // 2,
        ("cpu", "optimizer"): 10 * 3 * N // 2,
    }
    whole = estimate(("cpu", "cpu", "cpu"), world_size=2, stage=0, durability="scratch")
    assert used(whole)["cpu", "params"] == 2 * 3 * N


def test_what_a_gpu_updates_has_its_value_there() -> None:
    """Forward uses it in place, whatever the params tier; frozen values stay on theirs."""
    for tier in ("cpu", "nvme"):
        plan = estimate((tier, "cpu", "device"), GPU, frozen=500, durability="scratch")
        assert used(plan) == {
            ("device", "params"): 2 * 3 * N,
            ("device", "optimizer"): 10 * 3 * N,
            (tier, "params"): 2 * 500,
            ("cpu", "grads"): 2 * 3 * N,
        }
        assert plan.nvme_written_bytes_per_step == 0
        arriving = 2 * 500
        largest_grads = 2 * 2 * N
        assert plan.staging_bytes[Tier.DEVICE] == arriving + 2 * largest_grads + 4 * CHUNK_NUMEL * 4  # made, and sent
    here = estimate(("device", "device", "device"), GPU, durability="scratch")
    assert used(here) == {
        ("device", "params"): 2 * 3 * N,
        ("device", "grads"): 2 * 3 * N,
        ("device", "optimizer"): 10 * 3 * N,
    }
    assert here.staging_bytes == {Tier.DEVICE: 2 * 2 * N, Tier.CPU: 0, Tier.NVME: 0}


def test_a_commit_of_what_a_gpu_holds_passes_through_cpu_memory() -> None:
    kept, scratch = (estimate(("device",) * 3, GPU, durability=each) for each in ("process", "scratch"))
    assert kept.staging_bytes[Tier.CPU] - scratch.staging_bytes[Tier.CPU] == 2 * CHUNK_NUMEL * (12 + 4)
    assert estimate(("device",) * 3, ROOMY).staging_bytes[Tier.CPU] == 0


def test_a_gpu_whose_states_are_in_cpu_memory_has_values_of_its_own() -> None:
    plan = estimate(("device", "cpu", "cpu"), GPU, durability="scratch")
    assert plan.rest_bytes[Tier.DEVICE, PARAMS] == 2 * 3 * N
    assert plan.rest_bytes[Tier.CPU, OPTIMIZER] == 12 * 3 * N


def test_accumulated_gradients_are_fp32() -> None:
    (unit,) = measure_units([UnitNumel("a", N)], OffloadConfig(), num_micro_batches=4)
    assert unit.grads_bytes == 4 * N


def test_gradients_that_backward_uses_pass_through_a_ring() -> None:
    config = OffloadConfig(overlap="backward", nvme="x", durability="scratch")
    units = measure_units([UnitNumel(str(i), i * N) for i in range(1, 8)], config)
    assert all(unit.grads_bytes == 0 and unit.passing_grads_bytes == unit.params_bytes for unit in units)
    largest = 2 * N * (7 + 6 + 5 + 4 + 3)
    for tier, budget, home in (
        ("cpu", ROOMY, Tier.CPU),
        ("nvme", GPU, Tier.CPU),
        ("device", ROOMY, Tier.CPU),
        ("device", GPU, Tier.DEVICE),
    ):
        placed = {PARAMS: Tier.CPU, GRADS: Tier(tier), OPTIMIZER: Tier.CPU}
        plan = estimate_memory(units, Placement((placed,) * 7, budget), config)
        held = estimate_memory(
            measure_units([UnitNumel(str(i), i * N) for i in range(1, 8)], OffloadConfig(nvme="x")),
            Placement((placed,) * 7, budget),
            OffloadConfig(nvme="x", durability="scratch"),
        )
        assert [plan.rest_bytes[each, GRADS] for each in Tier] == [0, 0, 0]
        # Gradients that are held go to the drive by way of two units' pages.
        pages = 2 * (7 + 6) * N * ((tier, budget) == ("nvme", GPU))
        assert plan.staging_bytes[home] - held.staging_bytes[home] == largest - pages
        assert plan.nvme_written_bytes_per_step == 0
    (summed,) = measure_units([UnitNumel("a", N)], config, num_micro_batches=2)
    assert (summed.grads_bytes, summed.passing_grads_bytes) == (4 * N, 0)
    for stage in (0, 1, 2, 3):
        (unit,) = measure_units([UnitNumel("a", N)], config, Partition(stage, 4))
        assert (unit.grads_bytes, unit.passing_grads_bytes) == (0, 4 * N // (4 if stage else 1))


def test_staging_on_a_cpu_device_needs_no_copy_of_params_in_memory() -> None:
    in_place = estimate(("cpu", "cpu", "cpu"))
    assert in_place.staging_bytes[Tier.DEVICE] == 2 * 2 * N  # the largest unit's gradient
    assert in_place.staging_bytes[Tier.CPU] == 0
    streamed = estimate(("nvme", "cpu", "nvme"))
    assert streamed.staging_bytes[Tier.DEVICE] == 2 * 3 * N + 2 * 2 * N
    assert streamed.staging_bytes[Tier.CPU] == CHUNKS_IN_FLIGHT * 16 * MIB


def test_staging_on_a_gpu_passes_through_cpu_memory() -> None:
    plan = estimate(("nvme", "device", "device"), budget=GPU, durability="scratch", frozen=500)
    assert plan.staging_bytes[Tier.DEVICE] == 2 * 500 + 2 * 2 * N
    assert plan.staging_bytes[Tier.CPU] == 2 * (3 * N + 500)


@pytest.mark.parametrize(("precision", "nbytes"), [("bf16", 2), ("fp32", 4)])
def test_gradients_on_their_way_from_a_gpu_are_staged_as_they_are_made(precision: str, nbytes: int) -> None:
    """Three units of them; over ranks, this one's part of fp32 sums, or where those are deferred its own gradients."""

    def staged(grads: str, partition: Partition = ONE_RANK, budget: Budget = GPU, **settings: Any) -> int:
        config = OffloadConfig(nvme="x", precision=precision, durability="scratch", **settings)
        units = measure_units([UnitNumel(str(i), i * N, frozen=9 * N) for i in range(1, 6)], config, partition)
        placed = {PARAMS: Tier.CPU, GRADS: Tier(grads), OPTIMIZER: Tier.CPU}
        placement = Placement((placed,) * 5, budget)
        return estimate_memory(units, placement, config, partition).staging_bytes[Tier.CPU]

    largest = (5 + 4 + 3) * N
    assert staged("cpu") == nbytes * largest
    pages = nbytes * (5 + 4) * N
    assert staged("nvme") == nbytes * largest + pages + CHUNKS_IN_FLIGHT * CHUNK_NUMEL * 4
    assert staged("device") == CHUNKS_IN_FLIGHT * CHUNK_NUMEL * 4
    assert staged("cpu", budget=ROOMY) == 0
    ring = nbytes * sum(range(1, 6)) * N
    assert staged("cpu", overlap="backward") == nbytes * largest + ring
    for stage, expected in {0: 4, 1: nbytes, 2: 4 / 4, 3: 4 / 4}.items():
        assert staged("cpu", Partition(stage, 4)) == expected * largest
    assert staged("cpu", Partition(3, 4, num_replicas=4)) == 4 * largest


@pytest.mark.parametrize(
    ("grads", "budget", "chunk_bytes"),
    [("device", GPU, 4 * MIB), ("nvme", GPU, 4 * MIB), ("cpu", GPU, 0), ("device", ROOMY, 0), ("nvme", ROOMY, 4 * MIB)],
)
def test_gradients_that_an_update_on_the_host_does_not_find_in_its_memory_are_staged(
    grads: str, budget: Budget, chunk_bytes: int
) -> None:
    plan = estimate(("device", grads, "cpu"), budget=budget)
    # A gradient that a GPU makes and the host keeps is staged too, and on its way to a drive has pages.
    on_its_way = {"device": 0, "cpu": 2 * 3 * N, "nvme": 2 * 2 * 3 * N}[grads] * (not budget.shared_memory)
    assert plan.staging_bytes[Tier.CPU] == on_its_way + CHUNKS_IN_FLIGHT * chunk_bytes
    with_states = estimate(("device", grads, "nvme"), budget=budget)
    assert with_states.staging_bytes[Tier.CPU] == on_its_way + CHUNKS_IN_FLIGHT * 16 * MIB


def test_gradients_in_the_memory_of_a_gpu_are_counted_there() -> None:
    plan = estimate(("cpu", "device", "cpu"), budget=GPU, durability="scratch")
    assert used(plan)["device", "grads"] == 2 * 3 * N
    assert plan.used_bytes(Tier.DEVICE) == plan.staging_bytes[Tier.DEVICE] + 2 * 3 * N


def test_whole_units_are_gathered_from_all_ranks() -> None:
    plan = estimate(("device", "device", "device"), budget=GPU, world_size=4)
    # Both units in flight, and the gradients of the largest in fp32, two at a time.
    assert plan.staging_bytes[Tier.DEVICE] == 2 * 3 * N + (GRADS_IN_FLIGHT + 1) * 4 * 2 * N


def test_stages_divide_one_kind_of_state_after_another() -> None:
    """Four ranks; of 12 bytes of optimizer states, 2 are the parameters while those are in memory."""
    expected = {
        0: (2, 4, 10),
        1: (2, 4 + 4 / 4, 12 / 4 - 2 / 4),
        2: (2, 4 / 4, 12 / 4 - 2 / 4),
        3: (2 / 4, 4 / 4, 12 / 4 - 2 / 4),
    }
    for stage, (params, grads, optimizer) in expected.items():
        found = used(estimate(("cpu", "cpu", "cpu"), world_size=4, stage=stage, durability="scratch"))
        assert found["cpu", "params"] == params * 3 * N
        assert found["cpu", "grads"] == grads * 3 * N
        assert found["cpu", "optimizer"] == optimizer * 3 * N


def test_whole_parameters_on_nvme_are_a_file_of_their_own() -> None:
    plan = estimate(("nvme", "cpu", "nvme"), world_size=4, stage=2, durability="scratch")
    assert used(plan)["nvme", "params"] == 2 * 3 * N and used(plan)["nvme", "optimizer"] == 12 * 3 * N / 4
    assert plan.nvme_written_bytes_per_step == (12 / 4 + 2) * 3 * N


def test_it_fits_or_says_what_is_missing() -> None:
    assert estimate(("cpu", "cpu", "nvme")).fits
    small = Budget(device_bytes=100, cpu_bytes=10_000, nvme_bytes=10_000, shared_memory=False)
    plan = estimate(("device", "cpu", "nvme"), budget=small, durability="scratch")
    assert not plan.fits
    device, cpu, nvme = plan.reasons
    assert device.startswith("device tier: needs ") and device.endswith("missing")
    assert "cpu tier: needs 64 MiB, 9.77 KiB available, 64 MiB missing" in cpu
    assert nvme == "nvme tier: needs 35.2 KiB, 9.77 KiB available, 25.4 KiB missing"


def test_on_a_cpu_device_both_memory_tiers_fill_the_same_memory() -> None:
    tight = Budget(device_bytes=30_000, cpu_bytes=30_000, nvme_bytes=0, shared_memory=True)
    plan = estimate(("device", "cpu", "cpu"), budget=tight, nvme=None)
    assert plan.used_bytes(Tier.DEVICE) < 30_000 > plan.used_bytes(Tier.CPU) - 12_000
    assert [reason.split(":")[0] for reason in plan.reasons] == ["memory (the compute device is the CPU)"]


def test_the_table_shows_every_number() -> None:
    text = str(estimate(("cpu", "cpu", "nvme"), durability="scratch"))
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert text.splitlines()[0].split() == ["memory", "nvme"]  # a CPU computes: its memory is one place
    assert "5.86 KiB" in lines["parameters"]
    assert "35.2 KiB" in lines["optimizer"]
    assert "written to NVMe per step: 35.2 KiB" in text
    assert text.endswith("it fits")
    assert {"parameters", "gradients", "optimizer", "in", "total", "available"} <= set(lines)
    assert str(estimate(("cpu", "cpu", "nvme"), GPU)).splitlines()[0].split() == ["gpu", "memory", "nvme"]


def test_generations_are_a_row_of_their_own() -> None:
    plan = estimate(("nvme", "cpu", "nvme"))
    rows = plan.as_table().rows
    assert rows["generations"] == {"nvme": 12 * 3 * N}  # second slots
    assert (rows["parameters"], rows["optimizer"]) == ({"nvme": 2 * 3 * N}, {"nvme": 10 * 3 * N})
    assert plan.as_table().total["nvme"] == plan.used_bytes(Tier.NVME)


def test_on_a_cpu_device_a_table_has_one_memory_that_is_counted_once() -> None:
    budget = Budget(device_bytes=20_000, cpu_bytes=30_000, nvme_bytes=0, shared_memory=True)
    plan = estimate(("device", "cpu", "cpu"), budget=budget, nvme=None)
    table = plan.as_table({"activations": {"memory": 5_000}, "program": {"memory": 7_000}})
    both = plan.used_bytes(Tier.DEVICE) + plan.used_bytes(Tier.CPU)
    assert table.available == {"memory": 30_000 + 12_000}  # budgets are for states
    assert table.states == {"memory": both} and table.total == {"memory": both + 12_000}
    assert PlanTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table
    # The shortage is the same with and without the bytes that stand beside states.
    tight = replace(plan, budget=replace(budget, cpu_bytes=both - 1))
    beside = tight.as_table({"activations": {"memory": 5_000}})
    assert [line.rpartition(", ")[2] for line in (*tight.reasons, *tight.shortages(beside))] == ["1 B missing"] * 2


def many(count: int, budget: Budget, world_size: int = 1, **settings: Any) -> MemoryPlan:
    """A model of so many equal units of 1 MiB in CPU memory beside a GPU."""
    config = OffloadConfig(**({"precision": "fp32", "durability": "scratch"} | settings))
    partition = Partition(config.stage, world_size)
    units = measure_units([UnitNumel(str(i), MIB // 4) for i in range(count)], config, partition)
    placed = dict.fromkeys(PLACED_KINDS, Tier.CPU)
    return estimate_memory(units, Placement((placed,) * count, budget), config, partition)


def test_as_many_parameters_stay_on_a_gpu_as_it_has_room_for() -> None:
    """All of them; what a margin leaves; three; and what a budget leaves, which has none."""
    assert many(100, GPU).kept_params_bytes == 100 * MIB
    assert many(100, ROOMY).kept_params_bytes == 0
    margin, beside = margin_bytes(GIB, 1, is_measured=False), 2 * MIB  # a gradient that is made, one on its way
    small = replace(GPU, device_bytes=GIB)
    assert many(1000, small).kept_params_bytes == GIB - margin - beside
    assert many(1000, small, world_size=2).kept_params_bytes == 3 * MIB, "communicators take more"
    assert many(1000, replace(GPU, device_bytes=20 * MIB)).kept_params_bytes == 3 * MIB
    given = many(100, replace(GPU, device_bytes=20 * MIB), device_memory="20MiB")
    assert given.kept_params_bytes == 20 * MIB - beside
    assert "parameters on the device: up to 18 MiB, less what activations take" in str(given)
    assert "parameters on the device" not in str(many(100, ROOMY))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_activations_that_come_back_ahead_are_counted(tier: str) -> None:
    def more(where: Tier, budget: Budget) -> int:
        stay, leave = (many(4, budget, nvme="x", activations=each) for each in ("device", tier))
        return leave.staging_bytes[where] - stay.staging_bytes[where]

    assert more(Tier.DEVICE, GPU) == 512 * MIB
    assert more(Tier.DEVICE, replace(GPU, device_bytes=4 * GIB)) == 256 * MIB
    assert more(Tier.DEVICE, ROOMY) == 0
    assert more(Tier.CPU, GPU) == (16 + 512) * MIB * (tier == "nvme")
    assert more(Tier.CPU, replace(GPU, device_bytes=MIB)) == (16 + 32) * MIB * (tier == "nvme")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("optimizer", ["device", "cpu", "nvme"])
def test_parameters_on_a_gpu_have_their_values_in_the_hosts_memory(optimizer: str, world_size: int) -> None:
    """Unless the GPU updates them; where ranks gather them for each use they are nowhere else."""
    frozen = 5 * N
    plan = estimate(("device", "cpu", optimizer), GPU, world_size, frozen, durability="scratch")
    found = used(plan)
    trained = 2 * 3 * N // world_size
    on_host = 2 * frozen // world_size + trained * (optimizer == "nvme")
    assert found["cpu", "params"] == on_host
    whole = trained + 2 * frozen // world_size
    if world_size == 1:
        assert found["device", "params"] == whole
    elif optimizer == "device":
        assert found["device", "params"] == trained
    else:
        assert ("device", "params") not in found


def walk(gpu_bytes: int, *, has_products: bool = True) -> WalkBytes:
    """A section at rest in 12 bytes of each element, that brings 8 of 16 to a GPU."""
    return WalkBytes(12 * N, 4 * N, False, 0, True, has_products, gpu_bytes, gpu_bytes // 2)


def test_a_gpu_that_makes_a_step_has_three_sections_or_as_many_as_fit() -> None:
    sections = [(walk(size), Tier.CPU, Tier.CPU) for size in (10, 40, 20, 30)]
    assert gpu_walk_bytes(sections, 1000) == 40 + 30 + 20 + 40
    assert gpu_walk_bytes(sections, 100) == 100
    assert gpu_walk_bytes(sections, 0) == 2 * 40
    there = [(each, Tier.CPU, Tier.DEVICE) for each, _, _ in sections]
    assert gpu_walk_bytes(there, 1000) == 20 + 15 + 10 + 20
    assert gpu_walk_bytes([], 1000) == 0


def test_sections_that_a_gpu_steps_pass_through_the_hosts_memory_on_their_ways() -> None:
    on_drive = [(walk(40), Tier.CPU, Tier.NVME)]
    assert walk_bytes(on_drive) == 3 * 12 * N + 4 * N
    assert walk_bytes([], on_drive) == 5 * 12 * N
    assert walk_bytes([], [(walk(40), Tier.DEVICE, Tier.CPU)]) == 0
    assert walk_bytes([], [(walk(40), Tier.NVME, Tier.CPU)]) == CHUNK_NUMEL * 4


@pytest.mark.parametrize(
    ("budget", "optimizer", "has_products", "is_there"),
    [
        (GPU, "cpu", True, True),
        (GPU, "cpu", False, False),
        (GPU, "device", False, True),
        (ROOMY, "cpu", True, False),
    ],
)
def test_a_gpu_steps_products_and_what_rests_with_it(
    budget: Budget, optimizer: str, has_products: bool, is_there: bool
) -> None:
    """In the place of backward's gradients, which are gone by then."""
    config, huge = OffloadConfig(nvme="x"), 10 * GIB
    placed = dict(zip(PLACED_KINDS, (Tier.CPU, Tier.CPU, Tier(optimizer)), strict=True))
    plain = measure_units([UnitNumel("a", N)], config, ONE_RANK)
    walked = [replace(each, walks=(walk(huge, has_products=has_products),)) for each in plain]
    placement = Placement((placed,), budget)
    of_gpu = [estimate_memory(each, placement, config).staging_bytes[Tier.DEVICE] for each in (plain, walked)]
    more = of_gpu[1] - of_gpu[0]
    whole = 2 * (huge if optimizer == "cpu" else huge // 2)
    assert whole - 20 * N < more <= whole if is_there else more == 0
    assert any("the GPU makes the step" in line for line in walk_notes(walked, placement)) is is_there
