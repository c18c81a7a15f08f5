"""A model with routers and norms in fp32 while the rest computes in bf16: asked of zero_offload, or cast by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.ranks import read_params
from tests.helpers.reference import param_groups

MIXED = zo.Precision(modules={"*.router": "fp32", nn.LayerNorm: "fp32"})
IN_FP32 = ("router", "norm")
"""Modules below which parameters are fp32, by the last part of their names."""


class Router(nn.Module):
    """Takes its input by keyword, returns several tensors, one of them of integers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scores = nn.Linear(dim, 2)

    def forward(self, *, hidden: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        weights = self.scores(hidden).softmax(-1)
        return {"weights": weights}, weights.argmax(-1)


class RoutedBlock(nn.Module):
    Norm: type[nn.LayerNorm] = nn.LayerNorm
    Router: type[Router] = Router

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = self.Norm(dim)
        self.router = self.Router(dim)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        routed, chosen = self.router(hidden=hidden)
        outputs = torch.stack([F.gelu(expert(hidden)) for expert in self.experts], -1)
        best = outputs.gather(-1, chosen[..., None, None].expand(*hidden.shape, 1))[..., 0]
        return x + best * routed["weights"].amax(-1, keepdim=True)  # type: ignore[no-any-return]


class NormByHand(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).bfloat16()


class RouterByHand(Router):
    def forward(self, *, hidden: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        routed, chosen = super().forward(hidden=hidden.float())
        return {"weights": routed["weights"].bfloat16()}, chosen


class BlockByHand(RoutedBlock):
    Norm, Router = NormByHand, RouterByHand


class RoutedLM(TinyLM):
    def __init__(self, dim: int = 33) -> None:
        super().__init__(dim, block=RoutedBlock)


class RoutedByHand(TinyLM):
    """The same, with its casts written out; its parameters are still to be converted."""

    def __init__(self, dim: int = 33) -> None:
        super().__init__(dim, block=BlockByHand)
        self.norm = NormByHand(dim)


def round_values(model: nn.Module) -> nn.Module:
    """bf16 numbers, so that all twins begin with the same masters."""
    for param in model.parameters():
        param.data = param.data.bfloat16().float()
    return model


def convert_by_hand(model: nn.Module) -> nn.Module:
    for name, param in round_values(model).named_parameters():
        if not set(IN_FP32) & set(name.split(".")):
            param.data = param.data.bfloat16()
    return model


def optimizer_of(model: nn.Module) -> zo.AdamW:
    return zo.AdamW(param_groups(model), lr=1e-2, betas=(0.9, 0.95))


def train(model: nn.Module, optimizer: zo.AdamW, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(tokens_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_by_hand(dim: int, steps: range) -> tuple[list[float], dict[str, Tensor]]:
    model = convert_by_hand(build(lambda: RoutedByHand(dim)))
    return train(model, optimizer_of(model), steps), {n: p.detach().float() for n, p in model.named_parameters()}


def train_offloaded(
    rank: int, world_size: int, dim: int, settings: dict[str, object], steps: range, checkpoint: str | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Every rank has the same rows: their mean gradient is each one's, exactly. From the generation found, if any."""
    model = zo.offload(round_values(build(lambda: RoutedLM(dim))), zo.OffloadConfig(precision=MIXED, **settings))
    try:
        optimizer = optimizer_of(model)
        zo.resume(model, optimizer)
        if checkpoint is not None and steps.start > 0:
            zo.load_checkpoint(model, optimizer, checkpoint)
        losses = train(model, optimizer, steps)
        zo.commit(model, optimizer)
        if checkpoint is not None and steps.start == 0:
            zo.save_checkpoint(model, optimizer, checkpoint)
        return losses, read_params(model)
    finally:
        zo.close(model)
