"""Data of `finetune`: what is recognised, which tokens are trained, what is cut, left out and counted, and errors."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import datasets
import pyarrow.parquet
import torch
import transformers
import trl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, OPTConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

import zero_offload as zo
from tests.helpers import folders
from tests.helpers.disk import small_disk
from tests.helpers.resident import peak_bytes, reset_peak
from tests.helpers.templates import HABITS, OPEN_THOUGHT, THINKING, Habit, Segments
from zero_offload.finetune.data import sources
from zero_offload.finetune.data.prepare import PACKED, PackedRows, Prepared, prepare
from zero_offload.finetune.data.rows import BadRow
from zero_offload.finetune.data.turns import ChatTemplate, Sample, tokens_of
from zero_offload.finetune.model.folder import ModelFolder, open_folder
from zero_offload.finetune.settings import FinetuneConfig
from zero_offload.storage.files.own_files import LIST_NAME

ASSISTANT, USER = "assistant", "user"


def talk(*words: str) -> list[dict[str, str]]:
    """Question, answer, question, ..."""
    return [{"role": (USER, ASSISTANT)[number % 2], "content": each} for number, each in enumerate(words)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write_folder(tmp_path_factory.mktemp("folder") / "llama")


@pytest.fixture(scope="module")
def folder(model: Path) -> ModelFolder:
    return open_folder(model)


def rows_of(prepared: Prepared) -> list[dict[str, Any]]:
    return list(prepared.train)


# Which tokens are trained


def sizes(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> Iterator[int]:
    """Bytes of each token."""
    added = tokenizer.added_tokens_decoder
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    for token in ids:
        if token in added:
            yield len(added[token].content.encode())
        else:
            yield len(bytes(letters[each] for each in tokenizer.convert_ids_to_tokens(token)))


def expected(tokenizer: PreTrainedTokenizerFast, segments: Segments) -> Sample:
    """The tokens of the segments' text; trained are those with a byte in a segment that is."""
    ids = tokenizer("".join(text for text, _ in segments), add_special_tokens=False)["input_ids"]
    bits = [is_trained for text, is_trained in segments for _ in text.encode()]
    trained, at = [], 0
    for size in sizes(tokenizer, ids):
        trained.append(any(bits[at : at + size]))
        at += size
    assert at == len(bits)
    return Sample(ids, trained)


TEXTS = st.lists(st.sampled_from([*"ab .\n é<>[]_A", "\n\n", "  ", "Q:", "😀"]), min_size=1, max_size=8).map("".join)
TALKS = st.lists(st.tuples(TEXTS, TEXTS.filter(str.strip)), min_size=1, max_size=3)


@pytest.mark.parametrize("name", HABITS)
@settings(max_examples=40)
@given(pairs=TALKS, system=st.none() | TEXTS)
@example(pairs=[("a", "b"), ("\nA: ", " b \n")], system="\n")
def test_what_the_model_generates_is_trained(name: str, pairs: list[tuple[str, str]], system: str | None) -> None:
    habit: Habit = HABITS[name]
    tokenizer = habit.tokenizer()
    messages = talk(*(text for pair in pairs for text in pair))
    if system is not None and habit.takes_system:
        messages = [{"role": "system", "content": system}, *messages]
    assert ChatTemplate(tokenizer).samples(messages) == [expected(tokenizer, habit.segments(messages))]
    open_end = [*messages, {"role": USER, "content": "and?"}]
    assert ChatTemplate(tokenizer).samples(open_end) == [expected(tokenizer, habit.segments(messages))]


