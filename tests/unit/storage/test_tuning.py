from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from zero_offload.errors import CapacityError, ConfigError
from zero_offload.memory.arena import Arena
from zero_offload.storage import tuning
from zero_offload.storage.directory import RunDirectory
from zero_offload.storage.engine import IO_URING, THREADS, EngineSettings
from zero_offload.storage.tuning import (
    AIOFILES,
    CANDIDATES,
    WORTH_BYTES,
    Load,
    Pattern,
    Rates,
    Scratch,
    Tuned,
    choose,
    lost_beside,
    measure,
    stripe_weights,
    tune,
)
from zero_offload.types import MIB, EngineKind


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.open(tmp_path / "run") as directory:
        yield directory


@pytest.fixture
def scratch() -> Iterator[Scratch]:
    region = Arena(0).allocate(16 * MIB)
    yield Scratch(region.address, region.nbytes)
    assert region.nbytes == 16 * MIB


def load(moved_bytes: int, num_directories: int = 2) -> Load:
    """Of a run that finds all the room it could want."""
    return Load(moved_bytes, 2 * moved_bytes, (1 << 62,) * num_directories)


def rates_of(settings: EngineSettings, read: float, write: float, cpu_s: float) -> Rates:
    return Rates(settings, {Pattern.READ: read, Pattern.WRITE: write, Pattern.MIXED: read}, cpu_s)


def test_the_fastest_to_write_and_read_again_is_chosen() -> None:
    slow_reader, slow_writer = rates_of(THREADS, 1e9, 9e9, 0.1), rates_of(IO_URING, 3e9, 2e9, 0.2)
    chosen = choose([slow_reader, slow_writer])
    assert dataclasses.replace(chosen, reason="") == dataclasses.replace(IO_URING, reason="")
    assert chosen.reason == (
        "measured here: reads 3.00 GB/s, writes 2.00 GB/s (threads reads 1.00 GB/s, writes 9.00 GB/s)"
    )


def test_of_equals_the_one_that_leaves_the_processor_alone() -> None:
    greedy, modest = rates_of(THREADS, 3e9, 2e9, 0.2), rates_of(IO_URING, 2.95e9, 1.97e9, 0.1)
    assert choose([greedy, modest]).kind is EngineKind.IO_URING
    too_slow = rates_of(IO_URING, 2.8e9, 1.9e9, 0.1)
    assert choose([greedy, too_slow]).kind is EngineKind.THREADS


@pytest.mark.parametrize(
    ("speeds", "room", "expected"),
    [
        ([1.0, 1.0], [1000, 1000], (0.5, 0.5)),
        ([1.0, 3.0], [1000, 1000], (0.25, 0.75)),
        ([1.0, 3.0], [1000, 50], (0.5, 0.5)),  # half of the bytes fit on the fast one
        ([1.0, 1.0, 2.0], [1000, 10, 40], (0.5, 0.1, 0.4)),
        ([1.0, 1.0], [0, 1000], (0.0, 1.0)),
        ([1.0, 3.0], [20, 30], (0.4, 0.6)),  # too little everywhere: making the files says so
        ([1.0, 3.0], [0, 0], (0.5, 0.5)),
    ],
)
def test_stripes_follow_speed_and_room(speeds: list[float], room: list[int], expected: tuple[float, ...]) -> None:
    assert stripe_weights(speeds, room, 100) == pytest.approx(expected, abs=1e-12)


def test_little_is_not_measured(directory: RunDirectory) -> None:
    tuned = tune("auto", [directory, directory], load(1000), None)
    assert tuned.settings.kind is EngineKind.THREADS and tuned.weights == (0.5, 0.5)
    assert "too few to measure" in tuned.settings.reason


@pytest.mark.parametrize("kind", ["threads", "io_uring", "aiofiles"])
def test_what_was_asked_for_is_not_measured(kind: str, directory: RunDirectory) -> None:
    if kind == "io_uring" and tuning.io_uring_problem():
        pytest.skip("io_uring is forbidden here")
    tuned = tune(kind, [directory], load(2 * WORTH_BYTES, 1), None)
    assert tuned.settings.kind.value == kind and tuned.settings.reason == "asked for"
    assert Tuned.from_json(tuned.to_json()) == tuned


