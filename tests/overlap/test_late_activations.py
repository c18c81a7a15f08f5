"""Activations of a device with memory of its own, on lanes that copy as late as the waits permit."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.activations import make_small
from tests.helpers.late_device import LateDevice
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from zero_offload.device import Handoff, HostDevice

offload_module = importlib.import_module("zero_offload.offload")

PLACEMENTS: list[Any] = ["cpu", "nvme", {"device": 0.3, "cpu": 0.3, "nvme": 0.4}]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    make_small(monkeypatch)

    def use(device: object) -> None:
        monkeypatch.setattr(offload_module, "compute_device", lambda: device)

    return use


def train(config: zo.OffloadConfig, is_marked: bool) -> list[float]:
    model = zo.offload(build(lambda: TinyLM(WIDE, 4)), config)
    if is_marked:
        zo.checkpoint(model.blocks)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    results, sizes = [], []
    for step in range(3):
        losses = [model(tokens_of(2 * step + i)) for i in range(2)]
        losses[0].backward(retain_graph=True)
        (losses[0] + losses[1]).backward()
        results += [loss.item() for loss in losses] + [zo.clip_grad_norm_(model, 0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
        del losses
        sizes.append(zo.stats(model).resident_bytes)
    assert sizes[1:] == sizes[1:2] * 2
    zo.close(model)
    return results


@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_late_lanes_give_the_bits_of_the_host(
    tmp_path: Path, on_device: Callable[[object], None], precision: str, is_marked: bool
) -> None:
    on_device(HostDevice())
    expected = train(zo.OffloadConfig(precision=precision), is_marked)
    for number, activations in enumerate(PLACEMENTS):
        device = LateDevice()
        on_device(device)
        config = zo.OffloadConfig(
            activations=activations, precision=precision, nvme=tmp_path / str(number), durability="scratch"
        )
        assert train(config, is_marked) == expected, activations


# The host never reads what rests in its memory.
@pytest.mark.parametrize(("activations", "forgotten"), [("cpu", "take"), ("nvme", "take"), ("nvme", "take_on_host")])
def test_a_missing_wait_is_seen(
    tmp_path: Path,
    on_device: Callable[[object], None],
    monkeypatch: pytest.MonkeyPatch,
    activations: str,
    forgotten: str,
) -> None:
    """In the way of activations alone: the rest keeps its waits."""
    on_device(HostDevice())
    expected = train(zo.OffloadConfig(), False)
    tiers = importlib.import_module("zero_offload.runtime.saved.tiers")
    store = importlib.import_module("zero_offload.runtime.saved.activations")

    class Careless(LateDevice):
        """Hands out copies that nobody can wait for."""

        def upload(self, target: torch.Tensor, source: torch.Tensor) -> Handoff:
            return _careless(super().upload(target, source), "take")

        def download(self, target: torch.Tensor, source: torch.Tensor, **named: Any) -> Handoff:
            return _careless(super().download(target, source, **named), "take_on_host")

    class NoWait:
        def __init__(self, event: Any) -> None:
            self.wait = event.wait if forgotten != "take" else lambda: None
            self.synchronize = event.synchronize if forgotten != "take_on_host" else lambda: None
            self.done = lambda: True

    def _careless(handoff: Handoff, kind: str) -> Handoff:
        return Handoff(handoff.tensor, NoWait(handoff.ready)) if forgotten == kind else handoff

    on_device(LateDevice())
    for name, kind in (("HostTier", tiers.HostTier), ("DiskTier", tiers.DiskTier)):

        def careless(device: Any, *args: Any, kind: Any = kind) -> Any:
            return kind(Careless(), *args)

        monkeypatch.setattr(store, name, careless)
    monkeypatch.setattr(LateDevice, "_check_pinned", lambda self, host: None)
    config = zo.OffloadConfig(activations=activations, nvme=tmp_path / "nvme", durability="scratch")
    with pytest.warns(UserWarning):
        assert train(config, False) != expected
