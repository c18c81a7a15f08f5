"""Hugging Face folders of random weights, as large as a disk holds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

Shapes = Mapping[str, tuple[int, ...]]
POOL_NUMEL, STD = 1 << 26, 0.02


def write_weights(path: Path, files: Iterable[Shapes], config: PretrainedConfig) -> int:
    """A new folder with these tensors in bf16, by file, and the config; returns how many parameters.

    Matrices are parts of one pool of normal numbers, from a random place on: to draw all takes longer than to write
    them. Vectors are ones, as norms begin. Embeddings have a standard deviation of one, so that tokens stay different
    through the layers. So they choose different experts, as those of a trained model do.
    """
    path.mkdir()
    generator = torch.Generator().manual_seed(0)
    pool = torch.empty(POOL_NUMEL, dtype=torch.bfloat16).normal_(std=STD, generator=generator)
    weight_map, numel, parts = dict[str, str](), 0, list(files)
    for number, shapes in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = {key: _values(shape, pool, generator) for key, shape in shapes.items()}
        for key in tensors:
            if "embed_tokens" in key:
                tensors[key] /= STD
        save_file(tensors, path / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        numel += sum(each.numel() for each in tensors.values())
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.save_pretrained(path)
    return numel


def _values(shape: tuple[int, ...], pool: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    numel = torch.Size(shape).numel()
    offset = int(torch.randint(max(POOL_NUMEL - numel, 1), (1,), generator=generator))
    whole = pool if numel <= POOL_NUMEL else pool.repeat(-(-numel // POOL_NUMEL))
    return whole[offset : offset + numel].clone().view(shape)


def decoder_files(config: PretrainedConfig) -> Iterator[Shapes]:
    """The tensors of a decoder: a file for each layer, the embedding and the head. With `num_experts` the experts lie
    one by one, as in the folders of Qwen3-MoE."""
    width, vocab = config.hidden_size, config.vocab_size
    size = getattr(config, "head_dim", None) or width // config.num_attention_heads
    wide, narrow = size * config.num_attention_heads, size * config.num_key_value_heads
    num_experts = getattr(config, "num_experts", 0)
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        shapes: dict[str, tuple[int, ...]] = {
            f"{at}self_attn.q_proj.weight": (wide, width),
            f"{at}self_attn.k_proj.weight": (narrow, width),
            f"{at}self_attn.v_proj.weight": (narrow, width),
            f"{at}self_attn.o_proj.weight": (width, wide),
            **{f"{at}{key}_layernorm.weight": (width,) for key in ("input", "post_attention")},
        }
        if num_experts:
            shapes |= {f"{at}self_attn.{key}_norm.weight": (size,) for key in "qk"}
            shapes[f"{at}mlp.gate.weight"] = (num_experts, width)
        inner = config.moe_intermediate_size if num_experts else config.intermediate_size
        for place in [f"{at}mlp.experts.{each}." for each in range(num_experts)] or [f"{at}mlp."]:
            shapes |= {f"{place}{key}_proj.weight": (inner, width) for key in ("gate", "up")}
            shapes[f"{place}down_proj.weight"] = (width, inner)
        yield shapes
    yield {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    yield {"lm_head.weight": (vocab, width)}
