from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from zero_offload.base.errors import ConfigError, IntegrityError, LockError, StorageError
from zero_offload.base.types import Existing
from zero_offload.checkpoint.metrics import Metrics
from zero_offload.checkpoint.run_dir import SAMPLE_FILE, RunDir
from zero_offload.cli.recipes.run_dir import earlier_identity, find_existing, read_run
from zero_offload.storage.files.system import replace_file


def _write_steps(path: Path, last_step: int, committed_step: int = 0) -> None:
    metrics = Metrics.open(path, committed_step)
    for step in range(committed_step + 1, last_step + 1):
        metrics.append({"step": step, "loss": 1 / step})
    metrics.close()


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_what_came_after_the_commit_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write_steps(path, last_step=7)
    _write_steps(path, last_step=9, committed_step=4)
    assert _steps(path) == list(range(1, 10))


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write_steps(path, last_step=5)
    with path.open("a") as file:
        file.write('{"step": 6, "los')
    _write_steps(path, last_step=6, committed_step=5)
    assert _steps(path) == [1, 2, 3, 4, 5, 6]


def test_a_whole_object_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    _write_steps(path, last_step=3, committed_step=2)
    assert _steps(path) == [1, 2, 3]  # nothing is glued to the line without an end


def test_a_fresh_start_empties_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write_steps(path, last_step=5)
    _write_steps(path, last_step=2)
    assert _steps(path) == [1, 2]


def test_floats_are_exact_and_nan_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics.open(path, 0)
    metrics.append({"step": 1, "loss": 0.1 + 0.2, "grad_norm": math.nan})
    metrics.close()
    assert json.loads(path.read_text()) == {"step": 1, "loss": 0.1 + 0.2, "grad_norm": None}


def test_unwritable_metrics_are_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"missing/metrics\.jsonl"):
        Metrics.open(tmp_path / "missing" / "metrics.jsonl", 0)


def test_the_same_run_resumes_and_another_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert find_existing(run, {"seed": 1}) is Existing.REFUSE  # a foreign generation must not be overwritten
    run.create({"identity": {"seed": 1, "lr": 1.0, "data": ["x"]}})
    assert find_existing(run, {"seed": 1, "lr": 1.0, "data": ["x"]}) is Existing.RESUME
    assert find_existing(run, {"seed": 1, "lr": 0.5, "data": ["x"]}) is Existing.RESUME
    with pytest.raises(ConfigError, match=r"seed=1, this one has seed=2.*--discard"):
        find_existing(run, {"seed": 2, "lr": 1.0, "data": ["x"]})


def test_a_damaged_description_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="--discard"):
        find_existing(RunDir(tmp_path), {})


def test_files_json_names_every_file_of_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create({"identity": {}})
    run.write(SAMPLE_FILE, "text")
    _write_steps(run.path / "metrics.jsonl", 1)
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


def _rows(*steps: int) -> list[str]:
    return [json.dumps({"step": step, "loss": 1 / step}) for step in steps]


NULS = "\0" * 40
DAMAGE: dict[str, tuple[list[str], list[int], str]] = {
    "a wrong byte": ([*_rows(1), '{"stfp": 2}', *_rows(3, 4)], [1, 3, 4], "line 2 is damaged, its step is (not set)"),
    "no JSON": ([*_rows(1), "{", *_rows(3, 4)], [1, 3, 4], "line 2 is damaged, not JSON"),
    "no object": ([*_rows(1), "[2]", *_rows(3, 4)], [1, 3, 4], "line 2 is damaged, not an object"),
    "a step of another type": ([*_rows(1, 2), '{"step": "ten"}', *_rows(4)], [1, 2, 4], 'its step is "ten"'),
    "no number of JSON": ([*_rows(1, 2), '{"step": 3, "loss": NaN}', *_rows(4)], [1, 2, 4], "line 3 is damaged"),
    "nested deep": ([*_rows(1, 2, 3), '{"step": ' + "[" * 10**5, *_rows(4)], [1, 2, 3, 4], "line 4 is damaged"),
    "huge": ([*_rows(1), '{"step": ' + "9" * 9999 + "}", *_rows(3, 4)], [1, 3, 4], "line 2 is damaged"),
    "a step too large": ([*_rows(1, 100, 3, 4)], [1, 3, 4], "line 2 is damaged, its step 100 stands out of order"),
    "a step too small": ([*_rows(2, 3, 1, 4)], [2, 3, 4], "line 3 is damaged, its step 1 stands out of order"),
    "a step twice": ([*_rows(1, 2, 2, 3, 4)], [1, 2, 3, 4], "its step 2 stands out of order"),
    "zeros between": ([*_rows(1, 2), NULS, *_rows(4)], [1, 2, 4], "line 3 is damaged, 40 zero bytes"),
}


