from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.checkpoint.test_metrics import write_steps
from zero_offload.base.errors import ConfigError, IntegrityError, LockError, StorageError
from zero_offload.base.types import Existing
from zero_offload.checkpoint.metrics import Metrics
from zero_offload.checkpoint.run_dir import SAMPLE_FILE, RunDir
from zero_offload.finetune.pretrain.settings import TrainConfig
from zero_offload.runs import resume as runs
from zero_offload.runs.reader import read_run
from zero_offload.runs.resume import earlier_identity, find_existing
from zero_offload.storage.files.system import replace_file


def test_the_same_run_resumes_and_another_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert find_existing(run, {"seed": 1}) is Existing.REFUSE  # a foreign generation must not be overwritten
    run.create({"identity": {"seed": 1, "lr": 1.0, "data": ["x"]}})
    assert find_existing(run, {"seed": 1, "lr": 1.0, "data": ["x"]}) is Existing.RESUME
    assert find_existing(run, {"seed": 1, "lr": 0.5, "data": ["x"]}) is Existing.RESUME
    with pytest.raises(ConfigError, match=r"seed=1, this one has seed=2.*--discard"):
        find_existing(run, {"seed": 2, "lr": 1.0, "data": ["x"]})


def test_each_setting_is_named_or_may_change(tmp_path: Path) -> None:
    config = TrainConfig.from_tables({"out": str(tmp_path / "run")}, {"durability": "process"})
    identity = json.loads(json.dumps(config.arguments()))
    home = tmp_path / "run" / "nvme"
    home.mkdir(parents=True)
    (home / "run.json").write_text("{}")
    run = RunDir(tmp_path / "run")
    run.create({"identity": identity})
    others = {"offload.nvme": [str(tmp_path)], "offload.durability": "scratch", "out": str(home)}
    decides = {"offload.precision", "offload.grad_reduction", "offload.nvme", "offload.durability"}
    for name, value in identity.items():
        now = identity | {name: others.get(name, [value, value])}
        if name in runs.MAY_CHANGE or (name.startswith("offload.") and name not in decides):
            assert find_existing(run, now) is Existing.RESUME, name
        else:
            with pytest.raises(ConfigError, match=f"holds a run with {name}="):
                find_existing(run, now)
    assert {*runs.MAY_CHANGE} - {*identity} == {"ranks"}


def test_a_damaged_description_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="--discard"):
        find_existing(RunDir(tmp_path), {})


def test_files_json_names_every_file_of_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create({"identity": {}})
    run.write(SAMPLE_FILE, "text")
    write_steps(run.path / "metrics.jsonl", 1)
    listed = json.loads((run.path / "files.json").read_text())["files"]
    assert {path.name for path in run.path.iterdir()} <= set(listed)


def test_read_run_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.json"):
        read_run(tmp_path)


IDENTITY = {
    "seed": 3,
    "steps": 3,
    "ranks": 2,
    "offload.stage": 3,
    "offload.nvme": ["/a", "/b"],
    "offload.precision": {"compute": "bf16"},
    "offload.durability": "process",
}


MAY_CHANGE: dict[str, object] = {
    "steps": 4,
    "ranks": 1,
    "offload.stage": 1,
    "offload.nvme": ["/a"],
    "offload.cpu_memory": 5,
    "offload.durability": "commit",
    "eval_every": 7,
}


MAY_NOT: dict[str, object] = {
    "seed": 4,
    "offload.nvme": ["/b", "/a"],
    "offload.precision": {"compute": "fp32"},
    "offload.durability": "scratch",
    "text": "other",
}


def test_where_states_rest_may_change_and_what_decides_numbers_may_not(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert find_existing(run, IDENTITY) is Existing.REFUSE and earlier_identity(run) is None
    run.create({"identity": IDENTITY})
    assert earlier_identity(run) == IDENTITY
    assert find_existing(run, IDENTITY | MAY_CHANGE) is Existing.RESUME
    for name, value in MAY_NOT.items():
        with pytest.raises(ConfigError, match=f"{name}="):
            find_existing(run, IDENTITY | {name: value})


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, other: path.symlink_to(other),
    "dangling link": lambda path, other: path.symlink_to(other.with_name("nowhere")),
    "hard link": lambda path, other: path.hardlink_to(other),
    "fifo": lambda path, other: os.mkfifo(path),
    "directory": lambda path, other: path.mkdir(),
}


