"""A signal to one rank ends a loop on all ranks: behind one commit, or at once where the step does not end."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.disk import generation_file
from tests.helpers.loops import Loop, Spec, finish
from tests.helpers.pairwise import full, in_turn
from tests.helpers.trainer import DEADLINE_S

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


LOOP = Path(__file__).parents[1] / "machines" / "loop.py"


def _torchrun(folder: Path, num_steps: int, code: int, *before: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *before, str(LOOP)]
    quoted = " ".join(shlex.quote(each) for each in (*command, str(folder), str(num_steps), str(code), "25s"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with (folder / "said").open("a") as said:
        return subprocess.Popen(
            ["bash", "-c", f"trap '' USR1; exec {quoted}"],
            stdout=said,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )


def _said(folder: Path) -> str:
    return (folder / "said").read_text()


def _until_said(folder: Path, launcher: subprocess.Popen[str], text: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while text not in _said(folder):
        assert time.monotonic() < deadline and launcher.poll() is None, _said(folder)
        time.sleep(0.05)


def _pids(launcher: subprocess.Popen[str]) -> list[int]:
    """Of the ranks."""
    return list(map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()))


def _rows(folder: Path) -> dict[int, set[str]]:
    """By step, what the ranks have seen, however often."""
    found: dict[int, set[str]] = {}
    for step, seen in re.findall(r"^step (\d+) (.*)$", _said(folder), re.MULTILINE):
        found.setdefault(int(step), set()).add(seen)
    return found


@pytest.mark.full
def test_torchrun_starts_again_a_run_of_which_one_rank_was_signalled(tmp_path: Path) -> None:
    folder, last = tmp_path / "asked", 40
    launcher = _torchrun(folder, last, CODE, "--max-restarts=3")
    _until_said(folder, launcher, "step 3 ")
    os.kill(_pids(launcher)[1], signal.SIGUSR1)
    assert launcher.wait(DEADLINE_S) == 0, _said(folder)
    assert "stopped by SIGUSR1 on rank 1 after step " in _said(folder)
    whole = _torchrun(tmp_path / "whole", last, CODE)
    assert whole.wait(DEADLINE_S) == 0
    assert _rows(folder) == _rows(tmp_path / "whole") and len(_rows(folder)) == last


@pytest.mark.full
@pytest.mark.parametrize("to", ["launcher", "all", "session"])
def test_torchrun_is_told_to_end(to: str, tmp_path: Path) -> None:
    """It passes SIGTERM on to ranks and their workers. A scheduler may signal all of them by itself, as well."""
    folder = tmp_path / "asked"
    for first in (3, 9):
        launcher = _torchrun(folder, 10**6, CODE)
        _until_said(folder, launcher, f"step {first} ")
        ranks = _pids(launcher)
        if to == "all":
            for pid in ranks:
                os.killpg(pid, signal.SIGTERM)
        if to in ("launcher", "all"):
            launcher.send_signal(signal.SIGTERM)
        else:
            for pid in (launcher.pid, *ranks):
                os.killpg(pid, signal.SIGUSR1)
        began = time.monotonic()
        assert launcher.wait(DEADLINE_S) != 0 and time.monotonic() - began < 25
        said = _said(folder)
        step = json.loads(generation_file(folder / "run").read_text())["payload"]["step"]
        assert f"after step {step}: step {step} is committed" in said, said
        assert max(_rows(folder)) == step and f"step {step + 1} [" not in said
    whole = _torchrun(tmp_path / "whole", step, CODE)
    assert whole.wait(DEADLINE_S) == 0
    assert _rows(folder) == _rows(tmp_path / "whole")
