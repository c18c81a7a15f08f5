from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.helpers.stores import close, grads_of, open_store
from zero_offload.base.events import Counters
from zero_offload.base.threads import FirstError, UnitUpdate
from zero_offload.base.types import SECTOR, Tier
from zero_offload.storage.memory.arena import Arena
from zero_offload.storage.shards.grad_store import HostGrads
from zero_offload.storage.shards.ring_grads import LAUNCHED_MAX, GradRing


class Part:
    """Leases on request, and gives back when told."""

    def __init__(self, ring: GradRing, unit: int = 0) -> None:
        self._ring = ring
        self.layout = SimpleNamespace(unit=unit, index=unit)
        self.region = ring.lease(cast(Any, self), SECTOR)

    def release_span(self) -> None:
        if self.region is not None:
            self._ring.release(self.region)
        self.region = None


@pytest.fixture
def ring() -> GradRing:
    """Room for two parts of a sector."""
    ring = GradRing(Arena(0), 2 * SECTOR)
    ring.begin_backward()
    return ring


def launch(ring: GradRing, part: Part) -> UnitUpdate:
    update = UnitUpdate(FirstError(), Counters())
    update.begin()
    ring.passing(update, part.layout.unit)
    return update


def test_a_closed_ring_gives_nothing(ring: GradRing) -> None:
    ring.end_backward()
    assert Part(ring).region is None


def test_what_waits_for_no_update_is_not_waited_for(ring: GradRing) -> None:
    parts = [Part(ring, unit) for unit in range(3)]
    assert [part.region is not None for part in parts] == [True, True, False]


def test_a_full_ring_waits_for_the_oldest_update(ring: GradRing) -> None:
    first, second = Part(ring), Part(ring, 1)
    oldest = launch(ring, first)
    launch(ring, second)
    waiting = threading.Timer(0.05, oldest.complete)
    waiting.start()
    assert Part(ring, 2).region is not None
    waiting.join()
    assert first.region is None and second.region is not None


def test_what_was_used_is_given_back_whichever_came_first(ring: GradRing) -> None:
    first, second = Part(ring), Part(ring, 1)
    updates = [launch(ring, part) for part in (first, second)]
    updates[1].complete()
    ring.collect()
    assert first.region is not None and second.region is None
    updates[0].complete()
    ring.collect()
    assert first.region is None


def test_no_more_updates_than_the_ring_has_room_for() -> None:
    ring = GradRing(Arena(0), 8 * SECTOR)
    ring.begin_backward()
    oldest, *_ = [launch(ring, Part(ring, unit)) for unit in range(LAUNCHED_MAX)]
    waiting = threading.Timer(0.05, oldest.complete)
    waiting.start()
    launch(ring, Part(ring))
    assert oldest.is_done
    ring.end_backward()
    launch(ring, Part(ring))  # a closed ring does not wait: backward is over


@pytest.fixture(params=[Tier.CPU, Tier.NVME])
def shard(request: pytest.FixtureRequest, nvme: Path) -> Iterator[HostGrads]:
    """Of a store with a ring."""
    with open_store(nn.Linear(64, 64), ("cpu", request.param, "cpu"), nvme, dtype=torch.bfloat16) as store:
        layout = store.shards[0].layout
        ring = GradRing(store.arena, 4 * layout.shard_numel)
        ring.begin_backward()
        made = grads_of(store, ring=ring)
        RINGS[made] = ring
        yield made


RINGS: weakref.WeakKeyDictionary[HostGrads, GradRing] = weakref.WeakKeyDictionary()


def leased(shard: HostGrads) -> bool:
    other = cast(Any, SimpleNamespace(layout=SimpleNamespace(unit=1, index=1), release_span=lambda: None))
    whole = RINGS[shard].lease(other, 4 * shard.layout.shard_numel)
    if whole is not None:
        RINGS[shard].release(whole)
    return whole is None


def test_a_shard_leases_whatever_its_tier(shard: HostGrads) -> None:
    shard.writable_array().fill_(1)
    assert leased(shard) and not shard.on_disk
    shard.held = True
    close(shard)
    assert leased(shard) and torch.all(shard.writable_array() == 1)
    shard.held = False
    RINGS[shard].release_unit(shard.layout.unit)
    assert not leased(shard)


def test_what_is_held_moves_to_memory_of_its_own(shard: HostGrads) -> None:
    shard.writable_array().fill_(3)
    shard.held = True
    RINGS[shard].release_unit(shard.layout.unit)
    assert not leased(shard)
    assert shard.on_disk == (shard.tier is Tier.NVME)
    assert torch.all(shard.writable_array() == 3)
    close(shard)


def test_widening_leases_anew(shard: HostGrads) -> None:
    shard.writable_array().fill_(5)
    shard.held = True
    shard.widen()
    assert shard.writable_array().dtype == torch.float32 and torch.all(shard.writable_array() == 5)
    close(shard)


def test_what_is_held_elsewhere_is_added_to_there(shard: HostGrads) -> None:
    ring = RINGS[shard]
    ring.end_backward()
    shard.writable_array().fill_(7)
    shard.held = True
    close(shard)
    ring.begin_backward()
    assert torch.all(shard.writable_array() == 7) and not leased(shard)
    close(shard)
