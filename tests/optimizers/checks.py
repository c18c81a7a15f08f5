"""Checks of one class: its verdict, its bytes, the bits of an offloaded model, and the time of an update."""

from __future__ import annotations

import contextlib
import io
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_offload as zo
from tests.optimizers.classes import Entry
from zero_offload.optim.unitwise import grades
from zero_offload.optim.unitwise.state_sizes import state_sizes

SIZE = 4096
"""Of the matrix whose bytes are counted."""
STEPS, STEPS_MOST = 5, 15
"""More than the first where nothing has moved until then."""
TIMED_WIDTHS = {"elementwise": 1536, "separable": 768}
"""Of the matrices whose update is timed. Products of larger ones take long."""
TIMED_LAYERS, TIMED_STEPS = 4, 3
LIMIT_S = 150
"""Processor time of one check."""
SECONDS = grades.SECONDS
"""Processor time of the test of a class, as `zo.unitwise` gives it."""
TIERS: dict[str, dict[str, Any]] = {
    "cpu": {"params": "cpu", "optimizer": "cpu"},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
}
Row = dict[str, Any]


class Matrices(nn.Module):
    """Layers of matrices alone, which some classes ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


class Vectors(Matrices):
    """Matrices and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24)) for _ in range(3))


class Convolutions(Vectors):
    """Matrices, vectors, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.head = nn.Linear(4, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x[:, None, None, :].expand(-1, 2, 4, -1)
        return super().forward(x) + self.head(self.conv(image).mean((2, 3)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "matrices, vectors, convolutions": Convolutions,
    "matrices and vectors": Vectors,
    "matrices": Matrices,
}
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "matrices, vectors, convolutions": ((24, 24), (24,), (4, 2, 3, 3)),
    "matrices and vectors": ((24, 24), (24,)),
    "matrices": ((24, 24),),
}


class LateError(Exception):
    pass


def _late(*_: Any) -> None:
    raise LateError(f"it took more than {LIMIT_S} s of processor time")


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raises LateError inside when the time is over; warnings and prints of others are left out."""
    signal.signal(signal.SIGPROF, _late)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def attempt(call: Callable[[], Any]) -> Any:
    """Its result, or the first line of its error."""
    try:
        with limited():
            return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def look(entry: Entry, folder: Path) -> Row:
    """All columns of a class."""
    row: Row = {"name": entry.name, "module": entry.module, "version": entry.version}
    for model in MODELS:
        found = attempt(lambda model=model: verdict(entry, model))
        row |= {"model": model} | (found if isinstance(found, dict) else {"grade": "error", "reason": found})
        if row["grade"] not in ("unproven", "error"):
            break
    if row["grade"] == "error" or "fails on tiny" in row["reason"]:
        return row
    row["bytes"] = attempt(lambda: nbytes(entry))
    walks = row["grade"] in ("elementwise", "separable")
    if walks or row["grade"] == "coupled":
        row["units"] = "each" if walks else "all"
        for tier in TIERS:
            row[tier] = attempt(lambda tier=tier: same_bits(entry, row["model"], tier, row["units"], folder / tier))
    if walks:
        row["cost"] = attempt(lambda: cost(entry, TIMED_WIDTHS[row["grade"]]))
    return row


def verdict(entry: Entry, model: str) -> Row:
    params = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES[model]]
    optimizer = in_training(entry.make(params))
    found = grades.grade(optimizer, seconds=SECONDS)
    reason = "" if found.grade is grades.Grade.ELEMENTWISE else found.reason
    return {
        "grade": found.grade.value,
        "reason": reason,
        "steps": found.steps,
        "beyond": found.beyond,
        "in_order": found.in_order,
    }


def in_training(optimizer: Any) -> Any:
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    return optimizer


def nbytes(entry: Entry) -> float | str:
    """Of states, per element of a large matrix."""
    param = nn.Parameter(torch.zeros(()).expand(SIZE, SIZE))
    found = state_sizes(in_training(entry.make([param])))
    return found.unknown or round(found.nbytes[param] / SIZE**2, 3)


def same_bits(entry: Entry, name: str, tier: str, units: str, folder: Path) -> str:
    """ "yes", or the first parameter and step that differ from the plain optimizer's."""
    plain, again, ours = _built(name), _built(name), _built(name)
    theirs, twice = (in_training(entry.make([*model.parameters()])) for model in (plain, again))
    config = zo.OffloadConfig(**TIERS[tier], precision="fp32", nvme=folder, existing="discard", durability="scratch")
    zo.offload(ours, config)
    try:
        optimizer = in_training(zo.unitwise(entry.make([*ours.parameters()]), units=units))
        start, step, has_moved = dict(_built(name).named_parameters()), 0, False
        while step < STEPS or (step < STEPS_MOST and not has_moved):
            begun = torch.get_rng_state()
            for model, each in ((plain, theirs), (again, twice), (ours, optimizer)):
                torch.set_rng_state(begun)
                x = torch.randn(6, 24, generator=torch.Generator().manual_seed(step))
                (model(x).square().mean() * 10.0 ** (step % 3)).backward()
                each.step()
                each.zero_grad()
            held = {key: value.detach().clone() for key, value in ours.named_parameters()}
            for (key, param), other in zip(plain.named_parameters(), again.parameters(), strict=True):
                if not torch.equal(param, other):
                    return f"the plain optimizer differs from itself: {key} in step {step + 1}"
                if not torch.equal(param.detach(), held[key]):
                    return f"{key} in step {step + 1}"
                has_moved = has_moved or not torch.equal(param, start[key])
            step += 1
        return "yes" if has_moved else "nothing has moved"
    finally:
        zo.close(ours)


def _built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def cost(entry: Entry, width: int) -> float:
    """Processor time of an update of large matrices in memory, over that of the plain optimizer: the shortest of some,
    in turns. Other work on the machine makes them longer."""
    steps: list[Callable[[], float]] = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(TIMED_LAYERS)))
        if not is_plain:
            zo.offload(model, zo.OffloadConfig(precision="fp32", overlap="none"))
        made = entry.make([*model.parameters()])
        optimizer = in_training(made if is_plain else zo.unitwise(made))

        def step(model: nn.Module = model, optimizer: Any = optimizer) -> float:
            model(torch.ones(1, width)).square().mean().backward()
            began = time.process_time()
            optimizer.step()
            ended = time.process_time()
            optimizer.zero_grad()
            return ended - began

        steps.append(step)
    times = [[step() for step in steps] for _ in range(2 + TIMED_STEPS)][2:]
    theirs, ours = map(min, zip(*times, strict=True))
    return round(ours / theirs, 2)
