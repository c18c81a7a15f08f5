"""Run directory: what was asked (`run.json`), what happened (`metrics.jsonl`), what to clean (`files.json`).

Owns these files' names and formats, and the rule by which a second start continues the first. It is guarded as the
storage directory is: private, locked, and a name of ours that is a link or no file is refused. Never touches the NVMe
tier, which may lie below it and guards itself.

Calls, in order: `RunDir.held` around the whole run; `RunDir.find_existing` before anything is written; `RunDir.create`
once the tier's lock is held; `Metrics.open` with the committed step; `Metrics.append` per step. `read_run` for a
command that only looks.
"""

from __future__ import annotations

import io
import json
import math
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from zero_offload.base.errors import ConfigError, IntegrityError, StorageError
from zero_offload.base.spans import Cause
from zero_offload.base.types import Existing, Tier
from zero_offload.checkpoint.format import RUN_NAME
from zero_offload.storage.files.directory import RunDirectory, what_became_of
from zero_offload.storage.files.system import (
    REAL,
    check_ours,
    naming_errors,
    read_file,
    refuse_other_kinds,
    replace_file,
)

RUN_FILE, METRICS_FILE, FILES_FILE = "run.json", "metrics.jsonl", "files.json"
REPORT_FILE, SAMPLE_FILE = "report.png", "sample.txt"
DAMAGED_FILE = "metrics.damaged"
"""Lines of the metrics that could not be read, as they were found."""
TRACE_FILE = "trace.json"
"""With several ranks: `_RANK_TRACES`, one each."""
_RANK_TRACES = "trace.rank*.json"
_FILES = (RUN_FILE, METRICS_FILE, DAMAGED_FILE, FILES_FILE, REPORT_FILE, SAMPLE_FILE, TRACE_FILE)

Row = dict[str, Any]

_MAY_CHANGE = ("ranks", "steps", "lr", "clip", "eval_every", "eval_batches", "sample_bytes")
_DECIDES_NUMBERS = ("offload.precision", "offload.grad_reduction")
"""Settings of tiers and storage that decide numbers. A run may go on with other values of the rest, as long as
generations are still kept, or still not kept."""


