"""Two ranks: boundaries in parts over ranks with equal inputs, and each rank's own activations on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.activations import marked_job, replicated_job
from tests.helpers.pairwise import full
from tests.helpers.ranks import Case, RankPool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 33])
def test_boundaries_in_parts_change_nothing(pool: RankPool, dim: int, dtype: torch.dtype) -> None:
    for plain, marked, kept in pool.succeed(replicated_job, dim, dtype):
        assert all(torch.equal(left, right) for left, right in zip(plain, marked, strict=True))
        # Half of (2, 9, dim) for each of three blocks.
        assert kept == 3 * 2 * 9 * dim // 2


@pytest.mark.parametrize("stage", [3, full(1)])
def test_activations_on_disk(pool: RankPool, tmp_path: Path, stage: int) -> None:
    def settings(name: str, **more: Any) -> dict[str, Any]:
        return {"stage": stage, "precision": "bf16", "nvme": str(tmp_path / name), "durability": "scratch"} | more

    expected = pool.succeed(marked_job, Case(settings("kept"), dim=160, micro_batches=2, max_norm=0.5), False)
    for is_marked in (False, True):
        stored = settings(f"stored-{is_marked}", activations="nvme", params="nvme", optimizer="nvme")
        assert pool.succeed(marked_job, Case(stored, dim=160, micro_batches=2, max_norm=0.5), is_marked) == expected
