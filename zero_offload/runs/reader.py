"""A run directory as the commands use it: whether a second start goes on with the run, and what a report reads.

Never writes. The calls: `earlier_identity` and `find_existing` before a run begins; `read_run` for a command that only
looks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from zero_offload.base.errors import ConfigError, IntegrityError
from zero_offload.base.spans import Cause
from zero_offload.base.types import Existing, Tier
from zero_offload.checkpoint.format import RUN_NAME, History
from zero_offload.checkpoint.metrics import Line, Row, damage_notes, is_count, read_lines, show, sort_out
from zero_offload.checkpoint.run_dir import METRICS_FILE, RUN_FILE, RunDir, read_json, refuse
from zero_offload.runs.locate import states_home
from zero_offload.storage.files.directory import RunDirectory, is_held

MAY_CHANGE = (
    *("ranks", "steps", "lr", "clip", "recompute"),
    *("eval_every", "eval_batches", "sample_bytes"),
    "out",  # a run directory may move
)
"""Settings that any run may go on with."""
_DECIDES_NUMBERS = ("offload.precision", "offload.grad_reduction")
"""Settings of tiers and storage that decide numbers. A run may go on with other values of the rest, as long as
generations are still kept, or still not kept."""
_HOME = "offload.nvme"


def find_existing(run: RunDir, identity: Mapping[str, Any], may_change: Sequence[str] = ()) -> Existing:
    """How a start with this identity meets what lies here: resume the same run, refuse a stranger.

    Raises ConfigError naming the first setting in which an earlier run here differs; where states rest, on how
    many ranks, to which step it goes, how large its steps are, how it is measured, and `may_change` may. Raises
    IntegrityError where rows tell of a run whose description or whose states are gone: to start over would lose them.
    """
    earlier = earlier_identity(run)
    if earlier is None:
        if last_step := _last_step(run):
            raise IntegrityError(
                f"{run.path} has {METRICS_FILE} up to step {last_step} and no {RUN_FILE}, so nothing says which "
                "run that is; put it back, give another --out, or --discard to delete it and start over"
            )
        return Existing.REFUSE
    for name in sorted({*identity, *earlier}):
        if name == _HOME and _has_same_states(run, identity, earlier):
            continue
        if name not in may_change and _fixed_part(name, identity) != _fixed_part(name, earlier):
            raise ConfigError(
                f"{run.path} holds a run with {name}={show(earlier.get(name))}, this one has "
                f"{name}={show(identity.get(name))}; give the same settings to resume it, "
                "another --out, or --discard to delete it and start over"
            )
    _check_states(run, earlier, identity)
    return Existing.RESUME


def _has_same_states(run: RunDir, identity: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    """True if generations are where they were, have moved with the run directory, or are the run's at a new place."""
    before, now = (states_home(run.path.absolute(), each) for each in (earlier, identity))
    if before is None or now is None:
        return before == now
    if before.resolve() == now.resolve():
        return True
    run_id = read_json(run.path / RUN_FILE).get("run_id")
    if run_id is None or not now.is_dir():
        return False
    with RunDirectory.look(now) as directory:
        return any(each.run_id == run_id for each in History.read(directory).generations.values())


def _check_states(run: RunDir, earlier: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise IntegrityError when an earlier run has come to a step, and nothing is left of its states."""
    home = states_home(run.path.absolute(), identity)
    if home is None or earlier.get("offload.durability") == "scratch":
        return  # nothing was kept
    # It is there from the start of a run on, before its first commit.
    if not os.path.lexists(home := home / RUN_NAME) and (last_step := _last_step(run)):
        raise IntegrityError(
            f"the run in {run.path} came to step {last_step}, and {home} is missing, as are its states: mount or "
            "put back the directory, or start over with --discard, or another --out"
        )


def _last_step(run: RunDir) -> int:
    """The last step of the rows; 0 where there are none."""
    rows = [line.row for line in read_lines(run.path / METRICS_FILE) if line.row is not None]
    return max((row["step"] for row in rows), default=0)


def earlier_identity(run: RunDir) -> dict[str, Any] | None:
    """What an earlier run here was; None when there was none."""
    file = run.path / RUN_FILE
    if not os.path.lexists(file):
        return None
    identity = read_json(file).get("identity")
    if not isinstance(identity, dict):
        refuse(file, f"its identity is {show(identity)}, not a table")
    for name, kind in _CHANGEABLE.items():
        if name in identity and not kind(identity[name]):
            refuse(file, f"{name} is {show(identity[name])}, not a number that `train` writes")
    return identity


@dataclass(frozen=True)
class Run:
    """What a run directory tells."""

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


def _is_positive(value: object) -> bool:
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
    **dict.fromkeys(("step_s", "tokens_per_s?"), _is_positive),
    **dict.fromkeys(("at?", "tokens?", "skipped_steps?", "peak_device_bytes?"), _is_number),
    **dict.fromkeys(
        ("read_bytes", "written_bytes", "resident_bytes", "activation_bytes?", "planned_bytes?"), _are_numbers
    ),
    **dict.fromkeys(("loss?", "val_loss?", "lr?", "grad_norm?"), lambda value: value is None or _is_number(value)),
    "whole_s?": lambda value: _is_number(value) and value >= 0,
    "commit_wait_s?": _is_number,
    "exposed_s?": partial(_has_numbers_of, Cause),
}
"""What a report needs of a row; with a question mark, where it is there."""
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
_CHANGEABLE = {
    **dict.fromkeys(("ranks", "steps", "eval_every", "eval_batches", "sample_bytes"), is_count),
    **dict.fromkeys(("lr", "clip"), _is_positive),
}
"""Settings of an earlier start that are counted with, not only compared."""


def _problem(table: object, kinds: Mapping[str, Any]) -> str:
    """What is wrong with a table of values; empty where nothing is."""
    table = table if isinstance(table, dict) else None
    for name, is_right in kinds.items():
        key = name.removesuffix("?")
        if table is None or (key not in table and key == name):
            return f"it lacks {key}"
        if key in table and not is_right(table[key]):
            return f"its {key} is {show(table[key])}"
    return ""


def _fixed_part(name: str, identity: Mapping[str, Any]) -> object:
    """What of a setting must stay as it is."""
    value = identity.get(name)
    if name == _HOME and isinstance(value, list):
        return value[:1]  # where the generations are found
    if name == "offload.durability":
        return value == "scratch"
    may_change = name in MAY_CHANGE or name.startswith("offload.")
    return None if may_change and name not in _DECIDES_NUMBERS else value