@dataclass(frozen=True)
class RunDir:
    """One run's directory."""

    path: Path

    @contextmanager
    def held(self) -> Iterator[RunDirectory]:
        """Make the directory if need be, and keep other runs out of it; one that stays empty is removed again.

        Raises LockError, and StorageError where it is not private or a name of ours is not a file's.
        """
        with RunDirectory.open(self.path) as directory:
            for name in (*_FILES, *self._rank_traces()):
                with suppress(FileNotFoundError):
                    check_ours(self.path / name, REAL.lstat(name, directory.dir_fd))
            try:
                yield directory
            finally:
                with suppress(OSError, StorageError):
                    directory.close_and_remove()

    def _rank_traces(self) -> list[str]:
        return sorted(path.name for path in self.path.glob(_RANK_TRACES))

    def find_existing(self, identity: Mapping[str, Any]) -> Existing:
        """How a start with this identity meets what lies here: resume the same run, refuse a stranger.

        Raises ConfigError naming the first setting in which an earlier run here differs; where states rest, on how
        many ranks, to which step it goes, how large its steps are and how it is measured may. Raises IntegrityError
        where rows tell of a run whose description or whose states are gone: to start over would lose them.
        """
        earlier = self.earlier_identity()
        if earlier is None:
            if last_step := self._last_step():
                raise IntegrityError(
                    f"{self.path} has {METRICS_FILE} up to step {last_step} and no {RUN_FILE}, so nothing says which "
                    "run that is; put it back, give another --out, or --discard to delete it and start over"
                )
            return Existing.REFUSE
        for name in sorted({*identity, *earlier}):
            if _fixed_part(name, identity) != _fixed_part(name, earlier):
                raise ConfigError(
                    f"{self.path} holds a run with {name}={_show(earlier.get(name))}, this one has "
                    f"{name}={_show(identity.get(name))}; give the same settings to resume it, "
                    "another --out, or --discard to delete it and start over"
                )
        self._check_states(earlier)
        return Existing.RESUME

    def _check_states(self, earlier: Mapping[str, Any]) -> None:
        """Raise IntegrityError when an earlier run has come to a step, and nothing is left of its states."""
        nvme = earlier.get("offload.nvme")
        if not isinstance(nvme, list) or not nvme or earlier.get("offload.durability") == "scratch":
            return  # nothing was kept
        # It is there from the start of a run on, before its first commit.
        if not os.path.lexists(home := Path(str(nvme[0])) / RUN_NAME) and (last_step := self._last_step()):
            raise IntegrityError(
                f"the run in {self.path} came to step {last_step}, and {home} is missing, as are its states: mount or "
                "put back the directory, or start over with --discard, or another --out"
            )

    def _last_step(self) -> int:
        """The last step of the rows; 0 where there are none."""
        rows = [line.row for line in _read_lines(self.path / METRICS_FILE) if line.row is not None]
        return max((row["step"] for row in rows), default=0)

    def earlier_identity(self) -> dict[str, Any] | None:
        """What an earlier run here was; None when there was none."""
        file = self.path / RUN_FILE
        if not os.path.lexists(file):
            return None
        identity = _read_json(file).get("identity")
        if not isinstance(identity, dict):
            _refuse(file, f"its identity is {_show(identity)}, not a table")
        for name, kind in _CHANGEABLE.items():
            if name in identity and not kind(identity[name]):
                _refuse(file, f"{name} is {_show(identity[name])}, not a number that `train` writes")
        return identity

    def create(self, description: Mapping[str, Any]) -> None:
        """Write what this run is, and list every file the run puts here."""
        ranks = description.get("identity", {}).get("ranks", 1)
        files = [*_FILES, *(f"trace.rank{rank}.json" for rank in range(ranks) if ranks > 1)]
        # Those of a start with more ranks.
        files += [name for name in self._rank_traces() if name not in files]
        with naming_errors("create", self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(FILES_FILE, json.dumps({"files": files}, indent=1))
        self._write(RUN_FILE, json.dumps(description, indent=1))

    def _write(self, name: str, text: str) -> None:
        try:
            replace_file(self.path / name, text.encode())
        except OSError as error:
            raise StorageError(f"cannot write to {self.path}: {error.strerror}; choose another --out") from error

    def drop_traces(self) -> None:
        """A new run begins: what is here shows another one."""
        for path in (self.path / TRACE_FILE, *self.path.glob(_RANK_TRACES)):
            refuse_other_kinds(path)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StorageError(f"cannot delete {path}: {error.strerror}; choose another --out") from error

    def read_trace(self) -> tuple[Path, dict[str, Any]] | None:
        """The first rank's trace, if there is one; of two, of starts with one rank and with several, the newer."""
        found = [path for name in (TRACE_FILE, "trace.rank0.json") if (path := self.path / name).is_file()]
        if not found:
            return None
        path = max(found, key=lambda path: path.stat().st_mtime_ns)
        return path, _read_json(path, "delete it, or trace again with --trace")

    def write_sample(self, text: str) -> None:
        self._write(SAMPLE_FILE, text)


class Metrics:
    """One JSON object per step, in order, each step once."""

    def __init__(self, path: Path, fd: int, notes: Sequence[str]) -> None:
        """`fd` is open for appending, and closed with this."""
        self._path = path
        self._file = open(fd, "ab", buffering=0)  # noqa: SIM115 - the object owns it
        self.notes = tuple(notes)
        """What was found damaged or missing, for the user."""

    @classmethod
    def open(cls, path: Path, committed_step: int) -> Metrics:
        """Drop what was written after the committed step, a torn last line included, and continue there.

        Lines that cannot be read, or stand out of order, are moved to `DAMAGED_FILE`; all others are kept.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with naming_errors("write", path):
            # Found out before it is made: no link is followed, no FIFO waited for, no other file changed.
            with suppress(FileNotFoundError):
                check_ours(path, os.stat(path, follow_symlinks=False))
            before = _read_whole(path)
            lines = _parse_all(before)
            kept, damaged = _sort_out(lines, committed_step)
            notes = [*_notes(path, damaged, DAMAGED_FILE), *_gaps(path, kept, committed_step)]
            content = b"".join(line.raw for line in kept)
            if damaged:
                _set_aside(path.with_name(DAMAGED_FILE), damaged)
            if not before.startswith(content):
                replace_file(path, content)
            fd = os.open(path, flags, 0o600)
            try:
                check_ours(path, os.fstat(fd))
                os.ftruncate(fd, len(content))
            except BaseException:
                os.close(fd)
                raise
        return cls(path, fd, notes)

    def append(self, row: Mapping[str, Any]) -> None:
        """Hand one line to the system whole: it survives a killed process. Raises StorageError."""
        line = json.dumps({name: _finite(value) for name, value in row.items()}) + "\n"
        if fate := what_became_of(os.fstat(self._file.fileno()), REAL, self._path):
            raise StorageError(
                f"{self._path} was {fate} while this run was writing to it; the run stops with its last step "
                "committed. Start it again: rows go on with the next step"
            )
        left = line.encode()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Run:
    """What a run directory tells."""

    path: Path
    description: dict[str, Any]
    rows: list[Row]
    notes: tuple[str, ...] = ()
    """Which lines of the metrics are left out, and why."""


def read_run(path: Path) -> Run:
    """Read a run directory that may still be in use."""
    if not os.path.lexists(path / RUN_FILE):
        raise ConfigError(f"{path} is not a run directory: it has no {RUN_FILE}; name one that `train` wrote")
    description = _read_json(path / RUN_FILE, "put it back from a copy")
    if "identity" not in description:
        # Storage keeps a file of that name too.
        above = path.absolute().parent
        run = above if (above / METRICS_FILE).is_file() else "the run directory that `train` wrote"
        raise ConfigError(f"{path} holds the states of a run, and neither its metrics nor its report; name {run}")
    if problem := _problem(description, _DESCRIPTION) or _problem(description["identity"], _IDENTITY):
        _refuse(path / RUN_FILE, problem, "put it back from a copy")
    kept, damaged = _sort_out(_read_lines(path / METRICS_FILE), None)
    shown: list[_Line] = []
    short: list[_Line] = []
    for line in kept:
        problem = _problem(line.row, _ROW)
        (short if problem else shown).append(replace(line, problem=problem))
    notes = _notes(path / METRICS_FILE, sorted(damaged + short, key=lambda line: line.number))
    return Run(path, description, [line.row for line in shown if line.row is not None], tuple(notes))


@dataclass(frozen=True)
class _Line:
    """One line of the metrics."""

    number: int
    """The line's number, from 1 on."""
    raw: bytes
    row: Row | None
    problem: str = ""
    """Why there is no row."""
    is_torn: bool = False
    """True if it has no end, as a crash leaves the last one: a row of a step that is not committed."""


def _read_whole(path: Path) -> bytes:
    """The bytes of a file; none where there is none."""
    try:
        return read_file(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}; check its permissions") from error


def _read_lines(path: Path) -> list[_Line]:
    return _parse_all(_read_whole(path))


def _parse_all(content: bytes) -> list[_Line]:
    lines = []
    for number, raw in enumerate(io.BytesIO(content), 1):
        if zeros := len(raw) - len(raw.lstrip(b"\0")):
            # What power loss leaves of blocks that were never written; what follows may be whole.
            problem = f"{zeros} zero bytes, as power loss leaves them"
            lines.append(_Line(number, raw[:zeros], None, problem))
        if rest := raw[zeros:].removeprefix(b"\n" if zeros else b""):
            lines.append(_parse(number, rest))
    return lines


def _parse(number: int, raw: bytes) -> _Line:
    is_torn = not raw.endswith(b"\n")
    try:
        row = json.loads(raw.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return _Line(number, raw, None, f"not JSON ({error})", is_torn)
    if not isinstance(row, dict):
        return _Line(number, raw, None, "not an object", is_torn)
    if not _is_count(step := row.get("step")):
        return _Line(number, raw, None, f"its step is {_show(step)}", is_torn)
    return _Line(number, raw + b"\n" if is_torn else raw, row, "", is_torn)


def _sort_out(lines: Sequence[_Line], committed_step: int | None) -> tuple[list[_Line], list[_Line]]:
    """The rows up to a step, by default all, in order; and what is damaged. Rows of later steps are neither.

    A wrong step among right ones must not cost the rows after it, so the most that rise are kept.
    """
    last = committed_step if committed_step is not None else 2**63
    within = [line for line in lines if line.row is not None and line.row["step"] <= last]
    rising = {within[i].number for i in _longest_rise([line.row["step"] for line in within if line.row is not None])}
    kept = [line for line in within if line.number in rising]
    end = kept[-1].number if kept else 0
    damaged = []
    for line in lines:
        if line.row is None:
            if not line.is_torn:
                damaged.append(line)
        elif line.number in rising:
            continue
        elif line.row["step"] <= last or line.number < end:
            damaged.append(replace(line, problem=f"its step {line.row['step']} stands out of order"))
    return kept, damaged


def _longest_rise(steps: Sequence[int]) -> list[int]:
    """Places of as many as rise strictly."""
    ends: list[int] = []  # the lowest last step of the rises of each length
    ranks: list[int] = []  # how many steps can come before each in a rise
    for step in steps:
        ranks.append(bisect_left(ends, step))
        ends[ranks[-1] : ranks[-1] + 1] = [step]
    found: list[int] = []
    for place in reversed(range(len(steps))):
        if ranks[place] == len(ends) - 1 - len(found) and (not found or steps[place] < steps[found[-1]]):
            found.append(place)
    return found[::-1]


_NOTES_MAX = 5


def _notes(path: Path, damaged: Sequence[_Line], moved_to: str = "") -> Iterator[str]:
    """A note in words for each line."""
    fate = f"moved to {moved_to}" if moved_to else "left out"
    for line in damaged[:_NOTES_MAX]:
        yield f"{path} line {line.number} is damaged, {line.problem}: {fate}; the other rows are kept"
    if len(damaged) > _NOTES_MAX:
        yield f"{path}: {len(damaged) - _NOTES_MAX} more damaged lines are {fate}"


def _gaps(path: Path, kept: Sequence[_Line], committed_step: int) -> Iterator[str]:
    """Committed steps that have no row any more."""
    steps = [0, *(line.row["step"] for line in kept if line.row is not None), committed_step + 1]
    gaps = [(low + 1, high - 1) for low, high in zip(steps, steps[1:], strict=False) if high > low + 1]
    if gaps:
        words = ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in gaps[:_NOTES_MAX])
        yield f"{path} has no row of step {words}" + (" and others" if len(gaps) > _NOTES_MAX else "")


def _set_aside(path: Path, damaged: Sequence[_Line]) -> None:
    """Keep them before they go from the metrics."""
    replace_file(path, _read_whole(path) + b"".join(line.raw.rstrip(b"\n") + b"\n" for line in damaged))


def _is_number(value: object) -> TypeGuard[float]:
    # Finite, and fit for a float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value < 2**63


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
    **dict.fromkeys(("step_s", "tokens_per_s"), _is_positive),
    **dict.fromkeys(("read_bytes", "written_bytes", "resident_bytes"), _are_numbers),
    **dict.fromkeys(("loss", "val_loss?"), lambda value: value is None or _is_number(value)),
    "whole_s?": _is_positive,
    "commit_wait_s?": _is_number,
    "exposed_s?": partial(_has_numbers_of, Cause),
}
"""What a report needs of a row; with a question mark, where it is there."""
_DESCRIPTION = {
    **dict.fromkeys(("unigram_nats", "num_parameters", "baseline_rss_bytes"), _is_number),
    "identity": lambda value: isinstance(value, dict),
    "plan": partial(_has_numbers_of, Tier),
    "device": _is_text,
}
_IDENTITY = {
    "model": _is_text,
    "steps": _is_count,
    "ranks?": _is_count,
    **dict.fromkeys((f"offload.{kind}" for kind in ("params", "grads", "optimizer")), _is_request),
}
_CHANGEABLE = {
    **dict.fromkeys(("ranks", "steps", "eval_every", "eval_batches", "sample_bytes"), _is_count),
    **dict.fromkeys(("lr", "clip"), _is_positive),
}
"""Settings of an earlier start that are counted with, not only compared."""


def _problem(table: Mapping[str, Any] | None, kinds: Mapping[str, Any]) -> str:
    """What is wrong with a table of values; empty where nothing is."""
    for name, is_right in kinds.items():
        key = name.removesuffix("?")
        if table is None or (key not in table and key == name):
            return f"it lacks {key}"
        if key in table and not is_right(table[key]):
            return f"its {key} is {_show(table[key])}"
    return ""


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


def _read_json(path: Path, remedy: str = "") -> dict[str, Any]:
    try:
        content = json.loads(read_file(path).decode(), parse_constant=_refuse_constant)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    except (ValueError, RecursionError) as error:
        _refuse(path, str(error), remedy)
    if not isinstance(content, dict):
        _refuse(path, "it holds no object", remedy)
    return content


def _refuse(path: Path, why: str, remedy: str = "") -> NoReturn:
    remedy = remedy or "put it back from a copy, give another --out, or start over with --discard"
    raise ConfigError(f"{path} is not what `train` wrote: {why}; {remedy}")


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _show(value: object) -> str:
    """A value in words that fit a line."""
    if value is None:
        return "(not set)"
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}..."
