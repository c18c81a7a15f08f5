"""Whether tensors have changed: a word for each, taken before and after and compared.

In host memory a CRC-32C. In a device's memory, where nothing computes those, a sum modulo 2^64: the bits of elements,
as integers, times weights that depend on where the element is. Of signs alone, of a scale, of rows in another order it
sees what a sum or a xor of elements would not. It is launched and not waited for; who compares two asks for one
download. No format contains these words.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zero_offload.base.host import host_empty, host_tensor
from zero_offload.hardware.kernels.choice import kernels

ROW = 4096
"""Words that are added up at once; what their sums are is added up in the same way."""
PIECE = 1024 * ROW
"""Words whose products are in memory at once: 32 MiB."""
LEVELS = 4


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """(len(tensors),) int64, where the tensors are: contiguous, of any dtype, all on one device."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return device_fingerprints(tensors)
    crc32c = kernels().crc32c
    return host_tensor([crc32c(0, tensor.data_ptr(), tensor.nbytes) for tensor in tensors], torch.int64)


def device_fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """The same by operations that every device has."""
    return torch.cat([_weighted_sum(_words(tensor)) for tensor in tensors])


def _words(tensor: Tensor) -> Tensor:
    """Its bits as integers of at most 32: in the product with an odd number their highest bit is not the highest."""
    return tensor.reshape(-1).view({1: torch.int8, 2: torch.int16}.get(tensor.itemsize, torch.int32))


def _weighted_sum(words: Tensor) -> Tensor:
    """(1,) int64."""
    for weights in weights_of(words.device):
        words = torch.cat([sums for piece in words.split(PIECE) for sums in row_sums(piece, weights)])
        if words.numel() == 1:
            break
    return words


def row_sums(piece: Tensor, weights: Tensor) -> Iterator[Tensor]:
    """Of its whole rows, and of what is left."""
    whole = piece.numel() // ROW * ROW
    if whole:
        yield (piece[:whole].view(-1, ROW) * weights).sum(1)
    if whole < piece.numel() or whole == 0:
        rest = piece[whole:]
        yield (rest * weights[: rest.numel()]).sum(0, keepdim=True)


@functools.cache
def weights_of(device: torch.device) -> tuple[Tensor, ...]:
    """(ROW,) int64 for each level: odd, so that no bit is lost; at random, so that no pattern of changes adds up to
    nothing; of each level others, so that an element and its mirror image are not weighed alike."""
    draw = torch.Generator("cpu").manual_seed(0)
    drawn = host_empty((LEVELS, ROW), torch.int64).random_(-(1 << 63), (1 << 63) - 1, generator=draw) | 1
    return drawn.to(device).unbind()
