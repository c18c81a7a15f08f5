"""`zo.Muon` on several ranks: Newton-Schulz of whole matrices, each on one rank, with the bits of two plain ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_offload as zo
from tests.helpers.pairwise import in_turn
from tests.helpers.ranks import RankPools
from tests.helpers.reference import read_masters
from tests.parity.test_muon import Plain, muon_of
from tests.parity.test_unitwise import TIERS, assert_same
from tests.parity.test_unitwise_ranks import Train, Written, model_of, train


@pytest.fixture(autouse=True)
def _threads_of_a_rank() -> None:
    """A norm's gradient is summed by as many threads as there are."""
    torch.set_num_threads(1)


def written_of(precision: str, num_ranks: int, stage: int) -> Written:
    found = Written("SGD", precision, num_ranks, stage)
    named = zip((name for name, _ in found.model.named_parameters()), found.masters, strict=True)
    plain: Any = Plain(named)
    found.optimizers = [plain.muon, plain.adamw]
    return found


def run(rank: int, world_size: int, settings: dict[str, Any], steps: range, how: Train) -> dict[str, Tensor]:
    model = model_of()
    zo.offload(model, zo.OffloadConfig(existing="resume", **settings))
    optimizer = muon_of(model)
    zo.resume(model, optimizer)
    train(model, [optimizer], (rank, world_size), steps, **how)
    found = read_masters(model)
    zo.close(model)
    return found


@in_turn(
    num_ranks=[2, 3],
    others=[3, 1, 2],
    stage=[3, 2, 1, 0],
    tiers=[*TIERS],
    precision=["fp32", "bf16"],
    how=[{}, {"micro_batches": 2, "max_norm": 0.5}],
)
def test_the_bits_of_two_plain_optimizers(
    num_ranks: int, others: int, stage: int, tiers: str, precision: str, how: Train, pools: RankPools, tmp_path: Path
) -> None:
    """Then another number of ranks goes on from the files."""
    written = written_of(precision, num_ranks, stage)
    written.train(0, 2, **how)
    settings = {**TIERS[tiers], "nvme": tmp_path, "precision": precision, "stage": stage}
    for found in pools.of(num_ranks).succeed(run, settings, range(2), how):
        assert_same(found, written.named())
    written.num_ranks = others
    written.train(2, 3, **how)
    for found in pools.of(others).succeed(run, settings, range(2, 3), how):
        assert_same(found, written.named())
