"""Two ranks, each with a device of its own on late lanes: every stage gives the bits of ranks without a device."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ranks
from tests.helpers.late_device import LateDevice
from tests.helpers.ranks import Case, Outcome, RankPool
from zero_offload.plan.partition import STAGES

offload_module: Any = importlib.import_module("zero_offload.offload")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def on_hosts(pool: RankPool) -> Any:
    return functools.cache(lambda stage, no_sync: pool.succeed(ranks.train, case_of(stage, no_sync)))


def case_of(stage: int, no_sync: bool, **settings: Any) -> Case:
    settings = {"stage": stage, "precision": "bf16"} | settings
    return Case(settings, num_steps=4, micro_batches=2, max_norm=0.5, num_frozen=1, no_sync=no_sync)


def train_late(rank: int, world_size: int, case: Case) -> tuple[Outcome, int]:
    """`ranks.train` on a device whose copies come late; and how many went up."""
    device, before = LateDevice(), offload_module.compute_device
    offload_module.compute_device = lambda: device
    try:
        return ranks.train(rank, world_size, case), device.uploads.launched
    finally:
        offload_module.compute_device = before


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize(
    ("params", "grads", "optimizer"),
    [("cpu", "cpu", "cpu"), ("device", "cpu", "nvme"), ("nvme", "nvme", "nvme"), ("nvme", "cpu", "cpu")],
)
@pytest.mark.parametrize("stage", STAGES)
def test_late_lanes_give_the_bits_of_hosts(
    stage: int, params: str, grads: str, optimizer: str, no_sync: bool, pool: RankPool, on_hosts: Any, nvme: Path
) -> None:
    settings = {"params": params, "grads": grads, "optimizer": optimizer, "nvme": nvme, "durability": "scratch"}
    case = case_of(stage, no_sync, **settings, device_memory=None if params == "device" else "4MiB")
    found = pool.succeed(train_late, case)
    assert [outcome for outcome, _ in found] == on_hosts(stage, no_sync)
    assert all(uploads > 0 for _, uploads in found)
