"""Gradients of parameters that are not offloaded, where they are used together with offloaded ones.

Owns how they are added up: in double, where they lie, like those of a model's ledger. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zero_offload.hardware.kernels.grads import sum_of_squares
from zero_offload.hardware.probe import kernel_threads
from zero_offload.plan.tensor_parallel import is_dtensor

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def squares_of(grads: Iterable[Tensor]) -> float:
    """The sum of squares of all of them; of a DTensor the whole. Collective with DTensors."""
    return sum(map(_squares, grads), 0.0)


def _squares(grad: Tensor) -> float:
    grad = grad.detach()
    if grad.layout is torch.sparse_coo:
        grad = grad.coalesce()._values()
    if type(grad) is Tensor and grad.device.type == "cpu" and grad.dtype in _KERNEL_DTYPES and grad.is_contiguous():
        return sum_of_squares(grad.data_ptr(), grad.dtype, grad.numel(), num_threads=kernel_threads()).sumsq
    dtype = torch.complex128 if grad.is_complex() else torch.float64
    norm: Any = torch.linalg.vector_norm(grad, dtype=dtype)
    return float(norm.full_tensor() if is_dtensor(norm) else norm) ** 2
