"""fp32 masters of bf16 values on any device, by torch's operations: the bits of `formats.join_master` and
`formats.split_master`, which work in host memory. Nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 22
"""Elements that the arrays between two operations have."""
_NAN = 0x7FC00000


@torch.no_grad()
def join_on_device(half: Tensor, residual: Tensor, master: Tensor) -> None:
    """Write to `master`, (n,) fp32, what `half` (bf16) and `residual` (int16, or int8: of 24 bits) stand for."""
    shift = 0 if residual.dtype is torch.int16 else 8
    for upper, lower, out in zip(*(each.split(BLOCK) for each in (half, residual, master)), strict=True):
        words = out.view(torch.int32)
        # The residual is signed, and carries into the half.
        words.copy_(upper.view(torch.int16)).bitwise_left_shift_(16).add_(
            lower.to(torch.int32).bitwise_left_shift_(shift)
        )


@torch.no_grad()
def split_on_device(master: Tensor, half: Tensor, residual: Tensor) -> None:
    """Write the two parts of `master`, (n,) fp32, to `half` (bf16) and `residual` (int16, or int8: 24 bits of it)."""
    for source, upper, lower in zip(*(each.split(BLOCK) for each in (master, half, residual)), strict=True):
        words, is_nan = source.view(torch.int32), source.isnan()
        if residual.dtype is torch.int8:
            words = torch.where(is_nan, _NAN, words).add_(0x80).bitwise_right_shift_(8)
            lower.copy_(words)  # integers of fewer bits take the lower ones
            upper.view(torch.int16).copy_(words.add_(0x80).bitwise_right_shift_(8))
        else:
            lower.copy_(words).masked_fill_(is_nan, 0)
            rounded = words + 0x8000
            torch.where(is_nan, words | 0x400000, rounded, out=rounded)
            upper.view(torch.int16).copy_(rounded.bitwise_right_shift_(16))
