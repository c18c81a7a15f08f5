"""Memory cgroups, for processes of tests."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup/memory")


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path | None]:
    """A memory cgroup, v1, or None where none may be made."""
    path = CGROUPS / f"zero_offload-{uuid.uuid4().hex}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError:
        with contextlib.suppress(OSError):
            path.rmdir()
        yield None
        return
    try:
        yield path
    finally:
        path.rmdir()
