"""Random scripts of operations on the device, gradients and states at rest in its memory or not, under any policy.

As tests/parity/test_schedules.py: on one rank compared with plain tensors, on two with the same ranks on the CPU.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_gpu import device
from tests.fake_gpu.device import LATE
from tests.fake_gpu.test_ranks import late
from tests.helpers.models import WIDE
from tests.helpers.offloaded_player import play_on_ranks
from tests.helpers.ranks import RankPool, RankPools
from tests.helpers.schedules import Pass
from tests.parity.test_schedules import (
    OF_ONE,
    ON_RANKS,
    ON_RANKS_PROFILE,
    PARTS,
    PLACEMENTS,
    PROFILE,
    SHARED,
    check,
    check_same,
    legal,
)
from zero_offload.base.types import STAGES

FEW, MANY = 10, 1000
ROOM_OF_WIDE = "20MiB"
"""For the units in flight and the gradients that leave, or `offload` would refuse."""
FEW_ON_RANKS, MANY_ON_RANKS = 4, 200
TIERS = st.sampled_from(["device", "device", {"device": 0.5, "cpu": 0.25, "nvme": 0.25}, "cpu", "nvme"])
SCHEDULES = st.tuples(st.sampled_from(LATE), st.integers(0, 9))


def with_room(choices: dict[str, Any]) -> dict[str, Any]:
    """A small budget is for units that pass through; what rests on the device would not fit."""
    rests = any("device" in choices[kind] for kind in ("params", "grads", "optimizer"))
    return legal(choices | {"device_memory": None} if rests else choices)


CHOICES = PLACEMENTS | {"grads": TIERS, "optimizer": TIERS}
OF_ONE_LATE = OF_ONE | {"choices": st.fixed_dictionaries(CHOICES).map(with_room), "schedule": SCHEDULES}
STAGED = st.fixed_dictionaries({"stage": st.sampled_from(STAGES), **CHOICES}).map(with_room)
ON_RANKS_LATE = ON_RANKS | {"choices": STAGED, "schedule": SCHEDULES}


def check_late(choices: dict[str, Any], dim: int, schedule: Any, **drawn: Any) -> None:
    if dim == WIDE and choices["device_memory"] is not None:
        choices = choices | {"device_memory": ROOM_OF_WIDE}
    device.policy(*schedule)
    check(choices=choices, dim=dim, **drawn)
    races = device.take_races()
    assert races == [], races


@settings(PROFILE, max_examples=FEW)
@given(**OF_ONE_LATE)
def test_any_script_gives_the_bits_of_plain_tensors(**drawn: Any) -> None:
    check_late(**drawn)


@pytest.mark.parametrize("schedule", [(policy, seed) for policy in LATE for seed in (0, 7)])
@pytest.mark.parametrize(
    "changes", [[("write", "params", "embedding", 0.5)], [("save", 0), ("load", 0)], [("reopen",)]]
)
def test_a_commit_has_what_was_just_written(changes: list[Any], schedule: Any) -> None:
    """Copies from pageable memory return before the device has them, and a commit reads on a stream of its own."""
    rests = dict.fromkeys(("params", "grads", "optimizer"), "device")
    others = {"precision": "fp32", "device_memory": None, "commit_every": 1, "durability": "process", "overlap": "auto"}
    script = [*changes, ("commit", 0)]
    check_late(rests | others, dim=32, schedule=schedule, script=script, large_bytes=1)


@pytest.mark.full
@settings(PROFILE, max_examples=MANY)
@given(**OF_ONE_LATE)
def test_many_scripts_give_the_bits_of_plain_tensors(**drawn: Any) -> None:
    check_late(**drawn)


# Several ranks


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(2, on_device=True)


def play_on_host(*job: Any) -> list[list[Any]]:
    with device.on_host():
        return play_on_ranks(*job)


def check_ranks(script: Any, choices: dict[str, Any], dim: int, schedule: Any, pool: RankPool) -> None:
    script = [*script, *(("read", "params", part) for part in PARTS)]
    shared = {name: choices[name] for name in SHARED}
    with tempfile.TemporaryDirectory() as placed, tempfile.TemporaryDirectory() as in_memory:
        found = pool.succeed(late, *schedule, play_on_ranks, script, dim, choices, placed, 2)
        expected = pool.succeed(play_on_host, script, dim, shared, in_memory, 2)
    for mine, theirs in zip(found, expected, strict=True):
        check_same(script, mine, theirs)


@settings(ON_RANKS_PROFILE, max_examples=FEW_ON_RANKS)
@given(**ON_RANKS_LATE)
def test_two_ranks_give_the_bits_of_ranks_on_the_cpu(pool: RankPool, **drawn: Any) -> None:
    check_ranks(**drawn, pool=pool)


@pytest.mark.full
@settings(ON_RANKS_PROFILE, max_examples=MANY_ON_RANKS)
@given(**ON_RANKS_LATE)
def test_many_scripts_on_two_ranks(pool: RankPool, **drawn: Any) -> None:
    check_ranks(**drawn, pool=pool)


@pytest.mark.parametrize("policy", LATE)
@pytest.mark.parametrize("stage", [1, 2])
def test_a_save_while_gathered_values_come_down(stage: int, policy: device.Policy, pool: RankPool) -> None:
    """The rank's own part is not under way: a checkpoint reads it where it rests. The second load finds no copy left
    that brings the values after the first one."""
    script = [("evaluate", Pass(seed=3, route=(0,), length=4), torch.no_grad), ("save", 1), ("load", 1), ("load", 1)]
    placed = {"params": "cpu", "device_memory": None, "commit_every": 1, "durability": "process", "overlap": "auto"}
    check_ranks(script, placed | {"stage": stage, "precision": "bf16"}, 32, (policy, 4), pool)
