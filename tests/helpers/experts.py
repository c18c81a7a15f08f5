"""A small model with all experts of a layer in parameters of three dimensions, run in groups once it is offloaded."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero_offload as zo
from tests.helpers.models import TinyLM, build
from tests.helpers.ranks import Outcome, read_params, rows_of
from tests.helpers.reference import Trajectory, param_groups
from zero_offload.model.runtime import ModelRuntime
from zero_offload.plan.model_spec import ExpertGroups
from zero_offload.runtime.hooks import mark_experts
from zero_offload.standins.owners import owner_of

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
            mark_experts(self.experts, ExpertGroups(NUM_EXPERTS, size))

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


def train_beside_none(
    rank: int, world_size: int, make: Any, settings: dict[str, Any], alone: int, how: str, precision: str = "fp32"
) -> dict[str, Tensor]:
    """A job of several ranks: tokens of rank `alone` alone meet experts, in the first block; of no rank in the second.
    The parameters after two steps."""
    model = build(make)
    _let_meet(model, rank == alone)
    zo.offload(model, zo.OffloadConfig(precision=precision, **settings))
    optimizer = zo.AdamW(param_groups(model), lr=1e-2, weight_decay=0.1)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        loss: Tensor = model(rows_of(step, rank, world_size))
        return loss

    for step in range(2):
        if how == "by_unit":
            zo.accumulate(model, [step, step + 2], loss_of)
        else:
            with zo.no_sync(model) if how == "no_sync" else nullcontext():
                loss_of(model, step).backward()
        if how == "no_sync":
            loss_of(model, step + 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = read_params(model)
    zo.close(model)
    return found


def plain_beside_none(rank: int, world_size: int, make: Any, alone: int, how: str) -> dict[str, Tensor]:
    """The same in plain tensors, fp32; a job, since ranks compute with a thread each."""
    models = [build(make) for _ in range(world_size)]
    for number, model in enumerate(models):
        _let_meet(model, number == alone)
    first = models[0]
    optimizer = zo.AdamW(param_groups(first), lr=1e-2, weight_decay=0.1)
    for step in range(2):
        for number, model in enumerate(models):
            model.load_state_dict(first.state_dict())
            for batch in (step, step + 2)[: 1 + (how != "plain")]:
                model(rows_of(batch, number, world_size)).backward()
        for params in zip(*(model.parameters() for model in models), strict=True):
            grads = [param.grad for param in params if param.grad is not None]
            params[0].grad = sum(grads[1:], start=grads[0]) / world_size if grads else None
        optimizer.step()
        for model in models:
            model.zero_grad()
    return {name: param.detach() for name, param in first.named_parameters()}


def _let_meet(model: nn.Module, is_met: bool) -> None:
    """No token meets an expert, but in the first block if it `is_met`."""

    def none(module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return args[0], torch.full_like(args[1], NUM_EXPERTS), args[2]

    for index, module in enumerate(each for each in model.modules() if isinstance(each, ManyExperts)):
        if index or not is_met:
            module.register_forward_pre_hook(none)
