"""Tiny configurations: each field of transformers' own default gets a value by its name.

A width becomes `WIDTH` in each place, so that widths which must agree do. Kinds of layers stay: a list of kinds keeps
one layer of each. `EXCEPTIONS` of `exceptions.py` says what the names do not.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

VOCAB, WIDTH, WIDE, HEADS, HEAD_DIM, LAYERS = 128, 32, 48, 4, 8, 2
PER_LAYER = r".*_per_layer|layer_.*|intermediate_size"
"""Names of lists of numbers that have one for each layer, if they have as many."""
FIRST_SPECIAL = 100
"""Ids from here on stand for images and the like."""

Rule = Callable[[Any], Any]


def _at_most(limit: int) -> Rule:
    return lambda value: min(value, limit)


def _always(new: int) -> Rule:
    return lambda value: new if value else value


SCALARS: Sequence[tuple[str, Rule]] = (
    (r"(.*_)?vocab(_size(_.*)?)?|.*num_embeddings|.*codebook_size|codebook_n|text_vocab", _at_most(VOCAB)),
    (r".*kernel_size|.*window|.*stride|.*_ratio|.*_factor|num_channels|in_chans|.*max_norm", lambda value: value),
    (r"type_vocab_size|num_labels", _at_most(2)),
    (r"mm_tokens_per_image", _at_most(4)),
    (r"upsample_groups", _at_most(WIDTH)),
    (
        r"(.*_)?(num_)?hidden_layers|(.*_)?(num_)?layers?|n_layers?|(.*_)?depth|num_blocks|.*_num_layers",
        _at_most(LAYERS),
    ),
    (r".*(num|n)_(group|groups)|n_group|topk_group", _at_most(1)),
    (r".*(key_value|kv)_heads|multi_query_group_num|num_key_heads|linear_num_key_heads", _at_most(2)),
    (r"(.*_)?(num_|n_)?(attention_)?heads?|n_heads?|.*_heads", _at_most(HEADS)),
    (r"rotary_dim|.*rope_head_dim|.*rope_dim|index_head_dim_rope", _at_most(4)),
    (r".*nope_head_dim", _at_most(4)),
    (r".*head_dim|.*dim_head|d_kv|kv_channels|attention_head_size|.*d_head", _at_most(HEAD_DIM)),
    (r".*lora_rank|.*lora_dim", _at_most(8)),
    (r"(.*_)?(num|n)(_.*)?_experts(_.*)?per_tok|num_experts_per_tok|moe_topk|moe_k|.*top_?k(_experts)?", _at_most(2)),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", _at_most(1)),
    (r"(.*_)?num(_.*)?experts|n_routed_experts|.*num_local_experts", _at_most(4)),
    (r"(.*_)?moe_intermediate_size|.*expert.*(size|dim)", _at_most(16)),
    (r".*intermediate(_size|_dim)?|.*ffn(_hidden)?(_size|_dim)|.*mlp_dim|.*inner_dim", _at_most(WIDE)),
    (r"d_ff|n_inner|dim_ff|.*feedforward.*", _at_most(WIDE)),
    (r"(.*_)?max_position_embeddings|(max_)?n_positions|max_(source|target)_positions", _at_most(64)),
    (r".*max_seq(_len|uence)?.*|n_ctx|max_length|seq_length|context_length", _at_most(64)),
    (r"(.*_)?image_size|img_size|input_size|max_img_size|crop_size|pretrain_image_size|spec_size", _at_most(32)),
    (r"(.*_)?patch_size", _at_most(8)),
    (r"num_frames", _at_most(4)),
    (r"num_mel_bins|model_in_dim|mel_dim|num_mel.*|n_mels", _at_most(16)),
    (r"num_denoising", _at_most(4)),
    (r"num_queries|num_query_tokens|.*num_latents|.*n_latents|query_length", _at_most(8)),
    (r"time_step_rank|state_size|.*d_state|.*state_dim", _at_most(4)),
    (r".*chunk_size", _at_most(8)),
    (r"d_latents", _at_most(WIDTH)),
    (r".*(size|dim|dims|channels|width|features|embd|d_model|filters|dimension|hidden)(_.*)?", _at_most(WIDTH)),
)
"""Name of an integer field, whole, to its rule; the first that fits."""
LISTS: Sequence[tuple[str, Rule]] = (
    (r".*depths?|num_layers|.*blocks.*|.*layers_per.*", lambda value: 1),
    (r".*heads?", _at_most(2)),
    (r".*(sizes?|dims?|channels|widths?|features|filters)(_.*)?", _at_most(WIDTH)),
)
"""The same for elements of lists."""


def tiny(config: Any, changes: Mapping[str, Any]) -> Any:
    """A configuration of the class of `config`, shrunk. `changes` by field, of parts by a mapping."""
    kind, values = type(config), vars(config)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    alone = _values_of(kind)
    options: dict[str, Any] = {}
    kinds = _kinds_of_layers(config, values)
    for name, value in values.items():
        if name in changes and not isinstance(changes[name], Mapping):
            continue
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            own = changes.get(name, {})
            options[name] = own if "model_type" in own else tiny(value, own)
        elif name in kinds:
            options[name] = kinds[name]
        elif name in defaults and (new := value if isinstance(value, bool) else shrunk(name, value)) is not None:
            # From other fields of this configuration: not a list of stages, nor a choice of the one around.
            is_list = isinstance(value, list) and len(value) != getattr(config, "num_hidden_layers", None)
            is_made = defaults[name] is None and value == alone.get(name) and not is_list
            if not is_made and new != defaults[name]:
                options[name] = new
    heads = values.get("num_key_value_heads")
    if "num_key_value_heads" in options and heads == values.get("num_attention_heads"):
        options["num_key_value_heads"] = HEADS  # of a class that may know one number of heads alone
    if kinds:
        layers = "num_hidden_layers" if "num_hidden_layers" in defaults else None
        layers = layers or kind.attribute_map.get("num_hidden_layers")
        if layers and layers not in changes:
            options[layers] = len(next(iter(kinds.values())))
    options |= {name: value for name, value in changes.items() if name not in options}
    if getattr(config, "out_indices", None) and not {"out_features", "out_indices"} & {*changes}:
        options |= stages_of(config, kind(**options))
    return kind(**options)


def stages_of(config: Any, small: Any) -> dict[str, list[int]]:
    """Those that the configuration around takes of a backbone, if the tiny one has them."""
    found = list(config.out_indices)
    is_chosen = found != list(small.out_indices) and max(found) < len(small.stage_names)
    return {"out_indices": found} if is_chosen else {}


def _values_of(kind: type) -> Mapping[str, Any]:
    """Of a configuration of this class with nothing given; none where something has to be."""
    try:
        return vars(kind())
    except Exception:
        return {}


def _kinds_of_layers(config: Any, values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Lists of one value per layer, cut to layers in which each word is, once at least; two layers or more."""
    count = getattr(config, "num_hidden_layers", None)
    lists = {name: value for name, value in values.items() if isinstance(value, (list, tuple)) and len(value) == count}
    words = {name: value for name, value in lists.items() if all(isinstance(each, str) for each in value)}
    words = {name: value for name, value in words.items() if not name.startswith("_") and name != "stage_names"}
    rows = list(zip(*words.values(), strict=True))
    chosen: list[int] = []
    for i, row in enumerate(rows):
        if any(all(rows[j][k] != word for j in chosen) for k, word in enumerate(row)):
            chosen.append(i)
    chosen += [i for i in range(len(next(iter(lists.values()), ()))) if i not in chosen][: max(0, LAYERS - len(chosen))]
    found = {name: [value[i] for i in sorted(chosen)] for name, value in words.items()}
    for name, value in lists.items():
        if name not in words and re.fullmatch(PER_LAYER, name) and all(type(each) in (int, float) for each in value):
            found[name] = [_by(SCALARS, name.removesuffix("_per_layer"), value[i]) for i in sorted(chosen)]
    return found


