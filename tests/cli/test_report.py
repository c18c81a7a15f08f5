"""`zero-offload report` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def _report(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zero_offload", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    identity = {f"offload.{kind}": "nvme" for kind in ("params", "grads", "optimizer")}
    description = {
        "identity": {"model": "tiny", "steps": 4, **identity},
        "unigram_nats": 3.0,
        "num_parameters": 10**6,
        "baseline_rss_bytes": 1000,
        "device": "cuda",
        "plan": {"device": 5, "cpu": 7, "nvme": 9},
    }
    (tmp_path / "run.json").write_text(json.dumps(description))
    moved = {"nvme": 1 << 20}
    row = {
        "loss": 2.0,
        "step_s": 0.5,
        "stall_s": 0.1,
        "update_s": 0.1,
        "commit_s": 0.0,
        "tokens_per_s": 10.0,
        "peak_rss_bytes": 2000,
    }
    row |= {"read_bytes": moved, "written_bytes": moved, "resident_bytes": moved}
    lines = [json.dumps({"step": step} | row) for step in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_json_has_the_summary_and_the_picture(run_dir: Path) -> None:
    done = _report(run_dir, "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["steps"] == 4 and summary["stall_share"] == pytest.approx(0.2)
    assert summary["planned_rss_bytes"] == 1007  # a GPU's memory is not this process's
    assert Path(summary["report"]).read_bytes().startswith(b"\x89PNG")


def test_text_has_one_figure_per_line(run_dir: Path) -> None:
    done = _report(run_dir)
    assert done.returncode == 0, done.stderr
    figures = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert figures["steps"] == "4" and figures["step_s"] == "0.5"


def test_what_is_no_run_directory_is_said_so(tmp_path: Path) -> None:
    done = _report(tmp_path)
    assert done.returncode == 2
    assert "run.json" in done.stderr and "Traceback" not in done.stderr
