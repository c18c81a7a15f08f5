from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_offload.base.config import OffloadConfig
from zero_offload.base.types import GIB, StateKind, Tier
from zero_offload.hardware.machines import Cluster, Machine, Resource, parse_drives, share_of_rank
from zero_offload.plan.forecast import (
    MEETS,
    break_even_tokens,
    find_bottleneck,
    forecast,
    next_memory,
    without_offload,
)
from zero_offload.plan.memory import PLACED_KINDS, Budget, Placement
from zero_offload.plan.partition import ONE_RANK, Partition
from zero_offload.plan.shapes import SHAPES, equal_blocks
from zero_offload.plan.step_time import Prediction, StepBatch, StepWorkload, predict

CPU = Machine(True, 1e9, 8e9, 0.0, 0.0, 8e9, 4e9, 2e9, 1e9, True, 0.0)
GPU = Machine(False, 1e12, 1e12, 20e9, 20e9, 50e9, 50e9, 5e9, 4e9, True, 0.0)
BATCH = StepBatch(tokens=64, sequence=64, recompute=False)
NUMEL = 10_000_000


def workload_of(config: OffloadConfig, count: int = 4, **changes: Any) -> StepWorkload:
    workload = StepWorkload.of(equal_blocks(count * NUMEL, count), config, changes.pop("partition", ONE_RANK), BATCH)
    return replace(workload, **changes)


def with_overlap(workload: StepWorkload, overlap: str) -> StepWorkload:
    """With the units' bytes as they are."""
    return replace(workload, config=replace(workload.config, overlap=overlap))


def placement_of(
    workload: StepWorkload, tiers: tuple[Tier, Tier, Tier], *, shared: bool, device_bytes: int = 1 << 60
) -> Placement:
    at = dict(zip(PLACED_KINDS, tiers, strict=True))
    return Placement(tuple(at for _ in workload.units), Budget(device_bytes, 1 << 60, 1 << 60, shared))


DEVICE, HOST, NVME = Tier.DEVICE, Tier.CPU, Tier.NVME


def test_everything_in_the_memory_of_a_cpu_is_compute_and_then_the_update() -> None:
    workload = workload_of(OffloadConfig())
    found = predict(workload, placement_of(workload, (HOST, HOST, HOST), shared=True), CPU)
    flops = 3 * 64 * (2 * NUMEL + 2 * 64 * workload.work[0].attention_width)
    stored_s = 2 * 2 * NUMEL / 8e9  # gradients, from where autograd makes them to where they rest
    compute_s, update_s = 4 * (flops / 1e9 + stored_s), 4 * (2 * 12 + 2) * NUMEL / 8e9
    assert found.step_s == pytest.approx(compute_s + update_s)
    assert found.exposed_s == {"update": pytest.approx(update_s)}
    assert found.tokens_per_s == pytest.approx(64 / found.step_s)
    assert found.busy[Resource.COMPUTE] == pytest.approx(compute_s / found.step_s)


def test_what_moves_beside_a_cpu_takes_its_time() -> None:
    """Values that forward and backward read, and those that a serial update writes."""
    workload = workload_of(OffloadConfig(nvme="x", durability="scratch", overlap="none"))
    placement = placement_of(workload, (NVME, HOST, HOST), shared=True)
    fast = replace(CPU, read_bytes=1e15, write_bytes=1e15, flops=1e6)
    free, taking = (predict(workload, placement, replace(fast, drive_lost_s=lost_s)) for lost_s in (0.0, 1e-8))
    # Three of four units stay from one pass to the next.
    read_bytes, written_bytes = 2 * 4 * 2 * NUMEL * (1 - 3 / 4), 4 * 2 * NUMEL
    assert taking.step_s - free.step_s == pytest.approx((read_bytes + written_bytes) * 1e-8, rel=0.01)


