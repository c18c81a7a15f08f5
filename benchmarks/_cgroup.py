"""A memory cgroup of a given size, version 2 or 1, for programs that are started in it.

Everything that such a program takes counts from its first instruction on, libraries and page cache included, and the
kernel ends it where it needs more. Makes one directory below /sys/fs/cgroup and removes it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class NoGroupError(Exception):
    """No memory limit can be set here; says what to do."""


@dataclass(frozen=True)
class MemoryGroup:
    directory: Path

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What starts a program inside."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.directory / "cgroup.procs"), *arguments]

    @property
    def peak_bytes(self) -> int:
        """The most that was in use at once, page cache included, which goes when it is in the way."""
        return self._number("memory.peak", "memory.max_usage_in_bytes")

    @property
    def num_killed(self) -> int:
        """Processes that the kernel ended for want of memory."""
        for name in ("memory.events", "memory.oom_control"):
            file = self.directory / name
            if file.exists():
                counts = dict(line.split() for line in file.read_text().splitlines())
                return int(counts.get("oom_kill", 0))
        return 0

    def _number(self, *names: str) -> int:
        return next(int((self.directory / name).read_text()) for name in names if (self.directory / name).exists())


@contextlib.contextmanager
def memory_group(limit_bytes: int, root: Path = ROOT) -> Iterator[MemoryGroup]:
    """A group of that size; NoGroupError where none can be made. Its programs must have ended."""
    directory = _make(limit_bytes, root)
    try:
        yield MemoryGroup(directory)
    finally:
        directory.rmdir()


def _make(limit_bytes: int, root: Path) -> Path:
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
    return directory
