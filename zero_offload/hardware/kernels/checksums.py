"""Checksums of memory, and words by which changes of tensors are seen.

Every block on disk is verified with a CRC-32C. A fingerprint is one word for a tensor, taken before and after and
compared. In host memory it is a CRC-32C. On a device nothing computes those. There it is a sum modulo 2^64: the bits of
elements, as integers, times weights that depend on where the element is. Unlike a sum or a xor of elements it changes
with signs, with a scale and with the order of rows. It is launched and not waited for; two are compared by one
download. No format contains fingerprints.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zero_offload.base.errors import ConfigError
from zero_offload.base.host import host_empty, host_zeros
from zero_offload.hardware.kernels.choice import kernels

ROW = 4096
"""Words that are added up at once; what their sums are is added up in the same way."""
PIECE = 1024 * ROW
"""Words whose products are in memory at once: 32 MiB."""
LEVELS = 4


def crc32c(address: int, nbytes: int, *, seed: int = 0) -> int:
    """The checksum of a range of memory. Seed 0 is the standard one; the result continues as a seed."""
    return kernels().crc32c(seed, address, nbytes)


def reseeded(crc: int, seed: int, new_seed: int, nbytes: int) -> int:
    """The checksum that the same `nbytes` bytes have from `new_seed` on, where they have `crc` from `seed` on.

    A CRC is linear: what two seeds make of the same bytes differs by what their difference makes of zeros.
    """
    difference, moved = seed ^ new_seed, 0
    for bit, image in enumerate(_images(nbytes)):
        if difference >> bit & 1:
            moved ^= image
    return crc ^ moved


@functools.lru_cache(maxsize=256)
def _images(nbytes: int) -> tuple[int, ...]:
    """The terms that the bits of a seed add to the checksum of `nbytes` bytes."""
    zeros = host_zeros(nbytes, torch.uint8)
    base = crc32c_of_tensor(zeros)
    return tuple(base ^ crc32c_of_tensor(zeros, seed=1 << bit) for bit in range(32))


def crc32c_of_tensor(tensor: torch.Tensor, *, seed: int = 0) -> int:
    """The checksum of a contiguous CPU tensor's bytes."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ConfigError(f"a checksum needs a contiguous CPU tensor, got strides {tensor.stride()} on {tensor.device}")
    return crc32c(tensor.data_ptr(), tensor.numel() * tensor.element_size(), seed=seed)


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """(len(tensors),) int64, where the tensors are: contiguous, of any dtype, all on one device."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return device_fingerprints(tensors)
    words = kernels().crc32c_each([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def device_fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """`fingerprints` by operations that every device has, (len(tensors),) int64; not the CPU's words."""
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
    """Sums of its whole rows, and of what is left."""
    whole = piece.numel() // ROW * ROW
    if whole:
        yield (piece[:whole].view(-1, ROW) * weights).sum(1)
    if whole < piece.numel() or whole == 0:
        rest = piece[whole:]
        yield (rest * weights[: rest.numel()]).sum(0, keepdim=True)


@functools.cache
def weights_of(device: torch.device) -> tuple[Tensor, ...]:
    """(ROW,) int64 for each level. They are odd, so that no bit is lost, and random, so that no pattern of changes adds
    up to nothing. Levels have different ones, so that an element and its mirror image are not weighed alike.
    """
    draw = torch.Generator("cpu").manual_seed(0)
    drawn = host_empty((LEVELS, ROW), torch.int64).random_(-(1 << 63), (1 << 63) - 1, generator=draw) | 1
    return drawn.to(device).unbind()
