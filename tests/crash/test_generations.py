"""Two generations in a directory: which one is taken, going back to the one before, and never forward again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers.disk import (
    SWAP,
    assert_finishes,
    close_broken,
    committed_blocks,
    drain,
    flip_bit,
    generation_file,
    open_model,
    train,
    write_run,
)
from tests.helpers.pairwise import full
from tests.helpers.trainer import Run, Spec, finish, outcome
from zero_offload.base.types import Durability
from zero_offload.storage.files import manifest
from zero_offload.storage.files.directory import RunDirectory

STEPS = 6
TIERS: list[dict[str, Any]] = [{}, {"params": "cpu", "optimizer": "cpu"}]


def _numbers(nvme: Path) -> list[int]:
    return sorted(json.loads(path.read_text())["payload"]["number"] for path in nvme.glob("generation*.json"))


def _rank_manifest(nvme: Path) -> Path:
    return nvme / str(json.loads(generation_file(nvme).read_text())["payload"]["ranks"][0]["manifest"])


def _contents(nvme: Path) -> dict[str, str]:
    """Digests of all files but the lock, which names its last holder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in nvme.iterdir() if path.name != "LOCK"}


def _crash_copy(nvme: Path, copy: Path, steps: range, **settings: Any) -> None:
    """The directory as a crash would leave it after these steps; the run itself goes elsewhere."""
    model, optimizer = open_model(nvme, **settings)
    zo.resume(model, optimizer)
    train(model, optimizer, steps.start, steps.stop)
    drain(model)
    shutil.copytree(nvme, copy)
    zo.close(model)


@pytest.mark.parametrize("settings", TIERS, ids=str)
@pytest.mark.parametrize("durability", ["process", "commit"])
def test_going_back_one_generation(settings: dict[str, Any], durability: str, nvme: Path) -> None:
    write_run(nvme, 4, **settings)
    assert _numbers(nvme) == [3, 4]
    model, optimizer = open_model(nvme, generation=3, durability=durability, **settings)
    resumed = zo.resume(model, optimizer)
    assert resumed is not None and (resumed.step, resumed.number, resumed.extra) == (3, 3, {"next": 3})
    assert _numbers(nvme) == [3]  # from the start: its slots are about to be written over
    zo.close(model)
    assert assert_finishes(nvme, STEPS, **settings) == 3
    assert _numbers(nvme) == [5, 6]


def test_the_newest_by_its_number(nvme: Path) -> None:
    write_run(nvme, 4)
    assert assert_finishes(nvme, STEPS, generation=4) == 4
    assert _numbers(nvme) == [5, 6]


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_number_that_is_not_there(number: int, nvme: Path) -> None:
    write_run(nvme, 4)
    before = _contents(nvme)
    with pytest.raises(zo.CheckpointError, match=rf"no generation {number}; there is: generation 4 \(step 4.*tion 3 "):
        open_model(nvme, generation=number)
    assert _contents(nvme) == before


# Damage in the newest


@pytest.mark.parametrize("settings", TIERS, ids=str)
@pytest.mark.parametrize("what", ["generation", "rank", "block", "truncated"])
def test_damage_names_the_generation_before(what: str, settings: dict[str, Any], nvme: Path) -> None:
    write_run(nvme, 4, **settings)
    path = {"generation": generation_file(nvme), "rank": _rank_manifest(nvme)}.get(what, nvme / SWAP)
    if what == "truncated":
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    else:
        flip_bit(path, committed_blocks(nvme)[0][0] if what == "block" else 300)
    with pytest.raises(zo.IntegrityError) as caught:
        model, optimizer = open_model(nvme, **settings)
        try:
            zo.resume(model, optimizer)
            train(model, optimizer, 4, 5)
            drain(model)
        finally:
            close_broken(model)
    text = str(caught.value)
    assert str(path) in text and text.count("--generation 3") == 1 and "generation 3 (step 3, committed 20" in text
    if what == "truncated":
        path.write_bytes(whole)
    if what != "block" or settings:  # what is found in the midst of a step may come too late
        assert assert_finishes(nvme, STEPS, generation=3, **settings) == 3
        assert assert_finishes(nvme, STEPS + 1, **settings) == STEPS


def test_damage_in_the_older_one_is_not_passed_over_either(nvme: Path) -> None:
    write_run(nvme, 4)
    path = generation_file(nvme, 3)
    path.write_text("{")
    with pytest.raises(zo.IntegrityError, match=f"{path}.*--generation 4"):
        open_model(nvme)
    assert assert_finishes(nvme, STEPS, generation=4) == 4


