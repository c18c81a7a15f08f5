"""On a real GPU: the update by torch's operations returns the bits of the native kernels, and waits for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.helpers.device_formats import Make, cases, copies, different, tame, update_on_host, wild
from tests.helpers.device_updates import SEGMENT
from zero_offload.abi import STATE_BLOCK, Rule, StateFormat
from zero_offload.kernels import torch_update

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("make", [tame, wild])
@pytest.mark.parametrize("format", StateFormat, ids=lambda format: format.name)
@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name)
def test_the_bits_of_the_native_kernels(rule: Rule, format: StateFormat, make: Make) -> None:
    for case in cases(rule, format):
        for numel in (1, 257, 100_003):
            tensors = replace(make(case, numel), origin=(1 << 32) - STATE_BLOCK)
            on_gpu = copies(tensors, "cuda")
            segment = replace(SEGMENT, end=numel)
            update_on_host(rule, tensors, segment)
            torch.cuda.set_sync_debug_mode("error")
            try:
                torch_update.update_on_device(rule, on_gpu, segment)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert different(on_gpu, tensors) == [], (case, numel)
