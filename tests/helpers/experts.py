"""A small model with all experts of a layer in parameters of three dimensions, run in groups once it is offloaded."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero_offload as zo
from tests.helpers.models import TinyLM, build
from tests.helpers.ranks import Outcome, read_params, rows_of
from tests.helpers.reference import Trajectory, param_groups
from zero_offload.model.runtime import ModelRuntime
from zero_offload.plan.model_spec import Experts
from zero_offload.runtime.hooks import mark_experts
from zero_offload.storage.shards.registry import owner_of

NUM_EXPERTS, TOP_K = 6, 2


def _values(*shape: int, scale: float) -> nn.Parameter:
    """Of each expert; bf16 rounds none of them, since the reference rounds frozen values another way."""
    return nn.Parameter((torch.randn(NUM_EXPERTS, *shape) * scale).bfloat16().float())


class ManyExperts(nn.Module):
    """The forward that transformers' classes have."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.up = _values(2 * inner, dim, scale=dim**-0.5)
        self.bias = _values(2 * inner, scale=0.1)
        self.down = _values(dim, inner, scale=inner**-0.5)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        owner: Any = owner_of(self.up)
        if isinstance(owner, ModelRuntime) and owner.places[self.up].unit.layout.experts is not None:
            unit = owner.places[self.up].unit
            return owner.experts.run(owner, unit, self.one, hidden, index, weights)
        output = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            which, tokens = torch.where(index.t() == expert)
            if len(tokens):
                values = {name: param[expert][None] for name, param in self.named_parameters()}
                added = self.one(values, (), hidden[tokens], weights[tokens, which, None])
                output.index_add_(0, tokens, added.to(output.dtype))
        return output

    @staticmethod
    def one(values: Mapping[str, Tensor], more: Sequence[Tensor], hidden: Tensor, weights: Tensor) -> Tensor:
        gate, up = F.linear(hidden, values["up"][0], values["bias"][0]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, values["down"][0]) * weights


class ExpertsBlock(nn.Module):
    """Experts beside a layer that reads the same hidden states, before and behind them."""

    def __init__(self, dim: int, inner: int = 24, size: int = 2, *, trained: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, NUM_EXPERTS)
        self.experts = ManyExperts(dim, inner).requires_grad_(trained)
        self.shared = nn.Linear(dim, dim)
        if size:
            mark_experts(self.experts, Experts(NUM_EXPERTS, size))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x).flatten(0, -2)
        weights, index = self.router(hidden).softmax(-1).topk(TOP_K, dim=-1)
        return x + (self.experts(hidden, index, weights) + self.shared(hidden)).view_as(x)


def experts_lm(dim: int = 32, inner: int = 24, size: int = 2, num_blocks: int = 3, *, trained: bool = False) -> TinyLM:
    """`size` experts in a group; 0 for none."""
    block = functools.partial(ExpertsBlock, inner=inner, size=size, trained=trained)
    return TinyLM(dim, num_blocks, block)


def trained(trajectory: Trajectory) -> Trajectory:
    """Without the experts, which the reference keeps in fp32."""
    trajectory.params = {name: values for name, values in trajectory.params.items() if ".experts." not in name}
    return trajectory


def train(
    rank: int, world_size: int, make: Any, settings: dict[str, Any], num_steps: int = 3, max_norm: float | None = 0.5
) -> Outcome:
    """A job of several ranks."""
    model = build(make)
    zo.offload(model, zo.OffloadConfig(**settings))
    optimizer = zo.AdamW(param_groups(model), lr=1e-2, weight_decay=0.1)
    out = Outcome()
    for step in range(num_steps):
        loss = model(rows_of(step, rank, world_size))
        loss.backward()
        out.losses.append(loss.item())
        if max_norm is not None:
            out.norms.append(zo.clip_grad_norm_(model, max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    out.params = read_params(model)
    zo.close(model)
    return out
