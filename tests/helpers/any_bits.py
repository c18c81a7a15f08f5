"""Arrays of any bits for the kernels, and segments over them."""

from __future__ import annotations

import numpy as np
import torch

from zero_offload.hardware.kernels.arguments import Segment

SPECIALS = [
    *[0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000],
    *[0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x3F808000, 0x3F818000],
    *[0xBF80FFFF, 0x7F7F8000, 0x33D6BF95, 0x0DA24260],
]


def floats(numel: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """(numel,) fp32: half normal, half special values, so that they meet; at an address off any vector's."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(numel) * scale).astype(np.float32)
    specials = rng.choice(np.array(SPECIALS, dtype=np.uint32).view(np.float32), numel)
    values = np.where(rng.random(numel) < 0.5, specials, values)
    padded = torch.zeros(numel + 1)
    padded[1:] = torch.from_numpy(values)
    return padded[1:]


def halves(numel: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """(numel,) of 16 bits, at an odd multiple of two bytes; any bit pattern may occur."""
    rng = np.random.default_rng(seed)
    padded = np.zeros(numel + 1, dtype=np.int16)
    padded[1:] = rng.integers(-(1 << 15), 1 << 15, numel)
    return torch.from_numpy(padded)[1:].view(dtype)


def codes(numel: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """(numel,) of 8 bits, at an odd address."""
    padded = np.random.default_rng(seed).integers(0, 256, numel + 1, dtype=np.uint8)
    return torch.from_numpy(padded)[1:].view(dtype)


def image(tensors: list[torch.Tensor]) -> list[bytes]:
    """The bits of all."""
    return [tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors]


def random_segments(numel: int, seed: int, grain: int = 1) -> list[Segment]:
    """Sorted segments with gaps, some of them empty, each with other hyperparameters. Each begins at a multiple of
    `grain`, and none begins in the rest of another's last.
    """
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, numel + 1, 2 * 9))
    pairs, free = [], 0
    for begin, end in zip(cuts[::2].tolist(), cuts[1::2].tolist(), strict=True):
        begin = max(free, begin - begin % grain)
        if begin <= end:
            pairs.append((begin, end))
            free = -(-end // grain) * grain
    return [
        Segment(
            *(begin, end),
            lr=float(rng.choice([0.0, 1e-3, 0.1])),
            beta1=float(rng.choice([0.0, 0.9])),
            beta2=float(rng.choice([0.95, 0.999])),
            eps=float(rng.choice([0.0, 1e-8])),
            weight_decay=float(rng.choice([0.0, 0.1])),
            grad_scale=float(rng.choice([1.0, 0.37])),
            step=int(rng.integers(1, 2000)),
        )
        for begin, end in pairs
    ]
