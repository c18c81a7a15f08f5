"""`zero-offload report` as a user types it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_offload as zo
from zero_offload.base.errors import ConfigError
from zero_offload.cli.main import main
from zero_offload.runs.report import watch


def _report(*arguments: object) -> subprocess.CompletedProcess[str]:
    """In this process, which spares the start of an interpreter."""
    out, err = io.StringIO(), io.StringIO()
    command = ["report", *map(str, arguments)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command)
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


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
    command = [sys.executable, "-m", "zero_offload", "report", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["steps"] == 4 and summary["waited_share"] == pytest.approx(0.2)
    assert summary["planned_rss_bytes"] == 1007  # a GPU's memory is not this process's
    assert Path(summary["report"]).read_bytes().startswith(b"\x89PNG")
    assert Path(summary["page"]) == run_dir / "report.html" and "<!doctype html>" in Path(summary["page"]).read_text()


def test_text_has_one_figure_per_line(run_dir: Path) -> None:
    done = _report(run_dir)
    assert done.returncode == 0, done.stderr
    head, *tables = done.stdout.split("\n\n")
    figures = dict(re.split(" {2,}", line) for line in head.splitlines())
    assert figures["steps"] == "4" and figures["seconds per step, median"] == "0.5"
    moved, memory = tables  # an earlier build's run does not say where its steps went
    assert moved.splitlines()[1].split() == ["nvme", "1", "MiB", "1", "MiB"]
    assert [line.split() for line in memory.splitlines()[1:4]] == [
        ["device", "5", "B", "0", "B", "0.00"],
        ["cpu", "7", "B", "0", "B", "0.00"],
        ["nvme", "9", "B", "1", "MiB", "116508.44"],
    ]


def test_text_says_where_the_step_went(run_dir: Path) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    exposed = {"params": 0.04, "activations": 0.0, "update": 0.02, "grads": 0.0, "commit": 0.0}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row | {"exposed_s": exposed}) + "\n" for row in lines))
    step = {"forward_s": 0.1, "backward_s": 0.2, "other_s": 0.05, "step_s": 0.5, "exposed_s": {"params": 0.15}}
    step |= {"update_s": 0.1, "update_overlap": 0.9, "transfer_s": 0.3, "transfer_overlap": None}
    (run_dir / "trace.json").write_text(json.dumps({"steps": [{"step": 3} | step, {"step": 4} | step]}))
    done = _report(run_dir)
    assert done.returncode == 0, done.stderr
    _, where, traced, *_ = done.stdout.split("\n\n")
    assert [line.split()[-2:] for line in where.splitlines()[1:5]] == [
        ["0.44", "88.0%"],
        ["0.04", "8.0%"],
        ["0.02", "4.0%"],
        ["0.5", "100.0%"],
    ]
    assert where.splitlines()[5] == "80.0% of the update ran beside compute, which did not wait for it"
    assert traced.startswith("steps 3 to 4, traced")
    assert [line.split() for line in traced.splitlines()[1:6]] == [
        ["forward", "0.1", "20.0%"],
        ["backward", "0.2", "40.0%"],
        ["waited", "0.15", "30.0%"],
        ["other", "0.05", "10.0%"],
        ["step", "0.5", "100.0%"],
    ]
    assert "0.1 s per step, 90.0% lay beside compute" in traced and "0.3 s per step, 0.0% lay beside" in traced


def test_the_directory_of_its_states_is_no_run_directory(run_dir: Path) -> None:
    zo.close(zo.offload(nn.Linear(2, 2), zo.OffloadConfig(nvme=run_dir / "nvme", optimizer="nvme")))
    assert (run_dir / "nvme" / "run.json").is_file()
    done = _report(run_dir / "nvme")
    assert done.returncode == 2
    assert f"{run_dir / 'nvme'} holds the states of a run, and neither" in done.stderr
    assert done.stderr.strip().endswith(f"name {run_dir}")
    (run_dir / "metrics.jsonl").unlink()
    assert "name the run directory that `train` or `finetune` wrote" in _report(run_dir / "nvme").stderr


def test_what_is_no_run_directory_is_said_so(tmp_path: Path) -> None:
    done = _report(tmp_path)
    assert done.returncode == 2
    assert "run.json" in done.stderr and "Traceback" not in done.stderr


def test_figures_are_printed_where_no_picture_can_be(run_dir: Path) -> None:
    (run_dir / "report.png.tmp").mkdir()
    done = _report(run_dir)
    assert done.returncode == 4 and "cannot write" in done.stderr and "report.png" in done.stderr
    assert "seconds per step, median          0.5\n" in done.stdout and "bytes per step" in done.stdout
    assert "waited, of the run's time         20.0%\n" in done.stdout and "None" not in done.stdout
    done = _report(run_dir, "--json")
    assert done.returncode == 4 and json.loads(done.stdout)["report"] is None
    assert (run_dir / "report.html").is_file()
    (run_dir / "report.html.tmp").mkdir()
    done = _report(run_dir, "--json")
    assert done.returncode == 4 and "report.html" in done.stderr and json.loads(done.stdout)["page"] is None


def test_without_matplotlib_there_is_the_page(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    done = _report(run_dir, "--json")
    assert done.returncode == 0 and "note: report.png needs matplotlib" in done.stderr
    summary = json.loads(done.stdout)
    assert summary["report"] is None and Path(summary["page"]).is_file()


def test_a_run_of_one_s_own_loop(tmp_path: Path) -> None:
    model = zo.offload(nn.Linear(2, 2), zo.OffloadConfig(params="cpu"))
    optimizer = zo.SGD(model.parameters(), lr=0.1)
    with zo.RunLog(tmp_path / "run", model, settings={"batch": 2}) as log:
        for step in (1, 2, 3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            log.step(step, **({"loss": 1.0} if step == 1 else {}))
    zo.close(model)
    done = _report(tmp_path / "run", "--json", "--watch")  # has ended: no server stays
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["loss"], summary["tokens_per_s"], summary["planned_rss_bytes"]) == (
        3,
        1,
        None,
        None,
    )
    done = _report(tmp_path / "run")
    assert done.returncode == 0 and "process" in done.stdout


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--tbw", "0"], "--tbw 0"), (["--port", "0", "--watch"], "--port 0"), (["--port", "99999", "--watch"], "65535")],
)
def test_bad_flags(flags: list[str], says: str, run_dir: Path) -> None:
    done = _report(run_dir, *flags)
    assert done.returncode == 2 and says in done.stderr


def test_waits_are_compared_with_the_time_that_they_are_in(run_dir: Path) -> None:
    """Validation reads parameters too, between one step() and the next."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    exposed = {"params": 0.9, "activations": 0.0, "update": 0.0, "grads": 0.0, "commit": 0.0}
    rows = [row | {"exposed_s": exposed, "stall_s": 0.9, "whole_s": 2.0} for row in lines]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = json.loads(_report(run_dir, "--json").stdout)
    assert summary["step_s"] == 0.5 and summary["waited_share"] == pytest.approx(0.45)
    assert summary["step_time_s"]["compute"] == pytest.approx(1.1)


