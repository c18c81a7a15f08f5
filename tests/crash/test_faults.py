"""Drives that fail in the middle of a run: it stops with the file and the place, and the last commit is whole."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.disk import (
    SWAP,
    assert_finishes,
    close_broken,
    committed_blocks,
    drain,
    engine_of,
    open_model,
    reference,
    runtime,
    small_disk,
    train,
    write_run,
)
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from tests.helpers.pairwise import full
from zero_offload.hardware import native
from zero_offload.hardware.abi import Fault, IoResultStruct, IoStatus
from zero_offload.model import move_in
from zero_offload.storage.files import engine as engine_words
from zero_offload.storage.files import native_engine
from zero_offload.storage.files.directory import _STUCK_LOCKS

STEPS = 8
PLACE = re.compile(r"at offset \d+ of (/\S+)")
EXIT_CODES = {zo.StorageError: 4, zo.IntegrityError: 5}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all on disk": {},
    "parameters in memory": {"params": "cpu"},
    "gradients too": {"grads": "nvme"},
    "snapshots of memory": {"params": "cpu", "optimizer": "cpu"},
    "cached parameters": {"optimizer": "cpu", "device_memory": "4MiB"},
}


def _train_until_it_fails(model: nn.Module, optimizer: zo.AdamW, begin: int) -> zo.ZeroOffloadError:
    with pytest.raises(zo.ZeroOffloadError) as caught:
        train(model, optimizer, begin, begin + 5)
        drain(model)
    return caught.value


def _check_that_it_stays_failed(model: nn.Module, optimizer: zo.AdamW, error: zo.ZeroOffloadError) -> None:
    def step() -> None:
        model(tokens_of(0)).backward()
        optimizer.step()
        drain(model)

    for call in (step, lambda: model(tokens_of(0)), lambda: model.state_dict(), step):
        with pytest.raises(type(error)) as again:
            call()
        assert str(again.value) == str(error)


def _break(nvme: Path, fault: Fault, nth: int, settings: dict[str, Any]) -> zo.ZeroOffloadError:
    """Train three steps, let the drive fail, check how the run ends."""
    model, optimizer = open_model(nvme, **settings)
    train(model, optimizer, 0, 3)
    drain(model)
    engine_of(model).inject_fault(fault, nth)
    error = _train_until_it_fails(model, optimizer, 3)
    found = PLACE.search(str(error))
    assert found and found[1] == str(nvme / SWAP), error
    _check_that_it_stays_failed(model, optimizer, error)
    close_broken(model)
    assert error.exit_code == EXIT_CODES[type(error)]
    return error


FAULTS = [Fault.WRITE_EIO, Fault.WRITE_ENOSPC, Fault.READ_EIO]


@pytest.mark.parametrize("settings", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_failed_transfer_stops_the_run(fault: Fault, settings: dict[str, Any], nvme: Path) -> None:
    if fault is Fault.READ_EIO and settings == PLACEMENTS["snapshots of memory"]:
        pytest.skip("nothing is read")
    error = _break(nvme, fault, 2, settings)
    assert type(error) is zo.StorageError
    words = {Fault.WRITE_EIO: "write", Fault.WRITE_ENOSPC: "No space left", Fault.READ_EIO: "read"}
    assert words[fault] in str(error)
    assert assert_finishes(nvme, STEPS, **settings) >= 3


@pytest.mark.parametrize(("nth", "engine"), [(1, "io_uring"), (5, "threads"), (9, "io_uring"), (14, "threads")])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_whichever_transfer_fails(fault: Fault, nth: int, engine: str, nvme: Path) -> None:
    _break(nvme, fault, nth, {"io_engine": engine})
    assert assert_finishes(nvme, STEPS) >= 3


@pytest.mark.full
@pytest.mark.parametrize("engine", ["threads", "io_uring"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_transfer_of_two_steps(fault: Fault, engine: str, tmp_path: Path) -> None:
    """Until a fault comes too late to strike."""
    nth, struck = 0, True
    while struck:
        nth += 1
        nvme = tmp_path / str(nth)
        model, optimizer = open_model(nvme, io_engine=engine)
        train(model, optimizer, 0, 3)
        drain(model)
        engine_of(model).inject_fault(fault, nth)
        try:
            train(model, optimizer, 3, 5)
            drain(model)
            struck = False
        except zo.StorageError as error:
            assert PLACE.search(str(error)) and error.exit_code == 4
        close_broken(model)
        assert assert_finishes(nvme, STEPS) >= 3
        shutil.rmtree(nvme)
    assert nth > 20


def test_a_commit_that_fails_leaves_the_one_before(nvme: Path) -> None:
    settings = {"params": "cpu", "optimizer": "cpu", "commit_every": 2}
    _break(nvme, Fault.WRITE_EIO, 3, settings)
    assert assert_finishes(nvme, STEPS, **settings) == 2


@pytest.mark.parametrize("fault", [Fault.WRITE_FLIP, Fault.WRITE_DROP], ids=lambda fault: fault.name)
@pytest.mark.parametrize("settings", [{}, PLACEMENTS["cached parameters"], {"grads": "nvme"}], ids=str)
def test_writes_that_rot_or_never_happen_are_noticed(settings: dict[str, Any], fault: Fault, nvme: Path) -> None:
    error = _break(nvme, fault, 2, settings)
    assert type(error) is zo.IntegrityError
    assert "checksum" in str(error)


def test_what_rotted_in_memory_of_the_run_before_it_was_committed_is_in_no_generation(nvme: Path) -> None:
    """The reads of the step after a commit find it; the commit before that is whole."""
    model, optimizer = open_model(nvme, commit_every=3)
    train(model, optimizer, 0, 4)
    drain(model)
    engine_of(model).inject_fault(Fault.WRITE_DROP, 2)
    error = _train_until_it_fails(model, optimizer, 4)
    assert type(error) is zo.IntegrityError
    close_broken(model)
    assert assert_finishes(nvme, STEPS, commit_every=3) == 3


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_a_file_that_seems_to_end(engine: str, nvme: Path) -> None:
    error = _break(nvme, Fault.READ_SHORT, 3, {"io_engine": engine})
    assert type(error) is zo.IntegrityError and "ends inside the block" in str(error)
    assert assert_finishes(nvme, STEPS) >= 3


def test_a_file_that_is_truncated_meanwhile(nvme: Path) -> None:
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 3)
    drain(model)
    os.truncate(nvme / SWAP, 8192)
    error = _train_until_it_fails(model, optimizer, 3)
    assert type(error) is zo.IntegrityError and error.exit_code == 5
    assert str(nvme / SWAP) in str(error)
    close_broken(model)


def test_nan_where_the_optimizer_keeps_its_moments(nvme: Path) -> None:
    """Bytes of the right shape that no step wrote: they do not become part of an update."""
    write_run(nvme, 3)
    offset = next(offset for offset, component in committed_blocks(nvme) if component == "exp_avg_sq")
    with (nvme / SWAP).open("r+b") as file:
        file.seek(offset)
        file.write(torch.full((16,), torch.nan).numpy().tobytes())
    model, optimizer = open_model(nvme)
    zo.resume(model, optimizer)
    error = _train_until_it_fails(model, optimizer, 3)
    assert type(error) is zo.IntegrityError and f"offset {offset} of {nvme / SWAP}" in str(error)
    close_broken(model)


MENDED = [Fault.READ_FLIP, Fault.WRITE_SHORT, Fault.STORM]


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
@pytest.mark.parametrize("fault", MENDED, ids=lambda fault: fault.name)
def test_what_a_second_try_mends_goes_unseen(fault: Fault, engine: str, nvme: Path) -> None:
    model, optimizer = open_model(nvme, io_engine=engine)
    losses = train(model, optimizer, 0, 3)
    engine_of(model).inject_fault(fault, 3)
    assert losses + train(model, optimizer, 3, STEPS) == reference(STEPS)[0]
    zo.close(model)


# Drives that take their time


def _hold_back(model: nn.Module, monkeypatch: pytest.MonkeyPatch, looks: int) -> list[float]:
    """Hold the next write until it was looked at `looks` times; return the times of the looks."""
    engine, original, seen = engine_of(model), native.io_wait, []

    def look(handle: int, ticket: int, timeout_s: float, result: IoResultStruct) -> None:
        original(handle, ticket, timeout_s, result)
        if result.status == IoStatus.TIMEOUT:
            seen.append(time.monotonic())
            if len(seen) == looks:
                engine.inject_fault(Fault.NONE)

    monkeypatch.setattr(native_engine, "WAIT_SLICE_S", 0.02)
    monkeypatch.setattr(native, "io_wait", look)
    engine.inject_fault(Fault.STALL)
    return seen


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
@pytest.mark.parametrize(
    ("settings", "counter"), [({}, "update_s"), (PLACEMENTS["snapshots of memory"], "commit_s")], ids=str
)
def test_a_slow_drive_changes_the_time_and_nothing_else(
    settings: dict[str, Any], counter: str, engine: str, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = open_model(nvme, io_engine=engine, **settings)
    losses = train(model, optimizer, 0, 3)
    drain(model)
    counters = runtime(model).store.counters
    before = counters.snapshot()[counter]
    looked = _hold_back(model, monkeypatch, looks=8)
    losses += train(model, optimizer, 3, STEPS)
    drain(model)
    # The wait is in the figure that `zo.stats` shows.
    assert len(looked) >= 8 and counters.snapshot()[counter] - before > looked[7] - looked[0]
    assert losses == reference(STEPS)[0]
    zo.close(model)


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_a_drive_that_never_answers_stops_the_run(engine: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = open_model(nvme, io_engine=engine)
    train(model, optimizer, 0, 3)
    drain(model)
    monkeypatch.setattr(engine_words, "STALL_LIMIT_S", 0.3)
    stuck = engine_of(model)
    handle = stuck.handle
    stuck.inject_fault(Fault.STALL)
    error = _train_until_it_fails(model, optimizer, 3)
    assert type(error) is zo.StorageError and error.exit_code == 4
    assert str(nvme / SWAP) in str(error) and "stalled or slow" in str(error)
    open_before = set(os.listdir("/proc/self/fd"))
    close_broken(model)
    # Its late writes must not meet another file under the number of its own.
    assert str(nvme / SWAP) in {os.path.realpath(f"/proc/self/fd/{fd}") for fd in open_before if _is_open(fd)}
    # Nor may it meet the blocks of another run.
    with pytest.raises(zo.LockError, match=f"process {os.getpid()}"):
        open_model(nvme)
    native.io_fault(handle, Fault.NONE, 1)
    native.io_close(handle)
    stuck.is_stuck = False
    while _STUCK_LOCKS:  # as when this process ends
        os.close(_STUCK_LOCKS.pop())
    monkeypatch.undo()  # a drive that answers may be slow
    assert assert_finishes(nvme, STEPS) >= 3


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_a_wide_model_fails_in_the_middle_of_a_section(nvme: Path) -> None:
    model, optimizer = open_model(nvme, build(lambda: TinyLM(WIDE)), device_memory=None)
    train(model, optimizer, 0, 2)
    drain(model)
    engine_of(model).inject_fault(Fault.WRITE_EIO, 4)
    error = _train_until_it_fails(model, optimizer, 2)
    close_broken(model)
    assert type(error) is zo.StorageError
    model, optimizer = open_model(nvme, build(lambda: TinyLM(WIDE)), device_memory=None)
    resumed = zo.resume(model, optimizer)
    assert resumed is not None and resumed.step >= 2
    train(model, optimizer, resumed.step, resumed.step + 1)
    zo.close(model)


def test_the_directory_vanishes(nvme: Path) -> None:
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 2)
    drain(model)
    shutil.rmtree(nvme)
    error = _train_until_it_fails(model, optimizer, 2)
    assert type(error) is zo.StorageError
    assert str(nvme) in str(error)
    close_broken(model)


MOVES: list[dict[str, Any]] = [{}, {"params": "cpu"}, {"params": "cpu", "precision": "fp16"}, {"precision": "fp32"}]


@pytest.mark.parametrize("nth", [1, full(2), 4])
@pytest.mark.parametrize("settings", MOVES, ids=str)
def test_a_failure_while_the_model_moves_in_leaves_it_usable(
    settings: dict[str, Any], nth: int, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters that had moved are read back: their buffers lose their pages."""
    _fail_writes_from_the_start(monkeypatch, nth)
    model = build(TinyLM)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with pytest.raises(zo.StorageError, match="No space left"):
        open_model(nvme, model, **settings)
    for name, param in model.named_parameters():
        assert param.dtype == torch.float32 and torch.equal(param, before[name])
    model(tokens_of(0)).backward()
    monkeypatch.undo()
    assert assert_finishes(nvme, STEPS) == 0


