"""The run directory of one's own loop: rows, resumes, kills, and what is refused."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import NARROW, TinyLM, build, tokens_of
from tests.helpers.ranks import Failure, RankPool
from zero_offload.checkpoint.run_dir import RunDir
from zero_offload.plan.table import PlanTable
from zero_offload.runs.reader import read_run
from zero_offload.runs.report.summary import summarize, tables


def offloaded(nvme: Path | None, **settings: Any) -> tuple[nn.Module, zo.AdamW]:
    tier = "cpu" if nvme is None else "nvme"
    config = zo.OffloadConfig(
        optimizer=tier, params="cpu", nvme=nvme, existing="resume" if nvme else "refuse", **settings
    )
    model = zo.offload(build(partial(TinyLM, NARROW)), config)
    return model, zo.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: zo.AdamW, log: zo.RunLog, last_step: int, **figures: Any) -> None:
    for step in range(log.committed_step + 1, last_step + 1):
        loss = model(tokens_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step(step, loss=loss, **figures)
        if model.training and zo.stats(model).step and isinstance(optimizer, zo.AdamW):
            zo.commit(model, optimizer, extra=step)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_row_has_the_figures_and_those_of_stats(tmp_path: Path) -> None:
    model, optimizer = offloaded(tmp_path / "run" / "nvme")
    next(model.parameters()).requires_grad_(True)
    settings = {"lr": 1e-2, "where": tmp_path, "beta": [0.9, math.inf]}
    with zo.RunLog(tmp_path / "run", model, settings=settings, tokens_per_step=18) as log:
        train(model, optimizer, log, 3, grad_norm=torch.tensor(2.0), accuracy=0.5, skipped=None)
    zo.close(model)
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["grad_norm"] == 2.0 and row["accuracy"] == 0.5 and "skipped" not in row for row in rows)
    assert rows[-1]["written_bytes"]["nvme"] > 0 and rows[-1]["resident_bytes"]["nvme"] > 0
    assert all(row["tokens_per_s"] == pytest.approx(18 / row["step_s"]) for row in rows)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["identity"]["lr"] == 1e-2 and about["identity"]["where"] == str(tmp_path)
    assert about["identity"]["beta"] == [0.9, "inf"]
    assert about["identity"]["offload.nvme"] == [str(tmp_path / "run" / "nvme")]
    assert about["plan"]["nvme"] > 0 and about["device"] == "cpu" and about["name"] == "TinyLM"
    assert about["num_trained"] == sum(param.numel() for param in model.parameters()) and about["num_frozen"] == 0
    assert about["versions"].keys() >= {"python", "torch", "zero_offload"}
    (start,) = about["starts"]
    assert start["step"] == 0 and start["last_step"] == 3 and start["error"] == ""
    assert start["began_at"] <= rows[0]["at"] <= start["ended_at"]
    assert len(read_run(tmp_path / "run").rows) == 3


def test_one_plan_is_in_run_json_in_every_row_in_the_report_and_in_zo_plan(tmp_path: Path) -> None:
    model, optimizer = offloaded(tmp_path / "nvme")
    with zo.RunLog(tmp_path / "run", model) as log:
        train(model, optimizer, log, 2)
        config = zo.OffloadConfig(optimizer="nvme", params="cpu", nvme=tmp_path / "other")
    zo.close(model)
    expected = zo.plan(build(partial(TinyLM, NARROW)), config).as_table()
    told = PlanTable.from_dict(json.loads((tmp_path / "run" / "run.json").read_text())["planned"])
    assert told.rows == expected.rows and told.total == expected.total
    assert [row["planned_bytes"] for row in rows_of(tmp_path / "run")] == [expected.total] * 2
    run = read_run(tmp_path / "run")
    summary = summarize(run)
    assert summary["planned"] == told.to_dict()
    assert {name: each["planned_bytes"] for name, each in summary["memory"].items()} == {
        "cpu": expected.states["memory"],
        "nvme": expected.states["nvme"],
        "process": 0,  # a loop of one's own does not say what the program takes: that is not compared
    }
    (table,) = [each for each in tables(run, summary) if each.title == "plan"]
    assert [[row[0], *row[1:]] for row in table.rows] == told.cells()[1:]


def test_frozen_parameters_are_counted(tmp_path: Path) -> None:
    model = build(partial(TinyLM, NARROW))
    frozen = list(model.parameters())[:2]
    for param in frozen:
        param.requires_grad_(False)
    zo.offload(model, zo.OffloadConfig())
    zo.RunLog(tmp_path / "run", model).close()
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["num_frozen"] == sum(param.numel() for param in frozen)
    assert about["num_frozen"] + about["num_trained"] == about["num_parameters"]
    zo.close(model)


SCRIPT = """
import os, sys
from pathlib import Path
from tests.unit.model.test_run_log import offloaded, train
import zero_offload as zo
folder, last_step = Path(sys.argv[1]), int(sys.argv[2])
model, optimizer = offloaded(folder / "nvme", commit_every=2)
zo.resume(model, optimizer)
log = zo.RunLog(folder / "run", model)
train(model, optimizer, log, last_step)
with (folder / "run" / "metrics.jsonl").open("a") as file:
    file.write('{"step": ' + str(last_step + 1) + ', "lo')
