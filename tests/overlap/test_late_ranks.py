"""Ranks, each with a device of its own on late lanes: every stage gives the bits of ranks without a device."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.late_device import LateDevice
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import Row, all_rows, label, pairwise
from tests.helpers.ranks import Case, Outcome, RankPools
from tests.overlap.test_late_lanes import Model
from zero_offload.api import runtime_of
from zero_offload.types import STAGES

offload_module: Any = importlib.import_module("zero_offload.offload")

TIERS = {
    "device": "device",
    "cpu": "cpu",
    "nvme": "nvme",
    "mixed": {"cpu": 0.5, "nvme": 0.5},
    "all": {"device": 0.4, "cpu": 0.3, "nvme": 0.3},
}
RECIPES: dict[str, Sequence[Any]] = {
    "world_size": [2, 3, 1],
    "stage": list(STAGES),
    "precision": ["bf16", "fp32", "fp16"],
    "micro_batches": [2, 1],
    "max_norm": [0.5, None],
    "no_sync": [False, True],
}
PLACEMENTS = {"params": list(TIERS), "grads": list(TIERS), "optimizer": list(TIERS)}
MATRIX = RECIPES | PLACEMENTS
ALL = [recipe | placement for recipe in pairwise(RECIPES) for placement in all_rows(PLACEMENTS)]


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def on_hosts(pools: RankPools) -> Any:
    """In memory, once per recipe."""
    return functools.cache(lambda size, *recipe: pools.of(size).succeed(ranks.train, case_of(*recipe)))


def case_of(
    stage: int, precision: str, micro_batches: int, max_norm: float | None, no_sync: bool, **settings: Any
) -> Case:
    settings = {"stage": stage, "precision": precision} | settings
    return Case(settings, 4, micro_batches, max_norm, num_frozen=1, no_sync=no_sync)


def train_late(rank: int, world_size: int, case: Case) -> tuple[Outcome, int]:
    """`ranks.train` on a device whose copies come late; and how many went up."""
    device, before = LateDevice(), offload_module.compute_device
    offload_module.compute_device = lambda: device
    try:
        return ranks.train(rank, world_size, case), device.uploads.launched
    finally:
        offload_module.compute_device = before


def check(row: Row, nvme: Path, pools: RankPools, on_hosts: Any) -> None:
    size, *recipe = (row[name] for name in RECIPES)
    settings: dict[str, Any] = {kind: TIERS[row[kind]] for kind in PLACEMENTS}
    settings |= {"nvme": nvme, "durability": "scratch"}
    on_device = row["params"] == "device" or row["optimizer"] in ("device", "all")
    case = case_of(*recipe, **settings, device_memory=None if on_device else "4MiB")
    found = pools.of(size).succeed(train_late, case)
    assert [outcome for outcome, _ in found] == on_hosts(size, *recipe)
    # What is updated on the device is there already.
    assert row["optimizer"] == "device" or all(uploads > 0 for _, uploads in found)


@pytest.mark.parametrize("row", pairwise(MATRIX), ids=label)
def test_late_lanes_give_the_bits_of_hosts(row: Row, nvme: Path, pools: RankPools, on_hosts: Any) -> None:
    check(row, nvme, pools, on_hosts)


@pytest.mark.full
@pytest.mark.parametrize("row", ALL, ids=label)
def test_late_lanes_give_the_bits_of_hosts_in_every_placement(
    row: Row, nvme: Path, pools: RankPools, on_hosts: Any
) -> None:
    check(row, nvme, pools, on_hosts)


def crossing(rank: int, world_size: int, settings: dict[str, Any]) -> list[tuple[int, int]]:
    """Bytes that three forwards after an update take to the device and from it: as it sees them, and as counted."""
    device, before = LateDevice(), offload_module.compute_device
    offload_module.compute_device = lambda: device
    try:
        model = zo.offload(build(TinyLM), zo.OffloadConfig(**settings))
        optimizer = zo.AdamW(model.parameters())
        model(tokens_of(rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        runtime: Any = runtime_of(model)
        runtime.drain()
        counters = runtime.parts.store.counters
        first, (up, down) = counters.snapshot(), (device.uploads.nbytes, device.downloads.nbytes)
        with torch.no_grad():
            for _ in range(3):
                model(tokens_of(rank))
        last = counters.snapshot()
        found = [(device.uploads.nbytes - up, "read.cpu"), (device.downloads.nbytes - down, "written.cpu")]
        zo.close(model)
        return [(nbytes, int(last.get(name, 0) - first.get(name, 0))) for nbytes, name in found]
    finally:
        offload_module.compute_device = before


@pytest.mark.parametrize(
    ("world_size", "stage", "optimizer"), [(1, 3, "cpu"), (1, 3, "device"), (2, 3, "cpu"), (2, 2, "cpu")]
)
def test_what_crosses_is_counted_once(world_size: int, stage: int, optimizer: str, pools: RankPools) -> None:
    settings = {"params": "cpu", "optimizer": optimizer, "stage": stage}
    for (up, counted_up), (down, counted_down) in pools.of(world_size).succeed(crossing, settings):
        assert (counted_up, counted_down) == (up, down)
        assert (up > 0) == (optimizer == "cpu"), "what a device updates is there"
        assert (down > 0) == (stage == 2), "replicas"


def gathers_ahead(rank: int, world_size: int) -> list[bool]:
    """Of each block's forward: whether the next unit's gather has its upload, and compute goes on without."""
    device, before = LateDevice(), offload_module.compute_device
    offload_module.compute_device = lambda: device
    try:
        model: Any = zo.offload(Model(), zo.OffloadConfig(stage=3))
        found: list[bool] = []
        for block in model.blocks:
            block.up.register_forward_pre_hook(lambda module, inputs: found.append(device.is_ahead))
        for _ in range(3):
            model(torch.zeros(2, 8, dtype=torch.long)).backward()
        zo.close(model)
        return found[-len(model.blocks) :]
    finally:
        offload_module.compute_device = before


def test_a_gather_ahead_does_not_hold_up_compute(pools: RankPools) -> None:
    for found in pools.of(2).succeed(gathers_ahead):
        assert any(found[:-1])
