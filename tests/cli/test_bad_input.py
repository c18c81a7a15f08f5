"""Whatever a user gets wrong is one clear message and an exit code; nothing is lost and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import zero_offload as zo
import zero_offload.finetune.pretrain.train  # noqa: F401 - loaded before a test gives up the right to read it
from zero_offload.base.errors import ConfigError, StorageError
from zero_offload.checkpoint.metrics import Metrics
from zero_offload.cli import report
from zero_offload.cli.main import main
from zero_offload.storage.files.directory import RunDirectory

pytestmark = pytest.mark.usefixtures("quick_endings")
SIZES = ["--model", "tiny", "--seq", "16", "--batch", "1", "--steps", "3"]
NOBODY = 65534

Capture = pytest.CaptureFixture[str]


class Done(NamedTuple):
    code: int
    out: str
    err: str


def _run(capsys: Capture, *arguments: object) -> Done:
    capsys.readouterr()
    return Done(main([*map(str, arguments)]), *capsys.readouterr())


def _is_one_message(err: str) -> bool:
    return err.count("error: ") == 1 and "Traceback" not in err


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return path


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that any user may enter; pytest's own are closed to others."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", path], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a file system takes root")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


@contextlib.contextmanager
def _not_root() -> Iterator[None]:
    """Run as a user without root's rights, for whom a file can be read-only."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--steps", 0, "--batch", -1, "--model", "tinny"], ["steps=0", "batch=-1", "'tiny'"]),
        (["--params-tier", "disk", "--seq", 0], ["params='disk'", "seq=0"]),
        (["--stage", 5, "--precision", "fp8"], ["has 2 problems", "stage=5", "fp8"]),
        (["--commit-every", 0, "--cpu-memory", "0GiB", "--lr", 0], ["commit_every=0", "'0GiB'", "lr=0"]),
    ],
)
def test_every_wrong_setting_is_named_at_once(
    tmp_path: Path, capsys: Capture, flags: list[object], parts: list[str]
) -> None:
    done = _run(capsys, "train", "--out", tmp_path / "run", *flags)
    assert done.code == 2 and _is_one_message(done.err)
    assert all(part in done.err for part in parts), done.err
    assert not (tmp_path / "run").exists()


