"""Run directory: what was asked (`run.json`), what happened (`metrics.jsonl`), what to clean (`files.json`).

Owns these files' names and formats, and the rule by which a second start continues the first. Never touches
the NVMe tier, which may lie below it and guards itself.

Calls, in order: `RunDir.find_existing` before anything is written, `RunDir.create` once the tier's lock is
held, `Metrics.open` with the committed step, `Metrics.append` per step. `read_run` for those who only look.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from zero_offload.errors import ConfigError, StorageError
from zero_offload.types import Existing

RUN_FILE, METRICS_FILE, FILES_FILE = "run.json", "metrics.jsonl", "files.json"
REPORT_FILE, SAMPLE_FILE = "report.png", "sample.txt"
TRACE_FILE = "trace.json"
"""With several ranks: `_RANK_TRACES`, one each."""
_RANK_TRACES = "trace.rank*.json"

Row = dict[str, Any]

_MAY_CHANGE = ("ranks", "steps", "lr", "clip", "eval_every", "eval_batches", "sample_bytes")
_DECIDES_NUMBERS = ("offload.precision", "offload.grad_reduction")
"""Of the settings of tiers and storage; a run may go on with any other value of the rest, as long as generations are
kept or not kept."""


@dataclass(frozen=True)
class RunDir:
    """One run's directory."""

    path: Path

    def find_existing(self, identity: Mapping[str, Any]) -> Existing:
        """How a start with this identity meets what lies here: resume the same run, refuse a stranger.

        Raises ConfigError naming the first setting in which an earlier run here differs; where states rest, on how
        many ranks, to which step it goes, how large its steps are and how it is measured may.
        """
        earlier = self.earlier_identity()
        if earlier is None:
            return Existing.REFUSE
        for name in sorted({*identity, *earlier}):
            if _fixed_part(name, identity) != _fixed_part(name, earlier):
                raise ConfigError(
                    f"{self.path} holds a run with {name}={_show(earlier.get(name))}, this one has "
                    f"{name}={_show(identity.get(name))}; give the same settings to resume it, "
                    "another --out, or --discard to delete it and start over"
                )
        return Existing.RESUME

    def earlier_identity(self) -> dict[str, Any] | None:
        """What an earlier run here was; None when there was none."""
        file = self.path / RUN_FILE
        identity: dict[str, Any] | None = _read_json(file).get("identity", {}) if file.exists() else None
        return identity

    def create(self, description: Mapping[str, Any]) -> None:
        """Write what this run is, and list every file the run puts here."""
        files = [RUN_FILE, METRICS_FILE, FILES_FILE, REPORT_FILE, SAMPLE_FILE, TRACE_FILE]
        ranks = description.get("identity", {}).get("ranks", 1)
        files += [f"trace.rank{rank}.json" for rank in range(ranks) if ranks > 1]
        # Those of a start with more ranks.
        files += [path.name for path in sorted(self.path.glob(_RANK_TRACES)) if path.name not in files]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            _replace_text(self.path / FILES_FILE, json.dumps({"files": files}, indent=1))
            _replace_text(self.path / RUN_FILE, json.dumps(description, indent=1))
        except OSError as error:
            raise StorageError(f"cannot write to {self.path}: {error.strerror}; choose another --out") from error

    def drop_traces(self) -> None:
        """A new run begins: what is here shows another one."""
        try:
            for path in (self.path / TRACE_FILE, *self.path.glob(_RANK_TRACES)):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"cannot delete {path}: {error.strerror}; choose another --out") from error

    def read_trace(self) -> dict[str, Any] | None:
        """The first rank's trace, if there is one; of two, of starts with one rank and with several, the newer."""
        found = [path for name in (TRACE_FILE, "trace.rank0.json") if (path := self.path / name).is_file()]
        return _read_json(max(found, key=lambda path: path.stat().st_mtime_ns)) if found else None

    def write_sample(self, text: str) -> None:
        _replace_text(self.path / SAMPLE_FILE, text)


class Metrics:
    """One JSON object per step, in order, each step once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @classmethod
    def open(cls, path: Path, committed_step: int) -> Metrics:
        """Drop what was written after the committed step, a torn last line included, and continue there."""
        try:
            file = open(path, "a+b")  # noqa: SIM115 - the object owns it
            file.seek(0)
            kept_bytes = sum(len(line) for line, row in _whole_lines(file) if row["step"] <= committed_step)
            file.truncate(kept_bytes)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from error
        return cls(file)

    def append(self, row: Mapping[str, Any]) -> None:
        """Hand one line to the system whole: it survives a killed process."""
        line = json.dumps({name: _finite(value) for name, value in row.items()}) + "\n"
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            raise StorageError(f"cannot write {self._file.name}: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Run:
    """What a run directory tells."""

    path: Path
    description: dict[str, Any]
    rows: list[Row]


def read_run(path: Path) -> Run:
    """Read a run directory that may still be in use."""
    if not (path / RUN_FILE).is_file():
        raise ConfigError(f"{path} is no run directory: it has no {RUN_FILE}; name one that `train` wrote")
    description = _read_json(path / RUN_FILE)
    if "identity" not in description:
        # Storage keeps a file of that name too.
        above = path.absolute().parent
        run = above if (above / METRICS_FILE).is_file() else "the run directory that `train` wrote"
        raise ConfigError(f"{path} holds the states of a run, and neither its metrics nor its report; name {run}")
    rows: list[Row] = []
    if (path / METRICS_FILE).is_file():
        with open(path / METRICS_FILE, "rb") as file:
            rows = [row for _, row in _whole_lines(file)]
    return Run(path, description, rows)


def _whole_lines(file: BinaryIO) -> Iterator[tuple[bytes, Row]]:
    """The leading lines that are complete and in order; a crash can leave a torn one behind them."""
    last_step = 0
    for line in file:
        try:
            row = json.loads(line)
        except ValueError:
            return
        if not (line.endswith(b"\n") and isinstance(row, dict) and row.get("step", 0) > last_step):
            return
        last_step = row["step"]
        yield line, row


def _fixed_part(name: str, identity: Mapping[str, Any]) -> object:
    """What of a setting must stay as it is."""
    value = identity.get(name)
    if name == "offload.nvme" and isinstance(value, list):
        return value[:1]  # where the generations are found
    if name == "offload.durability":
        return value == "scratch"
    may_change = name in _MAY_CHANGE or name.startswith("offload.")
    return None if may_change and name not in _DECIDES_NUMBERS else value


def _finite(value: object) -> object:
    # JSON has no NaN; a loss that is none is written as null.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; start over with --discard") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a run's description; start over with --discard")
    return content


def _replace_text(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def _show(value: object) -> str:
    return json.dumps(value) if value is not None else "(not set)"
