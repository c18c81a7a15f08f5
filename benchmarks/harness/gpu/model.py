"""The models of `gpu.py`: Llama's shapes in plain torch modules, the same with LoRA, and models of transformers.

`Llama(shape, seq)` returns the loss of a batch. Weights are 64 random rows, repeated: as random as a matrix product
cares, and made at the speed of a copy, inside `zo.deferred_init()` too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_offload as zo

ROWS, STD, ROPE_BASE = 64, 0.02, 500_000.0

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, (batch, seq) int64 each."""


@dataclass(frozen=True)
class Shape:
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    inner: int
    vocab: int
    num_experts: int = 0
    """Of each layer; 0 is a dense one."""
    top_k: int = 0
    """Experts of a token."""

    @property
    def kv_width(self) -> int:
        return self.width // self.num_heads * self.num_kv_heads

    @property
    def layer_numel(self) -> int:
        return self._layer(max(self.num_experts, 1))

    def _layer(self, num_experts: int) -> int:
        """Elements of a layer with so many experts."""
        attention, router = 2 * self.width**2 + 2 * self.width * self.kv_width, self.width * self.num_experts
        return attention + router + num_experts * 3 * self.width * self.inner + 2 * self.width

    @property
    def numel(self) -> int:
        return self.num_layers * self.layer_numel + 2 * self.vocab * self.width + self.width

    @property
    def active_numel(self) -> int:
        """Parameters that a token meets, without the embedding."""
        return self.num_layers * self._layer(self.top_k or 1) + self.vocab * self.width + self.width

    def flops(self, num_tokens: int, seq: int, *, is_frozen: bool = False) -> float:
        """Of forward and backward; what is computed twice counts once, and causal attention half of its square.

        Frozen weights have no gradient: two products of each, not three.
        """
        per_weight = 4.0 if is_frozen else 6.0
        matrices = per_weight * self.active_numel * num_tokens
        return matrices + 6.0 * self.num_layers * self.width * seq * num_tokens


SHAPES = {
    "2b": Shape(30, 2048, 16, 8, 8192, 32000),
    "3b": Shape(28, 3072, 24, 8, 8192, 128256),
    "8b": Shape(32, 4096, 32, 8, 14336, 128256),
    "13b": Shape(40, 5120, 40, 40, 13824, 32000),
    "32b": Shape(64, 5120, 40, 8, 27648, 152064),
    "30b-moe": Shape(48, 2048, 16, 4, 768, 151936, num_experts=128, top_k=8),
    "small": Shape(4, 256, 4, 2, 512, 1024),
    "toy": Shape(2, 64, 4, 2, 128, 256),
    "toy-moe": Shape(2, 64, 4, 2, 32, 256, num_experts=4, top_k=2),
}