def test_a_refusal_of_io_uring_is_the_reason(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "io_uring_problem", lambda: "io_uring is not to be had here: forbidden")
    tuned = tune("auto", [directory], load(2 * WORTH_BYTES, 1), None)
    assert (tuned.settings.kind, tuned.settings.reason) == (
        EngineKind.THREADS,
        "io_uring is not to be had here: forbidden",
    )
    with pytest.raises(ConfigError, match="io_engine='io_uring': .*forbidden; use io_engine='auto'"):
        tune("io_uring", [directory], load(1, 1), None)


def test_without_the_native_library(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning.native, "available", lambda: False)
    assert tune("auto", [directory], load(1, 1), None).settings.kind is EngineKind.AIOFILES


def test_measuring_leaves_nothing_behind(directory: RunDirectory, scratch: Scratch) -> None:
    rates = measure(directory, [THREADS, AIOFILES], scratch, rounds=2, limit_s=60)
    assert [each.settings for each in rates] == [THREADS, AIOFILES]
    assert all(speed > 0 for each in rates for speed in each.bytes_per_s.values())
    assert os.listdir(directory.path) == ["LOCK"]


def test_what_work_loses_to_transfers_beside_it(
    directory: RunDirectory, scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that takes half a second longer while something is moved: the whole file at least, once."""
    alone_s, beside_s = 1.0, 1.5
    times = itertools.cycle([alone_s, beside_s])
    monkeypatch.setattr(tuning, "_seconds", lambda work: next(times))
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=float, process_time=float))
    lost_s = lost_beside(directory, THREADS, scratch, lambda: None, 3)
    # By a clock that stands still: nothing of what is moved comes after the work.
    assert 0 < lost_s <= (beside_s - alone_s) / scratch.nbytes
    times = itertools.cycle([beside_s, alone_s])
    assert lost_beside(directory, THREADS, scratch, lambda: None, 3) == 0.0
    assert os.listdir(directory.path) == ["LOCK"]


def test_much_is_measured_in_every_directory(
    directory: RunDirectory, scratch: Scratch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With made-up speeds: the second directory is twice as fast, with io_uring."""
    speeds = {directory.path: 1e9, tmp_path / "other": 2e9}

    def measured(where: RunDirectory, candidates: list[EngineSettings], *_: object) -> list[Rates]:
        speed = speeds[where.path]
        faster = [speed * (1 + number) for number in range(len(candidates))]
        return [rates_of(each, found, found, 0.1) for each, found in zip(candidates, faster, strict=True)]

    monkeypatch.setattr(tuning, "measure", measured)
    monkeypatch.setattr(tuning, "io_uring_problem", lambda: None)
    with RunDirectory.open(tmp_path / "other") as other:
        tuned = tune("auto", [directory, other], load(2 * WORTH_BYTES), scratch)
        assert dataclasses.replace(tuned.settings, reason="asked for") == CANDIDATES[-1]
        assert tuned.weights == pytest.approx((1 / 3, 2 / 3))


def test_a_drive_without_room_to_measure_is_used_all_the_same(
    directory: RunDirectory, scratch: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier run's files fill it, from which this one goes on."""

    def full(*_: object) -> None:
        raise CapacityError("disk space: needs more")

    monkeypatch.setattr(RunDirectory, "create_scratch", full)
    monkeypatch.setattr(tuning, "io_uring_problem", lambda: None)
    tuned = tune("auto", [directory], load(2 * WORTH_BYTES, 1), scratch)
    assert tuned.settings.kind is EngineKind.THREADS and tuned.weights == (1.0,)
    assert tuned.settings.reason == "nothing could be measured: disk space: needs more"


def test_room_is_counted_for_all_ranks(directory: RunDirectory) -> None:
    asked = Load(moved_bytes=60, needed_bytes=960, room_bytes=(100, 2000))
    assert tune("threads", [directory, directory], asked, None).weights == pytest.approx((100 / 960, 860 / 960))
