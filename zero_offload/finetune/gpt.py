"""A small, plain GPT: pre-norm blocks, rotary positions, causal attention, bytes as its vocabulary.

Owns the model; gpt_config.py has its presets. Knows nothing of tiers or ranks. It is an ordinary `nn.Module`, which
trains without this package just as well.

Calls, in order: `preset(name)` (gpt_config.py) -> `GPT(config, seed)` -> `model(tokens)` -> `next_token_loss(...)`, and
`generate(model, prompt, ...)` for a sample of text.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_offload.finetune.gpt_config import GPTConfig, Head, RecomputeMode

_ROPE_BASE = 10_000.0
_WEIGHT_STD = 0.02


class Linear(nn.Linear):
    """Without a bias; quick on any CPU in any dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = _linear(config.width, 3 * config.width)
        self.out = _linear(config.width, config.width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq, head width)
        mixed = causal_attention(_rotate(query, rotation), _rotate(key, rotation), value)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return out


class Block(nn.Module):
    """One transformer layer; the unit that is fetched, used and released together."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.up = _linear(config.width, 4 * config.width)
        self.down = _linear(4 * config.width, config.width)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class GPT(nn.Module):
    """Token ids (batch, seq) int64 -> logits (batch, seq, vocabulary) in the parameters' dtype."""

    rotation: Tensor

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = _linear(config.width, config.vocab_size)
        if config.head is Head.TIED:
            self.head.weight = self.embedding.weight
        self.register_buffer("rotation", _rotation_table(config, self.embedding.weight.device), persistent=False)
        _draw_weights(self, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        rotation = self.rotation[:, : tokens.shape[1]]
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.config.recompute is RecomputeMode.BLOCK and torch.is_grad_enabled():
                x = checkpoint(block, x, rotation, use_reentrant=False)
            else:
                x = block(x, rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per token, computed in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def generate(model: GPT, prompt: bytes, num_bytes: int, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Continue `prompt` by sampling `num_bytes` bytes; the same seed gives the same text."""
    generator = torch.Generator("cpu").manual_seed(seed)
    text = bytearray(prompt)
    device = model.rotation.device
    for _ in range(num_bytes):
        window = torch.tensor([list(text[-model.config.seq_max :])], dtype=torch.int64, device=device)
        scores = model(window)[0, -1].float().cpu() / max(temperature, 1e-3)
        text.append(int(torch.multinomial(scores.softmax(0), 1, generator=generator)))
    return bytes(text)


def _linear(num_in: int, num_out: int) -> Linear:
    # The weights are drawn once, in `_draw_weights`; the library's own draw would double the start-up time.
    # `skip_init` knows no default device.
    device = torch.get_default_device()
    made: Linear = nn.utils.skip_init(Linear, num_in, num_out, bias=False, device=device)
    return made


def _draw_weights(model: GPT, seed: int) -> None:
    """Normal weights, each from a generator of its own name: the values do not depend on the order."""
    residual_std = _WEIGHT_STD / math.sqrt(2 * model.config.num_layers)
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue  # norm weights start at one
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator(weight.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        ends_branch = name.endswith(("attention.out.weight", "down.weight"))
        nn.init.normal_(weight, std=residual_std if ends_branch else _WEIGHT_STD, generator=generator)


def _rotation_table(config: GPTConfig, device: torch.device) -> Tensor:
    """(2, seq_max, head width) fp32: cosines and sines of every position."""
    head_width = config.width // config.num_heads
    frequency = _ROPE_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float32, device=device) / head_width)
    positions = torch.arange(config.seq_max, dtype=torch.float32, device=device)
    angle = torch.outer(positions, frequency).repeat(1, 2)
    return torch.stack((angle.cos(), angle.sin()))


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    cosine, sine = rotation.to(x.dtype).unbind()
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


# [Note: products on a CPU without instructions for bf16 or fp16]
# torch multiplies such matrices by a plain loop there, up to a hundred times slower than fp32. Here both sides are
# widened, which is exact, and multiplied in fp32; the result is rounded once. That is what the loop computes, up to the
# order of its sums. Backward saves what was given, not what was widened. Elsewhere these are torch's own functions.


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """(..., num_in) times the transpose of (num_out, num_in): (..., num_out)."""
    if not _is_slow(x):
        return F.linear(x, weight)
    out: Tensor = _WideLinear.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Scaled dot products over (batch, heads, seq, head width); each position sees itself and those before it."""
    if not _is_slow(query):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    wide = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), is_causal=True)
    return wide.to(query.dtype)


def _is_slow(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and not has_products(x.dtype)


@cache
def has_products(dtype: torch.dtype) -> bool:
    """True if torch multiplies matrices of this dtype by more than a loop on this CPU."""
    ops = torch.ops.mkldnn
    return bool(ops._is_mkldnn_bf16_supported() if dtype is torch.bfloat16 else ops._is_mkldnn_fp16_supported())


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wide = grad.float()
        grad_x = (wide @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        return grad_x, (wide.flatten(0, -2).T @ x.float().flatten(0, -2)).to(weight.dtype)
