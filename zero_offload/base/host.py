"""New tensors in host memory, of a dtype that the caller names.

torch's factories follow `torch.set_default_dtype`, `torch.set_default_device` and `with torch.device(...)`, which are
the user's. Tensors of this library may not follow them, so it makes host tensors here; `tests/house/test_defaults.py`
keeps it so.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def host_empty(shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """As torch.empty, on the CPU."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def host_reserved(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory page by page, when they are touched."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return host_empty(shape, dtype)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(tuple(shape))


def host_zeros(shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """As torch.zeros, on the CPU."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


def host_tensor(data: Any, dtype: torch.dtype) -> Tensor:
    """As torch.tensor, on the CPU."""
    return torch.tensor(data, dtype=dtype, device="cpu")
