from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import CapacityError
from zero_offload.base.types import GIB, MIB, HardwareProfile, StateKind, Tier, parse_bytes
from zero_offload.plan.memory import PLACED_KINDS, UnitNumel, estimate_memory, measure_units
from zero_offload.plan.partition import Partition
from zero_offload.plan.placement import Placement, UnitBytes, assign_tiers, place, tier_budget

CPU_MACHINE = HardwareProfile(2, 64 * GIB, "cpu", 64 * GIB, 900 * GIB)
GPU_MACHINE = HardwareProfile(16, 64 * GIB, "NVIDIA H200", 24 * GIB, 900 * GIB)
PARAMS, GRADS, OPTIMIZER = PLACED_KINDS


def model(config: OffloadConfig, num_blocks: int = 12, numel: int = 10_000_000) -> tuple[UnitBytes, ...]:
    return measure_units([UnitNumel(f"block {i}", numel) for i in range(num_blocks)], config)


def tiers_of(placement: Placement, kind: StateKind) -> list[str]:
    return [tiers[kind].value for tiers in placement.tiers]


def test_every_unit_and_kind_gets_the_tier_asked_for() -> None:
    config = OffloadConfig(params="device", grads="cpu", optimizer="nvme", nvme="x")
    placement = place(model(config), config, GPU_MACHINE)
    assert set(tiers_of(placement, PARAMS)) == {"device"}
    assert set(tiers_of(placement, GRADS)) == {"cpu"}
    assert set(tiers_of(placement, OPTIMIZER)) == {"nvme"}


def test_fractions_are_spread_through_the_depth() -> None:
    config = OffloadConfig(optimizer={"cpu": 0.5, "nvme": 0.5}, nvme="x")
    dealt = tiers_of(place(model(config), config, CPU_MACHINE), OPTIMIZER)
    assert dealt == ["cpu", "nvme"] * 6


@given(
    weights=st.lists(st.integers(1, 10**9), min_size=1, max_size=60),
    parts=st.tuples(st.integers(0, 10), st.integers(0, 10), st.integers(1, 10)),
)
def test_bytes_follow_the_fractions_within_one_unit(weights: list[int], parts: tuple[int, ...]) -> None:
    fractions = {tier: part / sum(parts) for tier, part in zip(Tier, parts, strict=True)}
    config = OffloadConfig(optimizer=fractions, nvme="x")
    units = [UnitBytes(str(i), 0, 0, weight) for i, weight in enumerate(weights)]
    placement = assign_tiers(units, config, tier_budget(config, CPU_MACHINE))
    assert placement == assign_tiers(units, config, tier_budget(config, CPU_MACHINE))
    for tier, fraction in fractions.items():
        chosen = [w for w, tiers in zip(weights, placement.tiers, strict=True) if tiers[OPTIMIZER] is tier]
        assert abs(sum(chosen) - fraction * sum(weights)) <= max(weights) * (1 + 1e-6)
        assert chosen == [] or fraction > 0


def test_budgets_never_exceed_the_machine() -> None:
    given_more = OffloadConfig(cpu_memory="1TiB", device_memory="1GiB", nvme="x", nvme_capacity="5GiB")
    budget = tier_budget(given_more, GPU_MACHINE)
    assert (budget.device_bytes, budget.cpu_bytes, budget.nvme_bytes) == (GIB, 64 * GIB, 5 * GIB)
    assert not budget.shared_memory
    assert tier_budget(given_more, CPU_MACHINE).shared_memory


def auto(**settings: Any) -> OffloadConfig:
    return OffloadConfig(**({"params": "auto", "grads": "auto", "optimizer": "auto"} | settings))


def test_auto_prefers_the_fastest_tier_that_has_room() -> None:
    roomy = auto(nvme="x", device_memory="20GiB")
    placement = place(model(roomy), roomy, GPU_MACHINE)
    assert {tier for kind in PLACED_KINDS for tier in tiers_of(placement, kind)} == {"device"}


def test_auto_uses_every_tier_of_a_machine_that_is_too_small_for_one() -> None:
    config = auto(nvme="x", device_memory="400MiB", cpu_memory="700MiB")
    units = model(config)
    placement = place(units, config, GPU_MACHINE)
    plan = estimate_memory(units, placement, config)
    assert {tier for kind in PLACED_KINDS for tier in tiers_of(placement, kind)} == {"device", "cpu", "nvme"}
    assert plan.used_bytes(Tier.DEVICE) > 300 * MIB and plan.used_bytes(Tier.CPU) > 550 * MIB


@settings(deadline=None, max_examples=25)
@given(
    numels=st.lists(st.integers(1000, 50_000_000), min_size=1, max_size=8),
    device_mib=st.integers(1, 4000),
    cpu_mib=st.integers(400, 4000),
    machine=st.sampled_from([CPU_MACHINE, GPU_MACHINE]),
)
def test_auto_never_exceeds_a_memory_budget_that_holds_the_buffers(
    numels: list[int], device_mib: int, cpu_mib: int, machine: HardwareProfile
) -> None:
    config = auto(nvme="x", device_memory=device_mib * MIB, cpu_memory=cpu_mib * MIB)
    units = measure_units([UnitNumel(str(i), n) for i, n in enumerate(numels)], config)
    budget = tier_budget(config, machine)
    plan = estimate_memory(units, assign_tiers(units, config, budget), config)
    everything_on_nvme = replace(config, params="nvme", grads="nvme", optimizer="nvme")
    least = estimate_memory(units, assign_tiers(units, everything_on_nvme, budget), config)
    assert plan.fits or not least.fits


