"""Gradients that come down from a device: how much memory they pass through on either side, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE
from zero_offload.base.errors import CapacityError
from zero_offload.base.events import Counters
from zero_offload.base.types import KIB, MIB
from zero_offload.hardware.device import AcceleratorDevice, Handoff
from zero_offload.plan.memory import grad_staging_bytes
from zero_offload.storage.memory import staging
from zero_offload.storage.memory.arena import Arena
from zero_offload.storage.memory.pool import SpanPool
from zero_offload.storage.shards.grad_downloads import GradDownloads

pytestmark = pytest.mark.usefixtures("late")


class Landing:
    """Takes gradients: keeps a copy of each, in the order in which they come."""

    def __init__(self, *room: int) -> None:
        self.device = AcceleratorDevice(TYPE)
        self.arena = Arena(0, pinner=self.device)
        self.downloads = GradDownloads(self.device, self.arena, Counters())
        self.downloads.resize(grad_staging_bytes(room, ()), room)
        self.found: list[tuple[int, list[float]]] = []

    def stage(self, section: int, flat: torch.Tensor) -> None:
        def land(staged: torch.Tensor) -> None:
            self.found.append((section, staged.tolist()))

        self.downloads.make_room(flat.nbytes)
        self.downloads.stage(section, flat, self.device.mark(), land)

    def place(self, target: torch.Tensor, flat: torch.Tensor) -> Handoff:
        return self.downloads.place(target, flat, self.device.mark())


def values(numel: int, dtype: torch.dtype = torch.bfloat16, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + numel).remainder(100).to(dtype).to(TYPE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_section_takes_no_more_staging_than_its_gradients(dtype: torch.dtype) -> None:
    landing, nbytes = Landing(8192), 8192
    landing.stage(0, values(nbytes // dtype.itemsize, dtype))
    assert landing.found == [] and landing.arena.allocated_bytes == nbytes
    landing.downloads.drain()
    assert landing.found == [(0, values(nbytes // dtype.itemsize, dtype).tolist())]


def test_the_oldest_section_makes_room_for_the_next() -> None:
    """The three largest fit at once."""
    sizes = [4096 * (index + 1) for index in range(5)]
    landing = Landing(*sizes)
    for index in reversed(range(5)):
        landing.stage(index, values(sizes[index] // 2))
        assert [number for number, _ in landing.found] == ([4] if index < 2 else [])
    landing.downloads.drain()
    assert [number for number, _ in landing.found] == [4, 3, 2, 1, 0]


def test_what_no_plan_knows_of_has_room_when_it_comes() -> None:
    """A gradient that is wider than its parameter."""
    landing = Landing(4096, 8192)
    landing.stage(0, values(10))
    landing.stage(1, values(20_000, torch.float32))
    landing.stage(0, values(10, first=5))
    landing.downloads.drain()
    assert [number for number, _ in landing.found] == [0, 1, 0]
    assert landing.found[1][1] == values(20_000, torch.float32).tolist()
    assert landing.arena.allocated_bytes == 80 * KIB, "the smaller pool has gone"


def test_what_is_wanted_lands_with_all_that_was_before_it() -> None:
    landing = Landing(*[4096] * 3)
    for section in range(3):
        landing.stage(section, values(16))
    landing.downloads.land(1)
    assert [number for number, _ in landing.found] == [0, 1]


def test_what_finds_no_memory_as_it_lands_lands_later() -> None:
    """It may land after backward, when a norm is asked for: a step without it would be wrong."""
    landing, is_short = Landing(*[4096] * 2), True

    def land(staged: torch.Tensor) -> None:
        if is_short:
            raise CapacityError("no memory")
        landing.found.append((0, staged.tolist()))

    landing.downloads.stage(0, values(16), landing.device.mark(), land)
    landing.stage(1, values(16))
    for _ in range(2):
        with pytest.raises(CapacityError):
            landing.downloads.land(1)
    assert landing.found == []
    is_short = False
    landing.downloads.land(1)
    assert [number for number, _ in landing.found] == [0, 1]


def test_gradients_come_to_their_places_in_one_array() -> None:
    landing = Landing()
    array = landing.arena.array(torch.bfloat16, 1000)
    for begin in (0, 512):
        landing.downloads.make_room(600)
        last = landing.place(array[begin : begin + 300], values(300, first=begin))
    assert array.isnan()[:300].all()
    last.take_on_host()
    for begin in (0, 512):
        assert torch.equal(array[begin : begin + 300], values(300, first=begin).cpu()), "the last comes last"


@pytest.mark.parametrize(("most", "at_once"), [(4096, 1), (8192, 2), (10_000, 2)])
def test_compute_waits_for_the_oldest_and_the_host_for_nothing(most: int, at_once: int) -> None:
    """However far the host is ahead, the device keeps what a lane reads of as much as most sections have."""
    landing = Landing(4096, most, most, 1 << 20)
    array = landing.arena.array(torch.bfloat16, 2048)
    for number in range(20):
        flat = values(2048)
        with device.counting() as counts:
            landing.downloads.make_room(4096)
        assert counts["stream_waits"] == (number >= at_once) and counts["event_syncs"] == 0
        landing.place(array, flat)
    with device.counting() as counts:
        landing.downloads.make_room(2 * most)
    assert counts["stream_waits"] == at_once and counts["event_syncs"] == 0, "what is larger comes alone"


def test_after_a_drop_nothing_is_under_way() -> None:
    landing = Landing(*[4096] * 3)
    array = landing.arena.array(torch.bfloat16, 16)
    for _ in range(2):
        landing.stage(0, values(16))
        landing.place(array, values(16))
    landing.downloads.drop()
    assert landing.found == [] and device.num_queued() == 0
    landing.stage(1, values(6144))  # all of the staging
    landing.downloads.drain()
    assert [number for number, _ in landing.found] == [1]


def test_staging_grows_until_all_fits_that_is_leased_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As sums of micro-batches are, layer after layer."""
    downloads, made = Landing(MIB).downloads, list[int]()

    def noted(arena: Arena, nbytes: int, *what: Any) -> SpanPool:
        made.append(nbytes)
        return SpanPool(arena, nbytes, *what)

    monkeypatch.setattr(staging, "SpanPool", noted)
    for _ in range(4):
        for megabytes in (3, 2, 2):
            downloads.open((megabytes, MIB), torch.uint8)
        downloads.drop_untaken()
    assert made == [3 * MIB, 2 * MIB, 2 * MIB]
