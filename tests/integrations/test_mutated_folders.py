"""Whatever value a file of a foreign folder has, it is taken, or one line says which file is wrong: never a traceback.

Each field of each file gets each of the values of `tests.helpers.mutated`. `make test` tries some of them.
"""

from __future__ import annotations

import io
import json
import re
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

import tests.helpers.tools  # before transformers  # noqa: F401
from tests.helpers.folders import VOCAB, write_folder, write_instructions
from tests.helpers.mutated import Mutation, linked, mutations
from tests.helpers.pairwise import full
from zero_offload.base.errors import IntegrityError, ZeroOffloadError
from zero_offload.checkpoint.hf_files import INDEX_NAME
from zero_offload.cli.main import main
from zero_offload.finetune.choices import CAUSAL, MASKED
from zero_offload.finetune.data.prepare import prepare
from zero_offload.finetune.model.build import meta_model
from zero_offload.finetune.model.folder import open_folder
from zero_offload.finetune.model.text_generation import generation_config

LIMIT_S = 30.0
"""Of one folder, on a busy machine; most take a tenth of a second."""
PARTS = 80
"""`make test` has one of them."""
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 256, "pad_token_id": 0,
    "eos_token_id": 2, "bos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3_moe": SIZES | EXPERTS,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256, "vocab_size": VOCAB},
    "bert": {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "head_dim")},
    "gemma3": {"text_config": SIZES, "vision_config": {name: SIZES[name] for name in list(SIZES)[:4]}},
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def ends(mutation: Mutation, source: Path, target: Path, use: Callable[[Path], object]) -> str:
    """How `use` of the changed folder ends: "taken" or "refused". Anything else is an error of the test."""
    folder = mutation.apply(source, target)
    begin = time.monotonic()
    try:
        use(folder)
        found = "taken"
    except ZeroOffloadError as error:
        damaged = isinstance(error, IntegrityError) and mutation.file == INDEX_NAME
        assert error.exit_code in (2, 3) or damaged, (str(mutation), error)
        assert "\n" not in str(error) and str(folder) in str(error), (str(mutation), error)
        found = "refused"
    except BaseException as error:
        raise AssertionError(f"{mutation} ends in {type(error).__name__}: {error}") from error
    assert time.monotonic() - begin < LIMIT_S, str(mutation)
    return found


def all_end(changes: list[Mutation], source: Path, target: Path, use: Callable[[Path], object]) -> None:
    use(source)
    print(dict(Counter(ends(each, source, target, use) for each in changes)))


parts = pytest.mark.parametrize("part", [0, *map(full, range(1, PARTS))])


@parts
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config(kind: str, part: int, tmp_path: Path) -> None:
    source = tmp_path / "source"
    config: Any = transformers.CONFIG_MAPPING[kind](**CONFIGS[kind])
    config.save_pretrained(source)
    task = MASKED if kind == "bert" else CAUSAL

    def use(folder: Path) -> None:
        meta_model(open_folder(folder, task, needs_weights=False, needs_tokenizer=False), None)

    all_end(list(mutations(source, "config.json"))[part::PARTS], source, tmp_path / "changed", use)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("folders") / "llama", sharded=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_instructions(tmp_path_factory.mktemp("data") / "chats.jsonl", 4)


@parts
def test_a_tokenizer(llama: Path, data: Path, part: int, tmp_path: Path) -> None:
    def use(folder: Path) -> None:
        opened = open_folder(folder, needs_weights=False)
        prepare([str(data)], opened, seq=64, cache=tmp_path / "tokens")
        shutil.rmtree(tmp_path / "tokens")

    changes = [each for name in TOKENIZER_FILES for each in mutations(llama, name)]
    all_end(changes[part::PARTS], llama, tmp_path / "changed", use)


@parts
def test_an_index_and_a_generation_config(llama: Path, part: int, tmp_path: Path) -> None:
    def use(folder: Path) -> None:
        meta_model(open_folder(folder, needs_tokenizer=False), None)

    changes = [each for name in (INDEX_NAME, "generation_config.json") for each in mutations(llama, name)]
    all_end(changes[part::PARTS], llama, tmp_path / "changed", use)


