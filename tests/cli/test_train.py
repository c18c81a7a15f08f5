"""`zero-offload train` as a user types it, on a model of a million parameters.

Runs that are killed, share a directory or have two ranks are processes of their own. The others call `main`, which
spares the start of an interpreter each time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers.activations import make_small
from tests.helpers.launched import run_program
from zero_offload.cli.main import main
from zero_offload.finetune.pretrain import train as recipe
from zero_offload.finetune.pretrain.settings import TrainConfig

pytestmark = pytest.mark.usefixtures("quick_endings")
STEPS = 14
SIZES = ["--model", "tiny", "--seq", "32", "--batch", "2", "--steps", str(STEPS), "--eval-every", "7"]
DEADLINE_S = 600

Capture = pytest.CaptureFixture[str]


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # as in the processes below: their losses are compared


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def _here(capsys: Capture, *arguments: object) -> Done:
    capsys.readouterr()
    code = main(["train", *map(str, arguments)])
    return Done(code, *capsys.readouterr())


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "zero_offload", "train", *map(str, arguments)]


def _start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        _command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment()
    )


def _wait_for_step(out: Path, step: int, child: subprocess.Popen[str]) -> None:
    deadline, metrics, goes_on = time.monotonic() + DEADLINE_S, out / "metrics.jsonl", True
    while goes_on:
        goes_on = time.monotonic() < deadline and child.poll() is None  # before the look: it may come late
        if metrics.exists() and metrics.read_text().count("\n") >= step:
            return
        time.sleep(0.005)
    child.kill()
    raise AssertionError(f"the run ended or hung before step {step}: {child.communicate()[0]}")


def _rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _losses(out: Path) -> list[tuple[int, float, float | None]]:
    return [(row["step"], row["loss"], row.get("val_loss")) for row in _rows(out)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{number} and {number * 7 % 91} are numbers.\n" for number in range(3000)))
    return path


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, dict[str, Any]]:
    """An uninterrupted run and what it printed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    arguments = [*SIZES, "--data", text, "--out", out, "--json"]
    return out, json.loads(run_program("zero_offload", "train", *arguments, folder=out.parent))


def test_a_run_leaves_metrics_report_and_sample(whole_run: tuple[Path, dict[str, Any]]) -> None:
    out, result = whole_run
    rows = _rows(out)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["val_loss"] == result["validation_loss"]
    assert result["ending"] == "finished" and result["step"] == STEPS
    assert 0 < result["unigram_nats"] < 5.6
    assert rows[-1]["read_bytes"]["nvme"] > 0 and rows[-1]["written_bytes"]["nvme"] > 0
    assert rows[-1]["peak_rss_bytes"] > 0
    listed = set(json.loads((out / "files.json").read_text())["files"])
    assert {path.name for path in out.iterdir() if path.is_file()} <= listed
    assert {"metrics.jsonl", "run.json", "sample.txt"} <= listed
    assert Path(result["report"]).read_bytes().startswith(b"\x89PNG")
    assert Path(result["page"]).read_text().startswith("<!doctype html>")


def test_the_same_command_after_the_end_trains_no_further(
    whole_run: tuple[Path, dict[str, Any]], text: Path, capsys: Capture
) -> None:
    out, result = whole_run
    before = (out / "metrics.jsonl").read_bytes()
    again = _here(capsys, *SIZES, "--data", text, "--out", out, "--json")
    assert again.code == 0, again.err
    assert f"resuming from step {STEPS}" in again.err
    assert (out / "metrics.jsonl").read_bytes() == before
    assert json.loads(again.out)["validation_loss"] == result["validation_loss"]


