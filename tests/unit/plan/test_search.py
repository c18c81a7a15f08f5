from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from zero_offload.base.config import OffloadConfig
from zero_offload.base.types import MIB, StateKind, Tier
from zero_offload.hardware.machines import Machine
from zero_offload.plan.memory import PLACED_KINDS, Budget, Placement, UnitBytes, UnitNumel, estimate_memory
from zero_offload.plan.partition import ONE_RANK
from zero_offload.plan.placement import ALONE_STEPS, Outlook, UnitTiers, assign_tiers, spread_order
from zero_offload.plan.shapes import equal_blocks
from zero_offload.plan.step_time import StepBatch, StepWorkload, predict

GPU = Machine(False, 1e13, 1e12, 20e9, 20e9, 50e9, 50e9, 5e9, 4e9, True, 0.0)
CPU = Machine(True, 1e10, 8e9, 0.0, 0.0, 8e9, 4e9, 2e9, 1e9, True, 0.0)
PARAMS, GRADS, OPTIMIZER = PLACED_KINDS
ROOMY = 1 << 40
NUMEL = 10_000_000


def outlook_of(machine: Machine, count: int = 8, tokens: int = 256, **settings: Any) -> Outlook:
    config = OffloadConfig(**({"params": "auto", "grads": "auto", "optimizer": "auto", "nvme": "x"} | settings))
    batch = StepBatch(tokens, 1, min(tokens, 256), True)
    return Outlook(StepWorkload.of(equal_blocks(count * NUMEL, count), config, ONE_RANK, batch), machine)


def placed(outlook: Outlook, device: int = ROOMY, cpu: int = ROOMY) -> tuple[UnitTiers, ...]:
    """With budgets in bytes, of which all is used."""
    workload = replace(outlook.workload, config=replace(outlook.workload.config, device_memory=device, cpu_memory=cpu))
    budget = Budget(device, cpu, ROOMY, outlook.machine.is_host)
    placement = assign_tiers(workload.units, workload.config, budget, ONE_RANK, replace(outlook, workload=workload))
    return tuple(dict(at) for at in placement.tiers)


def share(tiers: tuple[UnitTiers, ...], kind: StateKind, tier: Tier) -> float:
    return sum(at[kind] is tier for at in tiers) / len(tiers)


def test_everything_rests_where_it_is_used_if_it_fits() -> None:
    slow_host = replace(GPU, host_bytes=1e9, host_bytes_beside=1e9)
    tiers = placed(outlook_of(slow_host))
    assert all(share(tiers, kind, Tier.DEVICE) == 1.0 for kind in PLACED_KINDS)
    assert all(share(placed(outlook_of(CPU)), kind, Tier.CPU) == 1.0 for kind in PLACED_KINDS)


def test_a_slow_drive_gets_as_little_as_possible() -> None:
    slow = replace(GPU, read_bytes=1e8, write_bytes=1e8)
    # Commits write what rests in memory to the drive too: without them only what does not fit is moved.
    outlook = outlook_of(slow, 16, durability="scratch", params="cpu", grads="cpu")
    tiers = placed(outlook, device=300 * MIB, cpu=1200 * MIB)
    plan = estimate_memory(
        outlook.workload.units, Placement(tiers, Budget(300 * MIB, 1200 * MIB, ROOMY, False)), outlook.workload.config
    )
    assert plan.fits
    free = 1200 * MIB - plan.used_bytes(Tier.CPU)
    assert 0 < share(tiers, OPTIMIZER, Tier.NVME) < 1
    assert free < 3 * 12 * NUMEL  # two units' states, and what the largest buffers reserve


def test_a_fast_drive_beside_a_crawling_host_gets_the_rest() -> None:
    """A search that fills the fastest tier first would take the host's memory, since there is room."""
    odd = replace(GPU, upload_bytes=1e6, read_bytes=1e13, write_bytes=1e13)
    outlook = outlook_of(odd, 4, durability="scratch", grads="device", optimizer="cpu")
    # Parameters cross the slow link wherever they rest, once if they stay on the device, twice if they do not.
    assert share(placed(outlook), PARAMS, Tier.DEVICE) == 1.0


