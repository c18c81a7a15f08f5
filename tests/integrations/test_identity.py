"""All that a run is made of is compared at every start, by value: a field that changes is named, or in a list."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import torch
import transformers
from peft import LoraConfig, PeftConfig, get_peft_model

import zero_offload as zo
from tests.helpers import folders
from zero_offload.checkpoint.run_dir import RunDir
from zero_offload.cli.main import main
from zero_offload.finetune import run as finetune_run
from zero_offload.finetune.choices import Lora
from zero_offload.finetune.identity import made_of
from zero_offload.finetune.model.folder import ModelFolder, open_folder
from zero_offload.finetune.settings import FinetuneConfig
from zero_offload.integrations import identity
from zero_offload.integrations.identity import first_difference
from zero_offload.model import about
from zero_offload.model.about import config_values
from zero_offload.runs import resume
from zero_offload.runs.resume import find_existing

pytestmark = pytest.mark.tools

SIZES = ("--batch", "2", "--accumulate", "1", "--seq", "64", "--precision", "fp32", "--commit-every", "1")


def change(file: Path, **changes: Any) -> None:
    words = json.loads(file.read_text())
    for name, value in changes.items():
        place, *inner = name.split("__")
        at = words
        for each in inner:
            at, place = at[place], each
        at[place] = value
    file.write_text(json.dumps(words))


def other(value: Any) -> Any:
    """A value of the same kind that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2 + 0.25
    if isinstance(value, list):
        return [*value, other(value[-1]) if value else 1]
    if isinstance(value, dict):
        return {**value, "other": 1}
    return f"{value}x" if isinstance(value, str) else 1


# Values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write_folder(tmp_path_factory.mktemp("identity") / "model")


def test_a_config_that_is_written_again_is_the_same(folder: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder, tmp_path / "model"))
    before = made_of(open_folder(path))
    words = json.loads((path / "config.json").read_text())
    theta = words.pop("rope_parameters")["rope_theta"]
    again = {"torch_dtype": words.pop("dtype"), "transformers_version": "4.40.0", "rope_theta": theta}
    again |= {"rope_scaling": None, "mlp_bias": False, "architectures": None, "use_cache": False}
    assert "mlp_bias" in words and "dtype" not in words
    (path / "config.json").write_text(json.dumps(dict(reversed((words | again).items()))))
    assert first_difference(before, made_of(open_folder(path))) is None
    transformers.AutoConfig.from_pretrained(path).save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(path).save_pretrained(path)
    assert first_difference(before, made_of(open_folder(path))) is None


KINDS = ("llama", "gpt2", "qwen3_moe", "gemma3", "mamba2", "mixtral", "phi3", "olmo2", "gpt_oss", "llava")


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_of_a_config_is_named_or_in_the_list(kind: str, tmp_path: Path) -> None:
    """Changed in the file, and read as a start reads it. A value that the class refuses starts nothing."""
    config = transformers.AutoConfig.for_model(kind)
    config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    text = file.read_text()
    first = transformers.AutoConfig.from_pretrained(tmp_path)
    before = config_values(first)
    assert json.loads(json.dumps(before, allow_nan=False)) == before
    num = {"named": 0, "listed": 0, "refused": 0, "ignored": 0}
    for names, value in [*leaves(json.loads(text)), *leaves(before), (("attn_implementation",), "sdpa")]:
        words = json.loads(text)
        at = words
        for name in names[:-1]:
            at = at.setdefault(name, {})
        at[names[-1]] = other(value)
        file.write_text(json.dumps(words))
        try:
            changed = transformers.AutoConfig.from_pretrained(tmp_path)
        except Exception:  # of any config's class
            num["refused"] += 1
            continue
        found = first_difference(before, config_values(changed))
        if {*names} & {*about.CONFIG_MAY_CHANGE, "model_type"}:
            num["listed"] += 1
            assert found is None or "model_type" in names, names
        elif found is None:  # the class takes no notice
            assert seen(changed, names) == seen(first, names), names
            num["ignored"] += 1
        else:
            num["named"] += 1
    print(kind, num)
    assert num["named"] > 20


