from __future__ import annotations

import pytest

from zero_offload.base.types import STAGES
from zero_offload.plan.partition import ONE_RANK, Partition


@pytest.mark.parametrize(
    ("stage", "optimizer", "grads", "params", "replicates", "defers"),
    [
        (0, 1, 1, 1, False, False),
        (1, 4, 1, 1, True, True),
        (2, 4, 4, 1, True, False),
        (3, 4, 4, 4, False, False),
    ],
)
def test_what_each_stage_divides(
    stage: int, optimizer: int, grads: int, params: int, replicates: bool, defers: bool
) -> None:
    for partition in (Partition(stage, 4), Partition(stage, 12, num_replicas=3)):
        shards = (partition.optimizer_shards, partition.grad_shards, partition.param_shards)
        assert shards == (optimizer, grads, params)
        assert (partition.replicates_params, partition.defers_reduction) == (replicates, defers)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_of_any_branches_keep_their_gradients_until_all_are_known(stage: int) -> None:
    same, other = Partition(stage, 4), Partition(stage, 4, any_branches=True)
    assert other.defers_reduction and other.grad_shards == 1
    assert (other.optimizer_shards, other.param_shards) == (same.optimizer_shards, same.param_shards)
    assert not Partition(stage, 1, any_branches=True).defers_reduction


def test_on_one_rank_all_stages_are_the_same() -> None:
    for stage in STAGES:
        partition = Partition(stage, 1)
        assert partition.optimizer_shards == partition.grad_shards == partition.param_shards == 1
        assert not partition.replicates_params and not partition.defers_reduction
    assert ONE_RANK.world_size == 1
