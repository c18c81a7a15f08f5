"""The directory one run keeps its files in: locked, private, and only ever touched by descriptor.

Owns the lock, the permission checks, preallocation and removal. Never reads or writes the bytes of a data file: a file
engine does that on `DataFile.fd`. Never removes a name it was not given. The calls in order: `RunDirectory.open` (the
other ranks of a run `join`; `read` and `look` change nothing), then `create_file`, `create_scratch` or `open_file` for
each `DataFile`, `remove`, `close`. Every access is relative to the directory's descriptor, so a directory that is
renamed or replaced meanwhile cannot redirect a write.

One run at a time holds the lock, with all its ranks. Two things are locked: the directory itself, which keeps its lock
when `LOCK` is deleted or replaced, and the file `LOCK`, which names its holder. `LOCK` also holds where the system
cannot lock a directory, or on one machine only (NFS), and it is all that earlier versions lock. Locks are held until
all descriptors are closed or unlocked. The kernel does that for a process that dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import re
import socket
import stat
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from zero_offload.base.ends import in_child
from zero_offload.base.errors import CapacityError, ConfigError, LockError, StorageError
from zero_offload.base.types import format_bytes
from zero_offload.storage.files.system import (
    NOT_WRITABLE,
    REAL,
    FileSystem,
    check_ours,
    check_regular,
    naming_errors,
    read_file,
    remedy_of,
)

LOCK_NAME = "LOCK"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # NONBLOCK: a FIFO must not hang us
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OR_KEEP_MORE = ", or keep more on the CPU, for example optimizer='cpu'"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_DIRECTORY_LOCKS = (errno.EBADF, errno.EINVAL, errno.EISDIR, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


OPEN_FILES: weakref.WeakSet[DataFile] = weakref.WeakSet()
_STUCK_LOCKS: list[int] = []


def _close_files_in_child() -> None:
    """A forked worker that outlives its run must not keep the space of deleted files, nor the lock of a stuck drive."""
    for file in list(OPEN_FILES):
        file.close()
    while _STUCK_LOCKS:
        os.close(_STUCK_LOCKS.pop())


os.register_at_fork(after_in_child=_close_files_in_child)


@dataclass(eq=False)
class DataFile:
    """One open, preallocated file."""

    fd: int
    path: Path
    nbytes: int
    system: FileSystem

    def __post_init__(self) -> None:
        OPEN_FILES.add(self)

    def grow(self, nbytes: int) -> None:
        """Reserve blocks up to `nbytes`; without the space, CapacityError and the old size."""
        if nbytes <= self.nbytes:
            return
        with naming_errors("reserve space for", self.path):
            self._reserve(nbytes)

    def _reserve(self, nbytes: int) -> None:
        usage = self.system.fstatvfs(self.fd)
        free_bytes = usage.f_bavail * usage.f_frsize
        missing_bytes = nbytes - self.nbytes
        # Asked first: some file systems fill the disk to the brim before they refuse.
        if missing_bytes > free_bytes:
            raise self._no_space(missing_bytes, free_bytes)
        try:
            self.system.posix_fallocate(self.fd, self.nbytes, missing_bytes)
        except OSError as error:
            self.system.ftruncate(self.fd, self.nbytes)
            if error.errno in _NO_SPACE:
                raise self._no_space(missing_bytes, free_bytes) from error
            if error.errno == errno.EFBIG:
                needed = f"{self.path} needs {format_bytes(nbytes)}: {error.strerror}"
                raise CapacityError(f"{needed}. {remedy_of(error.errno)}") from error
            raise
        self.nbytes = nbytes

    def _no_space(self, missing_bytes: int, free_bytes: int) -> CapacityError:
        return CapacityError(
            f"disk space: {self.path} needs {format_bytes(missing_bytes)} more, "
            f"{format_bytes(free_bytes)} are free; free some, or choose another disk with nvme={OR_KEEP_MORE}"
        )

    def sync(self) -> None:
        """Return once every completed write is on the medium."""
        with naming_errors("flush", self.path):
            self.system.fdatasync(self.fd)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self.system.close(fd)


class RunDirectory:
    """An open, locked directory; use `open`, not the constructor."""

    def __init__(
        self, path: Path, system: FileSystem, dir_fd: int, lock_fd: int, *, is_read_only: bool = False
    ) -> None:
        """`is_read_only`: files of any owner are opened to be read."""
        self.path = path
        self.system = system
        self._dir_fd = dir_fd
        self._lock_fd = lock_fd
        self._is_read_only = is_read_only
        self.user = ""
        """The process of the run that is at work here, if this was opened to be read beside it."""
        self.holder = system.read_whole(lock_fd) if lock_fd >= 0 else b""
        """The text that the holder of the lock has written into it; no two runs write the same."""
        self.stays_locked = False
        """A drive may still write what was given up: no other run comes here before this process has ended."""
        in_child(self._close_descriptors)  # not unlocking: a forked worker that outlives a killed run holds no lock

    @classmethod
    def open(cls, path: str | Path, system: FileSystem = REAL) -> RunDirectory:
        """Create the directory if need be, check that it is private and lock it."""
        path = Path(path).absolute()
        _make_private(path, system)
        return cls._lock_with(_take_lock, path, system)

    @classmethod
    def join(cls, path: str | Path, system: FileSystem = REAL) -> RunDirectory:
        """Open a directory that rank 0 of this run has opened; it stays locked until every rank is gone."""
        return cls._lock_with(_join_lock, Path(path).absolute(), system)

    @classmethod
    def look(cls, path: str | Path, system: FileSystem = REAL) -> RunDirectory:
        """Open without a lock, to read what never changes. It may be another user's, and on a read-only file system."""
        return cls._lock_with(lambda *_: -1, Path(path).absolute(), system, is_read_only=True)

    @classmethod
    def read(cls, path: str | Path) -> RunDirectory:
        """As `look`, and no run may begin here meanwhile. Beside a run that is at work there is no lock: see `user`.

        Raises LockError where that is a model of this process.
        """
        try:
            return cls._lock_with(_hold_lock, Path(path).absolute(), REAL, is_read_only=True)
        except LockError:
            directory = cls.look(path)
            directory.user = _holder_of(directory.system, directory.dir_fd)
            if _is_this_process(directory.user):
                directory.close()
                raise
            return directory

    @classmethod
    def read_along(cls, path: str | Path) -> RunDirectory:
        """Open what rank 0 has opened by `read`: no run begins here until the last rank has closed it."""
        return cls._lock_with(_hold_along, Path(path).absolute(), REAL, is_read_only=True)

    @classmethod
    def _lock_with(
        cls,
        lock: Callable[[Path, FileSystem, int], int],
        path: Path,
        system: FileSystem,
        *,
        is_read_only: bool = False,
    ) -> RunDirectory:
        with naming_errors("open", path):
            dir_fd = system.open(path, _DIRECTORY_FLAGS)
        try:
            (check_directory if is_read_only else check_private)(path, system.fstat(dir_fd))
            return cls(path, system, dir_fd, lock(path, system, dir_fd), is_read_only=is_read_only)
        except BaseException:
            system.close(dir_fd)
            raise

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def dir_fd(self) -> int:
        """Descriptor for calls that take `dir_fd=`; raises once closed, in a forked child too."""
        if self._dir_fd < 0:
            raise StorageError(f"{self.path} is closed in process {os.getpid()}; open it again")
        return self._dir_fd

    @property
    def free_bytes(self) -> int:
        """Bytes this user may still write to the file system."""
        with naming_errors("measure", self.path):
            usage = self.system.fstatvfs(self.dir_fd)
        return usage.f_bavail * usage.f_frsize

    def path_of(self, name: str) -> Path:
        """The path of a file of ours; a name that could leave the directory is refused."""
        if not _NAME.fullmatch(name):
            raise StorageError(f"{name!r} is not the name of a file in {self.path}; names match {_NAME.pattern}")
        return self.path / name

    def names(self) -> list[str]:
        """Names present, sorted, without the lock."""
        with naming_errors("list", self.path):
            return sorted(name for name in self.system.listdir(self.dir_fd) if name != LOCK_NAME)

    def create_file(self, name: str, nbytes: int) -> DataFile:
        """A new file of `nbytes` reserved bytes; nothing stays behind when they cannot be had."""
        path = self.path_of(name)
        with naming_errors("create", path):
            fd = self.system.open(name, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, self.dir_fd)
        try:
            return _prepare(fd, path, nbytes, self.system)
        except BaseException:
            with contextlib.suppress(OSError):  # a drive that turned read-only: the first error is the one to tell
                self.system.unlink(name, self.dir_fd)
            raise

    def create_scratch(self, nbytes: int) -> DataFile:
        """A file without a name: the kernel frees it with its last descriptor, even after kill -9."""
        path = self.path / "(scratch)"
        with naming_errors("create", path):
            return _prepare(_open_unnamed(self.system, self.dir_fd), path, nbytes, self.system)

    def open_file(self, name: str, *, direct: bool = True) -> DataFile:
        """Open an existing file of ours."""
        path = self.path_of(name)
        with naming_errors("open", path):
            fd = self.system.open(name, _READ_FLAGS if self._is_read_only else _OPEN_FLAGS, self.dir_fd)
        try:
            info = self.system.fstat(fd)
            (check_regular if self._is_read_only else check_ours)(path, info)
            _set_caching(fd, self.system, direct=direct)
            return DataFile(fd, path, info.st_size, self.system)
        except BaseException:
            self.system.close(fd)
            raise

    def remove(self, names: Iterable[str]) -> int:
        """Delete the named files and return the bytes freed; missing ones are skipped.

        All names are checked first. Where a name is a link, a directory or not ours, nothing is deleted.
        """
        found = self.check_removable(names)
        for name in found:
            with naming_errors("delete", self.path / name):
                self.system.unlink(name, self.dir_fd)
        return sum(info.st_blocks * 512 for info in found.values())

    def check_removable(self, names: Iterable[str]) -> dict[str, os.stat_result]:
        """Files of these names that are there. Raises StorageError for a link, a directory, or a file of others."""
        found = {}
        for name in names:
            path = self.path_of(name)
            with contextlib.suppress(FileNotFoundError):
                found[name] = self.system.lstat(name, self.dir_fd)
                check_ours(path, found[name])
        return found

    def measure(self, names: Iterable[str]) -> int:
        """Bytes that the named files take on the disk; missing ones take none."""
        nbytes = 0
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                nbytes += self.system.lstat(self.path_of(name).name, self.dir_fd).st_blocks * 512
        return nbytes

    def sync(self, files: Iterable[str] = ()) -> None:
        """Return once these files' bytes and the directory's names (creations, renames, removals) are on the medium."""
        for name in files:
            file = self.open_file(name, direct=False)
            try:
                file.sync()
            finally:
                file.close()
        with naming_errors("flush", self.path):
            self.system.fsync(self.dir_fd)

    def close(self) -> None:
        """Release the lock; the directory and its files stay."""
        if self.stays_locked:
            _STUCK_LOCKS.extend(fd for fd in (self._lock_fd, self._dir_fd) if fd >= 0)
            self._lock_fd = self._dir_fd = -1
        _unlock(self.system, self._dir_fd, self._lock_fd)
        self._close_descriptors()

    def check_in_place(self, *files: DataFile) -> None:
        """Raise unless the names of this directory, its lock and these files still lead to what is open here.

        A file that was deleted, or replaced by a copy, still takes every write, and the next start does not find them.
        Raises StorageError, or LockError for the lock: with another one a second run could come in.
        """
        path, system = self.path, self.system
        if what_became_of(system.fstat(self.dir_fd), system, path):
            raise StorageError(
                f"{path} was renamed, replaced or unmounted while this run was using it: it is not the directory that "
                f"the run has open{self._now_at()}. The run stops; what was committed before is in the open one. "
                "Put it back, then start again"
            )
        if self._lock_fd >= 0 and (fate := what_became_of(system.fstat(self._lock_fd), system, LOCK_NAME, self.dir_fd)):
            raise LockError(
                f"{path / LOCK_NAME} was {fate} while this run was using {path}: a second run could come in. The run "
                "stops, and the last commit stays. See that no other run is there, then start again; a "
                f"{LOCK_NAME} that a dead run has left is free, and need not be deleted"
            )
        for file in files:
            if fate := what_became_of(system.fstat(file.fd), system, file.path.name, self.dir_fd):
                raise StorageError(
                    f"{file.path} was {fate} while this run was using it, so what the run writes would be lost with "
                    "its end. Nothing more is committed. Generations here lack that file: put it back if it was moved, "
                    "load a checkpoint, or start over with existing='discard'"
                )

    def _now_at(self) -> str:
        place = self.system.place_of(self.dir_fd)
        return f", which is {place}" if place and place != str(self.path) else ""

    def close_and_remove(self) -> bool:
        """Close and delete the lock's file; delete the directory too when nothing else is left in it."""
        empty = not self.names()
        with naming_errors("delete", self.path):
            # While it is locked: a process that has opened this one meanwhile sees that its name is gone.
            self.system.unlink(LOCK_NAME, self.dir_fd)
            if empty:
                self.system.rmdir(self.path)
        self.close()
        return empty

    def _close_descriptors(self) -> None:
        for fd in (self._lock_fd, self._dir_fd):
            if fd >= 0:
                self.system.close(fd)
        self._lock_fd = self._dir_fd = -1