def shrunk(name: str, value: Any) -> Any:
    """None where the field keeps its value."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return token(name, value) if _is_token(name) else _by(SCALARS, name, value)
    if isinstance(value, dict) and "mrope_section" in value:
        return value | {"mrope_section": _parts(value)}
    if isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
        if name.endswith("token_id"):
            return [token(name, each) for each in value]
        return type(value)(_by(LISTS, name, each) for each in value)
    return value


def _parts(rope: Mapping[str, Any]) -> list[int]:
    """Sections of half of a rotated head."""
    count = len(rope["mrope_section"])
    total = int(HEAD_DIM * (rope.get("partial_rotary_factor") or 1)) // 2
    return [total // count + (i < total % count) for i in range(count)]


def _by(rules: Sequence[tuple[str, Rule]], name: str, value: Any) -> Any:
    for pattern, rule in rules:
        if re.fullmatch(pattern, name):
            return rule(value)
    return value


def _is_token(name: str) -> bool:
    return re.search(r"token_(id|index)$|_token$|_idx$", name) is not None


def token(name: str, value: int) -> int:
    """An id below `VOCAB`, the same for a name in each part of a configuration; those of text's ends are low."""
    if match := re.match(r"(pad|bos|eos|unk|decoder_start|sep|cls|mask)", name):
        low = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1, "unk": 3, "sep": 2, "cls": 1, "mask": 4}
        return value if value < FIRST_SPECIAL else low[match[1]]
    stem = re.sub(r"(_token)?_(id|index|idx)$|_token$", "", name)
    return FIRST_SPECIAL + sum(ord(letter) * (i + 1) for i, letter in enumerate(stem)) % (VOCAB - FIRST_SPECIAL)
