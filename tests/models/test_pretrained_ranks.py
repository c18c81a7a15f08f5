"""Two ranks load and export folders: each reads its own part, and what is written is what one rank would write."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import pretrained
from tests.helpers.disk import small_disk
from tests.helpers.models import WIDE, build
from tests.helpers.pairwise import in_pairs
from tests.helpers.pretrained import THEIRS, Everything, read_folder, weights_of, write_weights
from tests.helpers.ranks import UNEVEN, Case, Failure, RankPool

IN_MEMORY: dict[str, Any] = {}
ON_DISK: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "device_memory": "6MiB"}
"""Most units are away when they are exported."""


def _case(tmp_path: Path, settings: dict[str, Any], precision: str, stage: int = 3) -> Case:
    directory = {"nvme": tmp_path / f"run{len(os.listdir(tmp_path))}"} if settings else {}
    return Case({"stage": stage, "precision": precision} | settings | directory, num_steps=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_weights(tmp_path / "in", build(lambda: Everything(UNEVEN), THEIRS))


@pytest.mark.door("torch", load="`zo.load_pretrained`", between="two ranks, each stage", outcome="right")
@in_pairs(settings=[IN_MEMORY, ON_DISK], precision=["fp32", "bf16"], stage=[3, 1, 0])
def test_two_ranks_load(
    settings: dict[str, Any], precision: str, stage: int, pool: RankPool, folder: Path, tmp_path: Path
) -> None:
    found = pool.succeed(pretrained.load, _case(tmp_path, settings, precision, stage), str(folder))
    (mine, loaded), (theirs, again) = found
    expected = weights_of(build(lambda: Everything(UNEVEN), THEIRS))
    for name, values in expected.items():
        want = values.bfloat16() if precision == "bf16" and name != "mask" else values
        assert torch.equal(loaded[name].float(), want.float()), name
        assert torch.equal(again[name], loaded[name]), name
    assert all(torch.equal(mine.params[name], theirs.params[name]) for name in mine.params)
    assert mine.losses != theirs.losses
    assert not all(torch.equal(mine.params[name], loaded[name]) for name in mine.params)


def test_a_rank_reads_only_its_part(pool: RankPool, tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "in", build(lambda: Everything(WIDE), THEIRS))
    total = sum(path.stat().st_size for path in folder.iterdir())
    counts = pool.succeed(pretrained.count_reads, replace(_case(tmp_path, IN_MEMORY, "fp32"), dim=WIDE), str(folder))
    assert all(0.4 * total < count < 0.6 * total for count in counts), (counts, total)
    assert sum(counts) < 1.01 * total


def test_what_does_not_fit_reaches_every_rank(pool: RankPool, folder: Path, tmp_path: Path) -> None:
    wrong = write_weights(tmp_path / "wrong", build(lambda: Everything(UNEVEN + 1), THEIRS))
    for path, words in ((wrong, "of another shape"), (tmp_path / "absent", "does not exist")):
        results = pool.call(pretrained.load, _case(tmp_path, IN_MEMORY, "fp32"), str(path))
        assert all(isinstance(r, Failure) and r.kind == "CheckpointError" and words in r.message for r in results)
    pool.succeed(pretrained.load, _case(tmp_path, IN_MEMORY, "fp32"), str(folder))


@pytest.mark.parametrize("settings", [IN_MEMORY, ON_DISK], ids=["memory", "disk"])
def test_other_files_on_another_rank(settings: dict[str, Any], pool: RankPool, folder: Path, tmp_path: Path) -> None:
    """Files of one layout with other values: what is made of them differs."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    other = write_weights(theirs / "in", build(lambda: Everything(UNEVEN), THEIRS + 1))
    case = _case(tmp_path, settings, "bf16")
    results = pool.call(pretrained.load_of_each, case, [str(folder), str(other)])
    assert all(isinstance(r, Failure) and "load the same weights on all" in r.message for r in results), results


@pytest.mark.door(
    "torch",
    load="`zo.offload`",
    between="two ranks, each stage and dtype",
    save="`zo.export_pretrained`",
    outcome="right",
)
@in_pairs(
    settings=[IN_MEMORY, ON_DISK],
    dtypes=[("fp32", None), ("bf16", None), ("fp32", "fp16"), ("bf16", "bf16")],
    stage=[3, 1, 0],
)
def test_two_ranks_export(
    settings: dict[str, Any], dtypes: tuple[str, str | None], stage: int, pool: RankPool, tmp_path: Path
) -> None:
    """`dtypes`: of the model and of the files."""
    (precision, dtype), out = dtypes, tmp_path / "out"
    arguments = {"dtype": dtype, "max_shard_size": "40KB"}
    case = _case(tmp_path, settings, precision, stage)
    held, _ = pool.succeed(pretrained.export, case, str(out), arguments)
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype or precision]
    found = read_folder(out)
    assert set(found) == set(weights_of(build(lambda: Everything(UNEVEN))))
    assert len(list(out.iterdir())) > 2
    for name, values in held.items():
        want = values.to(wanted) if values.is_floating_point() else values
        assert found[name].dtype == want.dtype and torch.equal(found[name], want), name


@in_pairs(stage=[3, 1], settings=[ON_DISK, IN_MEMORY], dtype=["fp32", "fp16"])
def test_masters_of_two_ranks_are_those_of_each(
    stage: int, settings: dict[str, Any], dtype: str, pool: RankPool, tmp_path: Path
) -> None:
    for out, case in (("out", (settings, "bf16", stage)), ("whole", (IN_MEMORY, "bf16", 0))):
        pool.succeed(pretrained.export, _case(tmp_path, *case), str(tmp_path / out), {"dtype": dtype})
    found, expected = read_folder(tmp_path / "out"), read_folder(tmp_path / "whole")
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and torch.equal(found[name], values), name
    assert not torch.equal(found["norm.weight"].float(), found["norm.weight"].bfloat16().float())


def test_a_failure_of_the_writer_reaches_every_rank(pool: RankPool, tmp_path: Path) -> None:
    case = _case(tmp_path, IN_MEMORY, "fp32")
    with small_disk(tmp_path / "disk", "64k") as disk:
        results = pool.call(pretrained.export, case, str(disk / "out"), {})
        assert list(disk.iterdir()) == []
    for result in results:
        assert isinstance(result, Failure) and result.kind == "StorageError", result
        assert "No space left" in result.message, result
    assert results[1].message.startswith("rank 0: ")
    pool.succeed(pretrained.export, case, str(tmp_path / "out"), {})


def test_a_drive_that_fails_in_the_middle(pool: RankPool, tmp_path: Path) -> None:
    """Both ranks stop at the same unit, and can go on."""
    case = _case(tmp_path, ON_DISK, "fp32")
    before = sorted(os.listdir(tmp_path))
    results = pool.call(pretrained.fail_to_write, case, str(tmp_path / "out"))
    assert results == [
        Failure("StorageError", "the drive is gone"),
        Failure("StorageError", "rank 0: the drive is gone"),
    ]
    assert set(os.listdir(tmp_path)) - set(before) <= {"run0"}
    pool.succeed(pretrained.export, _case(tmp_path, ON_DISK, "fp32"), str(tmp_path / "out"), {})