WRONG = ["ten", [], None, {}, 10**400, True]


@pytest.mark.parametrize(
    "name",
    [
        "loss",
        "step_s",
        "update_s",
        "read_bytes",
        "peak_rss_bytes",
        "val_loss",
        "exposed_s",
        "at",
        "skipped_steps",
        "lr",
    ],
)
def test_rows_of_wrong_types_are_left_out_and_named(
    name: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    lines = [
        row | {"step": 10 + i, name: value} for i, value in enumerate(WRONG) if (name, value) != ("read_bytes", {})
    ]
    lines += [{key: value for key, value in row.items() if key != name} | {"step": 30}, row | {"step": 31}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(run_dir), "--json"]) == 0
    done = capsys.readouterr()
    assert f'metrics.jsonl line 1 is damaged, its {name} is "ten"' in done.err
    assert json.loads(done.out)["steps"] == 31


@pytest.mark.parametrize(
    "name", ["identity", "plan", "device", "unigram_nats", "num_parameters", "baseline_rss_bytes", "starts"]
)
def test_a_description_of_wrong_types(name: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.loads((run_dir / "run.json").read_text())
    for value in (["ten"], None, {"a": []}, True):
        (run_dir / "run.json").write_text(json.dumps(whole | {name: value}))
        assert main(["report", str(run_dir)]) == 2
        assert "run.json is not what the run wrote" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"steps": 3}', '{"steps": [{}]}', '{"steps": [1]}', "[]", "{", ""])
def test_a_trace_that_is_none(text: str, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "trace.json").write_text(text)
    assert main(["report", str(run_dir)]) == 2
    assert "trace.json is not what" in capsys.readouterr().err


def test_a_run_that_is_discarded_while_it_is_watched(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is empty for a moment, then another run begins there; and in the end it is gone."""
    monkeypatch.setattr(watch, "EVERY_S", 0.01)
    monkeypatch.setattr(watch, "GONE_S", 0.1)
    found = replace(watch.read_run(run_dir), is_running=True)
    first, other = (replace(found, description=found.description | {"starts": [{"began_at": at}]}) for at in (1, 2))
    told: list[str] = []

    def reading(*answers: object) -> None:
        left = list(answers)

        def read(path: Path) -> object:
            answer = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(watch, "read_run", read)

    gone, empty = ConfigError("there is no run"), replace(other, rows=[])
    reading(first, first, gone, empty, other, replace(other, is_running=False))
    watch.watch(run_dir, 600, None, told.append)
    assert "begins anew" in told[1] and "another run has taken the place" in told[2] and len(told) == 3
    reading(first, gone)
    with pytest.raises(ConfigError, match="was deleted or discarded while it was watched: there is no run"):
        watch.watch(run_dir, 600, None, told.append)
