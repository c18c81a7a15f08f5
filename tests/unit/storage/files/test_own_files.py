"""Files are deleted by a list of ours, one by one; what others put beside them stays and is named."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import zero_offload as zo
from zero_offload.storage.files.own_files import (
    LIST_NAME,
    add_to_list,
    all_files,
    delete,
    drop_empty,
    listed,
    move_aside,
    write_list,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files of ours: two in it, one below."""
    path = tmp_path / "ours"
    (path / "below").mkdir(parents=True)
    for name in ("a.bin", "b.bin", "below/c.bin"):
        (path / name).write_text(name)
    write_list(path)
    return path


def test_what_is_ours_goes_whole(folder: Path) -> None:
    assert listed(folder) == ["a.bin", "b.bin", "below/c.bin", LIST_NAME]
    assert delete(folder, listed(folder)) is None
    assert not folder.exists()


def test_what_others_put_there_stays_and_is_named(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "below" / "mine").mkdir()
    (folder / "below" / "mine" / "x").write_text("mine")
    kept = delete(folder, listed(folder))
    assert kept is not None and kept.names == ("below/mine/x", "notes.txt")
    assert str(kept) == f"{folder}: 2 files that no list names stay: below/mine/x, notes.txt"
    assert all_files(folder) == ["below/mine/x", "notes.txt"]


@pytest.mark.parametrize("what", ["link", "directory", "link on the way", "link to the folder"])
def test_another_kind_under_a_name_of_ours_stays(folder: Path, tmp_path: Path, what: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "c.bin").write_text("precious")
    path = folder
    if what == "link":
        (folder / "a.bin").unlink()
        (folder / "a.bin").symlink_to(outside / "c.bin")
    elif what == "directory":
        (folder / "a.bin").unlink()
        (folder / "a.bin").mkdir()
        (folder / "a.bin" / "x").write_text("mine")
    elif what == "link on the way":
        os.rename(folder / "below", tmp_path / "moved")
        (folder / "below").symlink_to(outside)
    else:
        path = tmp_path / "link"
        path.symlink_to(folder)
    names = ["a.bin", "b.bin", "below/c.bin", LIST_NAME]
    assert not (what == "link to the folder" and listed(path))
    delete(path, names)
    assert (outside / "c.bin").read_text() == "precious"
    left = {"link": ["a.bin"], "directory": ["a.bin"], "link on the way": ["below"]}
    assert sorted(os.listdir(folder)) == left.get(what, sorted(["a.bin", "b.bin", "below", LIST_NAME]))


@pytest.mark.parametrize("names", [["../outside"], ["/etc/passwd"], [""], "a.bin", [3], None])
def test_a_forged_list_leads_nowhere(tmp_path: Path, names: object) -> None:
    import json

    (tmp_path / "outside").write_text("precious")
    folder = tmp_path / "ours"
    folder.mkdir()
    (folder / LIST_NAME).write_text(json.dumps({"folder": "ours", "files": names}))
    delete(folder, [*listed(folder), "../outside"])
    assert (tmp_path / "outside").read_text() == "precious"


def test_a_copy_of_a_folder_is_its_owners(folder: Path) -> None:
    os.rename(folder, copy := folder.with_name("my copy"))
    assert listed(copy) == []


def test_a_copy_under_a_name_of_ours_is_its_owners_too(tmp_path: Path) -> None:
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / "model.safetensors").write_text("ours")
    write_list(tmp_path / "step-4")
    shutil.copytree(tmp_path / "step-4", tmp_path / "step-40")
    delete(tmp_path, listed(tmp_path))
    assert all_files(tmp_path) == ["step-40/model.safetensors", f"step-40/{LIST_NAME}"]


def test_what_a_kill_has_left_half_made(tmp_path: Path) -> None:
    for name in (".step-3.partial-0123456789ab", "step-4"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001-of-00002.safetensors").write_text("")
        (tmp_path / name / "notes.txt").write_text("mine")
    (tmp_path / "step-5").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_text("mine")
    delete(tmp_path, listed(tmp_path))
    assert all_files(tmp_path) == [
        ".step-3.partial-0123456789ab/notes.txt",
        "other/model.safetensors",
        "step-4/notes.txt",
    ]
    assert not (tmp_path / "step-5").exists()


def test_what_comes_one_by_one(folder: Path) -> None:
    (folder / "there").write_text("mine")
    with pytest.raises(zo.StorageError, match="there is there, and .* does not list it"):
        add_to_list(folder, ["new", "there"])
    add_to_list(folder, ["new", "a.bin"])
    (folder / "new").write_text("")
    assert listed(folder) == ["a.bin", "b.bin", "below/c.bin", "new", LIST_NAME]


def test_a_name_that_is_taken(folder: Path) -> None:
    assert move_aside(folder / "none") is None
    for expected in ("a.bin.kept", "a.bin.kept1"):
        (folder / "a.bin").write_text(expected)
        assert move_aside(folder / "a.bin") == folder / expected
    assert (folder / "a.bin.kept").read_text() == "a.bin.kept"


def test_directories_without_files(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "d").mkdir()
    (tmp_path / "a" / "d" / "x").write_text("mine")
    drop_empty(tmp_path / "a")
    assert sorted(os.listdir(tmp_path / "a")) == ["d"]
