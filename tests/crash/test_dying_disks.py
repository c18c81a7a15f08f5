"""A file system that dies, turns read-only or loses what was not flushed: a real ext4, told to do so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers.disk import assert_finishes, close_broken, drain, open_model, train, write_run
from tests.helpers.ext4 import ext4_disk

STEPS = 6
MEMORY = {"params": "cpu", "optimizer": "cpu"}


def _train_until_it_fails(nvme: Path, strike: Any, **settings: Any) -> zo.ZeroOffloadError:
    """Two steps that are certainly committed, then the blow, then on until it is noticed."""
    model, optimizer = open_model(nvme, **settings)
    train(model, optimizer, 0, 2)
    drain(model)
    strike()
    with pytest.raises(zo.ZeroOffloadError) as caught:
        train(model, optimizer, 2, STEPS)
        drain(model)
    close_broken(model)
    return caught.value


@pytest.mark.parametrize("engine", ["threads", "io_uring", "aiofiles"])
@pytest.mark.parametrize("settings", [{}, MEMORY], ids=["on disk", "in memory"])
def test_power_is_lost(settings: dict[str, Any], engine: str, tmp_path: Path) -> None:
    """durability="commit": what was committed before is there afterwards, whatever the page cache held."""
    choices = settings | {"durability": "commit", "io_engine": engine}
    with ext4_disk(tmp_path / "disk", "24M") as disk:
        nvme = disk.path / "run"
        error = _train_until_it_fails(nvme, disk.lose_power, **choices)
        assert type(error) is zo.StorageError and error.exit_code == 4
        assert str(nvme / "rank0.swap") in str(error) and "EIO" in str(error) and "dmesg" in str(error)
        disk.come_back()
        assert assert_finishes(nvme, STEPS, **choices) == 2


def test_power_is_lost_at_every_step(tmp_path: Path) -> None:
    """One run over many blows: each start goes on where the last commit was."""
    with ext4_disk(tmp_path / "disk", "24M") as disk:
        nvme, reached = disk.path / "run", 0
        for _ in range(STEPS - 1):
            model, optimizer = open_model(nvme, durability="commit")
            resumed = zo.resume(model, optimizer)
            assert (0 if resumed is None else resumed.step) == reached
            train(model, optimizer, reached, reached + 1)
            drain(model)
            reached += 1
            disk.lose_power()
            close_broken(model)
            disk.come_back()
        assert assert_finishes(nvme, STEPS, durability="commit") == reached


@pytest.mark.parametrize("settings", [{}, MEMORY], ids=["on disk", "in memory"])
def test_the_file_system_turns_read_only(settings: dict[str, Any], tmp_path: Path) -> None:
    """It gives up its journal at that, so only what was flushed is there afterwards."""
    choices = settings | {"durability": "commit"}
    with ext4_disk(tmp_path / "disk", "24M") as disk:
        nvme = disk.path / "run"
        error = _train_until_it_fails(nvme, disk.turn_read_only, **choices)
        assert type(error) is zo.StorageError and error.exit_code == 4
        assert str(nvme) in str(error) and "Read-only file system" in str(error) and "mount" in str(error)
        disk.come_back()
        assert assert_finishes(nvme, STEPS, **choices) == 2


def test_a_read_only_mount(tmp_path: Path) -> None:
    with ext4_disk(tmp_path / "disk", "24M") as disk:
        nvme = disk.path / "run"
        write_run(nvme, 2)
        disk.come_back("ro")
        for path in (nvme, disk.path / "another"):
            with pytest.raises(zo.StorageError, match="disk.*Read-only file system.*name another directory$") as caught:
                open_model(path)
            assert str(path) in str(caught.value)
        disk.come_back()
        assert assert_finishes(nvme, STEPS) == 2


def test_no_inode_is_left(tmp_path: Path) -> None:
    with ext4_disk(tmp_path / "disk", "24M", num_inodes=32) as disk:
        nvme = disk.path / "run"

        def take_every_inode() -> None:
            while os.statvfs(disk.path).f_favail:
                (disk.path / f"other{os.statvfs(disk.path).f_favail}").touch()

        error = _train_until_it_fails(nvme, take_every_inode)
        assert type(error) is zo.StorageError and error.exit_code == 4
        assert "No space left on device" in str(error) and "df -i" in str(error)
        assert str(nvme / "rank0-1.json") in str(error)
        with pytest.raises(zo.StorageError, match="df -i"):
            open_model(disk.path / "another")
        for other in disk.path.glob("other*"):
            other.unlink()
        assert assert_finishes(nvme, STEPS) == 2
