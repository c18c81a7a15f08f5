"""The line that a run shows of its steps.

Never computes a figure. The calls: `Progress.step(row)` per step; `note` for other lines; `close` at the end.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

from zero_offload.base.stats import update_overlap
from zero_offload.base.types import format_bytes
from zero_offload.runs.reader import waited_s

_PLAIN_EVERY_STEPS = 10
_PLAIN_EVERY_S = 5.0
_SMOOTHING = 0.9
_SEPARATOR = " | "


def _fitting(parts: Iterable[str], width: int) -> str:
    """Those parts that fit a line of `width` whole; of two the first is more important."""
    line = ""
    for part in parts:
        longer = f"{line}{_SEPARATOR}{part}" if line else part
        if len(longer) <= width:
            line = longer
    return line


def _clock(seconds: float) -> str:
    """Minutes and seconds; hours and days where there are some."""
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours}:{minutes:02d}:{rest_s:02d}" if hours else f"{minutes}:{rest_s:02d}"


class Progress:
    """The line that a run shows of its steps: a terminal has a line that changes, a file a new line now and then.

    With None in place of a stream (a rank that is not the first) it stays silent.
    """

    def __init__(self, stream: TextIO | None, num_steps: int) -> None:
        self._stream = stream
        self._num_steps = num_steps
        self._step_s = 0.0
        self._validation_loss: float | None = None
        self._shown_at = 0.0
        self._line_open = False

    def step(self, row: Mapping[str, Any]) -> None:
        """`row` as `zo.RunLog.step` returns it; figures that it lacks are left out."""
        self._validation_loss = row.get("val_loss", self._validation_loss)
        step_s = row["step_s"]
        self._step_s = _SMOOTHING * self._step_s + (1 - _SMOOTHING) * step_s if self._step_s else step_s
        if self._stream is None:
            return
        if self._stream.isatty():
            width = shutil.get_terminal_size().columns - 1
            self._write("\r\x1b[K" + _fitting(self._parts(row), width))
            self._line_open = True
        elif self._is_due(row):
            self._shown_at = time.monotonic()
            self._write(_SEPARATOR.join(self._parts(row)) + "\n")

    def note(self, text: str) -> None:
        self.close()
        if self._stream is not None:
            self._write(text + "\n")

    def close(self) -> None:
        """End the live line, so that what follows starts on its own."""
        if self._line_open:
            self._write("\n")
            self._line_open = False

    def _is_due(self, row: Mapping[str, Any]) -> bool:
        step = row["step"]
        edge = step % _PLAIN_EVERY_STEPS == 0 or step == self._num_steps or "val_loss" in row
        return edge or time.monotonic() - self._shown_at >= _PLAIN_EVERY_S

    def _parts(self, row: Mapping[str, Any]) -> Iterator[str]:
        """Parts of the line, the most important first."""
        yield f"step {row['step']}/{self._num_steps}"
        losses = {"loss": row.get("loss"), "val": self._validation_loss}
        if shown := [f"{name} {loss:.3f}" for name, loss in losses.items() if loss is not None]:
            yield " ".join(shown)
        yield f"{_clock(self._step_s * (self._num_steps - row['step']))} left"
        if (tokens_per_s := row.get("tokens_per_s")) is not None:
            yield f"{tokens_per_s:,.0f} tokens/s"
        if live := row.get("live"):
            yield f"block{'s'[: len(live) > 1]} {', '.join(name.rpartition('.')[2] for name in live)}"
        if whole_s := row.get("whole_s", row["step_s"]):  # waits of a validation before it are in there, too
            yield f"{waited_s(row) / whole_s:.0%} waiting"
        overlap = update_overlap(row.get("update_s", 0.0), row.get("exposed_s", {}).get("update", 0.0))
        if overlap is not None:
            yield f"update {overlap:.0%} beside compute"
        for tier, written in row["written_bytes"].items():
            if written or row["read_bytes"].get(tier, 0):
                yield f"{tier} {format_bytes(row['read_bytes'].get(tier, 0))} in {format_bytes(written)} out"
        kept = {tier: nbytes for tier, nbytes in row.get("activation_bytes", {}).items() if nbytes}
        if kept:
            yield "activations: " + " ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in kept.items())

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()
