from __future__ import annotations

import numpy as np
import pytest
import torch

from zero_offload.base.errors import ConfigError
from zero_offload.hardware.kernels.checksums import crc32c_of_tensor, reseeded


def by_definition(data: bytes, seed: int = 0) -> int:
    """CRC-32C one bit at a time."""
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def test_known_values() -> None:
    assert crc32c_of_tensor(tensor_of(b"123456789")) == 0xE3069283
    assert crc32c_of_tensor(tensor_of(bytes(32))) == 0x8A9136AA
    assert crc32c_of_tensor(tensor_of(b"")) == 0


@pytest.mark.parametrize("nbytes", [1, 3, 8, 13, 767, 771, 1537, 12288 + 768 + 5])
def test_equals_the_definition_at_odd_lengths_and_offsets(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes + 3, dtype=np.uint8).tobytes()
    for offset in (0, 1, 3):
        part = data[offset : offset + nbytes]
        assert crc32c_of_tensor(tensor_of(data)[offset : offset + nbytes], seed=99) == by_definition(part, 99)


def test_a_result_continues_as_the_seed_of_the_next_part() -> None:
    data = tensor_of(bytes(range(256)) * 100)
    first = crc32c_of_tensor(data[:9999])
    assert crc32c_of_tensor(data[9999:], seed=first) == crc32c_of_tensor(data)


def test_another_seed_is_another_result() -> None:
    data = tensor_of(bytes(64))
    assert len({crc32c_of_tensor(data, seed=seed) for seed in range(1000)}) == 1000


@pytest.mark.parametrize("nbytes", [1, 4096, 12288, 2**21])
def test_a_checksum_from_another_seed_needs_no_bytes(nbytes: int) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    for seed, new_seed in [(0, 0), (0, 1), (0xFFFFFFFF, 0x80000001), (0x12345678, 0x9ABCDEF0)]:
        crc = crc32c_of_tensor(data, seed=seed)
        assert reseeded(crc, seed, new_seed, nbytes) == crc32c_of_tensor(data, seed=new_seed)
        assert reseeded(crc ^ 4, seed, new_seed, nbytes) == crc32c_of_tensor(data, seed=new_seed) ^ 4


def test_every_flipped_bit_is_another_result() -> None:
    data = tensor_of(bytes(64))
    results = {crc32c_of_tensor(data)}
    for bit in range(64 * 8):
        flipped = data.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        results.add(crc32c_of_tensor(flipped))
    assert len(results) == 64 * 8 + 1


def test_refuses_gaps() -> None:
    with pytest.raises(ConfigError, match="contiguous"):
        crc32c_of_tensor(torch.zeros(8)[::2])