def test_kill_and_the_same_command_give_the_losses_of_an_uninterrupted_run(
    whole_run: tuple[Path, dict[str, Any]], text: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "run"
    arguments = [*SIZES, "--data", text, "--out", out]
    child = _start(*arguments)
    _wait_for_step(out, 5, child)
    child.kill()
    child.communicate()
    was_interrupted = len(_rows(out)) < STEPS  # it may be over before it is killed
    done = _here(capsys, *arguments)
    assert done.code == 0, done.err
    assert "resuming from step" in done.out and "committed" in done.out
    assert _losses(out) == _losses(whole_run[0])
    assert sum(1 for row in _rows(out) if row.get("resumed")) == was_interrupted


def test_ctrl_c_commits_and_the_same_command_continues(
    whole_run: tuple[Path, dict[str, Any]], text: Path, tmp_path: Path, capsys: Capture
) -> None:
    for number in range(20):
        out = tmp_path / f"run{number}"
        arguments = [*SIZES, "--data", text, "--out", out, "--commit-every", 100]  # but the last step always is one
        child = _start(*arguments)
        _wait_for_step(out, 2, child)
        child.send_signal(signal.SIGINT)
        output, _ = child.communicate(timeout=DEADLINE_S)
        if len(_rows(out)) < STEPS:
            break  # else it may have been over before it was struck
    assert child.returncode == 130, output
    assert "the same command continues" in output
    stopped_at = _rows(out)[-1]["step"]
    done = _here(capsys, *arguments)
    assert f"resuming from step {stopped_at} " in done.out
    assert _losses(out) == _losses(whole_run[0])


def test_a_run_whose_drive_is_lost_goes_on_from_what_it_published(
    whole_run: tuple[Path, dict[str, Any]], text: Path, tmp_path: Path, capsys: Capture
) -> None:
    out, place = tmp_path / "run", tmp_path / "shared"
    published = ["--publish", place, "--publish-every", 1, "--publish-keep", 1, "--commit-every", 1]
    arguments = [*SIZES, "--data", text, "--out", out, *published]
    done = _here(capsys, *arguments)
    assert done.code == 0, done.err
    (name,) = (each.name for each in place.iterdir())
    assert f"-step-{STEPS}-" in name
    shutil.rmtree(out / "nvme")
    more = _here(capsys, *arguments, "--steps", STEPS + 2)
    assert more.code == 0, more.err
    assert f"resuming from step {STEPS} " in more.out and len(_rows(out)) == STEPS + 2
    assert _losses(out)[:STEPS] == _losses(whole_run[0])
    shutil.rmtree(out / "nvme")
    shutil.rmtree(place)
    lost = _here(capsys, *arguments)
    assert lost.code == 5 and "as are its states" in lost.err


def test_tiers_do_not_change_the_numbers(
    whole_run: tuple[Path, dict[str, Any]], text: Path, tmp_path: Path, capsys: Capture
) -> None:
    places = ["--params-tier", "cpu", "--optimizer-tier", "cpu", "--commit-every", 5]
    done = _here(capsys, *SIZES, "--data", text, "--out", tmp_path / "run", *places)
    assert done.code == 0, done.err
    assert _losses(tmp_path / "run") == _losses(whole_run[0])


@pytest.mark.full
def test_fp16_scales_its_loss_and_resumes_with_the_scale(text: Path, tmp_path: Path, capsys: Capture) -> None:
    runs = {"whole": tmp_path / "whole", "killed": tmp_path / "killed"}
    for name, out in runs.items():
        arguments = [*SIZES, "--data", text, "--out", out, "--precision", "fp16"]
        if name == "killed":
            child = _start(*arguments)
            _wait_for_step(out, 5, child)
            child.kill()
            child.communicate()
        done = _here(capsys, *arguments)
        assert done.code == 0, done.err
        assert ("resuming from step" in done.out) == (name == "killed")
    rows = _rows(runs["whole"])
    assert rows[-1]["loss"] < rows[0]["loss"] and {row["loss_scale"] for row in rows} <= {2.0**n for n in range(8, 17)}
    assert _losses(runs["killed"]) == _losses(runs["whole"])
    assert [row["loss_scale"] for row in _rows(runs["killed"])] == [row["loss_scale"] for row in rows]


def test_other_settings_in_the_same_place_are_refused_until_discarded(
    text: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "run"
    short = ["--model", "tiny", "--seq", 16, "--batch", 1, "--data", text, "--out", out, "--steps", 2]
    assert _here(capsys, *short).code == 0
    before = (out / "metrics.jsonl").read_bytes()
    refused = _here(capsys, *short, "--seed", 3)
    assert refused.code == 2
    assert "seed=0, this one has seed=3" in refused.err and "--discard" in refused.err
    assert (out / "metrics.jsonl").read_bytes() == before
    (out / "run.json").write_text("{")
    damaged = _here(capsys, *short, "--seed", 3)
    assert damaged.code == 2 and "start over with --discard" in damaged.err
    discarded = _here(capsys, *short, "--seed", 3, "--discard")
    assert discarded.code == 0, discarded.err
    assert [row["step"] for row in _rows(out)] == [1, 2] and (out / "metrics.jsonl").read_bytes() != before


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 7), (1, 1), (3, 9), (9, 9), (20, 9)])
def test_the_schedule_is_said_as_it_is(warmup: int, steps: int) -> None:
    def said(steps: int, **settings: Any) -> str:
        job: Any = SimpleNamespace(config=TrainConfig(warmup=warmup, steps=steps, **settings), tokens_per_step=8)
        return recipe._schedule_text(job)

    rates = [1e-3 * recipe._lr_factor(step, warmup, steps) for step in range(steps)]
    assert min(rates) > 0
    highest = f"{max(rates):g} at step {rates.index(max(rates)) + 1}, {rates[-1]:g} at the last"
    assert f"learning rate {rates[0]:g} at step 1, {highest}" in said(steps, lr=1e-3)
    assert ("warning" in said(steps, lr=1e-3)) == (warmup > steps)
    assert "warning: --lr 2 is far too high for AdamW" in said(steps, lr=2.0)
    assert "warning: --lr 1e-12 is far too low for AdamW" in said(steps, lr=1e-12)
    assert "1,000,000,000,000 steps" in said(10**12)  # no list of all rates