def _fail_writes_from_the_start(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    opened = native_engine.NativeEngine.__init__

    def open_with_fault(engine: native_engine.NativeEngine, *args: Any) -> None:
        opened(engine, *args)
        engine.inject_fault(Fault.WRITE_ENOSPC, nth)

    monkeypatch.setattr(native_engine.NativeEngine, "__init__", open_with_fault)


def test_what_cannot_be_read_back_after_a_failed_start_is_nan(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_writes_from_the_start(monkeypatch, 5)
    monkeypatch.setattr(move_in, "read_master", _raise_storage_error)
    model = build(TinyLM)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with pytest.raises(zo.StorageError, match="No space left"), pytest.warns(UserWarning, match="NaN now. Build"):
        open_model(nvme, model)
    for name, param in model.named_parameters():
        assert torch.isnan(param).all() or torch.equal(param, before[name])
    assert torch.isnan(model.get_parameter("embedding.weight")).all()


def _raise_storage_error(*_: Any) -> None:
    raise zo.StorageError("the drive is gone")


# Full disks


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        model = build(lambda: TinyLM(WIDE))
        with pytest.raises(zo.CapacityError) as caught:
            open_model(disk / "run", model)
        for words in ("nvme tier: needs", "available", f"the nvme tier is {disk / 'run'}", "would fit"):
            assert words in str(caught.value)
        assert caught.value.exit_code == 3
        model(tokens_of(0)).backward()


def test_a_disk_that_someone_else_fills_before_the_files_are_made(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        write_run(disk / "run", 2)
        (disk / "other").write_bytes(b"x" * (os.statvfs(disk).f_bavail * 4096 - 4096))
        with pytest.raises(zo.CapacityError, match="needs"):
            open_model(disk / "second")
        (disk / "other").unlink()
        assert assert_finishes(disk / "run", STEPS) == 2


def test_resuming_needs_no_space_for_what_is_there(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        write_run(disk / "run", 2)
        (disk / "other").write_bytes(b"x" * (os.statvfs(disk).f_bavail * 4096 - (64 << 10)))
        assert assert_finishes(disk / "run", STEPS) == 2
        write_run(disk / "run", 1, existing="discard")


def test_a_checkpoint_without_a_place_names_its_own_argument(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model, optimizer = open_model(tmp_path / "run")
    train(model, optimizer, 0, 1)
    with pytest.raises(zo.StorageError, match=r"file/saved: Not a directory.*or name another directory$"):
        zo.save_checkpoint(model, optimizer, tmp_path / "file" / "saved")
    with small_disk(tmp_path / "disk", "128k") as disk, pytest.raises(zo.CapacityError) as caught:
        zo.save_checkpoint(model, optimizer, disk / "saved")
    assert str(caught.value).endswith("free some, or choose another disk with path=")
    zo.close(model)


def test_a_full_disk_stops_a_commit_but_not_what_was_committed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        model, optimizer = open_model(disk / "run")
        train(model, optimizer, 0, 2)
        drain(model)
        (disk / "other").write_bytes(b"x" * (os.statvfs(disk).f_bavail * 4096))
        error = _train_until_it_fails(model, optimizer, 2)
        assert type(error) is zo.StorageError and "No space left" in str(error)
        close_broken(model)
        (disk / "other").unlink()
        assert assert_finishes(disk / "run", STEPS) == 2