def test_an_update_beside_forward_takes_the_time_of_a_cpu() -> None:
    """As much as it has itself, where there is as much: the loops of compute wait for the cores that they share."""
    workload = workload_of(OffloadConfig(overlap="forward"))
    placement = placement_of(workload, (HOST, HOST, HOST), shared=True)
    alone, beside = (predict(with_overlap(workload, each), placement, CPU) for each in ("none", "forward"))
    update_s = 4 * (2 * 12 + 2) * NUMEL / CPU.host_bytes_beside
    assert beside.compute_s == pytest.approx(alone.compute_s + update_s)
    # Of a forward that is shorter than the update, no more than that.
    quick = replace(CPU, flops=1e13)
    alone, beside = (predict(with_overlap(workload, each), placement, quick) for each in ("none", "forward"))
    assert beside.compute_s == pytest.approx(alone.compute_s + 4 * 2 * NUMEL / CPU.device_bytes)


def test_a_drive_slower_than_all_else_is_the_step() -> None:
    workload = workload_of(OffloadConfig(nvme="x"))
    slow = replace(GPU, read_bytes=2e8, write_bytes=1e8, flops=1e15)
    placement = placement_of(workload, (HOST, HOST, NVME), shared=False)
    found = predict(workload, placement, slow)
    # Values are in memory: written with the states, and not read with them.
    moved_s = 4 * NUMEL * (10 / 2e8 + 12 / 1e8)
    assert found.step_s == pytest.approx(moved_s, rel=0.02)
    assert found.busy[Resource.READ] == pytest.approx(1.0, abs=0.02)
    assert find_bottleneck(workload, placement, slow, found.step_s).title == "drives"


def test_reads_beside_writes_take_less_time_than_in_turn() -> None:
    workload = workload_of(OffloadConfig(nvme="x"))
    placement = placement_of(workload, (HOST, HOST, NVME), shared=False)
    slow = replace(GPU, read_bytes=1e8, write_bytes=1e8, flops=1e15)
    in_turn = predict(workload, placement, slow).step_s
    apart = predict(workload, placement, replace(slow, drive_takes_turns=False)).step_s
    assert in_turn == pytest.approx(4 * NUMEL * (10 + 12) / 1e8, rel=0.02)
    # Writes are the longer part.
    assert apart == pytest.approx(4 * NUMEL * 12 / 1e8, rel=0.03)


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_an_update_that_hides_costs_nothing(overlap: str) -> None:
    workload = with_overlap(workload_of(OffloadConfig()), overlap)
    placement = placement_of(workload, (HOST, HOST, HOST), shared=False)
    found = predict(workload, placement, replace(GPU, flops=1e9))
    update_s = 4 * (2 * 12 + 2) * NUMEL / 50e9
    exposed = {"none": update_s, "forward": update_s / 4, "backward": update_s / 4}[overlap]
    assert found.exposed_s["update"] == pytest.approx(exposed, rel=0.2)


def test_several_ranks_gather_and_reduce() -> None:
    machine = replace(GPU, network_bytes=1e8, flops=1e15)
    workload = workload_of(OffloadConfig(), partition=Partition(3, 4))
    found = predict(workload, placement_of(workload, (HOST, HOST, HOST), shared=False), machine)
    one = 4 * NUMEL * 3 / 4 / 1e8
    # A gather in each direction, but for what stays in frames; gradients cross once in fp32.
    assert found.step_s == pytest.approx(4 * one + (2 + 2 * (4 - 3) / 4 + 1.5) * 0.5 * one, rel=0.25)
    assert find_bottleneck(
        workload, placement_of(workload, (HOST, HOST, HOST), shared=False), machine, found.step_s
    ).resource is (Resource.NETWORK)


@pytest.mark.parametrize("count", [2, 3, 40])
def test_accumulation_updates_once(count: int) -> None:
    once = workload_of(OffloadConfig())
    often = replace(once, batch=replace(BATCH, micro_batches=count))
    placement = placement_of(once, (HOST, HOST, HOST), shared=True)
    one, many = predict(once, placement, CPU), predict(often, placement, CPU)
    assert many.step_s - one.step_s == pytest.approx((count - 1) * one.compute_s)
    assert many.compute_s == pytest.approx(count * one.compute_s)
    assert many.tokens_per_s == pytest.approx(count * 64 / many.step_s)


