"""On the GPU here, the update by torch's operations returns the bits of the native kernels, and waits for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.accelerator import IS_FAKE, TYPE, on_gpu, waiting_for_nothing
from tests.helpers.device_formats import Make, cases, copies, different, tame, update_on_host, wild
from tests.helpers.device_updates import SEGMENT
from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import STATE_BLOCK, Rule
from zero_offload.hardware.kernels import torch_update

pytestmark = on_gpu


@pytest.mark.parametrize("make", [tame, wild])
@pytest.mark.parametrize("format", StateFormat, ids=lambda format: format.name)
@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name)
def test_the_bits_of_the_native_kernels(rule: Rule, format: StateFormat, make: Make) -> None:
    for case in cases(rule, format):
        for numel in (1, 257, 3000 if IS_FAKE else 100_003):
            tensors = replace(make(case, numel), origin=(1 << 32) - STATE_BLOCK)
            there = copies(tensors, TYPE)
            segment = replace(SEGMENT, end=numel)
            update_on_host(rule, tensors, segment)
            with waiting_for_nothing():
                torch_update.update_on_device(rule, there, segment)
            assert different(there, tensors) == [], (case, numel)
