"""Shapes of well-known models, from a few numbers each: parameters, arithmetic and activations of every unit.

Owns the table. Numbers are those of the public configurations: the `config.json` of each model's repository on Hugging
Face, for gpt3-175b Brown et al. (2020), table 2.1, for mt-nlg-530b Smith et al. (2022), for gpt-1t Narayanan et al.
(2021), table 1. Never a weight. Calls: `find_shape` by name, then `Shape.units`.

Left out of counts: position tables of rotary models (none are trained) and the extra layer that DeepSeek-V3 predicts a
second token with. Activations are what a block keeps for backward with attention that keeps no scores.

`work_of` finds the same of a module from its parameters' shapes, without running it. Every parameter of two dimensions
or more multiplies each token once, except tables of embeddings: a token reads one row. A table that another module
multiplies with (a tied head) counts in its own unit. A quantized weight counts as what is made of it for a use. Widths
of attention, and how many experts a token meets, are those of the nearest config, by the names of Hugging Face
(`plan/hints.py`). Without a config they are guessed.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zero_offload.base.errors import ConfigError
from zero_offload.plan.hints import Hints, ModelHints
from zero_offload.plan.memory import UnitNumel
from zero_offload.plan.model_spec import ModelSpec, ParamSpec, UnitSpec
from zero_offload.plan.quantized import module_name


@dataclass(frozen=True)
class UnitWork:
    """One unit of a model: what it holds, and what a token costs in it."""

    numel: UnitNumel
    matmul_numel: float
    """Parameters that a token is multiplied with: of experts the active ones, of a table of embeddings none."""
    attention_width: int = 0
    """Values of all heads together that a token attends with."""
    boundary_values: int = 0
    """Values of a token that enter the unit: what recompute keeps."""
    inside_values: int = 0
    """Values of a token that the unit keeps for backward without recompute."""
    last_numel: float = 0.0
    """Parameters of the unit's last product. Backward does not run it again: no saved tensor comes after it."""
    frozen_matmul_numel: float = 0.0
    """The part of `matmul_numel` that is not trained: backward makes no gradient of it."""
    quantized_numel: float = 0.0
    """Values that are made, in the compute dtype, of a quantized weight's fewer bytes for each use."""
    in_groups: bool = False
    """True of experts that are fetched in groups: backward fetches and computes each of them again."""
    share_met: float = 1.0
    """Of such experts, the share that a token is multiplied with."""
    keeps_output: bool = False
    """True of such experts if recompute of the block goes on behind them, as to shared experts. Then their output is
    kept, and no expert is read again for it.
    """

    @functools.cached_property
    def likeness(self) -> UnitWork:
        """Equal for units of which all but the name and the counts is."""
        return replace(self, numel=UnitNumel("", 0))

    def share_touched(self, tokens: int) -> float:
        """The share of experts that some of so many tokens meet, if each token chooses any with equal chances."""
        return 1.0 - (1.0 - self.share_met) ** tokens

    def keeps_inputs(self, recompute: bool) -> bool:
        """True if backward runs it again: with recompute blocks do, other units do not."""
        return recompute and self.attention_width > 0

    def backward_uses(self, recompute: bool) -> int:
        """How often backward reads the weights, or makes them of quantized ones."""
        return 1 + self.keeps_inputs(recompute)

    def saved_values(self, recompute: bool) -> int:
        """Values of a token that wait for backward."""
        if self.in_groups and recompute:
            return self.inside_values if self.keeps_output else 0
        return self.boundary_values if self.keeps_inputs(recompute) else self.inside_values

    def forward_flops(self, sequence: int) -> float:
        """Operations for one token among `sequence`, each of which attends to those before it."""
        return 2.0 * self.matmul_numel + 2.0 * self.attention_width * sequence

    def backward_share(self, sequence: int) -> float:
        """Operations of backward over those of forward: gradients of inputs, and of parameters that are trained."""
        forward = self.forward_flops(sequence)
        return 2.0 - 2.0 * self.frozen_matmul_numel / forward if forward else 2.0

    def rerun_share(self, sequence: int, recompute: bool) -> float:
        """Share of a forward that backward runs again."""
        if self.in_groups:
            return 1.0
        if not self.keeps_inputs(recompute):
            return 0.0
        return 1.0 - 2.0 * self.last_numel / self.forward_flops(sequence)


@dataclass(frozen=True)
class MoeShape:
    """The feed-forward part of a layer with a mixture of experts."""

    count: int
    active: int
    intermediate: int
    shared: int = 0
    """Experts that see every token, beside those."""
    dense_layers: int = 0
    """First layers that have an ordinary feed-forward part instead."""


