from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.runs.reader import read_run
from zero_offload.runs.report.picture import write_picture
from zero_offload.runs.report.summary import summarize


def _write_run(path: Path, num_steps: int) -> Path:
    path.mkdir()
    tiers = {"offload.params": "nvme", "offload.grads": "cpu", "offload.optimizer": {"cpu": 0.5, "nvme": 0.5}}
    description = {
        "identity": {"model": "tiny", "steps": 500, **tiers},
        "unigram_nats": 3.25,
        "num_parameters": 1_000_000,
        "baseline_rss_bytes": 300 << 20,
        "device": "cpu",
        "plan": {"device": 10 << 20, "cpu": 50 << 20, "nvme": 200 << 20},
    }
    (path / "run.json").write_text(json.dumps(description))
    lines = [json.dumps(_row(step)) for step in range(1, num_steps + 1)]
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines) + '{"step": 99')
    return path


def _row(step: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step,
        "loss": None if step == 3 else 5 / step,
        "step_s": 9.0 if step == 1 else 0.5,
        "tokens_per_s": 1000.0,
        "stall_s": 0.1,
        "update_s": 0.05,
        "commit_s": 0.01,
        "exposed_s": {"params": 0.08, "activations": 0.0, "update": 0.02, "grads": 0.0, "commit": 0.0},
        "read_bytes": {"cpu": 5, "nvme": 14 << 20},
        "written_bytes": {"cpu": 5, "nvme": 12 << 20},
        "resident_bytes": {"cpu": 2 << 20, "nvme": 24 << 20},
        "peak_rss_bytes": (340 << 20) + step,
    }
    if step % 10 == 0:
        row["val_loss"] = 30 / step
    return row | ({"resumed": True} if step == 7 else {})


@pytest.mark.parametrize("num_steps", [1, 20, 500])
def test_the_report_is_a_png_of_a_readable_size(tmp_path: Path, num_steps: int) -> None:
    pytest.importorskip("matplotlib")
    path = write_picture(read_run(_write_run(tmp_path / "run", num_steps)))
    content = path.read_bytes()
    assert path == tmp_path / "run" / "report.png"
    assert content.startswith(b"\x89PNG\r\n")
    width, height = int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")
    assert width >= 1200 and height >= 800


def test_the_summary_leaves_out_the_first_steps_and_the_torn_line(tmp_path: Path) -> None:
    summary = summarize(read_run(_write_run(tmp_path / "run", 20)))
    assert summary["steps"] == 20
    assert summary["steps_planned"] == 500
    assert summary["validation_loss"] == 1.5
    assert summary["step_s"] == 0.5
    assert summary["waited_share"] == pytest.approx(0.2)
    assert summary["nvme_read_bytes_per_step"] == 14 << 20
    assert summary["nvme_written_bytes_per_step"] == 12 << 20
    assert summary["peak_rss_bytes"] == (340 << 20) + 20
    assert summary["planned_rss_bytes"] == 360 << 20  # the device is the CPU: both tiers are its memory
    assert summary["resumes"] == 1
    assert summary["step_time_s"]["step"] == 0.5 and summary["step_time_s"]["compute"] == pytest.approx(0.4)
    assert summary["update_overlap"] == pytest.approx(0.6)
    assert summary["bytes_per_step"]["nvme"] == {"read": 14 << 20, "written": 12 << 20}
    assert summary["memory"] == {
        "cpu": {"planned_bytes": 60 << 20, "measured_bytes": 2 << 20},
        "nvme": {"planned_bytes": 200 << 20, "measured_bytes": 24 << 20},
        "process": {"planned_bytes": 360 << 20, "measured_bytes": (340 << 20) + 20},
    }
    assert summary["traced_steps"] is None


def test_steps_of_earlier_builds_are_reported_without_what_they_lack(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = _write_run(tmp_path / "run", 20)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:-1]]
    for row in rows[8:12]:
        del row["exposed_s"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = summarize(read_run(run))
    assert summary["step_time_s"] == {} and summary["update_overlap"] is None
    assert write_picture(read_run(run)).read_bytes().startswith(b"\x89PNG")


def test_the_trace_s_steps_are_added_up(tmp_path: Path) -> None:
    run = _write_run(tmp_path / "run", 20)
    step = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "other_s": 0.5,
        "step_s": 4.0,
        "exposed_s": {"params": 0.2, "update": 0.3},
    }
    step |= {"transfer_s": 0.0, "transfer_overlap": None}
    steps = [
        {"step": 3, **step, "update_s": 1.0, "update_overlap": 1.0},
        {"step": 4, **step, "update_s": 3.0, "update_overlap": 0.5},
    ]
    (run / "trace.rank0.json").write_text(json.dumps({"steps": steps}))
    traced = summarize(read_run(run))["traced_steps"]
    assert (traced["first"], traced["last"], traced["step_s"], traced["waited_s"]) == (3, 4, 4.0, 0.5)
    assert (traced["update_s"], traced["update_overlap"]) == (2.0, 0.625)
    assert (traced["transfer_s"], traced["transfer_overlap"]) == (0.0, 0.0)


def test_a_run_without_a_step_is_refused(tmp_path: Path) -> None:
    run = _write_run(tmp_path / "run", 0)
    with pytest.raises(ConfigError, match="no finished step"):
        summarize(read_run(run))


def test_missing_matplotlib_names_the_line_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _write_run(tmp_path / "run", 3)
    for name in ("matplotlib", "matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CapacityError, match="pip install matplotlib"):
        write_picture(read_run(run))
