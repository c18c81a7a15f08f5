"""A run that goes on on other ranks: as if its last step had been saved and loaded there, bit for bit."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.pairwise import full
from tests.helpers.ranks import Case, Failure, Outcome, RankPools
from zero_offload.checkpoint.generation import GenerationKeeper
from zero_offload.checkpoint.saved_generation import SavedGeneration
from zero_offload.storage.files.swap_file import SwapFile

SETTINGS: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "existing": "resume", "precision": "bf16"}
CHANGES = [
    # ranks and settings before, and after
    (1, {}, 2, {}),
    (2, {}, 3, {}),
    (2, {"stage": 3}, 2, {"stage": 0, "params": "cpu", "optimizer": "cpu"}),
    (2, {"params": "cpu", "optimizer": "cpu"}, 1, {"optimizer": "cpu", "precision": "bf16"}),
]
FULL = [
    (2, {}, 1, {}),
    (2, {"stage": 1}, 2, {"stage": 3}),
    (2, {"stage": 0}, 3, {"stage": 2}),
    (3, {"stage": 2, "precision": "fp32"}, 1, {"precision": "fp32"}),
    (3, {"precision": "fp16"}, 2, {"stage": 1, "precision": "fp16"}),
    (2, {"stage": 3}, 2, {"stage": 1}),
]


def first_steps(rank: int, world_size: int, case: Case, saved: str) -> None:
    """Train, save a checkpoint beside, and close: the run's last generation has the same step."""
    model, optimizer = ranks.start(case)
    ranks.steps(case, (rank, world_size), model, optimizer, range(case.num_steps), Outcome())
    zo.save_checkpoint(model, optimizer, saved)
    zo.close(model)


def go_on(rank: int, world_size: int, case: Case, saved: str) -> tuple[Outcome, list[str]]:
    """Two steps more, from the checkpoint or, without one, from the generation in the directory; and the warnings."""
    model, optimizer = ranks.start(case)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if saved:
                assert zo.load_checkpoint(model, optimizer, saved).step == case.num_steps
            else:
                resumed = zo.resume(model, optimizer)
                assert resumed is not None and resumed.extra == {"next": case.num_steps} == {"next": resumed.step}
        out = Outcome()
        last = case.num_steps + 2
        ranks.steps(case, (rank, world_size), model, optimizer, range(case.num_steps, last), out)
        out.params = ranks.read_params(model)
        return out, [str(each.message) for each in caught]
    finally:
        zo.close(model)


def resume_only(rank: int, world_size: int, case: Case) -> int:
    """The step at which this run stands."""
    model, optimizer = ranks.start(case)
    resumed = zo.resume(model, optimizer)
    zo.close(model)
    assert resumed is not None
    return resumed.step


def one_fails(rank: int, world_size: int, case: Case, place: str) -> None:
    """Rank 1 does not come to the end of cutting the files anew."""
    owner: type = {"_rank_payload": GenerationKeeper, "source": SavedGeneration, "create": SwapFile}[place]
    original = getattr(owner, place)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            raise zo.StorageError("the drive is on fire")
        return original(*args, **kwargs)

    setattr(owner, place, failing)
    try:
        ranks.start(case)
    finally:
        setattr(owner, place, original)


def one_goes_back(rank: int, world_size: int, case: Case) -> None:
    settings = case.settings | ({"generation": 1} if rank == 1 else {})
    ranks.start(replace(case, settings=settings))


