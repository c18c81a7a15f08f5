"""`zero-offload finetune` against TRL over the plain model; killed, stopped, evaluated, and what it leaves."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import zero_offload as zo
from tests.helpers import folders
from tests.helpers.disk import small_disk
from tests.helpers.ext4 import ext4_disk
from tests.helpers.paths import PATHS, calls_in, following, out_of_order
from tests.helpers.ranks import wait_until
from tests.helpers.tool_runs import in_processes
from tests.helpers.trainer import fork_server
from zero_offload.cli.main import main
from zero_offload.finetune import run as finetune_run
from zero_offload.finetune.choices import Lora
from zero_offload.finetune.data.prepare import Prepared, prepare
from zero_offload.finetune.model.build import build_model
from zero_offload.finetune.model.folder import open_folder
from zero_offload.finetune.outputs import Weights, is_published
from zero_offload.finetune.settings import TABLE, FinetuneConfig
from zero_offload.finetune.trainers import FinetuneSFT, best_of
from zero_offload.plan.table import PlanTable
from zero_offload.runs.reader import read_run
from zero_offload.runs.report.summary import summarize
from zero_offload.runs.settings import read_tables

pytestmark = pytest.mark.tools

SIZES = ("--batch", "2", "--accumulate", "2", "--seq", "96", "--lr", "1e-3", "--warmup", "0", "--precision", "fp32")
UNCLIPPED = ("--clip", "1e9")
"""torch and the library add up the squares of a norm in another order; so large a bound changes no gradient."""
RANK, STEPS = 4, 5


@dataclass(frozen=True)
class Place:
    """A model, and data to train and to evaluate on."""

    model: Path
    chat: Path
    held_out: Path
    preferences: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    path = tmp_path_factory.mktemp("finetune")
    return Place(
        folders.write_folder(path / "model"),
        folders.write_instructions(path / "chat.jsonl", 60),
        folders.write_instructions(path / "held_out.jsonl", 8),
        folders.write_preferences(path / "preferences.jsonl", 24),
    )


def words(place: Place, out: Path, *flags: object, steps: int | None = STEPS, data: Path | None = None) -> list[str]:
    given = [place.model, "--data", data or place.chat, "--out", out, *SIZES, "--commit-every", 1]
    given += [] if steps is None else ["--steps", steps]
    return ["finetune", *map(str, (*given, *flags))]


def run(place: Place, out: Path, *flags: object, code: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """The rows of a run in this process, without what was measured of the machine."""
    tools.reset_accelerate()
    assert main(words(place, out, *flags, **changes)) == code
    return rows_of(out)


def rows_of(out: Path) -> list[dict[str, Any]]:
    names = ("step", "loss", "lr", "grad_norm", "tokens", "val_loss", "perplexity", "rewards/margins")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in names if name in row} for row in rows]


def num_rows(out: Path) -> int:
    """Whole lines; the last line may still be in writing."""
    file = out / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def column(rows: list[dict[str, Any]], name: str = "loss") -> list[float]:
    return [row[name] for row in rows if name in row]


def test_its_calls_come_in_the_order_of_its_path(place: Place, tmp_path: Path) -> None:
    names = calls_in(PATHS["A folder is fine-tuned"])
    with following(names) as seen:
        run(place, tmp_path / "out", "--lora", RANK, "--eval-data", place.held_out, "--eval-every", 1, steps=2)
    assert len(names) > 15
    assert out_of_order(names, seen) == []


def test_a_run_whose_drive_is_lost_goes_on_from_what_it_published(place: Place, tmp_path: Path) -> None:
    flags = ("--lora", RANK, "--publish", tmp_path / "shared", "--publish-every", 1)
    plain = run(place, tmp_path / "plain", "--lora", RANK, steps=2)
    first = run(place, tmp_path / "out", *flags, steps=2)
    assert column(first) == column(plain)
    shutil.rmtree(tmp_path / "out" / "nvme")
    more = run(place, tmp_path / "out", *flags, steps=3)
    assert column(more)[:2] == column(first) and len(column(more)) == 3


# The plain model's numbers


def adapted(place: Place, seed: int = 0) -> nn.Module:
    """The plain model with the adapters that the command begins with."""
    folder = open_folder(place.model)
    ours = build_model(folder, zo.OffloadConfig(precision="fp32"), Lora(RANK, 2.0 * RANK), seed)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    plain: nn.Module = get_peft_model(AutoModelForCausalLM.from_pretrained(place.model), config)
    with torch.no_grad():
        for name, value in tools.values_of(ours).items():
            plain.get_parameter(name).copy_(value)
    zo.close(ours)
    return plain


def plain_losses(place: Place, method: str, lora: bool, kind: Any = zo.AdamW) -> tuple[list[float], nn.Module]:
    """The log of TRL's trainer of the plain model, with the same kernel of AdamW."""
    tools.reset_accelerate()
    data = place.preferences if method == "dpo" else place.chat
    prepared = prepare([str(data)], open_folder(place.model), method=method, seq=96)
    model = adapted(place) if lora else AutoModelForCausalLM.from_pretrained(place.model)
    config, trainer = (DPOConfig, DPOTrainer) if method == "dpo" else (SFTConfig, SFTTrainer)
    args = config(
        output_dir=str(place.model.parent / "plain"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        seed=0,
        **prepared.trainer_settings,
    )
    given: dict[str, Any] = {"data_collator": prepared.collator}
    if method == "dpo":
        # The adapters begin as the identity, so without them the model is the reference.
        given["ref_model"] = AutoModelForCausalLM.from_pretrained(place.model)
    made = trainer(
        model=model,
        args=args,
        train_dataset=prepared.train,
        processing_class=open_folder(place.model).tokenizer,
        **given,
    )
    made.optimizer_cls_and_kwargs = kind, {"lr": 1e-3}
    made.train()
    return [each["loss"] for each in made.state.log_history if "loss" in each], made.model


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_losses_are_those_of_trl_without_offload(place: Place, tmp_path: Path, method: str, lora: bool) -> None:
    losses, model = plain_losses(place, method, lora)
    data = place.preferences if method == "dpo" else place.chat
    flags = ["--method", method, *UNCLIPPED, *(["--lora", RANK] if lora else [])]
    tiers = {
        "cpu": ["--params-tier", "cpu", "--grads-tier", "cpu", "--optimizer-tier", "cpu"],
        "nvme": ["--params-tier", "nvme", "--grads-tier", "nvme", "--optimizer-tier", "nvme"],
    }
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    for where, chosen in tiers.items():
        ours = run(place, tmp_path / where, *flags, *chosen, data=data)
        assert column(ours) == losses
        assert losses[-1] != losses[0]
    assert filecmp.cmp(tmp_path / "cpu" / name, tmp_path / "nvme" / name, shallow=False)
    trained = (AutoPeftModelForCausalLM if lora else AutoModelForCausalLM).from_pretrained(tmp_path / "nvme")
    theirs = {name: value.detach() for name, value in model.named_parameters()}
    assert tools.distance({name: value.detach() for name, value in trained.named_parameters()}, theirs) == 0


def test_an_optimizer_of_others_trains_and_goes_on(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, model = plain_losses(place, "sft", lora=False, kind=torch.optim.NAdam)
    out, flags = tmp_path / "out", ("--optimizer", "torch.optim.NAdam", "--optimizer-tier", "nvme", *UNCLIPPED)
    ours = run(place, out, *flags)
    assert "stepped by torch.optim.NAdam: 12" in capsys.readouterr().out
    assert column(ours) == losses
    trained = AutoModelForCausalLM.from_pretrained(out)
    theirs = {name: value.detach() for name, value in model.named_parameters()}
    assert tools.distance({name: value.detach() for name, value in trained.named_parameters()}, theirs) == 0
    for other, says in (
        (("--optimizer", "torch.optim.Adam", *flags[2:]), 'this one has optimizer="torch.optim.Adam"'),
        (flags[2:], 'holds a run with optimizer="torch.optim.NAdam", this one has'),
    ):
        run(place, out, *other, code=2)
        assert says in capsys.readouterr().err
    more = run(place, out, *flags, steps=STEPS + 1)
    assert more[:STEPS] == ours and len(more) == STEPS + 1


def test_muon_of_ours_trains_matrices_and_the_rest(place: Place, tmp_path: Path) -> None:
    on_drives = run(place, tmp_path / "nvme", "--optimizer", "zo.Muon", "--optimizer-tier", "nvme", steps=2)
    in_memory = run(place, tmp_path / "cpu", "--optimizer", "zo.Muon", "--optimizer-tier", "cpu", steps=2)
    adamw = run(place, tmp_path / "adamw", steps=2)
    assert on_drives == in_memory
    assert column(on_drives)[0] == column(adamw)[0] and column(on_drives)[1] != column(adamw)[1]


def test_chat_templates_by_names_come_along(place: Place, tmp_path: Path) -> None:
    shutil.copytree(place.model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    templates = {"default": tokenizer.chat_template, "tool_use": folders.CHATML_MARKED}
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    run(replace(place, model=tmp_path / "model"), out, steps=1)
    assert main(["export", str(out), str(tmp_path / "exported")]) == 0
    for folder in (out, tmp_path / "exported"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == templates


def _on_ranks(place: Place, out: Path, steps: int) -> list[dict[str, Any]]:
    flags = ["--lora", RANK, "--merge", "--eval-data", place.held_out, "--eval-every", 2, "--samples", 1]
    return run(place, out, *flags, steps=steps)


def test_on_two_ranks_and_then_on_one(place: Place, tmp_path: Path) -> None:
    whole = run(place, tmp_path / "one", "--lora", RANK, "--batch", "4", steps=4)
    two = in_processes(2, _on_ranks, place, tmp_path / "two", 4)[0]
    assert column(two) == pytest.approx(column(whole), rel=1e-5)
    assert [row["step"] for row in two if "val_loss" in row] == [2, 4]
    assert (tmp_path / "two" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "two" / "merged" / "model.safetensors").is_file()
    assert not (tmp_path / "two" / "best").exists()
    then = _on_ranks(place, tmp_path / "two", 7)
    assert then[:4] == two
    assert [row["step"] for row in then] == list(range(1, 8))


# Kills and stops


def _command(argv: list[str]) -> None:
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    torch.set_num_threads(1)
    sys.exit(main(argv))


def test_goes_on_after_kills(place: Place, tmp_path: Path) -> None:
    flags = ["--lora", RANK, "--merge", "--eval-data", place.held_out, "--eval-every", 2, "--samples", 1]
    whole = run(place, tmp_path / "whole", *flags)
    out = tmp_path / "out"
    for at in (1, 3):
        process = fork_server().Process(target=_command, args=(words(place, out, *flags),))
        process.start()
        wait_until(lambda at=at: num_rows(out) >= at)
        process.kill()
        process.join()
        assert not (out / "adapter_config.json").exists()
    assert run(place, out, *flags) == whole
    assert names_of(out) == names_of(tmp_path / "whole")
    for name in ("adapter_model.safetensors", "merged/model.safetensors"):
        assert filecmp.cmp(out / name, tmp_path / "whole" / name, shallow=False)


def names_of(out: Path) -> list[str]:
    """Without swap files, and without rows of a start that was killed before its first commit."""
    found = (str(each.relative_to(out)) for each in out.rglob("*") if each.is_file())
    return sorted(each for each in found if not each.startswith(("nvme", "metrics.earlier")))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["full", "lora", "nf4"])
def test_goes_on_after_many_kills_at_random_moments(place: Place, tmp_path: Path, kind: str) -> None:
    flags = ["--eval-data", place.held_out, "--eval-every", 2, "--samples", 1]
    flags += [] if kind == "full" else ["--lora", RANK, "--merge"]
    flags += ["--quantize", "nf4"] if kind == "nf4" else []
    whole = run(place, tmp_path / "whole", *flags, steps=12)
    generator, out, num_kills = random.Random(kind), tmp_path / "out", 0
    command = [sys.executable, "-m", "zero_offload", *words(place, out, *flags, steps=12)]
    while num_kills < 20:
        at = generator.randint(num_rows(out), 12)  # 0: as it starts; 12: as it ends, or not at all
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})

        def has_come(process: subprocess.Popen[bytes] = process, at: int = at) -> bool:
            return process.poll() is not None or ((out / "LOCK").exists() and num_rows(out) >= at)

        wait_until(has_come, 600)
        time.sleep(generator.uniform(0, {0: 4.0, 12: 2.0}.get(at, 0.5)))
        if process.poll() is None and (at < 12 or generator.random() < 0.6):
            process.kill()
            num_kills += 1
        assert process.wait() in (0, -signal.SIGKILL)
        print("killed" if process.returncode else "ended", num_rows(out), flush=True)
        if process.returncode == 0:
            assert rows_of(out) == whole
            shutil.rmtree(out)
    assert run(place, out, *flags, steps=12) == whole
    assert names_of(out) == names_of(tmp_path / "whole")
    for name in ("adapter_model.safetensors", "merged/model.safetensors", "model.safetensors"):
        if (out / name).exists() or (tmp_path / "whole" / name).exists():
            assert filecmp.cmp(out / name, tmp_path / "whole" / name, shallow=False)


def strike(out: Path, num_steps: int, number: int) -> None:
    wait_until(lambda: num_rows(out) >= num_steps)
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_commits_and_the_same_command_goes_on(place: Place, tmp_path: Path, number: int) -> None:
    whole = run(place, tmp_path / "whole")
    out = tmp_path / "out"
    thread = threading.Thread(target=strike, args=(out, 2, number))
    thread.start()
    stopped = run(place, out, "--commit-every", "1h", code=130)
    thread.join()
    assert 2 <= len(stopped) < STEPS
    assert not (out / "model.safetensors").exists()
    assert run(place, out) == whole


@pytest.mark.parametrize("at", [1, 3])
def test_a_full_disk_is_one_message_and_leaves_the_last_generation(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    flags = ["--eval-data", place.held_out, "--eval-every", 2, "--samples", 0, "--no-packing"]
    whole = run(place, tmp_path / "whole", *flags)
    with ext4_disk(tmp_path / "disk", "40M", 1024) as disk:
        out, filler = disk.path / "out", disk.path / "filler"

        def fill() -> None:
            wait_until(lambda: num_rows(out) >= at)
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))

        thread = threading.Thread(target=fill)
        thread.start()
        tools.reset_accelerate()
        code = main(words(place, out, *flags))
        thread.join()
        errors = capsys.readouterr().err
        assert code in (3, 4), errors
        assert errors.count("error: ") == 1
        assert "No space left" in errors or "disk space" in errors
        assert not (out / "config.json").exists()
        filler.unlink()
        assert main(["verify", str(out)]) == 0
        assert run(place, out, *flags) == whole


