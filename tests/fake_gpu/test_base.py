"""Frozen parts that rest in a base, on a device: through the landing memory, with the numbers of a base in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers.bases import opened, settings, steps, write_base
from tests.helpers.disk import runtime

PLACEMENTS: dict[str, dict[str, Any]] = {
    "nvme": {},
    "little memory": {"device_memory": "24MiB"},
    "cpu": {"params": "cpu"},
    "device": {"params": "device", "optimizer": "device", "grads": "device"},
    "mixed": {"params": {"device": 0.3, "nvme": 0.7}, "optimizer": "device"},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_losses_are_those_of_a_base_in_memory(placement: str, tmp_path: Path) -> None:
    folder = write_base(tmp_path / "base")
    model, optimizer = opened(folder, settings(None))
    plain = steps(model, optimizer, 0, 5, commits=False)
    zo.close(model)
    model, optimizer = opened(folder, settings(tmp_path / "run", **PLACEMENTS[placement]))
    losses = steps(model, optimizer, 0, 3)
    assert all(shard.base is not None for shard in runtime(model).store.shards if not shard.layout.trainable)
    zo.close(model)
    config = settings(tmp_path / "run", existing="resume", **PLACEMENTS[placement])
    model, optimizer = opened(None, config)
    zo.resume(model, optimizer)
    assert losses + steps(model, optimizer, 3, 5) == plain
    zo.close(model)