@parts
def test_an_adapter(llama: Path, part: int, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    source = tmp_path / "source"
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(source)
    words = json.loads((source / "adapter_config.json").read_text())
    (source / "adapter_config.json").write_text(json.dumps(words | {"base_model_name_or_path": str(llama)}))

    def use(folder: Path) -> None:
        meta_model(open_folder(folder, needs_tokenizer=False), None)

    all_end(list(mutations(source, "adapter_config.json"))[part::PARTS], source, tmp_path / "changed", use)


ROWS: dict[str, dict[str, Any]] = {
    "messages": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "q"}], "name": "n"},
            {
                "role": "assistant",
                "content": "a",
                "weight": 1,
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
        ],
        "system": "s",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    },
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "pairs": {"instruction": "q", "input": "i", "output": "a", "system": "s"},
    "preferences": {"prompt": "q", "chosen": [{"role": "assistant", "content": "a"}], "rejected": "b"},
    "strings": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "text": {"text": "t"},
    "labels": {"text": "t", "label": "l"},
}


@pytest.mark.parametrize("part", [0, *map(full, range(1, 40))])
@pytest.mark.parametrize("kind", ROWS)
def test_a_row_of_data(kind: str, llama: Path, part: int, tmp_path: Path) -> None:
    opened = open_folder(llama, needs_weights=False)
    source = tmp_path / "source"
    source.mkdir()
    (source / "rows.jsonl").write_text(json.dumps(ROWS[kind]))

    def use(folder: Path) -> None:
        try:
            prepare([str(folder / "rows.jsonl")], opened, seq=64, cache=tmp_path / "tokens")
        finally:
            shutil.rmtree(tmp_path / "tokens", ignore_errors=True)

    changes = list(mutations(source, "rows.jsonl"))[part::40]
    print(dict(Counter(ends(each, source, tmp_path / "changed", use) for each in changes)))


@pytest.mark.parametrize("depth", [101, 300, 3000])
def test_deep_json_is_refused_before_libraries_see_it(depth: int, llama: Path, tmp_path: Path) -> None:
    folder = linked(llama, tmp_path / "changed", without="config.json")
    words = (llama / "config.json").read_text().rstrip().removesuffix("}")
    (folder / "config.json").write_text(words + f', "more": {"[" * depth}{"]" * depth}}}')
    with pytest.raises(ZeroOffloadError, match="config.json is not JSON: objects and arrays lie in more than 100"):
        open_folder(folder)


def test_a_trial_of_usual_values_ends_soon_and_takes_no_memory(tmp_path: Path) -> None:
    """The usual gemma3 has billions of parameters: it is tried field by field."""
    config: Any = transformers.CONFIG_MAPPING["gemma3"](**CONFIGS["gemma3"])
    config.save_pretrained(tmp_path / "source")
    change = Mutation("config.json", ("text_config", "num_key_value_heads"), -1)
    folder, begin, before = change.apply(tmp_path / "source", tmp_path / "changed"), time.monotonic(), peak_rss()
    with pytest.raises(ZeroOffloadError, match="config.json.*mend it"):
        open_folder(folder, needs_weights=False, needs_tokenizer=False)
    assert time.monotonic() - begin < LIMIT_S and peak_rss() - before < 1 << 20


