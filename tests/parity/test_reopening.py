"""Ranks that close a run: when the first of them returns, none of them holds the directory."""

from __future__ import annotations

import time
from pathlib import Path

from tests.helpers import ranks
from tests.helpers.ranks import Case, RankPool
from zero_offload.storage.files.directory import RunDirectory


def train_and_open(rank: int, world_size: int, case: Case) -> list[float]:
    """The last rank takes its time to let go of the directory; the first one opens it at once, by itself."""
    close = RunDirectory.close

    def late(directory: RunDirectory) -> None:
        time.sleep(2 * rank)
        close(directory)

    RunDirectory.close = late  # type: ignore[method-assign]
    try:
        losses = ranks.train(rank, world_size, case).losses
        if rank == 0:
            RunDirectory.open(case.settings["nvme"]).close()
    finally:
        RunDirectory.close = close  # type: ignore[method-assign]
    return losses


def test_a_closed_run_is_free_on_all_ranks(nvme: Path, pool: RankPool) -> None:
    settings = {"nvme": nvme, "optimizer": "nvme"}
    assert all(len(losses) == 2 for losses in pool.succeed(train_and_open, Case(settings, num_steps=2)))