def seen(config: Any, names: tuple[str, ...]) -> Any:
    """The value that a model would find."""
    for name in names:
        inner = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
        config = getattr(config, f"_{name}", None) if inner is None else inner
    return config


def leaves(words: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in words.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*above, name))
        else:
            yield (*above, name), value


def test_each_field_of_an_adapter_is_named_or_in_the_list(folder: Path, tmp_path: Path) -> None:
    LoraConfig(target_modules=["q_proj"], base_model_name_or_path=str(folder)).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    text = file.read_text()
    before = about.adapter_values(PeftConfig.from_pretrained(str(tmp_path)))
    num_named = 0
    for name, value in json.loads(text).items():
        if name == "peft_type":
            continue
        change(file, **{name: other(value)})
        try:
            changed = PeftConfig.from_pretrained(str(tmp_path))
        except Exception:  # of any adapter's class
            continue
        finally:
            file.write_text(text)
        found = first_difference(before, about.adapter_values(changed))
        is_ignored = getattr(changed, name, None) == json.loads(text)[name]
        assert (found is None) == (is_ignored or name in about.ADAPTER_MAY_CHANGE), name
        num_named += found is not None
    assert num_named > 20
    change(file, target_modules=["q_proj"], r=8, peft_version="0.1")
    assert first_difference(before, about.adapter_values(PeftConfig.from_pretrained(str(tmp_path)))) is None


def test_what_ranks_compare_of_a_model_decides_numbers(folder: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found = about.deciding_values(get_peft_model(base, LoraConfig(lora_alpha=24, target_modules=["q_proj"])))
    assert found["peft_config.default.lora_alpha"] == "24"
    assert not [name for name in found if str(folder) in found[name] or name.endswith("transformers_version")]
    configs = [name for name in found if name.endswith("config.attention_dropout")]
    assert len(configs) == 1 and found[configs[0]] == repr(base.config.attention_dropout)


def _edit_token(words: dict[str, Any]) -> None:
    words["added_tokens"][1]["lstrip"] = True


def _edit_vocab(words: dict[str, Any]) -> None:
    vocab = words["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def _edit_merges(words: dict[str, Any]) -> None:
    words["model"]["merges"] = words["model"]["merges"][:-1]


def _edit_normalizer(words: dict[str, Any]) -> None:
    words["normalizer"] = {"type": "NFC"}


def _edit_pre_tokenizer(words: dict[str, Any]) -> None:
    words["pre_tokenizer"]["add_prefix_space"] = True


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (_edit_token, "added_tokens.1.lstrip"),
        (_edit_vocab, "model.vocab"),
        (_edit_merges, "model.merges"),
        (_edit_normalizer, "normalizer"),
        (_edit_pre_tokenizer, "pre_tokenizer.add_prefix_space"),
    ],
)
def test_what_of_a_tokenizer_decides_tokens(
    folder: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None], name: str
) -> None:
    path = Path(shutil.copytree(folder, tmp_path / "model"))
    before = made_of(open_folder(path))
    words = json.loads((path / "tokenizer.json").read_text())
    edit(words)
    (path / "tokenizer.json").write_text(json.dumps(words))
    found = first_difference(before, made_of(open_folder(path)))
    assert found is not None and found.name == f"tokenizer.{name}"


def test_settings_of_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder, tmp_path / "model"))
    before = made_of(open_folder(path))
    file = path / "tokenizer_config.json"
    text = file.read_text()
    for name, value, field in (
        ("padding_side", "left", "padding_side"),
        ("truncation_side", "left", "truncation_side"),
        ("split_special_tokens", True, "split_special_tokens"),
        ("model_input_names", ["input_ids"], "model_input_names"),
        ("eos_token", folders.TURN, "special_tokens.eos_token"),
        ("model_max_length", 128, None),
        ("clean_up_tokenization_spaces", True, None),
    ):
        change(file, **{name: value})
        found = first_difference(before, made_of(open_folder(path)))
        assert (found and found.name) == (field and f"tokenizer.{field}"), name
        file.write_text(text)
    template = path / "chat_template.jinja"
    template.write_text(template.read_text().replace("'content'] }}", "'content'] | trim }}"))
    found = first_difference(before, made_of(open_folder(path)))
    assert found is not None and found.name == "tokenizer.chat_template"
    assert "| trim" in found.now and "| trim" not in found.before and found.before != found.now


