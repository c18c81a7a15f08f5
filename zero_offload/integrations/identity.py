"""Everything beside weights that decides a model's numbers, by value: config, adapter, tokenizer, generation config.

Values have the defaults of their classes filled in, so they are the same however a file is written. All of them are
JSON's. Whatever is in no list here decides numbers. The calls: `config_values` and its like for what is there now,
`first_difference` from values that were kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from zero_offload.checkpoint.metrics import show
from zero_offload.model.about import config_values, plain

GENERATION_MAY_CHANGE = ("transformers_version", "_from_model_config")
_LENGTH_MAX, _ENTRIES_MAX, _TEMPLATE_MAX = 2000, 64, 100_000
"""Longer text, and larger lists and tables, are kept as their digests."""
_AROUND = 40
"""Letters of two long texts that are shown before and behind the first that differs."""


class Difference(NamedTuple):
    """The first field in which two records differ."""

    name: str
    before: str
    now: str
    """The values, as text that fits a line."""


def filled_in(values: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Values that another version of transformers has written, with the fields that the class of `config` has now.

    As they are, where that class does not take them.
    """
    try:
        return config_values(type(config).from_dict(dict(values)))
    except Exception:  # of any model's code
        return dict(values)


def generation_values(config: Any) -> dict[str, Any]:
    """Those of a generation config. A value that is not set has the default of `generate`."""
    usual = type(config)._get_default_generation_params()
    words = {name: usual.get(name) if value is None else value for name, value in config.to_dict().items()}
    return {name: plain(words[name]) for name in sorted(words) if name not in GENERATION_MAY_CHANGE}


def tokenizer_values(tokenizer: Any) -> dict[str, Any]:
    """Parts of a tokenizer that decide tokens. A vocabulary is its digest."""
    if tokenizer.is_fast:
        words = json.loads(tokenizer.backend_tokenizer.to_str())
    else:
        words = {"vocab": tokenizer.get_vocab(), "added_tokens": sorted(map(str, tokenizer.added_tokens_decoder))}
    for name in ("truncation", "padding", "version"):  # those of the last call, and of the file
        words.pop(name, None)
    words["special_tokens"] = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    for name in ("padding_side", "truncation_side", "split_special_tokens", "model_input_names"):
        words[name] = getattr(tokenizer, name, None)
    found = {name: _short(plain(words[name])) for name in sorted(words)}
    template = plain(tokenizer.chat_template)
    return found | {"chat_template": template if len(json.dumps(template)) < _TEMPLATE_MAX else _digest(template)}


def _short(value: Any) -> Any:
    """With the digests of what is long, its parts by themselves where they have names."""
    if len(json.dumps(value)) <= _LENGTH_MAX:
        return value
    if isinstance(value, dict) and len(value) <= _ENTRIES_MAX:
        return {name: _short(each) for name, each in value.items()}
    return _digest(value)


def _digest(value: Any) -> str:
    return f"sha256:{hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]}"


def first_difference(before: Any, now: Any, name: str = "") -> Difference | None:
    """The first place in which two values differ, by its names; None where they are the same.

    A name without a value is the same as a missing name.
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        pairs = {str(key): (before.get(key), now.get(key)) for key in (*now, *before)}
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = {str(index): pair for index, pair in enumerate(zip(before, now, strict=True))}
    else:
        is_same = before == now and isinstance(before, bool) == isinstance(now, bool)
        return None if is_same else Difference(name, *_shown(before, now))
    found = (first_difference(*pair, f"{name}.{key}" if name else key) for key, pair in pairs.items())
    return next((each for each in found if each is not None), None)


def _shown(before: Any, now: Any) -> tuple[str, str]:
    if isinstance(before, str) and isinstance(now, str) and max(len(before), len(now)) > 2 * _AROUND:
        same = next((at for at, (one, other) in enumerate(zip(before, now, strict=False)) if one != other), None)
        at = max((min(len(before), len(now)) if same is None else same) - _AROUND, 0)
        before, now = (f"{'...' * (at > 0)}{each[at : at + 2 * _AROUND]}" for each in (before, now))
    return show(before), show(now)
