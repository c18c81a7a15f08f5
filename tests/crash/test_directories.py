"""Directories that cannot be used, or that another user has prepared: refused in one line, and not touched."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zero_offload as zo
from tests.helpers.child import become_nobody, run_in_child
from tests.helpers.disk import SWAP, assert_finishes, open_model, small_disk, train, write_run
from tests.helpers.models import TinyLM, build
from tests.helpers.reference import read_masters
from tests.helpers.trainer import Run, Spec

STEPS = 4
LETTER = b"precious\n" * 1000


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that any user may enter; pytest's own are closed to others."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


# Planted files


@pytest.mark.parametrize("how", ["link", "symlink"])
@pytest.mark.parametrize("name", ["LOCK", "run.json.tmp", SWAP, "generation-1.json.tmp", "rank0-1.json.tmp"])
def test_a_planted_link_is_not_written_through(name: str, how: str, nvme: Path, tmp_path: Path) -> None:
    """Whatever becomes of the run."""
    letter = tmp_path / "letter"
    letter.write_bytes(LETTER)
    getattr(os, how)(letter, nvme / name)
    with contextlib.suppress(zo.ZeroOffloadError):
        write_run(nvme, 2)
    assert letter.read_bytes() == LETTER


@pytest.mark.parametrize("how", ["link", "symlink", "mkfifo"])
@pytest.mark.parametrize("name", ["LOCK", SWAP, "generation-0.json", "run.json"])
def test_what_is_no_file_of_ours_is_refused(name: str, how: str, nvme: Path, tmp_path: Path) -> None:
    write_run(nvme, 2)
    original = (nvme / name).read_bytes()
    (nvme / name).rename(tmp_path / "kept")
    if how == "mkfifo":
        os.mkfifo(nvme / name)
    else:
        getattr(os, how)(tmp_path / "kept", nvme / name)
    with pytest.raises(zo.StorageError) as caught:
        open_model(nvme)
        open_model(nvme, existing="discard")  # run.json is read for this only
    assert str(nvme / name) in str(caught.value) and caught.value.exit_code == 4
    assert (tmp_path / "kept").read_bytes() == original
    (nvme / name).unlink()
    (tmp_path / "kept").rename(nvme / name)
    assert assert_finishes(nvme, STEPS) == 2


# Directories that are not ours, or not to be written


def _offload(nvme: str) -> None:
    become_nobody()
    open_model(nvme)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_directory_of_another_user(open_place: Path) -> None:
    theirs = open_place / "theirs"
    theirs.mkdir(mode=0o755)
    ended = run_in_child(_offload, str(theirs))
    assert (ended.error, ended.exit_code) == ("StorageError", 4)
    assert f"{theirs} belongs to user 0" in ended.message
    closed = open_place / "closed"
    closed.mkdir(mode=0o700)
    ended = run_in_child(_offload, str(closed / "run"))
    assert (ended.error, ended.exit_code) == ("StorageError", 4)
    assert f"cannot reach {closed}/run: Permission denied" in ended.message and "permissions" in ended.message


def _make_read_only_and_offload(nvme: str) -> None:
    become_nobody()
    Path(nvme).mkdir(mode=0o700)
    write_run(nvme, 1)
    Path(nvme).chmod(0o500)
    (Path(nvme) / "LOCK").chmod(0o400)
    open_model(nvme)


def test_a_directory_that_became_read_only(open_place: Path) -> None:
    open_place.chmod(0o777 | 0o1000)
    ended = run_in_child(_make_read_only_and_offload, str(open_place / "run"))
    assert (ended.error, ended.exit_code) == ("StorageError", 4)
    assert f"{open_place / 'run'}/LOCK: Permission denied" in ended.message


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_that_others_may_write(mode: int, nvme: Path) -> None:
    write_run(nvme, 2)
    nvme.chmod(mode)
    with pytest.raises(zo.StorageError, match=f"chmod 700 {nvme}"):
        open_model(nvme)
    nvme.chmod(0o700)
    assert assert_finishes(nvme, STEPS) == 2


def test_a_file_or_a_link_instead_of_a_directory(nvme: Path, tmp_path: Path) -> None:
    write_run(nvme, 2)
    (tmp_path / "file").write_bytes(LETTER)
    with pytest.raises(zo.ConfigError, match="is a file, not a directory") as caught:
        open_model(tmp_path / "file")
    assert caught.value.exit_code == 2 and (tmp_path / "file").read_bytes() == LETTER
    with pytest.raises(zo.StorageError, match=f"{tmp_path / 'file'}.*Not a directory"):
        open_model(tmp_path / "file" / "run")
    (tmp_path / "link").symlink_to(nvme)
    with pytest.raises(zo.StorageError, match=f"symbolic link; give the directory it points to: {nvme}"):
        open_model(tmp_path / "link")
    assert assert_finishes(nvme, STEPS) == 2


NAMES = ["two words", "naïve-目录-🙂", "quo'te\"s", "x" * 255, "new/line\n", "a/missing/tree"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_of_all_kinds(name: str, tmp_path: Path) -> None:
    nvme = tmp_path / name
    write_run(nvme, 2)
    assert assert_finishes(nvme, STEPS) == 2


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(zo.StorageError, match="File name too long.*shorter path"):
        open_model(tmp_path / ("x" * 256))


# Who uses it


def test_two_models_in_one_process(tmp_path: Path) -> None:
    """Each needs a directory of its own; the same one is refused, and names this process."""
    first, optimizer = open_model(tmp_path / "a")
    train(first, optimizer, 0, 2)
    second = build(TinyLM)
    with pytest.raises(zo.LockError, match=f"process {os.getpid()} ") as caught:
        open_model(tmp_path / "a", second)
    assert caught.value.exit_code == 6
    other, others = open_model(tmp_path / "b", second)
    for step in range(2, STEPS):
        assert train(first, optimizer, step, step + 1)
        train(other, others, step, step + 1)
    zo.close(other), zo.close(first)
    assert assert_finishes(tmp_path / "a", STEPS + 1) == STEPS


def test_a_lock_that_a_dead_run_has_left(tmp_path: Path) -> None:
    """The lock is the kernel's; what stands in the file is for people."""
    run = Run(Spec(nvme=str(tmp_path / "nvme"), out=str(tmp_path), num_steps=10**6))
    assert run.wait_for_rows(2)
    run.stop()
    left = json.loads((tmp_path / "nvme" / "LOCK").read_text())
    assert left["pid"] == run.pid
    model, _ = open_model(tmp_path / "other")
    for text in (json.dumps(left | {"host": "elsewhere", "pid": 1}), "", "\x00" * 10, "[" * 10**5):
        zo.close(model)
        (tmp_path / "other" / "LOCK").write_text(text)
        model, _ = open_model(tmp_path / "other")
        with pytest.raises(zo.LockError, match=f"process {os.getpid()} "):
            open_model(tmp_path / "other")
    zo.close(model)