@dataclass(frozen=True)
class Latent:
    """Attention through vectors of low rank, as in DeepSeek-V2 and after."""

    query_rank: int
    value_rank: int
    plain_width: int
    """Width of a head, without positions."""
    rotary_width: int


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer."""

    layers: int
    width: int
    heads: int
    intermediate: int
    vocab: int
    kv_heads: int = 0
    """0 is one for each head."""
    head_width: int = 0
    """0 is width / heads."""
    matrices: int = 3
    """Matrices of the feed-forward part: 3 with a gate, 2 without."""
    tied: bool = False
    qkv_bias: bool = False
    positions: int = 0
    """Trained positions: a GPT-2, which also has a bias in every linear layer and in every norm."""
    experts: MoeShape | None = None
    latent: Latent | None = None

    def units(self, lora: int = 0) -> tuple[UnitWork, ...]:
        """In order of use: the embedding, the blocks, the norm and the head. With `lora` they are frozen, and the
        linear layers of blocks have adapters of this rank; see `with_adapters`."""
        table = self.vocab * self.width
        norm = self.width * (2 if self.positions else 1)
        first = UnitWork(UnitNumel("embedding", table + self.positions * self.width), 0.0, 0, 0, self.width)
        head_numel = norm + (0 if self.tied else table)
        head = UnitWork(UnitNumel("head", head_numel), float(table), 0, self.width, 2 * self.width)
        blocks = (self._block(index) for index in range(self.layers))
        if not lora:
            return (first, *blocks, head)
        adapted = [part for index, block in enumerate(blocks) for part in with_adapters(block, lora, self._sums(index))]
        return (*with_adapters(first, lora), *adapted, *with_adapters(head, lora))

    def _sums(self, index: int) -> tuple[float, float]:
        """Of the linear layers of a block, inputs and outputs added up: of all, and of those that a token meets."""
        width, experts = self.width, self.experts
        if self.latent is not None:
            latent = self.latent
            both, query = self.heads * 2 * latent.plain_width, latent.plain_width + latent.rotary_width
            attention = width + 2 * latent.query_rank + self.heads * query  # queries
            attention += width + latent.value_rank + latent.rotary_width + latent.value_rank + both  # keys and values
            attention += self.heads * latent.plain_width + width
        else:
            head_width = self.head_width or width // self.heads
            q, kv = self.heads * head_width, (self.kv_heads or self.heads) * head_width
            # A GPT-2 has queries, keys and values in one layer.
            attention = (width if self.positions else 3 * width) + q + 2 * kv + q + width
        if experts is None:
            whole = attention + self.matrices * (width + self.intermediate)
            return whole, whole
        if index < experts.dense_layers:
            return attention, attention
        # peft takes the names of such layers for those of experts, whose gate and first product are one tensor. So such
        # a tensor has adapters of twice the rank, and the router has one. Dense layers and shared experts of the same
        # names have none.
        one = 2 * (width + 2 * experts.intermediate) + (experts.intermediate + width)
        rest = attention + width + experts.count
        return rest + one * experts.count, rest + one * experts.active

    @property
    def numel(self) -> int:
        return sum(unit.numel.trained for unit in self.units())

    @property
    def _attention_width(self) -> int:
        if self.latent is not None:
            return self.heads * (self.latent.plain_width + self.latent.rotary_width // 2)
        return self.heads * (self.head_width or self.width // self.heads)

    def _block(self, index: int) -> UnitWork:
        attention, attention_values = self._attention()
        feed_forward, multiplied, values = self._feed_forward(index)
        norms = 2 * self.width * (2 if self.positions else 1)
        numel = attention + feed_forward + norms
        inside = 4 * self.width + attention_values + values
        return UnitWork(
            UnitNumel(f"blocks.{index}", numel),
            float(attention + multiplied),
            self._attention_width,
            self.width,
            inside,
            # Of a mixture, backward ends within the last expert: nearly all runs again.
            last_numel=float(self.width * self.intermediate) if multiplied == feed_forward else 0.0,
        )

    def _attention(self) -> tuple[int, int]:
        """Parameters, and values of a token that backward needs."""
        if self.latent is not None:
            return self._latent_attention(self.latent)
        head_width = self.head_width or self.width // self.heads
        q, kv = self.heads * head_width, (self.kv_heads or self.heads) * head_width
        biases = (q + 2 * kv) * (self.qkv_bias or self.positions > 0) + self.width * (self.positions > 0)
        return self.width * (q + 2 * kv) + q * self.width + biases, 2 * q + 2 * kv

    def _latent_attention(self, latent: Latent) -> tuple[int, int]:
        query_width = self.heads * (latent.plain_width + latent.rotary_width)
        both = self.heads * 2 * latent.plain_width  # keys and values
        numel = (
            self.width * latent.query_rank
            + latent.query_rank * query_width
            + self.width * (latent.value_rank + latent.rotary_width)
            + latent.value_rank * both
            + self.heads * latent.plain_width * self.width
            + latent.query_rank
            + latent.value_rank  # their norms
        )
        return numel, query_width + both + latent.query_rank + latent.value_rank + self.heads * latent.plain_width

    def _feed_forward(self, index: int) -> tuple[int, int, int]:
        """Parameters, those that a token meets, and its values that backward needs."""
        experts = self.experts
        if experts is None or index < experts.dense_layers:
            biases = (self.intermediate + self.width) * (self.positions > 0)
            numel = self.matrices * self.width * self.intermediate + biases
            return numel, numel, self.matrices * self.intermediate
        one = self.matrices * self.width * experts.intermediate
        router = self.width * experts.count
        active = experts.active + experts.shared
        return (
            one * (experts.count + experts.shared) + router,
            one * active + router,
            active * (self.matrices * experts.intermediate + self.width),
        )


def _gpt2(layers: int, width: int, heads: int, positions: int = 1024) -> Shape:
    return Shape(layers, width, heads, 4 * width, 50257, matrices=2, tied=True, positions=positions)


def _llama3(layers: int, width: int, heads: int, intermediate: int, kv_heads: int = 8) -> Shape:
    return Shape(layers, width, heads, intermediate, 128256, kv_heads=kv_heads)


def _qwen(layers: int, width: int, heads: int, kv_heads: int, intermediate: int) -> Shape:
    return Shape(layers, width, heads, intermediate, 152064, kv_heads=kv_heads, qkv_bias=True)


_DEEPSEEK_V3 = Shape(
    layers=61,
    width=7168,
    heads=128,
    intermediate=18432,
    vocab=129280,
    experts=MoeShape(count=256, active=8, intermediate=2048, shared=1, dense_layers=3),
    latent=Latent(query_rank=1536, value_rank=512, plain_width=128, rotary_width=64),
)

SHAPES: dict[str, Shape] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-175b": _gpt2(96, 12288, 96, positions=2048),
    "llama-1b": replace(_llama3(16, 2048, 32, 8192), tied=True),
    "llama-3b": replace(_llama3(28, 3072, 24, 8192), tied=True),
    "llama-8b": _llama3(32, 4096, 32, 14336),
    "llama-70b": _llama3(80, 8192, 64, 28672),
    "llama-405b": _llama3(126, 16384, 128, 53248),
    "llama-7b": Shape(32, 4096, 32, 11008, 32000),
    "llama-13b": Shape(40, 5120, 40, 13824, 32000),
    "qwen-0.5b": replace(_qwen(24, 896, 14, 2, 4864), vocab=151936, tied=True),
    "qwen-1.5b": replace(_qwen(28, 1536, 12, 2, 8960), vocab=151936, tied=True),
    "qwen-3b": replace(_qwen(36, 2048, 16, 2, 11008), vocab=151936, tied=True),
    "qwen-7b": _qwen(28, 3584, 28, 4, 18944),
    "qwen-14b": _qwen(48, 5120, 40, 8, 13824),
    "qwen-32b": _qwen(64, 5120, 40, 8, 27648),
    "qwen-72b": _qwen(80, 8192, 64, 8, 29568),
    "mistral-7b": Shape(32, 4096, 32, 14336, 32000, kv_heads=8),
    "mixtral-8x7b": Shape(32, 4096, 32, 14336, 32000, kv_heads=8, experts=MoeShape(8, 2, 14336)),
    "deepseek-v3": _DEEPSEEK_V3,
    "mt-nlg-530b": _gpt2(105, 20480, 128, positions=2048),
    "gpt-1t": replace(_gpt2(128, 25600, 160, positions=2048), vocab=51200),
}
"""llama-1b and -3b are Llama 3.2, -8b, -70b and -405b Llama 3.1, -7b and -13b the first Llama; qwen is Qwen2.5."""


def find_shape(name: str, others: Sequence[str] = ()) -> Shape:
    """The shape of this name; ConfigError offers the nearest of all names, `others` being those of other tables."""
    if name in SHAPES:
        return SHAPES[name]
    names = [*others, *SHAPES]
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(
        f"--model {name!r} is not a known model; {hint}there are {', '.join(names)}; or a size such as 8B"
    )


_INSIDE_WIDTHS = 16
"""Values of a token that a block keeps, over its width, where nothing more is known."""


def usual_layers(numel: int) -> int:
    """The layers of the model known here that is nearest in size."""
    return min(SHAPES.values(), key=lambda shape: abs(math.log(max(numel, 1) / shape.numel))).layers


def equal_blocks(numel: int, count: int, lora: int = 0) -> tuple[UnitWork, ...]:
    """A model of which only the size is known: so many blocks, equal to one parameter; `lora` as in `Shape.units`."""
    ends = [numel * index // count for index in range(count + 1)]
    blocks = [
        plain_block(UnitNumel(f"block {index}", end - begin))
        for index, (begin, end) in enumerate(itertools.pairwise(ends))
    ]
    if not lora:
        return tuple(blocks)
    # Four layers of width x width, and two of 4 x width.
    return tuple(part for block in blocks for part in with_adapters(block, lora, (18 * block.boundary_values,) * 2))


def with_adapters(block: UnitWork, rank: int, sums: tuple[float, float] = (0, 0)) -> tuple[UnitWork, ...]:
    """The block, frozen, and its adapters, a unit of their own as in `zo.offload`. `sums`: of the layers that have
    some, inputs and outputs added up; of all, and of those that a token meets."""
    numel, all_of, met = block.numel, round(rank * sums[0]), float(rank * sums[1])
    frozen = replace(
        block,
        numel=replace(numel, trained=0, frozen=numel.trained + numel.frozen, sizes=None),
        frozen_matmul_numel=block.matmul_numel,
    )
    if not all_of:
        return (frozen,)
    part = UnitNumel(f"{numel.name} (trained)", all_of, is_trained_part=True)
    return (frozen, UnitWork(part, met, last_numel=met / 2))


def plain_block(numel: UnitNumel) -> UnitWork:
    """A unit of which only the size is known: every parameter multiplies, in a block of 12 width^2 parameters."""
    total = numel.trained + numel.frozen
    width = max(math.isqrt(total // 12), 1)
    return UnitWork(
        numel,
        float(total),
        width,
        width,
        _INSIDE_WIDTHS * width,
        last_numel=total / 3,
        frozen_matmul_numel=float(numel.frozen),
    )


@dataclass(frozen=True)
class ModelWork:
    """The work of a model's units, and what of its configs was not understood."""

    units: tuple[UnitWork, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _UnitFacts:
    """Facts of a unit by configs in the words of Hugging Face; 0 where they do not say."""

    width: int = 0
    attention_width: int = 0
    active_experts: int = 0
    num_experts: int = 0

    @classmethod
    def of(cls, hints: Hints, layer: int | None) -> _UnitFacts:
        number = functools.partial(hints.number, layer=layer)
        width, heads = number("hidden_size"), number("num_attention_heads")
        plain, rotary = number("qk_nope_head_dim"), number("qk_rope_head_dim")
        usual = width // heads if heads else 0
        # Scores are products of queries and keys; their sums are of values.
        keys = plain + rotary if plain else number("head_dim") or usual
        values = number("v_head_dim") if plain else keys
        active = number("num_experts_per_tok", "top_k_experts", "moe_topk")
        return cls(width, heads * (keys + values) // 2, active, number(*EXPERT_COUNTS))

    @classmethod
    def near(cls, configs: ModelHints, unit: UnitSpec) -> _UnitFacts:
        """By the nearest config that says how wide the model is."""
        found = (cls.of(*each) for each in configs.of_param(unit.params[0].name))
        return next((words for words in found if words.width), cls())


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How many experts a layer has, in the words of configs."""

_SHARED = re.compile(r"\.shared_")
_ONE_EXPERT = re.compile(r"(.*\bexperts)\.\d+\.")
_ADAPTER = re.compile(r"\bexperts\.(base_layer\.)*lora_")
"""Of all experts of a layer together, by peft."""


def work_of(model: nn.Module, spec: ModelSpec) -> ModelWork:
    """The work of each unit of `spec`, which was made from `model`. It never fails: it is for plans."""
    configs = ModelHints(model)
    try:
        units = _work_of_units(model, spec, configs)
    except MemoryError:
        raise
    except Exception as error:  # of modules of any kind
        whole = [(unit, sum(param.numel for param in unit.params if param.trainable)) for unit in spec.units]
        units = tuple(plain_block(UnitNumel(unit.name, trained, unit.numel - trained)) for unit, trained in whole)
        note = (
            f"{type(model).__name__} is planned by the number of its parameters alone: {type(error).__name__}: {error}"
        )
        return ModelWork(units, (*configs.notes, " ".join(note.split())))
    return ModelWork(units, configs.notes)


def _work_of_units(model: nn.Module, spec: ModelSpec, configs: ModelHints) -> tuple[UnitWork, ...]:
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    shared = {name[: match.start()] for unit in spec.units for name in _names(unit) if (match := _SHARED.search(name))}
    return tuple(
        _work_of_unit(_unquantized(unit, model), tables, _UnitFacts.near(configs, unit), shared) for unit in spec.units
    )


def _names(unit: UnitSpec) -> list[str]:
    return [param.name for param in unit.params]


def _unquantized(unit: UnitSpec, model: nn.Module) -> UnitSpec:
    """With the weights that are made of quantized ones in their places, and without what belongs to these."""
    tensors: dict[str, list[ParamSpec]] = {}
    for param in unit.params:
        if param.keeps_dtype:
            tensors.setdefault(module_name(model, param.name), []).append(param)
    weights = {}
    for path, found in tensors.items():
        layer: Any = model.get_submodule(path)
        largest = max(found, key=lambda param: param.numel)
        rows, columns = getattr(layer, "out_features", None), getattr(layer, "in_features", None)
        if isinstance(rows, int) and isinstance(columns, int):  # packed in any way
            weights[largest.name] = replace(largest, shape=(rows, columns), numel=rows * columns)
        else:
            weights |= {param.name: param for param in found}
    params = (weights.get(param.name, None if param.keeps_dtype else param) for param in unit.params)
    return replace(unit, params=tuple(param for param in params if param is not None))


def _work_of_unit(unit: UnitSpec, tables: set[str], words: _UnitFacts, shared: set[str]) -> UnitWork:
    """`shared` has the names of modules with a shared expert behind their experts, which sees every token."""
    trained = sum(param.numel for param in unit.params if param.trainable)
    whole = plain_block(UnitNumel(unit.name, trained, unit.numel - trained))
    products = [param for param in unit.params if len(param.shape) > 1 and not _is_table(param, tables)]
    met = [param.numel * _share_met(param, unit, words) for param in products]
    work = replace(
        whole,
        matmul_numel=float(sum(met)),
        # Of a mixture, backward ends within the last expert: nearly all runs again.
        last_numel=met[-1] if products and met[-1] == products[-1].numel else 0.0,
        frozen_matmul_numel=float(sum(n for param, n in zip(products, met, strict=True) if not param.trainable)),
        quantized_numel=float(sum(param.numel for param in products if param.keeps_dtype)),
    )
    if unit.is_trained_part:  # attention and what is kept for backward are the frozen part's
        return replace(work, attention_width=0, boundary_values=0, inside_values=0)
    if unit.experts is not None:
        active, count = words.active_experts, unit.experts.num_experts
        return replace(
            work,
            attention_width=0,
            boundary_values=0,
            inside_values=words.width,
            in_groups=True,
            share_met=min(active / count, 1.0) if active else 1.0,
            keeps_output=unit.name.rpartition(".")[0] in shared,
        )
    is_block = sum(param.numel for param in products) > unit.numel // 2 and len(unit.params) > 1
    return replace(
        work,
        attention_width=(words.attention_width or whole.attention_width) if is_block else 0,
        boundary_values=words.width or whole.boundary_values,
        inside_values=_INSIDE_WIDTHS * words.width or whole.inside_values,
    )


def _share_met(param: ParamSpec, unit: UnitSpec, words: _UnitFacts) -> float:
    """How much of a parameter a token is multiplied with: of experts, and of their adapters, as many as are active."""
    if match := _ONE_EXPERT.match(param.name):
        others = (each for each in unit.params if each.name.startswith(f"{match[1]}."))
        count = len({each.name[len(match[1]) + 1 :].partition(".")[0] for each in others})
    elif len(param.shape) == 3 and ".experts." in f".{param.name}":
        count = param.shape[0]
    elif _ADAPTER.search(param.name) and words.num_experts:
        count = words.num_experts
    else:
        return 1.0
    active = words.active_experts
    return min(active / count, 1.0) if active else 1.0


def _is_table(param: ParamSpec, tables: set[str]) -> bool:
    """True if all modules that hold the parameter look rows up in it."""
    return all(name.rpartition(".")[0] in tables for name in (param.name, *param.aliases))
