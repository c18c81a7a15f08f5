"""Agreements of a commit and the next update: which chunk may change, which slot may be written, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.late_writes import make_writes_late
from tests.helpers.stores import fill, open_store
from zero_offload.base.errors import StorageError
from zero_offload.base.threads import Monitor
from zero_offload.plan.memory import SNAPSHOT_CHUNKS_IN_FLIGHT
from zero_offload.storage.files.swap_file import SwapFile
from zero_offload.storage.shards.shard import Component
from zero_offload.storage.shards.snapshot import ChunkCopy, Snapshot
from zero_offload.storage.shards.store import OpenChunks, ShardStore

MEMORY, DISK = ("cpu", "cpu", "cpu"), ("cpu", "cpu", "nvme")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def large() -> nn.Module:
    """Two chunks."""
    return nn.Linear(1100, 1100)


def change(store: ShardStore, number: int, rows: tuple[int, ...] = (0, 1)) -> None:
    """Put a number into all that is in memory of some chunks of the first shard, as an update does."""
    shard, staging = store.shards[0], store.staging.region
    for row in rows:
        chunk = store.open_chunks(shard, range(row, row + 1), staging.address)
        chunk.wait()
        for array in shard.memory.values():
            array[chunk.begin : chunk.end] = number
        for write in store.close_chunks(chunk):
            write.wait()
    store.finish_update(shard)


def finish(store: ShardStore, snapshot: Snapshot) -> None:
    store.snapshots.write(snapshot)
    store.mark_committed(snapshot.slots)
    store.snapshots.end()


def committed(store: ShardStore) -> dict[Component, torch.Tensor]:
    """The generation's part of the first shard, read from disk."""
    shard = store.shards[0]
    assert shard.committed is not None
    found = {component: torch.empty(0) for component in shard.components}
    for component, extent in shard.slots[shard.committed].items():
        array = shard.memory[component]
        found[component] = store.arena.array(array.dtype, array.numel())
        store.disk.read_array(extent, found[component])
    return found


def assert_committed(store: ShardStore, expected: dict[Component, torch.Tensor]) -> None:
    found = committed(store)
    assert set(found) == set(expected)
    assert all(torch.equal(found[component], expected[component]) for component in expected)


