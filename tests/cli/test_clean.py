from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.disk import assert_finishes, write_run
from zero_offload.base.types import Durability
from zero_offload.cli.main import main
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.manifest import write_manifest

SWAP = "rank-0.swap"
NBYTES = 1 << 20


def make_tier(path: Path, names: list[str], directories: list[Path]) -> None:
    with RunDirectory.open(path) as directory:
        for name in names:
            directory.create_file(name, NBYTES).close()
        payload = {"files": [*names, "run.json", "generation.json"], "run_id": "r"}
        write_manifest(directory, "run.json", payload, Durability.PROCESS)
        generation = {"step": 3, "directories": [str(each) for each in directories]}
        write_manifest(directory, "generation.json", generation, Durability.PROCESS)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    make_tier(path / "nvme", [SWAP], [path / "nvme"])
    path.chmod(0o755)
    (path / "metrics.jsonl").write_text('{"step": 1}\n')
    (path / "run.json").write_text(json.dumps({"identity": {"offload.nvme": [str(path / "nvme")]}}))
    (path / "files.json").write_text(json.dumps({"files": ["run.json", "metrics.jsonl", "files.json", "gone"]}))
    return path


def test_everything_of_a_run_goes(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", "--yes", str(run_dir)]) == 0
    assert not run_dir.exists()
    out = capsys.readouterr().out
    assert "nvme: freed 1.01 MiB in 3 files" in out
    assert "run: freed 12 KiB in 3 files" in out


def test_a_dry_run_tells_and_deletes_nothing(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "nvme" / "mine.txt").write_text("precious")
    before = sorted(run_dir.rglob("*"))
    assert main(["clean", str(run_dir), "--dry-run"]) == 0
    assert sorted(run_dir.rglob("*")) == before
    out = capsys.readouterr().out
    assert out.splitlines() == [
        f"{run_dir / 'nvme'}: would free 1.01 MiB in 3 files",
        "  would leave mine.txt: no manifest names it",
        "  would delete generation.json: 4 KiB",
        f"  would delete {SWAP}: 1 MiB",
        "  would delete run.json: 4 KiB",
        f"{run_dir}: would free 12 KiB in 3 files",
        "  would leave nvme: no manifest names it",
        "  would delete files.json: 4 KiB",
        "  would delete metrics.jsonl: 4 KiB",
        "  would delete run.json: 4 KiB",
    ]
    assert main(["clean", "--yes", str(run_dir)]) == 0
    assert "nvme: freed 1.01 MiB in 3 files" in capsys.readouterr().out


def test_a_dry_run_says_exactly_what_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file, its bytes, the steps of its generations, and the directories."""
    run, nvme = tmp_path / "run", tmp_path / "run" / "nvme"
    write_run(nvme, 3)
    (run / "files.json").write_text(json.dumps({"files": ["files.json", "run.json"]}))
    (run / "run.json").write_text(json.dumps({"identity": {"out": str(run), "offload.nvme": [str(nvme)]}}))
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != "LOCK")
    nbytes = {str(path): path.stat().st_blocks * 512 for path in files}
    assert main(["clean", str(run), "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["directories"]
    assert {f"{each['path']}/{name}": n for each in planned for name, n in each["file_bytes"].items()} == nbytes
    assert [(each["path"], each["is_gone"]) for each in planned] == [(str(nvme), True), (str(run), True)]
    steps = planned[0]["generations"]
    assert sorted(steps) == ["generation-0.json", "generation-1.json"]
    assert steps["generation-0.json"].startswith("generation 2 (step 2, ")
    assert main(["clean", str(run), "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["directories"] == planned
    assert not run.exists()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_asks_before_it_deletes(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(run_dir.rglob("*"))
    for answer in ("\n", "n\n", "", "yess\n"):
        monkeypatch.setattr(sys, "stdin", _Terminal(answer))
        assert main(["clean", str(run_dir)]) == 2
        done = capsys.readouterr()
        assert f"  would delete {SWAP}: 1 MiB\n" in done.out
        assert f"Delete these 6 files (1.02 MiB) of {run_dir}?" in done.err and "nothing was deleted" in done.err
        assert sorted(run_dir.rglob("*")) == before
    monkeypatch.setattr(sys, "stdin", _Terminal("y\n"))
    assert main(["clean", str(run_dir)]) == 0
    assert not run_dir.exists()


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_without_a_terminal_it_refuses(
    flags: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    before = sorted(run_dir.rglob("*"))
    assert main(["clean", str(run_dir), *flags]) == 2
    err = capsys.readouterr().err
    assert f"clean would delete 6 files (1.02 MiB) of {run_dir}, and there is no terminal" in err and "--yes" in err
    assert sorted(run_dir.rglob("*")) == before


def test_what_no_manifest_names_stays(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "nvme" / "mine.txt").write_text("precious")
    (run_dir / "notes.json").write_text('{"files": ["nothing"]}')
    assert main(["clean", "--yes", str(run_dir), "--json"]) == 0
    tier, home = json.loads(capsys.readouterr().out)["directories"]
    assert tier["deleted"] == ["generation.json", SWAP, "run.json"]
    assert tier["freed_bytes"] >= NBYTES
    assert (tier["left"], home["left"]) == (["mine.txt"], ["notes.json", "nvme"])
    assert (run_dir / "nvme" / "mine.txt").read_text() == "precious"
    assert (run_dir / "notes.json").exists()
    assert not (run_dir / "metrics.jsonl").exists()


def test_a_striped_tier_is_cleaned_by_the_manifests_of_its_first_directory(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    make_tier(first, [SWAP], [first, second])
    with RunDirectory.open(second) as directory:
        directory.create_file(SWAP, NBYTES).close()
    assert main(["clean", "--yes", str(first)]) == 0
    assert not first.exists() and not second.exists()


def test_a_copy_is_cleaned_without_its_original(tmp_path: Path) -> None:
    """Manifests name the directories in which they were written: those of the original."""
    first, second = tmp_path / "first", tmp_path / "second"
    write_run([first, second], 2)
    shutil.copytree(first, tmp_path / "copy")
    assert main(["clean", "--yes", str(tmp_path / "copy")]) == 0
    assert not (tmp_path / "copy").exists()
    assert assert_finishes([first, second], 3) == 2


def test_a_copied_run_directory_is_cleaned_without_its_original(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    write_run(run / "nvme", 2)
    write_run(elsewhere, 2)
    (run / "files.json").write_text(json.dumps({"files": ["files.json", "run.json"]}))
    identity = {"out": str(run), "offload.nvme": [str(run / "nvme"), str(elsewhere)]}
    (run / "run.json").write_text(json.dumps({"identity": identity}))
    shutil.copytree(run, tmp_path / "copy")
    assert main(["clean", "--yes", str(tmp_path / "copy")]) == 0
    assert not (tmp_path / "copy").exists()
    assert assert_finishes(run / "nvme", 3) == 2 and assert_finishes(elsewhere, 3) == 2
    assert main(["clean", "--yes", str(run)]) == 0
    assert not run.exists() and not elsewhere.exists()


def test_half_written_manifests_go_too(run_dir: Path) -> None:
    (run_dir / "nvme" / "generation.json.tmp").write_text("{")
    assert main(["clean", "--yes", str(run_dir)]) == 0
    assert not run_dir.exists()


def test_a_run_in_progress_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunDirectory.open(run_dir / "nvme"):
        assert main(["clean", "--yes", str(run_dir)]) == 6
    assert "is in use by process" in capsys.readouterr().err
    assert (run_dir / "nvme" / SWAP).exists() and (run_dir / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "nvme"])
def test_a_forged_list_deletes_nothing_outside(run_dir: Path, name: str) -> None:
    outside = run_dir.parent / "outside"
    outside.write_text("precious")
    (run_dir / "files.json").write_text(json.dumps({"files": [name, "metrics.jsonl"]}))
    (run_dir / "nvme" / "mine.txt").write_text("keeps the directory")
    assert main(["clean", "--yes", str(run_dir)]) == 4
    assert outside.read_text() == "precious"
    assert (run_dir / "metrics.jsonl").exists() and (run_dir / "nvme").exists()


def test_a_damaged_manifest_deletes_nothing(run_dir: Path) -> None:
    for name in ("run.json", "generation.json"):
        (run_dir / "nvme" / name).write_text("{}")
    assert main(["clean", "--yes", str(run_dir)]) == 0
    assert (run_dir / "nvme" / SWAP).exists()


def test_what_is_no_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").touch()
    assert main(["clean", "--yes", str(tmp_path / "data")]) == 2
    assert "holds neither files.json nor a manifest" in capsys.readouterr().err
    assert main(["clean", "--yes", str(tmp_path / "missing")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    assert (tmp_path / "data" / "file").exists()
