"""What a run shows while it trains: one live line on a terminal, a plain line now and then elsewhere.

Owns the words and the rhythm of the display; never computes a figure. Calls: `step(row)` after each step,
`note(text)` for everything else, `close()` at the end.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from typing import Any, TextIO

from zero_offload.base.stats import update_overlap
from zero_offload.base.types import format_bytes

_PLAIN_EVERY_STEPS = 10
_PLAIN_EVERY_S = 5.0
_SMOOTHING = 0.9


class Progress:
    """Writes to one stream; with None (a rank that is not the first) it stays silent."""

    def __init__(self, stream: TextIO | None, num_steps: int) -> None:
        self._stream = stream
        self._num_steps = num_steps
        self._step_s = 0.0
        self._validation_loss: float | None = None
        self._shown_at = 0.0
        self._line_open = False

    def step(self, row: Mapping[str, Any]) -> None:
        self._validation_loss = row.get("val_loss", self._validation_loss)
        step_s = row["step_s"]
        self._step_s = _SMOOTHING * self._step_s + (1 - _SMOOTHING) * step_s if self._step_s else step_s
        if self._stream is None:
            return
        if self._stream.isatty():
            width = shutil.get_terminal_size().columns - 1
            self._write("\r\x1b[K" + self._line(row)[:width])
            self._line_open = True
        elif self._is_due(row):
            self._shown_at = time.monotonic()
            self._write(self._line(row) + "\n")

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

    def _line(self, row: Mapping[str, Any]) -> str:
        validation = f" val {self._validation_loss:.3f}" if self._validation_loss is not None else ""
        moved = " ".join(
            f"{tier} {format_bytes(row['read_bytes'].get(tier, 0))} in {format_bytes(written)} out"
            for tier, written in row["written_bytes"].items()
            if written or row["read_bytes"].get(tier, 0)
        )
        activations = " ".join(
            f"{tier} {format_bytes(nbytes)}" for tier, nbytes in row.get("activation_bytes", {}).items() if nbytes
        )
        whole_s = row.get("whole_s", row["step_s"])  # waits of a validation before it are in there, too
        stall = 100 * row["stall_s"] / whole_s if whole_s else 0.0
        overlap = update_overlap(row.get("update_s", 0.0), row.get("exposed_s", {}).get("update", 0.0))
        left_s = round(self._step_s * (self._num_steps - row["step"]))
        parts = [
            f"step {row['step']}/{self._num_steps}",
            f"loss {row['loss']:.3f}{validation}",
            f"{row['tokens_per_s']:,.0f} tokens/s",
            moved or "no bytes moved",
            *([f"activations: {activations}"] if activations else []),
            f"stall {stall:.0f}%" + (f", update {overlap:.0%} hidden" if overlap is not None else ""),
            f"{left_s // 60}:{left_s % 60:02d} left",
        ]
        return " | ".join(parts)

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()