def trained_text(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> list[str]:
    """Each run of trained tokens."""
    runs = re.finditer("1+", "".join(str(int(each)) for each in sample.trained))
    return [tokenizer.decode(sample.ids[run.start() : run.end()]) for run in runs]


def test_turns_that_lose_their_thoughts_are_samples_of_their_own() -> None:
    tokenizer = Habit(THINKING, lambda _: []).tokenizer()
    template = ChatTemplate(tokenizer)
    found = template.samples(talk("1", "<think>\nhm\n</think>\n\none", "2", "two"))
    assert [trained_text(tokenizer, each) for each in found] == [
        ["<think>\nhm\n</think>\n\none<|im_end|>\n"],
        ["<think>\n\n</think>\n\ntwo<|im_end|>\n"],
    ]
    assert tokenizer.decode(found[1].ids).startswith(
        "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\n2"
    )
    assert len(template.samples(talk("1", "one"))) == 1


def test_a_thought_that_the_prompt_begins_is_not_trained() -> None:
    tokenizer = Habit(OPEN_THOUGHT, lambda _: []).tokenizer()
    template = ChatTemplate(tokenizer)
    assert trained_text(tokenizer, template.samples(talk("1", "<think>\nhm</think>one"))[0]) == ["hm</think>one<|end|>"]
    assert trained_text(tokenizer, template.samples(talk("1", "one"))[0]) == ["one<|end|>"]
    assert trained_text(tokenizer, template.samples(talk("1", "<b>"))[0]) == ["<b><|end|>"]
    both = template.samples(talk("1", "one", "2", "two"))
    assert [trained_text(tokenizer, each) for each in both] == [["one<|end|>", "two<|end|>"]]


def test_calls_of_tools_are_trained() -> None:
    tokenizer = folders.tokenizer(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls %}<call>{{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    messages = [*talk("1"), {"role": ASSISTANT, "content": "", "tool_calls": [call]}]
    messages += [{"role": "tool", "content": "2"}, {"role": ASSISTANT, "content": "two"}]
    (found,) = ChatTemplate(tokenizer).samples(messages)
    assert trained_text(tokenizer, found) == ['<call>{"x": 1}</call><|im_end|>\n', "two<|im_end|>\n"]


def test_only_a_completion_is_trained() -> None:
    for template in (folders.CHATML, folders.CHATML_MARKED):
        tokenizer = folders.tokenizer(template)
        (found,) = ChatTemplate(tokenizer).samples(talk("1", "one", "2", "two"), trained_from=3)
        assert [text.rstrip("\n") for text in trained_text(tokenizer, found)] == ["two<|im_end|>"]


def test_a_message_of_no_weight_is_not_trained() -> None:
    tokenizer, messages = folders.tokenizer(), talk("1", "one", "2", "two")
    messages[1]["weight"], messages[3]["weight"] = 0, 1  # type: ignore[assignment]
    (found,) = ChatTemplate(tokenizer).samples(messages)
    assert trained_text(tokenizer, found) == ["two<|im_end|>\n"]
    with pytest.raises(BadRow, match="has weight 0"):
        ChatTemplate(folders.tokenizer(folders.CHATML_MARKED)).samples(messages)


def test_a_template_that_leaves_it_open_raises() -> None:
    counts = "{{ messages | length }}" + folders.CHATML
    with pytest.raises(BadRow, match="differently in a prompt"):
        ChatTemplate(folders.tokenizer(counts)).samples(talk("1", "one"))
    with pytest.raises(zo.ConfigError, match="does not write what the assistant says"):
        ChatTemplate(folders.tokenizer("{{ messages[0]['content'] }}"))
    with pytest.raises(zo.ConfigError, match="the chat template refuses it: no"):
        ChatTemplate(folders.tokenizer("{{ raise_exception('no') }}"))


def test_tokens_without_their_white_space() -> None:
    """Some tokenizers count white space to no token."""
    from tokenizers import processors

    tokenizer = folders.tokenizer()
    text, spans = "a  b\n<|im_start|>c d\n\n<|im_end|>\n e", [(4, 5), (18, 33)]
    whole = tokens_of(tokenizer, text, spans, add_special_tokens=False)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trimmed = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    assert any(begin == end for begin, end in trimmed)
    assert tokens_of(tokenizer, text, spans, add_special_tokens=False) == whole


TEMPLATES = Path(trl.__file__).parent / "chat_templates"
MASKS_AS_TRL = "cohere2 cohere gemma3 gemma glm4moe lfm2 llama3 phi3_5 phi3 qwen3_instruct_2507 qwen3"
PROMPT_IS_TRAINED_BY_TRL = "deepseekv3 gptoss nemotron_3_nano qwen2_5 qwen3_5_think"


@pytest.mark.parametrize("name", [*MASKS_AS_TRL.split(), *PROMPT_IS_TRAINED_BY_TRL.split()])
def test_the_masks_are_those_of_trl(name: str) -> None:
    """Of its templates with marks, and of the same without. Some of them also mark words that a prompt ends with."""
    marked = (TEMPLATES / f"{name}_training.jinja").read_text()
    plain = re.sub(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}", r"{%\1 set nothing = 1 \2%}", marked)
    special = {
        "additional_special_tokens": sorted(set(re.findall(r"<[|｜]\S+?[|｜]>|</?\w*think>|<\w+_of_turn>", marked)))
    }
    ours, theirs = folders.tokenizer(plain), folders.tokenizer(marked)
    for each in (ours, theirs):
        each.add_special_tokens({**special, "bos_token": "<s>"})
    template = ChatTemplate(ours)
    for conversation in folders.conversations(24):
        messages = [message for message in conversation if message["role"] != "system"]
        (found,) = template.samples(messages)
        encoded = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        mask = [mark == 1 for mark in encoded["assistant_masks"]]
        assert found.ids == encoded["input_ids"]
        if name in PROMPT_IS_TRAINED_BY_TRL.split():
            prompt = len(
                ours(ours.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True))["input_ids"]
            )
            assert found.trained != mask
            assert mask[prompt - 1] or mask[prompt - 2]
            assert not any(one and not other for one, other in zip(found.trained, mask, strict=True))
            mask = [one and other for one, other in zip(found.trained, mask, strict=True)]
        assert found.trained == mask
        assert ChatTemplate(theirs).samples(messages)[0].ids == found.ids


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_every_template_that_trl_knows(path: Path) -> None:
    """The answers are trained, and nothing of the questions; those of models that see take other messages."""
    template = path.read_text()
    tokenizer = folders.tokenizer(template)
    special = sorted(set(re.findall(r"<[|｜]\S+?[|｜]>|</?\w*think>|<\w+_of_turn>|<turn\|>|<\|turn>", template)))
    tokenizer.add_special_tokens({"additional_special_tokens": special, "bos_token": "<s>"})
    if path.stem.removesuffix("_training") in ("idefics3", "llava_next", "smolvlm"):
        with pytest.raises(
            zo.ConfigError, match="the chat template of .* cannot be used: .*; copy chat_template.jinja"
        ):
            ChatTemplate(tokenizer)
        return
    found = ChatTemplate(tokenizer).samples(talk("Q1", "one", "Q2", "two"))
    texts = [text for each in found for text in trained_text(tokenizer, each)]
    assert len(texts) == 2 and "one" in texts[0] and "two" in texts[1]
    assert not any("Q" in text for text in texts)


# Recognition


ROWS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "messages": ("conversations", [{"messages": talk("q", "a")}]),
    "ShareGPT": (
        "conversations",
        [{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "id": 3}],
    ),
    "parts": (
        "conversations",
        [{"messages": [talk("q")[0], {"role": ASSISTANT, "content": [{"type": "text", "text": "a"}]}]}],
    ),
    "messages as text": ("conversations", [{"messages": json.dumps(talk("q", "a"))}]),
    "prompt": ("prompt/completion", [{"prompt": "q", "completion": "a"}]),
    "lists": ("prompt/completion", [{"prompt": talk("q"), "completion": talk("", "a")[1:]}]),
    "Alpaca": ("prompt/completion", [{"instruction": "q", "input": "", "output": "a"}]),
    "question": ("prompt/completion", [{"question": "q", "answer": "a"}]),
    "response": ("prompt/completion", [{"prompt": "q", "response": "a"}]),
}


@pytest.mark.parametrize("name", ROWS)
def test_kinds_give_the_same_tokens(tmp_path: Path, folder: ModelFolder, name: str) -> None:
    kind, rows = ROWS[name]
    path = folders.write_rows(tmp_path / "data.jsonl", rows)
    prepared = prepare([str(path)], folder, seq=64)
    assert (prepared.kind, prepared.method) == (kind, "sft")
    (sample,) = ChatTemplate(folder.tokenizer).samples(talk("q", "a"))
    (row,) = rows_of(prepared)
    assert row["input_ids"] == sample.ids
    assert row["labels"] == [
        token if is_trained else -100 for token, is_trained in zip(sample.ids, sample.trained, strict=True)
    ]
    columns = list(rows[0])
    assert re.search(rf"data.jsonl: {kind} \(columns? {columns[0]}", prepared.note)
    assert ("; not used: id" in prepared.note) == ("id" in columns)


def test_a_question_with_more(tmp_path: Path, folder: ModelFolder) -> None:
    rows = [{"instruction": "q", "input": "more", "output": "007", "system": "s"}, {"question": 1, "answer": 2.5}]
    one, other = (folders.write_rows(tmp_path / f"{at}.jsonl", [row]) for at, row in enumerate(rows))
    (found,) = rows_of(prepare([str(one)], folder, seq=64))
    assert folder.tokenizer.decode(found["input_ids"]) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq\n\nmore<|im_end|>\n<|im_start|>assistant\n007<|im_end|>\n"
    )
    assert "1<|im_end|>\n<|im_start|>assistant\n2.5<" in folder.tokenizer.decode(
        rows_of(prepare([str(other)], folder, seq=64))[0]["input_ids"]
    )


