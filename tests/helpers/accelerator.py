"""The accelerator that tests/gpu run on: whatever torch finds here, the fake GPU among them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from zero_offload.hardware.accelerators import ACCELERATORS, present_type

TYPE = present_type() or "none"
IS_FAKE = TYPE == "fakegpu"
"""It computes on the host, which is slow: sizes are small there. Its numbers are the host's, and no time passes."""
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(TYPE == "none", reason="no GPU")]
with_triton = pytest.mark.skipif(
    TYPE not in ACCELERATORS or not ACCELERATORS[TYPE].has_triton, reason="no Triton for this device type"
)


def module() -> Any:
    """The device type's, such as torch.cuda."""
    return torch.get_device_module(TYPE)


@contextmanager
def waiting_for_nothing() -> Iterator[None]:
    """Fails where the host waits for the device inside; nothing tells on device types but CUDA's and the fake one."""
    if IS_FAKE:
        from tests.fake_gpu import device

        with device.counting() as counted:
            yield
        waits = ("event_syncs", "stream_syncs", "device_syncs", "items")
        assert {name: counted[name] for name in waits if counted[name]} == {}
    elif hasattr(module(), "set_sync_debug_mode"):
        module().set_sync_debug_mode("error")
        try:
            yield
        finally:
            module().set_sync_debug_mode("default")
    else:
        yield
