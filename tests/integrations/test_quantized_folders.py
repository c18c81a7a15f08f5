"""Folders of models that bitsandbytes has quantized already: read as they are, by programs and by the command."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

import zero_offload as zo
from tests.helpers import folders
from tests.helpers.tools import WHERE, Tokens
from zero_offload.cli.main import main
from zero_offload.model.api import need_runtime
from zero_offload.plan.quantized import offloaded_tensors

pytestmark = pytest.mark.tools

DTYPE = torch.bfloat16
KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": DTYPE},
    "fp4, computed in fp32": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nf4-double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": DTYPE,
    },
    "int8": {"load_in_8bit": True},
}
SIZES = ("--batch", 2, "--accumulate", 1, "--seq", 64, "--lr", "1e-3", "--warmup", 0, "--commit-every", 1, "--lora", 4)

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """As transformers writes it, of one kind; with a tokenizer."""
    place = tmp_path_factory.mktemp("quantized")

    def written(kind: str) -> Path:
        if not (place / kind).exists():
            base = folders.write_folder(place / f"{kind} base", dtype="bfloat16", attention_bias="fp32" not in kind)
            config = transformers.BitsAndBytesConfig(**KINDS[kind])
            whole = transformers.AutoModelForCausalLM.from_pretrained(
                base, quantization_config=config, device_map="cpu"
            )
            whole.save_pretrained(place / kind)
            folders.tokenizer().save_pretrained(place / kind)
        return place / kind

    return written


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write_instructions(tmp_path_factory.mktemp("data") / "chat.jsonl", 24)


def in_memory(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")


def planned(folder: Path) -> Any:
    with zo.deferred_init(values="skip"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    zo.load_pretrained(model, folder)
    return model


def adapted(base: nn.Module) -> Any:
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(base, config, autocast_adapter_dtype=False).train()
    for param in model.parameters():
        if param.requires_grad:  # peft makes them fp32 beside integers, which precision="bf16" does not
            param.data = param.data.to(DTYPE)
    return model


def losses(model: nn.Module) -> list[float]:
    optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    found = []
    for step in range(3):
        ids = Tokens(8)[step]["input_ids"][None]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def on(where: str, place: Path) -> zo.OffloadConfig:
    more: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "nvme": place} if where == "nvme" else {}
    return zo.OffloadConfig(precision="bf16", **more)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_from_pretrained(folder: Folder, tmp_path: Path, kind: str, where: str) -> None:
    """In memory. Weights on a drive stay in the folder."""
    theirs, ours = adapted(in_memory(folder(kind))), adapted(planned(folder(kind)))
    assert [type(layer) for layer in ours.modules()] == [type(layer) for layer in theirs.modules()]
    zo.offload(ours, on(where, tmp_path / "nvme"))
    owner = need_runtime(ours, "this test")
    sections = [section for unit in owner.units for section in unit.sections]
    packed = [section for section in sections if section.layout.dtype in (torch.uint8, torch.int8)]
    assert packed and all(section.shard.base is not None for section in packed)
    assert losses(ours) == losses(theirs)
    zo.close(ours)


@pytest.mark.door(
    "bitsandbytes, transformers",
    load="`zo.load_pretrained`",
    between="folders of nf4, nf4-double, fp4, int8",
    outcome="right",
)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_those_of_the_files(folder: Folder, kind: str) -> None:
    expected = dict(offloaded_tensors(in_memory(folder(kind))))
    model = zo.offload(planned(folder(kind)), zo.OffloadConfig(precision="bf16"))
    with zo.gathered(model) as values:
        assert values.keys() == expected.keys()
        for name, tensor in expected.items():
            assert values[name].dtype == tensor.dtype and torch.equal(values[name], tensor), name
    zo.close(model)


def test_a_bias_of_another_dtype_than_the_layer_computes_in(folder: Folder) -> None:
    """bitsandbytes would convert it in place."""
    model = planned(folder("nf4"))
    with pytest.raises(zo.ConfigError, match="computes in torch.bfloat16 and has a bias of torch.float32"):
        zo.offload(model, zo.OffloadConfig(precision="fp32"))


def test_what_does_not_fit_is_one_error(folder: Folder, tmp_path: Path) -> None:
    path = folder("nf4")
    with pytest.raises(zo.ConfigError, match="quantized already; leave quantize='int8' out"):
        zo.load_pretrained(deferred(path), path, quantize="int8")
    with pytest.raises(zo.ConfigError, match="peft.get_peft_model"):
        with zo.deferred_init(values="skip"):
            model = get_peft_model(folders.model(), LoraConfig(target_modules="all-linear"))
        zo.load_pretrained(model, path)
    broken = shutil.copytree(path, tmp_path / "broken")
    words = json.loads((broken / "config.json").read_text())
    words["quantization_config"]["bnb_4bit_quant_type"] = "fp4"
    (broken / "config.json").write_text(json.dumps(words))
    model = deferred(broken)
    before = dict(model.named_modules())
    with pytest.raises(zo.CheckpointError, match="nothing was changed"):
        zo.load_pretrained(model, broken)
    assert all(model.get_submodule(name) is module for name, module in before.items())
    assert isinstance(model.config.quantization_config, dict)


def deferred(folder: Path) -> Any:
    with zo.deferred_init(values="skip"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))


@pytest.mark.door(
    "transformers",
    load="`zo.load_pretrained`, `zero-offload plan`",
    between="folders of GPTQ, AWQ, compressed-tensors, torchao",
    outcome="refused: the method",
    instead="the folder that was quantized, with `quantize=`",
)
@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "torchao"])
def test_other_libraries_folders_are_refused(
    folder: Folder, tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One error, which says what to do instead, before weights are looked at."""
    path = tmp_path / "model"
    path.mkdir()
    words = json.loads((folder("nf4") / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(words | {"quantization_config": {"quant_method": method}}))
    assert main(["plan", str(path), "--lora", "4"]) == 2
    says = capsys.readouterr().err
    assert f"is quantized ({method})" in says and "--lora 16 --quantize nf4" in says and says.count("\n") == 1
    with pytest.raises(zo.ConfigError, match=rf"\({method}\).*Give the folder of the model that was quantized"):
        zo.load_pretrained(deferred(folder("nf4")), path)


# The command


def rows_of(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def run(*words: object) -> int:
    tools.reset_accelerate()
    return main([*map(str, words)])


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_command_trains_on_it(
    folder: Folder, data: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """nf4 in two starts; then the adapter's folder talks, and its loss is that of the library's model."""
    starts = (2, 4) if kind == "nf4" else (4,)
    for tier in ("cpu", "nvme"):
        for steps in starts:
            flags = (*SIZES, "--out", tmp_path / tier, "--params-tier", tier, "--steps", steps)
            assert run("finetune", folder(kind), "--data", data, *flags) == 0
    assert rows_of(tmp_path / "cpu") == rows_of(tmp_path / "nvme") and len(rows_of(tmp_path / "nvme")) == 4
    capsys.readouterr()
    found = {}
    for path in (folder(kind), tmp_path / "nvme"):
        assert run("evaluate", path, "--data", data, "--json", "--batch", 1) == 0
        found[path] = json.loads(capsys.readouterr().out)["loss"]
        monkeypatch.setattr(sys, "stdin", io.StringIO("What does abs do?\n"))
        assert run("chat", path, "--json", "--max-new-tokens", 3) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] > 0
    assert found[tmp_path / "nvme"] < found[folder(kind)]
    assert "quantization_config" in json.loads((folder(kind) / "config.json").read_text())


def test_a_plan_needs_the_config_alone(folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy(folder("nf4") / "config.json", tmp_path / "model")
    found = []
    for path in (folder("nf4"), tmp_path / "model"):
        assert run("plan", path, "--lora", 4, "--json") == 0
        plan = json.loads(capsys.readouterr().out)
        del plan["bytes"]["program"]  # of the process itself, measured
        found.append([plan[name] for name in ("parameters", "trained_parameters", "bytes", "step_s")])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "flags, says",
    [
        ((), "nothing would be trained; add --lora RANK"),
        (("--lora", 4, "--merge"), "are quantized. Give the folder of the model that was quantized"),
        (("--lora", 4, "--quantize", "nf4"), "is quantized already, by bitsandbytes; leave --quantize nf4 out"),
    ],
)
@pytest.mark.parametrize("command", ["finetune", "plan"])
def test_flags_that_do_not_go_with_it(
    folder: Folder, data: Path, tmp_path: Path, command: str, flags: tuple[object, ...], says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    more = ("--out", tmp_path / "out") if command == "finetune" else ()
    assert run(command, folder("nf4"), "--data", data, *more, *flags) == 2
    assert says in capsys.readouterr().err
