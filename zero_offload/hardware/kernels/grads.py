"""Gradients on their way to where they rest: store or accumulate, and the sum of squares of the result, in one pass.

Owns nothing. A sum of squares is added up along a fixed tree ([Note: the tree] in csrc/reduce/reduce.h). So the same
values give the same bits on every machine and for every number of threads. The sum is of the values written, after
rounding. On the host there is one call for each gradient: `store_grad` or `accumulate_grad`, by addresses.

A device adds up chunks, each by itself. `launch_sums` does it for the gradients of a section, in as few launches as one
gradient takes. It uses Triton's kernel if there is Triton (`triton_sums`), else torch's operations. The host adds up
the sums of chunks when they are there: `total`. Nothing waits for the device before that.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zero_offload.base.host import host_empty
from zero_offload.hardware import abi
from zero_offload.hardware.kernels.arguments import CHUNK, LANES, kind_of
from zero_offload.hardware.kernels.choice import has_device_update, kernels
from zero_offload.hardware.native import GradSum

BLOCK_CHUNKS = 256
"""Torch's operations take so many chunks at once: their squares, and the running sums of these, are 32 MiB each."""

# Looking up a member of an enumeration takes a tenth of a microsecond.
_FP32, _OVERWRITE, _ACCUMULATE = abi.ElementType.FP32, abi.GradMode.OVERWRITE, abi.GradMode.ACCUMULATE


def store_grad(
    dst_address: int,
    dst_dtype: torch.dtype,
    src_address: int,
    src_dtype: torch.dtype,
    numel: int,
    *,
    num_threads: int = 1,
) -> GradSum:
    """dst = src. fp32 to 16 bits is refused: it would round a gradient that was whole."""
    kinds = kind_of(dst_dtype), kind_of(src_dtype)
    return kernels().grad_store(*kinds, _OVERWRITE, num_threads, dst_address, src_address, numel)


def accumulate_grad(
    dst_address: int, src_address: int, src_dtype: torch.dtype, numel: int, *, num_threads: int = 1
) -> GradSum:
    """dst += src, where dst is fp32; the sums are of the new dst."""
    kinds = _FP32, kind_of(src_dtype)
    return kernels().grad_store(*kinds, _ACCUMULATE, num_threads, dst_address, src_address, numel)


def sum_of_squares(address: int, dtype: torch.dtype, numel: int, *, num_threads: int = 1) -> GradSum:
    """The same sums over values that are already there."""
    return kernels().sumsq(kind_of(dtype), address, numel, num_threads)


def launch_sums(grads: Sequence[Tensor]) -> tuple[Tensor, list[slice]]:
    """The sum of squares of each chunk of `grads`, (chunks,) fp64 on their device, and which chunks are each one's.

    `grads` are (numel,) each, contiguous, of one dtype and device; one at least.
    """
    ends = list(itertools.accumulate(-(-grad.numel() // CHUNK) for grad in grads))
    sums = torch.empty(ends[-1], dtype=torch.float64, device=grads[0].device)
    if has_device_update(grads[0]):
        from zero_offload.hardware.kernels.triton_sums import sum_chunks

        sum_chunks(grads, sums)
    else:
        _sum_chunks(grads, sums)
    return sums, [slice(begin, end) for begin, end in itertools.pairwise([0, *ends])]


def total(chunks: Tensor) -> GradSum:
    """The sum of a gradient from those of its chunks, (chunks,) fp64 on the host."""
    # `sum` would add pairs.
    found = float(np.add.accumulate(chunks.numpy())[-1]) if len(chunks) else 0.0
    # Squares of finite numbers do not overflow in double.
    return GradSum(math.nan if math.isnan(found) else found, math.isfinite(found))


def _sum_chunks(grads: Sequence[Tensor], sums: Tensor) -> None:
    """Fill `sums` by torch's operations."""
    scans = may_scan(sums.device)
    # Chunks side by side, each of `width` values. Zeros behind a gradient's values change no bit of its sum.
    longest = max(grad.numel() for grad in grads)
    width = CHUNK if longest > CHUNK else -(-longest // LANES) * LANES
    block = BLOCK_CHUNKS if scans else max(sums.numel(), 1)
    pieces = [piece for grad in grads for piece in grad.split(block * CHUNK) if piece.numel()]
    zeros, done = sums.new_zeros(width, dtype=grads[0].dtype), 0
    while pieces:
        padded, count = [], 0
        while pieces and count + -(-pieces[0].numel() // width) <= block:
            piece = pieces.pop(0)
            count += -(-piece.numel() // width)
            gap = -piece.numel() % width
            padded += [piece, zeros[:gap]] if gap else [piece]
        rows = (padded[0] if len(padded) == 1 else torch.cat(padded)).view(count, width // LANES, LANES)
        lanes = _add_rows(rows, scans=scans)
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        sums[done : done + count] = lanes[:, 0]
        done += count


def _add_rows(values: Tensor, *, scans: bool) -> Tensor:
    """(chunks, LANES) fp64: the squares of the rows of each chunk, added up one after the other."""
    if scans:
        squares = values.double()
        return squares.mul_(squares).cumsum(1)[:, -1]
    lanes = values.new_zeros((len(values), LANES), dtype=torch.float64)
    for row in values.unbind(1):
        wide = row.double()
        lanes.addcmul_(wide, wide)  # squares are exact, so it does not matter whether the addition is fused
    return lanes


def may_scan(device: torch.device) -> bool:
    # With deterministic algorithms alone torch refuses scans of floats on CUDA, whatever they do.
    return not torch.are_deterministic_algorithms_enabled() and scans_in_order(device)


@functools.cache
def scans_in_order(device: torch.device) -> bool:
    """True if a scan over rows, which torch may do in any order, adds one after the other there; tried once."""
    draw = torch.Generator("cpu").manual_seed(0)
    values = host_empty((3, CHUNK // LANES, LANES), torch.float32).uniform_(generator=draw).to(device)
    return torch.equal(_add_rows(values, scans=True), _add_rows(values, scans=False))
