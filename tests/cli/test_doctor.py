from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.without_library import without_library
from zero_offload.base.errors import CapacityError
from zero_offload.cli import doctor
from zero_offload.cli.doctor import Check, Status, examine
from zero_offload.cli.main import main
from zero_offload.hardware import native, probe
from zero_offload.hardware.probe import MemoryLimit
from zero_offload.storage.memory import arena


def find(checks: tuple[Check, ...], name: str) -> Check:
    return next(check for check in checks if check.name.startswith(name))


def test_every_problem_has_a_fix_and_nothing_else_has(tmp_path: Path) -> None:
    for check in examine([tmp_path]):
        assert bool(check.fix) == (check.status is not Status.OKAY), check


def test_the_report_and_its_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--nvme", str(tmp_path)])
    out = capsys.readouterr().out
    assert code == (3 if "[FAIL]" in out else 0)
    for name in ("python", "torch", "native library", "cpu", "memory", "device", f"directory {tmp_path}"):
        assert f" {name}: " in out
    assert list(tmp_path.iterdir()) == []


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--nvme", str(tmp_path)])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (code == 0)
    assert {check["name"] for check in report["checks"]} >= {"direct I/O", "disk space", "file system"}


def test_a_missing_library_is_a_warning_that_says_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with without_library():
        assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "[WARNING] native library: the native library does not load" in out
    assert "fix: make native" in out
    assert " kernels: numba, with the same bits" in out


def test_a_library_that_cannot_be_used_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise CapacityError("no descriptor is left")

    monkeypatch.setattr(native, "missing", refuse)
    assert main(["doctor"]) == 3
    out = capsys.readouterr().out
    assert "[FAIL]    native library: no descriptor is left" in out
    assert "[FAIL]    kernels: none run: no descriptor is left" in out


def test_a_sandbox_that_forbids_io_uring_is_told() -> None:
    code = (
        "from tests.helpers.seccomp import forbid_io_uring\n"
        "from zero_offload.cli.main import main\n"
        "forbid_io_uring()\n"
        "main(['doctor'])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "[WARNING] io_uring: io_uring is not to be had here: io_uring_setup: Operation not permitted" in out
    assert "fix: none is needed, threads serve" in out


def test_the_library_names_its_kernels() -> None:
    if not native.available():
        pytest.skip("the native library is not built")
    assert find(examine([]), "native library").detail.endswith(native.isa().name.lower())
    assert find(examine([]), "kernels").detail == f"native, for {native.isa().name.lower()}"


@pytest.mark.parametrize(
    ("mode", "status"), [("madvise", Status.OKAY), ("never", Status.WARNING), (None, Status.WARNING)]
)
def test_huge_pages(monkeypatch: pytest.MonkeyPatch, mode: str | None, status: Status) -> None:
    monkeypatch.setattr(probe, "huge_page_mode", lambda: mode)
    assert find(examine([]), "huge pages").status is status


@pytest.mark.parametrize(("moves", "status"), [(True, Status.OKAY), (False, Status.WARNING)])
def test_moving_pages(monkeypatch: pytest.MonkeyPatch, moves: bool, status: Status) -> None:
    monkeypatch.setattr(arena, "moves_pages", lambda: moves)
    assert find(examine([]), "moving pages").status is status


def test_little_memory_is_a_warning_that_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (MemoryLimit("host", 1 << 40), MemoryLimit("cgroup /x", 1 << 20))
    monkeypatch.setattr(probe, "memory_limits", lambda: limits)
    check = find(examine([]), "memory")
    assert (check.status, check.detail) == (Status.WARNING, "1 MiB available (limited by cgroup /x)")


def test_no_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find_compiler", lambda: None)
    assert find(examine([]), "compiler").status is Status.WARNING


@pytest.mark.parametrize(("kind", "status"), [("tmpfs", "WARNING"), ("nfs4", "WARNING"), ("ext4", "OKAY")])
def test_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, status: str) -> None:
    monkeypatch.setattr(probe, "file_system_type", lambda path: kind)
    monkeypatch.setattr(probe, "supports_direct_io", lambda path: False)
    checks = examine([tmp_path])
    assert find(checks, "file system").status.value == status
    assert find(checks, "direct I/O").status is Status.WARNING


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "nvme_free_bytes", lambda paths: 5)
    assert find(examine([tmp_path]), "disk space").detail == "5 B free"
    assert find(examine([tmp_path]), "disk space").status is Status.WARNING


def test_unusable_directories_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    for name in ("file", "open", "link", "file/below"):
        assert find(examine([tmp_path / name]), "directory").status is Status.FAIL, name
    assert "chmod 700" in find(examine([tmp_path / "open"]), "directory").detail
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert "is not writable" in find(examine([tmp_path]), "directory").detail


def test_a_directory_to_be_created_is_not_created(tmp_path: Path) -> None:
    check = find(examine([tmp_path / "a" / "b"]), "directory")
    assert (check.status, check.detail) == (Status.OKAY, "will be created")
    assert not (tmp_path / "a").exists()


def test_usage_errors_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["nonsense"])
    assert caught.value.code == 2
    for command in ("train", "plan", "doctor", "report", "clean"):
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        assert "--json" in capsys.readouterr().out


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupt)
    assert main(["doctor"]) == 130


def test_python_dash_m() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "zero_offload", "plan", "--model", "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: --model 'x' is not a known model")
