from __future__ import annotations

import random
from typing import Any

from zero_offload.base.types import MIB, SECTOR
from zero_offload.storage.memory.arena import Arena, Region
from zero_offload.storage.memory.staging import Staging


class FakeCopy:
    """A copy on a device, which is over when it is waited for."""

    def __init__(self) -> None:
        self.is_done = False

    def done(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


def copies(count: int) -> Any:
    return [FakeCopy() for _ in range(count)]


def test_a_part_that_a_copy_reads_is_not_leased_again() -> None:
    staging, reading = Staging(Arena(0)), copies(2)
    staging.widen(MIB)
    part = staging.lease(MIB)
    staging.release(part, reading)
    reading[0].is_done = True
    assert not staging.fits(SECTOR), "the other copy reads it"
    reading[1].is_done = True
    assert staging.fits(MIB) and staging.lease(MIB).address == part.address


def test_what_came_back_first_is_waited_for() -> None:
    staging, reading = Staging(Arena(0)), copies(3)
    staging.widen(3 * MIB)
    for copy in reading:
        staging.release(staging.lease(MIB), [copy])
    assert staging.free_oldest() and [each.is_done for each in reading] == [True, False, False]
    assert staging.fits(MIB) and not staging.fits(2 * MIB)
    assert staging.free_oldest() and staging.free_oldest() and not staging.free_oldest()
    assert staging.fits(3 * MIB)


def test_memory_is_the_most_that_was_leased_at_once() -> None:
    arena = Arena(0)
    staging = Staging(arena)
    for size in (3, 2, 4, 4):
        parts = [staging.lease(size * MIB) for _ in range(2)]
        for part in parts:
            staging.release(part)
        del parts, part
    assert arena.allocated_bytes == 2 * 4 * MIB


def test_small_parts_leave_large_slabs_to_large_ones() -> None:
    arena = Arena(0)
    staging = Staging(arena)
    first = [staging.lease(size * MIB) for size in (4, 1)]
    for part in first:
        staging.release(part)
    again = [staging.lease(size * MIB) for size in (1, 4)]
    assert [part.address for part in again] == [part.address for part in reversed(first)]
    assert arena.allocated_bytes == 5 * MIB


def test_slabs_have_the_least_size_and_are_widened_only_where_nothing_is_leased() -> None:
    arena = Arena(0)
    staging = Staging(arena, slab_bytes=4 * MIB)
    assert staging.part_max_bytes == 0
    parts = [staging.lease(MIB)]
    assert staging.part_max_bytes == arena.allocated_bytes == 4 * MIB
    staging.widen(8 * MIB)
    parts.append(staging.lease(7 * MIB))
    assert arena.allocated_bytes == 12 * MIB, "a part of the first one is leased"
    while parts:
        staging.release(parts.pop())
    staging.widen(2 * MIB)
    assert staging.part_max_bytes == 2 * MIB and arena.allocated_bytes == 0


def test_parts_never_overlap() -> None:
    rng, staging, leased = random.Random(0), Staging(Arena(0), slab_bytes=16 * SECTOR), list[Region]()
    for _ in range(1000):
        if leased and rng.random() < 0.5:
            staging.release(leased.pop(rng.randrange(len(leased))))
        else:
            part = staging.lease(rng.randint(0, 9 * SECTOR))
            for other in leased:
                assert part.address + part.nbytes <= other.address or other.address + other.nbytes <= part.address
            leased.append(part)
