"""A program writes the 16-bit values that a parameter has back to it: the fp32 master stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.reference import read_masters


def _by_data(param: Any, values: Tensor) -> None:
    param.data = values


def _by_list(param: Any, values: Tensor) -> None:
    torch._foreach_copy_([param], [values])


def _by_view(param: Any, values: Tensor) -> None:
    param[:3].copy_(values[:3])


RESTORES: tuple[Callable[[Any, Tensor], object], ...] = (lambda p, v: p.copy_(v), _by_data, _by_list, _by_view)


@pytest.mark.parametrize("params", ["cpu", "nvme"])
@torch.no_grad()
def test_a_restore_keeps_masters_and_takes_other_elements(params: str, nvme: Path) -> None:
    config = zo.OffloadConfig(precision="bf16", params=params, optimizer=params, nvme=nvme, durability="scratch")
    model = zo.offload(build(TinyLM), config)
    with torch.enable_grad():
        model(tokens_of(0)).backward()
    zo.SGD(model.parameters(), lr=0.1).step()
    weight, before = model.blocks[0].up.weight, read_masters(model)
    kept = weight.detach().clone()
    assert not torch.equal(before["blocks.0.up.weight"], kept.float())
    for restore in RESTORES:
        restore(weight, kept)
        assert all(torch.equal(each, before[name]) for name, each in read_masters(model).items())
    changed = kept.clone()
    changed[0] = 0.5
    weight.copy_(changed)
    expected = before["blocks.0.up.weight"].clone()
    expected[0] = 0.5
    assert torch.equal(read_masters(model)["blocks.0.up.weight"], expected)
    weight.copy_(kept.float())  # fp32 values are the master's
    assert torch.equal(read_masters(model)["blocks.0.up.weight"], kept.float())
    zo.close(model)