@pytest.mark.parametrize(("before", "then", "after", "now"), [*CHANGES, *(full(*each) for each in FULL)])
def test_other_ranks(
    before: int, then: dict[str, Any], after: int, now: dict[str, Any], pools: RankPools, tmp_path: Path
) -> None:
    case = Case(SETTINGS | {"nvme": tmp_path / "run"}, num_steps=2, max_norm=1.0, num_frozen=1)
    pools.of(before).succeed(first_steps, replace(case, settings=case.settings | then), str(tmp_path / "saved"))
    here = replace(case, settings=case.settings | then | now)
    found = pools.of(after).succeed(go_on, here, "")
    elsewhere = replace(here, settings=here.settings | {"nvme": tmp_path / "other"})
    expected = pools.of(after).succeed(go_on, elsewhere, str(tmp_path / "saved"))
    assert [out for out, _ in found] == [out for out, _ in expected]
    said = [text for _, texts in found for text in texts if "random number generators" in text]
    assert len(said) == (before != after)
    if said:
        assert f"generators of {before} ranks, this run has {after}: they are not restored" in said[0]
    # A run that was cut anew is like any other, and has nothing of the old one.
    assert pools.of(after).succeed(resume_only, here) == [4] * after
    swaps = {path.name for path in (tmp_path / "run").glob("*.swap")}
    edition = "" if (before, then.get("stage", 3) == 0) == (after, now.get("stage", 3) == 0) else ".1"
    assert swaps == {f"rank{rank}{edition}.swap" for rank in range(after)}
    assert not list((tmp_path / "run").glob(f"rank{after}-*"))


def test_there_and_back(pools: RankPools, tmp_path: Path) -> None:
    case = Case(SETTINGS | {"nvme": tmp_path / "run"}, num_steps=2)
    pools.of(1).succeed(first_steps, case, str(tmp_path / "saved"))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    alone = replace(case, settings=case.settings | {"nvme": tmp_path / "copy"})
    expected = pools.of(1).succeed(go_on, alone, "")
    for world_size in (3, 2, 1):
        assert pools.of(world_size).succeed(resume_only, case) == [2] * world_size
    found = pools.of(1).succeed(go_on, case, "")
    assert [out for out, _ in found] == [out for out, _ in expected]


def test_ranks_that_would_go_on_from_different_generations(pools: RankPools, tmp_path: Path) -> None:
    case = Case(SETTINGS | {"nvme": tmp_path / "run"}, num_steps=2)
    pools.of(2).succeed(first_steps, case, str(tmp_path / "saved"))
    results = pools.of(2).call(one_goes_back, case)
    assert all(isinstance(result, Failure) and result.kind == "CheckpointError" for result in results), results
    says = "rank 1 (existing='resume') goes on from generation 1, rank 0 from generation 2. Give all ranks the same "
    assert says + "generation=" in results[0].message
    assert pools.of(2).succeed(resume_only, case) == [2, 2]


@pytest.mark.parametrize("place", ["_rank_payload", "source", "create"])
def test_one_rank_fails_while_files_are_cut_anew(place: str, pools: RankPools, tmp_path: Path) -> None:
    case = Case(SETTINGS | {"nvme": tmp_path / "run"}, num_steps=2)
    pools.of(1).succeed(first_steps, case, str(tmp_path / "saved"))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for nvme, world_size in (("run", 2), ("copy", 1)):
        here = replace(case, settings=case.settings | {"nvme": tmp_path / nvme})
        results = pools.of(2).call(one_fails, here, place)
        assert [result.kind for result in results] == ["StorageError"] * 2, results
        assert results[0].message == "rank 1: the drive is on fire"
        assert pools.of(world_size).succeed(resume_only, here) == [2] * world_size


def test_all_ranks_go_back(pools: RankPools, tmp_path: Path) -> None:
    case = Case(SETTINGS | {"nvme": tmp_path / "run"}, num_steps=2)
    pools.of(2).succeed(first_steps, case, str(tmp_path / "saved"))
    back = replace(case, settings=case.settings | {"generation": 1})
    assert pools.of(2).succeed(resume_only, back) == [1, 1]
    assert pools.of(2).succeed(resume_only, case) == [1, 1]


def test_a_run_of_two_ranks_loads_as_a_checkpoint(pools: RankPools, tmp_path: Path) -> None:
    case = Case(SETTINGS | {"nvme": tmp_path / "run"}, num_steps=2)
    pools.of(2).succeed(first_steps, case, str(tmp_path / "saved"))
    for world_size in (1, 3):
        outs = []
        for name in ("run", "saved"):
            here = replace(case, settings=case.settings | {"nvme": tmp_path / f"{name} on {world_size}"})
            outs.append([out for out, _ in pools.of(world_size).succeed(go_on, here, str(tmp_path / name))])
        assert outs[0] == outs[1]
    assert pools.of(2).succeed(resume_only, case) == [2, 2]
