"""CRC-32C of memory: what every block on disk is verified with."""

from __future__ import annotations

import functools

import torch

from zero_offload.base.errors import ConfigError
from zero_offload.base.host import host_zeros
from zero_offload.hardware.kernels.choice import kernels


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
    """What each bit of a seed adds to the checksum of `nbytes` bytes."""
    zeros = host_zeros(nbytes, torch.uint8)
    base = crc32c_of_tensor(zeros)
    return tuple(base ^ crc32c_of_tensor(zeros, seed=1 << bit) for bit in range(32))


def crc32c_of_tensor(tensor: torch.Tensor, *, seed: int = 0) -> int:
    """The checksum of a contiguous CPU tensor's bytes."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ConfigError(f"a checksum needs a contiguous CPU tensor, got strides {tensor.stride()} on {tensor.device}")
    return crc32c(tensor.data_ptr(), tensor.numel() * tensor.element_size(), seed=seed)
