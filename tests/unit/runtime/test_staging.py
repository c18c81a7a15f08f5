"""Gradients that come down from a device: how much host memory they pass through, and in which order they land."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.late_device import LateDevice
from zero_offload.kernels.grads import GradSum, sum_of_squares
from zero_offload.memory.arena import Arena
from zero_offload.plan.layout import ALIGN_NUMEL
from zero_offload.runtime.grads.staging import GradStaging, Room, num_sums
from zero_offload.types import KIB


class Landing:
    """Who takes the gradients: keeps a copy of each, and which section has come to rest when."""

    def __init__(self, room: dict[int, int]) -> None:
        self.device = LateDevice()
        self.arena = Arena(0, pinner=self.device)
        rooms = {index: Room(nbytes, num_sums(nbytes // 2, 2)) for index, nbytes in room.items()}
        self.staging = GradStaging(self.device, self.arena, rooms, self.land, self.rest)
        self.found: list[Any] = []

    def land(self, grads: Any, index: int, grad: torch.Tensor, adds: bool) -> None:
        self.found.append((grads.layout.index, index, grad.tolist(), adds))

    def rest(self, grads: Any) -> None:
        self.found.append(grads.layout.index)


def section(index: int) -> Any:
    return SimpleNamespace(layout=SimpleNamespace(index=index), sums={})


def values(numel: int, dtype: torch.dtype = torch.bfloat16, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + numel).remainder(100).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_section_takes_no_more_than_its_gradients(dtype: torch.dtype) -> None:
    """Of many small parameters, too; all are under way at once."""
    count, numel = 512, ALIGN_NUMEL
    nbytes = count * numel * dtype.itemsize
    landing, first = Landing({0: nbytes}), section(0)
    for index in range(count):
        landing.staging.stage(first, index, values(numel, dtype, index), adds=False)
    assert landing.found == [] and landing.arena.allocated_bytes == nbytes
    landing.staging.drain()
    assert landing.found == [(0, i, values(numel, dtype, i).tolist(), False) for i in range(count)] + [0]


def test_the_oldest_section_makes_room_for_the_next() -> None:
    """The three largest fit at once."""
    sizes = {index: 4096 * (index + 1) for index in range(5)}
    landing = Landing(sizes)
    for index in reversed(range(5)):
        landing.staging.stage(section(index), 0, values(sizes[index] // 2), adds=False)
        assert len(landing.found) == 2 * (index < 2), index
        if index == 1:
            assert landing.found[-1] == 4
    landing.staging.drain()
    assert [each for each in landing.found if isinstance(each, int)] == [4, 3, 2, 1, 0]


def test_what_no_plan_knows_of_has_room_when_it_comes() -> None:
    """A rank's own whole gradient of a section that ranks have cut; one that is wider than its parameter."""
    landing, small, large = Landing({0: 4096, 1: 8192}), section(0), section(1)
    landing.staging.stage(small, 3, values(10), adds=True)
    landing.staging.stage(large, 0, values(20_000, torch.float32), adds=False)
    landing.staging.stage(large, 1, values(7), adds=False)
    landing.staging.stage(small, 4, values(10, first=5), adds=False)
    landing.staging.drain()
    assert [each[:2] for each in landing.found if each not in (0, 1)] == [(0, 3), (1, 0), (1, 1), (0, 4)]
    assert landing.found[2] == (1, 0, values(20_000, torch.float32).tolist(), False)
    assert landing.arena.allocated_bytes == 80 * KIB, "the smaller pool has gone"


def place(landing: Landing, grads: Any, index: int, grad: torch.Tensor) -> torch.Tensor:
    """Returns where it rests."""
    target = landing.arena.array(grad.dtype, grad.numel())
    landing.staging.place(grads, target, grad, {index: slice(None)})
    return target


def sum_of(grad: torch.Tensor) -> GradSum:
    return sum_of_squares(grad.data_ptr(), grad.dtype, grad.numel(), num_threads=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_is_placed_lands_with_the_sums_of_the_host_kernel(dtype: torch.dtype) -> None:
    landing, first = Landing({0: 2 * 100_000}), section(0)
    grads = {1: torch.randn(70_001).to(dtype), 0: torch.randn(257).to(dtype)}
    targets = {index: place(landing, first, index, grad) for index, grad in grads.items()}
    assert first.sums == {}
    landing.staging.drain()
    assert landing.found == [0] and first.sums == {index: sum_of(grad) for index, grad in grads.items()}
    assert all(torch.equal(targets[index], grad) for index, grad in grads.items())


def test_parts_of_one_download_have_sums_of_their_own() -> None:
    """A whole shard, of which some parameters may have no part."""
    landing, first = Landing({0: 2 * 100_000}), section(0)
    shard, target = torch.randn(60_000), landing.arena.array(torch.float32, 60_000)
    parts = {0: slice(0, 0), 1: slice(0, 40_000), 2: slice(40_960, 60_000)}
    landing.staging.place(first, target, shard, parts)
    landing.staging.place(first, target, shard, {3: slice(5, 5)})
    landing.staging.drain()
    assert first.sums == {i: sum_of(shard[part]) for i, part in parts.items()} | {3: GradSum(0.0, True)}
    assert torch.equal(target, shard)


def test_infinite_and_missing_numbers_are_seen_in_what_is_placed() -> None:
    landing, first = Landing({0: 2 * 100_000}), section(0)
    for index, value in enumerate((math.inf, math.nan)):
        grad = torch.ones(20_000)
        grad[17_000] = value
        place(landing, first, index, grad)
    landing.staging.drain()
    assert [each.finite for each in first.sums.values()] == [False, False]
    assert first.sums[0].sumsq == math.inf and math.isnan(first.sums[1].sumsq)


def test_few_sections_at_a_time_wait_for_their_download() -> None:
    """The device has to keep what is on its way."""
    landing = Landing(dict.fromkeys(range(8), 2 << 20))
    for index in range(8):
        place(landing, section(index), 0, values(1 << 20))
        assert len(landing.found) == max(index - 2, 0)
    landing.staging.drain()
    assert landing.found == list(range(8))


def test_more_gradients_than_sums_have_room_for_come_in_turns() -> None:
    """As of a parameter whose gradient is taken away in the middle of a backward, and made anew."""
    landing, first = Landing({0: 2 * 16384}), section(0)
    grads = [values(16384, first=seed) for seed in range(3000)]
    target = landing.arena.array(torch.bfloat16, 16384)
    for grad in grads:
        landing.staging.place(first, target, grad, {0: slice(None)})
    landing.staging.drain()
    assert first.sums == {0: sum_of(grads[-1])} and torch.equal(target, grads[-1])


def test_what_is_placed_is_there_before_something_of_the_section_lands() -> None:
    """Whatever comes first: what lands may move all of the section to wider memory."""
    landing, first = Landing({0: 2 * 100_000, 1: 2 * 100_000}), section(0)
    landing.staging.stage(first, 5, values(100_000), adds=True)
    landing.staging.stage(first, 6, values(100_000), adds=True)  # a batch of its own: the first one is full
    target = place(landing, first, 7, values(1000))
    seen: list[Any] = []
    landing.land = lambda grads, index, grad, adds: seen.append((index, target.tolist()))  # type: ignore[method-assign]
    landing.staging._land = lambda: landing.land  # type: ignore[assignment]
    landing.staging.drain()
    assert seen == [(index, values(1000).tolist()) for index in (5, 6)]
