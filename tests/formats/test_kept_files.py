"""Files that an earlier commit wrote are resumed, loaded, verified and exported, with the numbers it had.

`runs.py` has the runs and says how their files were made.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.formats.runs import FOLDER, RUNS, Way, checkpoint_of, digests, directories_of, outcome, unpack, ways
from tests.helpers.pretrained import read_folder
from tests.helpers.ranks import RankPools
from zero_offload.cli.main import main

COMMITS = sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def expected_of(commit: str) -> dict[str, list[dict[str, Any]]]:
    expected: dict[str, list[dict[str, Any]]] = json.loads((FOLDER / f"{commit}.json").read_text())
    return expected


@pytest.fixture(params=COMMITS)
def commit(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(commit: str, tmp_path: Path) -> Path:
    unpack(commit, tmp_path)
    return tmp_path


def check(way: Way, commit: str, folder: Path, pools: RankPools | None) -> None:
    assert outcome(way, folder, pools) == expected_of(commit)[way.name]


ALONE, TOGETHER = ([way for way in ways() if (way.world_size > 1) is several] for several in (False, True))


@pytest.mark.door(
    "torch",
    load="generations and checkpoints of earlier versions",
    save="`zo.commit`, `zo.save_checkpoint`",
    outcome="right",
)
@pytest.mark.parametrize("way", ALONE, ids=lambda way: way.name)
def test_one_rank_goes_on_with_the_same_bits(way: Way, commit: str, folder: Path) -> None:
    check(way, commit, folder, None)


@pytest.mark.parametrize("way", TOGETHER, ids=lambda way: way.name)
def test_two_ranks_go_on_with_the_same_bits(way: Way, commit: str, folder: Path, pools: RankPools) -> None:
    check(way, commit, folder, pools)


def paths_of(folder: Path, name: str) -> list[Path]:
    """Of a run and of its checkpoint. A striped run is found where it was written only, unless it is resumed."""
    run = RUNS[name]
    paths = directories_of(folder, name) if run.num_directories == 1 else []
    return paths + ([checkpoint_of(folder, name)] if run.saves else [])


def test_every_file_verifies(commit: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, run in RUNS.items():
        for path in paths_of(folder, name):
            assert main(["verify", str(path), "--json"]) == 0, path
            found = json.loads(capsys.readouterr().out)["generations"]
            assert [each["step"] for each in found] == ([4] if path.name == "checkpoint" else [4, 3])
            assert all(each["whole"] and each["blocks"] > 0 and each["ranks"] == run.world_size for each in found)


@pytest.mark.door(
    "torch", load="generations and checkpoints of earlier versions", save="`zero-offload export`", outcome="right"
)
def test_every_file_is_exported(commit: str, folder: Path) -> None:
    expected = expected_of(commit)
    for name, run in RUNS.items():
        held = expected[Way(name, run.tiers, 1, False).name][0]["held"]
        for path in paths_of(folder, name):
            out = folder / "out" / name / path.name
            assert main(["export", str(path), str(out), "--dtype", "fp32"]) == 0
            assert held.items() <= digests(read_folder(out)).items(), path
