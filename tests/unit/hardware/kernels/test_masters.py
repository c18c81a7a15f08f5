"""Masters joined and split on a device have the bits of the kernels of the host."""

from __future__ import annotations

import pytest
import torch

from zero_offload.hardware.kernels import masters
from zero_offload.hardware.kernels.formats import join_master, split_master

SPECIAL = (0, 1, 0x7F, 0x80, 0xFF7F, 0x7FFF, 0x8000, 0x7F7FFFFF, 0x7F800000, 0x7F80FFFF, 0x7FBFFFFF, 0x7FC00000)


@pytest.mark.parametrize("residual", [torch.int16, torch.int8])
def test_the_bits_of_the_host(residual: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masters, "BLOCK", 1 << 14)
    words = torch.randint(-(2**31), 2**31, (1 << 16,), dtype=torch.int64, generator=torch.Generator().manual_seed(0))
    special = torch.tensor([sign + each for each in SPECIAL for sign in (0, -(2**31))])
    master = torch.cat([words, special]).to(torch.int32).view(torch.float32)
    numel = master.numel()
    half, rest = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=residual)
    other_half, other_rest = torch.empty_like(half), torch.empty_like(rest)
    split_master(master, half, rest)
    masters.split_on_device(master, other_half, other_rest)
    assert torch.equal(half.view(torch.int16), other_half.view(torch.int16))
    assert torch.equal(rest, other_rest)
    joined, other = torch.empty_like(master), torch.empty_like(master)
    join_master(half, rest, joined)
    masters.join_on_device(half, rest, other)
    assert torch.equal(joined.view(torch.int32), other.view(torch.int32))