def formats(tmp_path: Path) -> list[Path]:
    rows = [{"question": f"q {at}", "answer": value} for at, value in enumerate(["007", "NA", "2024-01-01", "a\nb"])]
    table = datasets.Dataset.from_list(rows)
    paths = [tmp_path / f"data{suffix}" for suffix in (".parquet", ".csv", ".json", ".jsonl")]
    table.to_parquet(paths[0])
    table.to_csv(paths[1])
    paths[2].write_text(json.dumps({"data": rows}, indent=1))
    folders.write_rows(paths[3], rows)
    (tmp_path / "lines.json").write_text(paths[3].read_text())
    (tmp_path / "array.json").write_text(json.dumps(rows))
    (tmp_path / "one_line.json").write_text(json.dumps({"data": rows}))
    capitals = [Path(shutil.copy(path, tmp_path / f"CAPITALS{path.suffix.upper()}")) for path in paths]
    return [*paths, *capitals, *(tmp_path / f"{name}.json" for name in ("lines", "array", "one_line"))]


def test_formats_give_the_same_tokens(tmp_path: Path, folder: ModelFolder) -> None:
    """Text stays as it is in all of them: numbers with zeros, NA, dates."""
    found = [rows_of(prepare([str(path)], folder, seq=64)) for path in formats(tmp_path)]
    assert found[0][0]["seq_lengths"]
    assert all(each == found[0] for each in found)
    words = folder.tokenizer.decode([token for row in found[0] for token in row["input_ids"]])
    assert all(f"\n{value}<|im_end|>" in words for value in ("007", "NA", "2024-01-01", "a\nb"))


@pytest.mark.parametrize("name", ["part*.parquet", "part?.parquet", "part[1].parquet", "a::part1.parquet"])
def test_a_name_is_no_pattern(name: str, tmp_path: Path, folder: ModelFolder) -> None:
    datasets.Dataset.from_list([{"text": "other"}]).to_parquet(tmp_path / "part1.parquet")
    datasets.Dataset.from_list([{"text": "own"}]).to_parquet(tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / name)
    [row] = rows_of(prepare([str(tmp_path / name)], folder, seq=64))
    assert folder.tokenizer.decode(row["input_ids"], skip_special_tokens=True) == "own"


@pytest.mark.parametrize("indent", [None, 1])
def test_one_row_as_json(indent: int | None, tmp_path: Path, folder: ModelFolder) -> None:
    (tmp_path / "row.json").write_text(json.dumps({"messages": talk("q", "a")}, indent=indent))
    assert prepare([str(tmp_path / "row.json")], folder, seq=64).counts.read == 1


def test_a_header_behind_empty_lines_and_columns_without_a_name(tmp_path: Path, folder: ModelFolder) -> None:
    (tmp_path / "a.csv").write_text("\n\ntext,,\nword,,\n")
    assert prepare([str(tmp_path / "a.csv")], folder, seq=64).counts.read == 1


