"""Whatever moves the bytes, a run computes the same, and goes on from what another engine wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zero_offload as zo
from tests.helpers.disk import reference, train
from tests.helpers.models import TinyLM, build
from tests.helpers.reference import param_groups
from zero_offload.storage.files.engines import io_uring_problem

STEPS = 6
STRIPED = ("", "second", "third")


def _open(engine: str, nvme: Path, stripe: int) -> tuple[nn.Module, zo.AdamW]:
    if engine == "io_uring" and io_uring_problem():
        pytest.skip("io_uring is forbidden here")
    directories = [nvme.with_name(nvme.name + name) for name in STRIPED[:stripe]]
    model = build(TinyLM)
    settings: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "grads": "nvme", "device_memory": "8MiB"}
    zo.offload(model, zo.OffloadConfig(nvme=directories, existing="resume", io_engine=engine, **settings))
    return model, zo.AdamW(param_groups(model), lr=1e-2)


@pytest.mark.parametrize("stripe", [1, 3])
@pytest.mark.parametrize("engine", ["io_uring", "threads", "aiofiles"])
def test_the_same_losses(engine: str, stripe: int, nvme: Path) -> None:
    model, optimizer = _open(engine, nvme, stripe)
    assert train(model, optimizer, 0, STEPS) == reference(STEPS)[0]
    zo.close(model)


@pytest.mark.parametrize("stripe", [1, 2])
def test_each_engine_goes_on_from_another(stripe: int, nvme: Path) -> None:
    losses = []
    for begin, engine in enumerate(["threads", "io_uring", "aiofiles", "threads"]):
        model, optimizer = _open(engine, nvme, stripe)
        resumed = zo.resume(model, optimizer)
        assert (resumed.step if resumed else 0) == begin
        losses += train(model, optimizer, begin, begin + 1)
        zo.close(model)
    assert losses == reference(STEPS)[0][:4]