def test_a_typo_in_the_file_is_met_with_the_nearest_name(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run.toml").write_text("[train]\nstepz = 3\n[offload]\noptimiser = 'nvme'\n")
    done = _run(capsys, "train", tmp_path / "run.toml", "--out", tmp_path / "run")
    assert done.code == 2 and _is_one_message(done.err)
    assert "stepz: did you mean steps?" in done.err and "optimiser: did you mean optimizer?" in done.err
    (tmp_path / "run.toml").write_text("[trian]\nsteps = 3\n")
    assert "trian: did you mean train?" in _run(capsys, "train", tmp_path / "run.toml").err
    (tmp_path / "run.toml").write_text("steps = = 3\n")
    assert "is not valid TOML" in _run(capsys, "train", tmp_path / "run.toml").err
    assert "none.toml" in _run(capsys, "train", tmp_path / "none.toml").err


def test_the_disk_tier_needs_a_directory(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run.toml").write_text("[offload]\nnvme = []\n")
    done = _run(capsys, "train", tmp_path / "run.toml", "--out", tmp_path / "run")
    assert done.code == 2 and _is_one_message(done.err)
    assert "optimizer='nvme' needs a directory; add nvme=" in done.err


def test_text_that_cannot_be_trained_on(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "folder").mkdir()
    cases = {
        "none.txt": "none.txt: no such file",
        "empty.txt": "empty.txt: the file is empty",
        "short.txt": "128 + 1",
        "folder": "holds no text file",
        "/dev/null": "/dev/null: neither a file nor a directory",
    }
    for name, words in cases.items():
        done = _run(capsys, "train", "--data", tmp_path / name, "--out", tmp_path / "run")
        assert done.code == 2 and _is_one_message(done.err), done.err
        assert words in done.err
        assert not (tmp_path / "run").exists()


def test_a_directory_in_use(tmp_path: Path, text: Path, capsys: Capture) -> None:
    with RunDirectory.open(tmp_path / "nvme"):
        done = _run(capsys, "train", *SIZES, "--data", text, "--out", tmp_path / "run", "--nvme", tmp_path / "nvme")
    assert done.code == 6 and _is_one_message(done.err)
    assert f"is in use by process {os.getpid()}" in done.err
    assert not (tmp_path / "run").exists()


def test_a_run_directory_in_use(tmp_path: Path, text: Path, capsys: Capture) -> None:
    """The tiers are apart: only the run directory is shared."""
    with RunDirectory.open(tmp_path / "run"):
        done = _run(capsys, "train", *SIZES, "--data", text, "--out", tmp_path / "run", "--nvme", tmp_path / "nvme")
    assert done.code == 6 and _is_one_message(done.err)
    assert f"{tmp_path / 'run'} is in use by process {os.getpid()}" in done.err
    assert not (tmp_path / "nvme").exists()


def test_a_planted_link_in_the_run_directory(tmp_path: Path, text: Path, capsys: Capture) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "sample.txt").symlink_to(tmp_path / "precious")
    done = _run(capsys, "train", *SIZES, "--data", text, "--out", tmp_path / "run", "--nvme", tmp_path / "nvme")
    assert done.code == 4 and _is_one_message(done.err) and "sample.txt is not a regular file" in done.err
    assert (tmp_path / "precious").read_text() == "precious" and not (tmp_path / "nvme").exists()


def test_a_read_only_directory(open_place: Path, text: Path, capsys: Capture) -> None:
    copy = shutil.copy(text, open_place / "text.txt")
    os.chmod(copy, 0o644)
    read_only = open_place / "shelf"
    read_only.mkdir(mode=0o555)
    with _not_root():
        done = _run(capsys, "train", *SIZES, "--data", copy, "--out", read_only / "run")
        checked = _run(capsys, "doctor", "--nvme", read_only)
    assert done.code == 4 and _is_one_message(done.err), done.err
    assert "Permission denied" in done.err and str(read_only) in done.err
    assert checked.code == 3 and "[FAIL]" in checked.out
    assert list(read_only.iterdir()) == []


def test_a_directory_that_is_not_named_may_be_closed(
    open_place: Path, text: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory that a run has by default is another user's here."""
    copy = shutil.copy(text, open_place / "text.txt")
    os.chmod(copy, 0o644)
    (open_place / "runs").mkdir(mode=0)
    monkeypatch.chdir(open_place)
    with _not_root():
        elsewhere = _run(capsys, "train", *SIZES, "--out", "mine", "--data", "none.txt")
        refused = _run(capsys, "train", *SIZES, "--data", copy)
    assert elsewhere.code == 2 and "none.txt: no such file" in elsewhere.err
    assert refused.code == 4 and _is_one_message(refused.err) and "Permission denied" in refused.err


def test_a_disk_too_small_for_the_plan(small_disk: Path, text: Path, tmp_path: Path, capsys: Capture) -> None:
    (small_disk / "ballast").write_bytes(bytes(24 << 20))
    done = _run(capsys, "train", *SIZES, "--data", text, "--out", tmp_path / "run", "--nvme", small_disk / "nvme")
    assert done.code == 3 and _is_one_message(done.err)
    assert "missing" in done.err and "would fit: durability='scratch'" in done.err
    assert not (small_disk / "nvme").exists() and not (tmp_path / "run").exists()


def test_a_disk_that_fills_up_stops_the_run_and_loses_nothing(
    small_disk: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    flags = [*SIZES, "--steps", 20, "--data", text, "--out", small_disk / "run", "--nvme", tmp_path / "nvme"]
    ballast = small_disk / "ballast"
    # Room for the lock, the run's description and a page of metrics, which is a few steps.
    ballast.write_bytes(bytes((40 << 20) - 4 * 4096))
    stopped = _run(capsys, "train", *flags)
    assert stopped.code == 4 and _is_one_message(stopped.err), stopped.err
    assert "No space left on device" in stopped.err and "metrics.jsonl" in stopped.err
    ballast.unlink()
    done = _run(capsys, "train", *flags)
    assert done.code == 0 and "resuming from step" in done.out
    rows = (small_disk / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 21))


@pytest.mark.parametrize("first", [1, 3])
def test_a_row_that_cannot_be_written_in_a_first_step_costs_no_resume(
    first: int, text: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*SIZES, "--data", text, "--out", tmp_path / "run", "--steps"]
    if first > 1:
        assert _run(capsys, "train", *flags, first - 1).code == 0

    def fail(*_: object) -> None:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patches:
        patches.setattr(Metrics, "append", fail)
        assert _run(capsys, "train", *flags, 4).code == 4
    done = _run(capsys, "train", *flags, 4)
    assert done.code == 0 and f"resuming from step {first} " in done.out
    assert f"metrics.jsonl has no row of step {first}\n" in done.out


def test_a_report_that_cannot_be_written_is_said_and_the_run_counts(
    small_disk: Path, text: Path, tmp_path: Path, capsys: Capture
) -> None:
    (small_disk / "ballast").write_bytes(bytes((40 << 20) - 16 * 4096))
    flags = [*SIZES, "--data", text, "--out", small_disk / "run", "--nvme", tmp_path / "nvme"]
    done = _run(capsys, "train", *flags)
    assert done.code == 0 and "no report: cannot write" in done.err
    assert _run(capsys, "report", small_disk / "run").code == 4
    assert not any(path.name.startswith("report.png") for path in (small_disk / "run").iterdir())


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damaged_states_are_never_trained_on(damage: str, text: Path, tmp_path: Path, capsys: Capture) -> None:
    flags = [*SIZES, "--data", text, "--out", tmp_path / "run"]
    assert _run(capsys, "train", *flags).code == 0
    swap = tmp_path / "run" / "nvme" / "rank0.swap"
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    if damage == "truncate":
        os.truncate(swap, swap.stat().st_size // 2)
    else:
        content = bytearray(swap.read_bytes())
        content[:] = (byte ^ 1 for byte in content)
        swap.write_bytes(content)
    done = _run(capsys, "train", *flags)
    assert done.code == 5 and _is_one_message(done.err), done.err
    assert str(swap) in done.err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_gradients_that_stay_non_finite_stop_the_run(text: Path, tmp_path: Path, capsys: Capture) -> None:
    with pytest.warns(UserWarning, match="NaN or infinite"):
        done = _run(capsys, "train", *SIZES, "--data", text, "--out", tmp_path / "run", "--lr", 1e38, "--steps", 50)
    assert done.code == 7 and _is_one_message(done.err), done.err
    assert "smaller --lr" in done.err


def test_commands_that_look_at_a_run_refuse_what_is_none(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "letter.txt").write_text("precious")
    for command in ("report", "clean"):
        done = _run(capsys, command, tmp_path)
        assert done.code == 2 and _is_one_message(done.err)
        assert str(tmp_path) in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_warning_is_one_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(path: Path) -> None:
        warnings.warn(f"{path} looks odd", stacklevel=1)
        raise ConfigError("nothing is there")

    def show(message: Warning | str, category: type[Warning], file: str, line: int, *_: object) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, file, line))

    monkeypatch.setattr(report, "read_run", look)
    monkeypatch.setattr(warnings, "showwarning", show)  # as without pytest, which collects them
    assert _run(capsys, "report", "here") == (2, "", "warning: here looks odd\nerror: nothing is there\n")
    assert warnings.formatwarning("x", UserWarning, "file.py", 3).startswith("file.py:3")


def test_a_flag_that_is_not_known_is_answered_by_one_that_is(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["finetune", "model", "--optmizer-tier", "cpu"])
    usage, error = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and usage.startswith("usage: zero-offload finetune MODEL")
    assert error.endswith("unrecognized arguments: --optmizer-tier cpu; did you mean --optimizer-tier?")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["finetune", "m", "--learning-rate", "1"], "did you mean --lr?"),
        (["finetune", "m", "--batch-size=3"], "did you mean --batch?"),
        (["finetune", "m", "--num-train-epochs", "1"], "did you mean --epochs?"),
        (["finetune", "m", "--output_dir", "x"], "did you mean --out?"),
        (["finetune", "m", "--lora-r", "8"], "did you mean --lora?"),
        (["finetune", "m", "--leraning-rate", "1"], "did you mean --lr?"),
        (["finetune", "m", "--nvme-pth", "x"], "did you mean --nvme?"),
        (["finetune", "m", "run.toml"], "settings are given by --config run.toml"),
        (["train", "--nvme-path", "x"], "did you mean --nvme?"),
        (["train", "--offload-optimizer", "cpu"], "did you mean --optimizer-tier?"),
        (["finetune", "--model", "m"], "a model has no flag: zero-offload finetune FOLDER ..."),
        (["finetune", "m", "--lora"], "--lora RANK: train adapters of this rank, such as 16 (default: all parameters)"),
    ],
)
def test_flags_of_other_tools_are_known(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and capsys.readouterr().err.rstrip().endswith(hint)


def test_settings_in_the_place_of_a_model(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[finetune]\n")
    done = _run(capsys, "finetune", file, "--data", "x")
    assert done.code == 2 and f"settings are given by --config {file}" in done.err


def test_settings_of_other_tools_are_known() -> None:
    with pytest.raises(zo.ConfigError, match=r"unknown setting nvme_path: did you mean nvme\?"):
        zo.OffloadConfig.from_dict({"nvme_path": "x"})
    with pytest.raises(zo.ConfigError, match=r"unknown setting zero_stage: did you mean stage\?"):
        zo.OffloadConfig(zero_stage=3)  # type: ignore[call-arg]
