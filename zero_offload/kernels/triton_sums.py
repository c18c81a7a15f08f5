"""Sums of squares of gradients on a GPU, compiled by Triton: chunks of [Note: the tree] in csrc/reduce/reduce.h.

Imported only when `choice.has_device_update` says that Triton is here. One pass over the gradient; what it leaves is
one number per chunk, which `device_grads.read_sums` adds up. Nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_offload.kernels import device_grads

PROGRAM_CHUNKS = 2
"""Of a program: a lane for each of the 32 threads of its one warp."""
ROWS_AT_ONCE = 32
"""Rows that are loaded before the first is added: the sums of a lane wait for each other, the loads do not."""
OPTIONS = {"enable_fp_fusion": False, "num_warps": 1}

_CHUNK, _LANES = tl.constexpr(device_grads.CHUNK), tl.constexpr(device_grads.LANES)


def sum_chunks(grad: Tensor, sums: Tensor) -> None:
    """Fill `sums`, (chunks,) fp64; `grad` is (numel,), contiguous, not empty, on the same device."""
    num_chunks = sums.numel()
    is_bf16 = grad.dtype is torch.bfloat16
    # Triton launches on the current device, whatever device the tensors are on.
    with torch.accelerator.device_index(grad.device.index):
        _sum_chunks[(triton.cdiv(num_chunks, PROGRAM_CHUNKS),)](
            grad.view(torch.int16) if is_bf16 else grad,
            sums,
            grad.numel(),
            num_chunks,
            IS_BF16=is_bf16,
            CHUNKS=PROGRAM_CHUNKS,
            ROWS=ROWS_AT_ONCE,
            **OPTIONS,
        )


@triton.jit(do_not_specialize=["numel", "num_chunks"])
def _sum_chunks(
    values: tl.tensor,
    sums: tl.tensor,
    numel: tl.tensor,
    num_chunks: tl.tensor,
    IS_BF16: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """`CHUNKS` chunks, each in `_LANES` lanes; `values` points to the bits of bf16 numbers if IS_BF16."""
    chunk = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    begin = chunk[:, None] * _CHUNK + tl.arange(0, _LANES)[None, :]
    end = tl.minimum(chunk[:, None] * _CHUNK + _CHUNK, numel)
    # Of the first chunk, which is the longest.
    count = tl.minimum(numel - tl.program_id(0).to(tl.int64) * CHUNKS * _CHUNK, _CHUNK)
    lanes = tl.full([CHUNKS, _LANES], 0.0, dtype=tl.float64)
    for first in range(0, (count + _LANES * ROWS - 1) // (_LANES * ROWS)):
        for row in tl.static_range(ROWS):
            i = begin + (first * ROWS + row) * _LANES
            x = tl.load(values + i, mask=i < end, other=0)
            if IS_BF16:
                x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
            x = x.to(tl.float32).to(tl.float64)
            lanes += x * x
    eight = _join(lanes, CHUNKS, 8)
    four = _join(eight, CHUNKS, 4)
    two = _join(four, CHUNKS, 2)
    tl.store(sums + chunk, tl.reshape(_join(two, CHUNKS, 1), (CHUNKS,)), mask=chunk < num_chunks)


@triton.jit
def _join(lanes: tl.tensor, CHUNKS: tl.constexpr, APART: tl.constexpr) -> tl.tensor:
    """(CHUNKS, APART): each lane of (CHUNKS, 2 * APART) plus the one that is so far apart."""
    low, high = tl.split(tl.permute(tl.reshape(lanes, (CHUNKS, 2, APART)), (0, 2, 1)))
    return low + high
