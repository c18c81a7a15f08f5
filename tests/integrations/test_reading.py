"""`zero-offload chat` and `evaluate`: what `generate` and a loss over the whole data say, of folders and adapters."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import peft
import torch
import transformers
from torch import nn

from tests.helpers import folders
from tests.helpers.folders import write_folder, write_instructions, write_rows
from tests.helpers.ranks import RankPools
from zero_offload.cli.main import main
from zero_offload.finetune.data.prepare import prepare
from zero_offload.finetune.model.folder import open_folder

Say = Callable[..., list[dict[str, Any]]]
QUESTIONS = ("What does abs do?", "And math.sqrt?")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("in") / "llama", sharded=True)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    made = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(llama), lora)
    torch.manual_seed(0)
    for param in made.parameters():
        if param.requires_grad:
            nn.init.normal_(param, std=0.2)
    path = tmp_path_factory.mktemp("in") / "adapter"
    made.save_pretrained(path)
    return path


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Give lines to `chat --json`, and get what it prints."""

    def run(folder: Path, lines: str, *flags: object) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        flags = ("--precision", "fp32", "--max-new-tokens", 6, *flags)
        assert main(["chat", str(folder), "--json", *map(str, flags)]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def _plain(folder: Path) -> Any:
    if (folder / "adapter_config.json").exists():
        return peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def _answer(model: Any, turns: list[dict[str, str]]) -> str:
    tokenizer = folders.tokenizer()
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    answer: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return answer


@pytest.mark.parametrize("what", ["llama", "adapter"])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_answers_are_those_of_generate(
    what: str, system: str | None, say: Say, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Over two turns, and after a /reset."""
    folder = request.getfixturevalue(what)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    flags = [] if system is None else ["--system", system]
    said = say(folder, f"{QUESTIONS[0]}\n\n{QUESTIONS[1]}\n/reset\n{QUESTIONS[1]}\n/exit\nmore\n", *flags)
    model, turns, expected = _plain(folder), [], []
    first = [] if system is None else [{"role": "system", "content": system}]
    for question in (*QUESTIONS, None, QUESTIONS[1]):
        if question is None:
            turns = []
            continue
        turns.append({"role": "user", "content": question})
        expected.append(_answer(model, first + turns))
        turns.append({"role": "assistant", "content": expected[-1]})
    assert [each["answer"] for each in said] == expected
    assert system or expected[1] != expected[2]
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_weights_on_a_drive(llama: Path, say: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = say(llama, QUESTIONS[0])[0]["answer"]
    flags = ["--nvme", tmp_path / "nvme", "--cpu-memory", "80MiB"]
    assert say(llama, QUESTIONS[0], *flags)[0]["answer"] == expected
    assert [path.name for path in (tmp_path / "nvme").iterdir()] == ["LOCK"]
    assert main(["chat", str(llama), "--cpu-memory", "64KiB"]) == 3
    assert "would fit: weights on a drive, --nvme DIR" in capsys.readouterr().err


def test_temperature(llama: Path, say: Say) -> None:
    greedy = say(llama, QUESTIONS[0], "--temperature", 0)[0]["answer"]
    drawn = [say(llama, QUESTIONS[0], "--temperature", 5, "--seed", seed)[0]["answer"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    assert len({greedy, *drawn}) == 3


def test_a_model_without_a_template_goes_on_with_text(tmp_path: Path, say: Say) -> None:
    folder = write_folder(tmp_path / "base", template=None)
    inputs = folders.tokenizer()("def f(", return_tensors="pt")
    tokens = _plain(folder).generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert say(folder, "def f(")[0]["answer"] == folders.tokenizer().decode(tokens, skip_special_tokens=True)


def test_bad_input_is_one_error(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_folder(tmp_path / "base", template=None)
    data = write_instructions(tmp_path / "chat.jsonl", 4)
    for words, says in {
        ("chat", llama, "--max-new-tokens", 0): "--max-new-tokens 0 leaves no answer",
        ("chat", llama, "--temperature", -1): "--temperature -1.0 is not a number from 0 up",
        ("chat", base, "--system", "Be brief."): "no chat template, so --system has no place",
        ("chat", llama, "--precision", "int4"): "int4",
        ("evaluate", llama, "--data", data, "--batch", 0): "--batch 0 is below 1",
        ("evaluate", llama, "--data", tmp_path / "none.jsonl"): "none.jsonl",
        ("evaluate", base, "--data", data): "has no chat template",
        ("evaluate", tmp_path, "--data", data): "no config.json",
    }.items():
        assert main([*map(str, words)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and says in error and "Traceback" not in error


def test_a_conversation_that_is_full(llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("abs " * 400))
    assert main(["chat", str(llama)]) == 2
    assert "and the model has 256 positions; begin a new one by /reset" in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends(llama: Path, tmp_path: Path) -> None:
    """In a terminal of its own."""
    mine, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "zero_offload",
        "chat",
        str(llama),
        "--max-new-tokens",
        "200",
        "--temperature",
        "9",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TERM": "dumb"}
    child = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    shown = ""

    def until(text: str, times: int = 1) -> None:
        nonlocal shown
        deadline = time.monotonic() + 120
        while shown.count(text) < times:
            assert time.monotonic() < deadline and child.poll() is None, shown
            if not select.select([mine], [], [], 1)[0]:
                continue
            shown += os.read(mine, 4096).decode(errors="replace")

    try:
        until("> ")
        assert "parameters" in shown and "/exit" in shown
        time.sleep(0.3)  # the prompt is there before readline waits for a line
        os.kill(child.pid, signal.SIGINT)
        until("Ctrl-D or /exit ends")
        os.write(mine, b"What does abs do?\n")
        until("What does abs do?")
        time.sleep(0.3)
        os.kill(child.pid, signal.SIGINT)
        until("> ", 3)
        os.write(mine, b"\x04")
        assert child.wait(60) == 0
    finally:
        child.kill()
        os.close(mine)


# evaluate


def _evaluate(folder: Path, data: Path, *flags: object) -> dict[str, Any]:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        words = ["evaluate", folder, "--data", data, "--seq", 200, "--precision", "fp32", "--json", *flags]
        assert main([*map(str, words)]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def _mean_loss(folder: Path, data: Path) -> tuple[float, int]:
    """Each token once, one conversation at a time."""
    model, losses = _plain(folder), []
    for row in prepare([str(data)], open_folder(folder), seq=200, packing=False).train:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"][1:])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].double()
        losses.append(nn.functional.cross_entropy(logits, labels, reduction="none")[labels >= 0])
    every = torch.cat(losses)
    return every.mean().item(), len(every)


@pytest.mark.parametrize("what", ["llama", "adapter"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_loss_is_the_mean_over_all_tokens(
    what: str, batch: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder, data = request.getfixturevalue(what), write_instructions(tmp_path / "chat.jsonl", 7)
    loss, count = _mean_loss(folder, data)
    found = _evaluate(folder, data, "--batch", batch, "--eval-samples", 1)
    assert found["count"] == count
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert 0 <= found["accuracy"] < 1
    first = json.loads(data.read_text().splitlines()[0])["messages"]
    assert first[0]["content"] in found["answers"][0]["prompt"]


def test_a_loss_that_is_no_number_ends_in_one_line(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, made = write_instructions(tmp_path / "chat.jsonl", 2), folders.model()
    folder = write_folder(tmp_path / "folder")
    for value, code in ((math.nan, 7), (math.inf, 7), (1e5, 0)):
        with torch.no_grad():
            made.lm_head.weight[5] = value
        made.save_pretrained(folder)
        flags = ["--precision", "fp32", "--json"]
        assert main(["evaluate", str(folder), "--data", str(data), *flags]) == code
        told = capsys.readouterr()
        if code:
            assert told.out == "" and f"error: the loss of {folder} on {data} is nan, over" in told.err
            assert "--precision fp32" in told.err and "Traceback" not in told.err
    found = json.loads(told.out, parse_constant=pytest.fail)
    assert found["loss"] > 700 and found["perplexity"] is None  # more than a float takes


def on_a_rank(rank: int, world_size: int, folder: Path, data: Path) -> str:
    out = io.StringIO()
    with tools.launched(rank, world_size), pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        flags = ["--seq", "200", "--precision", "fp32", "--json", "--batch", "2", "--eval-samples", "1"]
        assert main(["evaluate", str(folder), "--data", str(data), *flags]) == 0
    return out.getvalue()


def test_two_ranks(llama: Path, tmp_path: Path, pools: RankPools) -> None:
    """Rows that do not divide by two ranks and batches count once; rank 0 prints."""
    data = write_instructions(tmp_path / "chat.jsonl", 5)
    expected = _evaluate(llama, data, "--eval-samples", 1)
    first, second = tools.on_ranks(pools, 2, on_a_rank, llama, data)
    found = json.loads(first)
    assert second == ""
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert (found["count"], found["answers"]) == (expected["count"], expected["answers"])


def test_classes_and_masked_words(tmp_path: Path) -> None:
    rows = [{"text": text, "label": "long" if len(text) > 100 else "short"} for _, text in folders.descriptions()[:9]]
    data = write_rows(tmp_path / "labels.jsonl", rows)
    names = ["long", "short"]
    config = {"id2label": dict(enumerate(names)), "label2id": {name: at for at, name in enumerate(names)}}
    bert = write_folder(tmp_path / "masked", "bert")
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(bert, **config).eval()
    model.save_pretrained(tmp_path / "classes")
    folders.tokenizer().save_pretrained(tmp_path / "classes")
    found = _evaluate(tmp_path / "classes", data, "--method", "classify")
    tokenizer, losses, right = folders.tokenizer(), [], 0
    for row in rows:
        ids = torch.tensor([tokenizer(row["text"], truncation=True, max_length=200)["input_ids"]])
        with torch.no_grad():
            logits = model(ids).logits
        label = torch.tensor([names.index(row["label"])])
        losses.append(nn.functional.cross_entropy(logits, label).item())
        right += int(logits.argmax() == label)
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert (found["count"], found["accuracy"]) == (9, pytest.approx(right / 9))
    masked = [_evaluate(bert, data, "--method", "mlm", "--seed", seed) for seed in (0, 0, 1)]
    assert masked[0]["loss"] == masked[1]["loss"] != masked[2]["loss"]
    assert masked[0]["loss"] == pytest.approx(math.log(folders.VOCAB), rel=0.1)
