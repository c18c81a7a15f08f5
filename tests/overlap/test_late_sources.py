"""Values in host memory that change while a device may still be copying them.

An upload that compute waits for is over when compute gets that far, which the host does not know. Whatever writes
values where they rest waits for it first, and the training loop, whose gradients tell the host, for nothing.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.late_device import LateDevice, LateEvent
from tests.helpers.ranks import RankPool
from tests.overlap.test_late_lanes import Model
from zero_offload.device import Device, HostDevice
from zero_offload.shards.shard import Shard

offload_module: Any = importlib.import_module("zero_offload.offload")

PLACEMENTS: dict[str, dict[str, Any]] = {
    "in memory": {},
    "values in memory": {"optimizer": "nvme"},
    "values on the device": {"params": "device"},
    "no overlap": {"overlap": "none"},
    "in backward": {"overlap": "backward"},
    "gradients on the device": {"grads": "device"},
}


def batch(seed: int) -> torch.Tensor:
    return torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(seed))


def forward(model: Any, optimizer: Any, folder: Path) -> None:
    """Nothing is written."""


def load_values(model: Any, optimizer: Any, folder: Path) -> None:
    values = {name: value * 0.5 for name, value in model.state_dict().items()}
    look(model)
    model.load_state_dict(values)


def load_states(model: Any, optimizer: Any, folder: Path) -> None:
    states = optimizer.state_dict()
    look(model)
    optimizer.load_state_dict(states)


def load_checkpoint(model: Any, optimizer: Any, folder: Path) -> None:
    zo.save_checkpoint(model, optimizer, folder / "checkpoint")
    look(model)
    zo.load_checkpoint(model, optimizer, folder / "checkpoint")


def write_gathered(model: Any, optimizer: Any, folder: Path) -> None:
    with zo.gathered(model.blocks[1], mode="write"), torch.no_grad():
        model.blocks[1].down.weight.mul_(2.0)


def look(model: Any) -> None:
    with torch.no_grad():
        model(batch(99))


WRITES = [forward, load_values, load_states, load_checkpoint, write_gathered]


def run(config: zo.OffloadConfig, write: Callable[[Any, Any, Path], None], folder: Path) -> Iterator[float]:
    """Each step's update, and `write`, come right after a forward that nobody has waited for."""
    model = zo.offload(Model(), config)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    in_backward = config.overlap == "backward"  # then no forward may come before the step
    for number in range(4):
        loss = model(batch(number))
        if in_backward:
            look(model)
        loss.backward()
        if not in_backward:
            look(model)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
        if number == 2:
            look(model)
            write(model, optimizer, folder)
    yield from (value.double().sum().item() for value in model.state_dict().values())
    zo.close(model)


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[Device], None]:
    return lambda device: monkeypatch.setattr(offload_module, "compute_device", lambda: device)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("write", WRITES)
def test_values_stay_while_an_upload_may_read_them(
    tmp_path: Path, on_device: Callable[[Device], None], placement: str, write: Callable[[Any, Any, Path], None]
) -> None:
    config = zo.OffloadConfig(**PLACEMENTS[placement], nvme=tmp_path / "nvme", durability="scratch")
    device, found = LateDevice(), []
    for each in (HostDevice(), device):
        on_device(each)
        (tmp_path / each.name).mkdir()
        found.append(list(run(config, write, tmp_path / each.name)))
    assert found[0] == found[1]
    device.check_sources()


@pytest.mark.parametrize("write", WRITES)
def test_a_missing_wait_of_the_host_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: Callable[[Device], None], write: Any
) -> None:
    monkeypatch.setattr(Shard, "wait_for_copies", lambda self: None)
    device = LateDevice()
    on_device(device)
    with pytest.raises(AssertionError, match="while an upload could still read it"):  # noqa: PT012
        list(run(zo.OffloadConfig(), write, tmp_path))
        device.check_sources()


def test_the_loop_waits_for_no_upload(on_device: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the sums of gradients have come down, the uploads before them are known to be over."""
    device = LateDevice()
    on_device(device)
    model = zo.offload(Model(), zo.OffloadConfig())
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    synchronize, waited = LateEvent.synchronize, []

    def wait(self: LateEvent) -> None:
        waited.append(self.clock.uploads > device.known.uploads)
        synchronize(self)

    for number in range(4):
        model(batch(number)).backward()
        with monkeypatch.context() as patch:
            patch.setattr(LateEvent, "synchronize", wait)
            optimizer.step()
            zo.close(model) if number == 3 else zo.stats(model)
        optimizer.zero_grad()
    assert sum(waited) == 4, "the sums, once a step"


def load_on_rank(rank: int, world_size: int, stage: int, folder: Path, *, late: bool) -> list[float]:
    """A checkpoint is loaded right after a forward that brings values from other ranks, and keeps them."""
    device: Any = LateDevice() if late else HostDevice()
    before, offload_module.compute_device = offload_module.compute_device, lambda: device
    try:
        model = zo.offload(Model(), zo.OffloadConfig(stage=stage))
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        found = []
        for number in range(4):
            loss = model(batch(10 * number + rank))
            loss.backward()
            if number == 2:
                zo.save_checkpoint(model, optimizer, folder)
            look(model)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            if number == 2:
                look(model)
                zo.load_checkpoint(model, optimizer, folder)
        zo.close(model)
        if late:
            device.check_sources()
        return found
    finally:
        offload_module.compute_device = before


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_values_that_ranks_share_stay_too(tmp_path: Path, stage: int) -> None:
    pool = RankPool(2)
    try:
        expected = pool.succeed(functools.partial(load_on_rank, late=False), stage, tmp_path / "host")
        found = pool.succeed(functools.partial(load_on_rank, late=True), stage, tmp_path / "late")
    finally:
        pool.close()
    assert found == expected