def test_damage_in_both(nvme: Path) -> None:
    write_run(nvme, 4)
    for path in nvme.glob("generation-*.json"):
        flip_bit(path, 300)
    with pytest.raises(zo.IntegrityError, match="is not what was written") as caught:
        open_model(nvme)
    assert "--generation" not in str(caught.value)
    with pytest.raises(zo.CheckpointError, match="no generation 3; there is: none"):
        open_model(nvme, generation=3)


def _as_it_is(nvme: Path) -> None:
    """`run.json` lists the generations."""


def _without_run_json(nvme: Path) -> None:
    (nvme / "run.json").unlink()


def _of_an_earlier_version(nvme: Path) -> None:
    """Neither `run.json` nor the ranks' manifests tell of generations; those of the ranks stay."""
    with RunDirectory.open(nvme) as directory:
        payload = manifest.read_manifest(directory, "run.json") or {}
        del payload["generations"]
        manifest.write_manifest(directory, "run.json", payload, Durability.PROCESS)


RECORDS = [_as_it_is, _without_run_json, _of_an_earlier_version]


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_all_generations_missing_is_no_fresh_start(num_steps: int, record: Callable[[Path], None], nvme: Path) -> None:
    write_run(nvme, num_steps)
    lost = sorted(path.name for path in nvme.glob("generation-*.json"))
    for name in lost:
        (nvme / name).unlink()
    record(nvme)
    before = _contents(nvme)
    for existing in ("resume", "refuse"):
        with pytest.raises(zo.IntegrityError, match=f"{' and '.join(lost)} in {nvme}.*existing='discard'"):
            open_model(nvme, existing=existing)
    with pytest.raises(zo.IntegrityError, match=lost[0]):
        zo.load_checkpoint(*open_model(nvme.with_name("other")), nvme)
    assert _contents(nvme) == before
    if record is not _without_run_json:  # which lists what may be deleted
        assert assert_finishes(nvme, 4, existing="discard") == 0


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("num_steps", [2, 3])
def test_the_newest_missing_is_no_step_back(num_steps: int, record: Callable[[Path], None], nvme: Path) -> None:
    model, optimizer = open_model(nvme, commit_every=3)
    train(model, optimizer, 0, 3 * num_steps)
    zo.close(model)
    lost = generation_file(nvme)
    lost.unlink()
    record(nvme)
    way_on = f"{lost.name} in {nvme} is missing.*generation {num_steps - 1} .*generation={num_steps - 1}"
    with pytest.raises(zo.IntegrityError, match=way_on):
        open_model(nvme, commit_every=3)
    model, optimizer = open_model(nvme, commit_every=3, generation=num_steps - 1)
    assert zo.resume(model, optimizer).step == 3 * (num_steps - 1)  # type: ignore[union-attr]
    zo.close(model)


@pytest.mark.parametrize("record", RECORDS)
def test_the_older_missing_stops_nothing(record: Callable[[Path], None], nvme: Path) -> None:
    write_run(nvme, 3)
    generation_file(nvme, 2).unlink()
    record(nvme)
    assert assert_finishes(nvme, 5) == 3


def test_manifests_that_are_deleted_during_a_run(nvme: Path) -> None:
    """The next commit makes what is missing, and says so."""
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 2)
    drain(model)
    for name in ("run.json", "generation-0.json", "generation-1.json", "rank0-0.json", "rank0-1.json"):
        (nvme / name).unlink()
    with pytest.warns(UserWarning, match="others deleted run.json, generation-0.json while"):
        train(model, optimizer, 2, 3)
        drain(model)
    zo.close(model)
    assert assert_finishes(nvme, 5) == 3


def test_after_a_commit_of_its_own_a_run_names_no_older_one(nvme: Path) -> None:
    write_run(nvme, 4)
    model, optimizer = open_model(nvme)
    zo.resume(model, optimizer)
    train(model, optimizer, 4, 5)
    drain(model)
    for offset, _ in committed_blocks(nvme):
        flip_bit(nvme / SWAP, offset)
    with pytest.raises(zo.IntegrityError) as caught:
        [tensor.clone() for tensor in model.state_dict().values()]
    assert "--generation" not in str(caught.value)
    close_broken(model)


def test_a_damaged_list_of_files_is_written_again(nvme: Path) -> None:
    write_run(nvme, 4)
    whole = (nvme / "run.json").read_bytes()
    flip_bit(nvme / "run.json", 90)
    with pytest.raises(zo.IntegrityError, match="run.json"):  # it is unknown what to delete
        open_model(nvme, existing="discard")
    assert assert_finishes(nvme, STEPS) == 4
    assert (nvme / "run.json").read_bytes() == whole


# A generation that is written over, and a generation that must not come back


