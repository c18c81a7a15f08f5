"""A model's own description, for a reader of its generation without its script: config, class, adapters.

Owns the words in manifests ("about"), which `zero-offload export` makes a folder of. A model that says nothing, or what
JSON cannot hold, has none: a config of others never stops a commit. Owns which fields of a config decide numbers, too.
The calls: `about`; `config_file` for one config; `config_values` and `adapter_values` of one; `deciding_values` of all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

_PATHS = ("_name_or_path", "auto_mapping")
"""Words that tell of the machine on which the model was built."""

CONFIG_MAY_CHANGE = (
    *("_name_or_path", "transformers_version", "auto_map"),
    *("architectures", "dtype"),  # the class is compared by itself; what computes is the run's precision
    *("id2label", "label2id"),  # labels are the data's
    "use_cache",
)
"""Fields of a model's config that decide no number, in nested configs too."""
ADAPTER_MAY_CHANGE = ("base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version")
"""Those of an adapter's config."""
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
"""A config's file may name them, and `to_dict` leaves them out."""


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


def config_values(config: Any) -> dict[str, Any]:
    """Those of a config of transformers, by field."""
    words = {name: value for name, value in config.to_dict().items() if name not in CONFIG_MAY_CHANGE}
    for name in config.sub_configs:
        if hasattr(inner := getattr(config, name, None), "to_dict"):
            words[name] = config_values(inner)
    words |= {name: getattr(config, f"_{name}", None) for name in _IMPLEMENTATIONS}
    return {name: plain(words[name]) for name in sorted(words)}


def adapter_values(config: Any) -> dict[str, Any]:
    """Those of a config of peft, its kind of initialization among them."""
    words = {name: value for name, value in config.to_dict().items() if name not in ADAPTER_MAY_CHANGE}
    return {name: plain(words[name]) for name in sorted(words)}


def plain(value: Any) -> Any:
    """As JSON has it. Values that JSON lacks become text; sets become lists in order."""
    if isinstance(value, Mapping):
        return {str(getattr(key, "value", key)): plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=str)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    value = getattr(value, "value", value)  # of an enum
    if value is None or isinstance(value, bool | str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text  # an address is another one in each process


def deciding_values(model: nn.Module) -> dict[str, str]:
    """Every such value in the configs of a model's modules and in those of their adapters, by dotted name, as text."""
    found, seen = dict[str, str](), set[int]()
    for path, module in model.named_modules():
        for name, config in _configs_of(module):
            if id(config) in seen:
                continue
            seen.add(id(config))
            try:
                values = config_values(config) if name == "config" else adapter_values(config)
            except Exception:  # a config of any class
                continue
            found |= _by_dotted_name(f"{path}.{name}" if path else name, values)
    return found


def _configs_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    try:
        config, adapters = getattr(module, "config", None), getattr(module, "peft_config", None)
    except Exception:  # a property of any class
        return
    if hasattr(type(config), "sub_configs"):
        yield "config", config
    if isinstance(adapters, Mapping):
        for name, each in adapters.items():
            yield f"peft_config.{name}", each


def _by_dotted_name(name: str, value: Any) -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        return {
            key: text for part, each in value.items() for key, text in _by_dotted_name(f"{name}.{part}", each).items()
        }
    return {name: repr(value)}
