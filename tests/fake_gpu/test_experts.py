"""Experts in groups on a device: their memory is filled again and again, whatever runs late."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import Policy
from tests.fake_gpu.test_mutations import evaluated_beside, on_two_streams
from tests.fake_gpu.test_ranks import late, pool  # noqa: F401
from tests.fake_gpu.training import EVERY, Schedule, check_run, run
from tests.helpers import experts
from tests.helpers.experts import experts_lm, trained
from tests.helpers.models import build, tokens_of
from tests.helpers.pairwise import Row, label, pairwise
from tests.helpers.ranks import RankPool
from tests.helpers.reference import Recipe, Trajectory, param_groups, train_offloaded, train_plain

MATRIX: dict[str, Any] = {
    "params": ["cpu", "nvme", "device", {"device": 0.3, "cpu": 0.3, "nvme": 0.4}],
    "precision": ["fp32", "bf16"],
    "size": [1, 2, 4],
    "checkpointing": [False, True],
    "trains": [False, True],
    "schedule": EVERY,
}
RANKS: dict[str, Any] = {
    "stage": [3, 2],
    "params": ["cpu", "nvme"],
    "size": [2, 4],
    "policy": [Policy.LATE, Policy.RANDOM],
    "trains": [False, True],
}


def make(size: int, *, checkpointing: bool = False, trains: bool = False) -> nn.Module:
    model = experts_lm(size=size, trained=trains)
    if checkpointing:
        zo.checkpoint(model.blocks)
    return model


@functools.cache
def plain(precision: str, *, trains: bool) -> Trajectory:
    """On the CPU, whose kernels the device runs."""
    found = train_plain(Recipe(functools.partial(make, 0, trains=trains), precision, 3))
    return found if trains else trained(found)


@pytest.mark.parametrize("row", pairwise(MATRIX), ids=label)
def test_experts_in_groups_train_to_the_bits_of_plain_tensors(row: Row, nvme: Path) -> None:
    schedule: Schedule = row["schedule"]
    device.policy(*schedule)
    model = functools.partial(make, row["size"], checkpointing=row["checkpointing"], trains=row["trains"])
    recipe = Recipe(model, row["precision"], 3)
    settings = {name: row[name] for name in ("params", "precision")}
    found = train_offloaded(
        recipe, zo.OffloadConfig(nvme=nvme, device_memory="28MiB", durability="scratch", **settings)
    )
    assert device.take_races() == []
    expected = plain(row["precision"], trains=row["trains"])
    assert (found if row["trains"] else trained(found)) == expected


@pytest.mark.parametrize("body", [evaluated_beside, on_two_streams])
@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_streams_take_turns_at_the_memory_of_groups(body: Callable[..., Any], params: str) -> None:
    grouped = functools.partial(make, 2, trains=True)
    device.policy(Policy.EAGER)
    settings = {"params": params, "device_memory": "64MiB"}  # all other units stay: no wait for one hides another
    expected = run(body, grouped, **settings)
    check_run(expected, body, grouped, schedules=EVERY, **settings)


@pytest.mark.parametrize("row", pairwise(RANKS), ids=label)
def test_ranks_gather_groups_on_their_devices(row: Row, pool: RankPool, tmp_path: Path) -> None:  # noqa: F811
    settings = {"stage": row["stage"], "precision": "bf16", "durability": "scratch"}
    model = functools.partial(experts_lm, num_blocks=2, trained=row["trains"])
    # Without clipping: a device sums up squares by sections, which are others.
    train = functools.partial(experts.train, max_norm=None)
    whole = pool.succeed(late, Policy.LATE, 0, train, functools.partial(model, size=0), settings)
    placed = settings | {"params": row["params"], "nvme": tmp_path}
    grouped = functools.partial(model, size=row["size"])
    assert pool.succeed(late, row["policy"], 1, train, grouped, placed) == whole


def test_a_layer_of_experts_may_be_larger_than_the_device(nvme: Path) -> None:
    make = functools.partial(experts_lm, dim=64, inner=20_000, size=1, num_blocks=1)
    model = build(make)
    nbytes = sum(param.numel() * 2 for param in model.blocks[0].experts.parameters())  # type: ignore[union-attr]
    module: Any = torch.get_device_module(device.TYPE)
    with device.memory_limit(module.memory_reserved() + nbytes - (4 << 20)):
        config = zo.OffloadConfig(nvme=nvme, params="nvme", precision="bf16", durability="scratch")
        zo.offload(model, config)
        losses = list[float]()
        optimizer = zo.SGD(param_groups(model), lr=1e-2)
        for step in range(2):
            loss = model(tokens_of(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    zo.close(model)
    whole = build(functools.partial(make, size=0))
    zo.offload(whole, zo.OffloadConfig(precision="bf16", durability="scratch"))
    optimizer = zo.SGD(param_groups(whole), lr=1e-2)
    for step in range(2):
        loss = whole(tokens_of(step))
        assert loss.item() == losses[step]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    zo.close(whole)
