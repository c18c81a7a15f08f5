"""Optimizer states in the memory of a device of its own, on lanes that copy as late as the waits permit.

Results must be the CPU path's bits, whatever else rests where; what is committed must be what was computed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.late_device import LateDevice
from tests.overlap.test_late_lanes import Model
from zero_offload.device import Device, HostDevice

offload_module = importlib.import_module("zero_offload.offload")

MIXED = {"device": 0.5, "cpu": 0.25, "nvme": 0.25}
PLACEMENTS: list[tuple[Any, Any, Any]] = [
    ("device", "cpu", "device"),
    ("cpu", "cpu", "device"),
    ("nvme", "nvme", "device"),
    ("device", "cpu", MIXED),
    (MIXED, "cpu", {"device": 0.5, "nvme": 0.5}),
]
Made = tuple[list[float], dict[str, Any]]
Factory = Callable[[Any], torch.optim.Optimizer]


def adamw(model: Any) -> torch.optim.Optimizer:
    """Groups of their own rates: several segments in a section."""
    params = list(model.named_parameters())
    plain = [param for name, param in params if "norm" in name]
    return zo.AdamW(
        [{"params": plain, "weight_decay": 0.0}, {"params": [p for n, p in params if "norm" not in n]}], 1e-2
    )


def batch(seed: int) -> torch.Tensor:
    return torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(seed))


def step(model: Any, optimizer: torch.optim.Optimizer, number: int, micro_batches: int = 1) -> list[float]:
    for micro in range(micro_batches):
        loss = model(batch(10 * number + micro))
        loss.backward()
    norm = zo.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item(), norm.item()]


def states_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every value and every state, by parameter."""
    values = {name: value.clone() for name, value in model.state_dict().items()}
    states = optimizer.state_dict()["state"]
    return values | {f"{index} {name}": value for index, of in states.items() for name, value in of.items()}


def differing(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert actual.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(actual[name], value)]


def train(config: zo.OffloadConfig, steps: Sequence[int], micro_batches: int = 1, make: Factory = adamw) -> Made:
    model = zo.offload(Model(), config)
    optimizer = make(model)
    zo.resume(model, optimizer)
    seen = [figure for number in steps for figure in step(model, optimizer, number, micro_batches)]
    found = states_of(model, optimizer)
    zo.close(model)
    return seen, found


@pytest.fixture
def compute_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], None]:
    return lambda device: monkeypatch.setattr(offload_module, "compute_device", lambda: device)


@pytest.mark.parametrize(
    ("precision", "micro_batches"),
    [
        ("fp32", 1),
        ("bf16", 2),
        (zo.Precision(compute="fp16"), 1),
        (zo.Precision(compute="bf16", states="bf16"), 1),
        (zo.Precision(compute="bf16", states="compact"), 1),
        (zo.Precision(compute="fp32", states="compact"), 2),
    ],
    ids=str,
)
def test_the_bits_of_the_host(
    tmp_path: Path, compute_on: Callable[[Device], None], precision: Any, micro_batches: int
) -> None:
    compute_on(HostDevice())
    expected = train(zo.OffloadConfig(precision=precision), range(4), micro_batches)
    for i, (params, grads, optimizer) in enumerate(PLACEMENTS):
        compute_on(LateDevice())
        config = zo.OffloadConfig(
            params=params,
            grads=grads,
            optimizer=optimizer,
            precision=precision,
            nvme=tmp_path / str(i),
            durability="scratch",
        )
        seen, found = train(config, range(4), micro_batches)
        assert seen == expected[0], (params, grads, optimizer)
        assert differing(found, expected[1]) == [], (params, grads, optimizer)
