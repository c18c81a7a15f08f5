"""Checkpoints that share blocks with the run's files: on file systems that can, and on a system that pretends to."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.disk import (
    SWAP,
    close_broken,
    committed_blocks,
    drain,
    flip_bit,
    open_model,
    runtime,
    sharing_disk,
    train,
)
from tests.helpers.models import TinyLM, build
from tests.helpers.reference import read_masters
from zero_offload.checkpoint.portable import FICLONERANGE
from zero_offload.cli.main import main


class Ioctl:
    """In the place of `fcntl.ioctl`: copies the range, as if it were shared, or refuses."""

    def __init__(self, refusal: int = 0, after: int = 0) -> None:
        self.calls, self._refusal, self._after = 0, refusal, after

    def __call__(self, fd: int, request: int, argument: Any) -> int:
        assert request == FICLONERANGE
        self.calls += 1
        if self._refusal and self.calls > self._after:
            raise OSError(self._refusal, os.strerror(self._refusal))
        source, begin, nbytes, target = struct.unpack("=qQQQ", argument)
        with open(f"/proc/self/fd/{source}", "rb") as there, open(f"/proc/self/fd/{fd}", "r+b") as here:
            there.seek(begin)
            here.seek(target)
            here.write(there.read(nbytes))
            os.fsync(here.fileno())
        return 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes that whole-shard reads took from disk."""
    from zero_offload.storage.files.swap_file import SwapFile

    found: list[int] = []
    original = SwapFile.read_block

    def counting(self: SwapFile, extent: Any, row: int, *rest: Any) -> torch.Tensor:
        found.append(int(extent.blocks[row]["nbytes"]))
        return original(self, extent, row, *rest)

    monkeypatch.setattr(SwapFile, "read_block", counting)
    yield found


def _partly_frozen() -> nn.Module:
    model = build(lambda: TinyLM(33))
    model.get_submodule("blocks.1").requires_grad_(False)
    return model


def _saved_equals(model: nn.Module, path: Path, elsewhere: Path) -> bool:
    expected = read_masters(model)
    other, optimizer = open_model(elsewhere, _partly_frozen(), params="cpu", optimizer="cpu")
    assert zo.load_checkpoint(other, optimizer, path).step == 2
    found = read_masters(other)
    zo.close(other)
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("settings", [{}, {"params": "cpu"}, {"params": {"cpu": 0.5, "nvme": 0.5}}], ids=str)
def test_what_rests_on_disk_is_shared_and_not_read(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[int]
) -> None:
    model, optimizer = open_model(tmp_path / "run", _partly_frozen(), **settings)
    train(model, optimizer, 0, 2)
    ioctl = Ioctl()
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    reads.clear()
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    on_disk = [shard for shard in runtime(model).store.shards if shard.on_disk]
    blocks = sum(len(each.blocks) for shard in on_disk for each in shard.slots[shard.current].values())
    assert ioctl.calls == 1 + blocks > 1  # the first is a trial
    assert reads == []
    assert main(["verify", str(tmp_path / "saved")]) == 0
    assert _saved_equals(model, tmp_path / "saved", tmp_path / "other")
    zo.close(model)


@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.EXDEV, errno.ENOTTY, errno.EINVAL], ids=os.strerror)
@pytest.mark.parametrize("after", [0, 3])
def test_a_refusal_is_a_copy(refusal: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = open_model(tmp_path / "run", _partly_frozen())
    train(model, optimizer, 0, 2)
    monkeypatch.setattr(fcntl, "ioctl", Ioctl(refusal, after))
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    assert _saved_equals(model, tmp_path / "saved", tmp_path / "other")
    zo.close(model)


@pytest.mark.parametrize("trouble", [errno.EIO, errno.ENOSPC], ids=os.strerror)
def test_trouble_makes_no_checkpoint(trouble: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = open_model(tmp_path / "run", _partly_frozen())
    train(model, optimizer, 0, 2)
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "ioctl", Ioctl(trouble, after=2))
        with pytest.raises(zo.StorageError, match=f"sharing .* failed: {os.strerror(trouble)}"):
            zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    with pytest.raises(zo.CheckpointError, match="is not a checkpoint"):
        zo.load_checkpoint(model, optimizer, tmp_path / "saved")
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    assert _saved_equals(model, tmp_path / "saved", tmp_path / "other")
    zo.close(model)


def test_damage_is_shared_and_noticed_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = open_model(tmp_path / "run", _partly_frozen())
    train(model, optimizer, 0, 2)
    drain(model)
    flip_bit(tmp_path / "run" / SWAP, committed_blocks(tmp_path / "run")[0][0])
    monkeypatch.setattr(fcntl, "ioctl", Ioctl())
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    assert main(["verify", str(tmp_path / "saved")]) == 5
    other, its_optimizer = open_model(tmp_path / "other", _partly_frozen())
    with pytest.raises(zo.IntegrityError, match="checksum"):
        zo.load_checkpoint(other, its_optimizer, tmp_path / "saved")
    close_broken(other)
    close_broken(model)


def _used_bytes(path: Path) -> int:
    os.sync()
    usage = os.statvfs(path)
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


@pytest.mark.full
@pytest.mark.parametrize("kind", ["btrfs", "xfs"])
def test_a_file_system_that_shares_blocks(kind: str, tmp_path: Path, reads: list[int]) -> None:
    with sharing_disk(tmp_path / kind, kind) as disk:
        model, optimizer = open_model(disk / "run", build(lambda: TinyLM(512)))
        train(model, optimizer, 0, 2)
        drain(model)
        reads.clear()
        swap_bytes = (disk / "run" / SWAP).stat().st_size // 2
        if kind == "xfs":  # btrfs cannot say how much is free of what it has not divided yet
            filler_bytes = shutil.disk_usage(disk).free - swap_bytes // 2
            with (disk / "filler").open("wb") as filler:  # less room is left than a copy takes
                os.posix_fallocate(filler.fileno(), 0, filler_bytes)
        before = _used_bytes(disk)
        zo.save_checkpoint(model, optimizer, disk / "saved")
        swap = disk / "saved" / SWAP
        assert reads == [] and _used_bytes(disk) - before < swap.stat().st_size / 4
        assert swap.stat().st_size >= swap_bytes
        (disk / "filler").unlink(missing_ok=True)
        digest = swap.read_bytes()
        expected = read_masters(model)
        losses = train(model, optimizer, 2, 5)  # in place, over the blocks that are shared
        assert main(["verify", str(disk / "saved")]) == 0 and swap.read_bytes() == digest
        zo.close(model)
        other, its_optimizer = open_model(tmp_path / "other", build(lambda: TinyLM(512)))
        zo.load_checkpoint(other, its_optimizer, disk / "saved")
        found = read_masters(other)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert train(other, its_optimizer, 2, 5) == losses
        zo.save_checkpoint(other, its_optimizer, tmp_path / "copied")
        assert reads
        zo.close(other)
