"""Llama's shapes from plain torch modules, whose initial values cost next to nothing.

`Llama(shape)` returns the loss of a batch. With `resident` it has only so many layers and runs through them again and
again until it has done the work of all: the same step where the whole model does not fit. Values are 64 random rows,
repeated: as random as a matrix product cares, and made at the speed of a copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_offload as zo

ROWS, STD, ROPE_BASE = 64, 0.02, 500_000.0


@dataclass(frozen=True)
class Shape:
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    inner: int
    vocab: int

    @property
    def layer_numel(self) -> int:
        attention = 2 * self.width**2 + 2 * self.width * self.kv_width
        return attention + 3 * self.width * self.inner + 2 * self.width

    @property
    def kv_width(self) -> int:
        return self.width // self.num_heads * self.num_kv_heads

    @property
    def numel(self) -> int:
        return self.num_layers * self.layer_numel + 2 * self.vocab * self.width + self.width

    def flops(self, num_tokens: int, seq: int) -> float:
        """Of forward and backward, what is computed twice counted once; causal attention, half of the square."""
        matrices = 6.0 * (self.numel - self.vocab * self.width) * num_tokens
        return matrices + 6.0 * self.num_layers * self.width * seq * num_tokens


SHAPES = {
    "2b": Shape(30, 2048, 16, 8, 8192, 32000),
    "8b": Shape(32, 4096, 32, 8, 14336, 128256),
    "13b": Shape(40, 5120, 40, 40, 13824, 32000),
    "tiny": Shape(4, 64, 4, 2, 128, 256),
    "small": Shape(4, 256, 4, 2, 512, 1024),
}


def _weight(num_out: int, num_in: int, dtype: torch.dtype, device: str) -> nn.Parameter:
    num_rows = math.gcd(num_out, ROWS)
    rows = torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(num_out)) * STD
    weight = nn.Parameter(torch.empty(num_out, num_in, dtype=dtype, device=device))
    with torch.no_grad():
        weight.view(-1, num_rows, num_in).copy_(rows)
    return weight


class Linear(nn.Module):
    def __init__(self, num_in: int, num_out: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.weight = _weight(num_out, num_in, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Block(nn.Module):
    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.head_width = shape.width // shape.num_heads
        self.num_kv_heads = shape.num_kv_heads
        self.attention_norm = nn.RMSNorm(shape.width, dtype=dtype, device=device)
        self.query = Linear(shape.width, shape.width, dtype, device)
        self.key = Linear(shape.width, shape.kv_width, dtype, device)
        self.value = Linear(shape.width, shape.kv_width, dtype, device)
        self.out = Linear(shape.width, shape.width, dtype, device)
        self.mlp_norm = nn.RMSNorm(shape.width, dtype=dtype, device=device)
        self.gate = Linear(shape.width, shape.inner, dtype, device)
        self.up = Linear(shape.width, shape.inner, dtype, device)
        self.down = Linear(shape.inner, shape.width, dtype, device)

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


class Head(nn.Module):
    """The loss, without the logits of all tokens at once."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.width, dtype=dtype, device=device)
        self.weight = _weight(shape.vocab, shape.width, dtype, device)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return zo.nn.chunked_cross_entropy(self.norm(x), self.weight, targets)


class Embedding(nn.Module):
    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.weight = _weight(shape.vocab, shape.width, dtype, device)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Llama(nn.Module):
    rotation: Tensor

    def __init__(
        self,
        shape: Shape,
        seq: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        resident: int | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.torch_checkpoint = False
        """Recompute by torch, for those who do not know `zo.checkpoint`."""
        self.embedding = Embedding(shape, dtype, device)
        self.blocks = nn.ModuleList(Block(shape, dtype, device) for _ in range(resident or shape.num_layers))
        self.head = Head(shape, dtype, device)
        self.register_buffer("rotation", _rotation_table(shape, seq).to(device), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index in range(self.shape.num_layers):
            block = self.blocks[index % len(self.blocks)]
            if self.torch_checkpoint:
                x = checkpoint(block, x, self.rotation, use_reentrant=False)
            else:
                x = block(x, self.rotation)
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


def batch_of(shape: Shape, num_tokens: int, seq: int, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets, (num_tokens / seq, seq) each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(shape.vocab, (num_tokens // seq, seq + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