NAMES = [
    "run.json",
    "metrics.jsonl",
    "files.json",
    "report.html",
    "report.png",
    "sample.txt",
    "trace.json",
    "trace.rank1.json",
]


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("name", [*NAMES, "metrics.damaged"])
def test_names_of_ours_that_are_no_files_of_ours(kind: str, name: str, tmp_path: Path) -> None:
    run, precious = RunDir(tmp_path / "run"), tmp_path / "precious"
    precious.write_text("precious")
    run.path.mkdir(mode=0o700)
    PLANTED[kind](run.path / name, precious)
    with pytest.raises(StorageError, match=str(run.path / name)), run.held():
        pass
    if name == "metrics.jsonl":
        with pytest.raises(StorageError, match=str(run.path / name)):
            Metrics.open(run.path / name, 0)
    elif kind != "hard link":  # what is replaced whole changes nothing of it
        with pytest.raises(StorageError, match=str(run.path / name)):
            replace_file(run.path / name, b"ours")
    assert precious.read_text() == "precious" and not (tmp_path / "nowhere").exists()


def test_the_directory_is_private_locked_and_leaves_with_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "one")
    with run.held():
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
        with pytest.raises(LockError, match=f"{run.path} is in use by process {os.getpid()}"), run.held():
            pass
    assert not run.path.exists()
    with run.held():
        run.create({"identity": {}})
        run.write(SAMPLE_FILE, "text")
        write_steps(run.path / "metrics.jsonl", 1)
        assert {stat.S_IMODE(path.stat().st_mode) for path in run.path.iterdir()} == {0o600}
    link = tmp_path / "link"
    link.symlink_to(run.path)
    with pytest.raises(StorageError, match=f"{link} is a symbolic link"), RunDir(link).held():
        pass
    run.path.chmod(0o777)
    with pytest.raises(StorageError, match="writable by others"), run.held():
        pass


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", "null", '"text"', "\0\0\0", "[" * 10**5, '{"identity": [1]}', '{"identity": null}']
    + [json.dumps({"identity": {"steps": value}}) for value in ("ten", [1], None, 10**400, -1, 1.5, True)]
    + ['{"identity": {"lr": NaN}}', '{"identity": {"lr": 1e999}}', '{"identity": {"lr": "x"}}'],
)
def test_a_description_of_wrong_types_is_one_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    for call in (lambda: find_existing(RunDir(tmp_path), {"steps": 1, "lr": 1.0}), lambda: read_run(tmp_path)):
        with pytest.raises(ConfigError, match=str(tmp_path)):
            call()


def test_rows_without_a_description_or_without_states_are_no_fresh_start(tmp_path: Path) -> None:
    run, nvme = RunDir(tmp_path / "run"), tmp_path / "nvme"
    identity = {"steps": 9, "offload.nvme": [str(nvme)], "offload.durability": "process"}
    run.create({"identity": identity})
    assert find_existing(run, identity) is Existing.RESUME  # it has not come to a step
    write_steps(run.path / "metrics.jsonl", 3)
    with pytest.raises(IntegrityError, match=f"came to step 3, and {nvme}/run.json is missing.*--discard"):
        find_existing(run, identity)
    nvme.mkdir()
    (nvme / "run.json").touch()
    assert find_existing(run, identity) is Existing.RESUME
    scratch = identity | {"offload.durability": "scratch"}
    run.create({"identity": scratch})
    (nvme / "run.json").unlink()
    assert find_existing(run, scratch) is Existing.RESUME
    (run.path / "run.json").unlink()
    with pytest.raises(IntegrityError, match=r"metrics\.jsonl up to step 3 and no run\.json"):
        find_existing(run, identity)
