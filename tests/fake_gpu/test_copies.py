"""Copies of models on the device, and on it: `zo.copy` from tier to tier, and deep copies where they fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.training import SOME
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import in_turn
from tests.helpers.reference import read_masters
from tests.models.test_copies import Kinds, trained
from zero_offload.hardware.device import DeviceMemory
from zero_offload.model import runtime


def kinds() -> nn.Module:
    """Without an LSTM, which refers weakly to its weights: on a device out of its tree torch then swaps none."""
    return Kinds(nn.Linear)


PLACEMENTS = [("device", "device"), ("cpu", "device"), ("nvme", "nvme"), ("device", "nvme"), ("nvme", "device")]


@in_turn(source=PLACEMENTS, target=PLACEMENTS, precision=["fp32", "bf16"], make=[kinds, TinyLM])
def test_a_copy_trains_as_its_original(
    source: tuple[str, str], target: tuple[str, str], precision: str, make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    for schedule in SOME:
        device.policy(*schedule)
        models = []
        for name, (params, optimizer) in {"model": source, "copy": target}.items():
            config = zo.OffloadConfig(
                params=params, optimizer=optimizer, nvme=tmp_path / name, existing="discard",
                precision=precision, device_memory="24MiB",
            )  # fmt: skip
            if not models:
                models.append(zo.offload(build(make), config))
                trained(models[0], range(2))
            else:
                models.append(zo.copy(models[0], config))
        masters, found = map(read_masters, models)
        assert all(torch.equal(found[name], masters[name]) for name in masters)
        # States begin anew in the copy, and in a new optimizer.
        assert trained(models[1], range(2, 4)) == trained(models[0], range(2, 4))
        for each in models:
            zo.close(each)
        assert device.take_races() == []


def test_a_deep_copy_that_the_device_has_no_room_for_raises(monkeypatch: pytest.MonkeyPatch, nvme: Path) -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme, precision="fp32"))
    nbytes = sum(param.numel() * 4 for param in model.parameters())
    memory = DeviceMemory(nbytes // 2, nbytes, nbytes, nbytes, nbytes // 2 + 1, nbytes, 0)
    with monkeypatch.context() as patch, pytest.raises(zo.CapacityError, match=r"copy\.deepcopy .*needed.*left of"):
        patch.setattr(runtime, "read_memory", lambda where: memory)
        copy.deepcopy(model)
    made = copy.deepcopy(model)
    assert made(tokens_of(0)).item() == model(tokens_of(0)).item()
    zo.close(model)