@pytest.mark.parametrize("lora", [None, Lora(RANK, 2.0 * RANK)], ids=["full", "lora"])
def test_a_disk_that_is_full_at_any_file_of_the_end(place: Place, tmp_path: Path, lora: Lora | None) -> None:
    """Files are written by libraries that raise errors of their own."""
    folder = open_folder(place.model)
    model, errors = build_model(folder, zo.OffloadConfig(), lora), []
    with small_disk(tmp_path / "disk", "1m") as disk:
        weights = Weights(disk / "out")
        for room in range(0, 1 << 20, 4096):
            (disk / "filler").unlink(missing_ok=True)
            (disk / "out").mkdir()
            (disk / "out" / "run.json").write_text("{}")
            with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            os.truncate(disk / "filler", max((disk / "filler").stat().st_size - room, 0))
            try:
                weights.write(model, 1)
                weights.publish(1, "card", folder)
            except zo.StorageError as error:
                errors.append(str(error))
                assert not is_published(disk / "out")
                shutil.rmtree(disk / "out", ignore_errors=True)
            else:
                break
        assert is_published(disk / "out")
    zo.close(model)
    assert len(errors) > 5 and all("No space left" in each for each in errors)
    assert len({re.sub("[0-9a-f]{12}", "", each) for each in errors}) > 1


