"""accelerate's loop, transformers' Trainer and adapters of peft around an offloaded model on the fake GPU.

Parameters that leave the device give the bits of those that stay; tests/integrations compares with plain models.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from zero_offload.cli.main import main

pytestmark = pytest.mark.tools

accelerate: Any = pytest.importorskip("accelerate")
tools: Any = pytest.importorskip("tests.helpers.tools")
transformers: Any = pytest.importorskip("transformers")
Result = tuple[list[float], dict[str, Tensor]]


def in_accelerate(model: nn.Module, folder: Path) -> list[float]:
    accelerator = accelerate.Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(tools.Tokens(16), batch_size=4))
    dtypes, losses = set(), []
    model.lm_head.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert dtypes == {torch.bfloat16}
    return [loss.item() for loss in losses]


def in_trainer(model: nn.Module, folder: Path) -> list[float]:
    settings = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "dataloader_pin_memory": False}
    args = transformers.TrainingArguments(
        str(folder), max_steps=3, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, **settings
    )
    trainer = transformers.Trainer(
        model, args, train_dataset=tools.Tokens(), optimizer_cls_and_kwargs=(zo.AdamW, {"lr": 1e-2})
    )
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def in_offload_trainer(model: nn.Module, folder: Path) -> list[float]:
    """With checkpoints, of which the first is loaded at the end."""
    ours = importlib.import_module("zero_offload.integrations.transformers")
    settings = {"gradient_accumulation_steps": 2, "dataloader_pin_memory": False, "learning_rate": 1e-2, "max_steps": 4}
    saves = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    evaluates = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1, "report_to": [], "disable_tqdm": True}
    args = transformers.TrainingArguments(str(folder), **settings, **saves, **evaluates)
    trainer = ours.OffloadTrainer(model, args, train_dataset=tools.Tokens(), eval_dataset=tools.Tokens(8, seed=2))
    trainer.train()
    assert trainer.state.best_global_step == 2
    return [each.get("loss", each.get("eval_loss")) for each in trainer.state.log_history[:-1]]


@pytest.mark.parametrize("loop", [in_accelerate, in_trainer, in_offload_trainer])
@pytest.mark.parametrize("policy", [Policy.LATE, Policy.SIDE_LATE])
def test_a_tool_trains_on_the_device(
    loop: Callable[[nn.Module, Path], list[float]], policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", TYPE)

    def run(where: str, **settings: Any) -> Result:
        with tools.launched(0, 1):
            model = zo.offload(tools.llama(), tools.config(where, tmp_path / "run", **settings))
            return loop(model, tmp_path / "out"), tools.values_of(model)

    device.policy(Policy.EAGER)
    expected = run("cpu")
    device.policy(policy)
    losses, values = run("nvme", device_memory="8MiB", durability="scratch")
    assert losses == expected[0] and len(set(losses)) == len(losses)
    assert tools.distance(values, expected[1]) == 0


def test_a_plain_model_under_accelerate_has_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """So what tests of tools compare with on this device is right."""

    def run(where: str) -> Result:
        monkeypatch.setenv("ACCELERATE_USE_CPU", str(where == "cpu").lower())
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", where)
        with tools.launched(0, 1):
            accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
            assert accelerator.device.type == where
            model = tools.llama(attn_implementation="eager").to(accelerator.device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
            model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(tools.Tokens(24), batch_size=4))
            losses = []
            for batch in data:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
            return losses, tools.values_of(model)

    device.policy(Policy.LATE)
    losses, values = run(TYPE)
    expected = run("cpu")
    assert losses == expected[0] and len(set(losses)) == len(losses)
    assert tools.distance(values, expected[1]) == 0


@pytest.mark.parametrize("policy", [Policy.LATE, Policy.SIDE_LATE])
def test_adapters_of_peft_train_and_merge_on_the_device(policy: Policy, tmp_path: Path) -> None:
    """peft merges copies of its layers on the device, where their buffers are."""
    peft: Any = pytest.importorskip("peft")

    def adapted() -> Any:
        config = peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")  # it has buffers
        model = tools.llama()
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)

    def train(model: Any) -> list[float]:
        optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        losses = []
        for index in range(3):
            batch = {name: values[None].to(TYPE) for name, values in tools.Tokens()[index].items()}
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [loss.item() for loss in losses]

    device.policy(Policy.EAGER)
    expected = train(zo.offload(adapted(), tools.config("cpu", tmp_path)))
    device.policy(policy)
    settings = {"device_memory": "8MiB", "durability": "scratch"}
    model = zo.offload(adapted(), tools.config("nvme", tmp_path / "run", **settings))
    assert train(model) == expected
    zo.export_pretrained(model, tmp_path / "out", adapters="merged")
    device.policy(Policy.EAGER)
    plain = adapted()
    plain.load_state_dict(model.state_dict())
    merged = plain.to(TYPE).merge_and_unload().cpu().state_dict()
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert found.keys() == merged.keys() and all(torch.equal(found[name], merged[name]) for name in found)


@pytest.mark.parametrize("what", ["chat", "evaluate"])
def test_a_folder_is_read_beside_the_device(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers and losses of weights that stream to the device are those of weights that stay there."""
    folders: Any = importlib.import_module("tests.helpers.folders")
    folder = folders.write_folder(tmp_path / "in")
    data = folders.write_instructions(tmp_path / "chat.jsonl", 3)
    words = {"chat": ["--max-new-tokens", "5"], "evaluate": ["--data", str(data)]}[what]
    found = []
    for flags in ([], ["--device-memory", "600KiB"], ["--cpu-memory", "80MiB", "--nvme", str(tmp_path / "nvme")]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("What does abs do?\n"))
        assert main([what, str(folder), *words, *flags, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        told.pop("seconds")
        found.append(told)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("flags", [[], ["--lora", "4", "--merge"], ["--method", "dpo"]], ids=["full", "lora", "dpo"])
def test_a_folder_is_fine_tuned_beside_the_device(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and outputs of states that stream to the device are those of states that stay there."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", TYPE)
    folders: Any = importlib.import_module("tests.helpers.folders")
    folder = folders.write_folder(tmp_path / "in")
    write = folders.write_preferences if "dpo" in flags else folders.write_instructions
    data = write(tmp_path / "data.jsonl", 16)
    words = [str(folder), "--data", str(data), "--split", "0.2", "--samples", "1", "--steps", "3", "--eval-every", "2"]
    # Norms are added up in another order where gradients stay: so large a bound changes none.
    sizes = ["--batch", "2", "--accumulate", "2", "--seq", "64", "--lr", "1e-2", "--clip", "1e9"]
    found = []
    for tier in ("device", "cpu", "nvme"):
        out = tmp_path / tier
        tiers = [word for kind in ("params", "grads", "optimizer") for word in (f"--{kind}-tier", tier)]
        with tools.launched(0, 1):
            assert main(["finetune", *words, *sizes, *tiers, *flags, "--out", str(out)]) == 0
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        weights = sorted(out.rglob("*.safetensors"))
        assert len(weights) == (2 if "--merge" in flags else 1)
        names = ("loss", "val_loss", "samples", "tokens")
        found.append(
            ([{name: row.get(name) for name in names} for row in rows], [each.read_bytes() for each in weights])
        )
    assert found[0] == found[1] == found[2]
    assert found[0][0][0]["loss"] != found[0][0][2]["loss"]
