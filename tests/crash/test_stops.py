"""A signal to one rank ends a loop on all ranks: behind one commit, or at once where the step does not end."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.disk import generation_file
from tests.helpers.loops import Loop, Spec, finish
from tests.helpers.pairwise import full, in_turn

CODE = 75


def _committed(spec: Spec) -> int:
    return int(json.loads(generation_file(Path(spec.folder, "nvme")).read_text())["payload"]["step"])


def _paused(spec: Spec) -> Loop:
    loop = Loop(spec)
    loop.wait_for_pause()
    return loop


def _go(spec: Spec) -> None:
    Path(spec.folder, "go").touch()


@in_turn(
    number=[signal.SIGTERM, signal.SIGUSR1],
    ranks=[1, 2],
    workers=[2, 0],
    every=[1, 5],
)
def test_a_signal_to_one_rank_is_a_commit_on_all_and_an_exit_code(
    number: signal.Signals, ranks: int, workers: int, every: int, tmp_path: Path
) -> None:
    spec = Spec(str(tmp_path / "asked"), 6, workers=workers, ranks=ranks)
    asked = replace(spec, pause_at=3, settings=(("commit_every", every), ("steps", {"exit_code": CODE})))
    loop = _paused(asked)
    loop.send(number, ranks - 1)
    time.sleep(0.3)
    _go(asked)
    assert loop.codes() == [CODE] * ranks
    assert _committed(asked) == 3
    assert [max(rows) for rows in asked.seen()] == [3] * ranks
    assert finish(spec) == finish(replace(spec, folder=str(tmp_path / "undisturbed")))


@pytest.mark.parametrize("ranks", [2, full(1)])
def test_a_step_that_does_not_end_in_time_ends_all_ranks_with_the_code(ranks: int, tmp_path: Path) -> None:
    spec = Spec(str(tmp_path / "asked"), 6, ranks=ranks)
    asked = replace(spec, pause_at=3, settings=(("steps", {"exit_code": CODE, "grace": "1s"}),))
    loop = _paused(asked)
    began = time.monotonic()
    loop.send(signal.SIGTERM, 0)
    assert loop.codes() == [CODE] * ranks and time.monotonic() - began < 10
    assert _committed(asked) == 2
    _go(asked)
    assert finish(spec) == finish(replace(spec, folder=str(tmp_path / "undisturbed")))


def test_the_same_signal_again_is_a_launchers_and_another_one_ends_the_rank_at_once(tmp_path: Path) -> None:
    spec = Spec(str(tmp_path / "asked"), 6, pause_at=3)
    loop = _paused(spec)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
        loop.send(number, 0)
        time.sleep(0.5)
        assert (loop.processes[0].exitcode is None) == (number == signal.SIGTERM)
    assert loop.codes() == [-signal.SIGUSR1]
    assert _committed(spec) == 2


def test_a_signal_to_all_processes_does_not_cost_the_step_its_loaders_workers(tmp_path: Path) -> None:
    """torchrun signals the process group of a rank, in which the workers are."""
    spec = Spec(str(tmp_path / "asked"), 10**6, workers=2)
    for last in (3, 8, 13):
        loop = Loop(spec)
        loop.wait_for_step(last)
        loop.send_to_all(signal.SIGTERM, 0)
        assert loop.codes() == [130], spec.said(0).read_text()
    said, step = spec.said(0).read_text(), _committed(spec)
    assert "Traceback" not in said
    assert f"stopped by SIGTERM after step {step}: step {step} is committed, and the same command goes on" in said
    [seen] = spec.seen()
    expected = finish(replace(spec, folder=str(tmp_path / "undisturbed"), num_steps=step))
    assert [seen] == expected


def test_the_log_says_by_what_a_run_was_stopped(tmp_path: Path) -> None:
    spec = Spec(str(tmp_path / "asked"), 10**6, log=str(tmp_path / "log"), settings=(("steps", {"exit_code": 0}),))
    loop = Loop(spec)
    loop.wait_for_step(2)
    loop.send(signal.SIGUSR1, 0)
    assert loop.codes() == [0]
    description: dict[str, Any] = json.loads((tmp_path / "log" / "run.json").read_text())
    assert description["starts"][-1]["error"] == "SIGUSR1"
    assert description["starts"][-1]["last_step"] == _committed(spec)
