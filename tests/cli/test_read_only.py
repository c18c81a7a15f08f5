"""Runs that may only be read: on a read-only file system, of another user, and beside a run that is alive."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.disk import SWAP, close_broken, committed_blocks, drain, flip_bit, open_model, train, write_run
from tests.helpers.fresh import run_script
from tests.helpers.models import TinyLM, build
from tests.helpers.reference import read_masters
from tests.helpers.trainer import NoisyLM, Run, Spec
from zero_offload.checkpoint.saved_generation import SavedGeneration
from zero_offload.cli.main import main
from zero_offload.storage.files.directory import RunDirectory

Capture = pytest.CaptureFixture[str]
_NOBODY = 65534

# One line for each command: its exit code, or the sum of what was loaded.
_READS = """
import contextlib, io, os, sys
import torch
import zero_offload as zo
from tests.helpers.models import TinyLM, build
from zero_offload.cli import main
import zero_offload.cli.doctor, zero_offload.cli.export, zero_offload.cli.verify
import zero_offload.cli.report
nvme, run, out, user = sys.argv[1:]
model = build(TinyLM)
zo.offload(model, zo.OffloadConfig())
if int(user):
    os.setgroups([]); os.setgid(int(user)); os.setuid(int(user))
for command in (["verify", nvme], ["export", nvme, out], ["doctor", nvme], ["report", run]):
    with contextlib.redirect_stdout(io.StringIO()):
        code = main.main(command)
    print(command[0], code if command[0] != "doctor" else code in (0, 3))
print("load", zo.load_checkpoint(model, None, nvme).step)
"""
_FOUND = ["verify 0", "export 0", "doctor True", "report 0", "load 3"]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that any user may go through."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


def _write(root: Path) -> tuple[Path, Path]:
    """The states of a run, and its run directory."""
    model, optimizer = open_model(root / "nvme")
    with zo.RunLog(root / "run", model) as log:
        for step in range(3):
            train(model, optimizer, step, step + 1)
            log.step(step + 1, loss=1.0)
    zo.close(model)
    return root / "nvme", root / "run"


def _listing(root: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(path): (path.lstat().st_mtime_ns, path.lstat().st_ctime_ns, path.lstat().st_size)
        for path in [root, *root.rglob("*")]
    }


def _read(nvme: Path, run: Path, out: Path, user: int = 0) -> list[str]:
    ended = run_script(_READS, str(nvme), str(run), str(out), str(user))
    assert ended.returncode == 0, ended.stderr
    return [line for line in ended.stdout.splitlines() if line]


def test_a_read_only_file_system(place: Path) -> None:
    mounted = place / "mounted"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(mounted)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting needs root, and a container that lets it")
    try:
        nvme, run = _write(mounted)
        subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
        before = _listing(mounted)
        assert _read(nvme, run, place / "out") == _FOUND
        assert _listing(mounted) == before
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


def test_files_of_another_user(place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("another user's rights need root")
    nvme, run = _write(place)
    for path in [nvme, run, *nvme.iterdir(), *run.iterdir()]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    (nvme / "LOCK").chmod(0)
    (place / "mine").mkdir()
    os.chown(place / "mine", _NOBODY, _NOBODY)
    before = _listing(nvme) | _listing(run)
    assert _read(nvme, run, place / "mine" / "out", _NOBODY) == _FOUND
    assert _listing(nvme) | _listing(run) == before


def test_a_backup_of_hard_links_is_read_and_never_written(tmp_path: Path, capsys: Capture) -> None:
    write_run(tmp_path / "run", 2)
    shutil.copytree(tmp_path / "run", tmp_path / "backup", copy_function=os.link)
    assert main(["verify", str(tmp_path / "backup")]) == 0
    with RunDirectory.open(tmp_path / "other") as directory:
        os.link(tmp_path / "run" / SWAP, tmp_path / "other" / SWAP)
        with pytest.raises(zo.StorageError, match="hard links"):
            directory.open_file(SWAP)


def test_a_reader_keeps_runs_out(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 2)
    with RunDirectory.read(tmp_path / "run") as directory:
        assert directory.user == ""
        ended = run_script(
            "import sys; from tests.helpers.disk import write_run; write_run(sys.argv[1], 3)", str(tmp_path / "run")
        )
    assert "LockError" in ended.stderr


def _json_of(capsys: Capture, *arguments: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[Run]:
    """A run that commits each step."""
    run = Run(Spec(nvme=str(tmp_path / "nvme"), out=str(tmp_path), num_steps=10**6))
    assert run.wait_for_rows(4)
    yield run
    run.stop()


def test_beside_a_run_that_commits_every_step(alive: Run, tmp_path: Path, capsys: Capture) -> None:
    """A generation that is written over meanwhile is read again, and no command calls it damaged."""
    nvme, user, steps = alive.spec.nvme, f"process {alive.pid} on ", []
    for number in range(3):
        code, found = _json_of(capsys, "verify", nvme)
        [newest] = found["generations"]
        assert code == 0 and newest["whole"] and found["in_use"].startswith(user)
        code, exported = _json_of(capsys, "export", nvme, str(tmp_path / f"out{number}"))
        assert code == 0 and exported["in_use"].startswith(user)
        steps += [newest["step"], exported["step"]]
    assert steps == sorted(steps) and steps[-1] > steps[0]
    model = build(NoisyLM)
    zo.offload(model, zo.OffloadConfig())
    with pytest.warns(UserWarning, match=f"in use by {user}.*the run is alive"):
        assert zo.load_checkpoint(model, None, nvme).step >= steps[-1]
    assert main(["verify", nvme]) == 0 and "the run is alive" in capsys.readouterr().out
    assert alive.process.exitcode is None  # no command has disturbed it
    alive.stop()
    assert main(["verify", nvme]) == 0
    zo.close(model)


def test_what_is_written_over_while_it_is_read(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of a load are those of one step; asked for by number there is no other; and damage stays damage."""
    nvme, left = tmp_path / "nvme", [2]
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 2)
    drain(model)

    def beside(cls: type[RunDirectory], path: Path) -> RunDirectory:
        """As a reader in another process has it."""
        directory = cls.look(path)
        directory.user = "process 1 on elsewhere"
        return directory

    def slowly(self: SavedGeneration, *args: Any) -> None:
        """The run takes two steps, and writes over what is read."""
        if left[0]:
            left[0] -= 1
            train(model, optimizer, self.generation.step, self.generation.step + 2)
            drain(model)
        read(self, *args)

    read = SavedGeneration.read
    monkeypatch.setattr(RunDirectory, "read", classmethod(beside))
    monkeypatch.setattr(SavedGeneration, "read", slowly)
    reader = build(TinyLM)
    zo.offload(reader, zo.OffloadConfig())
    with pytest.warns(UserWarning, match="the run is alive"):
        assert zo.load_checkpoint(reader, None, nvme).step == 6
    expected, got = read_masters(model), read_masters(reader)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    left[0] = 1
    assert main(["export", str(nvme), str(tmp_path / "out"), "--generation", "6"]) == 6
    assert "the run is alive, and wrote over generation 6 (step 6" in capsys.readouterr().err
    flip_bit(nvme / SWAP, next(offset for offset, component in committed_blocks(nvme) if component == "value"))
    assert main(["verify", str(nvme)]) == 5 and main(["export", str(nvme), str(tmp_path / "out")]) == 5
    assert "the run is alive" not in capsys.readouterr().err and not (tmp_path / "out").exists()
    zo.close(reader)
    close_broken(model)
