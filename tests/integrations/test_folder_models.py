"""A folder gives the model that `from_pretrained` loads, offloaded, with adapters and new heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers import folders
from tests.helpers.folders import write_folder
from tests.helpers.ranks import RankPools
from zero_offload.finetune.choices import Lora
from zero_offload.finetune.model.build import build_model, meta_model
from zero_offload.finetune.model.folder import open_folder

TOKENS = torch.arange(5, 45).view(2, 20)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LORA = Lora(4, 8.0)


def config(tmp_path: Path, precision: str = "fp32") -> zo.OffloadConfig:
    return zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=tmp_path / "nvme", precision=precision)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(TOKENS).logits
    return found


@pytest.mark.parametrize(
    ("kind", "settings", "precision"),
    [
        ("llama", {"sharded": True, "dtype": "bfloat16"}, "bf16"),
        ("llama", {"tied": True, "dtype": "float16"}, "fp32"),
        ("qwen3", {"dtype": "bfloat16"}, "fp32"),
        ("gpt2", {"dtype": "float16"}, "fp16"),
    ],
)
def test_values_are_those_of_from_pretrained(kind: str, settings: Any, precision: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path / "in", kind, **settings)
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[precision])
    model = build_model(open_folder(path), config(tmp_path, precision), None)
    assert all(param.requires_grad for param in model.parameters())
    assert torch.equal(logits(model), logits(plain))
    zo.close(model)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(("kind", "task"), [("llama", "causal"), ("bert", "masked"), ("bert", "classify")])
def test_a_model_on_meta_is_the_same_one(kind: str, task: str, lora: Lora | None, tmp_path: Path) -> None:
    folder = open_folder(write_folder(tmp_path / "in", kind), task)
    if task == "classify":
        folder = folder.with_labels(["a", "b", "c"])
    planned, built = meta_model(folder, lora), build_model(folder, config(tmp_path), lora)
    assert all(param.is_meta for param in planned.parameters())
    assert _described(planned) == _described(built)
    zo.close(built)


def _described(model: nn.Module) -> list[tuple[str, torch.Size, bool]]:
    return [(name, param.shape, param.requires_grad) for name, param in model.named_parameters(remove_duplicate=False)]


def test_files_of_a_base_model(tmp_path: Path) -> None:
    """Their names lack a prefix; the head is tied, or made for the task."""
    path = write_folder(tmp_path / "in", "llama", tied=True)
    plain = folders.model("llama", tied=True)
    plain.base_model.save_pretrained(path)
    model = build_model(open_folder(path), config(tmp_path), None)
    assert torch.equal(logits(model), logits(plain))
    zo.close(model)


def test_an_untied_head_must_be_in_the_files(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "in", "llama", tied=False)
    folders.model("llama", tied=False).base_model.save_pretrained(path)
    with pytest.raises(zo.CheckpointError, match="1 missing in the files: lm_head.weight"):
        build_model(open_folder(path), config(tmp_path), None)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("task", ["masked", "classify"])
def test_new_heads(task: str, lora: Lora | None, tmp_path: Path) -> None:
    """In no file: drawn by the seed, and trained. Heads of other tasks are left out. Names are old ones."""
    path = write_folder(tmp_path / "in", "bert")
    plain = folders.model("bert")
    values = {
        name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): v
        for name, v in plain.state_dict().items()
        if name.startswith("bert.")
    }
    values |= {"pooler.dense.weight": torch.zeros(64, 64), "pooler.dense.bias": torch.arange(64.0)}
    save_file(values | {"embeddings.position_ids": torch.arange(256)[None]}, path / "model.safetensors")
    folder = open_folder(path, task)
    if task == "classify":
        folder = folder.with_labels(["a", "b", "c"])
    found = []
    for run, seed in enumerate((0, 0, 1)):
        model: Any = build_model(folder, config(tmp_path / str(run)), lora, seed)
        base = model if lora is None else model.get_base_model()
        with torch.no_grad():
            hidden = base.bert.eval()(TOKENS)
            assert torch.equal(hidden[0], plain.bert.eval()(TOKENS)[0])
            if task == "classify":
                assert torch.equal(hidden[1], torch.tanh(torch.arange(64.0)).expand(2, 64))
        found.append(logits(model))
        assert any("predictions.transform" in name or "classifier" in name for name in _trained(model))
        zo.close(model)
    assert found[0].shape == ((2, 3) if task == "classify" else (2, 20, folders.VOCAB))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def _trained(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if param.requires_grad]


def _train(model: nn.Module, num_steps: int = 2) -> None:
    optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.05)
    for _ in range(num_steps):
        model.train()(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["lm_head"]}], ids=["lora", "with a head"])
def test_an_adapters_folder(settings: dict[str, Any], tmp_path: Path) -> None:
    """It is found beside its base, goes on training, and is read."""
    path = write_folder(tmp_path / "in")
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    plain = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(path), lora)
    for param in plain.parameters():
        if param.requires_grad:
            nn.init.normal_(param, std=0.1)
    plain.save_pretrained(tmp_path / "adapter")
    folder = open_folder(tmp_path / "adapter")
    assert (folder.path, folder.adapter) == (path, tmp_path / "adapter")
    for trains in (False, True):
        model = build_model(folder, config(tmp_path), None, trains=trains)
        assert torch.equal(logits(model), logits(plain))
        assert _trained(model) == (_trained(plain) if trains else [])
        if trains:
            _train(model)
            assert not torch.equal(logits(model), logits(plain))
        zo.close(model)


def test_a_generation_comes_before_the_folder(tmp_path: Path) -> None:
    folder = open_folder(write_folder(tmp_path / "in"))
    settings = {"params": "nvme", "optimizer": "nvme", "nvme": tmp_path / "nvme", "precision": "fp32"}
    model = build_model(folder, zo.OffloadConfig(**settings), LORA)
    _train(model)
    expected = logits(model)
    zo.close(model)
    model = build_model(folder, zo.OffloadConfig(**settings, existing="resume"), LORA)
    assert torch.equal(logits(model), expected)
    zo.close(model)


def test_a_model_that_is_read_keeps_its_generation_config(tmp_path: Path) -> None:
    folder = open_folder(write_folder(tmp_path / "in"))
    for trains in (True, False):
        model: Any = build_model(folder, config(tmp_path), None, trains=trains)
        assert model.generation_config.max_new_tokens == 32
        assert model.config.use_cache is not trains
        zo.close(model)


def on_a_rank(rank: int, world_size: int, path: Path, nvme: Path) -> Tensor:
    settings = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme, precision="fp32")
    model = build_model(open_folder(path), settings, None, trains=False)
    found = logits(model)
    zo.close(model)
    return found


def test_two_ranks(tmp_path: Path, pools: RankPools) -> None:
    path = write_folder(tmp_path / "in", sharded=True)
    plain = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(path), peft.LoraConfig(r=4, init_lora_weights=False)
    )
    plain.save_pretrained(tmp_path / "adapter")
    for given in (path, tmp_path / "adapter"):
        expected = logits(plain if given != path else transformers.AutoModelForCausalLM.from_pretrained(path))
        for found in tools.on_ranks(pools, 2, on_a_rank, given, tmp_path / f"nvme {given.name}"):
            assert torch.equal(found, expected)


def test_a_merged_export_is_a_folder(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "in", "qwen3")
    model = build_model(open_folder(path), config(tmp_path), LORA)
    _train(model)
    zo.export_pretrained(model, tmp_path / "merged", adapters="merged")
    expected = logits(model)
    zo.close(model)
    assert "tie_word_embeddings" in json.loads((tmp_path / "merged" / "config.json").read_text())
    open_folder(path).tokenizer.save_pretrained(tmp_path / "merged")
    again = build_model(open_folder(tmp_path / "merged"), config(tmp_path / "again"), None, trains=False)
    assert torch.allclose(logits(again), expected, atol=1e-4)
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == load_file(path / "model.safetensors").keys()
    zo.close(again)


EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_that_are_joined(kind: str, tmp_path: Path) -> None:
    """The files have a tensor for each expert, the model one for all of a layer."""
    words = folders.model("llama").config.to_dict() | EXPERTS
    names = (
        "model_type",
        "architectures",
        "head_dim",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "rope_parameters",
    )
    made = transformers.AutoConfig.for_model(kind, **{name: v for name, v in words.items() if name not in names})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path / "in", max_shard_size="100KB")
    folders.tokenizer().save_pretrained(tmp_path / "in")
    index = json.loads((tmp_path / "in" / "model.safetensors.index.json").read_text())
    assert any(".experts.3." in name for name in index["weight_map"])
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    model = build_model(open_folder(tmp_path / "in"), config(tmp_path), None)
    assert torch.equal(logits(model), logits(plain))
    zo.export_pretrained(model, tmp_path / "out")
    zo.close(model)
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(plain))


def test_experts_of_which_one_is_missing(tmp_path: Path) -> None:
    words = folders.model("llama").config.to_dict() | EXPERTS
    made = transformers.MixtralConfig(
        **{name: v for name, v in words.items() if name.startswith(("num", "hid", "vocab"))}
    )
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path / "in")
    folders.tokenizer().save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    values = load_file(file)
    for which, says in (
        ("w1", "lacks parts of a tensor: 3 of .*w1.weight, 4 of"),
        ("w2", "of another shape: .*experts.down_proj"),
    ):
        name = f"model.layers.1.block_sparse_moe.experts.2.{which}.weight"
        save_file({key: value for key, value in values.items() if key != name}, file)
        with pytest.raises(zo.ZeroOffloadError, match=f"(?s){says}"):
            build_model(open_folder(tmp_path / "in"), config(tmp_path), None)
