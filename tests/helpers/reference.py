"""The rules of training, written out on plain tensors, and the same recipe on an offloaded model.

`train_plain` is the reference: a plain module and plain lists. fp32: `zo.AdamW` on ordinary parameters. bf16: the bf16
halves of fp32 masters, bf16 gradients summed in fp32, one kernel call per parameter. fp16: fp32 masters, rounded for
the model by torch. The loss scale starts so high that it must back off, and grows until it must again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import build, tokens_of
from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.arguments import Segment
from zero_offload.hardware.kernels.formats import join_master, split_master
from zero_offload.hardware.kernels.grads import sum_of_squares
from zero_offload.hardware.kernels.update import UpdateBuffers, fused_update
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.plan.quantized import offloaded_tensors

BETAS, EPS, WEIGHT_DECAY = (0.9, 0.95), 1e-8, 0.1
INIT_SCALE, GROWTH_INTERVAL = 2.0**18, 3


@dataclass(frozen=True)
class Recipe:
    """A training job; where its states rest is not part of it."""

    make: Callable[[], nn.Module]
    precision: str = "fp32"
    num_steps: int = 20
    micro_batches: int = 1
    max_norm: float | None = None
    skipped: frozenset[int] = frozenset()
    """Steps whose gradients are dropped."""


@dataclass
class Trajectory:
    """The figures that must be equal, bit for bit."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Of steps that were taken."""
    params: dict[str, Tensor] = field(default_factory=dict)
    """fp32 masters at the end, by name."""
    scales: list[float] = field(default_factory=list)
    """After each step; 1 where losses are not scaled."""

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Trajectory)
        numbers = ("losses", "norms", "scales")
        same = all(getattr(self, each) == getattr(other, each) for each in numbers)
        return (
            same
            and list(self.params) == list(other.params)
            and all(torch.equal(self.params[name], other.params[name]) for name in self.params)
        )


def learning_rate(step: int) -> float:
    return 1e-2 * (1 - step / 40)


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


def micro_batches_of(recipe: Recipe, step: int) -> list[Tensor]:
    return [tokens_of(step * recipe.micro_batches + i) for i in range(recipe.micro_batches)]


# Offloaded


def train_offloaded(recipe: Recipe, config: zo.OffloadConfig) -> Trajectory:
    model = build(recipe.make)
    zo.offload(model, config)
    trajectory = Trajectory()
    optimizer = zo.AdamW(param_groups(model), lr=learning_rate(0), betas=BETAS, eps=EPS)
    scaler = new_scaler(recipe.precision)
    for step in range(recipe.num_steps):
        train_step(recipe, model, (optimizer, scaler), step, trajectory)
    trajectory.params = read_masters(model)
    zo.close(model)
    return trajectory


def new_scaler(precision: str) -> zo.GradScaler:
    """Passes everything through where the range needs no scale."""
    return zo.GradScaler(INIT_SCALE, growth_interval=GROWTH_INTERVAL, enabled=precision == "fp16")


def train_step(
    recipe: Recipe, model: nn.Module, pair: tuple[torch.optim.Optimizer, zo.GradScaler], step: int, into: Trajectory
) -> None:
    """One step of an offloaded model."""
    optimizer, scaler = pair
    for tokens in micro_batches_of(recipe, step):
        loss = model(tokens) / recipe.micro_batches
        scaler.scale(loss).backward()
        into.losses.append(loss.item())
    if step in recipe.skipped:
        optimizer.zero_grad()
        return
    if recipe.max_norm is not None:
        scaler.unscale_(optimizer)
        norm = zo.clip_grad_norm_(model, recipe.max_norm).item()
        into.norms += [norm] if math.isfinite(norm) else []
    set_learning_rate(optimizer, step)
    scaler.step(optimizer)
    # The update may still run: nothing from here on may reach it.
    scaler.update()
    set_learning_rate(optimizer, 10**6)
    optimizer.zero_grad()
    into.scales.append(scaler.get_scale())


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = max(0.0, learning_rate(step))


