"""kill -9 and Ctrl-C at any moment: the same command goes on at once, and ends as if nothing had happened."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.pairwise import full
from tests.helpers.signals import interrupt
from tests.helpers.trainer import NUM_WORKERS, Run, Spec, as_argument, finish, outcome, rows

Outcome = tuple[dict[int, list[float]], dict[str, str]]
LONG, SHORT = 30, 5
CASES = [
    {"commit_every": 1, "optimizer": "nvme", "durability": "process"},
    {"commit_every": 3, "optimizer": "cpu", "durability": "process"},
    {"commit_every": 3, "optimizer": "nvme", "durability": "commit"},
    {"commit_every": 1, "optimizer": "cpu", "durability": "commit"},
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Outcome]:
    """The outcome of a run of so many steps; neither tiers nor commits have a say in it."""

    @functools.cache
    def outcome_of(num_steps: int) -> Outcome:
        spec = _spec(tmp_path_factory.mktemp("whole"), num_steps=num_steps)
        finish(spec)
        values, digests = outcome(spec)
        assert sorted(values) == list(range(1, num_steps + 1))
        return values, digests

    return outcome_of


def _spec(path: Path, **settings: Any) -> Spec:
    return Spec(nvme=str(path / "nvme"), out=str(path), **settings)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False


def _kill_often(spec: Spec, num_kills: int, seed: int) -> int:
    """Kill and start again at once; returns how many DataLoader workers outlived their trainer."""
    moments, orphans, step_s = random.Random(seed), 0, 0.01
    for _ in range(num_kills):
        run = Run(spec)
        # From before the first step (importing, resuming, reading back) to two commits on.
        began = time.monotonic()
        num_rows = moments.randint(0, 2 * spec.commit_every)
        assert run.wait_for_rows(num_rows), "the run ended before it was killed: give it more steps"
        if num_rows > 1:
            step_s = min(step_s, (time.monotonic() - began) / num_rows)
        time.sleep(moments.random() * (step_s if num_rows else 0.2))
        run.stop()
        assert run.wait() in (-signal.SIGKILL, 0)
        own = rows(spec)[run.num_rows_before :]
        orphans += sum(_alive(pid) for row in own[-1:] for pid in row["workers"])
    return orphans


def _never_went_back(spec: Spec) -> bool:
    starts = [row["from"] for row in rows(spec)]
    return starts == sorted(starts)


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: " ".join(map(str, case.values())))
def test_five_kills_change_nothing(
    case: dict[str, Any], tmp_path: Path, uninterrupted: Callable[[int], Outcome]
) -> None:
    spec = _spec(tmp_path, num_steps=LONG * case["commit_every"], **case)
    orphans = _kill_often(spec, num_kills=5, seed=CASES.index(case))
    finish(spec)
    assert outcome(spec) == uninterrupted(spec.num_steps)
    assert _never_went_back(spec)
    # Otherwise the lock's release in forked workers was not put to the test.
    assert 0 < orphans <= 5 * NUM_WORKERS


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_fifty_kills_change_nothing(
    case: dict[str, Any], tmp_path: Path, uninterrupted: Callable[[int], Outcome]
) -> None:
    spec = _spec(tmp_path, num_steps=300 * case["commit_every"], **case)
    _kill_often(spec, num_kills=50, seed=100)
    finish(spec)
    assert outcome(spec) == uninterrupted(spec.num_steps)


def _die_and_resume(spec: Spec, place: str, count: int) -> bool:
    """Whether the run came as far as to die."""
    died = Run(replace(spec, die_at=place, die_count=count)).wait() == -signal.SIGKILL
    finish(spec)
    return died


FEW = [
    *(("before rename", n) for n in (1, 4, 7)),
    *(("after rename", n) for n in (1, 2, 8)),
    ("write", 1),
    ("write", 60),
]
MORE = [
    *(("before rename", n) for n in (2, 3)),
    *(("after rename", n) for n in (3, 5)),
    *(("write", n) for n in (20, 40, 75)),
]
POINTS = [*FEW, *(full(*each) for each in MORE)]


@pytest.mark.parametrize(("place", "count"), POINTS, ids=str)
def test_death_at_an_operation(place: str, count: int, tmp_path: Path, uninterrupted: Callable[[int], Outcome]) -> None:
    spec = _spec(tmp_path, num_steps=SHORT, durability="commit" if count % 2 else "process")
    assert _die_and_resume(spec, place, count)
    assert outcome(spec) == uninterrupted(SHORT)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
@pytest.mark.parametrize("place", ["before rename", "after rename", "write"])
def test_death_at_every_operation(
    place: str, optimizer: str, tmp_path: Path, uninterrupted: Callable[[int], Outcome]
) -> None:
    count = 1
    while True:
        path = tmp_path / str(count)
        path.mkdir()
        spec = _spec(path, num_steps=SHORT, optimizer=optimizer)
        died = _die_and_resume(spec, place, count)
        assert outcome(spec) == uninterrupted(SHORT), count
        if not died:
            break
        count += 1 if place != "write" else 7
    assert count > 2 * SHORT


@pytest.mark.parametrize(("optimizer", "count"), [("cpu", 1), ("cpu", 9), ("nvme", 3)])
def test_death_while_resuming(
    optimizer: str, count: int, tmp_path: Path, uninterrupted: Callable[[int], Outcome]
) -> None:
    """Nothing is changed before it trains: the next start finds what this one found."""
    spec = _spec(tmp_path, num_steps=SHORT, optimizer=optimizer)
    finish(replace(spec, num_steps=3))
    before = rows(spec)
    assert Run(replace(spec, die_at="read", die_count=count)).wait() == -signal.SIGKILL
    assert rows(spec) == before
    finish(spec)
    assert outcome(spec) == uninterrupted(SHORT)
    assert _never_went_back(spec)


def test_ctrl_c_and_the_same_command_again(tmp_path: Path, uninterrupted: Callable[[int], Outcome]) -> None:
    spec = _spec(tmp_path, num_steps=LONG, commit_every=1)
    command = [sys.executable, "-m", "tests.helpers.trainer", as_argument(spec)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=_environment())
    while len(rows(spec)) < 4:
        assert process.poll() is None
        time.sleep(0.002)
    _, complaint = interrupt(process)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in complaint and "StorageError" not in complaint
    finish(spec)
    assert outcome(spec) == uninterrupted(LONG)
    assert _never_went_back(spec)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.mark.parametrize("moment", [0, 1, 3])
def test_ctrl_c_loses_no_committed_step(moment: int, tmp_path: Path, uninterrupted: Callable[[int], Outcome]) -> None:
    spec = _spec(tmp_path, num_steps=12, optimizer="cpu" if moment == 1 else "nvme")
    run = Run(spec)
    assert run.wait_for_rows(moment)
    run.stop(signal.SIGINT)
    finish(spec)
    assert outcome(spec) == uninterrupted(12)


def test_scratch_leaves_nothing_after_kill(tmp_path: Path) -> None:
    spec = _spec(tmp_path, num_steps=10**6, durability="scratch")
    run = Run(spec)
    assert run.wait_for_rows(2)
    run.stop()
    assert os.listdir(spec.nvme) == ["LOCK"]
    assert os.path.getsize(Path(spec.nvme) / "LOCK") < 1000
