"""Parameters that hooks of loggers read beside the forwards of their modules: right values, costs, and a note."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import build
from zero_offload.model.api import runtime_of

RUNTIME = importlib.import_module("zero_offload.model.runtime")
WIDE, NUM_LAYERS, NUM_STEPS = 640, 6, 3
Read = Callable[[nn.Parameter], Tensor]
READS: dict[str, Read] = {
    "histogram": lambda param: param.data.view(-1).histc(8, -0.1, 0.1),
    "norm": lambda param: param.detach().norm(),
    "array": lambda param: torch.tensor(param.detach().cpu().numpy().mean()),
}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(NUM_LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def watch(model: Layers, place: str, read: Callable[[], None]) -> None:
    """Register a hook that reads."""

    def hook(*_: Any) -> None:
        read()

    if place == "forward":
        model.layers[2].register_forward_hook(hook)
    elif place == "before forward":
        model.layers[3].register_forward_pre_hook(hook)
    elif place == "backward":
        model.layers[2].register_full_backward_hook(hook)
    else:
        model.layers[2].weight.register_post_accumulate_grad_hook(hook)


def train(model: Layers, place: str, read: Read) -> list[Tensor]:
    """Values that the hook has read, and losses."""
    found: list[Tensor] = []
    watch(model, place, lambda: found.extend(read(param) for param in model.parameters()))
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    for step in range(NUM_STEPS):
        loss = model(torch.full((1, WIDE), 0.1 * (step + 1))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def offloaded(nvme: Path) -> Layers:
    settings: Any = {"params": "nvme", "optimizer": "nvme", "device_memory": "6MiB", "durability": "scratch"}
    return zo.offload(build(Layers), zo.OffloadConfig(precision="fp32", nvme=nvme, **settings))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("place", "kind"),
    [("forward", "histogram"), ("before forward", "norm"), ("backward", "array"), ("gradient", "histogram")],
)
def test_hooks_read_what_a_plain_model_has(place: str, kind: str, nvme: Path) -> None:
    """With memory for half of the units; the reads are in the figures of each step."""
    model = offloaded(nvme)
    found, expected = train(model, place, READS[kind]), train(build(Layers), place, READS[kind])
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)
    reads = zo.stats(model).param_reads
    unit_bytes = runtime_of(model).units[0].layout.nbytes
    assert reads.num_reads >= 2 and reads.nbytes == reads.num_reads * unit_bytes and reads.seconds > 0
    zo.close(model)


def test_a_hook_of_the_whole_model_reads_at_rest(nvme: Path) -> None:
    """Behind its forward, as `wandb.watch` and `generate` do: each parameter alone."""
    runs: list[list[Tensor]] = []
    for model in (build(Layers), offloaded(nvme)):
        runs.append([])
        model.register_forward_hook(lambda m, *_: runs[-1].extend(map(READS["histogram"], m.parameters())))
        with torch.no_grad():
            model(torch.ones(1, WIDE))
    assert all(map(torch.equal, *runs)) and len(runs[1]) == 2 * NUM_LAYERS
    numel = sum(param.numel() for param in model.parameters())
    assert zo.stats(model).param_reads[:2] == (2 * NUM_LAYERS, 4 * numel)
    zo.close(model)


@pytest.mark.parametrize(("share", "num_told"), [(0.0, 1), (1e9, 0)])
def test_the_cost_is_told_once(share: float, num_told: int, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on, if it is more than this share of a step."""
    monkeypatch.setattr(RUNTIME, "TOLD_READS", share)
    model = offloaded(nvme)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, "forward", READS["norm"])
    told = [str(each.message) for each in caught if "reads of parameters outside" in str(each.message)]
    assert len(told) == num_told and all(each.startswith("step 2 took ") for each in told)
    zo.close(model)


def test_what_is_in_memory_costs_nothing() -> None:
    model: Any = zo.offload(build(Layers), zo.OffloadConfig(precision="fp32"))
    train(model, "forward", READS["norm"])
    assert zo.stats(model).param_reads == (0, 0, 0.0)
    zo.close(model)