# File systems that are no disks


def test_memory_that_looks_like_a_disk_is_said_to_be_none(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        with pytest.warns(UserWarning, match=f"{disk / 'run'}: tmpfs is memory.*choose a directory on a disk"):
            write_run(disk / "run", 2)
        assert assert_finishes(disk / "run", STEPS) == 2


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    parts = {name: tmp_path / name for name in ("lowerdir", "upperdir", "workdir", "merged")}
    for part in parts.values():
        part.mkdir(mode=0o700)
    merged = parts.pop("merged")
    options = ",".join(f"{name}={path}" for name, path in parts.items())
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting an overlay needs root")
    yield merged
    subprocess.run(["umount", "--lazy", str(merged)], check=True)


def test_a_containers_own_layer_works_and_is_warned_of(overlay: Path) -> None:
    with pytest.warns(UserWarning, match="overlay is a container's own layer.*mount a volume"):
        write_run(overlay / "run", 2)
    assert assert_finishes(overlay / "run", STEPS) == 2


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs"])
def test_a_file_system_elsewhere_is_warned_of(kind: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zero_offload.hardware import probe

    monkeypatch.setattr(probe, "file_system_type", lambda path: kind)
    with pytest.warns(UserWarning, match=f"{kind} is remote.*local NVMe disk"):
        write_run(nvme, 2)
    monkeypatch.setattr(probe, "file_system_type", lambda path: "ext4")
    with warnings.catch_warnings(action="error"):
        assert assert_finishes(nvme, STEPS) == 2


# Nothing of the above is left half done


@pytest.mark.parametrize("spoil", [lambda path: path.chmod(0o777), lambda path: (path / SWAP).touch()])
def test_a_refused_start_leaves_the_model_as_it_was(spoil: Callable[[Path], None], nvme: Path) -> None:
    spoil(nvme)
    model = build(TinyLM)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with pytest.raises(zo.StorageError):
        open_model(nvme, model)
    assert all(param.equal(before[name]) for name, param in model.named_parameters())
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    assert all(value.equal(before[name]) for name, value in read_masters(model).items())
    zo.close(model)
