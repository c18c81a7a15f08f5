"""The same script on a plain model and on an offloaded one: what it reports must be equal, bit for bit.

The plain twin is an ordinary module with `zo.AdamW` on ordinary parameters. With bf16 the initial values are
bf16 numbers, so that both twins start from the same masters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import build, tokens_of
from tests.helpers.reference import BETAS, EPS, Trajectory, param_groups, read_masters
from zero_offload.hardware.kernels.formats import join_master

Script = Callable[[nn.Module, zo.AdamW], Iterator[float]]
"""Trains a model and yields numbers to compare."""


@functools.lru_cache(maxsize=16)
def run_plain(script: Script, make: Callable[[], nn.Module], precision: str) -> Trajectory:
    """Once for all placements of a test."""
    model = _build(make, precision)
    if precision == "bf16":
        for param in model.parameters():
            if param.is_floating_point():
                param.data = param.data.bfloat16()
    optimizer = _optimizer(model)
    values = list(script(model, optimizer))
    params = {name: _master(param, optimizer) for name, param in model.named_parameters()}
    return Trajectory(values, params=params)


def run_offloaded(
    script: Script, make: Callable[[], nn.Module], config: zo.OffloadConfig, units: Any = None
) -> Trajectory:
    model = _build(make, config.numerics.compute)
    zo.offload(model, config, units=units)
    values = list(script(model, _optimizer(model)))
    trajectory = Trajectory(values, params=read_masters(model))
    zo.close(model)
    return trajectory


def assert_same(script: Script, make: Callable[[], nn.Module], config: zo.OffloadConfig, units: Any = None) -> None:
    plain = run_plain(script, make, config.numerics.compute)
    offloaded = run_offloaded(script, make, config, units)
    assert offloaded.losses == plain.losses
    assert offloaded == plain


def _build(make: Callable[[], nn.Module], precision: str) -> nn.Module:
    model = build(make)
    if precision == "bf16":
        for param in model.parameters():
            if param.is_floating_point():
                param.data = param.data.bfloat16().float()
    return model


def _optimizer(model: nn.Module) -> zo.AdamW:
    return zo.AdamW(param_groups(model), lr=1e-2, betas=BETAS, eps=EPS)


def _master(param: nn.Parameter, optimizer: zo.AdamW) -> torch.Tensor:
    residual = optimizer.state[param].get("residual") if param in optimizer.state else None
    if residual is None:
        return param.detach().float().clone() if param.is_floating_point() else param.detach().clone()
    master = torch.empty(param.shape)
    join_master(param.detach(), residual, master)
    return master


def train(model: nn.Module, optimizer: zo.AdamW, seeds: Any) -> Iterator[float]:
    """Plain steps, one per seed."""
    for seed in seeds:
        loss = model(tokens_of(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