def test_parameters_that_have_room_on_a_gpu_come_once_a_step() -> None:
    """After their update; with room for three of eight only those at the turn are not fetched again."""
    workload = workload_of(OffloadConfig(), 8)
    roomy, tight = (
        predict(workload, placement_of(workload, (HOST, HOST, HOST), shared=False, device_bytes=nbytes), GPU)
        for nbytes in (80 * GIB, 0)
    )
    once = 8 * 2 * NUMEL / 20e9
    assert seconds_of(roomy, Resource.UPLOAD) == pytest.approx(once)
    assert seconds_of(tight, Resource.UPLOAD) > 1.5 * once
    given = replace(workload, config=replace(workload.config, device_memory=80 * GIB))
    assert predict(given, placement_of(workload, (HOST, HOST, HOST), shared=False), GPU) == roomy


def seconds_of(found: Prediction, resource: Resource) -> float:
    return found.busy[resource] * found.step_s


def test_micro_batches_by_unit_move_weights_twice_and_gradients_once() -> None:
    """However many there are; a loop moves them all for each. Computing is the same."""
    workload = workload_of(OffloadConfig(nvme="x", durability="scratch"))
    placement = placement_of(workload, (NVME, NVME, HOST), shared=False, device_bytes=0)

    def of(count: int, *, by_unit: bool) -> Prediction:
        batch = replace(BATCH, micro_batches=count, by_unit=by_unit)
        return predict(replace(workload, batch=batch), placement, replace(GPU, drive_takes_turns=False))

    few, many, loop = of(2, by_unit=True), of(8, by_unit=True), of(8, by_unit=False)
    for resource in (Resource.READ, Resource.WRITE, Resource.UPLOAD, Resource.DOWNLOAD):
        assert seconds_of(many, resource) == pytest.approx(seconds_of(few, resource))
        assert seconds_of(loop, resource) > 2 * seconds_of(many, resource)
    assert seconds_of(many, Resource.COMPUTE) == pytest.approx(4 * seconds_of(few, Resource.COMPUTE))
    assert seconds_of(many, Resource.COMPUTE) == pytest.approx(seconds_of(loop, Resource.COMPUTE))
    assert many.tokens_per_s == pytest.approx(8 * 64 / many.step_s)


def test_micro_batches_by_unit_keep_all_their_activations() -> None:
    workload = workload_of(
        OffloadConfig(nvme="x", durability="scratch", activations="cpu"), batch=replace(BATCH, recompute=True)
    )
    placement = placement_of(workload, (HOST, HOST, HOST), shared=False)
    one, four = (
        predict(replace(workload, batch=replace(workload.batch, micro_batches=count, by_unit=True)), placement, GPU)
        for count in (1, 4)
    )
    saved_s = 64 * 2 * sum(each.boundary_values for each in workload.work) / GPU.upload_bytes
    assert seconds_of(four, Resource.UPLOAD) - seconds_of(one, Resource.UPLOAD) == pytest.approx(3 * saved_s)


def test_ranks_reduce_a_unit_once_for_all_micro_batches() -> None:
    workload = workload_of(OffloadConfig(), partition=Partition(3, 4))
    placement = placement_of(workload, (HOST, HOST, HOST), shared=False)
    machine = replace(GPU, network_bytes=1e8)
    two, four, loop = (
        predict(replace(workload, batch=replace(BATCH, micro_batches=count, by_unit=by_unit)), placement, machine)
        for count, by_unit in ((2, True), (4, True), (4, False))
    )
    reduced_s = 4 * 4 * NUMEL * 3 / 4 / 1e8
    assert seconds_of(four, Resource.NETWORK) == pytest.approx(seconds_of(two, Resource.NETWORK))
    assert seconds_of(loop, Resource.NETWORK) > seconds_of(four, Resource.NETWORK) + 2.9 * reduced_s


def test_machines_that_hold_the_same_send_sums_of_a_part() -> None:
    """Four ranks in two machines: halves are gathered and reduced inside, and each half is summed over both."""
    machine = replace(GPU, network_bytes=1e9, replica_bytes=1e8)
    seconds = {}
    for replicas in (1, 2):
        workload = workload_of(OffloadConfig(), partition=Partition(3, 4, replicas))
        placement = placement_of(workload, (HOST, HOST, HOST), shared=False)
        seconds[replicas] = seconds_of(predict(workload, placement, machine), Resource.NETWORK)
    gathered, reduced = 4 * 2 * NUMEL, 4 * 4 * NUMEL  # of four units that stay, in bf16; in fp32
    assert seconds[1] == pytest.approx((gathered + reduced) * 3 / 4 / 1e9)
    between = 2 * reduced / 2 / 2
    assert seconds[2] == pytest.approx((gathered + reduced) / 2 / 1e9 + between / 1e8)


