"""A run says what it learns before its first step: rows, tokens, steps, rates. A run that learns nothing says so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import torch
from safetensors.torch import load_file, save_file
from transformers import get_cosine_schedule_with_warmup

import zero_offload as zo
from tests.helpers import folders
from zero_offload.cli.main import main
from zero_offload.finetune.data.counts import Counts
from zero_offload.finetune.learning import Learning
from zero_offload.finetune.settings import FinetuneConfig

pytestmark = pytest.mark.tools

COUNTS = Counts(40, 40, 40, 0, 0, 0, 0, 410, 200, 10, 10)


def learning(steps: int, *, shrinks: bool = True, counts: Counts = COUNTS, **settings: Any) -> Learning:
    given = {"model": "m", "data": ["d"], "method": "sft", "seq": 64, "lr": 1e-3, "steps": steps}
    config = FinetuneConfig.from_tables(given | settings, {})
    return Learning(config, counts, 40, False, steps, 1.0, 0, config.warmup_steps(steps, shrinks=shrinks))


def of_transformers(steps: int, warmup: float, lr: float = 1e-3) -> list[float]:
    """The rates that Trainer sets: it counts the steps of a share by rounding up."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    number = int(warmup) if warmup >= 1 else math.ceil(steps * warmup)
    schedule = get_cosine_schedule_with_warmup(optimizer, number, steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("steps", [*range(1, 36), 100, 450])
def test_rates(steps: int) -> None:
    """From 34 steps on those of Trainer's 3%; below, no step is without one."""
    found = learning(steps)
    rates = [found.rate(step) for step in range(1, steps + 1)]
    assert rates == of_transformers(steps, 0.03 if steps >= 34 else 0)
    assert min(rates) > 0 or steps >= 34
    assert rates.index(max(rates)) + 1 == found.highest_at
    began_before = learning(steps, shrinks=False)
    assert [began_before.rate(step) for step in range(1, steps + 1)] == of_transformers(steps, 0.03)


@pytest.mark.parametrize(("warmup", "steps"), [(3, 8), (8, 8), (20, 8), (0.5, 9), (0.1, 10), (0, 7), (1, 5)])
def test_a_warm_up_that_was_asked_for_is_kept(warmup: float, steps: int) -> None:
    found = learning(steps, warmup=warmup)
    assert [found.rate(step) for step in range(1, steps + 1)] == of_transformers(steps, warmup)


def test_what_trains_little_is_said_with_what_to_type() -> None:
    def said(steps: int, **settings: Any) -> str:
        return "\n".join(learning(steps, **settings).lines())

    assert "no warm-up: 3% of 8 steps is less than one, and would train nothing in step 1; --warmup STEPS" in said(8)
    assert "learning rate 0.001 at step 1, then down to 0 by a cosine" in said(8)
    assert "learning rate 0.001 at step 1\n" in said(1) and "--warmup" not in said(1)
    assert "warm-up" not in said(34) and "learning rate 0 at step 1, up to 0.001 at step 3" in said(34)
    assert "takes 10 steps, as many as the run has: the rate reaches 0.0007 of 0.001" in said(8, warmup=10)
    assert "step 1 of 8 has rate 0 and trains nothing, as warm-up begins there; --warmup 0" in said(8, warmup=3)
    cut = Counts(40, 30, 30, 20, 0, 0, 10, 400, 200, 10, 10, cut=100)
    lines = said(8, counts=cut)
    unseen = "20 cut off at --seq 64 and 10 left out, with 100 tokens that no step sees"
    assert f"trains 200 of 500 tokens read in an epoch, of 40 rows; {unseen}" in lines
    assert "warning: most samples are cut off; give a larger --seq" in lines
    assert "nothing is cut off" in said(8)
    assert "trains 200 labels of 410 tokens read in an epoch" in said(8, method="classify")
    assert "masks some of 200 of 410 tokens read in an epoch" in said(8, method="mlm")
    assert "warning: --lr 2 is far too high for AdamW" in said(8, lr=2.0) and "usual is --lr 1e-05" in said(8, lr=2.0)
    assert "warning: --lr 1e-10 is far too low for AdamW" in said(8, lr=1e-10, lora=4)
    assert "usual is --lr 0.0002" in said(8, lr=1e-10, lora=4)
    assert not any("--lr" in said(40, lr=rate) for rate in (1e-9, 1e-5, 0.05))
    learning(1).check()
    learning(2, warmup=1).check()
    with pytest.raises(zo.ConfigError, match="1 step, and --warmup 1 begins there with learning rate 0.* --warmup 0"):
        learning(1, warmup=1).check()


@pytest.mark.parametrize(
    ("rows", "batch", "accumulate", "ranks", "steps", "epochs", "repeated"),
    [
        (30, 2, 4, 1, 2, 8 / 15, 0),  # of four steps in an epoch the last has 3 micro-batches
        (30, 2, 4, 1, 4, 1, 0),
        (30, 2, 4, 1, 10, 2 + 8 / 15, 0),
        (1, 8, 4, 1, 3, 3, 0),
        (9, 4, 1, 2, 3, 1.5, 7),
        (13, 8, 1, 2, 2, 2, 3),
        (16, 4, 2, 2, 1, 1, 0),
    ],
)
def test_epochs_and_rows_are_those_that_trainer_comes_to(
    rows: int, batch: int, accumulate: int, ranks: int, steps: int, epochs: float, repeated: int
) -> None:
    given = {"model": "m", "data": ["d"], "batch": batch, "accumulate": accumulate}
    config = FinetuneConfig.from_tables(given, {})
    assert config.epochs_of(steps, rows, ranks) == pytest.approx(epochs)
    assert config.repeated_rows(rows, ranks) == repeated


# Runs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write_folder(tmp_path_factory.mktemp("learning") / "model")


def run(model: Path, data: Path, out: Path, *flags: object, code: int = 0) -> list[dict[str, Any]]:
    given = ("finetune", model, "--data", data, "--out", out, "--commit-every", 1, "--precision", "fp32", *flags)
    tools.reset_accelerate()
    assert main([*map(str, given)]) == code
    file = out / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_few_chats_train_with_all_defaults(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = folders.write_instructions(tmp_path / "chat.jsonl", 12)
    rows = run(model, data, tmp_path / "out")
    assert [row["lr"] for row in rows] == [1e-5]
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "out"))
    assert not any(torch.equal(before[name], after[name]) for name in before if name.endswith("proj.weight"))
    assert "warning" not in capsys.readouterr().out


