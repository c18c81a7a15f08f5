"""What a training loop needs around its steps: the ranks, Ctrl-C that waits, the display, a trace.

Never computes a figure and never moves a tensor of the model. The calls: `joined_ranks()` around the whole run,
`requested_stop()` and `StepTrace` around the steps; per step `StopRequest.requested`, `StepTrace.begin_step` and
`end_step`, `Progress.step(row)`.
"""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn

import zero_offload as zo
from zero_offload.base.errors import StorageError
from zero_offload.base.host import host_tensor
from zero_offload.base.stats import update_overlap
from zero_offload.base.types import format_bytes
from zero_offload.model.profile import Profile
from zero_offload.runtime.ranks.group import join_ranks, launched_ranks
from zero_offload.runtime.ranks.watch import RankWatch

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PLAIN_EVERY_STEPS = 10
_PLAIN_EVERY_S = 5.0
_SMOOTHING = 0.9
_STEPS_BEFORE_TRACE = 2
"""The first of a process records the order of uses, the second is the first to follow it."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks."""

    rank: int
    size: int
    watch: RankWatch

    @property
    def is_first(self) -> bool:
        """True for the rank that prints and writes."""
        return self.rank == 0

    def mean(self, value: float) -> float:
        """The mean over all ranks; every rank calls it."""
        return self._sum(value) / self.size if self.size > 1 else value

    def any(self, wanted: object) -> bool:
        """True if one rank wants it; every rank calls this and gets the same answer."""
        return self._sum(float(bool(wanted))) > 0 if self.size > 1 else bool(wanted)

    def of_first(self, value: Any) -> Any:
        """What the first rank gives; every rank calls it."""
        if self.size == 1:
            return value
        found = [value]
        with self.watch.waiting("what the first rank says to all"):
            dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
        return found[0]

    def wait(self) -> None:
        """Return once every rank has come here."""
        if self.size > 1:
            with self.watch.waiting("the start, at which all ranks meet"):
                dist.barrier()

    def _sum(self, value: float) -> float:
        total = host_tensor(value, torch.float64)  # (): goes over gloo on every machine
        with self.watch.waiting("a sum of the training loop over all ranks"):
            dist.all_reduce(total)
        return total.item()


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the ranks that the launcher's environment names; without a launcher this process is alone.

    Whatever ends this rank, the others are told.
    """
    joins = join_ranks()
    rank, size = launched_ranks()
    ranks = Ranks(rank, size, RankWatch(range(size)))
    try:
        yield ranks
    except BaseException as error:
        ranks.watch.failed(error)
        raise
    finally:
        if joins:
            dist.destroy_process_group()


@dataclass
class StopRequest:
    """Shared by the signal handlers and the loop."""

    requested: bool = False
    """True if the user asked to stop."""


@contextmanager
def requested_stop() -> Iterator[StopRequest]:
    """Inside, the first SIGINT or SIGTERM only sets the flag; the second one ends the process as usual.

    Outside the main thread, where signals cannot be caught, the flag stays False.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = {number: signal.getsignal(number) for number in _SIGNALS}

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        sys.stderr.write("\nfinishing the step, then committing; once more to stop at once\n")
        for again, handler in previous.items():
            signal.signal(again, handler)

    for number in _SIGNALS:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
    """The line that a run shows of its steps: to a terminal one that changes, to a file one now and then.

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
        """What the line says, the most important first."""
        yield f"step {row['step']}/{self._num_steps}"
        losses = {"loss": row.get("loss"), "val": self._validation_loss}
        if shown := [f"{name} {loss:.3f}" for name, loss in losses.items() if loss is not None]:
            yield " ".join(shown)
        yield f"{_clock(self._step_s * (self._num_steps - row['step']))} left"
        if (tokens_per_s := row.get("tokens_per_s")) is not None:
            yield f"{tokens_per_s:,.0f} tokens/s"
        if whole_s := row.get("whole_s", row["step_s"]):  # waits of a validation before it are in there, too
            yield f"stall {row['stall_s'] / whole_s:.0%}"
        overlap = update_overlap(row.get("update_s", 0.0), row.get("exposed_s", {}).get("update", 0.0))
        if overlap is not None:
            yield f"update {overlap:.0%} hidden"
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


class StepTrace:
    """Records up to `num_steps` steps of this start after its second, and writes them when they are over.

    A trace that cannot be written is noted, and the run goes on.
    """

    def __init__(self, model: nn.Module, path: Path, num_steps: int, note: Callable[[str], None]) -> None:
        self._model = model
        self._path = path
        self._left = num_steps
        self._note = note
        self._num_seen = 0
        self._recording = ExitStack()
        self._profile: Profile | None = None

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()

    def begin_step(self) -> None:
        self._num_seen += 1
        if self._num_seen == _STEPS_BEFORE_TRACE + 1 and self._left:
            self._profile = self._recording.enter_context(zo.profile(self._model))

    def end_step(self) -> None:
        if self._profile is not None:
            self._left -= 1
            if self._left == 0:
                self._finish()

    def _finish(self) -> None:
        profile, self._profile = self._profile, None
        self._recording.close()
        if profile is None:
            return
        try:
            path = profile.export_chrome_trace(self._path)
        except StorageError as error:
            self._note(f"no trace: {error}")
        else:
            self._note(f"trace: {path}; open it in https://ui.perfetto.dev")