def test_where_no_unit_leaves_by_unit_is_the_loop() -> None:
    workload = workload_of(OffloadConfig())
    placement = placement_of(workload, (DEVICE, HOST, HOST), shared=False)
    both = [
        predict(replace(workload, batch=replace(BATCH, micro_batches=4, by_unit=by_unit)), placement, GPU)
        for by_unit in (True, False)
    ]
    assert both[0] == both[1]


TIERS = st.tuples(*[st.sampled_from(list(Tier))] * 3)
RATES = st.floats(1e7, 1e11)


@settings(deadline=None, max_examples=150)
@given(
    tiers=st.lists(TIERS, min_size=5, max_size=5),
    rates=st.tuples(*[RATES] * 6),
    host=st.booleans(),
    turns=st.booleans(),
    overlap=st.sampled_from(["auto", "none", "forward", "backward"]),
    micro_batches=st.integers(1, 2),
    activations=st.sampled_from(list(Tier)),
    world=st.sampled_from([(0, 1), (1, 3), (2, 2), (3, 4)]),
    budget=st.sampled_from([None, 60_000_000, 90_000_000]),
)
def test_a_faster_resource_never_makes_a_step_slower_and_no_resource_is_longer_than_a_step(
    tiers: list[tuple[Tier, Tier, Tier]],
    rates: tuple[float, ...],
    host: bool,
    turns: bool,
    overlap: str,
    micro_batches: int,
    activations: Tier,
    world: tuple[int, int],
    budget: int | None,
) -> None:
    link, dram, read, write, network, flops = rates
    crossing = 0.0 if host else link
    many = network if world[1] > 1 else 0.0
    machine = Machine(host, 10 * flops, dram, crossing, crossing, dram, dram / 2, read, write, turns, many, 1e-10)
    config = OffloadConfig(nvme="x", activations=activations.value, device_memory=budget)
    batch = replace(BATCH, micro_batches=micro_batches)
    workload = StepWorkload.of(equal_blocks(5 * NUMEL, 5), config, Partition(*world), batch)
    workload = with_overlap(workload, overlap)
    at = tuple(dict(zip(PLACED_KINDS, each, strict=True)) for each in tiers)
    placement = Placement(at, Budget(1 << 60, 1 << 60, 1 << 60, host))
    before = predict(workload, placement, machine)
    assert before.step_s >= before.compute_s * (1 - 1e-9) > 0
    assert max(before.busy.values()) <= 1 + 1e-9
    assert sum(before.exposed_s.values()) + before.compute_s >= before.step_s * (1 - 1e-9)
    for resource in machine.resources():
        assert predict(workload, placement, machine.faster(resource, 1.5)).step_s <= before.step_s * (1 + 1e-9), (
            resource
        )


def test_break_even_is_where_compute_hides_the_rest() -> None:
    workload = workload_of(OffloadConfig(nvme="x"))
    placement = placement_of(workload, (HOST, HOST, NVME), shared=False)
    tokens = break_even_tokens(workload, placement, GPU)
    assert tokens is not None and tokens > 64

    def ratio(count: int) -> float:
        larger = replace(workload, batch=replace(BATCH, tokens=count))
        return predict(larger, placement, GPU).step_s / without_offload(larger, GPU)

    assert ratio(round(tokens * 1.02)) <= MEETS < ratio(round(tokens * 0.97))
    everything = placement_of(workload, (DEVICE, DEVICE, DEVICE), shared=False)
    assert break_even_tokens(replace(workload, config=OffloadConfig()), everything, GPU) == 1
    assert break_even_tokens(workload, placement, replace(GPU, read_bytes=1e3, write_bytes=1e3)) is None


