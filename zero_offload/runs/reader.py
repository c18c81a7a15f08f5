"""A run's directory as reports read it: what the run is, and a row for each step, checked and whole.

Never writes, and reads beside a run that is alive. The call: `read_run`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from zero_offload.base.errors import ConfigError
from zero_offload.base.spans import Cause
from zero_offload.base.types import Tier
from zero_offload.checkpoint.metrics import Line, Row, damage_notes, is_count, read_lines, show, sort_out
from zero_offload.checkpoint.run_dir import METRICS_FILE, RUN_FILE, read_json, refuse
from zero_offload.storage.files.directory import is_held


@dataclass(frozen=True)
class Run:
    """The content of a run directory."""

    path: Path
    description: dict[str, Any]
    rows: list[Row]
    notes: tuple[str, ...] = ()
    """Which lines of the metrics are left out, and why."""
    is_running: bool = False
    """True if a process of this machine has the directory open for writing."""


def read_run(path: Path) -> Run:
    """Read a run directory that may still be in use."""
    if not os.path.lexists(path / RUN_FILE):
        raise ConfigError(
            f"{path} is not a run directory: it has no {RUN_FILE}; name one that `train` or `finetune` wrote"
        )
    description = read_json(path / RUN_FILE, "put it back from a copy")
    if "identity" not in description:
        # Storage keeps a file of that name too.
        above = path.absolute().parent
        run = above if (above / METRICS_FILE).is_file() else "the run directory that `train` or `finetune` wrote"
        raise ConfigError(f"{path} holds the states of a run, and neither its metrics nor its report; name {run}")
    if problem := _problem(description, _DESCRIPTION) or _problem(description["identity"], _IDENTITY):
        refuse(path / RUN_FILE, problem, "put it back from a copy")
    kept, damaged = sort_out(read_lines(path / METRICS_FILE), None)
    shown: list[Line] = []
    short: list[Line] = []
    for line in kept:
        problem = _problem(line.row, _ROW)
        (short if problem else shown).append(replace(line, problem=problem))
    notes = damage_notes(path / METRICS_FILE, sorted(damaged + short, key=lambda line: line.number))
    return Run(path, description, [line.row for line in shown if line.row is not None], tuple(notes), is_held(path))


def _is_number(value: object) -> TypeGuard[float]:
    # Finite, and fit for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def is_positive(value: object) -> bool:
    """True of a number above 0."""
    return _is_number(value) and value > 0


def _are_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _has_numbers_of(kinds: Iterable[StrEnum], value: object) -> bool:
    return isinstance(value, dict) and all(_is_number(value.get(kind.value)) for kind in kinds)


def _is_request(value: object) -> bool:
    return isinstance(value, str) or _are_numbers(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_ROW = {
    **dict.fromkeys(("stall_s", "update_s", "commit_s", "peak_rss_bytes"), _is_number),
    **dict.fromkeys(("step_s", "tokens_per_s?"), is_positive),
    **dict.fromkeys(("at?", "tokens?", "skipped_steps?", "peak_device_bytes?"), _is_number),
    **dict.fromkeys(
        ("read_bytes", "written_bytes", "resident_bytes", "activation_bytes?", "planned_bytes?"), _are_numbers
    ),
    **dict.fromkeys(("loss?", "val_loss?", "lr?", "grad_norm?"), lambda value: value is None or _is_number(value)),
    "whole_s?": lambda value: _is_number(value) and value >= 0,
    "commit_wait_s?": _is_number,
    "exposed_s?": partial(_has_numbers_of, Cause),
}
"""Fields of a row that a report needs; with a question mark, where they are there."""
_PLANNED: dict[str, Any] = {
    "rows": lambda value: isinstance(value, dict) and all(map(_are_numbers, value.values())),
    "available": _are_numbers,
}
_DESCRIPTION = {
    **dict.fromkeys(("num_parameters", "unigram_nats?", "baseline_rss_bytes?"), _is_number),
    "identity": lambda value: isinstance(value, dict),
    "plan": partial(_has_numbers_of, Tier),
    "planned?": lambda value: _problem(value, _PLANNED) == "",
    "device": _is_text,
    "starts?": lambda value: isinstance(value, list) and all(_problem(each, _START) == "" for each in value),
}
_START: dict[str, Any] = {
    **dict.fromkeys(("began_at", "step"), _is_number),
    **dict.fromkeys(("ended_at?", "last_step?"), _is_number),
    "error?": _is_text,
}
_IDENTITY = {
    "model?": _is_text,
    "steps?": is_count,
    "ranks?": is_count,
    **dict.fromkeys((f"offload.{kind}" for kind in ("params", "grads", "optimizer")), _is_request),
}


def _problem(table: object, kinds: Mapping[str, Any]) -> str:
    """The first problem of a table of values; empty where it has none."""
    table = table if isinstance(table, dict) else None
    for name, is_right in kinds.items():
        key = name.removesuffix("?")
        if table is None or (key not in table and key == name):
            return f"it lacks {key}"
        if key in table and not is_right(table[key]):
            return f"its {key} is {show(table[key])}"
    return ""


def waited_s(row: Mapping[str, Any]) -> float:
    """Seconds in which compute waited for any cause; of an earlier build's row, for all but the update."""
    exposed_s: Mapping[str, float] = row.get("exposed_s") or {"": row["stall_s"]}
    return sum(exposed_s.values())
