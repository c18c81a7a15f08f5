"""The examples run as their first lines say, twice where they promise to resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launched import run_program

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("[0-9]*.py"))
"""Those of tools are run by tests/integrations."""
LINES_MAX = 110


def _example(name: str) -> Path:
    return next(path for path in EXAMPLES if name in path.name)


def test_there_are_few_and_they_are_short() -> None:
    assert 1 <= len(EXAMPLES) <= 5
    assert all(len(path.read_text().splitlines()) <= LINES_MAX for path in EXAMPLES)


def test_train_from_nvme_resumes(tmp_path: Path) -> None:
    first = run_program(_example("train_from_nvme"), tmp_path / "run", folder=tmp_path)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in first.splitlines() if "loss" in line]
    assert losses[-1] < losses[0]
    assert not run_program(_example("train_from_nvme"), tmp_path / "run", folder=tmp_path)  # all steps are done


def test_adamw_is_a_drop_in(tmp_path: Path) -> None:
    printed = run_program(_example("adamw"), folder=tmp_path)
    ours, theirs = (float(word.strip(";")) for word in printed.split()[1:4:2])
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_frozen_base_trains_the_correction(tmp_path: Path) -> None:
    lines = run_program(_example("frozen_base"), tmp_path / "run", folder=tmp_path).splitlines()
    assert float(lines[2].split()[-1]) < float(lines[0].split()[-1])
    assert float(lines[-1].split()[-1]) > 0


def test_tensor_parallel_trains_on_four_ranks(tmp_path: Path) -> None:
    printed = run_program(_example("tensor_parallel"), tmp_path / "run", folder=tmp_path, num_ranks=4)
    lines = printed.splitlines()
    assert float(lines[2].split()[-1]) < float(lines[0].split()[-1])
