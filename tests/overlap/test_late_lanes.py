"""The path through a device with memory of its own, on lanes that copy as late as the waits permit.

Results must be the CPU path's bits: a missing wait, or a source reused too early, shows as a different number.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.late_device import LateDevice
from zero_offload.device import Handoff, HostDevice
from zero_offload.kernels.fingerprint import device_fingerprints
from zero_offload.runtime.units import unit as unit_module

offload_module = importlib.import_module("zero_offload.offload")

NUM_STEPS = 6
PLACEMENTS = [
    ("cpu", "cpu", "cpu"),
    ("device", "nvme", "nvme"),
    ("nvme", "cpu", "nvme"),
    ({"device": 0.3, "cpu": 0.3, "nvme": 0.4}, "nvme", "cpu"),
    ("cpu", "device", "cpu"),
    ("nvme", "device", "nvme"),
    ("device", {"device": 0.4, "cpu": 0.3, "nvme": 0.3}, {"cpu": 0.5, "nvme": 0.5}),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tied embedding and head, repeated blocks, a frozen one among them, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(5))
        self.blocks[2].up.requires_grad_(False)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden).float() * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten().roll(-1))


def train(config: zo.OffloadConfig, num_micro_batches: int) -> list[tuple[float, float]]:
    model = zo.offload(Model(), config)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    results = []
    for step in range(NUM_STEPS):
        for micro in range(num_micro_batches):
            generator = torch.Generator().manual_seed(10 * step + micro)
            loss = model(torch.randint(0, 50, (4, 16), generator=generator))
            loss.backward()
        norm = zo.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    with torch.no_grad():
        results.append((model(torch.arange(40).view(2, 20)).item(), 0.0))
    zo.close(model)
    return results


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    def use(device: object) -> None:
        monkeypatch.setattr(offload_module, "compute_device", lambda: device)

    return use


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_late_lanes_give_the_bits_of_the_host(
    tmp_path: Path, on_device: Callable[[object], None], precision: str, num_micro_batches: int
) -> None:
    on_device(HostDevice())
    expected = train(zo.OffloadConfig(precision=precision), num_micro_batches)
    for i, (params, grads, optimizer) in enumerate(PLACEMENTS):
        device = LateDevice()
        on_device(device)
        config = zo.OffloadConfig(
            params=params,
            grads=grads,
            optimizer=optimizer,
            precision=precision,
            nvme=tmp_path / str(i),
            durability="scratch",
        )
        assert train(config, num_micro_batches) == expected, (params, grads, optimizer)
        assert device.uploads.launched > 0 and device.downloads.launched > 0


def test_a_missing_wait_is_seen(monkeypatch: pytest.MonkeyPatch, on_device: Callable[[object], None]) -> None:
    on_device(HostDevice())
    expected = train(zo.OffloadConfig(), 1)
    monkeypatch.setattr(Handoff, "take", lambda self: self.tensor)
    on_device(LateDevice())
    with pytest.warns(UserWarning, match="NaN or infinite"):
        assert train(zo.OffloadConfig(), 1) != expected


def test_memory_is_pinned_exactly_and_unpinned(on_device: Callable[[object], None]) -> None:
    device = LateDevice()
    on_device(device)
    model = zo.offload(Model(), zo.OffloadConfig())
    assert device.pinned
    model(torch.zeros(1, 8, dtype=torch.long)).backward()
    allocated = zo.stats(model).resident_bytes["cpu"]
    assert sum(device.pinned.values()) == allocated
    zo.close(model)


class Negating(Block):
    """From a certain call on, it changes a weight past torch's versions."""

    def __init__(self, width: int, first: int) -> None:
        super().__init__(width)
        self.calls, self.first = 0, first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls >= self.first:
            self.up.weight.data.neg_()
        return super().forward(x)


def test_a_device_sees_parameters_changed_through_data(
    monkeypatch: pytest.MonkeyPatch, on_device: Callable[[object], None]
) -> None:
    """By the words it computes itself; in uses where nothing is changed they raise nothing."""
    monkeypatch.setattr(unit_module, "fingerprints", device_fingerprints)
    on_device(HostDevice())
    expected = train(zo.OffloadConfig(), 1)
    on_device(LateDevice())
    assert train(zo.OffloadConfig(), 1) == expected
    model = Model()
    model.blocks[1] = Negating(32, 4)
    model = zo.offload(model, zo.OffloadConfig())  # its unit has the embedding too, and is used three times a forward
    for _ in range(3):
        model(torch.zeros(1, 8, dtype=torch.long))
    with pytest.raises(zo.ZeroOffloadError, match=r"forward has changed blocks\.1\.up\.weight in place"):
        model(torch.zeros(1, 8, dtype=torch.long))
    zo.close(model)


def test_fingerprints_are_downloaded_once_per_use(
    monkeypatch: pytest.MonkeyPatch, on_device: Callable[[object], None]
) -> None:
    """A download waits for the compute before it, so there is none at the beginning of a use and one at its end."""
    on_device(LateDevice())
    model = zo.offload(Model(), zo.OffloadConfig())
    log, tolist = [], torch.Tensor.tolist

    def take(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        log.append("take")
        return device_fingerprints(tensors)

    def download(self: torch.Tensor) -> object:
        log.append("download")
        return tolist(self)

    def refuse(self: torch.Tensor) -> object:
        raise AssertionError("a download of one number")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", download)
        patch.setattr(torch.Tensor, "item", refuse)
        patch.setattr(torch.Tensor, "__int__", refuse)
        patch.setattr(unit_module, "fingerprints", take)
        model(torch.zeros(1, 8, dtype=torch.long))
    uses = len(log) // 3
    assert uses > 5 and log == ["take", "take", "download"] * uses
    zo.close(model)
