"""Models of one commit in programs that do not ask for them, and on other ranks than those that made it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import zero_offload as zo
from tests.helpers.pairwise import full
from tests.helpers.ranks import RankPool
from tests.helpers.two_models import Two, plain, run

NEVER_ASKED = pytest.mark.filterwarnings("ignore:training goes on from the generation")


@NEVER_ASKED
@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_program_that_never_resumes_is_told(num_before: int, num_steps: int, tmp_path: Path) -> None:
    """Its steps are generations of the student alone; a resume of both finds that they do not belong together. Where no
    commit has had both, the teacher may have come later."""
    if num_before:
        run(tmp_path, num_before, "fp32", "nvme")
    two = Two(tmp_path, "fp32", "nvme")
    for number in range(num_before, num_before + num_steps):
        two.step(number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        two.close()
    again = Two(tmp_path, "fp32", "nvme")
    if num_before:
        with pytest.raises(zo.CheckpointError, match="student"):
            again.resume()
    else:
        with pytest.warns(UserWarning, match="begins anew, with the program's own values: no commit has had both"):
            found = zo.resume(again.student, again.optimizer, also=[again.teacher])
        assert found is not None and found.step == num_steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.close()


@NEVER_ASKED
def test_a_program_that_never_resumes_and_commits_both(tmp_path: Path) -> None:
    """Tensors are the last commit's since zo.offload, and counts go on from it."""
    run(tmp_path, 2, "fp32", "nvme")
    two = Two(tmp_path, "fp32", "nvme")
    for number in (2, 3):
        two.iterate(number)
        two.commit(number + 1)
    two.close()
    begin, masters = run(tmp_path, 5, "fp32", "nvme")
    assert begin == 4
    expected = plain(5, "fp32")
    assert all(torch.equal(masters[name], values) for name, values in expected.items())


def _run_on_ranks(rank: int, world_size: int, where: Path, num: int, stage: int) -> tuple[int, dict[str, torch.Tensor]]:
    """All ranks have the same rows, so that the mean of their gradients is each one's."""
    return run(where, num, "fp32", "nvme", stage=stage)


@pytest.mark.parametrize("stage", [3, full(1)])
def test_other_ranks_go_on_with_both(stage: int, pool: RankPool, tmp_path: Path) -> None:
    """One rank, two, one again."""
    assert run(tmp_path, 2, "fp32", "nvme")[0] == 0
    for begin, masters in pool.succeed(_run_on_ranks, tmp_path, 4, stage):
        assert begin == 2
        assert all(torch.equal(masters[name], values) for name, values in plain(4, "fp32").items())
    begin, masters = run(tmp_path, 6, "fp32", "nvme")
    assert begin == 4
    assert all(torch.equal(masters[name], values) for name, values in plain(6, "fp32").items())
