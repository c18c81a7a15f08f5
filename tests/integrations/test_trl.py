"""The mixin before TRL's trainers, against the same trainer of the plain model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.experimental.utils import create_reference_model

import zero_offload as zo
from tests.helpers.launched import run_program
from tests.helpers.tool_runs import in_processes
from zero_offload.integrations.transformers import OffloadMixin

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
SCRATCH = {"existing": "refuse", "durability": "scratch"}


class OffloadSFT(OffloadMixin, SFTTrainer):
    pass


class OffloadDPO(OffloadMixin, DPOTrainer):
    pass


class OffloadGRPO(OffloadMixin, GRPOTrainer):
    pass


class OffloadReward(OffloadMixin, RewardTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>"] + [f"w{i}" for i in range(tools.VOCAB - 4)]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def texts(num: int, length: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, tools.VOCAB - 4, (num, length), generator=generator).tolist()
    return [" ".join(f"w{i}" for i in row[: 3 + number % (length - 2)]) for number, row in enumerate(rows)]


PROMPTS, CHOSEN, REJECTED = (texts(16, 6, seed) for seed in (1, 2, 3))
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "save_strategy": "no",
    "seed": 3,
    "disable_tqdm": True,
    "max_grad_norm": 0.0,
    "bf16": False,
}


def check(
    tmp_path: Path, theirs: Any, ours: Any, make: Callable[[], nn.Module], config: type, where: str, **given: Any
) -> None:
    """Both trainers log the same losses, and end with the same weights."""
    settings, given = given.pop("settings", {}), {"processing_class": tokenizer(), **given}
    reference = given.pop("make_reference", None)
    offload_reference = given.pop("offload_reference", None)
    seen = []
    for kind in (theirs, ours):
        more: dict[str, Any] = {} if reference is None else {"ref_model": reference()}
        if kind is ours:
            more |= {"offload": tools.config(where, tmp_path / "nvme"), "offload_reference": offload_reference}
        if torch.distributed.is_initialized():
            settings = settings | {"ddp_backend": "gloo"}
        args = config(output_dir=str(tmp_path / kind.__name__), **(SETTINGS | settings))
        trainer = kind(model=make(), args=args, **given, **more)
        if kind is theirs:
            trainer.optimizer_cls_and_kwargs = zo.AdamW, {"lr": 1e-3}
        start = tools.values_of(trainer.model)
        trainer.train()
        logs = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        seen.append((logs, tools.values_of(trainer.model)))
    assert len(seen[1][0]) == 3
    assert any(tools.distance({"": seen[1][1][name]}, {"": value}) > 1e-4 for name, value in start.items())
    assert seen[1][0] == seen[0][0]
    assert tools.distance(seen[1][1], seen[0][1]) == 0
    if offload_reference is not None:
        assert all(not param.requires_grad for param in trainer.ref_model.parameters())
        assert zo.stats(trainer.ref_model).resident_bytes["nvme"] > 0
        zo.close(trainer.ref_model)
    zo.close(trainer.model)


SFT = {
    "packing": ({"packing": True, "packing_strategy": "wrapped", "max_length": 16}, {"text": PROMPTS}, None),
    "completions": ({"completion_only_loss": True}, {"prompt": PROMPTS, "completion": CHOSEN}, None),
    "adapters": ({"gradient_checkpointing": True}, {"text": PROMPTS}, LORA),
}


@pytest.mark.parametrize(("name", "where"), [("packing", "nvme"), ("completions", "cpu"), ("adapters", "nvme")])
def test_sft(tmp_path: Path, name: str, where: str) -> None:
    settings, columns, lora = SFT[name]
    data = Dataset.from_dict(columns)
    check(
        tmp_path, SFTTrainer, OffloadSFT, tools.llama, SFTConfig, where,
        settings=settings, train_dataset=data, peft_config=lora,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["reference", "adapters", "precomputed", "followed", "followed in memory"])
def test_dpo(tmp_path: Path, kind: str) -> None:
    data = Dataset.from_dict({"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED})
    given: dict[str, Any] = {"train_dataset": data}
    if kind.startswith("followed"):
        given["settings"] = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3}
        given["make_reference"] = tools.llama
    if kind in ("reference", "followed"):
        given["make_reference"] = tools.llama
        given["offload_reference"] = tools.config("nvme", tmp_path / "reference", **SCRATCH)
    if kind == "adapters":
        given["peft_config"] = LORA
    if kind == "precomputed":
        given["settings"] = {"precompute_ref_log_probs": True}
    check(tmp_path, DPOTrainer, OffloadDPO, tools.llama, DPOConfig, "nvme", **given)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_grpo(tmp_path: Path, beta: float) -> None:
    tools.llama().save_pretrained(tmp_path / "model")

    def load() -> nn.Module:
        torch.manual_seed(0)
        return type(tools.llama()).from_pretrained(tmp_path / "model", use_cache=True)

    given: dict[str, Any] = {}
    if beta:
        given["offload_reference"] = tools.config("nvme", tmp_path / "reference", **SCRATCH)
    check(
        tmp_path, GRPOTrainer, OffloadGRPO, load, GRPOConfig, "nvme",
        settings={"num_generations": 2, "max_completion_length": 4, "beta": beta},
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        reward_funcs=lambda completions, **_: [float(len(set(each.split()))) + len(each) % 7 for each in completions],
        **given,
    )  # fmt: skip


def test_reward(tmp_path: Path) -> None:
    def classifier() -> nn.Module:
        config = tools.llama().config
        config.num_labels = 1
        torch.manual_seed(0)
        return LlamaForSequenceClassification(config)

    data = Dataset.from_dict({"chosen": CHOSEN, "rejected": REJECTED})
    check(tmp_path, RewardTrainer, OffloadReward, classifier, RewardConfig, "cpu", train_dataset=data)


def _on_two_ranks(tmp_path: Path) -> bool:
    test_sft(tmp_path / "sft", "packing", "nvme")
    test_dpo(tmp_path / "dpo", "reference")
    test_dpo(tmp_path / "followed", "followed")
    return True


def test_on_two_ranks(tmp_path: Path) -> None:
    assert in_processes(2, _on_two_ranks, tmp_path) == [True, True]


@pytest.mark.parametrize("reference", ["copied", "in memory", "offloaded"])
def test_a_reference_follows_in_the_trainer_of_trl(reference: str, tmp_path: Path) -> None:
    """A model that is offloaded already, in TRL's own class."""
    seen = []
    for away in (False, True):
        model = tools.llama()
        other: Any = tools.llama().requires_grad_(False)
        if away:
            zo.offload(model, tools.config("nvme", tmp_path / "model"))
            if reference == "copied":
                other = zo.copy(model, tools.config("nvme", tmp_path / "reference", **SCRATCH), kind="frozen")
            if reference == "offloaded":
                zo.offload(other, tools.config("cpu", tmp_path / "reference", **SCRATCH))
        settings = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3}
        trainer = DPOTrainer(
            model=model, ref_model=other, processing_class=tokenizer(),
            args=DPOConfig(output_dir=str(tmp_path / f"out-{away}"), **SETTINGS, **settings),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS, "chosen": CHOSEN, "rejected": REJECTED}),
            optimizers=(zo.AdamW(model.parameters(), lr=1e-3), None),
        )  # fmt: skip
        trainer.train()
        logs = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        seen.append((logs, tools.values_of(model), tools.values_of(other)))
    assert seen[1][0] == seen[0][0] and len(set(seen[0][0])) > 1
    assert tools.distance(seen[1][1], seen[0][1]) == tools.distance(seen[1][2], seen[0][2]) == 0
    assert tools.distance(seen[0][2], tools.values_of(tools.llama())) > 1e-5
    zo.close(model)


def test_a_reference_model_of_trl_is_an_ordinary_copy(tmp_path: Path) -> None:
    model = zo.offload(tools.llama(), tools.config("nvme", tmp_path))
    found = create_reference_model(model)
    assert not any(param.requires_grad for param in found.parameters())
    assert tools.distance(tools.values_of(found), tools.values_of(tools.llama())) == 0
    assert all(type(param) is nn.Parameter for param in found.parameters())
    zo.close(model)


def test_the_example_goes_on_where_it_stopped(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "trl_sft.py"
    assert len(script.read_text().splitlines()) <= 40
    tools.llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"text": text}) for text in texts(64, 30, 1)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    words = tmp_path / "run", tmp_path / "model", tmp_path / "data"
    first = run_program(script, *words, folder=tmp_path)
    assert first.count("'loss'") == 4
    assert sorted(each.name for each in (tmp_path / "run" / "out").glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-20",
    ]
    assert (tmp_path / "run" / "out" / "model.safetensors").is_file()
    assert run_program(script, *words, folder=tmp_path).count("'loss'") == 0
