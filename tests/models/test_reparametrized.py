"""torch's reparametrizations of a layer's weight: put on before `zo.offload` they train as in plain torch, and those
that need another parameter raise between steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import zero_offload as zo
from tests.helpers.models import NARROW
from tests.helpers.reference import placed

TIERS = ("cpu", "nvme")
KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
}
MOVES = ("old spectral_norm", "prune")
"""Those that give the parameter another name."""
ADDS = ("weight_norm", "old weight_norm")
"""Those that make other parameters of it."""


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(NARROW, NARROW) for _ in range(3)))


def put_on(name: str, model: nn.Sequential) -> None:
    torch.manual_seed(1)
    KINDS[name](model[1])


def steps(model: nn.Sequential, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(torch.ones(2, NARROW)).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", KINDS)
def test_put_on_before_offload_it_trains_as_in_plain_torch(name: str, tier: str, nvme: Path) -> None:
    found = []
    for offloads in (False, True):
        model = made()
        put_on(name, model)
        if offloads:
            zo.offload(model, placed("fp32", (tier,) * 3, nvme))
        found.append(steps(model, zo.SGD(model.parameters(), lr=0.1), 3))
    zo.close(model)
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", KINDS)
def test_put_on_between_steps_it_trains_as_in_plain_torch_or_raises(name: str, tier: str, nvme: Path) -> None:
    found = []
    for offloads in (False, True):
        model = made()
        if offloads:
            zo.offload(model, placed("fp32", (tier,) * 3, nvme))
        optimizer = zo.SGD(model.parameters(), lr=0.1)
        losses = steps(model, optimizer, 1)
        if offloads and name in ADDS:
            with pytest.raises(zo.ZeroOffloadError, match=r"1\.weight.*before zo\.offload"):
                put_on(name, model)
            if name == "weight_norm":  # the old form has taken the weight from the layer by then
                steps(model, optimizer, 1)
            zo.close(model)
            return
        put_on(name, model)
        if offloads and name in MOVES:
            zo.offload(model)  # it has another name now
        found.append(losses + steps(model, optimizer, 2))
    zo.close(model)
    assert found[0] == found[1]