def test_more_memory_is_asked_for_until_it_helps() -> None:
    def with_more(nbytes: int) -> Prediction | None:
        steps = {1: None, 2: 10.0, 4: 9.0}
        step_s = steps.get(nbytes // GIB, 1.0)
        return None if step_s is None else Prediction(step_s, 1.0, 1.0, {}, {})

    more, found = next_memory(10.0, with_more, 64)
    assert more == 4 and found is not None and found.step_s == 9.0
    assert next_memory(1.0, with_more, 16) == (16, None)


def test_a_trillion_parameters_are_predicted_quickly() -> None:
    config = OffloadConfig(params="nvme", grads="nvme", optimizer="nvme", nvme="x")
    workload = StepWorkload.of(SHAPES["gpt-1t"].units(), config, Partition(3, 64), StepBatch(8192, 1, 2048))
    drives = parse_drives(["8x7GB/s"])
    assert drives is not None
    machine = share_of_rank("h100", drives, Cluster(64, 8))
    placement = placement_of(workload, (NVME, NVME, NVME), shared=False)
    began = time.process_time()
    found = forecast(workload, placement, machine)
    assert time.process_time() - began < 10  # some 30 predictions; a guard against time by chunk
    assert found.prediction.step_s > 100 and found.bottleneck.resource in machine.resources()
    assert StateKind.PARAMS in placement.tiers[0]


# Frozen parameters


def with_adapters(config: OffloadConfig, *, trained: int = 100_000) -> StepWorkload:
    """Blocks of which only so many parameters are trained."""
    work = [
        replace(
            each,
            numel=replace(each.numel, trained=trained, frozen=NUMEL),
            matmul_numel=float(NUMEL + trained),
            frozen_matmul_numel=float(NUMEL),
        )
        for each in equal_blocks(4 * NUMEL, 4)
    ]
    return StepWorkload.of(work, config, ONE_RANK, BATCH)


def test_backward_makes_no_gradient_of_a_frozen_parameter() -> None:
    workload = with_adapters(OffloadConfig())
    found = predict(workload, placement_of(workload, (HOST, HOST, HOST), shared=False), GPU)
    attention = 2 * 64 * workload.work[0].attention_width
    forward, inputs = 2 * (NUMEL + 100_000) + attention, 2 * (NUMEL + 100_000) + 2 * attention
    assert found.compute_s == pytest.approx(4 * 64 * (forward + inputs + 2 * 100_000) / 1e12)


def test_on_a_cpu_frozen_values_are_read_for_forward_and_backward_and_trained_ones_delivered() -> None:
    workload = with_adapters(OffloadConfig(nvme="drive", durability="scratch"))
    found = predict(workload, placement_of(workload, (NVME, HOST, NVME), shared=True, device_bytes=0), CPU)
    leaves = 1 - 3 / 4  # three units stay in flight
    states = 4 * 12 * 100_000
    read = leaves * 4 * 2 * (2 * NUMEL + 100_000) + states
    drive_s = read / CPU.read_bytes + states / CPU.write_bytes
    assert found.busy[Resource.READ] * found.step_s == pytest.approx(drive_s, rel=1e-6)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_gpu_that_updates_adapters_gets_the_frozen_values_from_where_they_rest(where: str) -> None:
    workload = with_adapters(OffloadConfig(device_memory="1B", durability="scratch"))
    tier = Tier(where)
    found = predict(workload, placement_of(workload, (tier, DEVICE, DEVICE), shared=False), GPU)
    moved = 2 * 4 * 2 * NUMEL if tier is HOST else 0
    assert found.busy[Resource.UPLOAD] * found.step_s == pytest.approx(moved / GPU.upload_bytes)


def test_a_reference_is_one_more_forward_of_each_micro_batch() -> None:
    workload = workload_of(OffloadConfig(device_memory="1B", durability="scratch"))
    placement = placement_of(workload, (HOST, HOST, HOST), shared=False)
    for micro_batches in (1, 3):
        batch = replace(BATCH, micro_batches=micro_batches)
        plain = predict(replace(workload, batch=batch), placement, GPU)
        found = predict(replace(workload, batch=replace(batch, has_reference=True)), placement, GPU)
        assert found.compute_s == pytest.approx(plain.compute_s * 4 / 3)
        more = (
            found.busy[Resource.UPLOAD] * found.step_s - plain.busy[Resource.UPLOAD] * plain.step_s
        ) * GPU.upload_bytes
        assert more == pytest.approx(micro_batches * 4 * 2 * NUMEL, rel=1e-6)
