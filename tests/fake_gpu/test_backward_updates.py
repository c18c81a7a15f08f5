"""The update inside of backward: which units it takes when, how many gradients it holds, and commits beside it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.reference import Recipe, read_masters, train_plain
from tests.parity.test_backward_updates import offloaded, spy_on_launches, train
from zero_offload.model.api import runtime_of
from zero_offload.plan.memory import GRAD_RING_UNITS
from zero_offload.storage.shards.device_grads import DeviceGrads
from zero_offload.storage.shards.shard import Component

pytestmark = pytest.mark.usefixtures("late")

PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"device_memory": "8MiB"},
    "grads": {"grads": "device"},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "device_memory": "8MiB"},
    "device": {"params": "device", "grads": "device", "optimizer": "device"},
    "states": {"optimizer": "device"},
}
make = partial(TinyLM, num_blocks=4)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_units_are_updated_one_behind_backward(placement: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit later than on a CPU, so that the device has something to do while its sums are waited for."""
    launched: list[Any] = []
    spy_on_launches(monkeypatch, launched)
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, overlap="backward", **PLACEMENTS[placement])
    recipe = Recipe(make, num_steps=2, micro_batches=2)
    assert train(recipe, config) == train_plain(recipe)
    assert launched == [(4,), (3,), (2,), ("end", 0, 1)] * 2


def test_what_a_commit_reads_holds_no_update_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It views values where they rest, which is where they are used."""
    launched: list[Any] = []
    spy_on_launches(monkeypatch, launched)
    model, optimizer = offloaded(make, **PLACEMENTS["states"])
    shards = [section.shard for unit in runtime_of(model).units for section in unit.sections]
    views = [shard.array(Component.VALUE, 0) for shard in shards]
    model(tokens_of(0)).backward()
    assert len(views) == 5 and launched[0] == (4,)
    optimizer.step()


def test_sums_on_a_device_are_read_unit_by_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind backward's own launches: gradients of one unit more are there by then."""
    model, optimizer = offloaded(make, grads="device")
    held: list[int] = []
    lend = DeviceGrads.lend

    def spy(self: DeviceGrads, made: Any) -> None:
        held.append(sum(grads.store.device_bytes > 0 for grads in runtime_of(model).grads.ledger.sections))
        lend(self, made)

    monkeypatch.setattr(DeviceGrads, "lend", spy)
    model(tokens_of(0)).backward()
    optimizer.step()
    assert 2 <= max(held) <= GRAD_RING_UNITS


def test_states_on_a_device_are_committed_before_backward_changes_them(nvme: Path) -> None:
    settings = {"precision": "fp32", "nvme": nvme, **PLACEMENTS["device"]}
    model = zo.offload(build(TinyLM), zo.OffloadConfig(**settings, overlap="backward"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    plain = build(TinyLM)
    plain_optimizer = zo.AdamW(plain.parameters(), lr=1e-2)
    for step in range(3):
        for each, its in ((model, optimizer), (plain, plain_optimizer)):
            each(tokens_of(step)).backward()
            its.step()
            its.zero_grad()
        zo.commit(model, optimizer)
    model(tokens_of(3)).backward()
    zo.close(model)
    with device.on_host():
        again = zo.offload(build(TinyLM), zo.OffloadConfig(**settings, existing="resume"))
    resumed = zo.resume(again, zo.AdamW(again.parameters(), lr=1e-2))
    assert resumed is not None and resumed.step == 3
    found = read_masters(again)
    assert all(torch.equal(found[name], param) for name, param in plain.named_parameters())
    zo.close(again)
