"""Gradients that come down from a device: how much host memory they pass through, and in which order they land."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.late_device import LateDevice
from zero_offload.memory.arena import Arena
from zero_offload.memory.pages import FRAME
from zero_offload.plan.layout import ALIGN_NUMEL
from zero_offload.runtime.grads.staging import GradStaging


class Landing:
    """Who takes the gradients: keeps a copy of each, and which section has come to rest when."""

    def __init__(self, room: dict[int, int]) -> None:
        self.device = LateDevice()
        self.arena = Arena(0, pinner=self.device)
        self.staging = GradStaging(self.device, self.arena, room, self.land, self.rest)
        self.found: list[Any] = []

    def land(self, grads: Any, index: int, grad: torch.Tensor, adds: bool) -> None:
        self.found.append((grads.layout.index, index, grad.tolist(), adds))

    def rest(self, grads: Any) -> None:
        self.found.append(grads.layout.index)


def section(index: int) -> Any:
    return SimpleNamespace(layout=SimpleNamespace(index=index))


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
    assert landing.found == [] and landing.arena.allocated_bytes == -(-nbytes // FRAME) * FRAME
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
    assert landing.arena.allocated_bytes == FRAME, "the smaller pool has gone"
