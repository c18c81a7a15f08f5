"""Two ranks over one base: each reads its own part, and what a run of two has kept serves one, and the other way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers.bases import opened, settings, steps, train_on_ranks, write_base
from tests.helpers.disk import runtime
from tests.helpers.ranks import RankPool

STAGES: dict[str, dict[str, Any]] = {
    "3": {},
    "3 cpu": {"params": "cpu"},
    "2": {"stage": 2},
    "1": {"stage": 1},
    "0": {"stage": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("shared") / "base", num_files=3)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[float]:
    model, optimizer = opened(folder, settings(None))
    losses = steps(model, optimizer, 0, 6, commits=False)
    zo.close(model)
    return losses


def returned(results: list[Any]) -> list[Any]:
    assert all(isinstance(each, tuple) for each in results), [str(each) for each in results]
    return results


@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_those_of_one_rank(
    stage: str, folder: Path, plain: list[float], pool: RankPool, tmp_path: Path
) -> None:
    given = STAGES[stage] | {"nvme": str(tmp_path / "run")}
    for losses, _, rests in returned(pool.call(train_on_ranks, str(folder), given, 0, 3)):
        assert losses == plain[:3] and rests
    again = given | {"existing": "resume"}
    for losses, _, rests in returned(pool.call(train_on_ranks, None, again, 3, 6)):
        assert losses == plain[3:] and rests
    assert sum(path.stat().st_size for path in (tmp_path / "run").glob("*.swap")) < 1 << 20


def test_each_rank_reads_its_part(folder: Path, pool: RankPool, tmp_path: Path) -> None:
    """Of a file of several blocks a rank reads those that its shards lie in."""
    given = {"nvme": str(tmp_path / "run")}
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    alone, optimizer = opened(folder, settings(tmp_path / "alone"))
    steps(alone, optimizer, 0, 3)
    whole = zo.stats(alone).read_bytes["nvme"]
    zo.close(alone)
    found = returned(pool.call(train_on_ranks, str(folder), given, 0, 3))
    assert all(nbytes < whole for _, nbytes, _ in found) and whole > total / 2


@pytest.mark.parametrize("first", ["two ranks", "one rank"])
def test_another_number_of_ranks(first: str, folder: Path, plain: list[float], pool: RankPool, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def on_two(begin: int, end: int) -> None:
        load = str(folder) if begin == 0 else None
        given = {"nvme": str(run), "existing": "resume"}
        for losses, _, rests in returned(pool.call(train_on_ranks, load, given, begin, end)):
            assert losses == plain[begin:end] and rests

    def on_one(begin: int, end: int) -> None:
        model, optimizer = opened(folder if begin == 0 else None, settings(run, existing="resume"))
        zo.resume(model, optimizer)
        assert steps(model, optimizer, begin, end) == plain[begin:end]
        assert all(shard.base is not None for shard in runtime(model).store.shards if not shard.layout.trainable)
        zo.close(model)

    turns = (on_two, on_one, on_two) if first == "two ranks" else (on_one, on_two, on_one)
    for number, turn in enumerate(turns):
        turn(2 * number, 2 * number + 2)


def test_ranks_with_different_files(folder: Path, pool: RankPool, tmp_path: Path) -> None:
    other = write_base(tmp_path / "1", seed=2, num_files=3)
    shutil.copytree(folder, tmp_path / "0")
    given = {"nvme": str(tmp_path / "run")}
    for failure in pool.call(load_own_folder, str(tmp_path), given):
        assert failure.kind == "ConfigError" and "ranks differ: the folder of weights is" in failure.message
    assert other.is_dir()


def load_own_folder(rank: int, world_size: int, where: str, given: dict[str, Any]) -> Any:
    return train_on_ranks(rank, world_size, f"{where}/{rank}", given, 0, 1)


def test_a_base_that_is_gone_is_one_error_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    own = write_base(tmp_path / "base")
    given = {"nvme": str(tmp_path / "run"), "existing": "resume"}
    returned(pool.call(train_on_ranks, str(own), given, 0, 1))
    own.rename(tmp_path / "new")
    for failure in pool.call(train_on_ranks, None, given, 1, 2):
        assert failure.kind == "IntegrityError" and "zo.load_pretrained" in failure.message
    for losses, _, rests in returned(pool.call(train_on_ranks, str(tmp_path / "new"), given, 1, 2)):
        assert len(losses) == 1 and rests
