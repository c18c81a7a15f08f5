"""Small models as Hugging Face folders, with a tokenizer trained on docstrings; conversations made of docstrings.

Docstrings are those of the standard library: all is the same in every process of one Python version.
Import `tests.helpers.tools` first where Trainer or TRL are used.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCAB = 512
PAD, TURN, EOS, MASK = SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|mask|>")

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Says nothing of which tokens the assistant's words are."""
CHATML_MARKED = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The same text, with the assistant's words marked."""

MODULES = (
    *("argparse", "ast", "base64", "bisect", "calendar", "cmath", "codecs", "collections", "colorsys", "contextlib"),
    *("copy", "csv", "dataclasses", "difflib", "dis", "email.utils", "fileinput", "fnmatch", "functools", "gettext"),
    *("glob", "gzip", "heapq", "html", "inspect", "ipaddress", "itertools", "json", "keyword", "linecache", "locale"),
    *("math", "mimetypes", "operator", "os.path", "pkgutil", "posixpath", "pprint", "quopri", "random", "re"),
    *("shlex", "shutil", "statistics", "string", "struct", "tempfile", "textwrap", "token", "tokenize", "traceback"),
    *("types", "typing", "unicodedata", "urllib.parse", "uuid", "warnings", "weakref", "zlib"),
)


# Text


@functools.cache
def descriptions() -> tuple[tuple[str, str], ...]:
    """Names of public functions of the standard library, and the first paragraph of what their docstrings say."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for function, value in sorted(vars(module).items()):
            is_here = getattr(value, "__module__", None) in (name, f"_{name}", "posixpath", "genericpath")
            if inspect.isroutine(value) and is_here and not function.startswith("_"):
                paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
                if len(paragraph) > 20:
                    found[f"{name}.{function}"] = paragraph
    return tuple(found.items())


def conversations(num: int) -> Iterator[list[dict[str, str]]]:
    """Questions about functions and their answers. Every third has two turns, every fourth a system prompt."""
    asked = ("What does {} do?", "Explain {} in one paragraph.", "I found {} in a program. What is it for?")
    known = descriptions()
    for index in range(num):
        turns = []
        if index % 4 == 3:
            turns.append({"role": "system", "content": "You answer questions about Python's standard library."})
        for turn in range(2 if index % 3 == 2 else 1):
            name, answer = known[(index + 7 * turn) % len(known)]
            question = asked[(index // len(known) + turn) % len(asked)].format(name)
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield turns


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_instructions(path: Path, num: int) -> Path:
    """JSONL of `conversations`, in a column "messages"."""
    return write_rows(path, [{"messages": turns} for turns in conversations(num)])


def write_preferences(path: Path, num: int) -> Path:
    """JSONL of questions with a right answer, "chosen", and that to another question, "rejected"."""
    known = [each for each in conversations(3 * num + 30) if len(each) == 2]
    rows = [
        {"prompt": right[:1], "chosen": right[1:], "rejected": wrong[1:]}
        for right, wrong in zip(known, known[1:], strict=False)
        if right[1:] != wrong[1:]
    ]
    return write_rows(path, rows[:num])


# Folders


@functools.cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((f"{name} {text}\n" for name, text in descriptions()), trainer)
    return tokenizer.to_str()


def tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 512 tokens; `template` is the chat template."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        pad_token=PAD,
        eos_token=EOS,
        mask_token=MASK,
        cls_token=TURN,
        sep_token=EOS,
        model_max_length=256,
    )
    made.chat_template = template
    return made


def model(kind: str = "llama", *, tied: bool | None = None, dtype: str = "float32", **changes: Any) -> PreTrainedModel:
    """Two blocks of width 64 with seeded values: "llama", "qwen3", "gpt2", or an encoder, "bert".

    `tied`: whether the head is the embedding; the default is the kind's own. `changes`: other settings of its config.
    """
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": SPECIAL.index(EOS)}
    wide = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    long = {"vocab_size": VOCAB, "max_position_embeddings": 256, **ids}
    ties = {} if tied is None else {"tie_word_embeddings": tied}
    torch.manual_seed(0)
    config: Any
    made: Any
    if kind == "llama":
        config = transformers.LlamaConfig(**(wide | long | {"num_key_value_heads": 2} | ties | changes))
        made = transformers.LlamaForCausalLM(config)
    elif kind == "qwen3":
        heads = {"num_key_value_heads": 2, "head_dim": 16}
        config = transformers.Qwen3Config(**(wide | long | heads | {"tie_word_embeddings": True} | ties | changes))
        made = transformers.Qwen3ForCausalLM(config)
    elif kind == "gpt2":
        size = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": VOCAB}
        config = transformers.GPT2Config(**(size | ids | ties | changes))
        made = transformers.GPT2LMHeadModel(config)
    else:
        assert kind == "bert", kind
        made = transformers.BertForMaskedLM(transformers.BertConfig(**(wide | long | ties | changes)))
    return made.to(getattr(torch, dtype))


def write_folder(
    path: Path, kind: str = "llama", *, sharded: bool = False, template: str | None = CHATML, **settings: Any
) -> Path:
    """A folder as the hub has them: weights in one file or several, config, generation config, tokenizer.

    `settings`: those of `model`.
    """
    made = model(kind, **settings)
    if kind != "bert":
        made.generation_config = GenerationConfig(eos_token_id=SPECIAL.index(EOS), pad_token_id=0, max_new_tokens=32)
    made.save_pretrained(path, max_shard_size="100KB" if sharded else "1GB")
    tokenizer(template).save_pretrained(path)
    return path
