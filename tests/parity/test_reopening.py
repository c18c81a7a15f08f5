"""Ranks that close a run and open it again at once, in one process: none meets the lock of another that is slower."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.helpers import ranks
from tests.helpers.ranks import Case, RankPool
from zero_offload.storage.directory import RunDirectory


def train_twice(rank: int, world_size: int, case: Case) -> list[list[float]]:
    """The last rank takes its time to let go of the directory."""
    close = RunDirectory.close

    def late(directory: RunDirectory) -> None:
        time.sleep(0.5 * rank)
        close(directory)

    RunDirectory.close = late  # type: ignore[method-assign]
    try:
        first = ranks.train(rank, world_size, case)
        return [first.losses, ranks.train(rank, world_size, case).losses]
    finally:
        RunDirectory.close = close  # type: ignore[method-assign]


@pytest.mark.parametrize("durability", ["process", "scratch"])
def test_a_closed_run_is_free_on_all_ranks(durability: str, nvme: Path) -> None:
    settings = {"nvme": nvme, "optimizer": "nvme", "existing": "resume", "durability": durability}
    if durability == "scratch":
        settings["existing"] = "refuse"
    pool = RankPool(2)
    try:
        for first, second in pool.succeed(train_twice, Case(settings, num_steps=2)):
            assert len(first) == 2 and second == ([] if durability == "process" else first)
    finally:
        pool.close()
