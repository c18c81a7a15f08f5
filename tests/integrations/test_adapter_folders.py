"""Adapter folders that peft has written: the logits of the model that was saved, or an error that names the kind."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # noqa: F401  # isort: skip
import peft
import torch
import transformers
from peft import LoraConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file, save_file
from torch import Tensor

import zero_offload as zo
from tests.helpers.folders import write_folder
from zero_offload.finetune.model.build import build_model
from zero_offload.finetune.model.folder import open_folder
from zero_offload.integrations.adapter_kinds import BASE_INITS, FILE_INITS, LOADED_KINDS, LORA_FIELDS, UNUSED_FIELDS

TOKENS = torch.arange(5, 45).view(2, 20)
IN_MEMORY: dict[str, Any] = {"params": "cpu", "grads": "cpu", "optimizer": "cpu", "precision": "fp32"}
LAYERS = ["q_proj", "o_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "BEFT": {}, "BOFT": {"boft_block_size": 4}, "C3A": {"block_size": 4}, "DEFT": {}, "FOURIERFT": {"n_frequency": 10},
    "GRALORA": {}, "HIRA": {}, "HRA": {}, "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": [
    "down_proj"]}, "LILY": {}, "LN_TUNING": {"target_modules": ["input_layernorm"]}, "LOHA": {}, "LOKR": {}, "LORA": {},
    "MISS": {"r": 4}, "OFT": {"oft_block_size": 4}, "PEANUT": {}, "ROAD": {"group_size": 16}, "UNILORA": {},
    "VBLORA": {"num_vectors": 16, "vector_length": 4, "topk": 2, "r": 4}, "WAVEFT": {"n_frequency": 20},
}  # fmt: skip
"""Settings of each kind that is loaded, beside layers."""
LORAS: dict[str, dict[str, Any]] = {
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora", "use_dora": True},
    "pissa-of-other-ranks": {
        "init_lora_weights": "pissa", "use_rslora": True, "lora_alpha": 5, "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"o_proj": 3},
    },
    "pissa-in-blocks-of-one-weight": {"init_lora_weights": "pissa", "layer_replication": [[0, 2], [1, 2]]},
    "pissa-beside-an-embedding": {
        "init_lora_weights": "pissa", "target_modules": ["q_proj", "embed_tokens", "lm_head"],
    },
    "eva": {"init_lora_weights": "eva"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "gaussian": {"init_lora_weights": "gaussian", "use_dora": True, "use_rslora": True},
    "random": {"init_lora_weights": False, "bias": "all"},
    "biases-of-its-own": {"lora_bias": True},
    "one-block": {"layers_to_transform": [1], "layers_pattern": "layers", "exclude_modules": ["o_proj"]},
    "a-parameter": {"target_parameters": ["q_proj.weight"], "target_modules": ["o_proj"]},
    "a-whole-head": {"modules_to_save": ["lm_head"]},
}  # fmt: skip
NO_MERGE = {"pissa-in-blocks-of-one-weight": "is the same weight", "biases-of-its-own": "Impossible to merge"}
REFUSED: dict[str, dict[str, Any]] = {
    "pissa_niter_4": {"init_lora_weights": "pissa_niter_4"},
    "corda": {"init_lora_weights": "corda"},
    "lora_ga": {"init_lora_weights": "lora_ga"},
    "loftq": {"init_lora_weights": "loftq"},
    "mica": {"init_lora_weights": "mica"},
    "an init of tomorrow": {"init_lora_weights": "an init of tomorrow"},
    "target_parameters": {"init_lora_weights": "pissa", "target_parameters": ["q_proj.weight"]},
    "kasa_config": {"kasa_config": {"beta": 0.1}},
    "monteclora_config": {"monteclora_config": {"num_samples": 2}},
    "velora_config": {"velora_config": {"scale": 1.0}},
    "arrow_config": {"arrow_config": {"top_k": 2}},
    "use_bdlora": {"use_bdlora": {"nblocks": 2}},
    "use_qalora": {"use_qalora": True},
    "alora_invocation_tokens": {"alora_invocation_tokens": [5, 6]},
    "trainable_token_indices": {"trainable_token_indices": [5]},
    "megatron_config": {"megatron_config": {"hidden_size": 4}},
    "a_field_of_tomorrow": {"a_field_of_tomorrow": 3},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_key_value_heads": 4, "hidden_size": 32, "intermediate_size": 64}
    return write_folder(tmp_path_factory.mktemp("folders") / "base", **sizes)


@pytest.fixture
def lora(base: Path, tmp_path: Path) -> Path:
    _save(_adapted(base, LoraConfig(r=4, target_modules=LAYERS)), base, tmp_path / "lora")
    return tmp_path / "lora"


def _plain(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path)


def _adapted(path: Path, config: Any) -> Any:
    """As after a training: all that is trained has moved."""
    torch.manual_seed(1)
    model = peft.get_peft_model(_plain(path), config)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param) * 0.05)
    return model


def _save(model: Any, path: Path, out: Path) -> None:
    model.peft_config["default"].base_model_name_or_path = str(path)
    model.save_pretrained(out)


def _seen(model: Any) -> tuple[Tensor, float]:
    """Logits and loss."""
    with torch.no_grad():
        found = model.eval()(TOKENS, labels=TOKENS)
    return found.logits, found.loss.item()


def _words(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _read(folder: Path, *, trains: bool = False) -> Any:
    """Built with other random numbers than the adapter."""
    return build_model(open_folder(folder), zo.OffloadConfig(**IN_MEMORY), None, seed=7, trains=trains)


def _check_read(path: Path, config: Any, folder: Path) -> tuple[Any, Tensor]:
    """Has the logits and the loss of the model that was saved; returns it with these logits."""
    plain = _adapted(path, config)
    expected = _seen(plain)
    _save(plain, path, folder)
    model = _read(folder)
    found = _seen(model)
    assert torch.equal(found[0], expected[0]) and found[1] == expected[1]
    with plain.disable_adapter():
        assert not torch.allclose(_seen(plain)[0], expected[0], atol=1e-4)
    return model, expected[0]


def _check(path: Path, config: Any, tmp_path: Path, no_merge: str | None = None) -> None:
    """Read, merged, and written again as it would be trained on."""
    model, expected = _check_read(path, config, tmp_path / "adapter")
    if no_merge is None:
        zo.export_pretrained(model, tmp_path / "merged", adapters="merged")
        # One product instead of two: other roundings.
        assert torch.allclose(_seen(_plain(tmp_path / "merged"))[0], expected, atol=5e-6)
    else:
        with pytest.raises(zo.ConfigError, match=no_merge):
            zo.export_pretrained(model, tmp_path / "merged", adapters="merged")
    zo.close(model)
    model = _read(tmp_path / "adapter", trains=True)
    zo.export_pretrained(model, tmp_path / "again")
    zo.close(model)
    assert torch.equal(_seen(peft.PeftModel.from_pretrained(_plain(path), tmp_path / "again"))[0], expected)


@pytest.mark.door(
    "peft, transformers",
    load="`PeftModel.save_pretrained`, read by `finetune`, `chat`",
    between="LoRA with each init, DoRA, rsLoRA, patterns",
    save="`zo.export_pretrained`, separate and merged",
    outcome="right",
)
@pytest.mark.parametrize("name", LORAS)
def test_loras(name: str, base: Path, tmp_path: Path) -> None:
    config = LoraConfig(**{"r": 4, "target_modules": LAYERS, "task_type": "CAUSAL_LM"} | LORAS[name])
    _check(base, config, tmp_path, NO_MERGE.get(name))


def _config(kind: str) -> Any:
    settings = {"target_modules": ["q_proj", "o_proj"], "task_type": "CAUSAL_LM"} | KINDS[kind]
    return PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](**settings)


@pytest.mark.door(
    "peft, transformers",
    load="`PeftModel.save_pretrained`, read by `finetune`, `chat`",
    between="each other kind that is loaded",
    outcome="right",
)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_other_kinds(kind: str, base: Path, tmp_path: Path) -> None:
    zo.close(_check_read(base, _config(kind), tmp_path / "adapter")[0])


@pytest.mark.door(
    "peft, transformers",
    load="`PeftModel.save_pretrained`, read by `finetune`, `chat`",
    between="each other kind that is loaded",
    save="`zo.export_pretrained`, separate and merged",
    outcome="right",
)
@pytest.mark.full
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_other_kinds_are_merged_and_written(kind: str, base: Path, tmp_path: Path) -> None:
    _check(base, _config(kind), tmp_path, {"BEFT": "no bias", "LILY": "not supported"}.get(kind))


@pytest.mark.door(
    "peft",
    load="`PeftModel.save_pretrained`, read by `finetune`, `chat`",
    between="kinds that change the base, or of later versions",
    outcome="refused: the kind",
    instead="a merge by peft, in memory",
)
def test_every_kind_of_peft_is_loaded_or_refused_by_its_name(lora: Path) -> None:
    assert KINDS.keys() == LOADED_KINDS
    for kind in {each.value for each in PeftType} - LOADED_KINDS | {"A_KIND_OF_TOMORROW"}:
        _words(lora, peft_type=kind)
        with pytest.raises(zo.ConfigError, match=f"peft_type='{kind}' is ") as raised:
            open_folder(lora)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_peft_does_beside_the_files_is_refused_by_its_name(name: str, lora: Path) -> None:
    _words(lora, **REFUSED[name])
    with pytest.raises(zo.ConfigError, match=name) as raised:
        open_folder(lora)
    assert "\n" not in str(raised.value)


def test_each_field_of_lora_is_used_or_refused() -> None:
    fields = {each.name for each in dataclasses.fields(LoraConfig)}
    refused = {name for changes in REFUSED.values() for name in changes} - {"a_field_of_tomorrow"}
    assert fields == (LORA_FIELDS | UNUSED_FIELDS | refused) & fields
    assert not UNUSED_FIELDS & (LORA_FIELDS | refused)
    assert not {*FILE_INITS, *BASE_INITS} & {changes.get("init_lora_weights") for changes in REFUSED.values()} - {
        None, "pissa"
    }  # fmt: skip


def test_an_adapter_that_peft_has_converted_is_plain_lora(base: Path, tmp_path: Path) -> None:
    """So are those of the inits that are refused otherwise."""
    settings: dict[str, Any] = {"r": 4, "target_modules": LAYERS, "init_lora_weights": "pissa_niter_4"}
    torch.manual_seed(1)
    model = peft.get_peft_model(_plain(base), LoraConfig(**settings))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "init")
    model.peft_config["default"].init_lora_weights = "pissa_niter_4"
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param) * 0.05)
    expected, _ = _seen(model)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(tmp_path / "adapter", path_initial_model_for_weight_conversion=str(tmp_path / "init"))
    model = _read(tmp_path / "adapter")
    # The base's weights come from a sum of three.
    assert torch.allclose(_seen(model)[0], expected, atol=5e-6)
    zo.close(model)


@pytest.mark.parametrize(("kind", "dtype"), [("gpt2", "float32"), ("qwen3", "bfloat16")])
def test_the_base_is_changed_in_the_dtype_of_its_files(kind: str, dtype: str, tmp_path: Path) -> None:
    """GPT-2 keeps its weights transposed."""
    small = {"n_embd": 32, "pad_token_id": None} if kind == "gpt2" else {}
    path = write_folder(tmp_path / "base", kind, dtype=dtype, **small)
    layers = ["c_attn"] if kind == "gpt2" else ["q_proj"]
    plain = _adapted(path, LoraConfig(r=4, target_modules=layers, init_lora_weights="pissa"))
    _save(plain, path, tmp_path / "adapter")
    expected, _ = _seen(plain.float())
    for params in ("cpu", "nvme"):
        settings = IN_MEMORY | {"params": params, "nvme": tmp_path / "nvme"}
        model = build_model(open_folder(tmp_path / "adapter"), zo.OffloadConfig(**settings), None, trains=False)
        assert torch.equal(_seen(model)[0], expected)
        zo.close(model)


def test_a_base_in_few_bits_has_no_part_to_take_out(lora: Path) -> None:
    _words(lora, init_lora_weights="pissa")
    with pytest.raises(zo.ConfigError, match="init_lora_weights='pissa' .*leave --quantize out"):
        open_folder(lora, quantize="nf4")


def _without(folder: Path, part: str) -> None:
    file = folder / "adapter_model.safetensors"
    values = load_file(file)
    values.pop(next(name for name in values if part in name))
    save_file(values, file)


def test_a_parameter_without_a_value_stops_the_load(lora: Path) -> None:
    _without(lora, "lora_A")
    with pytest.raises(zo.CheckpointError, match="missing in the files.*lora_A"):
        _read(lora)


def test_memory_that_nothing_fills_is_no_value(base: Path) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filled = torch.nn.Parameter(torch.zeros(3))
            self.blank = torch.nn.Parameter(torch.empty(3))

    with zo.deferred_init(values="skip"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(base))
        peft.inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj"]), model)
        model.model.layers[0].self_attn.q_proj.lora_A["default"].scaled = Scaled()
    with pytest.raises(zo.ConfigError, match=r"1 parameters are in no file.*scaled\.blank"):
        zo.load_pretrained(model, base)


def test_a_head_that_no_file_has_is_not_drawn_for_reading(tmp_path: Path) -> None:
    folder = open_folder(write_folder(tmp_path / "base", "bert"), "classify").with_labels(["a", "b"])
    with pytest.raises(zo.CheckpointError, match=r"missing in the files: .*classifier"):
        build_model(folder, zo.OffloadConfig(**IN_MEMORY), None, trains=False)


@pytest.fixture
def other(lora: Path, tmp_path: Path) -> Iterator[Path]:
    yield shutil.copytree(lora, tmp_path / "other")


def test_folders_that_are_no_adapters_of_a_base(lora: Path, other: Path) -> None:
    """Of an adapter, pickled, and only around another one."""
    _words(lora, base_model_name_or_path=str(other))
    with pytest.raises(zo.ConfigError, match="is an adapter itself. Merge that one first"):
        open_folder(lora)
    (other / "adapter_model.safetensors").rename(other / "adapter_model.bin")
    with pytest.raises(zo.ConfigError, match="pickled: loading it runs code. Convert it once"):
        open_folder(other)
    shutil.move(other, lora / "other")
    (lora / "adapter_config.json").unlink()
    with pytest.raises(zo.ConfigError, match=rf"has no config.json.*give {lora / 'other'}"):
        open_folder(lora)
