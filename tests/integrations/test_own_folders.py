"""Folders that transformers writes of its models are read whole, and written under the names that it would write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import zero_offload as zo
from tests.helpers.ranks import RankPools
from zero_offload.cli.main import main

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("LlavaForConditionalGeneration", {"text_config": TEXT, "vision_config": VISION}),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "head_dim": 8, "sliding_window": 8},
            "vision_config": {**VISION, "vision_use_head": False},
            "mm_tokens_per_image": 16,
        },
    ),
    "qwen2-vl": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {**TEXT, "rope_parameters": ROPE},
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8},
        },
    ),
    "granite-moe-hybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **TEXT,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["attention", "attention"],
            "shared_intermediate_size": 16,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
        },
    ),
    "mixtral": ("MixtralForCausalLM", {**TEXT, "num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {**TEXT, "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    ),
    "phimoe": ("PhimoeForCausalLM", {**TEXT, "num_local_experts": 4}),
    "bert": (
        "BertForMaskedLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
        },
    ),
    "vit": ("ViTForImageClassification", VISION),
}


def build(family: str, **settings: Any) -> Any:
    kind, words = FAMILIES[family]
    cls = getattr(transformers, kind)
    return cls._from_config(cls.config_class(**words, **settings))


def written(path: Path) -> dict[str, Tensor]:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []


def offloaded(family: str, source: Path, nvme: Path, **settings: Any) -> Any:
    with zo.deferred_init(values="skip"):
        model = build(family, **settings)
    zo.load_pretrained(model, source)
    return zo.offload(model, zo.OffloadConfig(precision="fp32", params="nvme", optimizer="nvme", nvme=nvme))


@pytest.mark.door(
    "transformers",
    load="`zo.load_pretrained`",
    between="experts, prefixes and towers, as `save_pretrained` names them",
    save="`zo.export_pretrained`, `zero-offload export`",
    outcome="right",
)
@pytest.mark.parametrize("family", FAMILIES)
def test_its_own_folder(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = build(family)
    theirs.save_pretrained(tmp_path / "theirs")
    model = offloaded(family, tmp_path / "theirs", tmp_path / "run")
    assert_same(dict(model.state_dict()), theirs.state_dict())
    zo.export_pretrained(model, tmp_path / "ours")
    assert_same(written(tmp_path / "ours"), written(tmp_path / "theirs"))
    # After zo.offload values go another way; and the command knows the model by its config alone.
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    zo.load_pretrained(model, tmp_path / "theirs")
    assert_same(dict(model.state_dict()), theirs.state_dict())
    zo.commit(model, zo.AdamW(model.parameters()))
    zo.save_checkpoint(model, zo.AdamW(model.parameters()), tmp_path / "checkpoint")
    zo.close(model)
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "command")]) == 0
    assert_same(written(tmp_path / "command"), written(tmp_path / "theirs"))
    again = type(theirs).from_pretrained(tmp_path / "command")
    assert tools.distance(tools.values_of(again), tools.values_of(theirs)) == 0


def on_a_rank(rank: int, world_size: int, family: str, source: Path, out: Path) -> dict[str, Tensor]:
    model = offloaded(family, source, out / "run")
    values = {name: value.clone() for name, value in model.state_dict().items()} if world_size == 1 else {}
    zo.export_pretrained(model, out / "ours")
    zo.close(model)
    return values


@pytest.mark.door(
    "transformers", load="`zo.load_pretrained`", between="two ranks", save="`zo.export_pretrained`", outcome="right"
)
@pytest.mark.parametrize("family", ["granite-moe-hybrid", "qwen3-moe"])
def test_two_ranks(family: str, tmp_path: Path, pools: RankPools) -> None:
    torch.manual_seed(0)
    build(family).save_pretrained(tmp_path / "theirs")
    pools.of(2).succeed(on_a_rank, family, tmp_path / "theirs", tmp_path)
    assert_same(written(tmp_path / "ours"), written(tmp_path / "theirs"))


@pytest.mark.door(
    "transformers",
    load="`zo.load_pretrained`",
    between="an expert, or a tensor, that is in no file",
    outcome="refused: the missing names",
    instead="the folder, got again",
)
@pytest.mark.parametrize(
    ("family", "words"),
    [("mixtral", "lacks parts of a tensor: 3 of"), ("granite-moe-hybrid", "1 missing in the files")],
)
def test_a_part_that_is_missing_is_one_error(family: str, words: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path / "theirs")
    tensors = written(tmp_path / "theirs")
    lost = next(name for name in tensors if "experts" in name or "input_linear" in name)
    save_file(
        {name: value for name, value in tensors.items() if name != lost}, tmp_path / "theirs" / "model.safetensors"
    )
    with zo.deferred_init(values="skip"):
        model = build(family)
    with pytest.raises(zo.CheckpointError, match=words):
        zo.load_pretrained(model, tmp_path / "theirs")


@pytest.mark.door(
    "transformers", load="`zo.load_pretrained`", between="old names of norms (`gamma`, `beta`)", outcome="right"
)
def test_old_names_of_norms(tmp_path: Path) -> None:
    theirs = build("bert")
    theirs.save_pretrained(tmp_path / "theirs")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, value in written(tmp_path / "theirs").items():
        for new, before in old.items():
            name = name.replace(new, before)
        renamed[name] = value
    assert any(name.endswith("gamma") for name in renamed)
    save_file(renamed, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    model = offloaded("bert", tmp_path / "theirs", tmp_path / "run")
    assert_same(dict(model.state_dict()), theirs.state_dict())
    zo.close(model)


def with_a_head_of_its_own(path: Path) -> dict[str, Tensor]:
    """A folder whose config ties the head, and whose file has another one."""
    build("mixtral", tie_word_embeddings=True).save_pretrained(path)
    tensors = written(path)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.door(
    "transformers",
    load="`zo.load_pretrained`",
    between="two values in the files for tied weights",
    save="`zo.export_pretrained`",
    outcome="right",
)
def test_a_tie_that_the_files_do_not_have(tmp_path: Path) -> None:
    tensors = with_a_head_of_its_own(tmp_path / "theirs")
    with pytest.warns(UserWarning, match=r"two values for lm_head.weight and model.embed_tokens.weight, which its c"):
        model = offloaded("mixtral", tmp_path / "theirs", tmp_path / "run", tie_word_embeddings=True)
    assert torch.equal(model.lm_head.weight.detach(), tensors["lm_head.weight"])
    assert torch.equal(model.model.embed_tokens.weight.detach(), tensors["model.embed_tokens.weight"])
    zo.export_pretrained(model, tmp_path / "ours")
    assert_same(written(tmp_path / "ours"), tensors)
    again = type(model).from_pretrained(tmp_path / "ours")
    assert not again.config.tie_word_embeddings and torch.equal(again.lm_head.weight, tensors["lm_head.weight"])
    zo.close(model)


def test_a_folder_that_does_not_fit_leaves_the_tie(tmp_path: Path) -> None:
    tensors = with_a_head_of_its_own(tmp_path / "theirs")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    with zo.deferred_init(values="skip"):
        model = build("mixtral", tie_word_embeddings=True)
    with pytest.warns(UserWarning), pytest.raises(zo.CheckpointError, match="nothing was changed"):
        zo.load_pretrained(model, tmp_path / "theirs")
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.config.tie_word_embeddings


@pytest.mark.door(
    "transformers",
    load="`zo.load_pretrained` after `zo.offload`",
    between="two values in the files for tied weights",
    outcome="refused: the tie",
    instead="the model built with `tie_word_embeddings=False`",
)
def test_a_tie_of_an_offloaded_model_stays(tmp_path: Path) -> None:
    with_a_head_of_its_own(tmp_path / "theirs")
    model = zo.offload(build("mixtral", tie_word_embeddings=True), zo.OffloadConfig(precision="fp32"))
    with pytest.raises(zo.CheckpointError, match=r"(?s)with different values.*without the tie, as by config.tie_word"):
        zo.load_pretrained(model, tmp_path / "theirs")
    zo.close(model)


def merged(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


@pytest.mark.door(
    "peft, transformers",
    load="`zo.load_pretrained`",
    between="LoRA, merged",
    save='`zo.export_pretrained(adapters="merged")`',
    outcome="right",
)
@pytest.mark.parametrize("family", ["llava", "qwen3-moe"])
def test_merged_adapters(family: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    torch.manual_seed(0)
    theirs = build(family)
    theirs.save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    model: Callable[..., Any] = merged(build(family))
    zo.offload(model, zo.OffloadConfig(precision="fp32", params="nvme", optimizer="nvme", nvme=tmp_path / "run"))
    zo.load_pretrained(model, tmp_path / "base")
    adapters = {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}
    plain = merged(theirs)
    plain.load_state_dict(adapters, strict=False)
    zo.export_pretrained(model, tmp_path / "ours", adapters="merged")
    plain.merge_and_unload().save_pretrained(tmp_path / "theirs")
    assert_same(written(tmp_path / "ours"), written(tmp_path / "theirs"))
    zo.close(model)


def test_ties_beside_a_head_that_is_free(tmp_path: Path) -> None:
    """LUKE ties its head of entities, and not that of words: both embeddings of words are in the files."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.LukeConfig(vocab_size=64, entity_vocab_size=32, entity_emb_size=16, **small)
    model = zo.offload(transformers.LukeForMaskedLM(config), zo.OffloadConfig(precision="fp32"))
    zo.export_pretrained(model, tmp_path / "out")
    again = transformers.LukeForMaskedLM.from_pretrained(tmp_path / "out")
    assert again.config.tie_word_embeddings and again.lm_head.bias is again.lm_head.decoder.bias
    found, expected = again.state_dict(), model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    zo.close(model)
