"""Runs in which frozen blocks are trained later, and others rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of

UNEVEN = 33
"""As in `tests/helpers/ranks.py`, whose import takes seconds: scripts that are killed need this alone."""
TIERS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "device_memory": "10MiB"},
    "cached": {"params": "nvme", "optimizer": "cpu"},
    "states": {"params": "cpu", "optimizer": "nvme"},
}


def frozen() -> nn.Module:
    """The last norm alone is trained. All values are numbers of bf16."""
    model = TinyLM(UNEVEN).requires_grad_(False)
    model.norm.requires_grad_(True)
    for param in model.parameters():
        param.data = param.data.bfloat16().float()
    return model


SWITCH = 3
"""The step before which a block thaws, and another rests."""


def run(
    nvme: Path,
    steps: range,
    existing: str = "refuse",
    before: Callable[[int], None] = lambda _: None,
    *,
    drops: bool = False,
    **settings: Any,
) -> tuple[list[Any], dict[str, Tensor]]:
    """A run that goes on from what it finds, as a program does that knows only its steps. If it `drops` states, those
    of blocks that rest go."""
    model = zo.offload(build(frozen), zo.OffloadConfig(precision="bf16", nvme=nvme, existing=existing, **settings))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    resumed = zo.resume(model, optimizer)
    first = 0 if resumed is None else resumed.step
    assert first == steps.start or (existing == "resume" and abs(first - steps.start) < 3)  # where a kill came
    values: list[Any] = []
    for step in range(first, steps.stop):
        before(step)
        if step in (1, SWITCH):
            model.blocks.requires_grad_(False)
            for param in model.blocks.parameters() if drops else ():
                optimizer.state.pop(param, None)
            model.blocks[2 if step == 1 else 0].requires_grad_(True)
        loss = model(tokens_of(step))
        loss.backward()
        values += [loss.item(), zo.clip_grad_norm_(model, 0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
        zo.commit(model, optimizer)
    with zo.gathered(model) as found:
        params = {name: param.detach().float().clone() for name, param in found.items()}
    zo.close(model)
    return values, params
