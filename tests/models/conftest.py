"""The two ends of placement, in both precisions: nothing ever leaves memory, or everything does."""

from __future__ import annotations

from pathlib import Path

import pytest

import zero_offload as zo
from tests.helpers.pairwise import full
from tests.helpers.reference import placed

TIGHT = {"fp32": "8MiB", "bf16": "6MiB"}
"""Room for a block of a WIDE model and one frame more: every use of a unit evicts another."""


@pytest.fixture(
    params=[
        "cpu-bf16",
        "nvme-fp32",
        *(full(each) for each in ("cpu-fp32", "nvme-bf16")),
    ]
)
def config(request: pytest.FixtureRequest, nvme: Path) -> zo.OffloadConfig:
    tier, precision = request.param.split("-")
    if tier == "cpu":
        return placed(precision, ("cpu", "cpu", "cpu"), None, None)
    return placed(precision, ("nvme", "nvme", "nvme"), nvme, TIGHT[precision])


@pytest.fixture(params=["cpu", "nvme"])
def fp32_config(request: pytest.FixtureRequest, nvme: Path) -> zo.OffloadConfig:
    if request.param == "cpu":
        return placed("fp32", ("cpu", "cpu", "cpu"), None, None)
    return placed("fp32", ("nvme", "nvme", "nvme"), nvme, TIGHT["fp32"])


@pytest.fixture
def nvme_config(nvme: Path) -> zo.OffloadConfig:
    return placed("fp32", ("nvme", "cpu", "nvme"), nvme, TIGHT["fp32"])
