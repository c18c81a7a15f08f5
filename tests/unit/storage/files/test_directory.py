from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fresh import run_script
from zero_offload.base.errors import CapacityError, ConfigError, LockError, StorageError
from zero_offload.base.types import MIB
from zero_offload.storage.files.directory import OPEN_FILES, RunDirectory, sync_path
from zero_offload.storage.files.system import FileSystem


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_creates_private_directories_and_files(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with RunDirectory.open(tmp_path / "a" / "b") as directory:
            file = directory.create_file("rank-0.swap", MIB)
            file.close()
    finally:
        os.umask(old)
    assert [mode_of(tmp_path / "a"), mode_of(tmp_path / "a/b")] == [0o700, 0o700]
    assert [mode_of(tmp_path / "a/b" / name) for name in ("rank-0.swap", "LOCK")] == [0o600, 0o600]


def test_refuses_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StorageError, match=r"link is a symbolic link; .*/real"):
        RunDirectory.open(tmp_path / "link")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="symbolic link"):
        RunDirectory.open(tmp_path / "dangling")
    assert not (tmp_path / "nowhere").exists()


def test_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file, not a directory"):
        RunDirectory.open(tmp_path / "file")
    with pytest.raises(StorageError, match="Not a directory"):
        RunDirectory.open(tmp_path / "file" / "below")


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_refuses_a_directory_others_can_write(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(StorageError, match=f"chmod 700 {path}"):
        RunDirectory.open(path)
    path.chmod(0o755)
    RunDirectory.open(path).close()


def test_a_directory_for_everyone_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    with pytest.raises(StorageError, match=f"name a directory in it: {path}/run"):
        RunDirectory.open(path)


def test_refuses_another_users_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(StorageError, match="belongs to user"):
        RunDirectory.open(tmp_path)


def test_an_unwritable_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def read_only(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(StorageError, match=r"cannot write .*LOCK: Read-only file system"):
        RunDirectory.open(tmp_path)


def test_the_lock_names_its_holder(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path), pytest.raises(LockError, match=f"process {os.getpid()} on .* since 2"):
        RunDirectory.open(tmp_path)
    RunDirectory.open(tmp_path).close()


def test_a_lock_without_a_name_still_holds(tmp_path: Path) -> None:
    with open(tmp_path / "LOCK", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(LockError, match="another process"):
            RunDirectory.open(tmp_path)


def test_another_process_is_kept_out(tmp_path: Path) -> None:
    code = f"from zero_offload.storage.files.directory import RunDirectory as R; R.open({str(tmp_path)!r})"
    with RunDirectory.open(tmp_path):
        result = run_script(code)
    assert "LockError" in result.stderr
    assert run_script(code).returncode == 0


def test_ranks_join_and_the_last_one_ends_the_lock(tmp_path: Path) -> None:
    first = RunDirectory.open(tmp_path)
    second = RunDirectory.join(tmp_path)
    second.create_file("rank-1.swap", 4096).close()
    first.close()
    with pytest.raises(LockError, match=f"process {os.getpid()} "):
        RunDirectory.open(tmp_path)
    second.close()
    RunDirectory.open(tmp_path).close()


def test_a_directory_without_a_run_cannot_be_joined(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot join"):
        RunDirectory.join(tmp_path)
    RunDirectory.open(tmp_path).close()
    with pytest.raises(StorageError, match="is held by no run"):
        RunDirectory.join(tmp_path)
    RunDirectory.open(tmp_path).close()


ORPHAN = """
import os, sys, time
from zero_offload.storage.files.directory import RunDirectory
directory = RunDirectory.open(sys.argv[1])
file = directory.create_file("data", 4096)
if sys.argv[2] == "stuck":
    directory.stays_locked = True
    directory.close()
    directory.close()
if os.fork() == 0:
    try:
        directory.dir_fd
    except Exception as error:
        os.write(1, f"{type(error).__name__}\\n".encode())
    time.sleep(60)
os.write(1, f"{os.getpid()}\\n".encode())
time.sleep(60)
"""


def _links_of(group: int) -> list[str]:
    """The files that the processes of a group have open."""
    links = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if os.getpgid(int(process.name)) == group:
                links += [os.readlink(fd) for fd in (process / "fd").iterdir()]
    return links


@pytest.mark.parametrize("drive", ["answers", "stuck"])
def test_a_forked_worker_does_not_outlive_its_run_with_the_lock(drive: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    command = [sys.executable, "-c", ORPHAN, str(path), drive]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert parent.stdout is not None
        lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        assert lines == {"StorageError", str(parent.pid)}
        with pytest.raises(LockError, match=f"process {parent.pid} "):
            RunDirectory.open(path)
        parent.kill()
        parent.wait()
        os.killpg(parent.pid, 0)  # the child is still there
        RunDirectory.open(path).close()
        assert not [link for link in _links_of(group=parent.pid) if link.startswith(str(path))]
    finally:
        os.killpg(parent.pid, 9)
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()


def test_a_file_that_could_not_be_made_has_no_descriptor(tmp_path: Path) -> None:
    """A traceback may keep it, and its number soon stands for another file, which a forked child would close."""
    with RunDirectory.open(tmp_path) as directory, pytest.raises(CapacityError) as caught:
        directory.create_file("data", 1 << 60)
    assert caught.traceback and not [each for each in OPEN_FILES if each.path.parent == tmp_path and each.fd >= 0]


def _leads_to(fd: str, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{fd}") == str(path)
    return False


def test_close_releases_even_a_leaked_descriptor(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path)
    (lock_fd,) = [int(fd) for fd in os.listdir("/proc/self/fd") if _leads_to(fd, tmp_path / "LOCK")]
    leaked = os.dup(lock_fd)
    directory.close()
    RunDirectory.open(tmp_path).close()
    os.close(leaked)
    directory.close()


def test_a_closed_directory_raises(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path)
    directory.close()
    with pytest.raises(StorageError, match="is closed"):
        directory.names()


def test_files_are_preallocated(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path) as directory:
        file = directory.create_file("rank-0.swap", MIB)
        info = os.fstat(file.fd)
        assert info.st_size == file.nbytes == MIB
        assert info.st_blocks * 512 >= MIB
        assert fcntl.fcntl(file.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        file.grow(3 * MIB)
        file.grow(MIB)
        assert os.fstat(file.fd).st_size == file.nbytes == 3 * MIB
        assert directory.names() == ["rank-0.swap"]
        file.close()
        file.close()


def _has_o_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return False
    return True


def test_files_pass_by_the_page_cache_where_they_can(tmp_path: Path) -> None:
    granted = _has_o_direct(tmp_path / "trial")
    with RunDirectory.open(tmp_path / "run") as directory:
        made = [directory.create_file("f", 4096), directory.create_scratch(4096), directory.open_file("f")]
        for file in made:
            flags = fcntl.fcntl(file.fd, fcntl.F_GETFL)
            assert bool(flags & os.O_DIRECT) == granted and not flags & os.O_NONBLOCK
            file.close()


def test_a_file_that_is_opened_for_the_page_cache(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path) as directory:
        directory.create_file("f", 4096).close()
        file = directory.open_file("f", direct=False)
        assert not fcntl.fcntl(file.fd, fcntl.F_GETFL) & (os.O_DIRECT | os.O_NONBLOCK)
        file.close()


def test_without_direct_io_files_are_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def no_direct(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", no_direct)
    with RunDirectory.open(tmp_path) as directory:
        file = directory.create_file("f", 4096)
        assert not real(file.fd, fcntl.F_GETFL) & (os.O_DIRECT | os.O_NONBLOCK)
        assert directory.names() == ["f"]
        file.close()


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path) as directory:
        with pytest.raises(CapacityError, match=r"rank-0.swap needs 512 TiB more, .* are free; .*nvme="):
            directory.create_file("rank-0.swap", 1 << 49)
        assert directory.names() == []


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, offset + length // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunDirectory.open(tmp_path) as directory:
        kept = directory.create_file("kept", 4096)
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(CapacityError, match="needs 1 MiB more"):
            directory.create_file("new", MIB)
        with pytest.raises(CapacityError):
            kept.grow(MIB)
        assert directory.names() == ["kept"]
        assert os.fstat(kept.fd).st_size == kept.nbytes == 4096
        kept.close()


def test_another_error_while_reserving_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with RunDirectory.open(tmp_path) as directory:
        with pytest.raises(StorageError, match=r"cannot reserve space for .*/new: Input/output error"):
            directory.create_file("new", MIB)
        assert directory.names() == []


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path) as directory:
        (tmp_path / "f").write_bytes(b"precious")
        with pytest.raises(StorageError, match="File exists"):
            directory.create_file("f", 4096)
        assert (tmp_path / "f").read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/x", "UPPER", "a b", ".hidden", "a\n"])
def test_names_cannot_leave_the_directory(tmp_path: Path, name: str) -> None:
    with RunDirectory.open(tmp_path) as directory:
        for call in (directory.path_of, directory.open_file, lambda n: directory.remove([n])):
            with pytest.raises(StorageError, match="is not the name of a file"):
                call(name)


@pytest.mark.parametrize("errnos", [(), (errno.EOPNOTSUPP,)])
def test_scratch_files_have_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errnos: tuple[int, ...]) -> None:
    real_open = os.open

    def without_tmpfile(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if errnos and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errnos[0], os.strerror(errnos[0]))
        return real_open(path, flags, *args, **kwargs)

    with RunDirectory.open(tmp_path) as directory:
        monkeypatch.setattr(os, "open", without_tmpfile)
        file = directory.create_scratch(MIB)
        assert directory.names() == []
        info = os.fstat(file.fd)
        assert (info.st_nlink, info.st_size) == (0, MIB)
        file.close()


def test_open_file_checks_the_kind(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path) as directory:
        directory.create_file("f", 8192).close()
        file = directory.open_file("f")
        assert file.nbytes == 8192
        file.close()
        with pytest.raises(StorageError, match="No such file"):
            directory.open_file("missing")
        (tmp_path / "link").symlink_to(tmp_path / "f")
        with pytest.raises(StorageError, match="cannot open .*link"):
            directory.open_file("link")
        os.mkfifo(tmp_path / "fifo")
        with pytest.raises(StorageError, match="not a regular file"):
            directory.open_file("fifo")
        os.link(tmp_path / "f", tmp_path / "second")
        with pytest.raises(StorageError, match="has 2 hard links"):
            directory.open_file("f")


def test_remove_frees_only_what_is_named(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path) as directory:
        directory.create_file("a", MIB).close()
        directory.create_file("b", MIB).close()
        assert directory.remove(["a", "missing"]) >= MIB
        assert directory.names() == ["b"]


@pytest.mark.parametrize("kind", ["symlink", "directory", "hard link"])
def test_remove_refuses_what_is_not_ours_and_then_deletes_nothing(tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    with RunDirectory.open(tmp_path / "run") as directory:
        directory.create_file("a", 4096).close()
        trap = tmp_path / "run" / "trap"
        if kind == "symlink":
            trap.symlink_to(outside)
        elif kind == "directory":
            trap.mkdir()
        else:
            os.link(outside, trap)
        with pytest.raises(StorageError, match="trap"):
            directory.remove(["a", "trap"])
        assert directory.names() == ["a", "trap"]
    assert outside.read_bytes() == b"precious"


def test_a_replaced_directory_does_not_redirect_us(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run") as directory:
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        directory.create_file("f", 4096).close()
    assert (tmp_path / "moved" / "f").exists()
    assert list((tmp_path / "run").iterdir()) == []


def test_close_and_remove(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "run")
    directory.create_file("f", 4096).close()
    assert not directory.close_and_remove()
    directory = RunDirectory.open(tmp_path / "run")
    directory.remove(["f"])
    assert directory.close_and_remove()
    assert not (tmp_path / "run").exists()


def test_free_bytes_are_those_of_the_file_system(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path) as directory:
        usage = os.statvfs(tmp_path)
        assert 0 < directory.free_bytes <= usage.f_blocks * usage.f_frsize
        directory.sync()


class _Flushes(FileSystem):
    """Notes what is flushed; some directories may not be opened, some are on another file system."""

    def __init__(self, locked: Path, elsewhere: Path) -> None:
        self._locked, self._elsewhere = locked, elsewhere
        self.flushed: list[Path] = []

    def open(self, path: str | Path, flags: int, dir_fd: int | None = None) -> int:
        if path == self._locked:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return super().open(path, flags, dir_fd)

    def fstat(self, fd: int) -> os.stat_result:
        info = super().fstat(fd)
        if os.path.samestat(info, self._elsewhere.stat()):
            return os.stat_result((info.st_mode, info.st_ino, -1, *tuple(info)[3:]))
        return info

    def fsync(self, fd: int) -> None:
        self.flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        super().fsync(fd)


def test_the_names_that_lead_to_a_directory_are_flushed(tmp_path: Path) -> None:
    """On its own file system, but for those in directories that this user may not open."""
    path = tmp_path / "mount" / "a" / "locked" / "b" / "run"
    system = _Flushes(locked=tmp_path / "mount" / "a" / "locked", elsewhere=tmp_path)
    num_open = len(os.listdir("/proc/self/fd"))
    with RunDirectory.open(path, system) as directory:
        sync_path(directory)
    assert system.flushed == [path.parent, tmp_path / "mount" / "a", tmp_path / "mount"]
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_file_is_flushed_with_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}")))
    with RunDirectory.open(tmp_path) as directory:
        directory.create_file("f", 4096).close()
        directory.sync(["f"])
    assert flushed == [str(tmp_path / "f"), str(tmp_path)]
