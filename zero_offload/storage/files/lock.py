"""The lock of a run's directory: one run at a time holds it, with all its ranks.

Owns the file `LOCK`, which names its holder. Two things are locked: the directory itself, which keeps its lock when
`LOCK` is deleted or replaced, and `LOCK`, which also holds where the system cannot lock a directory, or on one machine
only (NFS), and which is all that earlier versions lock. The calls: `take_lock` by rank 0 (`hold_lock` where it only
reads), then `join_lock` by the others; each returns a descriptor of `LOCK`, and locks are held until all descriptors
are closed or unlocked. The kernel does that for a process that dies.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import socket
import stat
import time
import uuid
from pathlib import Path

from zero_offload.base.errors import LockError, StorageError
from zero_offload.storage.files.system import FileSystem, check_ours, naming_errors

LOCK_NAME = "LOCK"
_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NO_DIRECTORY_LOCKS = (errno.EBADF, errno.EINVAL, errno.EISDIR, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def take_lock(path: Path, system: FileSystem, dir_fd: int) -> int:
    """Lock the directory for a new run. Raises LockError, which names the run that holds it."""
    with naming_errors("write", path / LOCK_NAME):
        # The directory first: a start that is refused must not leave a `LOCK` of its own.
        _take_alone(path, system, dir_fd, dir_fd)
        fd = system.open(LOCK_NAME, _OPEN_FLAGS | os.O_CREAT, dir_fd)
        try:
            _take(path, system, dir_fd, fd)
        except BaseException:
            system.close(fd)
            raise
    return fd


def join_lock(path: Path, system: FileSystem, dir_fd: int) -> int:
    """Hold the lock that rank 0 of this run has taken, too."""
    with naming_errors("join", path / LOCK_NAME):
        fd = system.open(LOCK_NAME, _OPEN_FLAGS, dir_fd)
        try:
            if _try_lock(system, fd, fcntl.LOCK_EX):
                raise StorageError(f"{path} is held by no run; its rank 0 has to open it before others join")
            _hold_shared(path, system, dir_fd, fd)
        except BaseException:
            system.close(fd)
            raise
    return fd


def hold_lock(path: Path, system: FileSystem, dir_fd: int) -> int:
    """Keep runs out of a directory that is only read; nothing is written. A copy may lack `LOCK`: -1 then."""
    with naming_errors("lock", path / LOCK_NAME):
        _take_alone(path, system, dir_fd, dir_fd)
        try:
            fd = system.open(LOCK_NAME, _OPEN_FLAGS, dir_fd)
        except FileNotFoundError:
            _try_lock(system, dir_fd, fcntl.LOCK_SH)
            return -1
        try:
            _take_alone(path, system, dir_fd, fd)
            _hold_shared(path, system, dir_fd, fd)
        except BaseException:
            system.close(fd)
            raise
    return fd


def unlock(system: FileSystem, dir_fd: int, fd: int) -> None:
    """Let go, also of what a descriptor that leaked into another process would keep locked."""
    for each in (fd, dir_fd):
        if each >= 0:
            _try_lock(system, each, fcntl.LOCK_UN)


def _take(path: Path, system: FileSystem, dir_fd: int, fd: int) -> None:
    _take_alone(path, system, dir_fd, fd)
    if system.fstat(fd).st_nlink == 0:  # its last holder deleted the directory between our two calls
        raise LockError(f"{path} was being deleted; try again")
    check_ours(path / LOCK_NAME, system.fstat(fd))  # a planted link would be overwritten
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    run = {"host": socket.gethostname(), "pid": os.getpid(), "started": started, "id": uuid.uuid4().hex}
    system.ftruncate(fd, 0)
    system.write_whole(fd, json.dumps(run).encode() + b"\n")
    # Held shared from here on, so that other ranks can join; a new run asks for it alone.
    _hold_shared(path, system, dir_fd, fd)


def _take_alone(path: Path, system: FileSystem, dir_fd: int, fd: int) -> None:
    if _try_lock(system, fd, fcntl.LOCK_EX):
        return
    gc.collect()  # a dropped model in a reference cycle holds its lock until then
    if not _try_lock(system, fd, fcntl.LOCK_EX):
        raise LockError(_describe_holder(path, system, dir_fd))


def _hold_shared(path: Path, system: FileSystem, dir_fd: int, fd: int) -> None:
    for each in (dir_fd, fd):
        if not _try_lock(system, each, fcntl.LOCK_SH):
            raise LockError(_describe_holder(path, system, dir_fd))


def _try_lock(system: FileSystem, fd: int, kind: int) -> bool:
    """Whether the lock is held now; True too where the system has no locks of directories."""
    try:
        system.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_LOCKS or not stat.S_ISDIR(system.fstat(fd).st_mode):
            raise
    return True


def _describe_holder(path: Path, system: FileSystem, dir_fd: int) -> str:
    try:
        fd = system.open(LOCK_NAME, _OPEN_FLAGS, dir_fd)
        try:
            holder = json.loads(system.read_whole(fd))
        finally:
            system.close(fd)
        who = f"process {holder['pid']} on {holder['host']} since {holder['started']}"
        if (holder["pid"], holder["host"]) == (os.getpid(), socket.gethostname()):
            return (
                f"{path} is in use by {who}: that is this one, by a model that has not been closed. Call "
                "zo.close(model) (a dropped model lets go with its last reference; results of its forwards count), or "
                "choose another directory"
            )
    except FileNotFoundError:
        who = f"another process, although its {LOCK_NAME} was deleted"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"  # it took the lock and has not written its name yet
    return f"{path} is in use by {who}; wait for that run to end, stop it, or choose another directory"