@contextmanager
def waiting(store: ShardStore, job: Callable[[], None]) -> Iterator[list[BaseException | None]]:
    """Run `job` on a thread; the block begins when it waits for a commit, and it must be over after the block.

    Yields a list that then has its error, or None.
    """
    waits, outcome = threading.Event(), list[BaseException | None]()
    wait_for = Monitor.wait_for

    def tell(monitor: Monitor, is_so: Callable[[], bool]) -> None:
        waits.set()
        wait_for(monitor, is_so)

    def run() -> None:
        try:
            job()
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitor, "wait_for", tell)
        thread.start()
        assert waits.wait(30) and not outcome
    yield outcome
    thread.join(30)
    assert len(outcome) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_snapshot_has_the_states_of_its_beginning(
    dtype: torch.dtype, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(large(), MEMORY, nvme, dtype=dtype) as store:
        make_writes_late(monkeypatch)
        expected = fill(store, store.shards[0], 0)
        for number in range(3):
            snapshot = store.snapshots.take()
            change(store, number)
            finish(store, snapshot)
            assert_committed(store, expected)
            expected = {component: array.clone() for component, array in store.shards[0].memory.items()}
            assert all((array == number).all() for array in expected.values())


def test_an_update_that_does_not_wait_is_seen(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(large(), MEMORY, nvme) as store:
        make_writes_late(monkeypatch)
        expected = fill(store, store.shards[0], 0)
        snapshot = store.snapshots.take()
        monkeypatch.setattr(OpenChunks, "wait", lambda chunk: None)
        change(store, 7)
        finish(store, snapshot)
        with pytest.raises(AssertionError):
            assert_committed(store, expected)


def test_an_update_waits_for_the_chunk_it_changes_and_for_no_other(nvme: Path) -> None:
    with open_store(large(), MEMORY, nvme) as store:
        expected = fill(store, store.shards[0], 0)
        snapshot = store.snapshots.take()
        first, last = snapshot.copies
        change(store, 1, rows=(1,))
        assert last.writes is not None and last.done() and first.writes is None
        finish(store, snapshot)
        assert first.writes is not None and first.done()
        assert_committed(store, expected)


def test_chunks_are_written_in_the_order_of_the_next_update_a_few_at_a_time(
    nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    with open_store(model, MEMORY, nvme) as store:
        make_writes_late(monkeypatch)
        for shard in store.shards:
            fill(store, shard, 0)
        launched: list[int] = []
        in_flight: list[int] = []
        launch = ChunkCopy.launch

        def record(copy: ChunkCopy, disk: SwapFile, addresses: Sequence[int]) -> None:
            launch(copy, disk, addresses)
            launched.append(copy.shard.layout.unit)
            in_flight.append(sum(each.writes is not None and not each.done() for each in snapshot.copies))

        monkeypatch.setattr(ChunkCopy, "launch", record)
        units = sorted({shard.layout.unit for shard in store.shards}, reverse=True)
        snapshot = store.snapshots.take(units)
        finish(store, snapshot)
        assert list(dict.fromkeys(launched)) == units and len(launched) == len(store.shards)
        assert max(in_flight) == SNAPSHOT_CHUNKS_IN_FLIGHT


def test_no_slot_is_written_before_the_commit_is_complete(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(large(), DISK, nvme) as store:
        (shard,) = store.shards
        fill(store, shard, 0)
        finish(store, store.snapshots.take())
        change(store, 1)
        snapshot = store.snapshots.take()
        store.snapshots.write(snapshot)
        written: list[tuple[int, int]] = []
        launch_write = SwapFile.launch_write

        def record(disk: SwapFile, extent: Any, *args: Any) -> Any:
            slot = next(i for i, extents in enumerate(shard.slots) if extent in extents.values())
            written.append((slot, store.snapshots.num_ended))
            return launch_write(disk, extent, *args)

        monkeypatch.setattr(SwapFile, "launch_write", record)
        with waiting(store, lambda: change(store, 2)) as outcome:
            assert not written
            store.mark_committed(snapshot.slots)
            store.snapshots.end()
        assert outcome == [None]
        assert set(written) == {(1 - snapshot.slots[0], 2)}
        assert store.counters.snapshot()["commit_wait_s"] > 0


@pytest.mark.parametrize("tiers", [MEMORY, DISK], ids=["memory", "disk"])
def test_replacing_states_waits_for_the_commit(tiers: tuple[str, str, str], nvme: Path) -> None:
    with open_store(nn.Linear(64, 64), tiers, nvme) as store:
        (shard,) = store.shards
        expected = {component: array.clone() for component, array in fill(store, shard, 0).items()}
        snapshot = store.snapshots.take()
        with waiting(store, lambda: fill(store, shard, 1)) as outcome:
            finish(store, snapshot)
        assert outcome == [None]
        store.load_memory(shard, snapshot.slots[0])
        shard.current = snapshot.slots[0]
        assert all(torch.equal(store.read_component(shard, each), expected[each]) for each in expected)


def test_snapshots_follow_one_another(nvme: Path) -> None:
    with open_store(nn.Linear(64, 64), MEMORY, nvme) as store:
        fill(store, store.shards[0], 0)
        first = store.snapshots.take()
        found: list[Snapshot] = []
        with waiting(store, lambda: found.append(store.snapshots.take())) as outcome:
            finish(store, first)
        assert outcome == [None]
        assert found[0].slots == first.slots and not found[0].copies
        finish(store, found[0])
        assert store.snapshots.num_ended == 2


@pytest.mark.parametrize("waits", ["slots", "take"])
def test_a_failure_reaches_the_thread_that_waits(waits: str, nvme: Path) -> None:
    with open_store(nn.Linear(64, 64), DISK, nvme) as store:
        fill(store, store.shards[0], 0)
        store.snapshots.take()
        jobs: dict[str, Callable[[], object]] = {
            "slots": lambda: change(store, 1, rows=(0,)),
            "take": store.snapshots.take,
        }
        error = StorageError("the drive is on fire")

        def job() -> None:
            jobs[waits]()

        with waiting(store, job) as outcome:
            store.snapshots.fail(error)
        assert outcome == [error]
        with pytest.raises(StorageError, match="on fire"):
            job()
