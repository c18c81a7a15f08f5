"""Processes that step when they are told to, so that what is compared sees the same moods of the machine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class WorkerEndedError(RuntimeError):
    """A process that was to step has ended; what it wrote to its standard error says why."""


class Worker:
    """The other end of a process that reads a number of steps from each line, makes them, and answers in JSON."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def step(self, num_steps: int) -> dict[str, Any]:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(f"{num_steps}\n")
        self._child.stdin.flush()
        while answer := self._child.stdout.readline():
            if answer.startswith("{"):  # peers print, too
                found: dict[str, Any] = json.loads(answer)
                return found
        raise WorkerEndedError(f"ended early with exit code {self._child.wait()}; its error is above")

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def forget_peak() -> None:
    """The largest resident set counts from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def rss_bytes() -> int:
    """Resident now."""
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """Since `forget_peak`."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def disk_bytes() -> tuple[int, int]:
    """What this process has had read from and written to disks so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])