def test_auto_keeps_half_of_memory_that_has_no_budget() -> None:
    config = auto(nvme="x")
    machine = replace(CPU_MACHINE, cpu_memory_bytes=2 * GIB, device_memory_bytes=2 * GIB)
    plan = estimate_memory(model(config), place(model(config), config, machine), config)
    assert GIB * 0.8 < plan.used_bytes(Tier.CPU) + plan.used_bytes(Tier.DEVICE) <= GIB
    assert plan.used_bytes(Tier.NVME) > 0


def test_auto_respects_what_the_user_placed() -> None:
    config = auto(nvme="x", params="nvme", cpu_memory="500MiB")
    placement = place(model(config), config, CPU_MACHINE)
    assert set(tiers_of(placement, PARAMS)) == {"nvme"}
    assert "cpu" in tiers_of(placement, GRADS)


def test_what_does_not_fit_names_what_is_missing_and_two_ways_out() -> None:
    config = OffloadConfig(cpu_memory="1GiB")
    with pytest.raises(CapacityError) as caught:
        place(model(config), config, CPU_MACHINE)
    reason, first, second = str(caught.value).splitlines()
    assert "needs 1.58 GiB, 1 GiB available, 597 MiB missing" in reason
    assert first == "would fit: cpu_memory of at least 1.59 GiB"
    assert second == "would fit: optimizer='nvme', nvme= a directory with 2.69 GiB free"


@pytest.mark.parametrize(
    "settings",
    [
        {"nvme": "x", "cpu_memory": "1GiB"},
        {"nvme": "x", "optimizer": "nvme", "nvme_capacity": "2GiB"},
        {"nvme": "x", "cpu_memory": "200MiB", "params": "nvme", "optimizer": "nvme"},
        {"nvme": "x", "params": "nvme", "durability": "scratch", "nvme_capacity": "1MiB"},
        {"nvme": "x", "params": "nvme", "nvme_capacity": "1MiB"},
    ],
)
def test_the_settings_offered_do_fit(settings: dict[str, Any]) -> None:
    config = OffloadConfig(**settings)
    with pytest.raises(CapacityError) as caught:
        place(model(config), config, CPU_MACHINE)
    offers = [line.removeprefix("would fit: ") for line in str(caught.value).splitlines()[1:]]
    literal = [offer for offer in offers if "=" in offer]
    assert offers and literal
    for offer in literal:
        place(model(config), replace(config, **eval(f"dict({offer})")), CPU_MACHINE)


def test_the_least_memory_for_auto_is_that_with_all_on_drives() -> None:
    """Without its budget "auto" would take memory for all of it."""
    config = auto(nvme="x", cpu_memory="100MiB")
    with pytest.raises(CapacityError) as caught:
        place(model(config), config, CPU_MACHINE)
    needs, offered = (line.split() for line in str(caught.value).splitlines()[:2])
    needed = parse_bytes(" ".join(needs[needs.index("needs") + 1 :][:2]).rstrip(","))
    least = parse_bytes(" ".join(offered[-2:]))
    assert needed <= least <= 1.02 * needed
    place(model(config), replace(config, cpu_memory=least), CPU_MACHINE)


def test_the_least_memory_of_a_device_is_what_a_plan_fits_in() -> None:
    """A part of it is for activations that come back: a share of the offered budget."""
    config = OffloadConfig(activations="cpu", device_memory="5MiB")
    units = model(config, numel=1_000_000)
    with pytest.raises(CapacityError) as caught:
        place(units, config, GPU_MACHINE)
    needs, offered = str(caught.value).splitlines()[:2]
    assert needs.startswith("device tier: needs 9.85 MiB, 5 MiB available"), needs
    assert offered == "would fit: device_memory of at least 10.2 MiB"
    place(units, replace(config, device_memory="10.2MiB"), GPU_MACHINE)
    with pytest.raises(CapacityError):
        place(units, replace(config, device_memory="10.1MiB"), GPU_MACHINE)


def test_more_ranks_are_offered_where_they_help() -> None:
    machine = HardwareProfile(2, GIB, "cpu", GIB, 3 * GIB)
    config = OffloadConfig(nvme="x", optimizer="nvme", params="nvme", grads="nvme")
    with pytest.raises(CapacityError, match=r"would fit: \d+ ranks, each with this much memory and disk"):
        place(model(config, num_blocks=24), config, machine, Partition(3, 1))


def test_nothing_fits() -> None:
    machine = HardwareProfile(1, MIB, "cpu", MIB, MIB)
    config = OffloadConfig(stage=0)
    with pytest.raises(CapacityError, match="nothing else fits this machine"):
        place(model(config), config, machine)


def test_a_disk_budget_may_be_lifted_and_states_may_move_to_memory() -> None:
    config = OffloadConfig(nvme="x", params="nvme", durability="scratch", nvme_capacity="64KiB")
    with pytest.raises(CapacityError) as caught:
        place(model(config), config, CPU_MACHINE)
    assert str(caught.value).splitlines()[2:] == [
        "would fit: nvme_capacity of at least 229 MiB",
        "would fit: params='cpu'",
    ]
    full = replace(CPU_MACHINE, nvme_free_bytes=MIB)
    with pytest.raises(CapacityError) as caught:
        place(model(config), replace(config, nvme_capacity=None), full)
    assert str(caught.value).splitlines()[2:] == [
        "would fit: params='cpu'",
        "would fit: nvme= a directory with 229 MiB free",
    ]


def test_a_directory_without_a_free_byte_is_the_fault() -> None:
    config = OffloadConfig(nvme="/proc/nope", params="nvme", optimizer="nvme")
    with pytest.raises(CapacityError) as caught:
        place(model(config), config, replace(CPU_MACHINE, nvme_free_bytes=0))
    assert str(caught.value).splitlines()[1:] == [
        "nvme=/proc/nope cannot be used: 0 B are free there; name a directory with 2.69 GiB free"
    ]
