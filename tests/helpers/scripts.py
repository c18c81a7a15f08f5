"""Training loops that run alike on a plain fp32 model and on an offloaded one, on one rank and on several.

A script is a generator of numbers that must be equal. `average` makes the gradients of a plain model the mean over
ranks, which offloaded ones are by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import build
from tests.helpers.ranks import read_params, rows_of
from tests.helpers.reference import clip_factor, global_norm
from zero_offload.standins.owners import owner_of

Average = Callable[[nn.Module], None]
Script = Callable[[nn.Module, Callable[[int], Tensor], Average], Iterator[float]]
"""script(model, rows of a step, average)."""
Result = tuple[list[float], dict[str, Tensor]]


def run_offloaded(
    script: Script, make: Callable[[], nn.Module], config: zo.OffloadConfig, ranks: Any = (0, 1)
) -> Result:
    model = zo.offload(build(make), config)
    try:
        values = list(script(model, lambda step: rows_of(step, *ranks), lambda _: None))
        return values, read_params(model)
    finally:
        zo.close(model)


def run_plain(script: Script, make: Callable[[], nn.Module], ranks: Any = (0, 1), dtype: Any = torch.float32) -> Result:
    model = build(make).to(dtype)
    average = _average if ranks[1] > 1 else lambda _: None
    values = list(script(model, lambda step: rows_of(step, *ranks), average))
    return values, {name: param.detach().float().clone() for name, param in model.named_parameters()}


def _average(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())


def run_both(
    rank: int, world_size: int, script: Script, make: Callable[[], nn.Module], settings: dict[str, Any]
) -> tuple[Result, Result]:
    """A job of ranks."""
    config = zo.OffloadConfig(precision="fp32", **settings)
    ranks = (rank, world_size)
    return run_offloaded(script, make, config, ranks), run_plain(script, make, ranks)


def check(found: Result, expected: Result) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    different = [name for name, values in expected[1].items() if not torch.equal(found[1][name], values)]
    assert not different


def clip_norm(params: list[nn.Parameter], max_norm: float, model: nn.Module) -> float:
    """zo.clip_grad_norm_, or the same sums on a plain model, unit by unit."""
    if owner_of(params[0]) is not None:
        return zo.clip_grad_norm_(params, max_norm).item()
    ids = set(map(id, params))
    grads = {name: p.grad for name, p in model.named_parameters() if id(p) in ids and p.grad is not None}
    norm = global_norm(model, grads)
    for grad in grads.values():
        grad.mul_(clip_factor(norm, max_norm))
    return torch.tensor(norm).item()