def test_zeros_before_a_row_cost_no_row(tmp_path: Path) -> None:
    """What power loss leaves, and a row that was written after it."""
    path, rows = tmp_path / "metrics.jsonl", _rows(1, 2)
    path.write_text(f"{rows[0]}\n{NULS}{rows[1]}\n")
    metrics = Metrics.open(path, 2)
    metrics.close()
    assert _steps(path) == [1, 2] and "line 2 is damaged, 40 zero bytes" in metrics.notes[0]


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_line_costs_no_other_row(kind: str, tmp_path: Path) -> None:
    lines, steps, words = DAMAGE[kind]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    metrics = Metrics.open(path, 4)
    metrics.append({"step": 5})
    metrics.close()
    assert _steps(path) == [*steps, 5]
    assert words in metrics.notes[0] and str(path) in metrics.notes[0]
    missing = sorted({1, 2, 3, 4} - {*steps})
    assert list(metrics.notes[1:]) == [f"{path} has no row of step {step}" for step in missing]
    aside = (tmp_path / "metrics.damaged").read_text().splitlines()
    assert sorted([*aside, *path.read_text().splitlines()[:-1]]) == sorted(lines)  # nothing is lost
    again = Metrics.open(path, 5)
    again.close()
    assert not any("is damaged" in note for note in again.notes) and _steps(path) == [*steps, 5]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": \xff}\n{"step": 3}\r\n{"st\rep": 4}\n{"step": 5}\n' + bytes(64))
    metrics = Metrics.open(path, 9)
    metrics.close()
    assert _steps(path) == [1, 3, 5]
    assert [note.split(" is damaged")[0] for note in metrics.notes[:3]] == [f"{path} line {n}" for n in (2, 4, 6)]
    assert metrics.notes[3:] == (f"{path} has no row of step 2, 4, 6 to 9",)


def test_rows_that_are_dropped_on_purpose_are_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{line}\n" for line in _rows(1, 2, 3, 4)) + '{"step": 5, "lo')
    metrics = Metrics.open(path, 2)
    metrics.close()
    assert _steps(path) == [1, 2] and metrics.notes == () and not (tmp_path / "metrics.damaged").exists()


@pytest.mark.parametrize("seed", range(3))
def test_any_byte_may_be_wrong(seed: int, tmp_path: Path) -> None:
    """One byte costs one row at most (a newline two), whatever it becomes; and there is no other error."""
    random, path = Random(seed), tmp_path / "metrics.jsonl"
    whole = "".join(f"{line}\n" for line in _rows(*range(1, 30))).encode()
    for place in random.sample(range(len(whole)), 60):
        content = bytearray(whole)
        content[place] = random.randrange(256)
        path.write_bytes(content)
        metrics = Metrics.open(path, 29)
        metrics.close()
        assert len(_steps(path)) >= 29 - (2 if whole[place] == 10 else 1)
        assert _steps(path) == sorted({*_steps(path)})


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
        _write_steps(run.path / "metrics.jsonl", 1)
        assert {stat.S_IMODE(path.stat().st_mode) for path in run.path.iterdir()} == {0o600}
    link = tmp_path / "link"
    link.symlink_to(run.path)
    with pytest.raises(StorageError, match=f"{link} is a symbolic link"), RunDir(link).held():
        pass
    run.path.chmod(0o777)
    with pytest.raises(StorageError, match="writable by others"), run.held():
        pass


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_metrics_that_go_away_during_a_run(how: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics.open(path, 0)
    metrics.append({"step": 1})
    path.rename(tmp_path / "elsewhere")
    if how == "replaced":
        path.write_text("")
    with pytest.raises(StorageError, match=f"{path} was {how}"):
        metrics.append({"step": 2})
    metrics.close()


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
    _write_steps(run.path / "metrics.jsonl", 3)
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
