"""A model's own description, for a reader of its generation without its script: config, class, adapters.

Owns the words in manifests ("about"), which `zero-offload export` makes a folder of. A model that says nothing, or what
JSON cannot hold, has none: a config of others never stops a commit. The calls: `about`; `config_file` for one config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

_PATHS = ("_name_or_path", "auto_mapping")
"""Words that tell of the machine on which the model was built."""


def about(model: nn.Module) -> dict[str, Any]:
    """The model's class, its "config" and "generation_config" as their files have them, and configs of adapters by
    name."""
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    adapters = getattr(model, "peft_config", None)
    base = model
    try:
        if isinstance(adapters, Mapping) and callable(get_base := getattr(model, "get_base_model", None)):
            base = get_base()
        config = config_file(getattr(base, "config", None))
        if not config:
            return {}
        found: dict[str, Any] = {
            "package": type(base).__module__.partition(".")[0],
            "class": type(base).__name__,
            "config": config,
        }
        if generation := config_file(getattr(base, "generation_config", None)):
            found["generation_config"] = generation
        if isinstance(adapters, Mapping) and base is not model:
            found["adapters"] = {name: _plain(each.to_dict()) for name, each in adapters.items()}
        json.dumps(found, allow_nan=False)
    except Exception:  # whatever a class of others raises
        return {}
    return found


def config_file(config: Any) -> dict[str, Any]:
    """A config of transformers as its file has it, without paths of this machine; empty of others."""
    if not callable(getattr(config, "to_json_string", None)):
        return {}
    words = json.loads(config.to_json_string())
    return {name: value for name, value in words.items() if name not in _PATHS} if isinstance(words, dict) else {}


def _plain(words: Mapping[str, Any]) -> dict[str, Any]:
    """As peft writes them: sets are lists in JSON."""
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in words.items()}
    return {name: value for name, value in plain.items() if name not in _PATHS[1:]}
