from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.base.types import MIB
from zero_offload.storage.files import engines
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.engine import EngineSettings, Lasting
from zero_offload.storage.files.engines import (
    AIOFILES,
    FILL_MAX,
    IO_URING,
    THREADS,
    WORTH_BYTES,
    EngineRates,
    Pattern,
    lost_beside,
    measure,
    pick,
    shares,
    stripe_weights,
)
from zero_offload.storage.memory.arena import Arena


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.open(tmp_path / "run") as directory:
        yield directory


@pytest.fixture
def scratch() -> Iterator[Lasting]:
    region = Arena(0).allocate(16 * MIB)
    yield region
    assert region.nbytes == 16 * MIB


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


def test_auto_is_io_uring_where_it_is_to_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "zero_offload")
    monkeypatch.setattr(engines, "io_uring_problem", lambda: None)
    assert pick("auto", WORTH_BYTES) == IO_URING and not caplog.messages
    assert pick("auto", WORTH_BYTES - 1) == THREADS and not caplog.messages
    monkeypatch.setattr(engines, "io_uring_problem", lambda: "io_uring is not to be had here: forbidden")
    assert pick("auto", WORTH_BYTES) == THREADS
    assert caplog.messages == ["blocks are moved by threads: io_uring is not to be had here: forbidden"]
    with pytest.raises(ConfigError, match="io_engine='io_uring': .*forbidden; use io_engine='auto'"):
        pick("io_uring")
    monkeypatch.setattr(engines.native, "available", lambda: False)
    assert pick("auto") == AIOFILES


@pytest.mark.parametrize("kind", ["threads", "io_uring", "aiofiles"])
def test_what_was_asked_for_is_taken(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "io_uring_problem", lambda: None)
    assert pick(kind).kind.value == kind


def test_measuring_leaves_nothing_behind(directory: RunDirectory, scratch: Lasting) -> None:
    rates = measure(directory, [THREADS, AIOFILES], scratch, rounds=2, limit_s=60)
    assert [each.settings for each in rates] == [THREADS, AIOFILES]
    assert all(speed > 0 for each in rates for speed in each.bytes_per_s.values())
    assert os.listdir(directory.path) == ["LOCK"]


def test_what_work_loses_to_transfers_beside_it(
    directory: RunDirectory, scratch: Lasting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that takes half a second longer while something is moved: the whole file at least, once."""
    alone_s, beside_s = 1.0, 1.5
    times = itertools.cycle([alone_s, beside_s])
    monkeypatch.setattr(engines, "seconds_of", lambda work: next(times))
    monkeypatch.setattr(engines, "time", SimpleNamespace(perf_counter=float, process_time=float))
    lost_s = lost_beside(directory, THREADS, scratch, lambda: None, 3)
    # By a clock that stands still: nothing of what is moved comes after the work.
    assert 0 < lost_s <= (beside_s - alone_s) / scratch.nbytes
    times = itertools.cycle([beside_s, alone_s])
    assert lost_beside(directory, THREADS, scratch, lambda: None, 3) == 0.0
    assert os.listdir(directory.path) == ["LOCK"]


def test_shares_follow_what_was_measured(
    directory: RunDirectory, scratch: Lasting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With made-up speeds: the second directory is twice as fast."""
    speeds = {directory.path: 1e9, tmp_path / "other": 2e9}

    def measured(where: RunDirectory, candidates: list[EngineSettings], *_: object) -> list[EngineRates]:
        return [EngineRates(each, dict.fromkeys(Pattern, speeds[where.path]), 0.1) for each in candidates]

    monkeypatch.setattr(engines, "measure", measured)
    with RunDirectory.open(tmp_path / "other") as other:
        assert shares(THREADS, [directory, other], 1000, scratch) == pytest.approx((1 / 3, 2 / 3))
        assert shares(THREADS, [directory, other], 1000, None) == (0.5, 0.5)


def test_one_directory_is_not_measured(
    directory: RunDirectory, scratch: Lasting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "measure", lambda *_: pytest.fail("measured"))
    assert shares(THREADS, [directory], 1000, scratch) == (1.0,)


def test_a_drive_without_room_to_measure_is_used_all_the_same(
    directory: RunDirectory, scratch: Lasting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier run's files fill it, from which this one goes on."""

    def full(*_: object) -> None:
        raise CapacityError("disk space: needs more")

    monkeypatch.setattr(RunDirectory, "create_scratch", full)
    with RunDirectory.open(tmp_path / "other") as other:
        assert shares(THREADS, [directory, other], 1000, scratch) == (0.5, 0.5)


def test_no_directory_gets_more_than_it_has_room_for(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    room = iter([100 / FILL_MAX, 2000 / FILL_MAX])
    monkeypatch.setattr(RunDirectory, "free_bytes", property(lambda self: next(room)))
    assert shares(THREADS, [directory, directory], 960, None) == pytest.approx((100 / 960, 860 / 960), rel=0.02)