def test_an_evaluation_without_a_number_is_never_the_best() -> None:
    found = [{"step": 1, "loss": math.nan}, {"step": 2, "loss": 3.0}, {"step": 3, "loss": math.inf}]
    assert best_of(found) == found[1] and best_of(found[::2]) is None


def test_losses_that_are_not_finite_end_the_run(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(place, tmp_path / "out", "--lr", "1e30", *UNCLIPPED, code=7, steps=12)
    assert "loss or gradients were not finite in steps" in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_loss_that_is_not_finite_is_that_of_its_step_alone(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = FinetuneSFT.compute_loss

    def spoilt(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute(self, *args, **kwargs)
        return loss * math.nan if self.model.training and self.state.global_step == 1 else loss

    monkeypatch.setattr(FinetuneSFT, "compute_loss", spoilt)
    rows = run(place, tmp_path / "out", steps=5)
    assert [row["step"] for row in rows if row["loss"] is None] == [2]
    assert (tmp_path / "out" / "config.json").exists()


# Evaluation, and what a run leaves


def loss_of(model: nn.Module, prepared: Prepared) -> float:
    """Mean loss over all tokens."""
    assert prepared.evaluation is not None
    total, num_tokens = 0.0, 0
    with torch.no_grad():
        for row in prepared.evaluation:
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
            num = int((labels[:, 1:] != -100).sum())
            total += model(input_ids=ids, labels=labels, use_cache=False).loss.item() * num
            num_tokens += num
    return total / num_tokens


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_best_weights_are_what_out_has(place: Place, tmp_path: Path, kind: str) -> None:
    lora = ["--lora", RANK, "--merge"] if kind == "lora" else []
    flags = ["--eval-data", place.held_out, "--eval-every", 1, "--patience", 1, "--lr", "0.05", *lora]
    out = tmp_path / "out"
    rows = run(place, out, *flags, steps=12)
    losses = column(rows, "val_loss")
    best = losses.index(min(losses))
    assert len(losses) == best + 2 < 12  # patience ended it
    assert column(rows, "perplexity")[best] == pytest.approx(torch.tensor(losses[best]).exp().item())
    prepared = prepare([str(place.chat)], open_folder(place.model), seq=96, eval_data=[str(place.held_out)])
    auto: Any = AutoPeftModelForCausalLM if lora else AutoModelForCausalLM
    assert loss_of(auto.from_pretrained(out), prepared) == pytest.approx(losses[best], rel=1e-5)
    if lora:
        merged = AutoModelForCausalLM.from_pretrained(out / "merged")
        assert loss_of(merged, prepared) == pytest.approx(losses[best], rel=1e-4)
        assert loss_of(AutoModelForCausalLM.from_pretrained(out), prepared) == pytest.approx(losses[best], rel=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == folders.CHATML
    card = (out / "README.md").read_text()
    assert card.startswith("---\nbase_model: ")
    assert f"| weights of step | {best + 1} |" in card
    assert f"| evaluation loss | {losses[best]:.4f} |" in card
    assert (out / "generation_config.json").is_file()
    if not lora:
        assert json.loads((out / "config.json").read_text())["use_cache"]
    assert not (out / "best").exists()
    # A run that is over has nothing left to do, but to delete what a kill has left.
    (out / "best" / "step-1").mkdir(parents=True)
    before = times_of(out)
    assert run(place, out, *flags, steps=12) == rows
    assert times_of(out) == before
    assert not (out / "best").exists()


def times_of(out: Path) -> dict[str, int]:
    return {
        name: (out / name).stat().st_mtime_ns for name in names_of(out) if not name.startswith(("tokens", "report"))
    }


def test_more_steps_go_on_and_replace_the_model(place: Place, tmp_path: Path) -> None:
    first = run(place, tmp_path / "out", steps=2)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    then = run(place, tmp_path / "out", steps=4)
    assert then[:2] == first
    assert len(then) == 4
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != before
    assert "| weights of step | 4 |" in (tmp_path / "out" / "README.md").read_text()


def test_a_finished_run_goes_on_from_an_earlier_generation(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run(place, out, steps=4)
    before = (out / "model.safetensors").read_bytes()
    then = run(place, out, "--generation", 3, "--lr", "1e-2", steps=4)
    assert then[:3] == first[:3]
    assert then[3]["lr"] == pytest.approx(10 * first[3]["lr"])
    assert (out / "model.safetensors").read_bytes() != before
    run(place, out, "--generation", 1, steps=4, code=2)


def test_a_finished_run_that_goes_on_is_not_finished_until_its_end(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where OUT has the best weights already."""
    out, flags = tmp_path / "out", ("--eval-data", place.held_out, "--eval-every", 1, "--samples", 0, "--lr", 3)
    first = run(place, out, *flags, steps=4)
    losses = column(first, "val_loss")
    assert losses.index(min(losses)) < 3, losses
    with monkeypatch.context() as patch:
        patch.setattr(finetune_run, "_publish", _fails)
        run(place, out, *flags, "--generation", 3, steps=4, code=4)
    capsys.readouterr()
    assert run(place, out, *flags, steps=4) == first
    assert "this run is finished" not in capsys.readouterr().out
    assert run(place, out, *flags, steps=4) == first
    assert "this run is finished" in capsys.readouterr().out


def _fails(*_: object) -> None:
    raise zo.StorageError("pulled out")


def test_merged_weights_can_be_asked_for_later(place: Place, tmp_path: Path) -> None:
    rows = run(place, tmp_path / "out", "--lora", RANK, steps=2)
    assert run(place, tmp_path / "out", "--lora", RANK, "--merge", steps=2) == rows
    assert (tmp_path / "out" / "merged" / "model.safetensors").is_file()


def test_an_end_that_failed_is_completed(place: Place, tmp_path: Path) -> None:
    """No step is trained again, though patience has ended the run before its last one."""
    flags = ["--eval-data", place.held_out, "--eval-every", 1, "--samples", 0, "--patience", 1, "--lr", "0.05"]
    whole = run(place, tmp_path / "whole", *flags, steps=12)
    out = tmp_path / "out"
    replace_name = os.replace

    def failing(source: Any, target: Any, **places: Any) -> None:
        if Path(target) == out / "tokenizer.json":
            raise OSError(errno.EIO, "the drive is gone")
        replace_name(source, target, **places)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", failing)
        assert run(place, out, *flags, steps=12, code=4) == whole
    assert not (out / "config.json").exists()
    assert run(place, out, *flags, steps=12) == whole
    assert names_of(out) == names_of(tmp_path / "whole")
    assert filecmp.cmp(out / "model.safetensors", tmp_path / "whole" / "model.safetensors", shallow=False)


def test_each_moment_of_the_end_leaves_a_whole_model_or_none(place: Place, tmp_path: Path) -> None:
    """The remains of a kill, seen at each change of a name in OUT."""
    out = tmp_path / "out"
    run(place, out, steps=2)
    first = (out / "model.safetensors").read_bytes()
    seen: list[tuple[bool, bytes]] = []
    state = {"is_on": False}

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if state["is_on"] and event in ("os.rename", "os.remove", "os.mkdir"):
            state["is_on"] = False
            has_config, file = (out / "config.json").exists(), out / "model.safetensors"
            seen.append((has_config, file.read_bytes() if file.exists() else b""))
            state["is_on"] = True

    sys.addaudithook(hook)
    state["is_on"] = True
    run(place, out, steps=3)
    state["is_on"] = False
    last = (out / "model.safetensors").read_bytes()
    assert last != first
    assert {weights for has_config, weights in seen if has_config} <= {first, last}
    assert any(not has_config for has_config, _ in seen)


# Settings


def test_a_run_that_is_another_is_refused(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    rows = run(place, out, "--lora", RANK, steps=2)
    tokens = {each.name: each.read_bytes() for each in (out / "tokens").iterdir()}
    for flags, changes, says in (
        (["--lora", 8], {}, "holds a run with lora=4, this one has lora=8"),
        ([], {}, "holds a run with lora=4, this one has lora=0"),
        (["--lora", RANK], {"data": place.held_out}, "holds a run with data="),
        (["--lora", RANK, "--seq", 64], {}, "holds a run with seq=96, this one has seq=64"),
        (["--lora", RANK], {"data": tmp_path / "chta.jsonl"}, "holds a run with data="),
        (["--lora", RANK], {"steps": 1}, "is at step 2 already, beyond --steps 1"),
    ):
        run(place, out, *flags, code=2, **{"steps": 2, **changes})
        assert says in capsys.readouterr().err
    assert rows_of(out) == rows
    assert {each.name: each.read_bytes() for each in (out / "tokens").iterdir()} == tokens
    data = place.chat.read_bytes()
    place.chat.write_bytes(data[: data.rindex(b"\n", 0, -1) + 1])
    run(place, out, "--lora", RANK, code=2, steps=2)
    assert re.search("began with other --data: file 1 of it had the digest .*, and now has", capsys.readouterr().err)
    assert {each.name: each.read_bytes() for each in (out / "tokens").iterdir()} == tokens
    place.chat.write_bytes(data)
    assert main(words(place, tmp_path / "other", "--nvme", out / "nvme")) == 2
    assert f"{out}/nvme holds the states of a run, and {tmp_path}/other none" in capsys.readouterr().err
    then = run(place, out, "--lora", RANK, "--lr", "1e-4", steps=3)
    assert then[:2] == rows
    assert then[2]["lr"] == pytest.approx(1e-4 * 0.25)  # of a cosine over three steps
    assert "the run had lr=0.001 and now has lr=0.0001" in capsys.readouterr().out
    run(place, out, "--seq", 64, "--discard", steps=2)
    assert (out / "model.safetensors").is_file()
    assert not (out / "adapter_config.json").exists()


@pytest.mark.parametrize("name", ["README.md", "run.toml"])
def test_files_that_no_run_has_written_stay(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / name).write_text("mine")
    assert main(words(place, tmp_path)) == 2
    assert f"holds no run, and {name}, which a run writes; give another --out" in capsys.readouterr().err
    assert {each.name for each in tmp_path.iterdir() if each.is_file()} - {"lock"} == {name}
    assert (tmp_path / name).read_text() == "mine"


def test_other_ways_to_train_on_the_same_data_do_not_meet() -> None:
    def out(**settings: object) -> str:
        return str(FinetuneConfig.from_tables({"model": "m/Qwen3", "data": ["d/chat.jsonl"], **settings}, {}).out)

    assert out() == out(method="sft") == out(method="auto") == "runs/Qwen3-chat"
    assert out(lora=16) == "runs/Qwen3-chat-lora16"
    assert out(method="mlm") == "runs/Qwen3-chat-mlm"
    assert out(method="classify", lora=8) == "runs/Qwen3-chat-classify-lora8"
    with pytest.raises(zo.ConfigError, match="lora='16' is not a whole number"):
        out(lora="16")


def test_the_length_and_the_rate_are_said_first(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--eval-data", place.held_out, "--epochs", 2, "--warmup", 3, "--dry-run")
    assert main(words(place, tmp_path / "out", *flags, steps=None)) == 0
    said = capsys.readouterr().out
    found = re.search(r"^sft: (\d+) steps, 2 epochs of (\d+) sequences; evaluated every (\d+)$", said, re.M)
    assert found is not None
    steps, rows, every = map(int, found.groups())
    assert steps == 2 * math.ceil(rows / 4) and every == max(1, steps // 10)
    assert "\nlearning rate 0 at step 1, up to 0.001 at step 4, then down to 0 by a cosine\n" in said
    lr = column(run(place, tmp_path / "out", "--warmup", 3), "lr")
    assert lr.index(max(lr)) + 1 == 4 and max(lr) == 0.001
    # The plan that was printed is what the report compares with, and what the run was placed by.
    told = json.loads((tmp_path / "out" / "run.json").read_text())
    planned = PlanTable.from_dict(told["planned"])
    assert planned.states["memory"] == told["plan"]["cpu"] + told["plan"]["device"]
    assert planned.states["nvme"] == told["plan"]["nvme"]
    summary = summarize(read_run(tmp_path / "out"))
    assert summary["memory"]["process"]["planned_bytes"] == summary["planned_rss_bytes"] == planned.total["memory"]
    assert "\n".join(planned.lines()) in capsys.readouterr().out


def test_settings_come_back_from_the_file_of_the_run(place: Place, tmp_path: Path) -> None:
    config = FinetuneConfig.from_tables(
        {
            "model": str(place.model),
            "data": [str(place.chat), 'na"me\\ ü\n'],
            "out": str(tmp_path),
            "lora": 8,
            "lr": 1e-5,
        },
        {"params": {"cpu": 0.25, "nvme": 0.75}, "cpu_memory": "8GiB", "precision": {"states": "compact"}},
    )
    (tmp_path / "run.toml").write_text(config.to_toml())
    again = FinetuneConfig.from_tables(*read_tables(tmp_path / "run.toml", TABLE))
    assert again == config
    out = tmp_path / "out"
    rows = run(place, out, steps=2)
    tools.reset_accelerate()
    assert main(["finetune", "--config", str(out / "run.toml"), "--steps", "3"]) == 0
    assert rows_of(out)[:2] == rows
    assert len(rows_of(out)) == 3


def test_all_problems_of_settings_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "--lora", "-1", "--split", "2", "--params-tier", "x"]) == 2
    errors = capsys.readouterr().err
    for words in ("no model is given", "no data is given", "lora=-1", "split=2.0", "params='x' is unknown"):
        assert words in errors


@pytest.mark.parametrize("flag", ["--steps", "--seq", "--lr", "--lora-alpha", "--eval-every"])
def test_a_zero_is_not_taken_for_the_default(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["finetune", "model", "--data", "chat.jsonl", flag, "0"])
    assert ended.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == "usage: zero-offload finetune MODEL --data FILE [FILE ...] [flags]"
    assert error.endswith(f"argument {flag}: 0 is not a value of it; give another, or leave it out for the default")


def test_clean_leaves_the_model_of_a_finished_run(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    rows = run(place, out, "--eval-data", place.held_out, steps=2)
    assert main(["verify", str(out)]) == 0
    assert main(["clean", str(out), "--yes"]) == 0
    assert rows_of(out) == rows
    assert not {"nvme", "tokens", "best", "files.json"} & {each.name for each in out.iterdir()}
    AutoModelForCausalLM.from_pretrained(out)
    capsys.readouterr()
    assert run(place, out, "--eval-data", place.held_out, steps=2) == rows
    assert "this run is finished" in capsys.readouterr().out
    run(place, out, "--eval-data", place.held_out, steps=3, code=5)
    assert "start over with --discard, or another --out" in capsys.readouterr().err


def test_clean_deletes_an_unfinished_run_whole(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "out"
    thread = threading.Thread(target=strike, args=(out, 1, signal.SIGINT))
    thread.start()
    run(place, out, "--eval-data", place.held_out, "--eval-every", 1, code=130)
    thread.join()
    assert (out / "best").is_dir()
    with pytest.raises(zo.ConfigError, match=f"no model yet: .* zero-offload finetune --config {out}/run.toml"):
        open_folder(out)
    assert main(["clean", str(out), "--yes"]) == 0
    assert not out.exists()


def test_clean_and_discard_leave_what_a_user_has_put_there(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Notes in folders that a run has made, or never made, and under names like its own."""
    out = tmp_path / "out"
    run(place, out, "--lora", RANK, "--merge", steps=2)
    mine = (
        "best/notes.txt",
        "tokens/mine.txt",
        "tokens/train-mine.arrow",
        "merged/notes.txt",
        "model-of-mine.safetensors",
    )
    for name in mine:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    with pytest.warns(UserWarning, match="merged keeps files that a run has not written: notes.txt"):
        run(place, out, "--seq", 64, "--discard", steps=1)
    assert not list((out / "merged").glob("*.safetensors")) and (out / "model.safetensors").is_file()
    assert not list((out / "tokens").glob(".tmp")) and len(list((out / "tokens").glob("*.arrow"))) == 2
    capsys.readouterr()
    assert main(["clean", str(out), "--yes"]) == 0
    said = capsys.readouterr().out
    assert "left best/notes.txt" in said or "left best: " in said
    assert "left tokens/mine.txt" in said and "left tokens/train-mine.arrow" in said
    assert [(out / name).read_text() for name in mine] == ["mine"] * len(mine)
    assert sorted(os.listdir(out / "tokens")) == ["mine.txt", "train-mine.arrow"]


def test_a_model_that_no_run_has_made_is_not_replaced(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folders.write_folder(tmp_path / "mine")
    before = {each.name: each.read_bytes() for each in out.iterdir()}
    for flags in ([], ["--discard"]):
        assert main(words(place, out, *flags)) == 2
        assert "--discard deletes what a run has made" in capsys.readouterr().err
    assert {each.name: each.read_bytes() for each in out.iterdir()} == before


def test_what_takes_a_name_of_the_model_meanwhile_is_kept(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that a user puts into OUT, and into OUT/best, while the run is at work."""
    out, publish = tmp_path / "out", Weights.publish

    def beside(self: Weights, step: int, *args: Any) -> None:
        (out / "tokenizer.json").write_text("mine")
        (self.folder(step) / "below").mkdir()
        (self.folder(step) / "below" / "notes.txt").write_text("mine")
        (out / "best" / "notes.txt").write_text("mine")
        publish(self, step, *args)

    monkeypatch.setattr(Weights, "publish", beside)
    with pytest.warns(UserWarning, match="tokenizer.json was there, and no run has made it: it is tokenizer.json.kept"):
        run(place, out, steps=1)
    assert (out / "tokenizer.json.kept").read_text() == "mine"
    assert (out / "best" / "notes.txt").read_text() == "mine"
    AutoTokenizer.from_pretrained(out)


def test_preferences_go_on_from_an_adapter_that_is_their_reference(place: Place, tmp_path: Path) -> None:
    run(place, tmp_path / "first", "--lora", RANK, "--lr", "0.1", steps=3)
    then = replace(place, model=tmp_path / "first")
    rows = run(then, tmp_path / "then", data=place.preferences, steps=3)
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows[0]["rewards/margins"] == 0
    assert rows[2]["rewards/margins"] != 0
    assert not (tmp_path / "then" / "nvme" / "read").exists()
    base = json.loads((tmp_path / "then" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(place.model)
