"""No placement changes a bit, whatever the device runs late: precisions, overlaps, activations on tiers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.fake_gpu.training import EVERY, check
from tests.helpers.models import NARROW, WIDE, TinyLM
from tests.helpers.pairwise import Row, label, pairwise
from tests.helpers.reference import Recipe

TIERS: dict[str, Any] = {
    "device": "device",
    "cpu": "cpu",
    "nvme": "nvme",
    "thirds": {"device": 0.34, "cpu": 0.33, "nvme": 0.33},
}
MATRIX = {
    "params": list(TIERS),
    "grads": list(TIERS),
    "optimizer": list(TIERS),
    "precision": ["fp32", "bf16", "fp16"],
    "schedule": EVERY,
    "micro_batches": [1, 2],
    "max_norm": [None, 0.5],
    "dim": [NARROW, WIDE],
    "device_memory": ["28MiB", None],
    "overlap": ["auto", "forward", "none"],
    "activations": ["device", "cpu", "nvme"],
    "durability": ["process", "scratch"],
}


@pytest.mark.parametrize("row", pairwise(MATRIX), ids=label)
def test_every_pair_of_settings_trains_to_the_bits_of_plain_tensors(row: Row, nvme: Path) -> None:
    make = functools.partial(TinyLM, row["dim"])
    recipe = Recipe(make, row["precision"], 3, row["micro_batches"], row["max_norm"])
    tiers = {kind: TIERS[row[kind]] for kind in ("params", "grads", "optimizer")}
    settings = {name: row[name] for name in ("device_memory", "overlap", "activations", "durability")}
    check(recipe, [row["schedule"]], nvme=nvme, **tiers, **settings)
