"""The update inside of backward: copies that come as late as they may, and random delays, change no bit."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.late_device import LateDevice
from tests.helpers.models import NARROW, WIDE, TinyLM, build, tokens_of
from tests.helpers.reference import Recipe, read_masters, train_plain
from tests.parity.test_backward_updates import offloaded, spy_on_launches, train
from zero_offload.api import runtime_of
from zero_offload.device import HostDevice
from zero_offload.plan.memory import GRAD_RING_UNITS
from zero_offload.shards.device_grad_shard import DeviceGradShard
from zero_offload.shards.shard import Component

offload_module = importlib.import_module("zero_offload.offload")

PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "grads": {"grads": "device"},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "device_memory": "13MiB"},
    "device": {"params": "device", "grads": "device", "optimizer": "device"},
    "states": {"optimizer": "device"},
    "mixed": {
        "params": "cpu",
        "grads": {"device": 0.5, "cpu": 0.25, "nvme": 0.25},
        "optimizer": {"device": 0.5, "cpu": 0.25, "nvme": 0.25},
    },
}
WIDE_LM = partial(TinyLM, WIDE, 4)

Use = Callable[[object], None]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Use:
    return lambda device: monkeypatch.setattr(offload_module, "compute_device", lambda: device)


@pytest.mark.parametrize(("placement", "micro_batches"), list(zip(PLACEMENTS, itertools.cycle((1, 2)))))
def test_late_copies_give_the_bits_of_plain_tensors(
    placement: str, micro_batches: int, on_device: Use, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Any] = []
    spy_on_launches(monkeypatch, launched)
    on_device(LateDevice())
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, overlap="backward", **PLACEMENTS[placement])
    recipe = Recipe(partial(TinyLM, NARROW, 4), num_steps=3, micro_batches=micro_batches)
    assert train(recipe, config) == train_plain(recipe)
    # A unit later than on a CPU, so that the device has something to do while its sums are waited for.
    assert launched == [(4,), (3,), (2,), ("end", 0, 1)] * 3


@pytest.mark.parametrize("placement", ["cpu", "states"])
def test_what_a_commit_reads_holds_no_update_up(
    placement: str, on_device: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It views values where they rest, which is where they are used."""
    if placement == "states":
        on_device(LateDevice())
    launched: list[Any] = []
    spy_on_launches(monkeypatch, launched)
    model, optimizer = offloaded(partial(TinyLM, NARROW, 4), **PLACEMENTS[placement])
    shards = [section.shard for unit in runtime_of(model).parts.units for section in unit.sections]
    views = [shard.array(Component.VALUE, 0) for shard in shards]
    model(tokens_of(0)).backward()
    assert len(views) == 5 and launched[0] == (4,)
    optimizer.step()


def test_sums_on_a_device_are_read_unit_by_unit(on_device: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind backward's own launches: gradients of one unit more are there by then."""
    on_device(LateDevice())
    model, optimizer = offloaded(WIDE_LM, grads="device")
    held: list[int] = []
    lend = DeviceGradShard.lend

    def spy(self: DeviceGradShard, made: Any) -> None:
        held.append(sum(grads.shard.device_bytes > 0 for grads in runtime_of(model).grads.ledger.sections))
        lend(self, made)

    monkeypatch.setattr(DeviceGradShard, "lend", spy)
    model(tokens_of(0)).backward()
    optimizer.step()
    assert 2 <= max(held) <= GRAD_RING_UNITS


def test_states_on_a_device_are_committed_before_backward_changes_them(on_device: Use, nvme: Path) -> None:
    on_device(LateDevice())
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, overlap="backward", **PLACEMENTS["device"])
    model = zo.offload(build(TinyLM), config)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        zo.commit(model, optimizer)
    model(tokens_of(3)).backward()
    zo.close(model)
    on_device(HostDevice())
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, existing="resume", **PLACEMENTS["device"])
    again = zo.offload(build(TinyLM), config)
    its_optimizer = zo.AdamW(again.parameters(), lr=1e-2)
    resumed = zo.resume(again, its_optimizer)
    assert resumed is not None and resumed.step == 3
    other = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", overlap="none"))
    other_optimizer = zo.AdamW(other.parameters(), lr=1e-2)
    for step in range(3):
        other(tokens_of(step)).backward()
        other_optimizer.step()
        other_optimizer.zero_grad()
    found, expected = read_masters(again), read_masters(other)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    zo.close(again)