os.kill(os.getpid(), 9)
"""


def test_a_killed_run_goes_on_behind_its_generation(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path), "5"], capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    model, optimizer = offloaded(tmp_path / "nvme", commit_every=2)
    resumed = zo.resume(model, optimizer)
    committed_step = resumed.step if resumed is not None else 0
    log = zo.RunLog(tmp_path / "run", model)
    assert log.committed_step == committed_step < 5
    assert [row["step"] for row in rows_of(tmp_path / "run")] == list(range(1, committed_step + 1))
    train(model, optimizer, log, 7)
    log.close()
    zo.close(model)
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert [row["step"] for row in rows if row.get("resumed")] == ([committed_step + 1] if committed_step else [])
    plain, optimizer = offloaded(None)
    with zo.RunLog(tmp_path / "plain", plain) as log, pytest.warns(UserWarning, match="keeps nothing"):
        train(plain, optimizer, log, 7)
    assert [row["loss"] for row in rows_of(tmp_path / "plain")] == [row["loss"] for row in rows]
    zo.close(plain)
    starts = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert [start.get("last_step") for start in starts] == ([None, 7] if committed_step else [7])


def test_rows_of_a_run_that_begins_anew_are_kept_aside(tmp_path: Path) -> None:
    for _ in range(2):
        model, optimizer = offloaded(None, durability="scratch")
        told: list[str] = []
        with zo.RunLog(tmp_path / "run", model, warn=told.append) as log:
            train(model, optimizer, log, 2, seen=len(told))
        zo.close(model)
    assert len(told) == 1 and "metrics.earlier" in told[0]
    earlier = (tmp_path / "run" / "metrics.earlier").read_text().splitlines()
    assert [json.loads(line)["seen"] for line in earlier] == [0, 0]
    assert [row["seen"] for row in rows_of(tmp_path / "run")] == [1, 1]


def test_a_loop_that_counts_otherwise_resumes_by_the_model_s_steps(tmp_path: Path) -> None:
    """Its row of step 20 is the model's step 2."""
    model, optimizer = offloaded(tmp_path / "nvme", commit_every=1)
    with zo.RunLog(tmp_path / "run", model, tokens_per_step=5) as log:
        for step in (10, 20, 30):
            model(tokens_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            row = log.step(step)
            assert row["steps"] == 10 and row["tokens_per_s"] == pytest.approx(5 / row["step_s"])
            if step < 30:
                zo.commit(model, optimizer)
    assert [row["model_step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3]
    zo.close(model)  # the third step is not complete without zo.commit
    model, optimizer = offloaded(tmp_path / "nvme")
    assert zo.resume(model, optimizer) is not None
    told: list[str] = []
    with zo.RunLog(tmp_path / "run", model, warn=told.append) as log:
        assert log.committed_step == 2 and told == []
        assert [row["step"] for row in rows_of(tmp_path / "run")] == [10, 20]
    zo.close(model)


def test_what_happens_between_measure_and_step_is_no_part_of_a_step(tmp_path: Path, monkeypatch: Any) -> None:
    clock = iter(range(1000))
    model, optimizer = offloaded(None, durability="scratch")
    monkeypatch.setattr("zero_offload.model.run_log.time.perf_counter", lambda: float(next(clock)))
    with zo.RunLog(tmp_path / "run", model) as log:
        model(tokens_of(0)).backward()
        optimizer.step()
        log.measure()
        for _ in range(50):
            next(clock)
        assert log.step(1)["step_s"] < 40  # some ticks are zo.stats' own
        optimizer.zero_grad()
    zo.close(model)


@pytest.mark.parametrize(
    ("step", "figures", "says"),
    [
        (0, {}, "step 0 after step 1"),
        (1, {}, "step 1 after step 1"),
        (2.0, {}, "step 2.0 after step 1"),
        (2, {"loss": "low"}, 'loss="low" is not a number'),
        (2, {"loss": torch.ones(2)}, "loss=a Tensor is not a number"),
        (2, {"loss": 10**400}, r"loss=10+\.\.\. is not a number"),
        (2, {"step_s": 1.0}, "measures step_s by itself"),
        (2, {"resumed": 1}, "measures resumed by itself"),
    ],
)
def test_bad_figures(step: Any, figures: dict[str, Any], says: str, tmp_path: Path) -> None:
    model, _ = offloaded(None)
    with zo.RunLog(tmp_path / "run", model) as log:
        log.step(1, loss=math.nan)
        with pytest.raises(zo.ConfigError, match=says):
            log.step(step, **figures)
    with pytest.raises(zo.ConfigError, match="is closed"):
        log.step(2)
    assert rows_of(tmp_path / "run")[0]["loss"] is None
    zo.close(model)


def test_bad_places_and_arguments(tmp_path: Path) -> None:
    with pytest.raises(zo.ConfigError, match="was offloaded"):
        zo.RunLog(tmp_path / "run", nn.Linear(1, 1))
    model, _ = offloaded(tmp_path / "nvme")
    with pytest.raises(zo.ConfigError, match="is the model's NVMe directory too"):
        zo.RunLog(tmp_path / "nvme", model)
    with pytest.raises(zo.ConfigError, match=r"vars\(args\) makes one"):
        zo.RunLog(tmp_path / "run", model, settings=[1])  # type: ignore[arg-type]
    with pytest.raises(zo.ConfigError, match="tokens_per_step=0"):
        zo.RunLog(tmp_path / "run", model, tokens_per_step=0)
    (tmp_path / "file").touch()
    with pytest.raises(zo.ConfigError, match="is a file"):
        zo.RunLog(tmp_path / "file", model)
    other, _ = offloaded(tmp_path / "other")
    zo.close(other)
    with pytest.raises(zo.ConfigError, match=r"other/run\.json is not what the run wrote: it says nothing of a run"):
        zo.RunLog(tmp_path / "other", model)
    assert not (tmp_path / "run").exists()
    log = zo.RunLog(tmp_path / "run", model)
    with pytest.raises(zo.LockError, match=f"process {os.getpid()}"):
        zo.RunLog(tmp_path / "run", model)
    log.close()
    log.close()
    zo.RunLog(tmp_path / "run", model).close()
    zo.close(model)


def test_an_error_is_what_ended_the_run(tmp_path: Path) -> None:
    model, _ = offloaded(None)
    with pytest.raises(KeyboardInterrupt), zo.RunLog(tmp_path / "run", model):
        raise KeyboardInterrupt
    (start,) = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert start["error"] == "KeyboardInterrupt" and start["last_step"] == 0
    zo.close(model)


def test_a_directory_that_is_moved_stops_the_run(tmp_path: Path) -> None:
    model, _ = offloaded(None)
    with pytest.raises(zo.StorageError, match="was renamed"), zo.RunLog(tmp_path / "run", model) as log:
        log.step(1)
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        log.step(2)
    zo.close(model)


def log_on_ranks(rank: int, world_size: int, folder: str, settings: Any) -> tuple[list[float], str]:
    model = zo.offload(build(partial(TinyLM, NARROW)), zo.OffloadConfig(precision="fp32"))
    optimizer = zo.AdamW(model.parameters())
    found: list[float] = []
    try:
        with zo.RunLog(folder, model, settings=settings if rank == 0 else {}) as log:
            for step in (1, 2):
                model(tokens_of(step + rank)).backward()
                optimizer.step()
                found.append(log.step(step, loss=step + rank)["loss"])
    except zo.ConfigError as error:
        return found, str(error)
    finally:
        zo.close(model)
    return found, ""


def test_the_first_of_two_ranks_writes(pool: RankPool, tmp_path: Path) -> None:
    results = pool.succeed(log_on_ranks, str(tmp_path / "run"), {})
    assert not any(isinstance(each, Failure) for each in results)
    assert results == [([1, 2], ""), ([2, 3], "")]
    assert [row["loss"] for row in rows_of(tmp_path / "run")] == [1, 2]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["identity"]["ranks"] == 2
    (_, first), (_, second) = pool.succeed(log_on_ranks, str(tmp_path / "other"), 1)
    assert "takes a dict" in first and second == f"rank 0: {first}"


def test_a_directory_that_is_held_stays_so(tmp_path: Path) -> None:
    model, _ = offloaded(None)
    with RunDir(tmp_path / "run").held() as place:
        zo.RunLog(place, model).close()
        with pytest.raises(zo.LockError):
            zo.RunLog(tmp_path / "run", model)
    zo.close(model)


@pytest.mark.parametrize("value", [True, torch.tensor(True), b"1", ["a"]])
def test_what_is_no_number_is_no_loss(tmp_path: Path, value: object) -> None:
    model = zo.offload(build(partial(TinyLM, NARROW)), zo.OffloadConfig())
    with zo.RunLog(tmp_path / "run", model) as log:
        with pytest.raises(zo.ConfigError, match=r"loss=.* is not a number"):
            log.step(1, loss=value)
        log.step(1, loss=1, said=["a"])
        with pytest.raises(zo.ConfigError, match="give a text"):
            log.close(error=True)  # type: ignore[arg-type]
    with pytest.raises(zo.ConfigError, match="the first argument is the run's directory"):
        zo.RunLog(3, model)  # type: ignore[arg-type]
    with pytest.raises(zo.ConfigError, match="give a function that takes a text"):
        zo.RunLog(tmp_path / "other", model, warn=True)  # type: ignore[arg-type]
    zo.close(model)
