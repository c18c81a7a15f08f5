"""`zero-offload finetune --lora R --quantize KIND`: the same losses on every tier, a second start, what it leaves."""

from __future__ import annotations

import filecmp
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import torch
from safetensors.torch import load_file

import zero_offload as zo
from tests.helpers import folders
from tests.helpers.ranks import wait_until
from zero_offload.cli.main import main
from zero_offload.finetune.model.build import build_model
from zero_offload.finetune.model.folder import open_folder
from zero_offload.integrations.quantize import PartRecipe
from zero_offload.plan.quantized import offloaded_tensors
from zero_offload.runs.locate import has_generation

pytestmark = pytest.mark.tools

ADAPTER = "adapter_model.safetensors"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
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
    """nf4 in two starts."""
    for tier in ("cpu", "nvme"):
        for steps in (2, 4) if kind == "nf4" else (4,):
            tools.reset_accelerate()
            flags = ("--lora", 4, "--quantize", kind, "--params-tier", tier, "--steps", steps)
            assert main(words(place, tmp_path / tier, *flags)) == 0
    assert losses(tmp_path / "cpu") == losses(tmp_path / "nvme") and len(losses(tmp_path / "nvme")) == 4
    card = (tmp_path / "nvme" / "README.md").read_text()
    assert f"--quantize {kind}" in card and "quantized" in card
    given: dict[str, Any] = {}
    exec(card.split("```python\n")[1].split("```")[0], given)  # as its reader does
    loaded = dict(offloaded_tensors(given["model"]))
    model = build_model(open_folder(tmp_path / "nvme", quantize=kind), zo.OffloadConfig(), None, trains=False)
    with zo.gathered(model) as values:
        assert values.keys() == loaded.keys()
        for name, tensor in values.items():
            assert torch.equal(tensor.float(), loaded[name].float().to(tensor.dtype).float()), name
    zo.close(model)


@pytest.mark.parametrize(("kind", "precision"), [("nf4", "fp32"), ("int8", "fp16")])
def test_adapters_are_of_the_precision_that_was_asked_for(
    place: Path, tmp_path: Path, kind: str, precision: str
) -> None:
    """TRL converts those of models in 4 and 8 bits to bf16."""
    out = tmp_path / "out"
    tools.reset_accelerate()
    assert main(words(place, out, "--lora", 4, "--quantize", kind, "--steps", 2, "--precision", precision)) == 0
    values = load_file(out / ADAPTER).values()
    assert {value.dtype for value in values} == {{"fp32": torch.float32, "fp16": torch.float16}[precision]}


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


def test_a_killed_run_goes_on_without_quantizing_again(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the rows and the adapter of a run that was not killed. No word of a library is printed."""
    flags = ("--lora", 4, "--quantize", "nf4", "--params-tier", "nvme", "--steps", 6)
    tools.reset_accelerate()
    assert main(words(place, tmp_path / "whole", *flags)) == 0
    out, generator = tmp_path / "out", random.Random(1)
    command = [sys.executable, "-m", "zero_offload", *words(place, out, *flags)]
    with (tmp_path / "err").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=ENVIRONMENT)
        try:
            wait_until(lambda: process.poll() is not None or has_generation(out / "nvme"), 300)
            time.sleep(generator.uniform(0, 0.3))
        finally:
            process.kill()
            process.wait()
    assert (tmp_path / "err").read_text() == ""
    monkeypatch.setattr(PartRecipe, "make", lambda *_: pytest.fail("a weight was quantized again"))
    tools.reset_accelerate()
    assert main(words(place, out, *flags)) == 0
    assert losses(out) == losses(tmp_path / "whole") and len(losses(out)) == 6
    assert filecmp.cmp(out / ADAPTER, tmp_path / "whole" / ADAPTER, shallow=False)


def test_without_adapters_nothing_would_be_trained(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(place, tmp_path / "out", "--quantize", "nf4")) == 2
    assert "add --lora RANK" in capsys.readouterr().err
    assert main(words(place, tmp_path / "out", "--lora", 4, "--quantize", "int3")) == 2
    assert "quantize='int3' is unknown" in capsys.readouterr().err
