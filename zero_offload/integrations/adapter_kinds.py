"""Adapter folders by peft's meaning: which are loaded, and what those of PiSSA and OLoRA take out of the base.

Owns the closed lists. A kind, an initialization or a field outside of these lists is refused by its name. peft may
compute something from it that no file has. The saved model is right, not peft's load of it. The calls:
`check_adapter_words` on adapter_config.json, before anything is built; `plain_init` as the model is built; then
`residuals`, whose recipes `zo.offload` carries out one weight at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.base.errors import ConfigError
from zero_offload.checkpoint.hf_files import FileTensor
from zero_offload.model.deferred.from_files import FileRecipe, digest

LOADED_KINDS = frozenset((
    "BEFT", "BOFT", "C3A", "DEFT", "FOURIERFT", "GRALORA", "HIRA", "HRA", "IA3", "LILY", "LN_TUNING", "LOHA", "LOKR",
    "LORA", "MISS", "OFT", "PEANUT", "ROAD", "UNILORA", "VBLORA", "WAVEFT",
))  # fmt: skip
"""Kinds of peft whose file has all that a build without the base's values does not compute."""
_WHY_NOT = {
    "ADALORA": "peft adds a penalty to its loss, and changes its ranks by a call of the training program",
    "POLY": "it takes task_ids beside the text",
    "MULTITASK_PROMPT_TUNING": "it takes task_ids beside the text",
}
FILE_INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` after which the file has all values, and the base is as it was."""
BASE_INITS = ("pissa", "olora")
"""Those that take a part out of the base's weights, which follows from these weights."""
_CHANGED = "it changes the base's weights by numbers that the folder does not have"
_REFUSED_INITS = {
    "pissa_niter": "it changes the base's weights by random numbers, which differ in each load",
    "corda": _CHANGED,
    "lora_ga": _CHANGED,
    "loftq": _CHANGED,
    "mica": "its lora_B is computed from the base's weights and stays frozen",
}
LORA_FIELDS = frozenset((
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora",
    "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "use_dora", "layer_replication", "lora_bias", "target_parameters", "ensure_weight_tying",
))  # fmt: skip
"""Fields of LoRA that the model is built by."""
UNUSED_FIELDS = frozenset((
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_type",
    "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "runtime_config",
))  # fmt: skip
"""Fields that change no value of a saved LoRA, or of kinds that are refused already."""
_NOT_SET: tuple[object, ...] = (None, False, [], {})
_CONVERT = (
    "Save a trained model that is in memory as plain LoRA: model.save_pretrained(folder, "
    "path_initial_model_for_weight_conversion=INIT). INIT is a folder of the adapter as it was before the first step"
)
_MERGE = (
    "Where memory holds it, write a merged folder: peft.PeftModel.from_pretrained(base, folder).merge_and_unload()"
    ".save_pretrained(new_folder); then copy the tokenizer's files there"
)
_SAVE_MERGED = "Where the trained model is in memory, write a merged folder: model.merge_and_unload().save_pretrained()"
_IN_MEMORY = "It merges into no weights: use peft and transformers, where memory holds the model"
_OF_VARIANTS = {"kasa_config": _SAVE_MERGED} | dict.fromkeys(
    ("trainable_token_indices", "use_bdlora", "velora_config"), _MERGE
)
"""Advice for a variant of LoRA; others merge into no weights."""


# Refusals


def check_adapter_words(words: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError that names the kind, the initialization or the field by which an adapter is not loaded here."""
    from peft import PeftType
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = words.get("peft_type")
    if not isinstance(kind, str) or not kind:
        raise ConfigError(f"{file}: peft_type={kind!r} names no kind of adapter; get the file again")
    if kind not in LOADED_KINDS:
        if kind not in list(PeftType):
            raise ConfigError(f"{file}: peft_type={kind!r} is a kind of adapter that the installed peft does not know")
        why = _WHY_NOT.get(kind, "peft computes a part of it that is in no file, or passes it to the model as input")
        raise ConfigError(f"{file}: peft_type={kind!r} is not loaded here: {why}. {_remedy(kind)}")
    fields = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)].__dataclass_fields__
    unknown = words.keys() - fields.keys() - UNUSED_FIELDS
    if found := sorted(name for name in unknown if words[name] not in _NOT_SET):
        raise ConfigError(
            f"{file}: {found[0]}={words[found[0]]!r} is a setting that the installed peft does not know, and would "
            "leave out; pip install -U peft"
        )
    if kind == "LORA":
        _check_lora(words, file)


def _remedy(kind: str) -> str:
    """Advice for a kind that is not loaded."""
    from peft import PeftType
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    can_merge = hasattr(PEFT_TYPE_TO_TUNER_MAPPING.get(PeftType(kind)), "merge_and_unload") and kind != "POLY"
    return _MERGE if can_merge else _IN_MEMORY


def _check_lora(words: Mapping[str, Any], file: Path) -> None:
    init = words.get("init_lora_weights", True)
    known = next((text for text in _REFUSED_INITS if str(init).lower().startswith(text)), None)
    if known is not None:
        remedy = _SAVE_MERGED if known in ("mica", "loftq") else _CONVERT
        raise ConfigError(f"{file}: init_lora_weights={init!r} is not loaded here: {_REFUSED_INITS[known]}. {remedy}")
    if not isinstance(init, bool) and init not in (*FILE_INITS, *BASE_INITS):
        names = ", ".join(map(repr, (*FILE_INITS, *BASE_INITS)))
        raise ConfigError(f"{file}: init_lora_weights={init!r} is none of {names}")
    if init in BASE_INITS and words.get("target_parameters"):
        raise ConfigError(
            f"{file}: init_lora_weights={init!r} with target_parameters is not loaded here: it changes parameters "
            f"other than weights of layers. {_CONVERT}"
        )
    others = words.keys() - LORA_FIELDS - UNUSED_FIELDS
    if found := sorted(name for name in others if words[name] not in _NOT_SET):
        raise ConfigError(
            f"{file}: {found[0]} is set, a variant of LoRA that is not loaded here: its forward takes more than the "
            f"folder's values and the text. {_OF_VARIANTS.get(found[0], _IN_MEMORY)}"
        )


# The part that is taken out of the base


def reads_base(words: Mapping[str, Any]) -> bool:
    """True of an adapter that takes a part out of the base's weights."""
    return words.get("peft_type") == "LORA" and words.get("init_lora_weights") in BASE_INITS


@contextmanager
def plain_init(config: Any) -> Iterator[None]:
    """peft builds adapters inside without a look at the base's weights. Afterwards the config says what it said: so
    does a folder that is written of the model."""
    init = getattr(config, "init_lora_weights", True)
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True
    try:
        yield
    finally:
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = init


@dataclass(frozen=True)
class _Layer:
    """A layer in which an adapter has taken its beginning out of the base's weight."""

    module: nn.Module
    """The base's layer."""
    config: Any
    """peft's config of such an adapter of one layer, named "layer"."""

    def left_of(self, weight: Tensor) -> Tensor:
        """The rest that peft leaves of a weight, in its dtype and on its device."""
        from peft import inject_adapter_in_model

        base: Any = copy.copy(self.module)
        vars(base)["_parameters"] = dict.fromkeys(base._parameters) | {"weight": nn.Parameter(weight, False)}
        with torch.random.fork_rng(devices=[]):
            inject_adapter_in_model(self.config, nn.ModuleDict({"layer": base}))
        left: Tensor = base.weight.data
        return left


TakenOut = tuple[_Layer, ...]
"""In the order in which peft adds adapters: several where they share the weight."""


@dataclass(frozen=True, eq=False)
class ResidualRecipe:
    """The values of a weight are those of files, without what adapters have taken out of it."""

    stored: FileRecipe
    layers: TakenOut
    is_skipped: bool = False

    @property
    def value(self) -> object:
        return self.stored.value

    @property
    def source(self) -> None:
        """They are in no file."""

    def drawn(self) -> bytes:
        return digest(self.stored.source) + repr([repr(layer.config) for layer in self.layers]).encode()

    def make(self) -> Tensor:
        """In the file's dtype: peft computes with weights as `from_pretrained` has loaded them."""
        values = self.stored.make()
        for layer in self.layers:
            values = layer.left_of(values)
        return values


def residuals(model: Any, sources: Mapping[int, FileTensor], saved: Container[int]) -> dict[int, TakenOut]:
    """By the ids of the base's weights: the layers whose adapters have taken their beginning out of them.

    `sources` are the base's files by such ids. `saved` has the ids of what the adapter's own file holds: a base weight
    beside an adapted embedding is saved there as it was left. Raises ConfigError for weights in a dtype that peft does
    not compute this in.
    """
    found: dict[int, TakenOut] = {}
    for name, config in model.peft_config.items():
        if getattr(config, "init_lora_weights", True) not in BASE_INITS:
            continue
        for path, module in model.named_modules():
            # Of embeddings and parameters peft begins with zeros, whatever the config says.
            if name not in getattr(module, "lora_A", ()) or not isinstance(module.get_base_layer(), nn.Module):
                continue
            weight = module.get_base_layer().weight
            if id(weight) in saved:
                continue
            source = sources.get(id(weight))
            if source is None or source.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                what = "no weight in the files" if source is None else f"a weight in {source.dtype_name}"
                raise ConfigError(
                    f"init_lora_weights={config.init_lora_weights!r} takes a part out of {path}, which has {what}; "
                    "peft computes it of weights in fp32, bf16 and fp16"
                )
            own = replace(
                config, r=module.r[name], lora_alpha=module.lora_alpha[name], target_modules=["layer"],
                use_dora=False, rank_pattern={}, alpha_pattern={}, exclude_modules=None, modules_to_save=None,
                layers_to_transform=None, layers_pattern=None, layer_replication=None, target_parameters=None,
                ensure_weight_tying=False, bias="none", task_type=None,
            )  # fmt: skip
            found[id(weight)] = (*found.get(id(weight), ()), _Layer(module.get_base_layer(), own))
    return found
