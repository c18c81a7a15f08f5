"""`zero-offload finetune --lora R --quantize KIND`: the same losses on every tier, a second start, what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import torch

from tests.helpers import folders
from zero_offload.cli.main import main

pytestmark = pytest.mark.tools

SIZES = ("--batch", "2", "--accumulate", "1", "--seq", "64", "--lr", "1e-3", "--warmup", "0", "--commit-every", "1")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantized")
    folders.write_folder(path / "model", dtype="bfloat16")
    folders.write_instructions(path / "chat.jsonl", 24)
    return path


def words(place: Path, out: Path, *flags: object) -> list[str]:
    return [*map(str, ("finetune", place / "model", "--data", place / "chat.jsonl", "--out", out, *SIZES, *flags))]


def losses(out: Path) -> list[float]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_a_quantized_base_trains_alike_on_every_tier(place: Path, tmp_path: Path, kind: str) -> None:
    """In two starts."""
    for tier in ("cpu", "nvme"):
        for steps in (2, 4):
            tools.reset_accelerate()
            flags = ("--lora", 4, "--quantize", kind, "--params-tier", tier, "--steps", steps)
            assert main(words(place, tmp_path / tier, *flags)) == 0
    assert losses(tmp_path / "cpu") == losses(tmp_path / "nvme") and len(losses(tmp_path / "nvme")) == 4
    card = (tmp_path / "nvme" / "README.md").read_text()
    assert f"--quantize {kind}" in card and "quantized" in card


def test_the_adapter_merges_into_weights_as_they_were(place: Path, tmp_path: Path) -> None:
    """And it is evaluated over the quantized base too."""
    out = tmp_path / "out"
    tools.reset_accelerate()
    assert main(words(place, out, "--lora", 4, "--quantize", "nf4", "--steps", 2, "--merge")) == 0
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(place / "model")
    merged = AutoModelForCausalLM.from_pretrained(out / "merged")
    far = tools.distance(tools.values_of(merged), tools.values_of(base))
    assert 0 < far < 0.05 and merged.dtype == torch.bfloat16
    evaluate = ["evaluate", str(out), "--data", str(place / "chat.jsonl"), "--quantize", "nf4"]
    assert main(evaluate) == 0


def test_without_adapters_nothing_would_be_trained(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(place, tmp_path / "out", "--quantize", "nf4")) == 2
    assert "add --lora RANK" in capsys.readouterr().err
    assert main(words(place, tmp_path / "out", "--lora", 4, "--quantize", "int3")) == 2
    assert "quantize='int3' is unknown" in capsys.readouterr().err