@pytest.mark.parametrize("flags", [[], ["--cpu-memory", "96MiB"]], ids=["all", "budget"])
def test_the_plan_has_the_rows_of_the_run(flags: list[str], text: Path, tmp_path: Path, capsys: Capture) -> None:
    same = [*flags, "--optimizer-tier", "cpu", "--states", "compact", "--commit-every", 1, "--nvme", tmp_path / "nvme"]
    sizes = ["--batch", 2, "--seq", 16, "--steps", 1, "--params-tier", "cpu", "--grads-tier", "cpu"]
    planned = ["--model", "tiny", *same, "--tokens", 32, "--sequence", 16, "--json"]
    assert main(["plan", *map(str, planned)]) == 0
    plan = json.loads(capsys.readouterr().out)["planned"]
    out = tmp_path / "out"
    done = _here(capsys, "--model", "tiny", *same, *sizes, "--data", text, "--out", out)
    assert done.code == 0, done.err
    found = json.loads((out / "run.json").read_text())["planned"]
    assert list(plan["rows"]) == list(found["rows"])
    for each in (plan, found):
        beside = each["rows"].pop("program")["memory"]
        assert not flags or each["available"]["memory"] > 96 * 2**20 + beside
    assert plan["rows"] == found["rows"]
    assert _rows(out)[-1]["planned_bytes"] == found["total"]


def test_a_run_goes_on_with_its_text_and_model_wherever_they_lie(text: Path, tmp_path: Path, capsys: Capture) -> None:
    def words(out: Path, data: Path, steps: int) -> list[Any]:
        return ["--model", "tiny", "--seq", 16, "--batch", 1, "--data", data, "--out", out, "--steps", steps]

    mine = tmp_path / "mine.txt"
    mine.write_bytes(text.read_bytes())
    begun = _here(capsys, *words(tmp_path / "begun", mine, 1))
    assert begun.code == 0
    assert "1 step of 16 tokens; learning rate 0.00015 at step 1" in begun.out
    assert "warning: warm-up takes 20 steps, more than the run has: give --warmup 0, or more --steps" in begun.out
    out, renamed = (tmp_path / "begun").rename(tmp_path / "moved"), mine.rename(tmp_path / "renamed.txt")
    gone_on = _here(capsys, *words(out, renamed, 2))
    assert gone_on.code == 0 and "resuming from step 1" in gone_on.out, gone_on.err
    content = renamed.read_bytes()
    renamed.write_bytes(content[1:] + content[:1])  # as many of each byte
    refused = _here(capsys, *words(out, renamed, 3))
    assert refused.code == 2 and "holds a run with content=" in refused.err
    renamed.write_bytes(content)
    described = json.loads((out / "run.json").read_text())
    described["gpt"]["num_heads"] = 2
    (out / "run.json").write_text(json.dumps(described))
    refused = _here(capsys, *words(out, renamed, 3))
    assert refused.code == 2 and "of a model with num_heads=2, which this version makes with num_heads=4" in refused.err
    del described["gpt"], described["identity"]["content"]  # as runs of before
    (out / "run.json").write_text(json.dumps(described))
    assert _here(capsys, *words(out, renamed, 3)).code == 0


