"""Folders written in pieces: the library reads them, and they appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import zero_offload as zo
from tests.helpers.disk import small_disk
from zero_offload.checkpoint.hf_export import FolderWriter, TensorEntry, new_folder, plan_files
from zero_offload.checkpoint.hf_files import DTYPES, INDEX_NAME, LENGTH_NBYTES, SINGLE_NAME, open_weights

DTYPE_VALUES = list(DTYPES.values())


def _tensors() -> dict[str, torch.Tensor]:
    """One per dtype, of odd sizes: laid one behind the other they would not be aligned."""
    shapes = [(3, 5), (7,), (), (1, 2, 3), (0, 4)]
    found = {}
    for i, dtype in enumerate(reversed(DTYPE_VALUES)):
        shape = shapes[i % len(shapes)]
        found[f"t{i}"] = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(i)).to(dtype)
    return found


def _entries(tensors: dict[str, torch.Tensor]) -> list[TensorEntry]:
    return [TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def _write(path: Path, tensors: dict[str, torch.Tensor], nbytes_max: int = 1 << 30) -> None:
    plans = plan_files(_entries(tensors), nbytes_max)
    with new_folder(path) as folder, FolderWriter(folder, plans) as writer:
        pieces = [(name, at) for name, tensor in tensors.items() for at in range(0, tensor.numel(), 2)]
        random.Random(0).shuffle(pieces)
        for name, begin in pieces:
            writer.write(name, begin, tensors[name].flatten()[begin : begin + 2])
        writer.finish()


def _same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return set(mine) == set(theirs) and all(
        (mine[n].dtype, mine[n].shape) == (t.dtype, t.shape)
        and torch.equal(mine[n].flatten().view(torch.uint8), t.flatten().view(torch.uint8))
        for n, t in theirs.items()
    )


def test_one_file_of_every_dtype(tmp_path: Path) -> None:
    tensors = _tensors()
    _write(tmp_path / "out", tensors)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", SINGLE_NAME]
    assert _same(load_file(tmp_path / "out" / SINGLE_NAME), tensors)
    with safe_open(tmp_path / "out" / SINGLE_NAME, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    with open_weights(tmp_path / "out") as stored:
        for name, tensor in stored.items():
            assert tensor.offset % tensors[name].dtype.itemsize == 0, name


def test_the_data_begins_aligned(tmp_path: Path) -> None:
    for length in range(1, 10):
        (plan,) = plan_files([TensorEntry("x" * length, torch.float32, (1,))], 1 << 30)
        header = plan.header()
        assert len(header) % 8 == 0
        assert int.from_bytes(header[:LENGTH_NBYTES], "little") == len(header) - LENGTH_NBYTES


def test_shards_and_their_index(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(size) for i, size in enumerate((10, 10, 30, 5, 5, 5))}
    _write(tmp_path / "out", tensors, 80)
    found: dict[str, torch.Tensor] = {}
    # 80 B, then 120 B alone since it is larger than a shard, then 60 B.
    expected = [["t0", "t1"], ["t2"], ["t3", "t4", "t5"]]
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    for number, names in enumerate(expected, 1):
        file = f"model-{number:05d}-of-00003.safetensors"
        part = load_file(tmp_path / "out" / file)
        assert sorted(part) == names
        assert all(index["weight_map"][name] == file for name in names)
        found |= part
    assert _same(found, tensors)
    assert index["metadata"] == {"total_size": 65 * 4} and len(index["weight_map"]) == 6
    assert len(list((tmp_path / "out").iterdir())) == 4


def test_a_dtype_without_a_name() -> None:
    with pytest.raises(zo.ConfigError, match="1 of 2 tensors: b is torch.complex128.*persistent=False"):
        plan_files([TensorEntry("a", torch.float32, ()), TensorEntry("b", torch.complex128, ())], 100)


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_text(name)
    expected = r"not empty: it holds a, b, c, ... \(4 entries\). Export to another"
    with pytest.raises(zo.ConfigError, match=expected), new_folder(tmp_path):
        pass
    with pytest.raises(zo.ConfigError, match="is a file"), new_folder(tmp_path / "a"):
        pass
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == [*"abcd"]


def test_an_empty_directory_and_a_link_to_one(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    _write(tmp_path / "link", {"a": torch.ones(3)})
    assert _same(load_file(tmp_path / "out" / SINGLE_NAME), {"a": torch.ones(3)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


def test_parents_are_made(tmp_path: Path) -> None:
    _write(tmp_path / "a" / "b", {"a": torch.ones(3)})
    assert (tmp_path / "a" / "b" / SINGLE_NAME).exists()


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
        assert [folder] == list(tmp_path.iterdir())
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_fills_meanwhile_is_kept(tmp_path: Path) -> None:
    with pytest.raises(zo.StorageError, match="naming .*out failed"), new_folder(tmp_path / "out"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("precious")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


def test_a_tensor_that_was_forgotten(tmp_path: Path) -> None:
    plans = plan_files([TensorEntry("a", torch.float32, (4,))], 100)
    with (
        pytest.raises(AssertionError, match="8 bytes were never written"),
        new_folder(tmp_path / "out") as folder,
        FolderWriter(folder, plans) as writer,
    ):
        writer.write("a", 0, torch.ones(2))
        writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_says_so_before_anything_is_written(tmp_path: Path) -> None:
    plans = plan_files([TensorEntry("a", torch.float32, (1 << 20,))], 1 << 30)
    num_fds = len(os.listdir("/proc/self/fd"))
    with small_disk(tmp_path / "disk", "2m") as disk:
        with (
            pytest.raises(zo.StorageError, match=r"reserving 4 MiB for .*No space left on device.*nothing .* is left"),
            new_folder(disk / "out") as folder,
            FolderWriter(folder, plans),
        ):
            raise AssertionError("it had no room")
        assert list(disk.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == num_fds


def test_a_drive_that_fails_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, data: object, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    plans = plan_files([TensorEntry("a", torch.float32, (4,))], 100)
    with (
        pytest.raises(zo.StorageError, match="writing at offset .*safetensors failed: Input/output error"),
        new_folder(tmp_path / "out") as folder,
        FolderWriter(folder, plans) as writer,
    ):
        monkeypatch.setattr(os, "pwrite", fail)
        writer.write("a", 0, torch.ones(4))
    assert list(tmp_path.iterdir()) == []