def test_the_plan_of_learning_stands_beside_that_of_memory(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = folders.write_instructions(tmp_path / "chat.jsonl", 20)
    flags = ("--seq", "48", "--batch", "2", "--accumulate", "1", "--epochs", "2", "--no-packing")
    run(model, data, tmp_path / "out", *flags, "--dry-run")
    text = capsys.readouterr().out
    run(model, data, tmp_path / "out", *flags, "--dry-run", "--json")
    found = json.loads(capsys.readouterr().out)["learning"]
    assert main(["plan", str(model), "--data", str(data), *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["learning"] == found
    assert main(["plan", str(model), "--data", str(data), *flags]) == 0
    planned = capsys.readouterr().out
    rows = run(model, data, tmp_path / "out", *flags, "--json")
    assert json.loads(capsys.readouterr().out)["learning"] == found
    assert len(rows) == found["steps"]
    assert [rows[0]["lr"], rows[-1]["lr"]] == [found["first_rate"], found["last_rate"]]
    assert max(row["lr"] for row in rows) == found["highest_rate"] == rows[found["highest_rate_at"] - 1]["lr"]
    assert found["rows_read"] == 20 and found["samples_cut"] > 0 and found["epochs"] == 2
    # Every row is one sample, of which a Trainer sees what is not cut.
    assert sum(row["tokens"] for row in rows) == 2 * (found["tokens_read"] - found["tokens_cut"])
    for said in (text, planned):
        for word in (f"trains {found['tokens_trained']:,} of {found['tokens_read']:,} tokens", "cut off at --seq 48"):
            assert word in said


def test_packed_rows_and_parts_of_an_epoch(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Padding of packed rows does not count as tokens of a step, and the last step of an epoch may be a short one."""
    data, out = folders.write_instructions(tmp_path / "chat.jsonl", 20), tmp_path / "out"
    flags = ("--batch", "2", "--accumulate", "2")
    whole = run(model, data, out, *flags, "--json")
    found = json.loads(capsys.readouterr().out)["learning"]
    assert found["rows"] < found["samples"] and found["rows"] % 4 != 0
    assert sum(row["tokens"] for row in whole) == found["tokens_read"] - found["tokens_cut"]
    rows = run(model, data, out, *flags, "--epochs", "1.3", "--lr", 2, "--json")
    told = capsys.readouterr()
    assert "warning: --lr 2 is far too high" in told.err  # a run that goes on says it too
    found = json.loads(told.out)["learning"]
    assert len(rows) == found["steps"] == len(whole) + 1
    assert rows[-1]["epoch"] == pytest.approx(found["epochs"])


def test_a_run_at_rate_0_is_not_begun(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = folders.write_instructions(tmp_path / "chat.jsonl", 12)
    assert run(model, data, tmp_path / "out", "--steps", 1, "--warmup", 1, code=2) == []
    assert "the run has 1 step, and --warmup 1 begins there" in capsys.readouterr().err
    assert run(model, data, tmp_path / "out", "--steps", 1, "--warmup", 1, "--dry-run", code=2) == []
    assert run(model, data, tmp_path / "out", "--epochs", 0, code=2) == []
    assert "epochs=0.0 is not a positive number" in capsys.readouterr().err
    assert run(model, data, tmp_path / "out", "--epochs", "1e300", "--eval-every", 3, code=2) == []
    told = capsys.readouterr().err
    assert "epochs=1e+300 is not a positive number, or too large" in told
    assert "eval_every=3 counts steps between evaluations; give --eval-data, or --split 0.05" in told


def test_a_run_without_gradients_says_so(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter of zeros passes none on, to either of its factors."""
    data = folders.write_instructions(tmp_path / "chat.jsonl", 12)
    run(model, data, tmp_path / "first", "--lora", 4)
    assert "warning" not in capsys.readouterr().out
    (tmp_path / "first" / "run.json").unlink()
    file = tmp_path / "first" / "adapter_model.safetensors"
    save_file({name: torch.zeros_like(value) for name, value in load_file(file).items()}, file)
    rows = run(tmp_path / "first", data, tmp_path / "then", "--steps", 2)
    assert [row["grad_norm"] for row in rows] == [0, 0]
    says = "warning: in no step were learning rate and gradient above 0"
    assert says in capsys.readouterr().out
    run(tmp_path / "first", data, tmp_path / "then", "--steps", 2)  # is finished
    assert says in capsys.readouterr().out


def test_a_run_that_was_begun_keeps_its_schedule(model: Path, tmp_path: Path) -> None:
    data, out = folders.write_instructions(tmp_path / "chat.jsonl", 20), tmp_path / "out"
    run(model, data, out, "--steps", 2)
    words = json.loads((out / "run.json").read_text())
    assert words.pop("warmup_shrinks") is True  # as runs of before, that had a step at rate 0
    (out / "run.json").write_text(json.dumps(words))
    rows = run(model, data, out, "--steps", 5)
    assert [row["lr"] for row in rows[2:]] == of_transformers(5, 0.03, 1e-5)[2:]
    assert json.loads((out / "run.json").read_text())["warmup_shrinks"] is False
    rows = run(model, data, out, "--steps", 7)
    assert [row["lr"] for row in rows[5:]] == of_transformers(7, 0.03, 1e-5)[5:]
    other = run(model, data, tmp_path / "other", "--steps", 2)
    then = run(model, data, tmp_path / "other", "--steps", 5)
    assert then[:2] == other
    assert [row["lr"] for row in then[2:]] == of_transformers(5, 0, 1e-5)[2:]
