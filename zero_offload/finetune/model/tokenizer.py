"""The tokenizer of a folder: found, read, and checked against the model's config, with one error that says what to do.

The call: `read_tokenizer`. transformers is imported inside of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zero_offload.base.errors import ConfigError
from zero_offload.integrations.gate import part_of, read_object, reading
from zero_offload.plan.hints import Hints

_PROBE = "user\nWhat is 2 + 40? The answer: forty-two."
_WORD_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_TOKEN_NAMES = ("pad_token", "eos_token", "mask_token")
"""Those that are used by their numbers."""
_TOKENIZER_SETTINGS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def read_tokenizer(folders: Sequence[Path], config: Any, is_needed: bool) -> Any:
    """Of the first folder that has one; None if none has, and it is not needed."""
    found = [folder for folder in folders if any((folder / name).is_file() for name in _WORD_FILES)]
    if not found:
        if not is_needed:
            return None
        raise ConfigError(
            f"{folders[-1]} has no tokenizer (none of {', '.join(_WORD_FILES)}); get its files from where the weights "
            f"are from: hf download ORG/NAME --include '*token*' 'vocab*' 'merges.txt' --local-dir {folders[-1]}"
        )
    tokenizer = _tokenizer_of(found[0])
    num_rows = Hints(config).number("vocab_size")
    if num_rows and len(tokenizer) > num_rows:
        raise ConfigError(
            f"the tokenizer in {found[0]} has {len(tokenizer):,} tokens, and the model's embedding {num_rows:,} rows; "
            "use the model's own tokenizer, or resize the embedding first (resize_token_embeddings)"
        )
    words = tokenizer.get_vocab()
    last = max(words, key=lambda word: words[word], default="")
    if num_rows and words and words[last] >= num_rows:
        raise ConfigError(
            f"the tokenizer in {found[0]} gives {last!r} the number {words[last]:,}, and the model's embedding has "
            f"{num_rows:,} rows; use the model's own tokenizer"
        )
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ConfigError(
            f"the tokenizer in {found[0]} names no token that ends a text, and none that fills up shorter rows. Add "
            '"eos_token" to its tokenizer_config.json, a token that its vocabulary has'
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _tokenizer_of(folder: Path) -> Any:
    settings = {name: read_object(folder / name) for name in _TOKENIZER_SETTINGS if (folder / name).is_file()}
    what = f"the tokenizer in {folder}"
    with reading(what, "mend it, or get its files again", lambda: _bad_setting(folder, settings)):
        tokenizer = _loaded_tokenizer(folder)
        ids = tokenizer(_PROBE)["input_ids"]
    if not ids or not tokenizer("a")["input_ids"]:
        raise ConfigError(f"{what} makes no token of text such as 'a'; get its files again")
    for name in _TOKEN_NAMES:
        if getattr(tokenizer, name) == "":  # has no number
            setattr(tokenizer, name, None)
    _check_chat_templates(folder, tokenizer)
    limit = tokenizer.model_max_length
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 1 or limit % 1:
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'}: model_max_length is {limit!r}, not a whole number from 1 up; mend it"
        )
    return tokenizer


def _check_chat_templates(folder: Path, tokenizer: Any) -> None:
    """Raise ConfigError for values that are neither a text nor texts by their names; an empty text counts as none."""
    template = tokenizer.chat_template
    texts = [*template, *template.values()] if isinstance(template, dict) else [] if template is None else [template]
    for text in texts:
        if not isinstance(text, str):
            shown = type(text).__name__
            raise ConfigError(f"the tokenizer in {folder}: chat_template has a {shown} where text belongs; mend it")
    if not texts or (isinstance(template, str) and not template.strip()):
        tokenizer.chat_template = None


def _loaded_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    tokenizer(_PROBE)  # what settings say beside the words is taken now
    len(tokenizer), tokenizer.get_added_vocab(), tokenizer.special_tokens_map
    return tokenizer


def _bad_setting(folder: Path, settings: Mapping[str, Mapping[str, Any]]) -> str:
    """The file of a tokenizer that does not load, and the field without which it does."""
    for name, words in reversed(
        list(settings.items())
    ):  # the first is the file of all words, each trial of which takes long

        def trial(given: Any, name: str = name) -> None:
            with TemporaryDirectory() as changed:
                for file in folder.iterdir():
                    if file.name != name:
                        (Path(changed) / file.name).symlink_to(file.resolve())
                (Path(changed) / name).write_text(json.dumps(given), encoding="utf-8")
                _loaded_tokenizer(Path(changed))

        if field := part_of(words, trial, levels=1):
            return f"{name}, {field}"
    return next(iter(settings), "")
