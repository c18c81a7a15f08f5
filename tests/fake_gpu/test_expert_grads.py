"""Gradients of trained experts leave a device slice by slice, with the bits of whole ones, whatever looks at them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE
from tests.fake_gpu.training import EVERY, Schedule
from tests.helpers.experts import NUM_EXPERTS, ManyExperts, experts_lm
from tests.helpers.models import build, tokens_of
from tests.helpers.pairwise import Row, label, pairwise
from tests.helpers.reference import Recipe, Trajectory, param_groups, read_masters, train_offloaded, train_plain
from zero_offload.base.types import MIB
from zero_offload.model.api import need_runtime
from zero_offload.runtime.experts import GroupedExperts
from zero_offload.runtime.grads import gradients
from zero_offload.runtime.grads.sliced import GradSlices
from zero_offload.storage.shards.grad_downloads import GradDownloads

MATRIX: dict[str, Any] = {
    "params": ["cpu", "nvme"],
    "grads": ["cpu", "nvme"],
    "optimizer": ["cpu", "nvme", "device"],
    "precision": ["fp32", "bf16", "fp16"],
    "size": [1, 2, 4, NUM_EXPERTS],
    "micro_batches": [1, 3],
    "checkpointing": [False, True],
    "max_norm": [None, 0.5],
    "schedule": EVERY,
}


def make(size: int, *, checkpointing: bool = False) -> nn.Module:
    model = experts_lm(size=size, trained=True)
    if checkpointing:
        zo.checkpoint(model.blocks)
    return model


@functools.cache
def plain(precision: str, micro_batches: int, max_norm: float | None) -> Trajectory:
    """On the CPU, whose kernels the device runs."""
    return train_plain(Recipe(functools.partial(make, 0), precision, 3, micro_batches, max_norm))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Slices that were sent, and gradients that came back whole."""
    found = Counter[str]()
    for kind, name in ((GradSlices, "put"), (GradDownloads, "bring")):

        def noted(self: Any, *args: Any, call: Any = getattr(kind, name), name: str = name) -> Any:
            found[name] += 1
            return call(self, *args)

        monkeypatch.setattr(kind, name, noted)
    return found


@pytest.mark.parametrize("row", pairwise(MATRIX), ids=label)
def test_slices_train_to_the_bits_of_plain_tensors(row: Row, nvme: Path, seen: Counter[str]) -> None:
    schedule: Schedule = row["schedule"]
    device.policy(*schedule)
    model = functools.partial(make, row["size"], checkpointing=row["checkpointing"])
    recipe = Recipe(model, row["precision"], 3, row["micro_batches"], row["max_norm"])
    settings = {name: row[name] for name in ("params", "grads", "optimizer", "precision")}
    config = zo.OffloadConfig(nvme=nvme, device_memory="28MiB", durability="scratch", **settings)
    found = train_offloaded(recipe, config)
    assert device.take_races() == []
    assert found == plain(row["precision"], row["micro_batches"], row["max_norm"])
    assert seen["put"] >= row["micro_batches"] * 3 * 3 and not seen["bring"]
