from __future__ import annotations

import random

import pytest
import torch

from zero_offload.base.types import MIB, SECTOR
from zero_offload.storage.memory.arena import Arena
from zero_offload.storage.memory.pool import SpanPool


def test_leases_never_overlap_and_all_comes_back() -> None:
    """Against a list of what is leased, in a drawn order."""
    rng, arena = random.Random(0), Arena(0)
    pool = SpanPool(arena, 64 * SECTOR)
    leased = []
    for _ in range(2000):
        nbytes = rng.randint(1, 9 * SECTOR)
        if leased and (rng.random() < 0.5 or not pool.fits(nbytes)):
            pool.release(leased.pop(rng.randrange(len(leased))))
        elif pool.fits(nbytes):
            region = pool.lease(nbytes)
            assert region.address % SECTOR == 0 and nbytes <= region.nbytes < nbytes + SECTOR
            for other in leased:
                assert region.address + region.nbytes <= other.address or other.address + other.nbytes <= region.address
            leased.append(region)
    for region in leased:
        pool.release(region)
    assert pool.fits(64 * SECTOR) and not pool.fits(64 * SECTOR + 1)


def test_memory_is_taken_once_and_only_when_needed() -> None:
    arena = Arena(0)
    pool = SpanPool(arena, 4 * MIB)
    assert pool.fits(4 * MIB) and arena.allocated_bytes == 0
    first = pool.lease(3 * MIB)
    second = pool.lease(MIB)
    assert arena.allocated_bytes == 4 * MIB and not pool.fits(1)
    first.tensor(dtype=torch.uint8, numel=3 * MIB).fill_(1)
    second.tensor(dtype=torch.uint8, numel=MIB).fill_(2)
    assert first.tensor(torch.uint8, 1, 3 * MIB - 1).item() == 1
    with pytest.raises(ValueError, match="requested"):
        second.tensor(torch.uint8, MIB + 1)


def test_a_large_lease_beside_small_ones_wastes_nothing() -> None:
    """An embedding of 400 units of memory beside blocks of 50: room for the three largest is 500, not 1200."""
    pool = SpanPool(Arena(0), (400 + 50 + 50) * SECTOR)
    leases = [pool.lease(size * SECTOR) for size in (50, 400, 50)]
    assert not pool.fits(1)
    pool.release(leases[0])
    assert pool.fits(50 * SECTOR) and not pool.fits(51 * SECTOR)


def test_a_lease_comes_back_once_and_whole() -> None:
    pool = SpanPool(Arena(0), 8 * SECTOR)
    first, second = pool.lease(2 * SECTOR), pool.lease(2 * SECTOR)
    pool.release(first)
    for wrong in (first, second.part(0, 100), SpanPool(Arena(0), SECTOR).lease(1)):
        with pytest.raises(AssertionError, match="comes back|less comes back"):
            pool.release(wrong)
    pool.release(second)
    assert pool.fits(8 * SECTOR)