def what_became_of(opened: os.stat_result, system: FileSystem, name: str | Path, dir_fd: int | None = None) -> str:
    """The fate of an open file's name: "deleted", "replaced", or "" while it leads there."""
    try:
        named = system.lstat(name, dir_fd)
    except (FileNotFoundError, NotADirectoryError):
        return "deleted"
    return "" if (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino) else "replaced"


def sync_path(directory: RunDirectory) -> None:
    """Return once the names that lead to a directory are on the medium.

    On its file system, and as far as this user may open the directories on the way.
    """
    system = directory.system
    device = system.fstat(directory.dir_fd).st_dev
    for parent in directory.path.parents:
        with naming_errors("flush", parent), contextlib.suppress(PermissionError):
            fd = system.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if system.fstat(fd).st_dev != device:
                    return
                system.fsync(fd)
            finally:
                system.close(fd)


def hold_directory(path: Path) -> RunDirectory:
    """Open and lock an existing directory whose files may be deleted; nothing is written, the lock's holder neither."""
    return RunDirectory._lock_with(_hold_lock, path.absolute(), REAL)


def is_held(path: Path) -> bool:
    """True if the process that its lock names is there, or is another machine's: it may be at work.

    Takes no lock itself, which a run that begins at this moment would meet.
    """
    try:
        holder = json.loads(read_file(path / LOCK_NAME))
        if holder["host"] != socket.gethostname():
            return True
        os.kill(holder["pid"], 0)
    except PermissionError:
        return True
    except (OSError, StorageError, ValueError, KeyError, TypeError, OverflowError):
        return False
    return True


