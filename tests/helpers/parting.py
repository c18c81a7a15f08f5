"""Ranks of which one, after some steps that all make, does something else than the others; then all train anew."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import Block, build
from tests.helpers.ranks import read_params
from zero_offload.runtime.ranks import agreement

DIM, NUM_BLOCKS = 33, 4
ENOUGH_S = 40
"""For an error that takes 4 s at most, beside other tests; ranks that wait in vain take longer."""


class Steered(nn.Module):
    """Blocks that run in an order that the call gives."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(NUM_BLOCKS))
        self.spare = Block(DIM)
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1, 2, 3), *, with_spare: bool = False) -> Tensor:
        for index in order:
            x = self.blocks[index](x)
        return self.head(self.spare(x) if with_spare else x)  # type: ignore[no-any-return]


@dataclass
class Run:
    """One rank's."""

    rank: int
    model: nn.Module
    optimizer: zo.AdamW
    delays: random.Random
    clips: bool
    odd: bool = False
    """True in the step in which this rank does something else."""
    num_steps: int = 0
    """Steps that have ended."""

    def loss(self, number: int, **ways: Any) -> Tensor:
        x = torch.randn(2, 4, DIM, generator=torch.Generator().manual_seed(100 * number + self.rank))
        if self.delays.random() < 0.3:
            time.sleep(self.delays.random() * 0.02)
        return self.model(x.to(next(self.model.parameters()).device), **ways).square().mean()  # type: ignore[no-any-return]

    def step(self, number: int, max_norm: float = 10.0) -> None:
        if self.clips:
            zo.clip_grad_norm_(self.model, max_norm)
        self.optimizer.step()
        self.num_steps += 1
        self.optimizer.zero_grad()


Way = Callable[[Run, int], None]


def alike(run: Run, number: int) -> None:
    run.loss(number).backward()
    run.step(number)


def evaluation_alone(run: Run, number: int) -> None:
    if run.odd:
        with torch.no_grad():
            run.loss(number)
    alike(run, number)


def further_unit(run: Run, number: int) -> None:
    run.loss(number, with_spare=run.odd).backward()
    run.step(number)


def missing_unit(run: Run, number: int) -> None:
    run.loss(number, order=(0, 1, 3) if run.odd else (0, 1, 2, 3)).backward()
    run.step(number)


def other_order(run: Run, number: int) -> None:
    run.loss(number, order=(0, 2, 1, 3) if run.odd else (0, 1, 2, 3)).backward()
    run.step(number)


def other_size(run: Run, number: int) -> None:
    """One rank alone has sums of an earlier backward, which are fp32."""
    with zo.no_sync(run.model) if run.odd else contextlib.nullcontext():
        run.loss(number).backward()
    alike(run, number)


def other_setting(run: Run, number: int) -> None:
    run.loss(number).backward()
    run.step(number, 0.1 if run.odd else 10.0)


def no_step(run: Run, number: int) -> None:
    run.loss(number).backward()
    if not run.odd:
        run.step(number)
    alike(run, number)


def other_order_and_a_look(run: Run, number: int) -> None:
    """The others wait for their devices, outside of all that zero_offload calls."""
    run.loss(number, order=(0, 2, 1, 3) if run.odd else (0, 1, 2, 3)).item()
    alike(run, number)


def ways_of_all(run: Run, number: int) -> None:
    """Steps of several kinds, which all ranks make."""
    for turn in range(12):
        if turn % 4 == 1:
            with torch.no_grad():
                run.loss(number + turn)
        if turn % 5 == 3:
            run.loss(number + turn, order=(1, 0, 3, 2)).backward()
        if turn % 6 == 4:
            with zo.no_sync(run.model):
                run.loss(number + turn).backward()
        alike(run, number + turn)


WAYS: list[Way] = [evaluation_alone, further_unit, missing_unit, other_order, other_size, other_setting, no_step]


@dataclass(frozen=True)
class Outcome:
    error: str
    seconds: float
    params: dict[str, Tensor]
    num_steps: int = 0
    """Steps that ended before the error."""


def part(
    rank: int,
    world_size: int,
    way: Way | None,
    settings: dict[str, Any],
    *,
    num_before: int = 3,
    on: int = 1,
    without_pages: bool = False,
    by_sockets: bool = False,
    goes_on: bool = False,
) -> Outcome:
    """Steps that all make, one in which rank `on` parts from the others (`way` None: without that one), and two more.
    These are of another model, or of the same if it `goes_on`."""
    by_sockets = by_sockets or without_pages
    with pytest.MonkeyPatch.context() as patch:
        if without_pages:
            patch.setattr(os, "memfd_create", _refuse)
        run = _start(rank, settings)
        error, began = "", time.monotonic()
        try:
            for number in range(num_before):
                alike(run, number)
            began = time.monotonic()
            if way is not None:
                run.odd = rank == on
                way(run, num_before)
        except zo.ZeroOffloadError as raised:
            error = f"{type(raised).__name__}: {raised}"
        run.optimizer.zero_grad()
        if not goes_on:
            # Between machines ranks may have closed their connections.
            with contextlib.suppress(*[zo.ZeroOffloadError] if error and by_sockets else []):
                zo.close(run.model)
        seconds = time.monotonic() - began
        if way is not None and by_sockets and not goes_on:
            return Outcome(error, seconds, {}, run.num_steps)
        run.odd = False
        again = run if goes_on else _start(rank, settings)
        try:
            for number in range(2):
                alike(again, number)
            return Outcome(error, seconds, read_params(again.model))
        finally:
            zo.close(again.model)


def _start(rank: int, settings: dict[str, Any]) -> Run:
    model = build(Steered)
    zo.offload(model, zo.OffloadConfig(**settings))
    return Run(
        rank, model, zo.AdamW(model.parameters(), lr=1e-2), random.Random(rank), settings.get("overlap") != "backward"
    )


def _refuse(*_: Any) -> int:
    raise OSError("Operation not permitted")


def count_rounds(rank: int, world_size: int, settings: dict[str, Any], without_pages: bool) -> list[int]:
    """How often a step waits for the words of others alone, for each step."""
    counts, ask = [0], agreement.Agreement._ask

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return ask(*args, **kwargs)

    def step(optimizer: Any, *args: Any) -> Any:
        found = stepped(optimizer, *args)
        counts.append(0)
        return found

    stepped = zo.AdamW.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement.Agreement, "_ask", counted)
        patch.setattr(zo.AdamW, "step", step)
        part(rank, world_size, None, settings, num_before=6, without_pages=without_pages)
    return counts[1:6]
