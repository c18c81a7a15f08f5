"""Modules that come, go and move between steps, on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.helpers import changing
from tests.helpers.changing import change, make, step
from tests.helpers.models import build, tokens_of
from tests.helpers.pairwise import full
from tests.helpers.ranks import read_params

PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {"params": "device", "grads": "device", "optimizer": "device"},
    "cpu": {"params": "cpu", "grads": "device", "optimizer": "cpu", "device_memory": "24MiB"},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "device_memory": "24MiB"},
}


@pytest.mark.parametrize("placement", ["device", full("cpu"), "nvme"])
def test_blocks_that_come_go_and_move(placement: str, nvme: Path) -> None:
    device.policy(Policy.LATE)
    plain = build(make)
    model = zo.offload(build(make), zo.OffloadConfig(precision="fp32", nvme=nvme, **PLACEMENTS[placement]))
    its_optimizer, optimizer = (zo.AdamW(each.parameters(), lr=1e-2) for each in (plain, model))
    steps = (changing.swap, changing.insert, changing.remove, changing.new_head, changing.new_block, changing.remove)
    for number, how in enumerate(steps):
        change(plain, its_optimizer, how, number + 1, is_plain=True)
        change(model, optimizer, how, number + 1, is_plain=False)
        expected = step(plain, its_optimizer, tokens_of(number))
        assert step(model, optimizer, tokens_of(number).to(TYPE)) == expected
        zo.commit(model, optimizer)
    found = {name: values.cpu() for name, values in read_params(model).items()}
    assert device.take_races() == []
    zo.close(model)
    assert found.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(found[name], param) for name, param in plain.named_parameters())
