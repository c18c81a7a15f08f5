"""`zero-offload export` of every kind of run: a folder that from_pretrained loads. `verify` tells what one lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer

import zero_offload as zo
from tests.helpers import folders
from tests.helpers.pairwise import in_turn
from tests.helpers.tool_runs import Spec, train
from zero_offload.cli.main import main

pytestmark = pytest.mark.tools
Capture = pytest.CaptureFixture[str]
SIZES = ("--batch", "2", "--accumulate", "1", "--seq", "48", "--samples", "0", "--steps", "2", "--precision", "fp32")


def _train(model: nn.Module, nvme: Path, **settings: Any) -> tuple[nn.Module, zo.AdamW]:
    """One step of an own loop; the generation has it."""
    zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme, **settings))
    optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    ids = torch.arange(24).view(2, 12)
    out = model(input_ids=ids)
    out.logits.float().square().mean().backward()
    optimizer.step()
    zo.commit(model, optimizer)
    return model, optimizer


def _state(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def _is_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def _words(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "use_cache")}


def _adapter_config(path: Path) -> dict[str, Any]:
    """Lists that peft makes of sets have any order."""
    words = json.loads((path / "adapter_config.json").read_text())
    return {name: sorted(value) if isinstance(value, list) else value for name, value in words.items()}


def _classifier() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=folders.VOCAB, id2label={0: "good", 1: "bad", 2: "none"}, **sizes)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: folders.model("llama"),
    "tied": lambda: folders.model("qwen3", tied=True),
    "gpt2": lambda: folders.model("gpt2"),
    "masked": lambda: folders.model("bert"),
    "classifier": _classifier,
}


@pytest.mark.door(
    "transformers",
    load="`zo.offload`",
    between="heads of words and classes, tied and untied",
    save="`zero-offload export`",
    outcome="right",
)
@in_turn(kind=[*MODELS], dtype=[None, "fp32"])
def test_models_of_transformers(kind: str, dtype: str | None, tmp_path: Path, capsys: Capture) -> None:
    """A run of the user's own loop: config, class, dtype, ties and values are those of the model."""
    model, _ = _train(MODELS[kind](), tmp_path / "nvme")
    zo.export_pretrained(model, tmp_path / "expected", dtype=dtype)
    zo.close(model)
    flags = ["--max-shard-size", "40KB", *([] if dtype is None else ["--dtype", dtype])]
    assert main(["export", str(tmp_path / "nvme"), str(tmp_path / "out"), *flags]) == 0
    loaded = type(model).from_pretrained(tmp_path / "out", dtype="auto")
    expected = type(model).from_pretrained(tmp_path / "expected", dtype="auto")
    assert _is_equal(_state(loaded), _state(expected))
    assert loaded.dtype == expected.dtype == (torch.bfloat16 if dtype is None else torch.float32)
    assert _words(loaded.config) == _words(expected.config)
    if kind != "masked" and kind != "classifier":
        assert loaded.generation_config.to_dict() == expected.generation_config.to_dict()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len({*index["weight_map"].values()}) > 1
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{type(model).__name__}.from_pretrained" in card and str(tmp_path) not in card
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "out")]) == 5
    assert "no tokenizer" in capsys.readouterr().out
    folders.tokenizer().save_pretrained(tmp_path / "out")
    assert main(["verify", str(tmp_path / "out")]) == 0


ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "target_modules": "all-linear"},
    "rslora": {"r": 4, "target_modules": ["q_proj", "down_proj"], "use_rslora": True, "alpha_pattern": {"q_proj": 3}},
    "dora": {"r": 4, "target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "whole modules": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.door(
    "peft, transformers",
    load="`from_pretrained`, then `get_peft_model`",
    between="LoRA, rsLoRA, DoRA, whole modules",
    save="`zo.export_pretrained`, `zero-offload export`, separate and merged",
    outcome="right",
)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_of_an_own_loop(kind: str, tmp_path: Path) -> None:
    """Apart they are what peft saves; merged, what it leaves of the base."""
    base = folders.write_folder(tmp_path / "base")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights="gaussian", **ADAPTERS[kind]))
    _train(model, tmp_path / "nvme", precision="fp32")
    zo.export_pretrained(model, tmp_path / "expected")
    zo.export_pretrained(model, tmp_path / "expected-merged", adapters="merged")
    zo.close(model)
    out, merged = tmp_path / "out", tmp_path / "merged"
    assert main(["export", str(tmp_path / "nvme"), str(out)]) == 0
    assert main(["export", str(tmp_path / "nvme"), str(merged), "--adapters", "merged"]) == 0
    name = "adapter_model.safetensors"
    assert (out / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    assert _adapter_config(out) == _adapter_config(tmp_path / "expected")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(out)
    assert _is_equal(_state(loaded), _state(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "expected")))
    assert str(tmp_path) not in (out / "README.md").read_text()
    read = transformers.AutoModelForCausalLM.from_pretrained
    assert _is_equal(_state(read(merged)), _state(read(tmp_path / "expected-merged")))
    assert main(["verify", str(out)]) == 0


