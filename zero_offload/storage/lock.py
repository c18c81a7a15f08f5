"""The lock of a run's directory: one run at a time holds it, with all its ranks.

Owns the file `LOCK`, which names its holder. The calls: `take_lock` by rank 0 (`hold_lock` where it only reads), then
`join_lock` by the others; each returns a descriptor, and the lock is held until all of them are closed or unlocked.
The kernel does that for a process that dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from zero_offload.errors import LockError, StorageError
from zero_offload.storage.system import FileSystem, check_ours, naming_errors

LOCK_NAME = "LOCK"
_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def take_lock(path: Path, system: FileSystem, dir_fd: int) -> int:
    """Lock the directory for a new run. Raises LockError, which names the run that holds it."""
    return _open("write", os.O_CREAT, _take, path, system, dir_fd)


def join_lock(path: Path, system: FileSystem, dir_fd: int) -> int:
    """Hold the lock that rank 0 of this run has taken, too."""
    return _open("join", 0, _join, path, system, dir_fd)


def hold_lock(path: Path, system: FileSystem, dir_fd: int) -> int:
    """Keep runs out of a directory that is only read; nothing is written."""
    return _open("lock", 0, _hold, path, system, dir_fd)


TakeLock = Callable[[Path, FileSystem, int], None]


def _open(action: str, flags: int, take: TakeLock, path: Path, system: FileSystem, dir_fd: int) -> int:
    """The lock's descriptor, once `take` has locked it."""
    with naming_errors(action, path / LOCK_NAME):
        fd = system.open(LOCK_NAME, _OPEN_FLAGS | flags, dir_fd)
        try:
            take(path, system, fd)
        except BaseException:
            system.close(fd)
            raise
    return fd


def _take_alone(path: Path, system: FileSystem, fd: int) -> None:
    if not _try_lock(system, fd, fcntl.LOCK_EX):
        raise LockError(_describe_holder(path, system, fd))


def _hold(path: Path, system: FileSystem, fd: int) -> None:
    _take_alone(path, system, fd)
    _hold_shared(path, system, fd)


def _take(path: Path, system: FileSystem, fd: int) -> None:
    _take_alone(path, system, fd)
    if system.fstat(fd).st_nlink == 0:  # its last holder deleted the directory between our two calls
        raise LockError(f"{path} was being deleted; try again")
    check_ours(path / LOCK_NAME, system.fstat(fd))  # a planted link would be overwritten
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    run = {"host": socket.gethostname(), "pid": os.getpid(), "started": started, "id": uuid.uuid4().hex}
    system.ftruncate(fd, 0)
    system.write_whole(fd, json.dumps(run).encode() + b"\n")
    # Held shared from here on, so that other ranks can join; a new run asks for it alone.
    _hold_shared(path, system, fd)


def _join(path: Path, system: FileSystem, fd: int) -> None:
    if _try_lock(system, fd, fcntl.LOCK_EX):
        raise StorageError(f"{path} is held by no run; its rank 0 has to open it before others join")
    _hold_shared(path, system, fd)


def _hold_shared(path: Path, system: FileSystem, fd: int) -> None:
    if not _try_lock(system, fd, fcntl.LOCK_SH):
        raise LockError(_describe_holder(path, system, fd))


def _try_lock(system: FileSystem, fd: int, kind: int) -> bool:
    try:
        system.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _describe_holder(path: Path, system: FileSystem, fd: int) -> str:
    try:
        holder = json.loads(system.read_whole(fd))
        who = f"process {holder['pid']} on {holder['host']} since {holder['started']}"
        if (holder["pid"], holder["host"]) == (os.getpid(), socket.gethostname()):
            return (
                f"{path} is in use by {who}: that is this one, by a model that has not been closed. Call "
                "zo.close(model) (a model that was dropped without it lets go when its last step is complete), or "
                "choose another directory"
            )
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"  # it took the lock and has not written its name yet
    return f"{path} is in use by {who}; wait for that run to end, stop it, or choose another directory"
