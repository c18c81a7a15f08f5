"""Random number generators as JSON, and back: Python's, numpy's, torch's and the devices'."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

from zero_offload.hardware.device import device_rng_states, set_device_rng_states


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.numpy())).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def capture_rng() -> dict[str, Any]:
    """The state of every generator of this process."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": _encode(torch.get_rng_state()),
        "devices": [_encode(state) for state in device_rng_states()],
    }


def restore_rng(saved: dict[str, Any]) -> None:
    """Put every generator where `capture_rng` found it."""
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_decode(saved["torch"]))
    set_device_rng_states([_decode(state) for state in saved["devices"]])