def _fill(weight: Tensor) -> None:
    """(..., columns): random rows, repeated."""
    num_rows = math.gcd(weight.numel() // weight.shape[-1], ROWS)
    rows = torch.randn(num_rows, weight.shape[-1], generator=torch.Generator().manual_seed(weight.shape[0])) * STD
    with torch.no_grad():
        weight.view(-1, *rows.shape).copy_(rows)


def _weight(num_out: int, num_in: int) -> nn.Parameter:
    weight = nn.Parameter(torch.empty(num_out, num_in, dtype=torch.bfloat16))
    _fill(weight)
    return weight


class Linear(nn.Module):
    """With a LoRA rank the weight is frozen, and two thin matrices beside it are trained."""

    def __init__(self, num_in: int, num_out: int, lora_rank: int) -> None:
        super().__init__()
        self.weight = _weight(num_out, num_in).requires_grad_(not lora_rank)
        self.lora_in = _weight(lora_rank, num_in) if lora_rank else None
        self.lora_out = nn.Parameter(torch.zeros(num_out, lora_rank, dtype=torch.bfloat16)) if lora_rank else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight)
        if self.lora_in is not None and self.lora_out is not None:
            out = out + F.linear(F.linear(x, self.lora_in), self.lora_out)
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape, lora_rank: int) -> None:
        super().__init__()
        width, kv_width, inner = shape.width, shape.kv_width, shape.inner
        self.head_width = width // shape.num_heads
        self.attention_norm = nn.RMSNorm(width, dtype=torch.bfloat16)
        self.query = Linear(width, width, lora_rank)
        self.key = Linear(width, kv_width, lora_rank)
        self.value = Linear(width, kv_width, lora_rank)
        self.out = Linear(width, width, lora_rank)
        self.mlp_norm = nn.RMSNorm(width, dtype=torch.bfloat16)
        self.gate = Linear(width, inner, lora_rank)
        self.up = Linear(width, inner, lora_rank)
        self.down = Linear(inner, width, lora_rank)
        if lora_rank:
            self.attention_norm.requires_grad_(False)
            self.mlp_norm.requires_grad_(False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        query, key, value = (self._heads(part(normed)) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(
            _rotate(query, rotation), _rotate(key, rotation), value, is_causal=True, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, seq, width) -> (batch, heads, seq, head width)"""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class Embedding(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = _weight(shape.vocab, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Head(nn.Module):
    """The loss, without the logits of all tokens at once."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.width, dtype=torch.bfloat16)
        self.weight = _weight(shape.vocab, shape.width)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return zo.nn.chunked_cross_entropy(self.norm(x), self.weight, targets)


class Llama(nn.Module):
    rotation: Tensor

    def __init__(self, shape: Shape, seq: int, *, lora_rank: int = 0, recomputes: bool = False) -> None:
        """`recomputes`: by torch's checkpoint, for systems that do not know `zo.checkpoint`."""
        super().__init__()
        self.recomputes = recomputes
        self.embedding = Embedding(shape)
        self.blocks = nn.ModuleList(Block(shape, lora_rank) for _ in range(shape.num_layers))
        self.head = Head(shape)
        if lora_rank:
            self.embedding.requires_grad_(False)
            self.head.requires_grad_(False)
        self.register_buffer("rotation", _rotation_table(shape, seq), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, self.rotation, use_reentrant=False) if self.recomputes else block(x, self.rotation)
        return self.head(x, targets)


def _rotation_table(shape: Shape, seq: int) -> Tensor:
    """(2, seq, head width) fp32: cosines and sines of every position."""
    head_width = shape.width // shape.num_heads
    frequency = ROPE_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angle = torch.outer(torch.arange(seq, dtype=torch.float32), frequency).repeat(1, 2)
    return torch.stack((angle.cos(), angle.sin()))


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    cosine, sine = rotation.to(x.dtype).unbind()
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class _OfTransformers(nn.Module):
    """A model of the transformers library, called as `Llama` is. Raises ImportError where the library is absent."""

    inner: Any

    def __init__(self, kind: str, shape: Shape, seq: int, **settings: Any) -> None:
        super().__init__()
        import transformers
        from transformers.initialization import no_init_weights

        config = getattr(transformers, f"{kind}Config")(
            hidden_size=shape.width,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.width // shape.num_heads,
            vocab_size=shape.vocab,
            max_position_embeddings=seq,
            use_cache=False,
            attn_implementation="sdpa",
            **settings,
        )
        with no_init_weights():
            self.inner = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
        for param in self.inner.parameters():
            if param.dim() > 1:
                _fill(param)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.inner(input_ids=tokens, labels=tokens).loss
        return loss


class TransformersLlama(_OfTransformers):
    def __init__(self, shape: Shape, seq: int) -> None:
        super().__init__("Llama", shape, seq, intermediate_size=shape.inner)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.inner.model.layers  # type: ignore[no-any-return]


class TransformersMoe(_OfTransformers):
    """Frozen, with experts in groups and adapters of peft on attention."""

    def __init__(self, shape: Shape, seq: int, *, lora_rank: int) -> None:
        from peft import LoraConfig, get_peft_model

        settings: dict[str, Any] = {"moe_intermediate_size": shape.inner, "num_experts": shape.num_experts}
        settings |= {"num_experts_per_tok": shape.top_k, "norm_topk_prob": True, "tie_word_embeddings": False}
        super().__init__("Qwen3Moe", shape, seq, intermediate_size=3 * shape.inner, **settings)
        config = LoraConfig(r=lora_rank, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        self.inner = get_peft_model(zo.group_experts(self.inner), config)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.inner.get_base_model().model.layers  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        base = self.inner.get_base_model()
        hidden = base.model(input_ids=tokens).last_hidden_state
        return zo.nn.chunked_cross_entropy(hidden, base.lm_head.weight, targets)


def batch_of(shape: Shape, num_tokens: int, seq: int, device: torch.device, seed: int = 0) -> Batch:
    """(num_tokens / seq, seq) each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(shape.vocab, (num_tokens // seq, seq + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