def peak_rss() -> int:
    """KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_half_of_a_letter_in_a_column_beside_the_messages(llama: Path, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "system": "\ud800"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(ZeroOffloadError, match=r"rows.jsonl, line 1: 'system' has half of a character at 0"):
        prepare([str(tmp_path / "rows.jsonl")], open_folder(llama, needs_weights=False), seq=64, cache=tmp_path / "t")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "continuing_subword_prefix"), "64"),
        (("model", "end_of_word_suffix"), "64"),
        (("post_processor",), {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}),
    ],
)
def test_a_tokenizer_that_makes_no_tokens(path: tuple[str, ...], value: Any, llama: Path, tmp_path: Path) -> None:
    folder = Mutation("tokenizer.json", path, value).apply(llama, tmp_path / "changed")
    with pytest.raises(ZeroOffloadError, match="the tokenizer in .*get its files again"):
        open_folder(folder, needs_weights=False)


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("config.json", ("auto_map",), 0),  # a field that no config has of itself
        ("config.json", ("hidden_size",), "64"),
        ("generation_config.json", ("max_new_tokens",), {"a": 1}),
        ("tokenizer_config.json", ("eos_token",), []),
        ("tokenizer_config.json", ("truncation_side",), 0),
        ("tokenizer.json", ("added_tokens", 1), {"id": 1, "content": 7}),
        ("tokenizer.json", ("pre_tokenizer",), 7),
    ],
)
def test_file_and_field_are_named(
    file: str, path: tuple[str | int, ...], value: Any, llama: Path, tmp_path: Path
) -> None:
    folder = Mutation(file, path, value).apply(llama, tmp_path / "changed")
    field = ".".join(map(str, path))
    with pytest.raises(
        ZeroOffloadError, match=f"{file}, {re.escape(field)} is .*{re.escape(repr(value))}.*: .*mend it"
    ):
        opened = open_folder(folder)
        if opened.generation_file is not None:
            generation_config(opened.generation_file)


@pytest.mark.parametrize(("name", "value"), [("num_hidden_layers", 10**6), ("vocab_size", 10**8)])
def test_sizes_that_nothing_is_planned_for(name: str, value: int, llama: Path, tmp_path: Path) -> None:
    folder = Mutation("config.json", (name,), value).apply(llama, tmp_path / "changed")
    with pytest.raises(ZeroOffloadError, match=f"config.json: {name} is {value:,}, and .* is the most"):
        open_folder(folder, needs_weights=False)


def _with_settings(llama: Path, folder: Path, **settings: Any) -> Path:
    """A copy whose generation config has them too."""
    words = json.loads((llama / "generation_config.json").read_text())
    linked(llama, folder, without="generation_config.json")
    (folder / "generation_config.json").write_text(json.dumps(words | settings))
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [("sequence_bias", [-1]), ("penalty_alpha", 0.6), ("exponential_decay_length_penalty", 3), ("bad_words_ids", "x")],
)
def test_a_generation_config_that_no_text_is_written_with(
    name: str, value: Any, llama: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is refused before weights are read and before step 1 where text is written, and nowhere else."""
    folder = _with_settings(llama, tmp_path / "changed", top_k=4, **{name: value})
    evaluate = ["evaluate", str(folder), "--data", str(data), "--seq", "64"]
    finetune = ["finetune", str(folder), "--data", str(data), "--out", str(tmp_path / "run"), "--split", "0.5"]
    for command in (["chat", str(folder)], [*evaluate, "--eval-samples", "1"], finetune):
        assert main(command) == 2
        assert re.search(f"generation_config.json, {name} is .*mend it", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()
    assert main(evaluate) == 0


def test_answers_by_beams_words_that_end_them_and_settings_of_what_generate_returns(
    llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"num_beams": 2, "stop_strings": ["zz"], "num_return_sequences": 2, "return_dict_in_generate": True}
    folder = str(_with_settings(llama, tmp_path / "changed", **settings))
    monkeypatch.setattr("sys.stdin", io.StringIO("a question\n"))
    assert main(["chat", folder, "--max-new-tokens", "4"]) == 0, capsys.readouterr().err
    assert main(["evaluate", folder, "--data", str(data), "--seq", "64", "--eval-samples", "1"]) == 0
    finetune = ["finetune", folder, "--data", str(data), "--out", str(tmp_path / "run"), "--split", "0.5"]
    assert main([*finetune, "--seq", "64", "--steps", "1"]) == 0, capsys.readouterr().err
