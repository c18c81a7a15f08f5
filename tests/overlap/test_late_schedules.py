"""Random scripts of operations on a device whose copies come late, gradients and states at rest in its memory or not.

As tests/parity/test_schedules.py, on one rank compared with plain tensors, on two with ranks in memory.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.late_device import LateDevice
from tests.helpers.models import WIDE
from tests.helpers.offloaded_player import play_on_ranks
from tests.helpers.ranks import RankPool
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
from zero_offload import pretrained
from zero_offload.types import STAGES

offload_module: Any = importlib.import_module("zero_offload.offload")

FEW, MANY = 15, 1000
ROOM_OF_WIDE = "16MiB"
"""For three units in flight and the sums of one, or `offload` would refuse."""
FEW_ON_RANKS, MANY_ON_RANKS = 5, 200
TIERS_LATE = st.sampled_from(["device", "device", {"device": 0.5, "cpu": 0.25, "nvme": 0.25}, "cpu", "nvme"])
LATE = PLACEMENTS | {"grads": TIERS_LATE, "optimizer": TIERS_LATE}


def with_room(choices: dict[str, Any]) -> dict[str, Any]:
    """A small budget is for units that pass through; what rests on the device would not fit."""
    rests = any("device" in choices[kind] for kind in ("params", "grads", "optimizer"))
    return legal(choices | {"device_memory": None} if rests else choices)


OF_ONE_LATE = OF_ONE | {"choices": st.fixed_dictionaries(LATE).map(with_room)}
ON_RANKS_LATE = ON_RANKS | {"choices": st.fixed_dictionaries({"stage": st.sampled_from(STAGES), **LATE}).map(with_room)}


def check_late(choices: dict[str, Any], dim: int, **drawn: Any) -> None:
    if dim == WIDE and choices["device_memory"] is not None:
        choices = choices | {"device_memory": ROOM_OF_WIDE}
    before, offload_module.compute_device = offload_module.compute_device, LateDevice
    try:
        check(choices=choices, dim=dim, **drawn)
    finally:
        offload_module.compute_device = before


@settings(PROFILE, max_examples=FEW)
@given(**OF_ONE_LATE)
def test_any_script_gives_the_bits_of_plain_tensors(**drawn: Any) -> None:
    check_late(**drawn)


@pytest.mark.full
@settings(PROFILE, max_examples=MANY)
@given(**OF_ONE_LATE)
def test_many_scripts_give_the_bits_of_plain_tensors(**drawn: Any) -> None:
    check_late(**drawn)


# Several ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


def play_late(rank: int, world_size: int, *job: Any) -> list[list[Any]]:
    """A job of ranks."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(offload_module, "compute_device", LateDevice)
        patches.setattr(pretrained, "_cut", brought_down)
        return play_on_ranks(rank, world_size, *job)


_cut = pretrained._cut


def brought_down(flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Copies, as a GPU's are: what numpy has seen of a device's memory could not be resized any more."""
    return _cut(flat.clone())


def check_ranks(script: Any, choices: dict[str, Any], dim: int, pool: RankPool) -> None:
    script = [*script, *(("read", "params", part) for part in PARTS)]
    shared = {name: choices[name] for name in SHARED}
    with tempfile.TemporaryDirectory() as placed, tempfile.TemporaryDirectory() as in_memory:
        found = pool.succeed(play_late, script, dim, choices, placed, 2)
        expected = pool.succeed(play_on_ranks, script, dim, shared, in_memory, 2)
    for mine, theirs in zip(found, expected, strict=True):
        check_same(script, mine, theirs)


@settings(ON_RANKS_PROFILE, max_examples=FEW_ON_RANKS)
@given(**ON_RANKS_LATE)
def test_two_ranks_give_the_bits_of_ranks_in_memory(pool: RankPool, **drawn: Any) -> None:
    check_ranks(**drawn, pool=pool)


@pytest.mark.full
@settings(ON_RANKS_PROFILE, max_examples=MANY_ON_RANKS)
@given(**ON_RANKS_LATE)
def test_many_scripts_on_two_ranks(pool: RankPool, **drawn: Any) -> None:
    check_ranks(**drawn, pool=pool)