def test_a_run_goes_on_to_another_last_step(text: Path, tmp_path: Path, capsys: Capture) -> None:
    """Along the curve of a run that was to end there from the start."""
    short = ["--model", "tiny", "--seq", 16, "--batch", 1, "--data", text, "--warmup", 1]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert _here(capsys, *short, "--out", whole, "--steps", 5).code == 0
    assert _here(capsys, *short, "--out", run, "--steps", 3).code == 0
    longer = _here(capsys, *short, "--out", run, "--steps", 5)
    assert longer.code == 0 and "was to end at step 3 and now ends at 5" in longer.out
    assert [row["lr"] for row in _rows(run)][3:] == [row["lr"] for row in _rows(whole)][3:]
    assert [row["step"] for row in _rows(run)] == [1, 2, 3, 4, 5]
    before = [(run / name).read_bytes() for name in ("metrics.jsonl", "run.json")]
    shorter = _here(capsys, *short, "--out", run, "--steps", 4)
    assert shorter.code == 2 and "at step 5 already, beyond --steps 4" in shorter.err
    assert [(run / name).read_bytes() for name in ("metrics.jsonl", "run.json")] == before


def test_toml_with_a_flag_on_top(text: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    file = tmp_path / "run.toml"
    file.write_text(
        f'[train]\nmodel = "tiny"\ndata = "{text}"\nout = "{out}"\n'
        "seq = 16\nbatch = 1\naccumulate = 2\nsteps = 9\n"
        '[offload]\nparams = "cpu"\nprecision = "fp32"\n'
    )
    done = _here(capsys, file, "--steps", 2)
    assert done.code == 0, done.err
    identity = json.loads((out / "run.json").read_text())["identity"]
    assert identity["steps"] == 2 and identity["accumulate"] == 2
    assert identity["offload.params"] == "cpu" and identity["offload.optimizer"] == "nvme"


def test_going_back_a_generation_and_on_with_other_tiers(
    whole_run: tuple[Path, dict[str, Any]],
    text: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole_run[0], out)
    arguments = [*SIZES, "--data", text, "--out", out]
    run_file = out / "run.json"
    run_file.write_text(run_file.read_text().replace(str(whole_run[0]), str(out)))
    refused = _here(capsys, *arguments, "--generation", 3)
    assert refused.code == 2 and f"no generation 3; there is: generation {STEPS} (step {STEPS}," in refused.err
    places = ["--params-tier", "cpu", "--optimizer-tier", "cpu", "--commit-every", 7]
    with monkeypatch.context() as patches:
        asked = SimpleNamespace(agreed=True)
        patches.setattr(recipe, "requested_stop_of", lambda _: contextlib.nullcontext(asked))
        stopped = _here(capsys, *arguments, *places, "--generation", STEPS - 1)
    assert stopped.code == 130 and "the same command without --generation continues from there" in stopped.out
    done = _here(capsys, *arguments, *places, "--generation", STEPS - 1)
    assert done.code == 0, done.err
    assert f"resuming from step {STEPS - 1} (generation {STEPS - 1}, committed 20" in done.out
    assert f", in {out / 'nvme'})" in done.out
    assert _losses(out) == _losses(whole_run[0])
    assert _rows(out)[-1]["resumed"] is True


def test_a_generation_of_nothing(text: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = [*SIZES, "--data", text, "--out", tmp_path / "run", "--generation", 3]
    done = _here(capsys, *arguments)
    assert done.code == 2 and f"{tmp_path / 'run'} holds none" in done.err
    assert _here(capsys, *arguments, "--discard").code == 2
    assert not (tmp_path / "run").exists()


def test_what_a_young_model_writes_does_not_steer_the_terminal(text: Path, tmp_path: Path, capsys: Capture) -> None:
    sizes = ["--model", "tiny", "--seq", 16, "--batch", 1, "--steps", 1]
    done = _here(capsys, *sizes, "--data", text, "--out", tmp_path / "run", "--json")
    sample = json.loads(done.out)["sample"]
    assert "\ufffd" in sample  # after one step every byte is as likely as any other
    assert all(letter.isprintable() or letter in "\n\t" for letter in sample)


def test_a_trace_of_some_steps_that_is_no_part_of_what_the_run_is(text: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    arguments = [*SIZES, "--data", text, "--out", out, "--steps", 6]
    done = _here(capsys, *arguments, "--trace", 2)
    assert done.code == 0, done.err
    assert f"trace: {out / 'trace.json'}; open it in" in done.out
    trace = json.loads((out / "trace.json").read_text())
    assert [step["step"] for step in trace["steps"]] == [3, 4]
    assert "trace.json" in json.loads((out / "files.json").read_text())["files"]
    assert all(set(row["exposed_s"]) == {"params", "activations", "update", "grads", "commit"} for row in _rows(out))
    assert _here(capsys, *arguments).code == 0  # the same run
    assert (out / "trace.json").exists()
    # A run that ends before has a trace of the steps that it made.
    done = _here(capsys, *arguments, "--discard", "--trace", 100)
    assert [step["step"] for step in json.loads((out / "trace.json").read_text())["steps"]] == [3, 4, 5, 6]
    assert _here(capsys, *arguments, "--discard").code == 0
    assert not (out / "trace.json").exists()  # it showed another run


def test_a_trace_that_cannot_be_written_ends_no_run(text: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run" / "trace.json.tmp").mkdir(parents=True)
    arguments = ["--model", "tiny", "--seq", 16, "--batch", 1, "--steps", 4, "--data", text, "--out", tmp_path / "run"]
    done = _here(capsys, *arguments, "--trace", 1)
    assert done.code == 0 and "no trace: cannot write" in done.out
    assert len(_rows(tmp_path / "run")) == 4


def test_two_runs_cannot_share_a_directory(text: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = [*SIZES, "--data", text, "--out", tmp_path / "run", "--steps", 100000]
    child = _start(*arguments)
    try:
        _wait_for_step(tmp_path / "run", 1, child)
        second = _here(capsys, *arguments)
        assert second.code == 6
        assert f"is in use by process {child.pid}" in second.err
    finally:
        child.kill()
        child.communicate()


def test_two_ranks_train_the_same_model(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    sizes = ["--model", "tiny", "--seq", 16, "--batch", 1, "--steps", 3, "--data", text]
    (tmp_path / "run.toml").write_text("[train]\nsample_bytes = 16\n")
    arguments = ["train", tmp_path / "run.toml", *sizes, "--out", out, "--trace", 1]
    printed = run_program("zero_offload", *arguments, folder=tmp_path, num_ranks=2)
    assert [row["step"] for row in _rows(out)] == [1, 2, 3]
    assert printed.count("unigram entropy:") == 1  # only the first rank speaks
    assert sorted(path.name for path in out.glob("trace*")) == ["trace.rank0.json", "trace.rank1.json"]
    assert {path.name for path in out.iterdir() if path.is_file()} <= set(
        json.loads((out / "files.json").read_text())["files"]
    )


@pytest.mark.full
def test_one_rank_goes_on_with_the_run_of_two(text: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    sizes = ["--model", "tiny", "--seq", "16", "--batch", "1", "--steps", "500", "--data", str(text), "--out", str(out)]
    child = subprocess.Popen(
        [*launcher, "-m", "zero_offload", "train", *sizes], env=_environment(), text=True, stdout=subprocess.PIPE
    )
    _wait_for_step(out, 4, child)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=DEADLINE_S)
    last = _rows(out)[-1]["step"]
    done = _here(capsys, *sizes, "--stage", 1)
    assert done.code == 0, done.err
    assert f"resuming from step {last} " in done.out and "the run had 2 ranks and now has 1" in done.out
    assert [row["step"] for row in _rows(out)] == list(range(1, 501))


@pytest.mark.full
def test_recompute_and_activations_on_disk_change_no_loss(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch)
    losses, moved = [], []
    for name, flags in {
        "kept": [],
        "recomputed": ["--recompute", "block"],
        "stored": ["--activations-tier", "nvme"],
        "both": ["--recompute", "block", "--activations-tier", "nvme"],
    }.items():
        done = _here(capsys, *SIZES, "--out", tmp_path / name, *flags)
        assert done.code == 0, done.err
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows])
        moved.append(rows[-1]["activation_bytes"]["nvme"])
    assert losses == [losses[0]] * 4
    assert moved[0] == moved[1] == 0 < moved[3] < moved[2]


def test_micro_batches_by_unit_change_no_loss_and_read_less(text: Path, tmp_path: Path, capsys: Capture) -> None:
    """Blocks that are run again in backward are fetched once for all micro-batches."""
    rows = {}
    for recompute in ("none", "block"):
        arguments = [*SIZES[:-4], "--steps", 3, "--data", text, "--accumulate", 4, "--recompute", recompute]
        arguments += ["--precision", "fp32", "--seq", 16]
        arguments += [
            "--params-tier",
            "nvme",
            "--optimizer-tier",
            "cpu",
            "--device-memory",
            "8MiB",
            "--commit-every",
            100,
        ]
        place = tmp_path / recompute
        assert _here(capsys, *arguments, "--nvme", place / "nvme", "--out", place / "out").code == 0
        rows[recompute] = _rows(place / "out")
    figures = [[(row["loss"], row["grad_norm"]) for row in rows[each]] for each in rows]
    assert figures[0] == figures[1]
    read = {each: rows[each][-1]["read_bytes"]["nvme"] for each in rows}
    assert 0 < 2 * read["block"] < read["none"]


def test_states_rest_as_asked_and_belong_to_the_run(text: Path, tmp_path: Path, capsys: Capture) -> None:
    """The flag is a part of the precision that a run.toml may name."""
    settings = tmp_path / "run.toml"
    settings.write_text('[offload]\nprecision = {compute = "bf16", reduce = "bf16"}\n')
    arguments = [settings, "--data", text, "--out", tmp_path / "run", *SIZES, "--states", "compact"]
    assert _here(capsys, *arguments).code == 0
    assert json.loads((tmp_path / "run" / "nvme" / "generation-0.json").read_text())["payload"]["states"] == "compact"
    other = _here(capsys, *arguments[:-1], "bf16")
    assert other.code == 2 and "offload.precision" in other.err


def test_a_run_goes_on_with_another_learning_rate(text: Path, tmp_path: Path, capsys: Capture) -> None:
    short = ["--model", "tiny", "--seq", 16, "--batch", 1, "--data", text, "--warmup", 1, "--out", tmp_path / "run"]
    assert _here(capsys, *short, "--steps", 3, "--lr", 1e-2).code == 0
    goes_on = _here(capsys, *short, "--steps", 5, "--lr", 1e-3, "--clip", 0.5)
    assert goes_on.code == 0, goes_on.err
    assert "the run had lr=0.01 and now has 0.001" in goes_on.out
    assert "the run had clip=1 and now has 0.5" in goes_on.out
    rates = [row["lr"] for row in _rows(tmp_path / "run")]
    assert rates[0] == 1e-2 and all(rate <= 1e-3 for rate in rates[3:])


def test_a_flag_is_a_part_of_a_table(text: Path, tmp_path: Path, capsys: Capture) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "run"
    file.write_text('[offload]\nprecision = { compute = "bf16", states = "compact" }\n')
    short = ["--model", "tiny", "--seq", 16, "--batch", 1, "--steps", 1, "--data", text, "--out", out]
    assert _here(capsys, file, *short, "--precision", "fp32").code == 0
    precision = json.loads((out / "run.json").read_text())["identity"]["offload.precision"]
    assert (precision["compute"], precision["states"]) == ("fp32", "compact")


def test_a_file_behind_paths_is_not_lost(text: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run.toml").write_text("[train]\nsteps = 1\n")
    refused = _here(capsys, "--data", text, tmp_path / "run.toml")
    assert refused.code == 2 and "write it before the flags" in refused.err


@pytest.mark.parametrize(
    ("offload", "step", "words"),
    [
        ({}, 3, "it is committed, and the same command continues from there"),
        ({}, 0, "the same command begins with step 1"),
        ({"durability": "scratch"}, 3, "nothing is kept of it .* the same command begins anew"),
    ],
)
def test_what_is_said_of_a_run_that_was_stopped(offload: dict[str, Any], step: int, words: str) -> None:
    config = recipe.TrainConfig.from_tables({}, offload)
    assert re.search(words, recipe._what_goes_on(config, step))


def test_names_of_files_need_not_be_text(text: Path, tmp_path: Path, capsys: Capture) -> None:
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(text, os.path.join(os.fsencode(data), b"caf\xe9.py"))
    short = ["--model", "tiny", "--seq", 16, "--batch", 1, "--steps", 1, "--out", tmp_path / "run"]
    assert _here(capsys, *short, "--data", data).code == 0
