"""Launchers beside torchrun: SLURM, with commands that stand in for its own, a Job of Kubernetes, and Ray Train."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.helpers.launched import free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LIMIT_S = 240
SRUN = """#!/bin/bash
trap 'kill -TERM $jobs' TERM
for node in $(seq "$SLURM_NNODES"); do "$@" & jobs="$jobs $!"; done
status=0
for job in $jobs; do wait "$job" || status=$?; done
for job in $jobs; do wait "$job" || status=$?; done
exit "$status"
"""
"""Starts the command once for each node, all of them here."""
SCONTROL = """#!/bin/bash
case "$1" in
show) echo 127.0.0.1; echo 127.0.0.2 ;;
requeue) echo "requeue $2" ;;
esac
"""


def steps_in(printed: str, rank: int) -> list[int]:
    return [int(step) for step in re.findall(rf"rank {rank}, step (\d+): loss", printed)]


@contextlib.contextmanager
def batch_job(folder: Path, restarts: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A start of the batch file, and its output."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    torchrun = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", torchrun)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    environment = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": str(restarts),
        "RANKS": "1",
        "PORT": free_port(),
        "DIRECTORY": str(folder / "tiers"),
    }
    out = folder / f"out{restarts}.txt"
    with out.open("w") as file:
        process = subprocess.Popen(
            ["bash", str(EXAMPLES / "slurm.sh")],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, out
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_batch_job_that_is_taken_away_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    with batch_job(tmp_path, 0) as (process, out):
        deadline = time.monotonic() + LIMIT_S
        while not all(len(steps_in(out.read_text(), rank)) > 5 for rank in (0, 1)):
            assert process.poll() is None and time.monotonic() < deadline, out.read_text()
            time.sleep(0.1)
        # SLURM signals the tasks, not the batch file.
        subprocess.run(["pkill", "-TERM", "-g", str(process.pid), "-f", "torch.distributed.run"], check=True)
        assert process.wait(LIMIT_S) != 0
    first = out.read_text()
    assert "requeue 7" in first
    with batch_job(tmp_path, 1) as (process, out):
        assert process.wait(LIMIT_S) == 0, out.read_text()
    again = out.read_text()
    assert "requeue" not in again
    for rank in (0, 1):
        done, rest = steps_in(first, rank), steps_in(again, rank)
        assert done + rest == [*range(1, 61)]


def _pod(folder: Path, index: int, port: str, number: int) -> tuple[subprocess.Popen[bytes], Path]:
    """A start of the container's command of `kubernetes.yaml`, with the variables that differ here."""
    _, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    assert (job["spec"]["completionMode"], job["spec"]["completions"]) == ("Indexed", 2)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    (commands / "torchrun").write_text(f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    (commands / "torchrun").chmod(0o755)
    environment = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "JOB_COMPLETION_INDEX": str(index),
        "HEAD": "127.0.0.1",
        "PORT": port,
        "RANKS": "1",
        "DIRECTORY": str(folder / "tiers"),
    }
    out = folder / f"pod{index}-{number}.txt"
    with out.open("w") as file:
        process = subprocess.Popen(
            [*container["command"], *container["args"]],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, out


def test_a_pod_of_a_job_that_is_taken_away_starts_again_and_both_go_on(tmp_path: Path) -> None:
    port = free_port()
    pods = [_pod(tmp_path, index, port, 0) for index in (0, 1)]
    try:
        deadline = time.monotonic() + LIMIT_S
        while not all("step 6: loss" in out.read_text() for _, out in pods):
            assert all(process.poll() is None for process, _ in pods), pods[0][1].read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        pods[1][0].send_signal(signal.SIGTERM)  # to the container's first process, as the kubelet does
        assert pods[1][0].wait(LIMIT_S) == 75, pods[1][1].read_text()
        pods.append(_pod(tmp_path, 1, port, 1))
        for process, out in (pods[0], pods[2]):
            assert process.wait(LIMIT_S) == 0, out.read_text()
    finally:
        for process, _ in pods:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    printed = "".join(out.read_text() for _, out in pods)
    for rank in (0, 1):
        assert sorted(steps_in(printed, rank)) == [*range(1, 61)]


@pytest.mark.full  # beside other tests Ray may not start its workers in minutes
def test_ray_starts_a_rank_again_and_it_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="Ray is not here: pip install 'ray[train]'")
    out = tmp_path / "out.txt"
    mark = f"ZERO_OFFLOAD_TEST={tmp_path}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ZERO_OFFLOAD_TEST": str(tmp_path), "RAY_DEDUP_LOGS": "0"}
    with out.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLES / "ray_train.py"), str(tmp_path)],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while "step 3: loss" not in out.read_text():
            assert process.poll() is None and time.monotonic() < deadline, out.read_text()
            time.sleep(0.05)
        os.kill(_workers_of_ray(mark)[0], signal.SIGKILL)
        assert process.wait(LIMIT_S) == 0, out.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    # Ray may show a line twice.
    found = {(int(pid), int(step)) for pid, step in re.findall(r"pid=(\d+)\)\S* step (\d+): loss", out.read_text())}
    first, second = sorted({pid for pid, _ in found}, key=lambda pid: min(step for each, step in found if each == pid))
    assert {step for _, step in found} == {*range(1, 41)}
    assert max(step for pid, step in found if pid == first) <= min(step for pid, step in found if pid == second)


def _workers_of_ray(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_worker = folder.name.isdigit() and b"RayTrainWorker" in (folder / "cmdline").read_bytes()
            if is_worker and mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