def test_a_folder_of_files(tmp_path: Path, folder: ModelFolder) -> None:
    for name in ("a/train.jsonl", "a/part.jsonl", "a/test.jsonl", "a/.hidden.jsonl", "a/latest.jsonl", "b/dev.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        folders.write_instructions(tmp_path / name, 2)
    prepared = prepare([str(tmp_path / "a")], folder, seq=256)
    assert prepared.counts.read == 6
    assert f"left out, by their names: {tmp_path}/a/test.jsonl" in prepared.note
    assert prepare([str(tmp_path / "b")], folder, seq=256).counts.read == 2


def test_a_dataset_of_the_hub(tmp_path: Path, folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(path: str, name: str | None, *, split: str) -> datasets.Dataset:
        asked.append((path, name, split))
        return datasets.Dataset.from_list([{"question": "q", "answer": "a"}, {"question": "q", "answer": None}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setenv("https_proxy", "http://proxy.invalid")  # so its address is not looked for
    with pytest.raises(zo.ConfigError, match="org/name:main, row 2: 'answer' is missing"):
        prepare(["org/name:main"], folder, seq=64)
    assert set(asked) == {("org/name", "main", "train")}


def test_a_name_without_a_network(tmp_path: Path, folder: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: None) -> None:
        raise OSError(f"{host} is not known")

    monkeypatch.setattr(sources, "getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(zo.ConfigError, match=r"chats is not a file or folder here, .* \(huggingface.co is not known\)"):
        prepare(["chats"], folder, seq=64)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").touch()
    with pytest.raises(zo.ConfigError, match=r"chats is not a file or folder here, .*; did you mean chats.jsonl\?"):
        prepare(["chats"], folder, seq=64)


@pytest.mark.parametrize("broken", [False, True], ids=["full", "broken"])
def test_tokens_of_data_that_end_in_an_error_are_deleted(tmp_path: Path, folder: ModelFolder, broken: bool) -> None:
    path = folders.write_instructions(tmp_path / "chat.jsonl", 4000 if not broken else 1500)
    path.write_text(path.read_text() + "{" * broken)
    says = r"chat.jsonl, line 1501: not JSON" if broken else "cannot write the data's tokens to .*No space left .* Free"
    with small_disk(tmp_path / "disk", "1m") as disk:
        with pytest.raises(zo.ConfigError if broken else zo.StorageError, match=says):
            prepare([str(path)], folder, seq=256, cache=disk / "tokens")
        assert sum(each.stat().st_size for each in (disk / "tokens").iterdir() if each.name != LIST_NAME) == 0


def test_text_is_divided(tmp_path: Path, folder: ModelFolder) -> None:
    (tmp_path / "book.txt").write_text("word " * 100)
    prepared = prepare([str(tmp_path / "book.txt")], folder, seq=16, packing=False)
    whole = folder.tokenizer("word " * 100 + "<|im_end|>")["input_ids"]
    found = rows_of(prepared)
    assert [token for row in found for token in row["input_ids"]] == whole
    assert all(row["labels"] == row["input_ids"] for row in found)
    counts = prepared.counts
    assert (counts.divided, counts.truncated, counts.samples) == (1, 0, len(found))
    assert (counts.tokens, counts.trained, counts.longest) == (len(whole), len(whole) - len(found), 16)


def test_pairs_without_a_template(tmp_path: Path) -> None:
    bare = open_folder(folders.write_folder(tmp_path / "bare", template=None))
    path = folders.write_rows(tmp_path / "pairs.jsonl", [{"prompt": "The sky is", "completion": " blue."}])
    (row,) = rows_of(prepare([str(path)], bare, seq=64))
    assert bare.tokenizer.decode(row["input_ids"]) == "The sky is blue.<|im_end|>"
    assert bare.tokenizer.decode([each for each in row["labels"] if each >= 0]) == " blue.<|im_end|>"
    chat = folders.write_instructions(tmp_path / "chat.jsonl", 2)
    with pytest.raises(zo.ConfigError, match="has no chat template"):
        prepare([str(chat)], bare, seq=64)


# Counts


def test_what_is_cut_and_left_out(tmp_path: Path, folder: ModelFolder) -> None:
    talks = [
        talk("q", "a"),
        talk("q", "long " * 30),
        talk("long " * 30, "a"),
        talk("q", "  "),
        talk("q"),
        talk("q", "a", "more?"),
    ]
    path = folders.write_rows(tmp_path / "chat.jsonl", [{"messages": each} for each in talks])
    for packing in (False, True):
        prepared = prepare([str(path)], folder, seq=48, packing=packing)
        counts, found = prepared.counts, rows_of(prepared)
        assert (counts.read, counts.samples, counts.truncated, counts.empty) == (6, 3, 1, 3)
        assert counts.rows == len(prepared.train) == (2 if packing else 3)
        assert counts.tokens == sum(len(row["input_ids"]) for row in found)
        batch = PackedRows(0)(found)
        assert counts.trained == int((batch["labels"] != -100).sum())
        assert counts.longest == 48
        assert "1 sample longer than 48 tokens: cut there" in prepared.note
        assert "3 left out" in prepared.note


@pytest.mark.parametrize("split", [0.01, 0.1, 0.25, 1 / 3, 0.8])
def test_a_split(tmp_path: Path, folder: ModelFolder, split: float) -> None:
    rows = [{"text": f"row {number}"} for number in range(200)]
    path = folders.write_rows(tmp_path / "text.jsonl", rows)
    found = []
    for seed in (0, 0, 1):
        prepared = prepare([str(path)], folder, seq=16, packing=False, split=split, seed=seed)
        assert prepared.evaluation is not None and prepared.evaluation_counts is not None
        assert abs(len(prepared.evaluation) - 200 * split) <= 1
        assert prepared.counts.read + prepared.evaluation_counts.read == 200
        parts = [
            [folder.tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in part]
            for part in (prepared.train, prepared.evaluation)
        ]
        assert sorted(parts[0] + parts[1]) == sorted(row["text"] for row in rows)
        found.append(parts[1])
    assert found[0] == found[1] != found[2]


def test_data_for_evaluation(tmp_path: Path, folder: ModelFolder) -> None:
    train = folders.write_instructions(tmp_path / "train.jsonl", 6)
    other = folders.write_rows(tmp_path / "other.jsonl", [{"question": "q", "answer": "a"}])
    prepared = prepare([str(train)], folder, seq=256, eval_data=[str(other)])
    assert prepared.evaluation is not None and prepared.evaluation.column_names == ["input_ids", "labels"]
    assert "evaluation: 1 row, " in prepared.note
    with pytest.raises(zo.ConfigError, match="leave one of them out"):
        prepare([str(train)], folder, seq=256, eval_data=[str(other)], split=0.1)
    with pytest.raises(zo.ConfigError, match="leaves no row of .* for evaluation"):
        prepare([str(other)], folder, seq=256, split=0.1)


def test_kinds_beside_each_other(tmp_path: Path, folder: ModelFolder) -> None:
    chat = str(folders.write_instructions(tmp_path / "chat.jsonl", 4))
    text = str(folders.write_rows(tmp_path / "text.jsonl", [{"text": "some text"}]))
    both = prepare([chat, text], folder, seq=256)
    assert (both.kind, both.counts.read) == ("conversations and text", 5)
    assert "the end of each turn included and the whole text" in both.note
    beside = prepare([text], folder, seq=256, eval_data=[chat])
    assert beside.evaluation is not None and len(beside.evaluation) == 4
    pairs = str(folders.write_preferences(tmp_path / "pairs.jsonl", 2))
    with pytest.raises(zo.ConfigError, match="holds preferences, .* does not take beside the other data; .* dpo"):
        prepare([chat, pairs], folder, seq=256)


def test_a_model_that_does_not_keep_samples_apart(tmp_path: Path, folder: ModelFolder) -> None:
    path = folders.write_instructions(tmp_path / "chat.jsonl", 4)
    other = replace(folder, config=OPTConfig(max_position_embeddings=256))
    prepared = prepare([str(path)], other, seq=256)
    assert len(prepared.train) == 4 and prepared.collator is None
    assert "a sequence is one sample: opt models" in prepared.note
    assert "a sequence is" not in prepare([str(path)], other, seq=256, packing=False).note


def test_what_a_template_leaves_out_is_said(tmp_path: Path, folder: ModelFolder) -> None:
    path = folders.write_instructions(tmp_path / "chat.jsonl", 4)
    silent = folders.CHATML_MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    for template, said in [
        (HABITS["no special tokens"].template, "<|im_end|> behind the last: no turn in it ends with a token"),
        (folders.CHATML_MARKED, "where it has {% generation %}, the end of each turn included"),
        (silent, "the end of a turn is outside, so the model does not learn to stop"),
    ]:
        prepared = prepare([str(path)], replace(folder, tokenizer=folders.tokenizer(template)), seq=256)
        assert said in prepared.note


# The file of tokens


def test_tokens_are_made_once_and_anew_where_something_changes(tmp_path: Path, folder: ModelFolder) -> None:
    path, cache = folders.write_instructions(tmp_path / "chat.jsonl", 6), tmp_path / "cache"

    def times() -> list[int]:
        return sorted(each.stat().st_mtime_ns for each in cache.glob("*.arrow"))

    first = prepare([str(path)], folder, seq=256, split=0.3, cache=cache)
    made = times()
    again = prepare([str(path)], open_folder(folder.path), seq=256, split=0.3, cache=cache)
    assert times() == made and len(made) == 2
    assert (again.key, again.note, rows_of(again)) == (first.key, first.note, rows_of(first))
    text = path.read_text()
    path.write_text(text.replace("Copy", "Kopy", 1))  # the same size, and perhaps the same time
    changed = prepare([str(path)], folder, seq=256, split=0.3, cache=cache)
    assert changed.key != first.key and rows_of(changed) != rows_of(first)
    path.write_text(text)
    keys = {
        prepare([str(path)], folder, cache=cache, **given).key
        for given in ({"seq": 128}, {"seq": 256, "packing": False}, {"seq": 256, "split": 0.5}, {"seq": 256})
    }
    assert len(keys | {first.key, changed.key}) == 6
    assert len(list(cache.glob("*"))) == 6  # the last training's, an evaluation's, the lock, the list


def test_a_file_that_a_kill_has_cut_short_is_made_anew(tmp_path: Path, folder: ModelFolder) -> None:
    path, cache = folders.write_instructions(tmp_path / "chat.jsonl", 6), tmp_path / "cache"
    first = rows_of(prepare([str(path)], folder, seq=256, cache=cache))
    for is_said in (True, False):
        (arrow,) = cache.glob("*.arrow")
        arrow.write_bytes(arrow.read_bytes()[:100])
        if not is_said:
            arrow.with_suffix(".json").unlink()
        assert rows_of(prepare([str(path)], folder, seq=256, cache=cache)) == first


def _on_a_rank(rank: int, world_size: int, model: str, data: str, cache: str) -> tuple[str, int, int]:
    prepared = prepare([data], open_folder(model), seq=256, cache=Path(cache))
    (arrow,) = Path(cache).glob("*.arrow")
    return prepared.key, len(prepared.train), arrow.stat().st_ino


def test_ranks_make_one_file(tmp_path: Path, model: Path, pools: Any) -> None:
    path = folders.write_instructions(tmp_path / "chat.jsonl", 300)
    found = tools.on_ranks(pools, 2, _on_a_rank, str(model), str(path), str(tmp_path / "cache"))
    assert found[0] == found[1]


def _grown(rank: int, world_size: int, model: str, data: Sequence[str], cache: str) -> list[int]:
    """Peak memory of this process with each of the files."""
    peaks = []
    for each in data:
        reset_peak()
        prepare([each], open_folder(model), seq=256, cache=Path(cache))
        peaks.append(peak_bytes())
    return peaks


def test_data_need_not_fit_memory(tmp_path: Path, model: Path, pools: Any) -> None:
    row = {"question": "q", "answer": "a", "unread": "x" * 20_000}
    small, large = (
        folders.write_rows(tmp_path / f"{num}.jsonl", [row | {"question": str(at)} for at in range(num)])
        for num in (100, 4000)
    )
    assert large.stat().st_size > 80e6
    _, before, after = pools.of(2).succeed(
        _grown, str(model), [str(small), str(small), str(large)], str(tmp_path / "cache")
    )[0]
    assert after - before < 20e6


# Packed rows


def tiny(kind: str) -> torch.nn.Module:
    """A model of a type, of the sizes that its config knows by one name or the other."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {
        **{"vocab_size": folders.VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 16},
        **{"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_ctx": 256, "rotary_dim": 16},
        **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
        **{"moe_intermediate_size": 32, "topk_group": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    }
    known = CONFIG_MAPPING[kind]()
    config = CONFIG_MAPPING[kind](**{name: value for name, value in sizes.items() if hasattr(known, name)})
    config.use_cache = False
    torch.manual_seed(0)
    made: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return made.eval()


def leak(kind: str) -> tuple[float, float]:
    """How far logits of packed samples are from those of each alone; and the same without positions."""
    samples = [[int(each) for each in torch.randint(4, folders.VOCAB, (length,))] for length in (20, 9, 14)]
    packed = [
        {"input_ids": ids, "labels": ids, "seq_lengths": lengths}
        for ids, lengths in ((samples[0] + samples[1], [20, 9]), (samples[2], [14]))
    ]
    batch, made = PackedRows(0)(packed), tiny(kind)
    batch.pop("labels")
    with torch.no_grad():
        alone = torch.cat([made(input_ids=torch.tensor([each])).logits[0] for each in samples])
        away = []
        for given in (batch, {"input_ids": batch["input_ids"]}):
            logits = made(**given).logits
            away.append((torch.cat([logits[0], logits[1, :14]]) - alone).abs().max().item())
    return away[0], away[1]


@pytest.mark.parametrize("kind", sorted(PACKED))
def test_attention_stays_within_a_sample(kind: str) -> None:
    ours, without = leak(kind)
    assert ours < 1e-5 < 1e-3 < without


@pytest.mark.parametrize("kind", ["opt", "gpt_oss", "xglm"])
def test_models_that_do_not_are_not_packed(kind: str) -> None:
    assert kind not in PACKED
    assert leak(kind)[0] > 1e-3


def test_a_batch_of_packed_rows() -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "labels": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]},
        {"input_ids": [5, 6], "labels": [-100, 6]},
    ]
    batch = PackedRows(1)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [5, 6, 1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9], [-100, 6, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", ["conversations", "pairs", "text"])
def test_rows_are_those_that_trl_makes(tmp_path: Path, folder: ModelFolder, kind: str, packing: bool) -> None:
    """Tokens, labels and packing, where TRL can make them: of marked conversations, of completions, of text."""
    rows: list[dict[str, Any]] = [{"messages": each} for each in folders.conversations(60)]
    settings: dict[str, Any] = {"assistant_only_loss": True}
    template = folders.CHATML_MARKED
    if kind != "conversations":
        settings, template = {}, folders.CHATML
        pairs = [row["messages"] for row in rows if len(row["messages"]) == 2]
        rows = [{"prompt": pair[:1], "completion": pair[1:]} for pair in pairs]
    if kind == "text":
        rows = [{"text": row["completion"][0]["content"]} for row in rows]
    path = folders.write_rows(tmp_path / "data.jsonl", rows)
    ours = replace(folder, tokenizer=folders.tokenizer(template), config=LlamaConfig(max_position_embeddings=512))
    prepared = prepare([str(path)], ours, seq=512, packing=packing)
    args = trl.SFTConfig(
        output_dir=str(tmp_path / "out"), use_cpu=True, report_to=[], bf16=False, packing=packing, max_length=512,
        **settings,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=folders.model(), args=args, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=folders.tokenizer(template),
    )  # fmt: skip
    names = ["input_ids", "labels", *(["seq_lengths"] if packing else [])]
    assert prepared.train.column_names == names
    assert list(prepared.train) == list(trainer.train_dataset.select_columns(names))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_losses_in_trl_are_those_of_the_samples(tmp_path: Path, kind: str) -> None:
    """Packed by us; one sample per row, by TRL's collator; and TRL's own packing of the same tokens."""
    path = folders.write_instructions(tmp_path / "chat.jsonl", 40)
    folder = open_folder(folders.write_folder(tmp_path / "model", kind))
    packed, alone = (prepare([str(path)], folder, seq=256, packing=packing) for packing in (True, False))
    assert len(packed.train) < len(alone.train) == 40

    def loss(data: Any, settings: dict[str, Any], collator: Any) -> float:
        args = trl.SFTConfig(
            output_dir=str(tmp_path / "out"), per_device_eval_batch_size=64, use_cpu=True, report_to=[], bf16=False,
            gradient_checkpointing=False, **settings,
        )  # fmt: skip
        trainer = trl.SFTTrainer(
            model=folders.model(kind), args=args, train_dataset=data, eval_dataset=data, data_collator=collator,
            processing_class=folder.tokenizer,
        )  # fmt: skip
        return float(trainer.evaluate()["eval_loss"])

    wanted = loss(alone.train, alone.trainer_settings, None)
    theirs = loss(alone.train, {"packing": True, "max_length": 256}, None)
    assert loss(packed.train, packed.trainer_settings, packed.collator) == pytest.approx(wanted, rel=1e-6)
    assert theirs == pytest.approx(wanted, rel=1e-6)


# Preferences, text of encoders, labels


PREFERENCES: dict[str, dict[str, Any]] = {
    "lists": {"prompt": talk("q"), "chosen": talk("", "a")[1:], "rejected": talk("", "b")[1:]},
    "whole conversations": {"chosen": talk("q", "a"), "rejected": talk("q", "b")},
    "and a prompt": {"prompt": "q", "chosen": talk("q", "a"), "rejected": talk("q", "b")},
    "strings": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "a prompt beside answers": {"prompt": "q", "chosen": talk("", "a")[1:], "rejected": talk("", "b")[1:]},
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_become_rows_of_trl(tmp_path: Path, folder: ModelFolder, name: str) -> None:
    path = folders.write_rows(tmp_path / "data.jsonl", [PREFERENCES[name]])
    prepared = prepare([str(path)], folder, seq=64)
    assert (prepared.kind, prepared.method) == ("preferences", "dpo")
    assert rows_of(prepared) == [PREFERENCES["lists"]]


def test_preferences_are_counted_as_trl_takes_them(tmp_path: Path, folder: ModelFolder) -> None:
    rows = [
        *([PREFERENCES["lists"]] * 3),
        {"prompt": "q", "chosen": "a", "rejected": "a"},
        {"prompt": "long " * 40, "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": "long " * 40, "rejected": "b"},
    ]
    path = folders.write_rows(tmp_path / "data.jsonl", rows)
    prepared = prepare([str(path)], folder, seq=48)
    counts = prepared.counts
    assert (counts.read, counts.samples, counts.empty, counts.truncated) == (6, 4, 2, 1)
    args = trl.DPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], bf16=False, **prepared.trainer_settings)
    trainer = trl.DPOTrainer(
        model=folders.model(), ref_model=folders.model(), args=args, train_dataset=prepared.train,
        processing_class=folder.tokenizer,
    )  # fmt: skip
    batch = trainer.data_collator(list(trainer.train_dataset))
    assert int(batch["attention_mask"].sum()) == counts.tokens
    assert int(batch["completion_mask"].sum()) == counts.trained


def test_plain_preferences(tmp_path: Path, folder: ModelFolder) -> None:
    rows = [{"chosen": "Human: q\n\nAssistant: yes", "rejected": "Human: q\n\nAssistant: no"}]
    path = folders.write_rows(tmp_path / "data.jsonl", rows)
    assert rows_of(prepare([str(path)], folder, seq=64)) == [
        {"prompt": "Human: q\n\nAssistant: ", "chosen": "yes", "rejected": "no"}
    ]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write_folder(tmp_path_factory.mktemp("folder") / "bert", "bert")


def test_masked_text(tmp_path: Path, encoder: Path) -> None:
    folder = open_folder(encoder, "masked")
    path = folders.write_rows(tmp_path / "data.jsonl", [{"text": "word " * 60}, {"text": ""}, {"text": "word"}])
    prepared = prepare([str(path)], folder, seq=32)
    assert (prepared.method, prepared.counts.divided, prepared.counts.empty) == ("mlm", 1, 1)
    batch = prepared.collator(rows_of(prepared))
    assert batch["input_ids"].shape[1] == 32 and (batch["labels"] != -100).any()
    assert prepared.counts.tokens == int(batch["attention_mask"].sum())
    with pytest.raises(zo.ConfigError, match="a masked model does not take; it goes with --method sft"):
        prepare([str(folders.write_instructions(tmp_path / "chat.jsonl", 2))], folder, seq=32)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["spam", "ham", "spam"], ("ham", "spam")),
        ([1, 0, 2], ("0", "1", "2")),
        (["1", "0", "1"], ("0", "1")),
        (["01", "00", "01"], ("00", "01")),
    ],
)
def test_labels(tmp_path: Path, encoder: Path, labels: list[Any], names: tuple[str, ...]) -> None:
    rows = [{"text": f"row {number}", "label": label} for number, label in enumerate(labels)]
    path = folders.write_rows(tmp_path / "data.jsonl", [*rows, {"text": " ", "label": labels[0]}])
    prepared = prepare([str(path)], open_folder(encoder, "classify"), seq=32)
    assert (prepared.method, prepared.labels) == ("classify", names)
    assert [prepared.labels[row["labels"]] for row in prepared.train] == [str(label) for label in labels]
    assert prepared.counts.empty == 1
    assert prepared.collator(rows_of(prepared))["labels"].shape == (3,)
    rows.append({"text": "x", "label": "other"})
    with pytest.raises(zo.ConfigError, match="line 4: the label 'other' is unknown; the data have"):
        prepare(
            [str(path)],
            open_folder(encoder, "classify"),
            seq=32,
            eval_data=[str(folders.write_rows(tmp_path / "eval.jsonl", rows))],
        )


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, None], "line 2: 'label' is None"),
        ([0, 1.5], "line 2: 'label' is 1.5"),
        (["a", ""], "line 2: 'label' is ''"),
        ([[1], 0], r"line 1: 'label' is \[1\]"),
        (["a", "\ud83d"], "line 2: 'label' has half of a character"),
        ([0, 10**12], "the label 1000000000000, and numbers count classes from 0: 100,000 classes are the most"),
        (["0", "9" * 5000], "the label 9999"),
    ],
)
def test_labels_that_cannot_be_used(labels: list[Any], message: str, tmp_path: Path, encoder: Path) -> None:
    rows = [{"text": "x", "label": label} for label in labels]
    path = folders.write_rows(tmp_path / "data.jsonl", rows)
    with pytest.raises(zo.ConfigError, match=message):
        prepare([str(path)], open_folder(encoder, "classify"), seq=32)


AMINO_ACIDS = "LAGVSERTIDPKQNFYMHWC"


def protein_tokenizer(path: Path) -> Any:
    """One in Python, without a tokenizer.json."""
    (path / "vocab.txt").write_text("\n".join(["<cls>", "<pad>", "<eos>", "<unk>", *AMINO_ACIDS, "<mask>"]))
    return transformers.EsmTokenizer(path / "vocab.txt")


def test_a_tokenizer_in_python(tmp_path: Path, encoder: Path) -> None:
    folder = replace(open_folder(encoder, "masked"), tokenizer=protein_tokenizer(tmp_path))
    path = folders.write_rows(tmp_path / "data.jsonl", [{"text": AMINO_ACIDS * 2}])
    prepared = prepare([str(path)], folder, seq=32)
    ids = folder.tokenizer.convert_tokens_to_ids([*AMINO_ACIDS * 2])
    assert [row["input_ids"] for row in prepared.train] == [[0, *ids[:30], 2], [0, *ids[30:], 2]]
    assert (prepared.counts.trained, prepared.counts.divided) == (40, 1)
    with pytest.raises(zo.ConfigError, match="puts 2 tokens around the words of each row; give --seq 3"):
        prepare([str(path)], folder, seq=2)


def silent_tokenizer() -> Any:
    """Makes no token of text without letters."""
    made = Tokenizer(models.WordLevel({"[PAD]": 0, "[MASK]": 1, "[UNK]": 2}, "[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", mask_token="[MASK]")


@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("masked", {"text": "{}"}),
        ("classify", {"text": "{}", "label": "a"}),
        ("causal", {"text": "{}"}),
        ("causal", {"prompt": "{}", "completion": "{}"}),
    ],
)
def test_text_without_tokens(task: str, row: dict[str, str], tmp_path: Path, encoder: Path, model: Path) -> None:
    rows = [{name: value.format("\u200b") for name, value in row.items()}]
    rows += [{name: value.format("a b") for name, value in row.items()}]
    rows += [row | {"label": "b"}] * ("label" in row)
    path = folders.write_rows(tmp_path / "data.jsonl", rows)
    folder = replace(open_folder(model if task == "causal" else encoder, task), tokenizer=silent_tokenizer())
    prepared = prepare([str(path)], folder, seq=32)
    assert [2, 2] in [row["input_ids"][:2] for row in prepared.train] and len(prepared.train) == len(rows) - 1


# Errors


BAD_ROWS: list[tuple[Any, str]] = [
    ({"messages": None}, "line 2: 'messages' is missing, not a list of messages"),
    ({"messages": 3}, "line 2: 'messages' is 3, not a list of messages"),
    ({"messages": []}, r"line 2: 'messages' is \[\], not a list"),
    ({"messages": ["q"]}, "line 2: message 1 of 'messages' is 'q', not an object with role and content"),
    ({"messages": [*talk("q"), {"role": ASSISTANT, "content": None}]}, "line 2: the content of message 2 .* missing"),
    ({"messages": [{"role": "alien", "content": "q"}]}, "line 2: message 1 .* has the role 'alien'; roles are system"),
    ({"messages": talk("", "a")[1:]}, "line 2: the first message is of the role assistant; .* begins with a user's"),
    ({"messages": [{"role": USER, "content": [{"type": "image"}]}]}, "line 2: .* has a part that is not text"),
    ({"question": "q"}, "line 2: 'messages' is missing"),
    ({"messages": talk("q\ud83d", "a")}, "line 2: the content of message 1 of 'messages' has half of a character at 1"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_a_bad_row_is_named(tmp_path: Path, folder: ModelFolder, row: Any, message: str) -> None:
    path = folders.write_rows(tmp_path / "chat.jsonl", [{"messages": talk("q", "a")}, row])
    with pytest.raises(zo.ConfigError, match="chat.jsonl, " + message):
        prepare([str(path)], folder, seq=64)


def test_a_bad_row_of_a_table_is_named(tmp_path: Path, folder: ModelFolder) -> None:
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": None}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data.parquet")
    with pytest.raises(zo.ConfigError, match=r"data.parquet, row 2: 'completion' is missing"):
        prepare([str(tmp_path / "data.parquet")], folder, seq=64)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": \n', "a.jsonl, line 2: not JSON: .*, at character 11; mend the line"),
        ("a.jsonl", "[1]\n", "a.jsonl, line 1: an array, not an object"),
        ("a.jsonl", '[\n{"text": "x"}]', "a.jsonl, line 1: not JSON: .* a file of one array has the ending .json"),
        ("a.json", '[{"prompt": "q", "completion": "a", "label": false}]', "completions with a label each"),
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.json", "[]", "a.json has no row"),
        ("a.json", '[{"text": "x"}, 3]', "a.json, row 2: a number, not an object"),
        ("a.csv", "question;answer\n", "a.csv has no row"),
        ("a.csv", "question;answer\n1;2\n", "has the columns question;answer \\(CSV has commas"),
        ("a.csv", "question,answer\n1,2,3\n", "a.csv, line 2: 3 fields, and the header has 2"),
        ("a.csv", "a,b\n1,2\n", "has the columns a, b, and .* not known.* conversations: messages, conversations;"),
        ("a.csv", "text,text\n1,2\n", "a.csv has the column 'text' twice"),
        ("a.xlsx", "x", "has none of the endings"),
        ("a.parquet", "x", "a.parquet cannot be read"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, folder: ModelFolder, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(zo.ConfigError, match=message):
        prepare([str(tmp_path / name)], folder, seq=64)


def test_a_table_with_a_column_twice(tmp_path: Path, folder: ModelFolder) -> None:
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(zo.ConfigError, match="a.parquet has the column 'text' twice; rename one of them$"):
        prepare([str(tmp_path / "a.parquet")], folder, seq=64)


def test_a_table_with_a_damaged_page(tmp_path: Path, folder: ModelFolder) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["a long word"]})
    settings = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pyarrow.parquet.write_table(table, path, write_page_checksum=True, **settings)
    path.write_bytes(path.read_bytes().replace(b"a long word", b"a lung word", 1))
    with pytest.raises(zo.ConfigError, match="a.parquet cannot be read behind row 0: .*CRC checksum"):
        prepare([str(path)], folder, seq=64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "dpo"}, "holds conversations, by messages, which method dpo does not take; .* --method sft"),
        ({"method": "rlhf"}, "is unknown; use one of auto, sft"),
        ({"seq": 1}, "seq=1"),
        ({"seq": 4096}, "has positions for 256 tokens; give --seq 256"),
        ({"split": 1.5}, "split=1.5"),
        ({"data": []}, "there are no data"),
        ({"data": ["none.jsonl"]}, "none.jsonl does not exist"),
        ({"data": [""]}, "the name of data is empty"),
        ({"data": ["~no-such-user/a.jsonl"]}, "names the home of a user that this machine does not have"),
        ({"data": ["x" * 300]}, "is longer than a file system takes"),
        ({"data": [f"{Path(__file__).parent}/test_finetune_dta.jsonl"]}, r"; did you mean /.*/test_finetune_data.py\?"),
        ({"data": ["/proc/1/mem.jsonl"]}, "mem.jsonl does not exist"),
        ({"data": ["someone/chats"]}, "someone/chats is not a file or folder here, and the hub .* cannot be reached"),
        ({"seq": 8}, "no row of .* has a token to train on. All 4 are left out"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, folder: ModelFolder, given: dict[str, Any], message: str) -> None:
    path = folders.write_instructions(tmp_path / "chat.jsonl", 4)
    with pytest.raises(zo.ConfigError, match=message):
        prepare(**({"data": [str(path)], "folder": folder, "seq": 64} | given))


def test_names_that_run_toml_cannot_hold() -> None:
    given = {"model": "~no-such-user/m", "data": ["a\udcff.jsonl"], "out": "b\udcff"}
    with pytest.raises(zo.ConfigError) as raised:
        FinetuneConfig.from_tables(given, {})
    for line in (
        "data=.* is not a list of text in UTF-8",
        "out=.* is not a path in UTF-8",
        "model: .* names the home of",
    ):
        assert re.search(line, str(raised.value))


def test_preferences_that_cannot_be_used(tmp_path: Path, folder: ModelFolder) -> None:
    for row, message in [
        ({"chosen": "a", "rejected": "b"}, "have no common beginning"),
        ({"chosen": "a", "rejected": talk("q", "b")}, "one of 'chosen' and 'rejected' is a string"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "'rejected' is missing"),
    ]:
        path = folders.write_rows(tmp_path / "data.jsonl", [row])
        with pytest.raises(zo.ConfigError, match=f"line 1: .*{message}"):
            prepare([str(path)], folder, seq=64)
