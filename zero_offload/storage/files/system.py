"""The system calls that directories and manifests are made of, in one place. Tests can put a disk under them that
loses, tears and refuses at will.

Owns nothing but the list. A call has the name of its function in `os` or `fcntl`, and raises the same OSError. Calls of
another name say what they do. Data blocks do not pass here: they are a `FileEngine`'s.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from zero_offload.base.errors import StorageError

REMEDIES = {
    errno.ENOSPC: "Free space there (or inodes: see 'df -i') or name another directory",
    errno.EDQUOT: "Raise the quota or name another directory",
    errno.EEXIST: "No run.json names it: if it is left over from a run that is not needed, delete it by hand, "
    "or name another directory",
    errno.EFBIG: "Files may not grow that far: see 'ulimit -f', and type 'ulimit -f unlimited'",
    errno.EMFILE: "Too many files are open in this process: see 'ulimit -n', and type 'ulimit -n 4096'",
    errno.ENFILE: "Too many files are open on this machine: see /proc/sys/fs/file-max",
    errno.EIO: "The drive reports a fault: see 'dmesg' and its SMART data",
    errno.EROFS: "The file system is read-only: see 'dmesg' and 'mount', or name another directory",
    errno.ENAMETOOLONG: "Name a directory with a shorter path",
    errno.EBADF: "The file was closed while it was in use",
    errno.EINVAL: "With O_DIRECT the offset, length and memory must be multiples of the drive's sector",
}
"""Remedies, by errno of the file system."""
NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")
"""How safetensors and tokenizers say it."""


class FileSystem:
    """The one the machine has; files are made for this user alone."""

    def open(self, path: str | Path, flags: int, dir_fd: int | None = None) -> int:
        return os.open(path, flags, 0o600, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def mkdir(self, path: Path) -> None:
        path.mkdir(0o700, exist_ok=True)

    def rmdir(self, path: Path) -> None:
        path.rmdir()

    def lstat(self, path: str | Path, dir_fd: int | None = None) -> os.stat_result:
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=False)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def fstatvfs(self, fd: int) -> os.statvfs_result:
        return os.fstatvfs(fd)

    def place_of(self, fd: int) -> str:
        """The path that an open directory has now; empty where the system does not tell."""
        try:
            return os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return ""

    def listdir(self, fd: int) -> list[str]:
        return os.listdir(fd)

    def read_whole(self, fd: int) -> bytes:
        """The bytes of a file from its start to its end."""
        with open(fd, "rb", closefd=False) as file:
            file.seek(0)
            return file.read()

    def write_whole(self, fd: int, content: bytes) -> None:
        """Write all of `content` from the start of the file."""
        with open(fd, "wb", closefd=False) as file:
            file.seek(0)
            file.write(content)

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        os.posix_fallocate(fd, offset, length)

    def ftruncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def replace(self, source: str, target: str, dir_fd: int) -> None:
        """Both names are in the directory."""
        os.replace(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def flock(self, fd: int, operation: int) -> None:
        fcntl.flock(fd, operation)

    def get_flags(self, fd: int) -> int:
        """The flags that the file was opened with."""
        return fcntl.fcntl(fd, fcntl.F_GETFL)

    def set_flags(self, fd: int, flags: int) -> None:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


REAL = FileSystem()


def is_not_writable(error: BaseException) -> bool:
    """True of an error that comes from a file, or a file system, which this user may only read."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in NOT_WRITABLE


def remedy_of(code: int) -> str:
    return REMEDIES.get(code, "Check the disk and its permissions, or name another directory")


@contextlib.contextmanager
def naming_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a StorageError that names the path and the reason; libraries in Rust raise others."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot {action} {path}: {error.strerror} (errno {error.errno}). {remedy_of(error.errno or 0)}"
        ) from error
    except Exception as error:
        if (found := _RUST_ERRNO.search(str(error))) is None:
            raise
        code = int(found[1])
        raise StorageError(f"cannot {action} {path}: {os.strerror(code)} (errno {code}). {remedy_of(code)}") from error


def check_regular(path: Path, info: os.stat_result) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise StorageError(f"{path} is not a regular file; it was not made by zero_offload and stays untouched")


def check_ours(path: Path, info: os.stat_result) -> None:
    """Raise unless it is a file that may be written or deleted: another name would lose its bytes too."""
    check_regular(path, info)
    if info.st_nlink != 1:
        raise StorageError(f"{path} has {info.st_nlink} hard links; remove the others, or copy the file instead")


def read_file(path: Path) -> bytes:
    """The bytes of a file that has this name itself: a link, a FIFO or a device is not followed or waited for.

    Raises StorageError; FileNotFoundError where there is none.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _not_regular(path) if error.errno in _OTHER_KINDS else error from None
    with naming_errors("read", path), open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _not_regular(path)
        return file.read()


def replace_file(path: Path, content: bytes) -> None:
    """Write a file for this user alone, whole or not at all. Raises StorageError where the name is not that of a file.

    Other errors are OSErrors. Remains of an earlier attempt, which a crash has left, are replaced.
    """
    dir_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        refuse_other_kinds(path, dir_fd)
        temporary = f"{path.name}.tmp"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=dir_fd)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
            with open(fd, "wb") as file:
                file.write(content)
            os.replace(temporary, path.name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=dir_fd)
            raise
    finally:
        os.close(dir_fd)


_OTHER_KINDS = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
"""Errors from opening a link, a socket or a directory."""


def refuse_other_kinds(path: Path, dir_fd: int | None = None) -> None:
    """Raise StorageError where `path` is there and is a link, a directory, a FIFO or a device."""
    with contextlib.suppress(FileNotFoundError):
        name = path if dir_fd is None else path.name
        if not stat.S_ISREG(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            raise _not_regular(path)


def _not_regular(path: Path) -> StorageError:
    return StorageError(
        f"{path} is not a regular file (a link, a directory, a FIFO or a device). It was not made by zero_offload and "
        "stays untouched. Remove it, or name another directory"
    )
