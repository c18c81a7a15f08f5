"""A model that is only read, on the fake GPU: the bits of the host, and part of it stays between forwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE
from tests.fake_gpu.training import SOME, Schedule
from tests.helpers.models import WIDE, TinyLM, tokens_of
from zero_offload.model.api import need_runtime


def read_only(model: Any, where: str, nvme: Path, device_memory: str | None = "16MiB") -> Any:
    """fp32, with nothing trained."""
    settings = {"nvme": nvme, "durability": "scratch"} if where == "nvme" else {}
    config = zo.OffloadConfig(params=where, precision="fp32", device_memory=device_memory, **settings)
    return zo.offload(model.requires_grad_(False), config)


def tiny() -> Any:
    torch.manual_seed(0)
    return TinyLM(WIDE, 8).eval()


@pytest.mark.parametrize("schedule", SOME, ids=str)
@pytest.mark.parametrize("device_memory", ["16MiB", "24MiB", None])
@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_forwards_have_the_bits_of_the_host(
    where: str, device_memory: str | None, schedule: Schedule, nvme: Path
) -> None:
    device.policy(*schedule)
    plain = tiny()
    model = read_only(tiny(), where, nvme, device_memory)
    with torch.no_grad():
        found = [model(tokens_of(seed).to(TYPE)) for seed in range(6)]
        assert [each.cpu().item() for each in found] == [plain(tokens_of(seed)).item() for seed in range(6)]
    assert device.take_races() == []
    zo.close(model)


def test_what_fits_stays_between_forwards(nvme: Path) -> None:
    model = read_only(tiny(), "cpu", nvme, "24MiB")
    evictor = need_runtime(model, "this test").prefetcher._evictor
    num_units = len(need_runtime(model, "this test").units)
    with torch.no_grad():
        for seed in range(3):
            model(tokens_of(seed).to(TYPE))
        before = evictor.num_evictions
        for seed in range(6):
            model(tokens_of(seed).to(TYPE))
    assert 0 < (evictor.num_evictions - before) / 6 < 0.75 * num_units
    zo.close(model)
