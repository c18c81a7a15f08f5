"""A program computes on streams of its own: each of them waits for a unit, and memory goes back after its last use.

What is launched in the right order for plain tensors is right for offloaded ones, whatever moves in between.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.late_device import LateDevice
from tests.overlap.test_late_lanes import Block
from zero_offload.api import runtime_of
from zero_offload.memory.resizable import ResizableBuffer
from zero_offload.runtime.saved.tensors import Saved, SavedTensors

offload_module: Any = importlib.import_module("zero_offload.offload")

Step = Callable[[LateDevice, nn.Module, torch.Tensor], torch.Tensor]
PLACEMENTS: list[dict[str, Any]] = [
    {"params": "cpu"},
    {"params": "device"},
    {"params": "nvme", "optimizer": "nvme"},
    {"params": "cpu", "grads": "device"},
]


class Checked(nn.Linear):
    """Says what it reads."""

    device: LateDevice | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.device is not None:
            self.device.computes_with(self.weight)
        return super().forward(x)


def build(device: LateDevice | None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(4)), nn.Linear(32, 32))
    for block in model[:-1]:
        for name in ("up", "down"):
            old = getattr(block, name)
            new = Checked(old.in_features, old.out_features)
            new.load_state_dict(old.state_dict())
            new.device = device
            setattr(block, name, new)
    return model


def watch(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads in backward, and memory that goes, are looked at too."""
    unpack, attach, detach = SavedTensors._unpack, ResizableBuffer.attach, ResizableBuffer.detach
    homes: dict[ResizableBuffer, int] = {}

    def read(self: SavedTensors, use: Any, saved: Any) -> torch.Tensor:
        tensor = unpack(self, use, saved)
        if isinstance(saved, Saved) and saved.unit is not None:
            device.computes_with(tensor)
        return tensor

    def take(self: ResizableBuffer) -> bool:
        homes[self] = device.stream()
        return attach(self)

    def give(self: ResizableBuffer) -> None:
        device.goes_back(self._storage, homes[self])
        detach(self)

    monkeypatch.setattr(SavedTensors, "_unpack", read)
    monkeypatch.setattr(ResizableBuffer, "attach", take)
    monkeypatch.setattr(ResizableBuffer, "detach", give)


def evaluate_beside(device: LateDevice, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss = model(rows).square().mean()
    device.join([0], into=1)
    with device.on(1), torch.no_grad():
        model(rows)
    loss.backward()
    device.join([1])
    return loss


def evaluate_on_two(device: LateDevice, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    device.join([0], into=1)
    device.join([0], into=2)
    for stream in (2, 1, 2):
        with device.on(stream), torch.no_grad():
            model(rows)
    loss = model(rows).square().mean()
    loss.backward()
    device.join([1, 2])
    return loss


def forward_aside(device: LateDevice, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    device.join([0], into=1)
    with device.on(1):
        loss = model(rows).square().mean()
    device.join([1])
    loss.backward()
    return loss


def backward_aside(device: LateDevice, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss = model(rows).square().mean()
    device.join([0], into=2)
    with device.on(2):
        loss.backward()
    device.join([2])
    return loss


def read_aside(device: LateDevice, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss = model(rows).square().mean()
    device.join([0], into=1)
    with device.on(1), zo.gathered(model) as params:
        for param in params.values():
            device.computes_with(param)
    loss.backward()
    device.join([1])
    return loss


def as_ever(device: LateDevice, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss = model(rows).square().mean()
    loss.backward()
    return loss


def train(step: Step, device: LateDevice, **settings: Any) -> list[float]:
    model = zo.offload(build(device), zo.OffloadConfig(precision="fp32", durability="scratch", **settings))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(4):
        found.append(step(device, model, torch.randn(4, 32, generator=generator)).item())
        found.append(zo.clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    zo.close(model)
    return found


@pytest.mark.parametrize("settings", PLACEMENTS, ids=str)
@pytest.mark.parametrize("step", [evaluate_beside, evaluate_on_two, forward_aside, backward_aside, read_aside])
def test_streams_of_the_programs_own(
    step: Step, settings: dict[str, Any], nvme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = LateDevice()
    monkeypatch.setattr(offload_module, "compute_device", lambda: device)
    expected = train(as_ever, device, nvme=nvme, **settings)
    watch(device, monkeypatch)
    assert train(step, device, nvme=nvme, **settings) == expected


def test_a_module_may_change_streams_in_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """In training each operation that saves a parameter waits for it on its own stream."""
    device = LateDevice()
    monkeypatch.setattr(offload_module, "compute_device", lambda: device)

    class Branched(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with device.on(1):
                hidden = self.up(self.norm(x))
                device.computes_with(self.up.weight)
            device.join([1])
            return x + self.down(torch.relu(hidden))

    model = zo.offload(nn.Sequential(*(Branched(32) for _ in range(3))), zo.OffloadConfig(precision="fp32"))
    for _ in range(2):
        model(torch.ones(2, 32)).sum().backward()
    runtime: Any = runtime_of(model)
    assert not any(unit.resident for unit in runtime.parts.units)
    zo.close(model)
