"""Sums of squares of gradients on a GPU, compiled by Triton: chunks of [Note: the tree] in csrc/reduce/reduce.h.

Imported only when `choice.has_device_update` says that Triton is here. One pass over all gradients of a section; it
leaves one number per chunk, and `grads.total` adds these up. Nothing waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_offload.base.host import host_tensor
from zero_offload.hardware.kernels.arguments import CHUNK, LANES

PROGRAM_CHUNKS = 2
"""Chunks of a program: a lane for each of the 32 threads of its one warp."""
ROWS_AT_ONCE = 32
"""Rows that are loaded before the first is added: the sums of a lane wait for each other, the loads do not."""
OPTIONS = {"enable_fp_fusion": False, "num_warps": 1}

_CHUNK, _LANES = tl.constexpr(CHUNK), tl.constexpr(LANES)


def sum_chunks(grads: Sequence[Tensor], sums: Tensor) -> None:
    """Fill `sums`, (chunks,) fp64, from `grads`, as `grads.launch_sums` has them; a launch for each memory that
    they lie in."""
    done, groups = 0, dict[int, list[tuple[int, Tensor]]]()
    for grad in grads:
        if grad.numel():  # the part of a parameter that another rank has whole: its address is 0
            groups.setdefault(grad.untyped_storage().data_ptr(), []).append((done, grad))
        done += triton.cdiv(grad.numel(), CHUNK)
    for group in groups.values():
        _, first = min(group, key=lambda each: each[1].storage_offset())
        origin = first.storage_offset()
        places = tuple((at, grad.storage_offset() - origin, grad.numel()) for at, grad in group)
        chunks = _chunks(places, sums.device)
        is_bf16 = first.dtype is torch.bfloat16
        # Triton launches on the current device, whatever device the tensors are on.
        with torch.accelerator.device_index(first.device.index):
            sum_chunks_kernel[(triton.cdiv(len(chunks), PROGRAM_CHUNKS),)](
                first.view(torch.int16) if is_bf16 else first,
                chunks,
                sums,
                len(chunks),
                IS_BF16=is_bf16,
                CHUNKS=PROGRAM_CHUNKS,
                ROWS=ROWS_AT_ONCE,
                **OPTIONS,
            )


@functools.lru_cache(maxsize=1024)
def _chunks(places: tuple[tuple[int, int, int], ...], device: torch.device) -> Tensor:
    """(chunks, 3) int64 on the device: where a chunk begins and ends, and where its sum goes. Of gradients of so many
    elements that begin there and have sums from there on. A section's are the same in each step."""
    rows = [
        (begin + first, begin + min(first + CHUNK, numel), at + number)
        for at, begin, numel in places
        for number, first in enumerate(range(0, numel, CHUNK))
    ]
    return host_tensor(rows, torch.int64).view(-1, 3).to(device, non_blocking=True)


@triton.jit(do_not_specialize=["num_chunks"])
def sum_chunks_kernel(
    values: tl.tensor,
    chunks: tl.tensor,
    sums: tl.tensor,
    num_chunks: tl.tensor,
    IS_BF16: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """`CHUNKS` chunks, each in `_LANES` lanes; `values` points to the bits of bf16 numbers if IS_BF16."""
    chunk = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    here = chunk < num_chunks
    first = tl.load(chunks + chunk * 3, mask=here, other=0)
    last = tl.load(chunks + chunk * 3 + 1, mask=here, other=0)
    begin = first[:, None] + tl.arange(0, _LANES)[None, :]
    end = last[:, None]
    count = tl.program_id(0).to(tl.int64) * 0
    for number in tl.static_range(CHUNKS):
        at = (tl.program_id(0).to(tl.int64) * CHUNKS + number) * 3
        is_one = at < num_chunks * 3
        size = tl.load(chunks + at + 1, mask=is_one, other=0) - tl.load(chunks + at, mask=is_one, other=0)
        count = tl.maximum(count, size)
    lanes = tl.full([CHUNKS, _LANES], 0.0, dtype=tl.float64)
    for block in range(0, (count + _LANES * ROWS - 1) // (_LANES * ROWS)):
        for row in tl.static_range(ROWS):
            i = begin + (block * ROWS + row) * _LANES
            x = tl.load(values + i, mask=i < end, other=0)
            if IS_BF16:
                x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
            x = x.to(tl.float32).to(tl.float64)
            lanes += x * x
    eight = _join(lanes, CHUNKS, 8)
    four = _join(eight, CHUNKS, 4)
    two = _join(four, CHUNKS, 2)
    place = tl.load(chunks + chunk * 3 + 2, mask=here, other=0)
    tl.store(sums + place, tl.reshape(_join(two, CHUNKS, 1), (CHUNKS,)), mask=here)


@triton.jit
def _join(lanes: tl.tensor, CHUNKS: tl.constexpr, APART: tl.constexpr) -> tl.tensor:
    """(CHUNKS, APART): each lane of (CHUNKS, 2 * APART) plus the lane that is so far apart."""
    low, high = tl.split(tl.permute(tl.reshape(lanes, (CHUNKS, 2, APART)), (0, 2, 1)))
    return low + high
