"""Sums of squares of gradients in a device's memory, with the bits of the other kernels; see [Note: the tree] in
csrc/reduce/reduce.h.

Owns nothing. A device adds up chunks, each by itself; the sums of chunks are brought to the host and added up there.
Nothing waits for the device before that. The calls: `launch_sum` for each gradient, `read_sums` for all of them, or
`total` of what somebody else has brought down. Done by Triton's kernel where that is to be had (`triton_sums`), else by
torch's operations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zero_offload.host import host_empty
from zero_offload.kernels.choice import has_device_update
from zero_offload.kernels.grads import GradSum

CHUNK, LANES = 16384, 16
BLOCK_CHUNKS = 256
"""Torch's operations take so many chunks at once: their squares, and the running sums of these, are 32 MiB each."""


def launch_sum(grad: Tensor) -> Tensor:
    """(chunks,) fp64 on the gradient's device, the sum of squares of each chunk; `grad` is (numel,), contiguous."""
    sums = torch.empty(-(-grad.numel() // CHUNK), dtype=torch.float64, device=grad.device)
    if grad.numel() == 0:
        return sums
    if has_device_update(grad):
        from zero_offload.kernels.triton_sums import sum_chunks

        sum_chunks(grad, sums)
        return sums
    for block, values in zip(sums.split(BLOCK_CHUNKS), grad.split(BLOCK_CHUNKS * CHUNK), strict=True):
        _sum_block(values, block)
    return sums


def read_sums(launched: Sequence[Tensor]) -> list[GradSum]:
    """The sums of gradients, of what `launch_sum` returned for each; one download for all of them."""
    if not launched:
        return []
    chunks = torch.cat(list(launched)).cpu()
    return [total(part) for part in chunks.split([len(each) for each in launched])]


def total(chunks: Tensor) -> GradSum:
    """The sum of a gradient from those of its chunks, (chunks,) fp64 on the host."""
    # `sum` would add pairs.
    found = float(np.add.accumulate(chunks.numpy())[-1]) if len(chunks) else 0.0
    # Squares of finite numbers do not overflow in double.
    return GradSum(math.nan if math.isnan(found) else found, math.isfinite(found))


def sums_in_few_launches(grad: Tensor) -> bool:
    """Whether `launch_sum` does not add up row by row."""
    return has_device_update(grad) or _may_scan(grad.device)


def _sum_block(values: Tensor, sums: Tensor) -> None:
    """Fill `sums`, (chunks,) fp64, from the values of as many chunks, the last of which may be short."""
    rows = CHUNK // LANES if len(sums) > 1 else -(-values.numel() // LANES)
    # Zeros behind the values change no bit.
    squares = torch.zeros(len(sums) * rows * LANES, dtype=torch.float64, device=values.device)
    squares[: values.numel()] = values
    squares.mul_(squares)
    lanes = _add_rows(squares.view(len(sums), rows, LANES))
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    sums.copy_(lanes[:, 0])


def _add_rows(squares: Tensor) -> Tensor:
    """(chunks, LANES): the rows of each chunk, added up one after the other."""
    if _may_scan(squares.device):
        return squares.cumsum(1)[:, -1]
    return _add_row_by_row(squares)


def _add_row_by_row(squares: Tensor) -> Tensor:
    """The same in as many operations as there are rows."""
    lanes = squares[:, 0].clone()
    for row in range(1, squares.shape[1]):
        lanes += squares[:, row]
    return lanes


def _may_scan(device: torch.device) -> bool:
    # With deterministic algorithms alone torch refuses scans of floats on CUDA, whatever they do.
    return not torch.are_deterministic_algorithms_enabled() and _scans_in_order(device)


@functools.cache
def _scans_in_order(device: torch.device) -> bool:
    """Whether a scan over rows, which torch may do in any order, adds one after the other there; tried once."""
    draw = torch.Generator("cpu").manual_seed(0)
    squares = host_empty((3, CHUNK // LANES, LANES), torch.float64).uniform_(generator=draw).to(device)
    return torch.equal(squares.cumsum(1)[:, -1], _add_row_by_row(squares))
