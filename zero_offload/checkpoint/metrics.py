"""`metrics.jsonl`: one JSON object per optimizer step, which goes on behind what a generation has.

Owns the format, and what becomes of lines that are torn, damaged or out of order. The calls: `Metrics.open` with the
committed step, `Metrics.append` per step, `close`. `read_lines` and `sort_out` for a command that only looks.
"""

from __future__ import annotations

import io
import json
import math
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from zero_offload.base.errors import StorageError
from zero_offload.storage.files.directory import what_became_of
from zero_offload.storage.files.system import REAL, check_ours, naming_errors, read_file, replace_file

DAMAGED_FILE = "metrics.damaged"
"""Lines of the metrics that could not be read, as they were found."""
EARLIER_FILE = "metrics.earlier"
"""Rows of a run that was there before and began anew."""
MODEL_STEP = "model_step"
"""In a row: the optimizer steps that the model has counted, where the loop counts otherwise."""
NUM_STEPS = "steps"
"""In a row: how many steps it stands for, where they are several."""

Row = dict[str, Any]


class Metrics:
    """One JSON object per step, in order, each step once."""

    def __init__(self, path: Path, fd: int, notes: Sequence[str], last_step: int) -> None:
        """`fd` is open for appending, and closed with this."""
        self._path = path
        self.last_step = last_step
        """That of the last row; 0 where there is none."""
        self._file = open(fd, "ab", buffering=0)  # noqa: SIM115 - the object owns it
        self.notes = tuple(notes)
        """Remarks for the user about damaged or missing rows."""

    @classmethod
    def open(cls, path: Path, committed_step: int) -> Metrics:
        """Drop what was written after the committed step, a torn last line included, and continue there.

        Lines that cannot be read, or stand out of order, are moved to `DAMAGED_FILE`; all others are kept. Where no
        step is committed the rows are another run's: they are moved to `EARLIER_FILE`.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with naming_errors("write", path):
            # Found out before it is made: no link is followed, no FIFO waited for, no other file changed.
            with suppress(FileNotFoundError):
                check_ours(path, os.stat(path, follow_symlinks=False))
            before = _read_whole(path)
            lines = _parse_all(before)
            kept, damaged = sort_out(lines, committed_step)
            notes = [*damage_notes(path, damaged, DAMAGED_FILE), *_gaps(path, kept, committed_step)]
            if not committed_step and before:
                replace_file(path.with_name(EARLIER_FILE), before)
                notes.append(f"{path} had rows of an earlier start, which are in {EARLIER_FILE}: this one begins anew")
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
        return cls(path, fd, notes, max((line.step for line in kept), default=0))

    def append(self, row: Mapping[str, Any]) -> None:
        """Hand one line to the system whole: it survives a killed process. Raises StorageError."""
        line = json.dumps({name: _finite(value) for name, value in row.items()}, allow_nan=False) + "\n"
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
        self.last_step = row["step"]

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Line:
    """One line of the metrics."""

    number: int
    """The line's number, from 1 on."""
    raw: bytes
    row: Row | None
    problem: str = ""
    """Why there is no row."""
    is_torn: bool = False
    """True if it has no end, as a crash leaves the last one: a row of a step that is not committed."""

    @property
    def step(self) -> int:
        """0 where there is no row."""
        return self.row["step"] if self.row else 0

    @property
    def model_step(self) -> int:
        return self.row.get(MODEL_STEP, self.step) if self.row else 0

    @property
    def num_steps(self) -> int:
        return self.row.get(NUM_STEPS, 1) if self.row else 0


def _read_whole(path: Path) -> bytes:
    """The bytes of a file; none where there is none."""
    try:
        return read_file(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}; check its permissions") from error


def read_lines(path: Path) -> list[Line]:
    return _parse_all(_read_whole(path))