def test_values_are_the_same_in_each_process() -> None:
    """Values that JSON lacks are text, without an address."""
    values: dict[str, Any] = {"a": (1, float("inf")), "b": {"y", "x"}, "c": object(), 4: torch.float32, "d": print}
    assert about.plain(values) == {
        "a": [1, "inf"],
        "b": ["x", "y"],
        "c": "object",
        "4": "torch.float32",
        "d": "<built-in function print>",
    }


def test_fields_that_another_version_lacks_have_their_defaults(folder: Path) -> None:
    config = open_folder(folder).config
    now = config_values(config)
    before = {name: value for name, value in now.items() if name not in ("mlp_bias", "head_dim")}
    assert first_difference(before, now) is not None
    assert first_difference(identity.filled_in(before, config), now) is None
    found = first_difference(identity.filled_in({**before, "mlp_bias": True}, config), now)
    assert found is not None and found.name == "mlp_bias"


# Settings


@pytest.mark.parametrize("name", [each.name for each in fields(FinetuneConfig) if each.name != "offload"])
def test_each_setting_is_named_or_in_the_list(name: str, tmp_path: Path) -> None:
    given = {"model": "m", "data": ["d"], "method": "sft", "seq": 64, "lr": 1e-3, "lora": 4, "out": str(tmp_path)}
    given |= {"lora": 0, "live_blocks": 2, "live_every": 3, "live_master": "drop"} if name.startswith("live_") else {}
    given |= {"optimizer": "zo.Lion"} if name == "optimizer" else {}
    config = FinetuneConfig.from_tables(given, {})
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nvme" / "run.json").write_text("{}")
    identity_then = config.arguments() | {"steps": 3, "eval_every": 1}
    RunDir(tmp_path).create({"identity": identity_then})
    value = identity_then[name]
    now = identity_then | {name: other(value)}
    if name in (*resume.MAY_CHANGE, *finetune_run.MAY_CHANGE):
        assert find_existing(RunDir(tmp_path), now, finetune_run.MAY_CHANGE) == "resume"
    else:
        with pytest.raises(zo.ConfigError, match=f"holds a run with {name}="):
            find_existing(RunDir(tmp_path), now, finetune_run.MAY_CHANGE)


# Runs


