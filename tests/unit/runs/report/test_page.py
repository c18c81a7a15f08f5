"""The content of the page: the JSON that it draws, without a browser."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from zero_offload.runs.reader import Run, read_run
from zero_offload.runs.report import page as page_module
from zero_offload.runs.report.page import page_data, page_of, state_of, write_page

SCRIPT = Path(page_module.__file__).with_name("page.js")
GIB = 1 << 30
START = {"began_at": 1000.0, "step": 0}


def write_run(path: Path, rows: list[dict[str, Any]], **description: Any) -> Run:
    path.mkdir(exist_ok=True)
    tiers = {f"offload.{kind}": "cpu" for kind in ("params", "grads", "optimizer")}
    identity = {**tiers, "offload.nvme": [], **description.pop("identity", {})}
    whole = {
        "identity": identity,
        "name": "TinyLM",
        "num_parameters": 1000,
        "device": "cpu",
        "plan": {"device": GIB, "cpu": 2 * GIB, "nvme": 0},
        **description,
    }
    (path / "run.json").write_text(json.dumps(whole))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_run(path)


def row(step: int, **more: Any) -> dict[str, Any]:
    """As `zo.RunLog` writes it of a loop that says nothing of its own."""
    figures: dict[str, Any] = {"step": step, "at": 1000.0 + 2 * step, "step_s": 2.0, "whole_s": 2.0, "stall_s": 0.1}
    exposed = {"params": 0.1, "activations": 0.0, "update": 0.02, "grads": 0.0, "commit": 0.0}
    figures |= {"exposed_s": exposed, "update_s": 1.0, "commit_s": 0.0, "commit_wait_s": 0.0}
    nothing = {"device": 0, "cpu": 0, "nvme": 0}
    figures |= {"read_bytes": nothing, "written_bytes": nothing, "activation_bytes": nothing}
    figures |= {"resident_bytes": {"device": GIB, "cpu": GIB, "nvme": 0}, "peak_rss_bytes": 4 * GIB, "skipped_steps": 0}
    return figures | more


def values_of(column: Any) -> list[Any]:
    """As the script reads a column."""
    if isinstance(column, list):
        return column
    runs = column["runs"]
    return [value for value, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count)]


def panel(data: dict[str, Any], title: str) -> dict[str, Any]:
    (found,) = [each for each in data["panels"] if each["title"] == title]
    assert isinstance(found, dict)
    return found


def series(data: dict[str, Any], title: str) -> dict[str, list[Any]]:
    return {each["name"]: values_of(each["values"]) for each in panel(data, title)["series"]}


def data_in(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert isinstance(data, dict)
    return data


def test_the_page_has_each_figure_of_each_row(tmp_path: Path) -> None:
    rows = [
        row(step, loss=4 / step, lr=1e-3 * step, grad_norm=0.5, tokens_per_s=1000.0 + step) for step in range(1, 31)
    ]
    rows[9]["val_loss"], rows[19]["val_loss"], rows[29]["val_loss"] = 0.9, 0.5, 0.7
    run = write_run(tmp_path / "run", rows, identity={"steps": 40, "model": "tiny"})
    path = write_page(run)
    assert path == tmp_path / "run" / "report.html"
    data = data_in(path.read_text())
    assert data["steps"] == {"first": 1, "count": 30}
    loss = series(data, "loss")
    assert loss["training"] == [pytest.approx(4 / step, rel=1e-5) for step in range(1, 31)]
    assert [value for value in loss["validation"] if value is not None] == [0.9, 0.5, 0.7]
    assert panel(data, "loss")["marks"][0] | {"color": ""} == {
        "step": 20,
        "value": 0.5,
        "text": "best, 0.5 at step 20",
        "color": "",
    }
    assert series(data, "learning rate")["learning rate"][-1] == 0.03
    assert series(data, "gradient norm") == {"gradient norm": [0.5] * 30}
    assert series(data, "tokens per second")["tokens per second"] == [1000 + step for step in range(1, 31)]
    headline = {label: (value, about) for label, value, about in data["headline"]}
    assert headline["step"] == ("30", "of 40, stopped")
    assert headline["best validation loss"] == ("0.5", "at step 20; the last is 0.7")
    assert headline["waited"][0] == "6.0%" and "most of it waiting for parameters" in headline["waited"][1]
    where, settings = [table for table in data["tables"] if table["title"] in ("where the step went", "settings")]
    assert where["rows"][0] == ["", "s per step", "share"] and where["rows"][-2][0] == "step"
    assert len(where["rows"][-1]) == 1 and "of the update ran beside compute" in where["rows"][-1][0]
    assert ["steps", "40"] in settings["rows"] and ["offload.params", "cpu"] in settings["rows"]


def test_waits_are_shares_beside_a_compute_that_can_be_added(tmp_path: Path) -> None:
    data = page_data(write_run(tmp_path / "run", [row(step) for step in range(1, 5)]))
    waits = panel(data, "where the step's time went: waits")
    shares = series(data, "where the step's time went: waits")
    assert shares == {
        "waiting for parameters": [5] * 4,
        "waiting for the update": [1] * 4,
        "compute, and the rest": [94] * 4,
    }
    assert [each.get("hidden", False) for each in waits["series"]] == [False, False, True]
    calm = row(1, exposed_s=dict.fromkeys(row(1)["exposed_s"], 0.0))
    data = page_data(write_run(tmp_path / "run", [calm]))
    (compute,) = panel(data, "where the step's time went: waits")["series"]
    assert not compute["hidden"] and values_of(compute["values"]) == [100]


def test_memory_above_the_plan_has_a_name(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [row(1), row(2)], baseline_rss_bytes=GIB // 2)
    host = panel(page_data(run), "host memory")
    parts = series(page_data(run), "host memory")
    assert {name: values[0] / GIB for name, values in parts.items()} == {
        "process before the model": pytest.approx(0.5, rel=1e-3),
        "states and buffers": pytest.approx(2, rel=1e-3),
        "activations, autograd and the rest": pytest.approx(1.5, rel=1e-3),
    }
    assert host["levels"][0]["value"] == 3.5 * GIB and "512 MiB above the plan" in host["note"]


def test_of_a_gpu_its_memory_is_a_place_of_its_own(tmp_path: Path) -> None:
    rows = [row(1, peak_device_bytes=3 * GIB)]
    data = page_data(write_run(tmp_path / "run", rows, device="cuda", device_name="RTX 4090"))
    assert series(data, "GPU memory")["peak, with activations"] == [pytest.approx(3 * GIB, rel=1e-3)]
    assert panel(data, "GPU memory")["levels"][0]["value"] == GIB
    assert panel(data, "host memory")["levels"][0]["value"] == 2 * GIB


def test_what_a_run_lacks_has_no_panel(tmp_path: Path) -> None:
    data = page_data(write_run(tmp_path / "run", [row(1), row(2)]))
    assert [each["title"] for each in data["panels"]] == [
        "seconds per step",
        "where the step's time went: waits",
        "host memory",
    ]
    assert {label for label, *_ in data["headline"]} == {"step", "seconds per step", "waited", "peak memory"}


def test_further_figures_have_panels(tmp_path: Path) -> None:
    rows = [row(1, accuracy=0.5, **{"rewards/chosen": 1.0}), row(2, accuracy=0.6, **{"rewards/rejected": 2.0})]
    data = page_data(write_run(tmp_path / "run", rows))
    assert series(data, "accuracy") == {"accuracy": [0.5, 0.6]}
    assert series(data, "rewards") == {"rewards/chosen": [1, None], "rewards/rejected": [None, 2]}


def test_texts_are_listed(tmp_path: Path) -> None:
    data = page_data(write_run(tmp_path / "run", [row(1, samples=["a <b>"]), row(2), row(3, samples=["c", "d"])]))
    (texts,) = [table for table in data["tables"] if table["title"] == "samples"]
    assert texts["rows"] == [["step 3", "c"], ["step 3", "d"], ["step 1", "a <b>"]]


def test_drive_wear_is_counted_and_foretold(tmp_path: Path) -> None:
    written = {"nvme": 10**10}
    rows = [row(10 * step, steps=10, written_bytes=written, at=1000.0 + 20 * step) for step in range(1, 5)]
    nvme = {"offload.nvme": ["/a", "/b"]}
    run = write_run(tmp_path / "run", rows, identity=nvme)
    data = page_data(run, tbw=432)
    assert series(data, "written to drives, in all")["written"] == [1e11, 2e11, 3e11, 4e11]
    # Ten steps in 20 s: 432 TB a day, of which each drive gets a half.
    assert panel(data, "written to drives, in all")["note"] == (
        "400 GB written over 2 directories, 432 TB per day at this rate; each drive rated for 432 TB lasts 2 days"
    )


STARTS: list[tuple[list[dict[str, Any]], str, list[str]]] = [
    ([START], "ended abruptly", ["started", "ended abruptly after step 6, as by a kill"]),
    ([START | {"ended_at": 1012.0, "last_step": 6, "error": ""}], "finished", ["started", "ended after step 6"]),
    (
        [START | {"ended_at": 1012.0, "last_step": 6, "error": "KeyboardInterrupt"}],
        "stopped",
        ["started", "stopped by KeyboardInterrupt after step 6"],
    ),
    (
        [START, {"began_at": 1010.0, "step": 4, "ended_at": 1012.0, "last_step": 6, "error": ""}],
        "finished",
        [
            "started",
            "ended abruptly with commits up to step 4, as by a kill",
            "resumed from step 4",
            "ended after step 6",
        ],
    ),
]


@pytest.mark.parametrize(("starts", "state", "events"), STARTS)
def test_starts_and_ends(starts: list[dict[str, Any]], state: str, events: list[str], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [row(step) for step in range(1, 7)], starts=starts)
    data = page_data(run)
    assert state_of(run) == data["state"] == state
    assert [event["text"] for event in data["events"]] == events


def test_events_of_rows(tmp_path: Path) -> None:
    """A process counts the steps that it has skipped from 0 on."""
    rows = [row(step, skipped_steps=int(step >= 2), commit_s=float(step % 2)) for step in range(1, 5)]
    rows += [row(step, skipped_steps=2 * int(step >= 6), resumed=step == 5) for step in range(5, 8)]
    rows[3]["val_loss"] = 1.0
    data = page_data(write_run(tmp_path / "run", rows))
    assert [(event["kind"], event["step"]) for event in data["events"]] == [("skip", 2), ("resume", 5), ("skip", 6)]
    assert "(2 steps)" in data["events"][-1]["text"]
    lanes = {lane["name"]: lane for lane in data["lanes"]}
    assert values_of(lanes["commits"]["steps"]) == [1, 2]  # step 1, and 2 further
    assert values_of(lanes["evaluations"]["steps"]) == [4] and lanes["skipped steps"]["count"] == 2


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_nothing_of_the_run_becomes_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--<b onclick='x'>"
    rows = [row(1, **{evil: 1.0}, loss=1.0)]
    plain = page_of(page_data(write_run(tmp_path / "plain", [row(1, name=1.0, loss=1.0)])))
    run = write_run(tmp_path / evil.replace("/", "-"), rows, name=evil, versions={evil: evil}, identity={evil: evil})
    text = page_of(page_data(run))
    assert Tags(text).names == Tags(plain).names
    data = data_in(text)
    assert data["title"].startswith(evil) and panel(data, evil.rpartition("/")[0])["series"][0]["name"] == evil


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    text = page_of(page_data(write_run(tmp_path / "run", [row(1)])))
    assert Tags(text).links == ["data:,"]
    assert "default-src 'none'" in text and 'data-follow="0"' in text
    assert not re.search(r"https?://|@import|url\(", text)


def test_a_long_run_stays_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(step, loss=2 + math.sin(step), lr=1 / step, tokens_per_s=1e3 + step % 97) for step in range(1, 10_001)]
    rows[100]["val_loss"] = 1.5
    run = write_run(tmp_path / "run", rows)
    assert len(page_of(page_data(run)).encode()) < 500_000
    monkeypatch.setattr(page_module, "POINTS_MAX", 1000)
    data = page_data(run)
    training = series(data, "loss")["training"]
    assert len(training) == 1000 and data["steps"][-1] == 10_000 and data["per_point"] == 10
    assert training[0] == pytest.approx(sum(2 + math.sin(step) for step in range(1, 11)) / 10, rel=1e-5)
    assert [value for value in series(data, "loss")["validation"] if value is not None] == [1.5]


def test_numbers_that_are_none_are_gaps(tmp_path: Path) -> None:
    data = page_data(write_run(tmp_path / "run", [row(1, loss=None), row(2, loss=1.0), row(5, loss=2.0)]))
    assert series(data, "loss")["training"] == [None, 1, 2] and data["steps"] == [1, 2, 5]


def test_the_script_is_whole() -> None:
    """Brackets close in order; where Node.js is there, it reads the script."""
    source = SCRIPT.read_text(encoding="utf-8")
    bare = re.sub(r'//[^\n]*|"(?:[^"\\]|\\.)*"|`[^`]*`', "", source)
    opened = []
    for letter in bare:
        if letter in "([{":
            opened.append({"(": ")", "[": "]", "{": "}"}[letter])
        elif letter in ")]}":
            assert opened and opened.pop() == letter
    assert opened == [] and "innerHTML" not in source
    if node := shutil.which("node"):
        subprocess.run([node, "--check", str(SCRIPT)], check=True, timeout=60)
