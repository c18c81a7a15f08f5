"""Frames of gradients on their way to drives: of the units' own, in backward only."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import zero_offload as zo
from tests.helpers.models import WIDE, Block, TinyLM, tokens_of
from zero_offload.api import runtime_of
from zero_offload.memory.arena import Arena, MovableBuffer
from zero_offload.memory.pages import FRAME
from zero_offload.memory.resizable import FrameBudget
from zero_offload.runtime.claims import Claims


def _claim(arena: Arena, claims: Claims, *nums_frames: int) -> None:
    """All at once, and given back."""
    buffers = [MovableBuffer(arena, count * FRAME, claims=True) for count in nums_frames]
    for buffer in buffers:
        assert buffer.attach()
        claims.note()
    for buffer in buffers:
        buffer.detach()


def test_as_many_as_were_claimed_at_once_are_kept_in_backward_only() -> None:
    arena = Arena(10, 20)
    claims = Claims(arena, arena)
    claims.release()
    claims.keep()
    assert (arena.free_frames, arena.kept_frames) == (10, 0)
    _claim(arena, claims, 2, 1)
    _claim(arena, claims, 1)
    assert (arena.free_frames, arena.kept_frames) == (10, 0)
    for _ in range(2):
        claims.keep()
        assert (arena.free_frames, arena.kept_frames, arena.frame_limit) == (7, 3, 10)
        claims.release()
        assert (arena.free_frames, arena.kept_frames) == (10, 0)


def test_more_than_half_comes_on_top_once() -> None:
    arena = Arena(4, 10)
    claims = Claims(arena, arena)
    _claim(arena, claims, 2, 1)
    for _ in range(3):
        claims.keep()
        assert (arena.free_frames, arena.kept_frames, arena.frame_limit) == (4, 3, 7)
        claims.release()
        assert arena.free_frames == 7


def test_a_budget_is_kept() -> None:
    """Then units that are fetched ahead have less."""
    arena = Arena(4, 5)
    claims = Claims(arena, arena)
    _claim(arena, claims, 3)
    claims.keep()
    assert (arena.free_frames, arena.kept_frames, arena.frame_limit) == (1, 3, 4)


@pytest.mark.parametrize("units", [FrameBudget(4, 4), None])
def test_frames_that_are_kept_at_all_times_or_elsewhere_stay_so(units: FrameBudget | None) -> None:
    arena = Arena(4, 8, num_kept=2 if units is None else 0)
    before = arena.kept_frames
    claims = Claims(arena, units or arena)
    _claim(arena, claims, 2)
    claims.keep()
    assert (arena.kept_frames, arena.frame_limit) == (before, 4)
    claims.release()
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
        for step in range(4):
            model(tokens_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        frames[grads] = runtime_of(model).store.arena.frame_bytes // FRAME
        read[grads] = zo.stats(model).read_bytes["nvme"]
        zo.close(model)
    assert frames["nvme"] == frames["cpu"]
    numel, block_numel = (sum(p.numel() for p in part.parameters()) for part in (_LargeEmbedding(), Block(WIDE)))
    # What the update delivers before its use is read by nobody, and one block more or less is.
    assert abs(read["nvme"] - read["cpu"] - 4 * numel) <= 2 * 4 * block_numel
