"""Frozen quantized weights on a device that is late: the bits of the plainest way, and no race."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import Policy
from tests.fake_gpu.training import SOME, check_run, plainly, run
from tests.helpers.models import tokens_of
from tests.helpers.quantized import KINDS, quantized_lm
from zero_offload.plan.quantized import offloaded_tensors

PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"params": "nvme", "optimizer": "nvme"},
    {"params": "device", "grads": "device", "optimizer": "device", "device_memory": None},
]


def blocks(kind: str, *, recompute: bool) -> nn.Module:
    model = quantized_lm(kind, num_blocks=4)
    if recompute:
        zo.checkpoint(list(model.blocks))  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_training(kind: str, placement: dict[str, Any]) -> None:
    make = partial(blocks, kind, recompute="optimizer" in placement)
    device.policy(Policy.EAGER)
    check_run(run(plainly, make), plainly, make, schedules=SOME, **placement)


@pytest.mark.parametrize("kind", KINDS)
def test_as_on_a_cpu(kind: str) -> None:
    """The device runs the CPU's kernels: the values that the tensors have there are those that they had."""
    device.policy(Policy.EAGER)
    in_memory, model = quantized_lm(kind), quantized_lm(kind)
    plain = dict(offloaded_tensors(in_memory))
    zo.offload(model, zo.OffloadConfig(precision="fp32", device_memory="32MiB"))
    model.to(device.TYPE)
    assert {param.device.type for param in model.parameters()} == {device.TYPE}
    assert model(tokens_of(0).to(device.TYPE)).item() == in_memory(tokens_of(0)).item()
    with zo.gathered(model) as values:
        for name, tensor in plain.items():
            found = values[name]
            assert (found.device.type, found.dtype, found.stride()) == (device.TYPE, tensor.dtype, tensor.stride())
            assert torch.equal(found.cpu().float(), tensor.float()), name
    zo.close(model)
