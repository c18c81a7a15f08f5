"""Rows of a run that goes on, is killed, or has damaged lines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random

import pytest

from zero_offload.base.errors import StorageError
from zero_offload.checkpoint.metrics import Metrics


def write_steps(path: Path, last_step: int, committed_step: int = 0) -> None:
    metrics = Metrics.open(path, committed_step)
    for step in range(committed_step + 1, last_step + 1):
        metrics.append({"step": step, "loss": 1 / step})
    metrics.close()


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_what_came_after_the_commit_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, last_step=7)
    write_steps(path, last_step=9, committed_step=4)
    assert _steps(path) == list(range(1, 10))


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, last_step=5)
    with path.open("a") as file:
        file.write('{"step": 6, "los')
    write_steps(path, last_step=6, committed_step=5)
    assert _steps(path) == [1, 2, 3, 4, 5, 6]


def test_a_whole_object_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    write_steps(path, last_step=3, committed_step=2)
    assert _steps(path) == [1, 2, 3]  # nothing is glued to the line without an end


def test_a_fresh_start_empties_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, last_step=5)
    write_steps(path, last_step=2)
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
    """Zeros that power loss leaves, and a row that was written after it."""
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
