"""An optimizer that is built where another has trained begins anew, as in torch; an optimizer behind a load goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import TinyLM, build
from tests.helpers.ranks import UNEVEN, RankPool
from tests.helpers.scripts import Average, Script, check, run_both, run_offloaded, run_plain

Rows = Callable[[int], Tensor]
make = partial(TinyLM, UNEVEN)
TIERS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
}
NEXT: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda params: zo.AdamW(params, 1e-2),
    "AdamW amsgrad": lambda params: zo.AdamW(params, 1e-2, amsgrad=True),
    "Adagrad": lambda params: zo.Adagrad(params, 1e-2, lr_decay=0.1, initial_accumulator_value=0.5),
    "SGD": lambda params: zo.SGD(params, 0.1, momentum=0.9, dampening=0.9),
}


def train(model: nn.Module, optimizers: list[Any], rows: Rows, average: Average, steps: range) -> Iterator[float]:
    for step in steps:
        loss = model(rows(step))
        loss.backward()
        average(model)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        yield loss.item()


def one_after_the_other(name: str, model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    yield from train(model, [zo.AdamW(model.parameters(), 1e-2)], rows, average, range(3))
    yield from train(model, [NEXT[name](model.parameters())], rows, average, range(3, 6))


def of_some_parameters(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """The other one of a section's two optimizers goes on."""
    params = list(model.parameters())
    even, odd = (zo.AdamW(params[begin::2], 1e-2) for begin in (0, 1))
    yield from train(model, [even, odd], rows, average, range(3))
    yield from train(model, [zo.AdamW(params[::2], 1e-2), odd], rows, average, range(3, 6))


def momentum_comes_later(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """It begins without dampening in whichever step; once it was there, it is kept while it is off."""
    optimizer = zo.SGD(model.parameters(), 0.1, dampening=0.9)
    for first, momentum in enumerate((0.0, 0.9, 0.0, 0.9)):
        optimizer.param_groups[0]["momentum"] = momentum
        yield from train(model, [optimizer], rows, average, range(2 * first, 2 * first + 2))


SCRIPTS: dict[str, Script] = {name: partial(one_after_the_other, name) for name in NEXT}
SCRIPTS |= {"some": of_some_parameters, "momentum": momentum_comes_later}


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_as_on_plain_parameters(name: str, tiers: str, nvme: Path) -> None:
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, **TIERS[tiers])
    check(run_offloaded(SCRIPTS[name], make, config), run_plain(SCRIPTS[name], make))


@pytest.mark.parametrize("name", ["AdamW amsgrad", "some"])
def test_on_two_ranks(name: str, pool: RankPool, nvme: Path) -> None:
    for found, expected in pool.succeed(run_both, SCRIPTS[name], make, {"stage": 3, "nvme": nvme, **TIERS["nvme"]}):
        check(found, expected)


def test_after_a_resume_it_goes_on(tmp_path: Path) -> None:
    """An optimizer that is built when it has gone on does not."""

    def rows(step: int) -> Tensor:
        return torch.randint(0, 10, (2, 5), generator=torch.Generator().manual_seed(step))

    def start(existing: Any) -> tuple[nn.Module, zo.AdamW]:
        config = zo.OffloadConfig(nvme=tmp_path, params="nvme", optimizer="nvme", existing=existing, commit_every=1)
        model = zo.offload(build(make), config)
        return model, zo.AdamW(model.parameters(), 1e-2)

    model, optimizer = start("refuse")
    list(train(model, [optimizer], rows, lambda _: None, range(2)))
    zo.commit(model, optimizer)
    zo.close(model)
    model, optimizer = start("resume")
    assert zo.resume(model, optimizer) is not None
    assert {entry["step"].item() for entry in optimizer.state_dict()["state"].values()} == {2}
    list(train(model, [optimizer], rows, lambda _: None, range(2, 3)))
    assert zo.AdamW(model.parameters()).state_dict()["state"] == {}
    with pytest.warns(UserWarning, match="a new optimizer"):
        zo.close(model)
