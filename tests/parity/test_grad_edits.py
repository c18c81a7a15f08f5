"""Elements of `.grad` are read and changed between backward and step, on every tier: the bits of plain fp32 tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.grad_edits import EDITS, Twin, same
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import in_turn
from tests.helpers.reference import read_masters

SCALE = 2.0**8


def offloaded(precision: str, grads: str, nvme: Path, **settings: Any) -> tuple[nn.Module, Twin]:
    config = zo.OffloadConfig(precision=precision, grads=grads, nvme=nvme, durability="scratch", **settings)
    model = zo.offload(build(TinyLM), config)
    return model, Twin(model, read_masters(model))


def copies(model: nn.Module) -> dict[str, Tensor]:
    with zo.gathered(model, kind="grads") as grads:
        return dict(grads)


def check(model: nn.Module, twin: Twin, optimizer: torch.optim.Optimizer | None = None) -> None:
    """The same gradients, sums of squares and steps."""
    found = copies(model)
    params = dict(model.named_parameters())
    for name, param in zip(twin.names, twin.params, strict=True):
        assert (param.grad is None) == (params[name].grad is None) == (name not in found), name
        if param.grad is not None:
            assert torch.equal(found[name], param.grad), name
            norm = params[name].grad.float().norm()
            torch.testing.assert_close(norm, param.grad.double().norm().float(), rtol=2e-7, atol=0)
    zo.clip_grad_norm_(model, 1e9)
    (optimizer or zo.SGD(model.parameters(), lr=0.5)).step()
    masters = read_masters(model)
    assert all(torch.equal(masters[name], value) for name, value in twin.step().items())
    zo.close(model)


@in_turn(edit=[*EDITS], of=[("cpu", "fp32"), ("nvme", "bf16"), ("device", "fp32"), ("cpu", "bf16"), ("nvme", "fp16")])
def test_edits_are_those_of_plain_tensors(edit: str, of: tuple[str, str], nvme: Path) -> None:
    grads, precision = of
    model, twin = offloaded(precision, grads, nvme)
    model(tokens_of(0)).backward()
    seen = EDITS[edit]([*model.parameters()])
    assert same(seen, EDITS[edit](twin.params))
    check(model, twin)


@in_turn(
    edit=[*EDITS],
    of=[("cpu", "fp16"), ("nvme", "fp32"), ("cpu", "bf16"), ("nvme", "fp16")],
    after=["scale", "backward", "accumulate", "clip", "scale"],
)
def test_edits_after_what_gradients_wait_for(edit: str, of: tuple[str, str], after: str, nvme: Path) -> None:
    """A loss scale that the step divides out, sums, factors of a clip."""
    grads, precision = of
    model, twin = offloaded(precision, grads, nvme)
    optimizer, scaler = zo.SGD(model.parameters(), lr=0.5), zo.GradScaler(SCALE, enabled=after == "scale")
    batches = [tokens_of(0), tokens_of(1)]
    if after == "accumulate":
        for loss in zo.accumulate(model, batches, lambda m, tokens: m(tokens)):
            assert loss.isfinite()
    else:
        for tokens in batches if after == "backward" else batches[:1]:
            scaler.scale(model(tokens)).backward()
    scaler.unscale_(optimizer)
    factors = [1 / SCALE] if after == "scale" else []
    if after == "clip":
        factors.append(min(1.0, 0.1 / (zo.clip_grad_norm_(model, 0.1).item() + 1e-6)))
    for param in twin.params:
        for factor in factors:
            param.grad.mul_(factor)
    seen = EDITS[edit]([*model.parameters()])
    assert same(seen, EDITS[edit](twin.params))
    check(model, twin, optimizer)
