"""Frames that units and gradients on their way to drives take in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

import zero_offload as zo
from tests.helpers.models import WIDE, Block, TinyLM, tokens_of
from zero_offload.base.events import Counters
from zero_offload.model.api import runtime_of
from zero_offload.runtime.held_views import HeldViews
from zero_offload.runtime.prefetcher import Evictor, FetchSchedule, MemoryPool
from zero_offload.storage.memory.arena import FRAME, Arena, MovableBuffer
from zero_offload.storage.memory.resizable import FrameAllocator, FrameBudget
from zero_offload.storage.shards.drive_grads import DriveRoom


def pool_of(arena: Arena, budget: FrameAllocator, drive_room: DriveRoom | None = None) -> MemoryPool:
    """Without units: none moves, so nothing that moves them is asked."""
    held_views, nothing = HeldViews([], 1), cast(Any, None)
    evictor = Evictor([], FetchSchedule(), held_views, nothing, None, None, 1)
    return MemoryPool(arena, budget, [], evictor, held_views, drive_room or DriveRoom(Counters(), None))


def take(arena: Arena, pool: MemoryPool, *nums_frames: int) -> None:
    """For gradients, all at once, and given back."""
    buffers = [MovableBuffer(arena, count * FRAME, claims=True) for count in nums_frames]
    for buffer in buffers:
        pool.attach(buffer)
    for buffer in buffers:
        buffer.detach()


def test_what_gives_memory_back_is_asked_before_the_limit_rises() -> None:
    arena = Arena(4, 6)
    held = MovableBuffer(arena, 3 * FRAME)
    assert held.attach()

    class Leaving(DriveRoom):
        def detach_pages(self) -> bool:
            gives = held.attached
            if gives:
                held.detach()
            return gives

    pool = pool_of(arena, arena, Leaving(Counters(), None))
    pool.reserve(2, "blocks.1")
    assert not held.attached and arena.frame_limit == 4
    pool.reserve(6, "blocks.1")
    assert arena.frame_limit == 6
    with pytest.raises(zo.CapacityError, match=r"blocks\.1 needs 14 MiB .*; of 12 MiB only 12 MiB are free"):
        pool.reserve(7, "blocks.1")


def test_as_many_as_gradients_had_at_once_are_kept_in_backward_only() -> None:
    arena = Arena(10, 20)
    pool = pool_of(arena, arena)
    pool.end_backward()
    pool.begin_backward()
    assert (arena.free_frames, arena.kept_frames) == (10, 0)
    take(arena, pool, 2, 1)
    take(arena, pool, 1)
    assert (arena.free_frames, arena.kept_frames) == (10, 0)
    for _ in range(2):
        pool.begin_backward()
        assert (arena.free_frames, arena.kept_frames, arena.frame_limit) == (7, 3, 10)
        pool.end_backward()
        assert (arena.free_frames, arena.kept_frames) == (10, 0)


def test_more_than_half_comes_on_top_once() -> None:
    arena = Arena(4, 10)
    pool = pool_of(arena, arena)
    take(arena, pool, 2, 1)
    for _ in range(3):
        pool.begin_backward()
        assert (arena.free_frames, arena.kept_frames, arena.frame_limit) == (4, 3, 7)
        pool.end_backward()
        assert arena.free_frames == 7


def test_a_budget_is_kept() -> None:
    """Then units that are fetched ahead have less."""
    arena = Arena(4, 5)
    pool = pool_of(arena, arena)
    take(arena, pool, 3)
    pool.begin_backward()
    assert (arena.free_frames, arena.kept_frames, arena.frame_limit) == (1, 3, 4)


@pytest.mark.parametrize("units", [FrameBudget(4, 4), None])
def test_frames_that_are_kept_at_all_times_or_elsewhere_stay_so(units: FrameBudget | None) -> None:
    arena = Arena(4, 8, num_kept=2 if units is None else 0)
    before = arena.kept_frames
    pool = pool_of(arena, units or arena)
    take(arena, pool, 2)
    pool.begin_backward()
    assert (arena.kept_frames, arena.frame_limit) == (before, 4)
    pool.end_backward()
    assert (arena.kept_frames, arena.frame_limit) == (before, 4)


class _LargeEmbedding(TinyLM):
    """Of 25 frames; its blocks have two."""

    def __init__(self) -> None:
        super().__init__(WIDE, 8)
        self.embedding = nn.Embedding(40_000, WIDE)
        self.head.weight = self.embedding.weight


def test_gradients_to_drives_cost_units_neither_memory_nor_reads(nvme: Path) -> None:
    """An embedding's frames serve gradients while blocks are in backward, and are there again for its new values."""
    frames, read = {}, {}
    for grads in ("cpu", "nvme"):
        config = zo.OffloadConfig(
            params="nvme",
            optimizer="nvme",
            grads=grads,
            nvme=nvme / grads,
            precision="fp32",
            durability="scratch",
            overlap="none",
        )
        model = zo.offload(_LargeEmbedding(), config)
        optimizer = zo.AdamW(model.parameters())
        for step in range(3):
            model(tokens_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        frames[grads] = runtime_of(model).store.arena.frame_bytes // FRAME
        read[grads] = zo.stats(model).read_bytes["nvme"]
        zo.close(model)
    assert frames["nvme"] == frames["cpu"]
    numel, block_numel = (sum(p.numel() for p in part.parameters()) for part in (_LargeEmbedding(), Block(WIDE)))
    # Values that the update delivers before their use are not read again; the reads may differ by one block.
    assert abs(read["nvme"] - read["cpu"] - 4 * numel) <= 2 * 4 * block_numel
