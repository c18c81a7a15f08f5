"""Drives that fail in the middle of a run: it stops with the file and the place, and the last commit is whole."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.disk import (
    SWAP,
    abandon,
    assert_finishes,
    drain,
    engine_of,
    open_model,
    reference,
    small_disk,
    train,
    write_run,
)
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from zero_offload.abi import Fault

STEPS = 8
PLACE = re.compile(r"at offset \d+ of (/\S+)")
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
    abandon(model)
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


@pytest.mark.parametrize("nth", [1, 5, 9, 14, 22])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_whichever_transfer_fails(fault: Fault, nth: int, nvme: Path) -> None:
    _break(nvme, fault, nth, {})
    assert assert_finishes(nvme, STEPS) >= 3


def test_a_commit_that_fails_leaves_the_one_before(nvme: Path) -> None:
    settings = {"params": "cpu", "optimizer": "cpu", "commit_every": 2}
    _break(nvme, Fault.WRITE_EIO, 3, settings)
    assert assert_finishes(nvme, STEPS, **settings) == 2


@pytest.mark.parametrize("settings", [{}, PLACEMENTS["cached parameters"], {"grads": "nvme"}], ids=str)
def test_bytes_that_rot_on_the_drive_are_noticed(settings: dict[str, Any], nvme: Path) -> None:
    error = _break(nvme, Fault.WRITE_FLIP, 2, settings)
    assert type(error) is zo.IntegrityError
    assert "checksum" in str(error)


@pytest.mark.parametrize("fault", [Fault.READ_FLIP, Fault.WRITE_SHORT], ids=lambda fault: fault.name)
def test_what_a_second_try_mends_goes_unseen(fault: Fault, nvme: Path) -> None:
    model, optimizer = open_model(nvme)
    losses = train(model, optimizer, 0, 3)
    engine_of(model).inject_fault(fault, 3)
    assert losses + train(model, optimizer, 3, STEPS) == reference(STEPS)[0]
    zo.close(model)


def test_a_wide_model_fails_in_the_middle_of_a_section(nvme: Path) -> None:
    model, optimizer = open_model(nvme, build(lambda: TinyLM(WIDE)), device_memory=None)
    train(model, optimizer, 0, 2)
    drain(model)
    engine_of(model).inject_fault(Fault.WRITE_EIO, 4)
    error = _train_until_it_fails(model, optimizer, 2)
    abandon(model)
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
    abandon(model)


def test_a_failure_while_the_model_moves_in_leaves_it_usable(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zero_offload.storage import native_engine

    opened = native_engine.NativeEngine.__init__

    def open_with_fault(engine: native_engine.NativeEngine, *args: Any) -> None:
        opened(engine, *args)
        engine.inject_fault(Fault.WRITE_ENOSPC, 1)

    monkeypatch.setattr(native_engine.NativeEngine, "__init__", open_with_fault)
    model = build(TinyLM)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with pytest.raises(zo.StorageError, match="No space left"):
        open_model(nvme, model)
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    model(tokens_of(0)).backward()
    monkeypatch.undo()
    assert assert_finishes(nvme, STEPS) == 0


# Full disks


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        model = build(lambda: TinyLM(WIDE))
        with pytest.raises(zo.CapacityError) as caught:
            open_model(disk / "run", model)
        for words in ("nvme", "needs", "available", "would fit"):
            assert words in str(caught.value)
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


def test_a_full_disk_stops_a_commit_but_not_what_was_committed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        model, optimizer = open_model(disk / "run")
        train(model, optimizer, 0, 2)
        drain(model)
        (disk / "other").write_bytes(b"x" * (os.statvfs(disk).f_bavail * 4096))
        error = _train_until_it_fails(model, optimizer, 2)
        assert type(error) is zo.StorageError and "No space left" in str(error)
        abandon(model)
        (disk / "other").unlink()
        assert assert_finishes(disk / "run", STEPS) == 2
