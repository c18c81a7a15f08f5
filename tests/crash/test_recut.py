"""A run that goes on in other directories than it was cut for: old or new generation, at whatever moment it dies."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.disk import (
    assert_finishes,
    committed_blocks,
    drain,
    flip_bit,
    generation_file,
    open_model,
    small_disk,
    train,
    write_run,
)
from tests.helpers.pairwise import full
from tests.helpers.reference import read_masters
from tests.helpers.trainer import Run, Spec, finish, outcome
from zero_offload.base.types import Durability
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.manifest import write_manifest

STEPS = 6


def _files(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()} - {"LOCK"}


def _swaps(*paths: Path) -> list[set[str]]:
    return [{name for name in _files(path) if name.endswith(".swap")} for path in paths]


@pytest.mark.parametrize("settings", [{}, {"params": "cpu", "optimizer": "cpu", "durability": "commit"}], ids=str)
def test_other_numbers_of_directories(settings: dict[str, Any], tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    write_run(first, 2, **settings)
    assert assert_finishes([first, second], 3, **settings) == 2
    assert _swaps(first, second) == [{"rank0.1.swap"}] * 2
    assert assert_finishes([first, second, third], 4, **settings) == 3
    assert _swaps(first, second, third) == [{"rank0.2.swap"}] * 3
    assert assert_finishes([first, third], 5, **settings) == 4
    assert _swaps(first, second, third) == [{"rank0.3.swap"}, set(), {"rank0.3.swap"}]
    assert assert_finishes(first, 6, **settings) == 5
    assert assert_finishes(first, 7, **settings) == 6
    announced = json.loads((first / "run.json").read_text())["payload"]
    assert announced["directories"] == [str(first)]
    assert _files(first) <= set(announced["files"]) and _files(third) == set()


def test_a_drive_that_was_replaced(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    write_run([first, second], 3)
    assert assert_finishes([first, third], STEPS) == 3
    assert _swaps(first, second, third) == [{"rank0.1.swap"}, set(), {"rank0.1.swap"}]


def test_a_run_that_was_moved(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_run([first, second], 3)
    for path in (first, second):
        path.rename(tmp_path / f"new {path.name}")
    with pytest.raises(zo.CheckpointError, match="striped over 2 directories.*second cannot be found.*nvme="):
        open_model(tmp_path / "new first")
    assert assert_finishes([tmp_path / "new first", tmp_path / "new second"], STEPS) == 3


def test_a_copy_does_not_touch_its_original(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_run([first, second], 3)
    before = {path: path.read_bytes() for each in (first, second) for path in each.iterdir()}
    for path in (first, second):
        shutil.copytree(path, tmp_path / f"copy of {path.name}")
    with pytest.raises(zo.CheckpointError, match="cannot be found"):
        open_model(tmp_path / "copy of first")
    assert assert_finishes([tmp_path / "copy of first", tmp_path / "copy of second"], 4) == 3
    assert {path: path.read_bytes() for each in (first, second) for path in each.iterdir()} == before


def test_the_old_directory_is_in_use(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_run([first, second], 2)
    with RunDirectory.open(second), pytest.raises(zo.LockError, match=str(second)):
        open_model(first)
    assert assert_finishes(first, 3) == 2


def test_going_back_and_cutting_anew_at_once(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_run(first, 4)
    generation_file(first).write_text("{")
    with pytest.raises(zo.IntegrityError, match="--generation 3"):
        open_model([first, second])
    assert assert_finishes([first, second], STEPS, generation=3) == 3
    assert assert_finishes([first, second], STEPS + 1) == STEPS


def test_a_bad_block_leaves_the_old_files_as_they_are(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_run(first, 3)
    offset, _ = committed_blocks(first)[-1]
    flip_bit(first / "rank0.swap", offset)
    with pytest.raises(zo.IntegrityError, match="--generation 2"):
        open_model([first, second])
    flip_bit(first / "rank0.swap", offset)
    assert assert_finishes(first, STEPS) == 3  # and what was begun is gone
    assert _swaps(first, second)[0] == {"rank0.swap"}


def test_no_room_beside_the_old_files(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "6M") as small:
        write_run(small / "run", 3)
        room = (small / "filler", (small / "run" / "rank0.swap").stat().st_size)
        room[0].write_bytes(bytes(6 * 2**20 - room[1] - room[1] // 4))
        with pytest.raises(zo.CapacityError, match="disk space"):
            open_model([small / "run", small / "second"])
        room[0].unlink()
        assert assert_finishes(small / "run", STEPS) == 3


# Death while files are cut anew


def _die(path: Path, place: str, count: int, **changes: Any) -> bool:
    """Whether the run came as far as to die; then both ways to go on are tried."""
    whole = Spec(nvme=str(path / "first"), out=str(path), num_steps=3)
    finish(whole)
    striped = replace(whole, num_steps=5, second=str(path / "second"), **changes)
    died = Run(replace(striped, die_at=place, die_count=count)).wait() != 0
    for manifest in (path / "first").glob("generation-*.json"):
        edition = json.loads(manifest.read_text())["payload"]["edition"]
        assert (path / "first" / (f"rank0.{edition}.swap" if edition else "rank0.swap")).exists(), "it names nothing"
    for name, spec in {"same": striped, "back": replace(striped, second="")}.items():
        copy = path / name
        copy.mkdir()
        for each in ("first", "second"):
            shutil.copytree(path / each, copy / each)
        _move(copy, path)
        here = replace(spec, nvme=str(copy / "first"), second=spec.second and str(copy / "second"), out=str(copy))
        finish(here)
        values, digests = outcome(here)
        first = min(values, default=6)
        assert sorted(values) == list(range(first, 6)) and first >= 4
        assert digests == _expected(path)
    return died


def _move(copy: Path, original: Path) -> None:
    """Let the manifests of a copy name the copy's directories, as if the crash had happened there."""
    for file in [*(copy / "first").glob("generation-*.json"), copy / "first" / "run.json"]:
        payload = json.loads(file.read_text())["payload"]
        payload["directories"] = [each.replace(str(original), str(copy)) for each in payload["directories"]]
        with RunDirectory.open(copy / "first") as directory:
            write_manifest(directory, file.name, payload, Durability.PROCESS)


