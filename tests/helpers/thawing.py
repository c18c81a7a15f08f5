"""Runs in which frozen blocks are trained later, and others rest."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of
from zero_offload.storage.files.swap_file import SwapFile

UNEVEN = 33
"""As in `tests/helpers/ranks.py`, whose import takes seconds: scripts that are killed need this alone."""
TIERS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "device_memory": "10MiB"},
    "cached": {"params": "nvme", "optimizer": "cpu"},
    "states": {"params": "cpu", "optimizer": "nvme"},
}


def killed_at(step: int, num_writes: int) -> Callable[[int], None]:
    """For `before` of these runs: the write after so many, counted from this step on, ends the process."""

    def before(number: int) -> None:
        if number == step:
            count, write = itertools.count(), SwapFile.launch_write

            def counted(*args: Any) -> Any:
                if next(count) == num_writes:
                    os.kill(os.getpid(), signal.SIGKILL)
                return write(*args)

            SwapFile.launch_write = counted  # type: ignore[method-assign]

    return before


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


def dropping(
    nvme: Path,
    stop: int,
    *,
    order: str = "ascending",
    num_live: int = 1,
    existing: str = "discard",
    master: str = "drop",
    before: Callable[[int], None] = lambda _: None,
    retries: type[Exception] | tuple[()] = (),
    blocks: Callable[[nn.Module], Iterable[nn.Module]] = lambda model: model.blocks,
    last: Callable[[nn.Module], None] = lambda model: None,
    **settings: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses until a step, and masters then, of a program that knows its steps alone; `blocks` of a model drop theirs.
    A switch that raises one of `retries` is made again."""
    model = build(frozen)
    zo.offload(model, zo.OffloadConfig(precision="bf16", nvme=nvme, existing=existing, **settings))
    try:
        optimizer = zo.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        found = zo.resume(model, optimizer)
        live = zo.LiveBlocks(blocks(model), num_live, order=order, every=2, seed=3, master=master)
        losses: list[float] = []
        for step in range(0 if found is None else found.step, stop):
            before(step)
            try:
                live.begin_step(step, optimizer)
            except retries:
                live.begin_step(step, optimizer)
            loss = model(tokens_of(step))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            zo.commit(model, optimizer)
        last(model)
        with zo.gathered(model, kind="master") as masters:
            return losses, {name: values.detach().float().clone() for name, values in masters.items()}
    finally:
        zo.close(model)