def _open_unnamed(system: FileSystem, dir_fd: int) -> int:
    try:
        return system.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, dir_fd)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    name = f"scratch-{os.getpid()}-{time.monotonic_ns()}"
    fd = system.open(name, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, dir_fd)
    system.unlink(name, dir_fd)
    return fd


def _make_private(path: Path, system: FileSystem) -> None:
    with naming_errors("create", path):
        for missing in reversed([each for each in (path, *path.parents) if not _exists(each, system)]):
            system.mkdir(missing)
        check_private(path, system.lstat(path))


def _exists(path: Path, system: FileSystem) -> bool:
    try:
        system.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_directory(path: Path, info: os.stat_result) -> None:
    """Raise unless `info`, the status of `path` itself, is that of a directory."""
    if stat.S_ISLNK(info.st_mode):
        raise StorageError(f"{path} is a symbolic link; give the directory it points to: {os.path.realpath(path)}")
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigError(f"{path} is a file, not a directory; give a directory of its own to the run")


def check_private(path: Path, info: os.stat_result) -> None:
    """Raise unless `info`, the status of `path` itself, is a directory that only this user can write."""
    check_directory(path, info)
    if info.st_uid != os.geteuid():
        raise StorageError(
            f"{path} belongs to user {info.st_uid}, not to user {os.geteuid()} who runs this; "
            "choose a directory of your own"
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        # With the sticky bit it is meant for everyone, as /tmp is.
        remedy = f"name a directory in it: {path}/run" if info.st_mode & stat.S_ISVTX else f"type: chmod 700 {path}"
        raise StorageError(f"{path} is writable by others (mode {stat.S_IMODE(info.st_mode):04o}); {remedy}")


def _prepare(fd: int, path: Path, nbytes: int, system: FileSystem) -> DataFile:
    file = DataFile(fd, path, 0, system)
    try:
        _set_caching(fd, system, direct=True)
        file.grow(nbytes)
    except BaseException:
        file.close()
        raise
    return file


def _set_caching(fd: int, system: FileSystem, *, direct: bool) -> None:
    """With `direct`, transfers pass by the page cache, unless the file system has no O_DIRECT.

    It is asked for on the open file: a refusal at creation would leave the file behind.
    """
    flags = system.get_flags(fd) & ~os.O_NONBLOCK
    try:
        system.set_flags(fd, flags | (os.O_DIRECT if direct else 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        system.set_flags(fd, flags)


# The lock


def _take_lock(path: Path, system: FileSystem, dir_fd: int) -> int:
    """Lock the directory for a new run. Raises LockError, which names the run that holds it."""
    with naming_errors("write", path / LOCK_NAME):
        # The directory first: a start that is refused must not leave a `LOCK` of its own.
        _take_alone(path, system, dir_fd, dir_fd)
        fd = system.open(LOCK_NAME, _OPEN_FLAGS | os.O_CREAT, dir_fd)
        try:
            _take_lock_file(path, system, dir_fd, fd)
        except BaseException:
            system.close(fd)
            raise
    return fd


def _join_lock(path: Path, system: FileSystem, dir_fd: int) -> int:
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


def _hold_lock(path: Path, system: FileSystem, dir_fd: int) -> int:
    """Keep runs out of a directory that is only read; nothing is written. Returns -1 without a `LOCK` to open."""
    with naming_errors("lock", path / LOCK_NAME):
        _take_alone(path, system, dir_fd, dir_fd)
        if (fd := _open_lock_file(system, dir_fd)) < 0:
            _try_lock(system, dir_fd, fcntl.LOCK_SH)
            return -1
        try:
            _take_alone(path, system, dir_fd, fd)
            _hold_shared(path, system, dir_fd, fd)
        except BaseException:
            system.close(fd)
            raise
    return fd


def _hold_along(path: Path, system: FileSystem, dir_fd: int) -> int:
    """Share what another rank holds, if it does."""
    with naming_errors("lock", path / LOCK_NAME):
        fd = _open_lock_file(system, dir_fd)
        for each in (dir_fd, fd):
            if each >= 0:
                _try_lock(system, each, fcntl.LOCK_SH)
    return fd


def _open_lock_file(system: FileSystem, dir_fd: int) -> int:
    """Open `LOCK`; -1 where it is missing, as in a copy, or not this user's to read: the directory is locked then."""
    for flags in (_OPEN_FLAGS, _READ_FLAGS):  # NFS locks for one alone only what is open for writing
        try:
            return system.open(LOCK_NAME, flags, dir_fd)
        except FileNotFoundError:
            return -1
        except OSError as error:
            if error.errno not in NOT_WRITABLE:
                raise
    return -1


def _unlock(system: FileSystem, dir_fd: int, fd: int) -> None:
    """Let go, also of what a descriptor that leaked into another process would keep locked."""
    for each in (fd, dir_fd):
        if each >= 0:
            _try_lock(system, each, fcntl.LOCK_UN)


def _take_lock_file(path: Path, system: FileSystem, dir_fd: int, fd: int) -> None:
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
    """True if the lock is held now; True too where the system cannot lock a directory, or what is open to be read."""
    try:
        system.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        is_plain = not stat.S_ISDIR(system.fstat(fd).st_mode) and system.get_flags(fd) & os.O_ACCMODE != os.O_RDONLY
        if error.errno not in _NO_DIRECTORY_LOCKS or is_plain:
            raise
    return True


def _describe_holder(path: Path, system: FileSystem, dir_fd: int) -> str:
    who = _holder_of(system, dir_fd)
    if _is_this_process(who):
        return (
            f"{path} is in use by {who}: that is this one, by a model that has not been closed. Call "
            "zo.close(model) (a dropped model lets go with its last reference; results of its forwards count), or "
            "choose another directory"
        )
    return f"{path} is in use by {who}; wait for that run to end, stop it, or choose another directory"


def _is_this_process(who: str) -> bool:
    return who.startswith(f"process {os.getpid()} on {socket.gethostname()} since ")


def _holder_of(system: FileSystem, dir_fd: int) -> str:
    """Who holds the lock of a directory, as far as its `LOCK` tells."""
    try:
        fd = system.open(LOCK_NAME, _READ_FLAGS, dir_fd)
        try:
            holder = json.loads(system.read_whole(fd))
        finally:
            system.close(fd)
        return f"process {holder['pid']} on {holder['host']} since {holder['started']}"
    except FileNotFoundError:
        return f"another process, although its {LOCK_NAME} was deleted"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # it took the lock and has not written its name yet, or this user may not read it