def _expected(path: Path) -> dict[str, str]:
    reference = path / "reference"
    if not reference.exists():
        reference.mkdir()
        finish(Spec(nvme=str(reference / "nvme"), out=str(reference), num_steps=5))
    return outcome(Spec(nvme="", out=str(reference)))[1]


# run.json, then the rank's manifest and the generation; after it the old generation goes, then the old file.
POINTS = [
    ("after rename", 1),
    full("write", 9),
    ("before rename", 3),
    full("after rename", 3),
    ("after unlink", 1),
]


@pytest.mark.parametrize(("place", "count"), POINTS, ids=str)
def test_death_at_an_operation(place: str, count: int, tmp_path: Path) -> None:
    assert _die(tmp_path, place, count)


@pytest.mark.full
@pytest.mark.parametrize("place", ["before rename", "after rename", "before unlink", "after unlink", "write"])
@pytest.mark.parametrize("durability", ["process", "commit"])
def test_death_at_every_operation(place: str, durability: str, tmp_path: Path) -> None:
    count, died = 1, True
    while died:
        path = tmp_path / str(count)
        path.mkdir()
        died = _die(path, place, count, durability=durability)
        count += 1 if place != "write" else 5
    assert count > 2


# A run's directory, loaded as a checkpoint


def test_the_directory_of_a_run_loads_as_a_checkpoint(tmp_path: Path) -> None:
    places = [tmp_path / "first", tmp_path / "second"]
    model, optimizer = open_model(places)
    train(model, optimizer, 0, 3)
    drain(model)
    expected = read_masters(model)
    other, its_optimizer = open_model(tmp_path / "other", params="cpu", optimizer="cpu")
    with pytest.raises(zo.LockError, match=str(places[0])):
        zo.load_checkpoint(other, its_optimizer, places[0])
    zo.close(model)
    before = {path: path.read_bytes() for each in places for path in each.iterdir()}
    loaded = zo.load_checkpoint(other, its_optimizer, places[0])
    assert (loaded.step, loaded.number, loaded.extra) == (3, 3, {"next": 3})
    found = read_masters(other)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {path: path.read_bytes() for each in places for path in each.iterdir()} == before
    losses = train(other, its_optimizer, 3, 5)
    zo.close(other)
    model, optimizer = open_model(places)
    zo.resume(model, optimizer)
    assert train(model, optimizer, 3, 5) == losses
    zo.close(model)
