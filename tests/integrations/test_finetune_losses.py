"""Losses of `zero-offload finetune`: each label counts once, in training and in evaluation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tests.helpers.tools as tools  # before transformers  # isort: skip
from transformers import AutoModelForCausalLM

from tests.helpers import folders
from tests.helpers.tool_runs import in_processes
from zero_offload.cli.main import main

pytestmark = pytest.mark.tools

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def run(command: str, *words: object) -> None:
    tools.reset_accelerate()
    assert main([command, *map(str, words), "--precision", "fp32"]) == 0


def finetune(model: Path, data: Path, out: Path, *flags: object) -> list[dict[str, Any]]:
    run("finetune", model, "--data", data, "--out", out, "--seq", 64, "--commit-every", 1, *flags)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def labelled(path: Path, num: int) -> Path:
    texts = [text for _, text in folders.descriptions()[:num]]
    return folders.write_rows(path, [{"text": text, "label": f"{len(text) % 3}"} for text in texts])


@pytest.mark.parametrize("method", ["mlm", "classify"])
def test_micro_batches_of_encoders_do_not_add_up(tmp_path: Path, method: str) -> None:
    model, data = folders.write_folder(tmp_path / "bert", "bert", **NO_DROPOUT), labelled(tmp_path / "rows.jsonl", 16)
    flags = ["--method", method, "--steps", 2, "--warmup", 0, "--clip", 1e9]
    whole = finetune(model, data, tmp_path / "whole", *flags, "--batch", 8, "--accumulate", 1)
    parts = finetune(model, data, tmp_path / "parts", *flags, "--batch", 2, "--accumulate", 4)
    if method == "classify":
        for name in ("loss", "grad_norm"):
            assert [row[name] for row in parts] == pytest.approx([row[name] for row in whole], rel=1e-4)
    else:  # other words are masked
        assert [row["loss"] for row in parts] == pytest.approx([math.log(folders.VOCAB)] * 2, rel=0.1)


def test_a_folder_gets_another_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `from_pretrained` of another class: the base is loaded, and the plan names what is drawn."""
    model, data = folders.write_folder(tmp_path / "bert", "bert"), labelled(tmp_path / "rows.jsonl", 8)
    flags = ["--steps", 1, "--batch", 2, "--lr", 1e-12]
    finetune(model, data, tmp_path / "mlm", "--method", "mlm", *flags)
    says = capsys.readouterr().out
    assert f"measure it: zero-offload evaluate {tmp_path / 'mlm'} --data FILES --method mlm" in says
    assert "talk to it" not in says
    finetune(tmp_path / "mlm", data, tmp_path / "classify", "--method", "classify", *flags)
    assert "in no file, and so drawn by the seed: bert.pooler.dense, classifier" in capsys.readouterr().out
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("mlm", "classify"))
    base = {name for name in before if name.startswith("bert.")}
    assert base and all(torch.allclose(before[name], after[name], rtol=0.01, atol=1e-9) for name in base)
    # The head of words is then as new.
    finetune(tmp_path / "classify", data, tmp_path / "again", "--method", "mlm", *flags)
    assert "drawn by the seed: cls.predictions" in capsys.readouterr().out
    # A head of random numbers tells nothing.
    given = ["evaluate", tmp_path / "mlm", "--data", data, "--method", "classify"]
    assert main([*map(str, given)]) != 0
    says = capsys.readouterr().err
    assert 'trained by finetune --method mlm as class="BertForMaskedLM"' in says
    assert "Evaluate it by --method mlm, or give it another head by finetune first" in says


@pytest.mark.door(
    "transformers",
    load="`finetune`",
    between="two values in the files for tied weights",
    save="its folder, read by `from_pretrained`",
    outcome="right",
)
def test_a_tie_that_the_files_do_not_have(tmp_path: Path) -> None:
    """Both values are trained, as in a model of `from_pretrained`."""
    model = folders.write_folder(tmp_path / "llama", "llama")
    values = load_file(model / "model.safetensors")
    values["lm_head.weight"] = values["model.embed_tokens.weight"] + 1
    save_file(values, model / "model.safetensors", metadata={"format": "pt"})
    words = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(words))
    rows, flags = labelled(tmp_path / "rows.jsonl", 8), ["--steps", 1, "--batch", 2, "--lr", 1e-12]
    with pytest.warns(UserWarning, match="has two values for lm_head.weight and model.embed_tokens.weight"):
        finetune(model, rows, tmp_path / "out", *flags)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert not found.config.tie_word_embeddings
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.allclose(found.state_dict()[name], values[name].bfloat16(), rtol=0.01, atol=1e-9)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["full", "lora", "mlm", "classify"])
def test_evaluate_says_what_the_run_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, num_ranks: int
) -> None:
    """Ranks that have one row and two in the last batch, too."""
    method = {"mlm": "mlm", "classify": "classify"}.get(kind, "sft")
    is_chat = method == "sft"
    model = folders.write_folder(tmp_path / "model", "llama" if is_chat else "bert")
    write = folders.write_instructions if is_chat else labelled
    data, held_out = write(tmp_path / "rows.jsonl", 16), write(tmp_path / "held_out.jsonl", 7)
    flags = ["--method", method, "--steps", 3, "--batch", 2, "--eval-data", held_out, "--eval-every", 3, "--lr", 1e-3]
    flags += ["--lora", 4] if kind == "lora" else []
    given = model, data, tmp_path / "out", *flags
    rows = finetune(*given) if num_ranks == 1 else in_processes(num_ranks, finetune, *given)[0]
    capsys.readouterr()
    method_flags = ["--method", method, "--seq", 64, "--batch", 2]
    run("evaluate", tmp_path / "out", "--data", held_out, *method_flags, "--json")
    found = json.loads(capsys.readouterr().out)
    # Which words are masked follows from the batches, and so from the ranks.
    rel = 0.05 if (kind, num_ranks) == ("mlm", 2) else 1e-5
    assert found["loss"] == pytest.approx(rows[-1]["val_loss"], rel=rel)
    if kind == "classify":
        assert found["accuracy"] == rows[-1]["val_accuracy"]
    else:
        assert found["perplexity"] == pytest.approx(rows[-1]["perplexity"], rel=10 * rel)


def test_a_resume_masks_the_same_words(tmp_path: Path) -> None:
    """Over the end of an epoch, and from within one; so small a rate keeps the losses apart from the schedule."""
    model, data = folders.write_folder(tmp_path / "bert", "bert"), labelled(tmp_path / "rows.jsonl", 20)
    flags = ["--method", "mlm", "--batch", 2, "--accumulate", 2, "--lr", 1e-12]
    whole = finetune(model, data, tmp_path / "whole", *flags, "--steps", 8)
    for steps in (2, 5, 8):
        rows = finetune(model, data, tmp_path / "out", *flags, "--steps", steps)
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in whole], rel=1e-6)
    epochs = [[row["loss"] for row in whole[begin : begin + 5]] for begin in (0, 5)]
    assert not {*epochs[0]} & {*epochs[1]}