def read_masters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the fp32 masters, and of frozen tensors as they are, read from where they rest, by name."""
    with zo.gathered(model, kind="master") as masters:
        return {name: masters[name].to("cpu", copy=True) for name, _ in offloaded_tensors(model)}


# Plain


def nearest_bf16(master: Tensor) -> Tensor:
    """The nearest value; of two the one farther from zero, as decision 003 has it."""
    bits = master.detach().view(torch.int32) + 0x8000
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def train_plain(recipe: Recipe) -> Trajectory:
    return train_plain_fp32(recipe) if recipe.precision == "fp32" else train_plain_16_bits(recipe)


def global_norm(model: nn.Module, grads: dict[str, Tensor]) -> float:
    """2-norm in double: summed exactly inside a unit, then unit after unit."""
    total = 0.0
    for unit in ModelSpec.from_module(model).units:
        held = [grads[param.name] for param in unit.params if param.name in grads]
        total += math.fsum(sum_of_squares(g.data_ptr(), g.dtype, g.numel()).sumsq for g in held)
    return math.sqrt(total)


def clip_factor(norm: float, max_norm: float) -> float:
    return min(1.0, max_norm / (norm + 1e-6))


def train_plain_fp32(recipe: Recipe) -> Trajectory:
    model, trajectory = build(recipe.make), Trajectory()
    optimizer = zo.AdamW(param_groups(model), lr=learning_rate(0), betas=BETAS, eps=EPS)
    for step in range(recipe.num_steps):
        for tokens in micro_batches_of(recipe, step):
            loss = model(tokens) / recipe.micro_batches
            loss.backward()
            trajectory.losses.append(loss.item())
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if step not in recipe.skipped:
            if recipe.max_norm is not None:
                norm = global_norm(model, grads)
                trajectory.norms.append(torch.tensor(norm).item())
                for grad in grads.values():
                    grad.mul_(clip_factor(norm, recipe.max_norm))
            set_learning_rate(optimizer, step)
            optimizer.step()
            trajectory.scales.append(1.0)
        optimizer.zero_grad()
    trajectory.params = {name: p.detach().clone() for name, p in model.named_parameters()}
    return trajectory


class MasterParam:
    """A bf16 parameter and what completes it."""

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param
        self.half = torch.empty(param.shape, dtype=torch.bfloat16)
        self.residual = torch.empty(param.shape, dtype=torch.int16)
        split_master(param.data, self.half, self.residual)
        self.exp_avg, self.exp_avg_sq = torch.zeros(param.shape), torch.zeros(param.shape)
        self.num_updates = 0
        self.grad: Tensor | None = None
        param.data = self.half

    def take_grad(self) -> None:
        """Gradients are summed in fp32."""
        if self.param.grad is not None:
            new = self.param.grad.float()
            self.grad = new if self.grad is None else self.grad + new
            self.param.grad = None

    def update(self, lr: float, grad_scale: float) -> None:
        if self.grad is None:
            return
        self.num_updates += 1
        decay = WEIGHT_DECAY if self.param.dim() > 1 else 0.0
        segment = Segment(0, self.param.numel(), lr, *BETAS, EPS, decay, grad_scale, self.num_updates)
        self.step_kernel(self.grad, segment)
        self.grad = None

    def step_kernel(self, grad: Tensor, segment: Segment) -> None:
        buffers = UpdateBuffers(
            value=self.half.data_ptr(),
            residual=self.residual.data_ptr(),
            master=0,
            states=(self.exp_avg.data_ptr(), self.exp_avg_sq.data_ptr()),
            grad=grad.data_ptr(),
            value_out=0,
            value_dtype=torch.bfloat16,
            grad_dtype=torch.float32,
        )
        fused_update(Rule.ADAMW, buffers, [segment], 1)

    def master(self) -> Tensor:
        master = torch.empty(self.half.shape)
        join_master(self.half, self.residual, master)
        return master

    def set_master(self, values: Tensor) -> None:
        """`values`, fp32, become the master; the parameter follows."""
        split_master(values.contiguous(), self.half, self.residual)


class RoundedParam(MasterParam):
    """An fp16 parameter and the fp32 master that it is rounded from."""

    dtype = torch.float16

    def __init__(self, param: nn.Parameter) -> None:
        self.whole = nn.Parameter(param.detach().clone())
        super().__init__(param)
        self._follow()

    def _follow(self) -> None:
        self.param.data = self.whole.detach().to(self.dtype)

    def step_kernel(self, grad: Tensor, segment: Segment) -> None:
        buffers = UpdateBuffers(
            value=self.whole.data_ptr(),
            residual=0,
            master=0,
            states=(self.exp_avg.data_ptr(), self.exp_avg_sq.data_ptr()),
            grad=grad.data_ptr(),
            value_out=0,
            value_dtype=torch.float32,
            grad_dtype=torch.float32,
        )
        fused_update(Rule.ADAMW, buffers, [segment], 1)
        self._follow()

    def master(self) -> Tensor:
        return self.whole.detach().clone()

    def set_master(self, values: Tensor) -> None:
        self.whole.data.copy_(values)
        self._follow()


class WholeParam(RoundedParam):
    """An fp32 parameter is its own master."""

    dtype = torch.float32


@dataclass
class LossScale:
    """Halved after an overflow, doubled after some steps without."""

    value: float
    steps_without: int = 0

    def adapt(self, finite: bool) -> None:
        self.steps_without = self.steps_without + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.steps_without == GROWTH_INTERVAL:
            self.value, self.steps_without = self.value * 2, 0


def plain_step(
    recipe: Recipe, pair: tuple[nn.Module, dict[str, MasterParam]], step: int, scale: float, into: Trajectory
) -> None:
    """Unscale, clip and update."""
    model, masters = pair
    factor = 1.0
    if recipe.max_norm is not None:
        norm = global_norm(model, {n: each.grad for n, each in masters.items() if each.grad is not None}) / scale
        into.norms.append(torch.tensor(norm).item())
        factor = clip_factor(norm, recipe.max_norm)
    for each in masters.values():
        each.update(max(0.0, learning_rate(step)), factor / scale)


def train_plain_16_bits(recipe: Recipe) -> Trajectory:
    model, trajectory = build(recipe.make), Trajectory()
    kind = MasterParam if recipe.precision == "bf16" else RoundedParam
    masters = {name: kind(param) for name, param in model.named_parameters()}
    scale = LossScale(1.0 if recipe.precision == "bf16" else INIT_SCALE)
    for step in range(recipe.num_steps):
        for tokens in micro_batches_of(recipe, step):
            loss = model(tokens) / recipe.micro_batches
            (loss * scale.value).backward()
            trajectory.losses.append(loss.item())
            for each in masters.values():
                each.take_grad()
        if step not in recipe.skipped:
            finite = all(bool(each.grad.isfinite().all()) for each in masters.values() if each.grad is not None)
            if finite:
                plain_step(recipe, (model, masters), step, scale.value, trajectory)
            if recipe.precision == "fp16":
                scale.adapt(finite)
            trajectory.scales.append(scale.value)
        for each in masters.values():
            each.grad = None
    trajectory.params = {name: each.master() for name, each in masters.items()}
    return trajectory


# Configurations


def placed(
    precision: str, placement: Sequence[Any], nvme: Path | None, device_memory: str | None = "8MiB"
) -> zo.OffloadConfig:
    """`placement` is (params, grads, optimizer)."""
    params, grads, optimizer = placement
    return zo.OffloadConfig(
        params=params,
        grads=grads,
        optimizer=optimizer,
        precision=precision,
        nvme=nvme,
        device_memory=device_memory,
        existing="discard",
    )