def test_a_generation_that_is_partly_written_over(nvme: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    _crash_copy(nvme, copy, range(5), commit_every=2)
    assert _numbers(copy) == [1, 2]
    before = _contents(copy)
    with pytest.raises(
        zo.IntegrityError, match=r"generation 1 \(step 2.* no longer whole: \d+ of \d+ blocks"
    ) as caught:
        open_model(copy, generation=1)
    assert "Nothing was changed" in str(caught.value) and str(copy / SWAP) in str(caught.value)
    assert _contents(copy) == before
    assert assert_finishes(copy, STEPS) == 4


@pytest.mark.parametrize("settings", TIERS, ids=str)
def test_a_crash_after_going_back_does_not_bring_the_newer_one(
    settings: dict[str, Any], nvme: Path, tmp_path: Path
) -> None:
    write_run(nvme, 4, **settings)
    copy = tmp_path / "copy"
    _crash_copy(nvme, copy, range(3, 5), generation=3, commit_every=100, **settings)
    assert _numbers(copy) == [3]
    assert assert_finishes(copy, STEPS, **settings) == 3


DEATHS = [
    ("before unlink", 1),
    ("after unlink", 1),
    full("write", 1),
    full("before rename", 1),
    full("before rename", 2),
    full("after rename", 2),
]


@pytest.mark.parametrize(("place", "count"), DEATHS, ids=str)
def test_death_while_going_back(place: str, count: int, tmp_path: Path) -> None:
    spec = Spec(nvme=str(tmp_path / "nvme"), out=str(tmp_path), num_steps=4)
    finish(spec)
    spec.records.unlink()
    back = Spec(nvme=spec.nvme, out=spec.out, num_steps=6, generation=3, die_at=place, die_count=count)
    assert Run(back).wait() != 0
    again = Spec(nvme=spec.nvme, out=spec.out, num_steps=6)
    finish(again)
    whole = Spec(nvme=str(tmp_path / "whole"), out=str(tmp_path / "w"), num_steps=6)
    finish(whole)
    values, digests = outcome(again)
    expected, expected_digests = outcome(whole)
    # Before the newer one is gone nothing is written over: it is what the directory still stands at. The first rename
    # is that of run.json.
    first = 5 if (place, count) in (("before unlink", 1), ("before rename", 1)) else 4
    assert values == {step: expected[step] for step in range(first, 7)} and digests == expected_digests


# Earlier formats


def _as_format_1(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the files of the first version: one global manifest, under one name."""
    payload = json.loads(generation_file(nvme).read_text())["payload"]
    del payload["edition"], payload["format"], payload["states"]
    for path in nvme.glob("generation-*.json"):
        path.unlink()
    announced = [
        name for name in json.loads((nvme / "run.json").read_text())["payload"]["files"] if "tion-" not in name
    ]
    with monkeypatch.context() as patched, RunDirectory.open(nvme) as directory:
        patched.setattr(manifest, "VERSION", 1)
        manifest.write_manifest(directory, "generation.json", payload, Durability.PROCESS)
        run = {"run_id": payload["run_id"], "files": announced}
        manifest.write_manifest(directory, "run.json", run, Durability.PROCESS)


def test_a_directory_of_format_1_goes_on(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(nvme, 3)
    _as_format_1(nvme, monkeypatch)
    _goes_on_cut_anew(nvme)


def test_a_directory_of_format_2_goes_on(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(nvme, 3)
    payload = json.loads(generation_file(nvme).read_text())["payload"]
    del payload["format"], payload["states"]
    with monkeypatch.context() as patched, RunDirectory.open(nvme) as directory:
        patched.setattr(manifest, "VERSION", 2)
        manifest.write_manifest(directory, generation_file(nvme).name, payload, Durability.PROCESS)
    _goes_on_cut_anew(nvme)


def _goes_on_cut_anew(nvme: Path) -> None:
    """The slots of an array lay apart: from the next start on they are behind each other, in files of a new edition."""
    assert assert_finishes(nvme, 4) == 3
    assert not (nvme / SWAP).exists() and (nvme / "rank0.1.swap").exists()
    assert assert_finishes(nvme, 6) == 4
    assert assert_finishes(nvme, 7) == 6
    assert (nvme / "rank0.1.swap").exists() and not (nvme / "generation.json").exists()


def test_format_1_refuses_a_directory_of_format_2(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(nvme, 2)
    monkeypatch.setattr(manifest, "VERSION", 1)
    for existing in ("resume", "refuse", "discard"):  # all of them read run.json before they delete
        with pytest.raises(zo.CheckpointError, match="newer zero_offload"):
            open_model(nvme, existing=existing)
    assert (nvme / SWAP).exists()