def test_what_adapters_cannot_be(tmp_path: Path, capsys: Capture) -> None:
    model, _ = _train(folders.model(), tmp_path / "nvme")
    zo.close(model)
    assert main(["export", str(tmp_path / "nvme"), str(tmp_path / "out"), "--adapters", "merged"]) == 2
    assert "and generation 1 (step 1" in capsys.readouterr().err


@pytest.mark.door(
    "peft, transformers",
    load="`PeftModel.save_pretrained`, read by `finetune`",
    between="PiSSA, OLoRA, EVA",
    save="`zero-offload export`, separate and merged",
    outcome="right",
)
@pytest.mark.parametrize("init", ["pissa", "olora", "eva"])
def test_a_run_of_an_adapter_whose_beginning_is_computed(init: str, tmp_path: Path) -> None:
    """Both folders have the logits of the trained model: the generation has the base as the adapter left it."""
    base, data = folders.write_folder(tmp_path / "base"), folders.write_instructions(tmp_path / "chat.jsonl", 12)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=init)
    model: Any = get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(tmp_path / "adapter")
    run, out, merged = tmp_path / "run", tmp_path / "out", tmp_path / "merged"
    assert main(["finetune", str(tmp_path / "adapter"), "--data", str(data), "--out", str(run), *SIZES]) == 0
    assert main(["export", str(run), str(out)]) == main(["export", str(run), str(merged), "--adapters", "merged"]) == 0
    weights = "adapter_model.safetensors"
    assert _is_equal(load_file(out / weights), load_file(run / weights))
    assert _adapter_config(out) == _adapter_config(run) and _adapter_config(out)["init_lora_weights"] == init
    ids = torch.arange(24).view(2, 12)
    expected = peft.AutoPeftModelForCausalLM.from_pretrained(run).eval()(input_ids=ids).logits
    found = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()(input_ids=ids).logits
    assert torch.allclose(found, expected, atol=5e-6)  # one product instead of two


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_a_classifier_with_an_adapter(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are in no file of the base are the adapter's: a pooler, a layer before the last. So are the names of
    the classes. Each load, by the card too, has the logits of the folder with both merged."""
    if kind == "bert":
        base = folders.write_folder(tmp_path / "base", "bert")
    else:
        sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2, "vocab_size": folders.VOCAB}
        model = transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**sizes))
        model.save_pretrained(base := tmp_path / "base")
        folders.tokenizer().save_pretrained(base)
    names = ("good", "bad", "none")
    rows = [{"text": text, "label": names[i % 3]} for i, (_, text) in enumerate(folders.descriptions()[:12])]
    data, run = folders.write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "run"
    flags = ["--data", str(data), "--method", "classify"]
    assert main(["finetune", str(base), "--out", str(run), *flags, *SIZES, "--lora", "4", "--merge"]) == 0
    read, ids = transformers.AutoModelForSequenceClassification.from_pretrained, torch.arange(24).view(2, 12)
    merged = read(run / "merged")
    assert merged.config.id2label == dict(enumerate(sorted(names)))
    expected = merged.eval()(input_ids=ids).logits
    assert main(["export", str(run), str(out := tmp_path / "out")]) == 0
    assert main(["export", str(run), str(tmp_path / "merged"), "--adapters", "merged"]) == 0
    assert torch.equal(read(tmp_path / "merged").eval()(input_ids=ids).logits, expected)
    for folder in (run, out):
        code = (folder / "README.md").read_text().split("```")[1].removeprefix("python\n")
        monkeypatch.chdir(folder)
        exec(code.replace("path/to/the/base", str(base)), found := dict[str, Any]())
        assert torch.allclose(found["model"].eval()(input_ids=ids).logits, expected, atol=5e-6)
        assert found["model"].config.id2label == merged.config.id2label
        assert main(["evaluate", str(folder), *flags]) == 0
    again = ["finetune", str(out), "--out", str(tmp_path / "again"), *flags, *SIZES]
    assert main(again) == 0


def test_an_adapter_whose_folder_lacks_what_it_has_done_to_the_base(tmp_path: Path, capsys: Capture) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa_niter_4")
    changed: Any = get_peft_model(folders.model(), config)
    _train(changed, tmp_path / "changed", precision="fp32")
    ids = torch.arange(24).view(2, 12)
    expected = changed.eval()(input_ids=ids).logits
    zo.close(changed)
    assert main(["export", str(tmp_path / "changed"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "init_lora_weights='pissa_niter_4', which has changed the base's weights" in said
    assert "--adapters merged" in said and not (tmp_path / "out").exists()
    assert main(["export", str(tmp_path / "changed"), str(tmp_path / "out"), "--adapters", "merged"]) == 0
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(input_ids=ids).logits
    assert torch.allclose(found, expected, atol=5e-6)


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(logits=self.inner(input_ids[:, :8].to(self.inner.weight.dtype)))


def test_a_model_without_a_config_says_what_is_missing(tmp_path: Path, capsys: Capture) -> None:
    model, _ = _train(_Own(), tmp_path / "nvme")
    zo.close(model)
    assert main(["export", str(tmp_path / "nvme"), str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == ["README.md", "model.safetensors"] and "there is no config.json" in told["notes"][0]
    assert main(["verify", str(tmp_path / "out")]) == 5
    assert "no config.json, so nothing says what model it is" in capsys.readouterr().out


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_of_finetune(lora: bool, tmp_path: Path) -> None:
    """An export of the last generation has the files that the run has put into OUT."""
    base = folders.write_folder(tmp_path / "base")
    data, run, out = folders.write_instructions(tmp_path / "chat.jsonl", 12), tmp_path / "run", tmp_path / "out"
    flags = ["--lora", "4", "--merge"] if lora else []
    assert main(["finetune", str(base), "--data", str(data), "--out", str(run), *SIZES, *flags]) == 0
    assert main(["export", str(run), str(out)]) == 0
    weights = "adapter_model.safetensors" if lora else "model.safetensors"
    assert _is_equal(load_file(out / weights), load_file(run / weights))
    if lora:
        assert _adapter_config(out) == _adapter_config(run)
        assert main(["export", str(run), str(tmp_path / "merged"), "--adapters", "merged"]) == 0
        of_run = load_file(run / "merged" / "model.safetensors")
        assert _is_equal(load_file(tmp_path / "merged" / "model.safetensors"), of_run)
    assert AutoTokenizer.from_pretrained(out).chat_template == folders.CHATML
    assert (out / "generation_config.json").is_file()
    assert main(["verify", str(run)]) == main(["verify", str(out)]) == 0


@pytest.mark.door("transformers", load="checkpoint of `OffloadTrainer`", save="`zero-offload export`", outcome="right")
def test_a_checkpoint_of_a_trainer(tmp_path: Path) -> None:
    spec = Spec(tmp_path / "out", None, args={"save_strategy": "steps", "save_steps": 2, "max_steps": 2})
    train(spec)
    place = tmp_path / "out" / "checkpoint-2"
    assert main(["export", str(place), str(tmp_path / "exported")]) == 0
    read = transformers.AutoModelForCausalLM.from_pretrained
    assert _is_equal(_state(read(tmp_path / "exported")), _state(read(place)))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "config": (lambda path: (path / "config.json").unlink(), "no config.json"),
    "config that is cut": (lambda path: (path / "config.json").write_text("{"), "config.json cannot be read"),
    "tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "no tokenizer"),
    "shard": (lambda path: next(path.glob("model-00002*")).unlink(), "model-00002"),
    "index": (lambda path: (path / "model.safetensors.index.json").unlink(), "model.safetensors.index.json"),
    "bytes": (lambda path: next(path.glob("model-00002*")).write_bytes(b"x"), "model-00002"),
    "tensors": (lambda path: _without(path, "mlp.up_proj.weight"), "2 tensors of LlamaForCausalLM are in no file"),
    "shape": (lambda path: _with_config(path, intermediate_size=64), "6 tensors have another shape"),
    "class": (lambda path: _with_config(path, model_type=None), "config.json has no model_type"),
}


def _without(path: Path, end: str) -> None:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    for file in {*index["weight_map"].values()}:
        kept = {name: each for name, each in load_file(path / file).items() if not name.endswith(end)}
        save_file(kept, path / file)
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not name.endswith(end)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _with_config(path: Path, **changes: Any) -> None:
    words = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({name: each for name, each in words.items() if each is not None}))


@pytest.mark.parametrize("what", DAMAGE)
def test_verify_says_what_a_folder_lacks(what: str, tmp_path: Path, capsys: Capture) -> None:
    path = folders.write_folder(tmp_path / "model", sharded=True)
    assert main(["verify", str(path)]) == 0
    assert "complete" in capsys.readouterr().out
    damage, says = DAMAGE[what]
    damage(path)
    assert main(["verify", str(path)]) == 5
    assert "INCOMPLETE" in (said := capsys.readouterr().out) and says in said
    assert main(["verify", str(path), "--json"]) == 5
    assert says in json.loads(capsys.readouterr().out)["model"]["problems"][0]


def test_verify_of_an_adapter(tmp_path: Path, capsys: Capture) -> None:
    get_peft_model(folders.model(), LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    assert main(["verify", str(tmp_path / "adapter")]) == 0
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    assert main(["verify", str(tmp_path / "adapter")]) == 5
    assert "no adapter_config.json" in capsys.readouterr().out
