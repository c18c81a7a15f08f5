from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers.stores import fill, open_store
from zero_offload.base.errors import IntegrityError
from zero_offload.base.types import Tier
from zero_offload.storage.files.engine import Urgency
from zero_offload.storage.memory.arena import Arena
from zero_offload.storage.shards.shard import Component, Shard
from zero_offload.storage.shards.store import ShardStore

PLACEMENTS = list(itertools.product(["cpu", "nvme"], ["cpu"], ["cpu", "nvme"]))
LARGE = lambda: nn.Linear(1100, 1100)  # noqa: E731 - two chunks


def fetched(store: ShardStore, shard: Shard) -> torch.Tensor:
    """The values as forward gets them."""
    out = Arena(0).allocate(shard.layout.shard_nbytes).tensor(shard.layout.dtype, shard.layout.shard_numel)
    for transfer in store.launch_fetch(shard, out.data_ptr(), Urgency.URGENT):
        transfer.wait()
    return out


def update(store: ShardStore, shard: Shard, add: int) -> None:
    """Add a number to every component, chunk by chunk, as the optimizer does."""
    staging = Arena(0).allocate(store.state_staging_bytes)
    for row in range(len(shard.layout.chunks())):
        chunk = store.open_chunks(shard, range(row, row + 1), staging.address)
        chunk.wait()
        for component in shard.components:
            view = view_of(store, shard, chunk.addresses[component], component, chunk.end - chunk.begin, staging)
            view += add
        for write in store.close_chunks(chunk):
            write.wait()
    store.finish_update(shard)


def snapshot(store: ShardStore) -> int:
    """Make the states a generation; the slot of the first shard in it."""
    found = store.snapshots.take()
    store.snapshots.write(found)
    store.mark_committed(found.slots)
    store.snapshots.end()
    return found.slots[0]


def view_of(store, shard, address, component, numel, staging):  # type: ignore[no-untyped-def]
    if component in shard.memory:
        array = shard.memory[component]
        begin = (address - array.data_ptr()) // array.itemsize
        return array[begin : begin + numel]
    dtype = store.read_component(shard, component).dtype
    return staging.tensor(dtype, numel, address - staging.address)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tiers", PLACEMENTS, ids=lambda tiers: "-".join(tiers))
def test_what_is_written_is_read_back(tiers: tuple[str, str, str], dtype: torch.dtype, nvme: Path) -> None:
    with open_store(LARGE(), tiers, nvme, dtype=dtype) as store:
        (shard,) = store.shards
        for seed in range(3):
            values = fill(store, shard, seed)
            assert set(values) == set(shard.components)
            for component, expected in values.items():
                assert torch.equal(store.read_component(shard, component), expected)
            assert torch.equal(fetched(store, shard), values[Component.VALUE])


def test_values_in_memory_count_where_they_are_copied(nvme: Path) -> None:
    with open_store(LARGE(), ("cpu", "cpu", "cpu"), nvme) as store:
        (shard,) = store.shards
        fill(store, shard, 0)
        value = store.value_in_memory(shard)
        assert value is not None
        before = store.counters.snapshot()
        store.launch_fetch(shard, value.data_ptr(), Urgency.URGENT)
        assert store.counters.snapshot() == before, "they are used in place"
        fetched(store, shard)
        assert store.counters.snapshot()["read.cpu"] - before.get("read.cpu", 0) == shard.layout.shard_nbytes


@pytest.mark.parametrize("tiers", PLACEMENTS, ids=lambda tiers: "-".join(tiers))
def test_chunks_update_what_rests_anywhere(tiers: tuple[str, str, str], nvme: Path) -> None:
    with open_store(LARGE(), tiers, nvme, dtype=torch.float32) as store:
        (shard,) = store.shards
        values = fill(store, shard, 0)
        for _ in range(3):
            update(store, shard, 5)
        for component, expected in values.items():
            assert torch.equal(store.read_component(shard, component), expected + 15)
        assert torch.equal(fetched(store, shard), values[Component.VALUE] + 15)


@pytest.mark.parametrize("tiers", PLACEMENTS, ids=lambda tiers: "-".join(tiers))
def test_a_committed_slot_is_never_written(tiers: tuple[str, str, str], nvme: Path) -> None:
    with open_store(nn.Linear(64, 64), tiers, nvme, dtype=torch.float32) as store:
        (shard,) = store.shards
        values = fill(store, shard, 0)
        committed = snapshot(store)
        for _ in range(3):
            update(store, shard, 1)
            assert shard.writable_slot() != committed
        store.load_memory(shard, committed)
        shard.current = committed
        for component, expected in values.items():
            assert torch.equal(store.read_component(shard, component), expected)
        assert torch.equal(fetched(store, shard), values[Component.VALUE])


def test_slots_alternate_with_commits(nvme: Path) -> None:
    with open_store(nn.Linear(64, 64), ("nvme", "cpu", "nvme"), nvme) as store:
        (shard,) = store.shards
        fill(store, shard, 0)
        slots = []
        for _ in range(4):
            snapshot(store)
            update(store, shard, 1)
            slots.append(shard.current)
        assert slots == [1, 0, 1, 0]


def test_unchanged_memory_is_not_written_again(nvme: Path) -> None:
    with open_store(nn.Linear(64, 64), ("cpu", "cpu", "cpu"), nvme) as store:
        (shard,) = store.shards
        fill(store, shard, 0)
        slot = snapshot(store)
        before = store.counters.snapshot()
        assert snapshot(store) == slot and store.counters.snapshot() == before
        update(store, shard, 1)
        assert snapshot(store) != slot
        assert store.counters.snapshot()["written.nvme"] > before["written.nvme"]


def test_a_frozen_shard_has_a_value_and_gets_a_second_slot_only_when_changed(nvme: Path) -> None:
    model = nn.Linear(64, 64).requires_grad_(False)
    with open_store(model, ("nvme", "cpu", "nvme"), nvme) as store:
        (shard,) = store.shards
        first = fill(store, shard, 0)
        assert set(first) == {Component.VALUE} and len(shard.slots) == 1
        snapshot(store)
        second = fill(store, shard, 1)
        assert len(shard.slots) == 2 and shard.current == 1
        assert torch.equal(fetched(store, shard), second[Component.VALUE])
        with pytest.raises(IntegrityError, match="slot 2"):
            store.restore(shard, 2, {"value": None}, None)


def test_a_flipped_bit_is_found(nvme: Path) -> None:
    with open_store(nn.Linear(64, 64), ("nvme", "cpu", "nvme"), nvme) as store:
        (shard,) = store.shards
        fill(store, shard, 0)
        extent = shard.slots[shard.current][Component.VALUE]
        extent.blocks["crc"][0] ^= 1
        with pytest.raises(IntegrityError):
            fetched(store, shard)


def test_memory_taken_is_what_the_placement_says(nvme: Path) -> None:
    for tiers, expected in ((("cpu", "cpu", "cpu"), 4), (("cpu", "cpu", "nvme"), 1), (("nvme", "cpu", "nvme"), 0)):
        with open_store(nn.Linear(64, 64), tiers, nvme) as store:
            (shard,) = store.shards
            assert len(shard.memory) == expected
            assert shard.on_disk == (tiers[2] == Tier.NVME)
