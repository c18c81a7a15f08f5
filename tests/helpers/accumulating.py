"""`zo.accumulate` beside the loop that it stands for, on plain tensors: losses and gradients must be equal."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import build, tokens_of
from zero_offload.model.api import runtime_of

LossFn = Callable[[nn.Module, Any], Tensor]
Grads = dict[str, Tensor | None]


def batches_of(count: int, first: int = 0) -> list[Tensor]:
    """Micro-batches of different shapes."""
    return [tokens_of(first + i, batch=1 + i % 3, length=5 + i) for i in range(count)]


def loop(model: nn.Module, batches: Sequence[Any], loss_fn: LossFn) -> list[Tensor]:
    losses = []
    for batch in batches:
        loss = loss_fn(model, batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def third(model: nn.Module, batch: Any) -> Tensor:
    """The loss of one of three micro-batches."""
    loss: Tensor = model(batch) / 3
    return loss


def away(nvme: Path, **settings: Any) -> zo.OffloadConfig:
    """Parameters on disk, gradients where `.grad` shows them."""
    tiers = {"params": "nvme", "optimizer": "cpu", "grads": "device"}
    limits = {"precision": "fp32", "device_memory": "16MiB", "durability": "scratch"}
    return zo.OffloadConfig(nvme=nvme, **{**tiers, **limits, **settings})


def assert_as_loop(
    make: Callable[[], nn.Module],
    nvme: Path,
    loss_fn: LossFn = third,
    batches: Sequence[Any] | None = None,
    units: Any = None,
) -> nn.Module:
    """Two calls, so that the second one follows a trace and adds to gradients; returns the offloaded model, closed."""
    batches = batches_of(3) if batches is None else batches
    plain, model = build(make), build(make)
    zo.offload(model, away(nvme), units=units)
    for _ in range(2):
        expected = loop(plain, batches, loss_fn)
        assert zo.accumulate(model, batches, loss_fn) == expected
        assert_same_grads(model, plain)
        assert_at_rest(model)
    zo.close(model)
    return model


def grads_of(model: nn.Module) -> Grads:
    return {name: None if param.grad is None else param.grad.clone() for name, param in model.named_parameters()}


def assert_same_grads(model: nn.Module, other: nn.Module) -> None:
    found, expected = grads_of(model), grads_of(other)
    assert list(found) == list(expected)
    for name, grad in expected.items():
        each = found[name]
        assert (each is None) == (grad is None), name
        assert each is None or grad is None or torch.equal(each, grad), name
    assert any(grad is not None and bool(grad.any()) for grad in found.values())


def assert_at_rest(model: nn.Module) -> None:
    """No forward or backward has left anything."""
    owner = runtime_of(model)
    assert owner is not None
    assert [unit.name for unit in owner.units if unit.in_use] == []
    assert threads() == []


def threads() -> list[str]:
    """Those of micro-batches."""
    return [thread.name for thread in threading.enumerate() if "micro-batch" in thread.name]


def uses_of(model: nn.Module) -> list[int]:
    """Units in the order in which the last forward and backward asked for them; the same one twice in a row is once."""
    owner = runtime_of(model)
    assert owner is not None
    return [unit for unit, _ in itertools.groupby(owner.prefetcher.schedule._recorded)]