def _parse_all(content: bytes) -> list[Line]:
    lines = []
    for number, raw in enumerate(io.BytesIO(content), 1):
        if zeros := len(raw) - len(raw.lstrip(b"\0")):
            # Power loss leaves zeros in blocks that were never written; the rest of the line may be whole.
            problem = f"{zeros} zero bytes, as power loss leaves them"
            lines.append(Line(number, raw[:zeros], None, problem))
        if rest := raw[zeros:].removeprefix(b"\n" if zeros else b""):
            lines.append(_parse(number, rest))
    return lines


def _parse(number: int, raw: bytes) -> Line:
    is_torn = not raw.endswith(b"\n")
    try:
        row = json.loads(raw.decode(), parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        return Line(number, raw, None, f"not JSON ({error})", is_torn)
    if not isinstance(row, dict):
        return Line(number, raw, None, "not an object", is_torn)
    for name, usual in (("step", None), (MODEL_STEP, 1), (NUM_STEPS, 1)):
        if not is_count(value := row.get(name, usual)):
            return Line(number, raw, None, f"its {name} is {show(value)}", is_torn)
    return Line(number, raw + b"\n" if is_torn else raw, row, "", is_torn)


def sort_out(lines: Sequence[Line], committed_step: int | None) -> tuple[list[Line], list[Line]]:
    """The rows up to a step, by default all, in order; and what is damaged. Rows of later steps are neither.

    A wrong step among right ones must not cost the rows after it, so the most that rise are kept.
    """
    last = committed_step if committed_step is not None else 2**63
    within = [line for line in lines if line.row is not None and line.model_step <= last]
    rising = {within[i].number for i in _longest_rise([line.step for line in within])}
    kept = [line for line in within if line.number in rising]
    end = kept[-1].number if kept else 0
    damaged = []
    for line in lines:
        if line.row is None:
            if not line.is_torn:
                damaged.append(line)
        elif line.number in rising:
            continue
        elif line.model_step <= last or line.number < end:
            damaged.append(replace(line, problem=f"its step {line.step} stands out of order"))
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


def damage_notes(path: Path, damaged: Sequence[Line], moved_to: str = "") -> Iterator[str]:
    """A note in words for each line."""
    fate = f"moved to {moved_to}" if moved_to else "left out"
    for line in damaged[:_NOTES_MAX]:
        yield f"{path} line {line.number} is damaged, {line.problem}: {fate}; the other rows are kept"
    if len(damaged) > _NOTES_MAX:
        yield f"{path}: {len(damaged) - _NOTES_MAX} more damaged lines are {fate}"


def _gaps(path: Path, kept: Sequence[Line], committed_step: int) -> Iterator[str]:
    """Committed steps that have no row any more."""
    if kept and any(MODEL_STEP in (line.row or {}) for line in kept):
        committed_step = kept[-1].step
    ends = [0, *(line.step for line in kept)]
    begins = [*(line.step - line.num_steps for line in kept), committed_step]
    if kept and committed_step - ends[-1] < kept[-1].num_steps:
        begins.pop()  # the row that has them was to come
    gaps = [(end + 1, begin) for end, begin in zip(ends, begins, strict=False) if begin > end]
    if gaps:
        words = ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in gaps[:_NOTES_MAX])
        yield f"{path} has no row of step {words}" + (" and others" if len(gaps) > _NOTES_MAX else "")


def _set_aside(path: Path, damaged: Sequence[Line]) -> None:
    """Keep them before they go from the metrics."""
    replace_file(path, _read_whole(path) + b"".join(line.raw.rstrip(b"\n") + b"\n" for line in damaged))


def is_count(value: object) -> TypeGuard[int]:
    """True for a whole number from 1 up that 8 bytes hold."""
    return type(value) is int and 0 < value < 2**63


def _finite(value: object) -> object:
    # JSON has no NaN; a loss that is none is written as null.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def refuse_constant(text: str) -> None:
    """For `json.loads`: NaN and infinities are not JSON."""
    raise ValueError(f"{text} is not a JSON number")


def show(value: object) -> str:
    """A value in words that fit a line."""
    if value is None:
        return "(not set)"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}..."