@dataclass(frozen=True)
class Place:
    """A run of two steps that is over, and what it was made of."""

    model: Path
    chat: Path
    held_out: Path
    out: Path

    def words(self, *flags: object) -> list[str]:
        given = [self.model, "--data", self.chat, "--eval-data", self.held_out, "--out", self.out, *SIZES, *flags]
        return ["finetune", *map(str, given)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Place:
    path = tmp_path_factory.mktemp("runs")
    place = Place(
        folders.write_folder(path / "model", dtype="float32"),
        folders.write_instructions(path / "chat.jsonl", 12),
        folders.write_instructions(path / "held_out.jsonl", 4),
        path / "out",
    )
    tools.reset_accelerate()
    assert main(place.words("--lora", 4, "--steps", 2, "--samples", 1)) == 0
    return place


@pytest.fixture
def place(finished: Place, tmp_path: Path) -> Place:
    """A copy of it, in another place."""
    names = ("model", "chat", "held_out", "out")
    copies = {name: tmp_path / getattr(finished, name).name for name in names}
    for name, copy in copies.items():
        here = getattr(finished, name)
        (shutil.copytree if here.is_dir() else shutil.copyfile)(here, copy)
    change(copies["out"] / "adapter_config.json", base_model_name_or_path=str(copies["model"]))
    (copies["out"]).chmod(0o700)
    return Place(**copies)


def resumed(place: Place, *flags: object) -> int:
    tools.reset_accelerate()
    return main(place.words("--lora", 4, "--steps", 3, *flags))


def test_a_run_goes_on_wherever_its_files_lie(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Model, data, run directory and the states below it were moved, and files renamed."""
    chat = place.chat.rename(place.chat.with_name("renamed.jsonl"))
    place = replace(place, chat=chat)
    assert resumed(place) == 0
    said = capsys.readouterr().out
    assert "resuming from generation" in said and "the run was last started with" not in said
    assert json.loads((place.out / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3


def test_states_that_have_moved_are_known(place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nvme = (place.out / "nvme").rename(tmp_path / "drive")
    assert resumed(place, "--nvme", tmp_path / "other") == 2
    assert "holds a run with offload.nvme=" in capsys.readouterr().err
    assert resumed(place, "--nvme", nvme) == 0
    assert "resuming from generation" in capsys.readouterr().out
    words = json.loads((place.out / "run.json").read_text())
    (place.out / "run.json").write_text(json.dumps(words | {"run_id": "another"}))
    nvme = nvme.rename(tmp_path / "again")
    assert resumed(place, "--nvme", nvme) == 2
    assert "holds a run with offload.nvme=" in capsys.readouterr().err


def _config(place: Place) -> str:
    change(place.model / "config.json", rope_parameters__rope_theta=5.0)
    return "rope_parameters.rope_theta=10000.0, and {model}/config.json now has rope_parameters.rope_theta=5.0"


def _template(place: Place) -> str:
    for each in (place.model, place.out):
        file = each / "chat_template.jinja"
        file.write_text(file.read_text().replace("<|im_start|>", "<|im_start|> ", 1))
    return "chat_template="


def _weights(place: Place) -> str:
    file = place.model / "model.safetensors"
    words = bytearray(file.read_bytes())
    words[-1] ^= 1
    file.write_bytes(words)
    return "another {model}/model.safetensors"


def _class(place: Place) -> str:
    file = place.model / "config.json"
    words = json.loads(file.read_text())
    file.write_text(json.dumps({**words, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}))
    return 'class="LlamaForCausalLM", and {model} now has class="MistralForCausalLM"'


CHANGES = [_config, _template, _weights, _class]


@pytest.mark.parametrize("make", CHANGES, ids=lambda make: make.__name__[1:])
def test_every_command_names_what_is_another(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, make: Callable[[Place], str]
) -> None:
    says = make(place).format(model=place.model)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for argv in (
        place.words("--lora", 4, "--steps", 3),
        place.words("--lora", 4, "--steps", 2),  # which would say that it is finished
        place.words("--lora", 4, "--steps", 3, "--dry-run"),
        ["evaluate", str(place.out), "--data", str(place.held_out)],
        ["chat", str(place.out)],
        ["finetune", str(place.out), "--data", str(place.chat), "--out", str(place.out / "next")],
        ["plan", str(place.out), "--data", str(place.chat)],
    ):
        assert main(argv) == 2, argv
        errors = capsys.readouterr().err
        assert says in errors, argv
        assert errors.count("error: ") == 1 and "put back what was there" in errors.lower()


def test_adapters_and_their_weights_are_compared(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    change(place.out / "adapter_config.json", lora_alpha=64)
    evaluates = ["evaluate", str(place.out), "--data", str(place.held_out)]
    assert main(evaluates) == 2
    assert f"lora_alpha=8.0, and {place.out}/adapter_config.json now has lora_alpha=64" in capsys.readouterr().err
    (place.out / "run.json").unlink()
    assert main(evaluates) == 0  # as it is, by the user's word


def test_an_adapter_that_goes_on_training(place: Place, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["finetune", *map(str, (place.out, "--data", place.chat, "--out", tmp_path / "next", *SIZES))]
    tools.reset_accelerate()
    assert main([*argv, "--steps", "1"]) == 0
    (place.out / "run.json").unlink()
    change(place.out / "adapter_config.json", use_rslora=True)
    capsys.readouterr()
    assert main([*argv, "--steps", "2"]) == 2
    says = f"use_rslora=false, and {place.out}/adapter_config.json now has use_rslora=true"
    assert says in capsys.readouterr().err


def test_data_to_evaluate_on_are_compared(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert resumed(place) == 0  # knows from here on where it lies
    place.held_out.write_text(place.held_out.read_text() * 2)
    assert resumed(place, "--steps", 4) == 2
    assert "began with other --eval-data: file 1 of it had the digest" in capsys.readouterr().err


def test_a_generation_config_counts_where_text_is_generated(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    change(place.model / "generation_config.json", repetition_penalty=1.5)
    assert resumed(place, "--samples", 1) == 2
    assert "generation_config.json now has repetition_penalty=1.5" in capsys.readouterr().err
    assert resumed(place, "--samples", 0) == 0


def test_another_version_is_a_warning(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    words = json.loads((place.out / "run.json").read_text())
    config = words["made_of"]["config"]
    del config["mlp_bias"]
    words["versions"]["transformers"] = "5.1.0"
    (place.out / "run.json").write_text(json.dumps(words))
    assert resumed(place) == 0
    now = transformers.__version__
    said = capsys.readouterr().out
    assert f"warning: the run was last started with transformers 5.1.0 (now {now}); numbers may be others" in said
    assert resumed(place, "--steps", 4) == 0
    assert "the run was last started with" not in capsys.readouterr().out


def test_a_run_from_before_goes_on_with_one_line(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    words = json.loads((place.out / "run.json").read_text())
    del words["made_of"], words["run_id"], words["outputs"]["made_of"]
    words["identity"] |= {"model": str(place.model), "data": [str(place.chat)], "eval_data": [str(place.held_out)]}
    (place.out / "run.json").write_text(json.dumps(words))
    assert resumed(place) == 0
    assert capsys.readouterr().out.count("an older version began this run and kept no record of its model") == 1
    change(place.model / "config.json", rms_norm_eps=0.5)
    assert resumed(place, "--steps", 4) == 2
    assert "rms_norm_eps=1e-06" in capsys.readouterr().err


def test_tokens_that_are_made_anew_are_the_same(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes of the data and of the template do not tell: a template may write today's date."""
    shutil.rmtree(place.out / "tokens")
    assert resumed(place) == 0
    words = json.loads((place.out / "run.json").read_text())
    words["tokens"]["trained"] += 1
    (place.out / "run.json").write_text(json.dumps(words))
    assert resumed(place, "--steps", 4) == 2
    says = "gave the run in .* trained=[0-9]+, and now give [0-9]+. The chat template writes today's date"
    assert re.search(says, capsys.readouterr().err)


def test_flags_of_the_training_are_named(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    evaluates = ["evaluate", str(place.out), "--data", str(place.held_out)]
    assert main(evaluates) == 0
    assert "note: the adapter was trained with --precision fp32, without which losses" in capsys.readouterr().err
    assert main([*evaluates, "--precision", "fp32"]) == 0
    assert "note: the adapter" not in capsys.readouterr().err


def test_ranks_with_other_files(folder: Path, tmp_path: Path) -> None:
    from zero_offload.finetune.identity import check_ranks

    opened: ModelFolder = open_folder(folder)
    first = made_of(opened, Lora(4, 8.0))
    check_ranks(first, made_of(opened, Lora(4, 8.0)), opened)
    path = Path(shutil.copytree(folder, tmp_path / "model"))
    change(path / "config.json", rms_norm_eps=0.5)
    with pytest.raises(zo.ConfigError, match="the first rank's began with rms_norm_eps=1e-06, and .* now has"):
        check_ranks(first, made_of(open_folder(path), Lora(4, 8.0)), open_folder(path))
