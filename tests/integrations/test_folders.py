"""The folders and conversations that other tests start from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from tests.helpers import folders


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "bert"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_loads(tmp_path: Path, kind: str, sharded: bool) -> None:
    path = folders.write_folder(tmp_path / "model", kind, sharded=sharded, dtype="bfloat16")
    loader = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    loaded, made = loader.from_pretrained(path), folders.model(kind, dtype="bfloat16")
    assert loaded.dtype is torch.bfloat16
    assert tools.distance(tools.values_of(loaded), tools.values_of(made)) == 0
    assert len(list(path.glob("*.safetensors"))) == (3 if sharded else 1)
    assert AutoTokenizer.from_pretrained(path).get_vocab() == folders.tokenizer().get_vocab()


@pytest.mark.parametrize("template", [folders.CHATML, folders.CHATML_MARKED])
def test_tokens_are_the_text(template: str) -> None:
    tokenizer = folders.tokenizer(template)
    for turns in folders.conversations(100):
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        assert all(turn["content"] in text for turn in turns)
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_rows_are_written(tmp_path: Path) -> None:
    path = folders.write_instructions(tmp_path / "chat.jsonl", 700)
    rows = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    assert rows == list(folders.conversations(700))
    assert len({json.dumps(row) for row in rows}) == 700
    pairs = folders.write_preferences(tmp_path / "pairs.jsonl", 50).read_text().splitlines()
    assert len(pairs) == 50
    assert all(row["chosen"] != row["rejected"] for row in map(json.loads, pairs))
