"""Processes of a comparison: workers that step in turns, what memory they take, and a limit on it.

Workers stay alive and step when they are told to, so that all systems meet the same moods of the machine.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_offload.hardware.probe import resident_bytes

CGROUPS = Path("/sys/fs/cgroup")


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


def take_turns(commands: Mapping[str, Sequence[str]], num_rounds: int) -> Iterator[dict[str, dict[str, Any]]]:
    """One step of each worker per round: its answers. The first round, which fills pools, is left out."""
    workers = {name: Worker(command) for name, command in commands.items()}
    try:
        for number in range(1 + num_rounds):
            answers = {name: worker.step(1) for name, worker in workers.items()}
            if number:
                yield answers
    finally:
        for worker in workers.values():
            worker.close()


def reset_peak() -> None:
    """`peak_resident_bytes` counts from here on."""
    Path("/proc/self/clear_refs").write_text("5")


def rss_bytes() -> int:
    """Resident now."""
    return resident_bytes()[0]


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process has had read from and written to disks so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["write_bytes"])


class NoGroupError(Exception):
    """No memory limit can be set here; says what to do."""


@dataclass(frozen=True)
class MemoryGroup:
    """A memory cgroup, of version 2 or 1.

    All that a program in it takes counts from its first instruction on, libraries and page cache included. The kernel
    ends a program that needs more.
    """

    directory: Path

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that starts a program inside."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.directory / "cgroup.procs"), *arguments]

    @property
    def group_peak_bytes(self) -> int:
        """The most of all programs of the group at once, with page cache, which the kernel drops when memory is short.
        A process's own peak is another figure, `peak_resident_bytes`."""
        names = ("memory.peak", "memory.max_usage_in_bytes")
        return next(int((self.directory / name).read_text()) for name in names if (self.directory / name).exists())

    @property
    def num_killed(self) -> int:
        """Processes that the kernel ended for want of memory."""
        for name in ("memory.events", "memory.oom_control"):
            file = self.directory / name
            if file.exists():
                counts = dict(line.split() for line in file.read_text().splitlines())
                return int(counts.get("oom_kill", 0))
        return 0


@contextlib.contextmanager
def memory_group(limit_bytes: int, root: Path = CGROUPS) -> Iterator[MemoryGroup]:
    """A new group of that size below `root`; it is removed at the end, when its programs must have ended.

    Raises NoGroupError if none can be made.
    """
    if (root / "cgroup.controllers").exists():
        parent, limits = root, {"memory.max": limit_bytes, "memory.swap.max": 0}
    else:
        parent = root / "memory"
        limits = {"memory.limit_in_bytes": limit_bytes, "memory.memsw.limit_in_bytes": limit_bytes}
    directory = parent / f"zero_offload-{uuid.uuid4().hex}"
    try:
        if parent == root:
            (root / "cgroup.subtree_control").write_text("+memory")
        directory.mkdir()
        for position, (name, value) in enumerate(limits.items()):
            # Kernels that do not count swap have no file for it.
            if position == 0 or (directory / name).exists():
                (directory / name).write_text(str(value))
    except OSError as error:
        with contextlib.suppress(OSError):
            directory.rmdir()
        raise NoGroupError(
            f"no memory cgroup can be made in {parent}: {error}; run this as root, where the memory controller is "
            "mounted for writing (in a container: --privileged --cgroupns=host)"
        ) from error
    try:
        yield MemoryGroup(directory)
    finally:
        directory.rmdir()
