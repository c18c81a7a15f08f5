"""Directories that hold something else than this run: another run's files, a checkpoint, what was left over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers.disk import SWAP, assert_finishes, flip_bit, open_model, train, write_run
from zero_offload.storage.files.directory import RunDirectory

STEPS = 4


def _content(*paths: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for path in paths for file in path.iterdir() if file.name != "LOCK"}


@pytest.mark.parametrize("existing", ["resume", "discard", "refuse"])
@pytest.mark.parametrize("name", ["run.json", SWAP])
def test_a_second_directory_with_another_run_is_refused(name: str, existing: str, tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    write_run(theirs, 2)
    if name == SWAP:  # as the second directory of a run
        (theirs / "run.json").rename(tmp_path / "kept")
        for path in theirs.glob("*.json"):
            path.unlink()
    if existing != "refuse":
        write_run(mine, 2)
    before = _content(theirs, *filter(Path.exists, [mine]))
    with pytest.raises(zo.ConfigError, match=f"{theirs} holds .*, which the run in .* has not written"):
        open_model([mine, theirs], existing=existing)
    assert _content(*filter(Path.exists, [mine, theirs])) == before
    if existing != "refuse":
        assert assert_finishes(mine, STEPS) == 2


@pytest.mark.parametrize("existing", ["resume", "discard"])
def test_a_checkpoint_is_not_trained_in(existing: str, nvme: Path, tmp_path: Path) -> None:
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 2)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    zo.close(model)
    before = _content(tmp_path / "saved")
    for places in ([tmp_path / "saved"], [tmp_path / "saved", tmp_path / "second"]):
        with pytest.raises(zo.ConfigError, match=r"never change. Load it with zo\.load_checkpoint.*zero-offload clean"):
            open_model(places, existing=existing)
    with pytest.raises(zo.ConfigError, match="which the run in"):
        open_model([nvme, tmp_path / "saved"])
    assert _content(tmp_path / "saved") == before


def test_discard_takes_the_files_of_every_directory_that_the_run_had(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    write_run([first, second, third], 1, durability="commit")
    (third / "run.json").write_text("{}")  # another run has it now
    with RunDirectory.open(second), pytest.raises(zo.LockError, match=str(second)):
        open_model(first, existing="discard")
    assert assert_finishes(first, STEPS, existing="discard") == 0
    assert _content(second) == {} and (third / SWAP).exists()
    assert assert_finishes([first, second], STEPS, existing="discard") == 0


def test_names_are_gone_for_good_before_the_list_forgets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_run([first, second], 2, durability="commit")
    calls: list[tuple[str, Path]] = []

    def record(name: str) -> None:
        original = getattr(RunDirectory, name)

        def call(self: RunDirectory, *args: Any) -> Any:
            calls.append((name, self.path))
            return original(self, *args)

        monkeypatch.setattr(RunDirectory, name, call)

    record("remove")
    record("sync")
    model, _ = open_model(first, durability="commit")
    last = max(place for place, (name, path) in enumerate(calls) if (name, path) == ("remove", second))
    assert calls[last + 1] == ("sync", second)
    zo.close(model)


def test_a_file_that_is_left_over_is_said_to_be(nvme: Path) -> None:
    write_run(nvme, 1)
    for path in nvme.glob("*.json"):
        path.unlink()
    with pytest.raises(zo.StorageError, match=f"{nvme / SWAP}: File exists.*left over.*by hand"):
        open_model(nvme)


def test_a_damaged_list_says_how_to_start_over(nvme: Path) -> None:
    write_run(nvme, 2)
    flip_bit(nvme / "run.json", (nvme / "run.json").stat().st_size - 5)
    with pytest.raises(zo.IntegrityError, match="Resume once with existing='resume'") as caught:
        open_model(nvme, existing="discard")
    assert "or start over" not in str(caught.value)
    assert assert_finishes(nvme, STEPS) == 2
    assert assert_finishes(nvme, STEPS, existing="discard") == 0


def test_the_same_directories_in_another_order(tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    write_run([first, second, third], 2)
    assert assert_finishes([first, third, second], STEPS) == 2
    assert [(path / SWAP).exists() for path in (first, second, third)] == [False] * 3
    with pytest.raises(zo.ConfigError, match=f"{first} holds .*first"):
        open_model([second, first, third])


def test_a_directory_that_the_run_has_left_is_free_for_others(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_run([first, second], 2)
    model, optimizer = open_model(first)
    zo.resume(model, optimizer)
    with RunDirectory.open(second) as free:
        assert free.names() == []
    train(model, optimizer, 2, 3)
    zo.close(model)


def test_a_refused_start_frees_the_directories_of_the_earlier_cut(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_run([first, second], 2)
    (second / SWAP).rename(tmp_path / "kept")
    with pytest.raises(zo.StorageError, match=str(second / SWAP)):
        open_model(first)
    with RunDirectory.open(first), RunDirectory.open(second):
        (tmp_path / "kept").rename(second / SWAP)
    assert assert_finishes(first, STEPS) == 2
