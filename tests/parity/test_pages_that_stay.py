"""Where the system moves no pages (Linux before 5.7, gVisor), a run computes the same in as little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers.disk import reference, train
from tests.helpers.models import TinyLM, build
from tests.helpers.reference import param_groups
from zero_offload.storage.memory import arena
from zero_offload.storage.memory.arena import MovableBuffer

STEPS = 4


def test_the_same_losses(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    attach = MovableBuffer.attach

    def count(buffer: MovableBuffer) -> bool:
        given.append(buffer.num_frames)
        return attach(buffer)

    monkeypatch.setattr(arena, "moves_pages", lambda: False)
    monkeypatch.setattr(MovableBuffer, "attach", count)
    settings: dict[str, Any] = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "device_memory": "8MiB"}
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(nvme=nvme, **settings))
    optimizer = zo.AdamW(param_groups(model), lr=1e-2)
    assert train(model, optimizer, 0, STEPS) == reference(STEPS)[0]
    assert given
    zo.close(model)
