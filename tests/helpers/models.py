"""Small models with the shapes that matter: repeated blocks, ties, leftovers, units of one frame and of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 61
NARROW, WIDE = 32, 320
"""A block of a WIDE model takes several frames in either dtype, and two chunks of the update pipeline."""


class Block(nn.Module):
    """A feed-forward residual block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class AttentionBlock(nn.Module):
    """torch's MultiheadAttention, which reads `out_proj.weight` without calling `out_proj`, and a feed-forward."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.mlp = Block(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(x, x, x, need_weights=False)[0])  # type: ignore[no-any-return]


class Fuse(torch.autograd.Function):
    """Identity; its backward raises `error`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: type[BaseException] | None) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.error is not None:
            raise ctx.error("in backward")
        return grad, None


class TinyLM(nn.Module):
    """Embedding, blocks, norm, and a head tied to the embedding; returns the loss."""

    def __init__(self, dim: int = NARROW, num_blocks: int = 3, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(block(dim) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():  # a question about a parameter at rest breaks torch.compile's graph
            tokens = tokens.to(self.embedding.weight.device)
        x = self.run_blocks(self.embedding(tokens[:, :-1]))
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Branching(nn.Module):
    """Two layers; the second one is used where it is asked for. Returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        for layer in self.layers[: 1 + both]:
            x = layer(x)
        return x.square().mean()


def tokens_of(seed: int, batch: int = 2, length: int = 9) -> Tensor:
    """(batch, length) int64, always the same for one seed."""
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model with always the same initial values."""
    torch.manual_seed(seed)
    return make()


class AdaptedBlock(Block):
    """A frozen block, and trained layers of rank 2 beside its first product."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.requires_grad_(False)
        self.narrow, self.widen = nn.Linear(dim, 2, bias=False), nn.Linear(2, 4 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x_in = self.norm(x)
        return x + self.down(F.gelu(self.up(x_in) + self.widen(self.narrow(x_in))))  # type: ignore[no-any-return]


def adapted_lm(dim: int = WIDE, num_blocks: int = 4) -> nn.Module:
    """All of it frozen but the blocks' adapters; frozen values are numbers of bf16."""
    model = TinyLM(dim, num_blocks, AdaptedBlock)
    model.embedding.requires_grad_(False)
    model.norm.requires_grad_(False)
    for param in model.parameters():
        if not param.requires_grad:
            param.data = param.data.bfloat16().float()
    return model


class StridedBlock(nn.Module):
    """A filter as a matrix whose rows are parts of it: strides, an offset, and its storage say where its values are."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((dim,), 0.5))
        self.taps = nn.Parameter(torch.randn(2 * dim - 1) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        (dim,) = self.gain.shape
        rows, last_row = self.taps.as_strided((dim, dim), (1, 1), 0), self.taps.as_strided((dim,), (1,), dim - 1)
        storage = self.gain.detach().untyped_storage()
        whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage)
        return x + (x * self.gain) @ rows + last_row * whole.sum()
