"""A file system in memory whose disk loses what was not flushed.

`CrashFS` takes the place of `storage.system.FileSystem`, and `CrashEngine` that of the native engine: the code above is
the real one. Every operation that changes something goes into a journal. So `crash_disk.Disk` can say what is left when
the machine loses its power, or the process is killed, before or within any of them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.helpers.crash_disk import ROOT, Disk, FailedSync, Link, Op, Rename, Resize, Sync, Unlink, Write
from zero_offload.storage.files.system import FileSystem

FIRST_FD = 1 << 20
"""No descriptor of the real system: a call that passed us by fails, instead of hitting one of the test's."""
GIB = 1 << 30


@dataclass
class _Handle:
    ino: int
    flags: int


class CrashFS(FileSystem):
    """Files of one machine from its start to its end; any number of ranks of one process, one at a time."""

    def __init__(self, disk: Disk | None = None) -> None:
        self._start = (disk or Disk()).copy()
        self._now = self._start.settled()
        self._handles: dict[int, _Handle] = {}
        self._locks: dict[int, dict[int, int]] = {}
        self._next_fd = FIRST_FD
        self._next_ino = max([*self._start.files, *self._start.folders]) + 1
        self.journal: list[Op] = []
        self.before_call: Callable[[], None] = lambda: None
        """Called at every call; it may raise."""
        self.fault: Callable[[Op], int | None] = lambda op: None
        """The error number that an operation shall fail with."""

    def moments(self, places: Iterable[int] | None = None) -> Iterator[tuple[int, Disk, Op | None]]:
        """(k, the disk before operation k, operation k) for these k, by default all and the end; read only."""
        disk, wanted = self._start.copy(), None if places is None else set(places)
        for k, op in enumerate([*self.journal, None]):
            if wanted is None or k in wanted:
                yield k, disk, op
            if op is not None:
                disk.issue(op)

    def disk(self) -> Disk:
        """The disk as it is now."""
        ((_, disk, _),) = self.moments([len(self.journal)])
        return disk

    def _issue(self, op: Op) -> None:
        code = self.fault(op)
        if code is not None:
            if isinstance(op, Sync):
                self.journal.append(FailedSync(op.ino, len(self.journal)))
            elif isinstance(op, Write):  # a full disk takes what it can
                self._record(replace(op, data=op.data[: len(op.data) // 2]))
            raise OSError(code, os.strerror(code))
        self._record(op)

    def _record(self, op: Op) -> None:
        self.journal.append(op)
        self._now.apply(op)

    # Names

    def _walk(self, path: str | Path, dir_fd: int | None) -> tuple[int, str]:
        """The folder that `path` is in, and its last part."""
        if dir_fd is not None:
            return self._ino(dir_fd), str(path)
        folder = ROOT
        for part in Path(path).parts[1:-1]:
            if part not in self._names(folder):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            folder = self._names(folder)[part]
        return folder, Path(path).name

    def _find(self, path: str | Path, dir_fd: int | None) -> int:
        folder, name = self._walk(path, dir_fd)
        if name in ("", "."):
            return folder
        if name not in self._names(folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return self._names(folder)[name]

    def _names(self, ino: int) -> dict[str, int]:
        if ino not in self._now.folders:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return self._now.folders[ino]

    def _ino(self, fd: int) -> int:
        if fd not in self._handles:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._handles[fd].ino

    def _create(self, folder: int, name: str, *, is_folder: bool) -> int:
        ino, self._next_ino = self._next_ino, self._next_ino + 1
        self._issue(Link(folder, name, ino, is_folder))
        return ino

    # The calls of a FileSystem

    def open(self, path: str | Path, flags: int, dir_fd: int | None = None) -> int:
        self.before_call()
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        try:
            ino = self._find(path, dir_fd)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            ino = self._create(*self._walk(path, dir_fd), is_folder=False)
        else:
            if flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            if flags & os.O_TRUNC and self._now.files[ino]:
                self._issue(Resize(ino, 0))
        fd, self._next_fd = self._next_fd, self._next_fd + 1
        self._handles[fd] = _Handle(ino, flags)
        return fd

    def close(self, fd: int) -> None:
        self.before_call()
        ino = self._ino(fd)
        del self._handles[fd]
        self._locks.get(ino, {}).pop(fd, None)

    def mkdir(self, path: Path) -> None:
        self.before_call()
        folder, name = self._walk(path, None)
        if name not in self._names(folder):
            self._create(folder, name, is_folder=True)

    def rmdir(self, path: Path) -> None:
        self.before_call()
        if self._names(self._find(path, None)):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        self._issue(Unlink(*self._walk(path, None)))

    def lstat(self, path: str | Path, dir_fd: int | None = None) -> os.stat_result:
        self.before_call()
        return self._status(self._find(path, dir_fd))

    def fstat(self, fd: int) -> os.stat_result:
        self.before_call()
        return self._status(self._ino(fd))

    def _status(self, ino: int) -> os.stat_result:
        is_folder = ino in self._now.folders
        size = 0 if is_folder else len(self._now.files[ino])
        links = sum(ino in names.values() for names in self._now.folders.values())
        mode = (stat.S_IFDIR | 0o700) if is_folder else (stat.S_IFREG | 0o600)
        numbers = (mode, ino, 0, links, os.geteuid(), os.getegid(), size, 0, 0, 0)
        return os.stat_result(numbers, {"st_blocks": -(-size // 512)})

    def fstatvfs(self, fd: int) -> os.statvfs_result:
        self.before_call()
        self._ino(fd)
        return os.statvfs_result((4096, 4096, GIB, GIB, GIB, 0, 0, 0, 0, 255))

    def place_of(self, fd: int) -> str:
        return ""

    def listdir(self, fd: int) -> list[str]:
        self.before_call()
        return list(self._names(self._ino(fd)))

    def read_whole(self, fd: int) -> bytes:
        self.before_call()
        return bytes(self._now.files[self._ino(fd)])

    def write_whole(self, fd: int, content: bytes) -> None:
        self.write_block(fd, 0, content)

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        self.before_call()
        ino = self._ino(fd)
        self._issue(Resize(ino, max(offset + length, len(self._now.files[ino]))))

    def ftruncate(self, fd: int, length: int) -> None:
        self.before_call()
        self._issue(Resize(self._ino(fd), length))

    def fdatasync(self, fd: int) -> None:
        self.fsync(fd)

    def fsync(self, fd: int) -> None:
        self.before_call()
        self._issue(Sync(self._ino(fd)))

    def replace(self, source: str, target: str, dir_fd: int) -> None:
        self.before_call()
        self._issue(Rename(self._ino(dir_fd), source, target, self._find(source, dir_fd)))

    def unlink(self, name: str, dir_fd: int) -> None:
        self.before_call()
        self._find(name, dir_fd)
        self._issue(Unlink(self._ino(dir_fd), name))

    def flock(self, fd: int, operation: int) -> None:
        self.before_call()
        holders, kind = self._locks.setdefault(self._ino(fd), {}), operation & ~fcntl.LOCK_NB
        others = [held for holder, held in holders.items() if holder != fd]
        if fcntl.LOCK_EX in (others if kind == fcntl.LOCK_SH else []) or (kind == fcntl.LOCK_EX and others):
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        holders.pop(fd, None)
        if kind != fcntl.LOCK_UN:
            holders[fd] = kind

    def get_flags(self, fd: int) -> int:
        self._ino(fd)
        return self._handles[fd].flags

    def set_flags(self, fd: int, flags: int) -> None:
        self._ino(fd)
        self._handles[fd].flags = flags

    # Blocks, for the engine

    def write_block(self, fd: int, offset: int, data: bytes) -> None:
        self.before_call()
        self._issue(Write(self._ino(fd), offset, data))

    def read_block(self, fd: int, offset: int, nbytes: int) -> bytes:
        self.before_call()
        return bytes(self._now.files[self._ino(fd)][offset : offset + nbytes])