def test_a_slow_update_on_the_host_sends_states_to_the_device() -> None:
    slow_host = replace(GPU, host_bytes=1e8, host_bytes_beside=1e8)
    outlook = outlook_of(slow_host, 8, durability="scratch", params="cpu", grads="cpu")
    # Room for the states of some units: those leave the host.
    tiers = placed(outlook, device=800 * MIB)
    assert 0.2 < share(tiers, OPTIMIZER, Tier.DEVICE) < 1.0
    assert share(tiers, OPTIMIZER, Tier.NVME) == 0.0


def test_shares_are_spread_over_the_depth() -> None:
    assert spread_order(8) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert sorted(spread_order(13)) == list(range(13))
    outlook = outlook_of(replace(GPU, read_bytes=1e8), 16, durability="scratch", params="cpu", grads="cpu")
    tiers = placed(outlook, device=300 * MIB, cpu=1500 * MIB)
    away = [index for index, at in enumerate(tiers) if at[OPTIMIZER] is Tier.NVME]
    assert 2 <= len(away) <= 14
    assert min(away) < 8 <= max(away)


def adapted(machine: Machine, count: int = 32, **settings: Any) -> Outlook:
    """Blocks of which 1 element in 100 is trained, in a unit beside each."""
    outlook = outlook_of(machine, count, **settings)
    work = []
    for block in equal_blocks(count * NUMEL, count):
        frozen = replace(block.numel, trained=0, frozen=NUMEL)
        part = UnitNumel(f"{block.numel.name} (trained)", NUMEL // 100, is_trained_part=True)
        work += [replace(block, numel=frozen), replace(block, numel=part, matmul_numel=NUMEL / 100)]
    return replace(outlook, workload=StepWorkload.of(work, outlook.workload.config, ONE_RANK, outlook.workload.batch))


FROZEN, PARTS = slice(0, None, 2), slice(1, None, 2)


def test_trained_parts_and_their_states_rest_on_the_device_and_drives_have_frozen_weights_alone() -> None:
    tiers = placed(adapted(GPU), device=300 * MIB, cpu=300 * MIB)
    assert all(at[kind] is Tier.DEVICE for at in tiers[PARTS] for kind in PLACED_KINDS)
    assert 0 < share(tiers[FROZEN], PARAMS, Tier.NVME) < 1
    plan = estimate_memory(
        adapted(GPU).workload.units,
        Placement(tiers, Budget(300 * MIB, 300 * MIB, ROOMY, False)),
        adapted(GPU).workload.config,
    )
    assert plan.fits and plan.wear.states_bytes == 0 < plan.wear.commit_bytes
    # Frozen weights fill the host's memory but for a unit and one step of the search.
    assert plan.left_bytes(Tier.CPU) < 2 * NUMEL * (1 + 32 / ALONE_STEPS)


def test_on_a_cpu_they_rest_in_its_memory() -> None:
    tiers = placed(adapted(CPU), cpu=500 * MIB)
    assert all(at[kind] is Tier.CPU for at in tiers[PARTS] for kind in PLACED_KINDS)
    assert 0 < share(tiers[FROZEN], PARAMS, Tier.CPU) < 1


def test_where_a_device_has_no_room_for_trained_parts_the_host_has_them() -> None:
    outlook = adapted(GPU, durability="scratch")
    least = estimate_memory(
        outlook.workload.units,
        Placement(placed(outlook, device=MIB), Budget(ROOMY, ROOMY, ROOMY, False)),
        outlook.workload.config,
    )
    tiers = placed(outlook, device=least.used_bytes(Tier.DEVICE) + 8 * MIB, cpu=300 * MIB)
    assert all(at[kind] is Tier.CPU for at in tiers[PARTS] for kind in PLACED_KINDS)
    assert share(tiers[FROZEN], PARAMS, Tier.NVME) > 0


def test_what_the_user_has_placed_stays_there() -> None:
    tiers = placed(adapted(GPU, optimizer="nvme"), device=300 * MIB, cpu=300 * MIB)
    assert all(at == {PARAMS: Tier.DEVICE, GRADS: Tier.DEVICE, OPTIMIZER: Tier.NVME} for at in tiers[PARTS])


def test_by_fractions_trained_parts_come_first() -> None:
    def dealt(**settings: Any) -> tuple[UnitTiers, ...]:
        return placed(adapted(GPU, **settings))

    mostly = {"device": 0.01, "cpu": 0.29, "nvme": 0.7}
    tiers = dealt(params=mostly, grads="cpu", optimizer={"cpu": 0.5, "nvme": 0.5})
    assert {at[PARAMS] for at in tiers[PARTS]} == {Tier.DEVICE}
    assert abs(share(tiers[FROZEN], PARAMS, Tier.NVME) - 0.7) < 0.05
    assert share(tiers[FROZEN], PARAMS, Tier.DEVICE) == 0
    # They are all that has states: half of them is as asked for.
    assert share(tiers[PARTS], OPTIMIZER, Tier.NVME) == 0.5


def test_the_same_input_gives_the_same_placement_and_asks_nothing_of_a_clock() -> None:
    first = placed(outlook_of(GPU), device=300 * MIB, cpu=500 * MIB)
    assert all(placed(outlook_of(GPU), device=300 * MIB, cpu=500 * MIB) == first for _ in range(2))


def test_where_nothing_fits_everything_is_on_the_last_tier() -> None:
    tiers = placed(outlook_of(GPU), device=MIB, cpu=MIB)
    assert all(share(tiers, kind, Tier.NVME) == 1.0 for kind in PLACED_KINDS)
    assert set(placed(outlook_of(GPU, nvme=None), device=MIB, cpu=MIB)[0].values()) == {Tier.CPU}


RATES = st.floats(1e8, 1e11)


@settings(deadline=None, max_examples=8)
@given(
    rates=st.tuples(RATES, RATES, RATES),
    host=st.booleans(),
    device=st.integers(120, 600),
    cpu=st.integers(120, 900),
    more=st.integers(0, 400),
)
@example(rates=(1e8, 1e8, 1e8), host=False, device=379, cpu=120, more=59)  # buffers of a drive fit with more only
def test_more_memory_is_never_slower(
    rates: tuple[float, float, float], host: bool, device: int, cpu: int, more: int
) -> None:
    link, dram, drive = rates
    machine = replace(
        CPU if host else GPU, host_bytes=dram, host_bytes_beside=dram, read_bytes=drive, write_bytes=drive
    )
    machine = machine if host else replace(machine, upload_bytes=link, download_bytes=link)
    outlook = outlook_of(machine, 3, durability="scratch", grads="cpu")

    def step_s(device_mib: int, cpu_mib: int) -> float:
        tiers = placed(outlook, device_mib * MIB, cpu_mib * MIB)
        fits = estimate_memory(
            outlook.workload.units,
            Placement(tiers, Budget(device_mib * MIB, cpu_mib * MIB, ROOMY, host)),
            outlook.workload.config,
        ).fits
        return (
            predict(outlook.workload, Placement(tiers, Budget(0, 0, 0, host)), machine).step_s if fits else float("inf")
        )

    assert step_s(device, cpu + more) <= step_s(device, cpu) * (1 + 1e-9)
    assert step_s(device + more, cpu) <= step_s(device, cpu) * (1 + 1e-9)


def test_units_of_any_size_get_their_share() -> None:
    outlook = outlook_of(replace(GPU, read_bytes=1e8), 3, durability="scratch")
    sizes = [UnitBytes(str(i), 2 * n, 2 * n, 12 * n, 0, n) for i, n in enumerate((50_000_000, 1000, 9_000_000))]
    outlook = replace(outlook, workload=replace(outlook.workload, units=tuple(sizes)))
    tiers = placed(outlook, device=400 * MIB, cpu=600 * MIB)
    assert estimate_memory(
        sizes, Placement(tiers, Budget(400 * MIB, 600 * MIB, ROOMY, False)), outlook.workload.config
    ).fits
