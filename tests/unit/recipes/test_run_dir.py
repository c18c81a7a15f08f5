from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from zero_offload.errors import ConfigError, StorageError
from zero_offload.recipes.run_dir import Metrics, RunDir, read_run
from zero_offload.types import Existing


def _write_steps(path: Path, last_step: int, committed_step: int = 0) -> None:
    metrics = Metrics.open(path, committed_step)
    for step in range(committed_step + 1, last_step + 1):
        metrics.append({"step": step, "loss": 1 / step})
    metrics.close()


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_what_came_after_the_commit_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write_steps(path, last_step=7)
    _write_steps(path, last_step=9, committed_step=4)
    assert _steps(path) == list(range(1, 10))


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write_steps(path, last_step=5)
    with path.open("a") as file:
        file.write('{"step": 6, "los')
    _write_steps(path, last_step=6, committed_step=5)
    assert _steps(path) == [1, 2, 3, 4, 5, 6]


def test_a_whole_object_without_its_newline_is_torn_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    _write_steps(path, last_step=3, committed_step=2)
    assert _steps(path) == [1, 3]  # nothing is glued to the torn line


def test_a_fresh_start_empties_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write_steps(path, last_step=5)
    _write_steps(path, last_step=2)
    assert _steps(path) == [1, 2]


def test_floats_are_exact_and_nan_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics.open(path, 0)
    metrics.append({"step": 1, "loss": 0.1 + 0.2, "grad_norm": math.nan})
    metrics.close()
    assert json.loads(path.read_text()) == {"step": 1, "loss": 0.1 + 0.2, "grad_norm": None}


def test_unwritable_metrics_are_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"missing/metrics\.jsonl"):
        Metrics.open(tmp_path / "missing" / "metrics.jsonl", 0)


def test_the_same_run_resumes_and_another_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert run.find_existing({"seed": 1}) is Existing.REFUSE  # a foreign generation must not be overwritten
    run.create({"identity": {"seed": 1, "lr": 1.0, "data": ["x"]}})
    assert run.find_existing({"seed": 1, "lr": 1.0, "data": ["x"]}) is Existing.RESUME
    assert run.find_existing({"seed": 1, "lr": 0.5, "data": ["x"]}) is Existing.RESUME
    with pytest.raises(ConfigError, match=r"seed=1, this one has seed=2.*--discard"):
        run.find_existing({"seed": 2, "lr": 1.0, "data": ["x"]})


def test_a_damaged_description_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="--discard"):
        RunDir(tmp_path).find_existing({})


def test_files_json_names_every_file_of_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create({"identity": {}})
    run.write_sample("text")
    _write_steps(run.path / "metrics.jsonl", 1)
    listed = json.loads((run.path / "files.json").read_text())["files"]
    assert {path.name for path in run.path.iterdir()} <= set(listed)


def test_read_run_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.json"):
        read_run(tmp_path)


IDENTITY = {
    "seed": 3,
    "steps": 3,
    "ranks": 2,
    "offload.stage": 3,
    "offload.nvme": ["/a", "/b"],
    "offload.precision": {"compute": "bf16"},
    "offload.durability": "process",
}
MAY_CHANGE: dict[str, object] = {
    "steps": 4,
    "ranks": 1,
    "offload.stage": 1,
    "offload.nvme": ["/a"],
    "offload.cpu_memory": 5,
    "offload.durability": "commit",
    "eval_every": 7,
}
MAY_NOT: dict[str, object] = {
    "seed": 4,
    "offload.nvme": ["/b", "/a"],
    "offload.precision": {"compute": "fp32"},
    "offload.durability": "scratch",
    "text": "other",
}


def test_where_states_rest_may_change_and_what_decides_numbers_may_not(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.find_existing(IDENTITY) is Existing.REFUSE and run.earlier_identity() is None
    run.create({"identity": IDENTITY})
    assert run.earlier_identity() == IDENTITY
    assert run.find_existing(IDENTITY | MAY_CHANGE) is Existing.RESUME
    for name, value in MAY_NOT.items():
        with pytest.raises(ConfigError, match=f"{name}="):
            run.find_existing(IDENTITY | {name: value})
