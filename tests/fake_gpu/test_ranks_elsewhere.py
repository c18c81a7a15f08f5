"""Two ranks with a device each: what they write under an upload, what crosses, gathers ahead, branches, host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.fake_gpu.test_ranks import late
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import full
from tests.helpers.ranks import RankPool, RankPools
from tests.models import test_memory_ranks
from tests.parity import test_branches
from zero_offload.base.types import KIB, Tier
from zero_offload.hardware.device import AcceleratorDevice, Event
from zero_offload.model.api import runtime_of

NUM_BLOCKS, SMALL = 4, "6MiB"
"""Units come and go."""


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(2, on_device=True)


def succeed(pool: RankPool, job: Any, *args: Any) -> list[Any]:
    return pool.succeed(late, Policy.LATE, 0, job, *args)


def on_host(rank: int, world_size: int, job: Any, *args: Any) -> Any:
    with device.on_host():
        return job(rank, world_size, *args)


def make() -> Any:
    return build(lambda: TinyLM(num_blocks=NUM_BLOCKS))


def load(rank: int, world_size: int, stage: int, folder: Path) -> list[float]:
    """A checkpoint is loaded right after a forward that brings values from other ranks, and keeps them."""
    model = zo.offload(make(), zo.OffloadConfig(stage=stage, device_memory=SMALL))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)

    def look() -> None:
        with torch.no_grad():
            model(tokens_of(99))

    found = []
    for number in range(4):
        loss = model(tokens_of(10 * number + rank))
        loss.backward()
        if number == 2:
            zo.save_checkpoint(model, optimizer, folder)
        look()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
        if number == 2:
            look()
            zo.load_checkpoint(model, optimizer, folder)
    zo.close(model)
    return [loss.item() for loss in found]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_values_that_ranks_share_stay_under_an_upload(stage: int, pool: RankPool, tmp_path: Path) -> None:
    expected = pool.succeed(on_host, load, stage, tmp_path / "host")
    assert succeed(pool, load, stage, tmp_path / "device") == expected


def crossing(rank: int, world_size: int, stage: int) -> list[tuple[int, int]]:
    """Bytes that three forwards after an update take to the device and from it: as it sees them, and as counted."""
    model = zo.offload(make(), zo.OffloadConfig(params="cpu", stage=stage, device_memory=SMALL))
    optimizer, tokens = zo.AdamW(model.parameters()), tokens_of(rank).to(TYPE)
    for _ in range(2):
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    runtime: Any = runtime_of(model)
    runtime.drain()
    first = runtime.store.counters.snapshot()
    with device.counting() as counts, torch.no_grad():
        for _ in range(3):
            model(tokens)
        device.synchronize()
    last = runtime.store.counters.snapshot()
    seen = [(counts["upload_bytes"], "read.cpu"), (counts["download_bytes"], "written.cpu")]
    zo.close(model)
    return [(nbytes, int(last.get(name, 0) - first.get(name, 0))) for nbytes, name in seen]


@pytest.mark.parametrize("stage", [2, 3])
def test_what_crosses_is_counted_once(stage: int, pool: RankPool) -> None:
    for (up, counted_up), (down, counted_down) in succeed(pool, crossing, stage):
        assert counted_up == up > 0
        # Replicas; and words by which the device sees changes.
        assert (counted_down > 0) == (stage == 2)
        assert counted_down <= down < counted_down + 4 * KIB


def gathers_ahead(rank: int, world_size: int) -> list[bool]:
    """Of each block's forward: whether the next unit's gather has its upload, and compute goes on without."""
    model = zo.offload(make(), zo.OffloadConfig(stage=3, device_memory=SMALL))
    following, wait = AcceleratorDevice.following, Event.wait
    followed: list[Any] = []
    found: list[bool] = []

    def noted(self: AcceleratorDevice, events: Any) -> Any:
        followed.extend(events := list(events))
        return following(self, events)

    def waited(self: Event) -> None:
        followed[:] = [each for each in followed if each is not self]
        wait(self)

    for block in model.blocks:
        block.up.register_forward_pre_hook(lambda module, inputs: found.append(bool(followed)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AcceleratorDevice, "following", noted)
        patch.setattr(Event, "wait", waited)
        for _ in range(3):
            model(tokens_of(rank)).backward()
    zo.close(model)
    return found[-NUM_BLOCKS:]


def test_a_gather_ahead_does_not_hold_up_compute(pool: RankPool) -> None:
    for found in succeed(pool, gathers_ahead):
        assert any(found[:-1])


@pytest.mark.parametrize(("stage", "params"), [(3, "nvme"), (3, "cpu"), (2, "nvme"), (1, "device"), (0, "nvme")])
def test_branches_of_any_kind(stage: int, params: str, pool: RankPool, nvme: Path) -> None:
    settings = {"stage": stage, "params": params, "nvme": nvme, "durability": "scratch", "branches": "any"}
    settings |= {"device_memory": None if params == "device" else SMALL}
    case = test_branches.Case("dropping", settings, 2, 0.5)
    in_memory = replace(case, settings={"stage": stage, "branches": "any"})
    expected = pool.succeed(on_host, test_branches.train, in_memory)
    found = succeed(pool, test_branches.train, case)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.norms == pytest.approx(theirs.norms, rel=1e-7), "unrounded; the CPU adds up in another order"
        assert replace(mine, norms=theirs.norms) == theirs


@pytest.mark.parametrize(("stage", "tier"), [full(1, "cpu"), full(3, "cpu"), (3, "nvme")])
def test_host_memory_is_what_the_plan_says(stage: int, tier: str, pool: RankPool, nvme: Path) -> None:
    settings = {"params": tier, "grads": tier, "optimizer": tier, "stage": stage, "precision": "fp32"}
    for found in succeed(pool, test_memory_ranks.measure, settings | ({"nvme": nvme} if tier == "nvme" else {})):
        planned = found["planned"][Tier.CPU] + found["in_flight"][Tier.CPU]
        memory, frames = found["memory"], found["frames"]
        if tier == "nvme":
            # Pages of gradients on their way to disk are as many as were ever needed at once.
            assert memory < memory + frames <= planned
        else:
            # Sums of gradients, which a GPU makes, take some kilobytes that no plan counts.
            assert planned < memory <= planned + 64 * KIB and frames == 0
