"""Values in host memory that change while the device may still be copying them.

An upload that compute waits for is over when compute gets that far, which the host does not know. Whatever writes
values where they rest waits for it first; in the training loop that costs nothing, since gradients tell the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.helpers.models import TinyLM, build, tokens_of
from zero_offload.storage.shards.shard import Shard

pytestmark = pytest.mark.usefixtures("late")

PLACEMENTS: dict[str, dict[str, Any]] = {
    "in memory": {},
    "values in memory": {"optimizer": "nvme"},
    "values on the device": {"params": "device"},
    "no overlap": {"overlap": "none"},
    "in backward": {"overlap": "backward"},
    "gradients on the device": {"grads": "device"},
}
make = partial(TinyLM, num_blocks=4)
SMALL = "8MiB"
"""Of device memory: units come and go."""


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
    """A forward whose backward never comes. Without gradients the next one's first units would be fetched at its end,
    and an update that breaks off these fetches waits for all uploads."""
    model(tokens_of(99))


Write = Callable[[Any, Any, Path], None]
WRITES: list[Write] = [forward, load_values, load_states, load_checkpoint, write_gathered]


def run(config: zo.OffloadConfig, write: Write, folder: Path) -> Iterator[float]:
    """Each step's update, and `write`, come right after a forward that the host has not waited for."""
    model = zo.offload(build(make), config)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    in_backward = config.overlap == "backward"  # then no forward may come before the step
    losses = []
    for number in range(4):
        loss = model(tokens_of(number))
        if in_backward:
            look(model)
        loss.backward()
        if not in_backward:
            look(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if number == 2:
            look(model)
            write(model, optimizer, folder)
    yield from (loss.item() for loss in losses)
    yield from (value.double().sum().item() for value in model.state_dict().values())
    zo.close(model)


@pytest.mark.parametrize(("placement", "write"), list(zip([*PLACEMENTS, *PLACEMENTS], itertools.cycle(WRITES))))
def test_values_stay_while_an_upload_may_read_them(placement: str, write: Write, tmp_path: Path) -> None:
    found = []
    config = zo.OffloadConfig(
        device_memory=SMALL, **PLACEMENTS[placement], nvme=tmp_path / "nvme", durability="scratch"
    )
    for each in ("host", "device"):
        (tmp_path / each).mkdir()
        with device.on_host() if each == "host" else device.current(0):
            found.append(list(run(config, write, tmp_path / each)))
    assert found[0] == found[1]


@pytest.mark.parametrize("write", WRITES)
def test_a_missing_wait_of_the_host_is_seen(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shard, "wait_for_copies", lambda self: None)
    list(run(zo.OffloadConfig(device_memory=SMALL), write, tmp_path))
    races = device.take_races()
    assert any("the host changed memory before it knew that an upload had read it" in race for race in races), races


def test_the_loop_waits_for_no_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    """When gradients, or their sums, have come down, the uploads before them are known to be over."""
    model = zo.offload(build(make), zo.OffloadConfig(device_memory=SMALL))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    wait, waited = Shard.wait_for_copies, []

    def noted(self: Shard) -> None:
        if self.last_copy is not None:
            waited.append(not self.last_copy.done())
        wait(self)

    monkeypatch.setattr(Shard, "wait_for_copies", noted)
    for number in range(4):
        model(tokens_of(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    zo.close(model)
    assert waited and not any(waited)
