"""Parameters that thaw on the device: its tiers, and the buffers of sections whose states it has."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE
from tests.fake_gpu.training import SOME
from tests.helpers.models import build
from tests.helpers.pairwise import in_turn
from tests.helpers.ranks import read_params, rows_of
from tests.helpers.scripts import Script, check, run_plain
from tests.helpers.thawing import frozen
from tests.parity.test_live_blocks import in_turns
from tests.parity.test_thaw import block_by_block, gradually

PLACEMENTS = [
    ("device", "device", "device"),
    ("cpu", "nvme", "nvme"),
    ("nvme", "cpu", "device"),
    ("device", "cpu", "cpu"),
    ("nvme", "device", "cpu"),
]

dropping = partial(in_turns, order="ascending", master="drop")


@in_turn(placement=PLACEMENTS, precision=["bf16", "fp32"], script=[gradually, block_by_block])
def test_blocks_that_thaw_and_rest(placement: tuple[str, str, str], precision: str, script: Script, nvme: Path) -> None:
    compare_with_plain(placement, precision, script, nvme)


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_blocks_whose_masters_go(placement: tuple[str, str, str], nvme: Path) -> None:
    compare_with_plain(placement, "bf16", dropping, nvme)


def compare_with_plain(placement: tuple[str, str, str], precision: str, script: Script, nvme: Path) -> None:
    params, grads, optimizer = placement
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    expected = run_plain(script, frozen, dtype=dtype)
    settings: dict[str, Any] = {"params": params, "grads": grads, "optimizer": optimizer, "precision": precision}
    for schedule in SOME:
        device.policy(*schedule)
        config = zo.OffloadConfig(nvme=nvme, existing="discard", device_memory="24MiB", **settings)
        model = zo.offload(build(frozen), config)
        losses = list(script(model, lambda step: rows_of(step, 0, 1).to(TYPE), lambda _: None))
        params = {name: values.cpu() for name, values in read_params(model).items()}
        zo.close(model)
        assert device.take_races() == []
        check((losses, params), expected)
