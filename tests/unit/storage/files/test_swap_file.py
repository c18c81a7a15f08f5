from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.disk import small_disk
from zero_offload.base.errors import CapacityError, IntegrityError, StorageError
from zero_offload.base.types import MIB
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.engines import open_engine
from zero_offload.storage.files.swap_file import Extent, SwapFile, extent_record
from zero_offload.storage.memory.arena import Arena

BLOCK = 4096


@contextlib.contextmanager
def open_swap(
    paths: list[Path], weights: list[float] | None = None, extents: int = 1, blocks: int = 40
) -> Iterator[tuple[SwapFile, list[Extent]]]:
    """A swap file of some extents, not yet made."""
    engine = open_engine(num_drives=len(paths))
    with contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        homes = [stack.enter_context(RunDirectory.open(path)) for path in paths]
        swap = SwapFile(homes, "rank0.swap", engine, 7, weights)
        stack.callback(swap.close)
        yield swap, [swap.allocate(f"extent {i}", [BLOCK] * blocks) for i in range(extents)]


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.25, 0.75], [0.1, 0.2, 0.7], [0.0, 1.0]], ids=str)
def test_each_directory_gets_its_share_all_along(weights: list[float], tmp_path: Path) -> None:
    paths = [tmp_path / str(i) for i in range(len(weights))]
    with open_swap(paths, weights, extents=3) as (swap, extents):
        places = np.concatenate([extent.directories for extent in extents])
        for count in (20, 60, 120):
            shares = np.bincount(places[:count], minlength=len(weights)) / count
            assert np.abs(shares - weights).max() <= 1 / count + 1e-12
        swap.create()
        sizes = [(path / swap.name).stat().st_size for path in paths]
        assert [size / swap.nbytes for size in sizes] == pytest.approx(weights, abs=1 / 120)


@pytest.mark.parametrize("speeds", [(1.0, 3.0), (1.0, 1.7), (0.4, 0.6, 3.1)], ids=str)
def test_drives_of_different_speed_add_up(speeds: tuple[float, ...], tmp_path: Path) -> None:
    """By a clock of our own: each drive takes bytes / speed, all work at once, and a transfer ends with the last."""
    total = sum(speeds)
    paths = [tmp_path / str(i) for i in range(len(speeds))]
    with open_swap(paths, [speed / total for speed in speeds], extents=4, blocks=100) as (_, extents):
        everything = np.concatenate([extent.directories for extent in extents])
        windows = [everything, everything[:200], everything[150:350]]
        for places in windows:
            taken = max(int((places == i).sum()) * BLOCK / speed for i, speed in enumerate(speeds))
            assert len(places) * BLOCK / taken >= 0.95 * total


def test_the_same_weights_give_the_same_places(tmp_path: Path) -> None:
    with open_swap([tmp_path / "a", tmp_path / "b"], [0.3, 0.7], extents=2) as (_, first):
        pass
    with open_swap([tmp_path / "a", tmp_path / "b"], [0.3, 0.7], extents=2) as (_, second):
        for one, other in zip(first, second, strict=True):
            assert np.array_equal(one.directories, other.directories)
            assert np.array_equal(one.blocks["offset"], other.blocks["offset"])


def test_a_stripe_is_read_back_from_its_record(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    region = Arena(0).allocate(40 * BLOCK)
    values = np.frombuffer(region.owner, dtype=np.uint8)[: 40 * BLOCK]
    values[:] = np.random.default_rng(0).integers(0, 256, 40 * BLOCK, dtype=np.uint8)
    before = values.copy()
    with open_swap(paths, [0.5, 0.3, 0.2]) as (swap, (extent,)):
        swap.create()
        swap.launch_write(extent, slice(None), region.address).wait()
        record = extent_record(extent)
    values[:] = 0
    with open_swap(paths, [0.5, 0.3, 0.2], extents=0) as (swap, _):
        swap.open_existing()
        (extent,) = swap.restore_copies(["extent 0"], [BLOCK] * 40, 0, record)
        swap.launch_read(extent, slice(None), region.address).wait()
        assert np.array_equal(values, before)
        file = tmp_path / "b" / "rank0.swap"
        file.write_bytes(b"\0" * file.stat().st_size)
        with pytest.raises(IntegrityError, match=f"{tmp_path}/b/rank0.swap"):
            swap.launch_read(extent, slice(None), region.address).wait()


def test_the_drive_that_is_full_is_named(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1m") as small:
        paths = [tmp_path / "large", small / "run"]
        with (
            open_swap(paths, [0.2, 0.8], blocks=2 * MIB // BLOCK) as (swap, _),
            pytest.raises(CapacityError, match=rf"{small}/run/rank0.swap needs 1.\d MiB more.*free"),
        ):
            swap.create()
        assert not (small / "run" / "rank0.swap").exists()


def test_a_drive_that_fails_is_named(tmp_path: Path) -> None:
    region = Arena(0).allocate(40 * BLOCK)
    with open_swap([tmp_path / "a", tmp_path / "b"]) as (swap, (extent,)):
        swap.create()
        extent.blocks["offset"][extent.directories == 1] += 1  # what O_DIRECT refuses
        with pytest.raises(StorageError, match=rf"offset 1 of {tmp_path}/b/rank0.swap .*EINVAL"):
            swap.launch_write(extent, slice(None), region.address).wait()


def test_blocks_that_overlap_are_found(tmp_path: Path) -> None:
    with open_swap([tmp_path / "a"], extents=2) as (swap, extents):
        extents[1].blocks["offset"][3] = extents[0].blocks["offset"][5]
        with pytest.raises(AssertionError, match="extents in directory 0 overlap"):
            swap.allocate("one more", [BLOCK])
