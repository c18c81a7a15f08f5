"""A model of ten times the host budget starts within it: all of its parameters for a forward, by LoRA for a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.helpers.tools  # before transformers  # noqa: F401
import zero_offload as zo
from tests.helpers.folders import write_folder
from tests.helpers.resident import measured_alone, peak_bytes, reset_peak
from zero_offload.base.types import MIB
from zero_offload.finetune.choices import Lora
from zero_offload.finetune.model.build import build_model
from zero_offload.finetune.model.folder import open_folder

WIDE = {"hidden_size": 1024, "intermediate_size": 2560}
LAYERS = {"lora": 78, "full": 18}
"""850M and 197M parameters, of which a block has 10.9M."""
BYTES = {"lora": 2, "full": 14}
"""Of a parameter: weights in bf16, and what completes them to masters, and moments."""
BUDGETS = {"lora": 160 * MIB, "full": 192 * MIB}
"""Of which chunks of states that come and go take 64 MiB, and reads of a base 32. The least that a plan allows."""
HEAP = 64 * MIB
"""Bytes that no plan counts: modules of adapters, activations of one row, holes, which are more beside other tests."""


def make(folder: Path) -> None:
    write_folder(folder / "warm")
    for how, layers in LAYERS.items():
        write_folder(folder / how, dtype="bfloat16", num_hidden_layers=layers, **WIDE)


def measure(folder: Path, how: str) -> dict[str, int]:
    taken, lora = {}, Lora(4, 8.0) if how == "lora" else None
    for name in ("warm", how):
        before = reset_peak()
        config = zo.OffloadConfig(
            **dict.fromkeys(("params", "grads", "optimizer"), "auto"),
            nvme=folder / f"{name} nvme",
            cpu_memory="1GiB" if name == "warm" else BUDGETS[how],
            durability="scratch",
        )
        model: Any = build_model(open_folder(folder / name), config, lora)
        taken["start"] = peak_bytes() - before
        tokens = torch.arange(5, 13)[None]  # without padding
        if lora is None:
            with torch.no_grad():
                model(input_ids=tokens)
        else:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
            optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        taken["use"] = peak_bytes() - before
        taken["model"] = BYTES[how] * sum(param.numel() for param in model.parameters())
        zo.close(model)
    return taken


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large")
    measured_alone("tests.integrations.test_folder_memory", "make", path)
    return path


@pytest.mark.parametrize("how", ["full", "lora"])
def test_it_starts_within_a_tenth(how: str, folder: Path) -> None:
    taken = measured_alone("tests.integrations.test_folder_memory", how, folder)
    assert taken["model"] > 10 * BUDGETS[how]
    most = max(taken["start"], taken["use"])
    assert most < BUDGETS[how] + HEAP, {name: f"{n / MIB:.1f} MiB" for name, n in taken.items()}


if __name__ == "__main__":
    torch.set_num_threads(2)
    how, path = sys.argv[1], Path(sys.argv[2])
    print(json.dumps(make(path) if how == "make" else measure(path, how)))
