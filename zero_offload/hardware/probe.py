"""The resources of this machine: cores, memory under every limit, disk space, and the facilities `doctor` reports.

The only importer of psutil. Reads the system and never changes it: a directory is tried with a file that
has no name. The calls: `probe_hardware` once at start; the other functions serve `doctor`.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from zero_offload.base.types import KIB, HardwareProfile

_PROC_STATUS = Path("/proc/self/status")
_PROC_CGROUP = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_COMPILERS = ("g++", "clang++", "c++")
_SECTOR_BYTES = 4096
_IN_MEMORY = ("tmpfs", "ramfs")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "beegfs", "fuse", "fuse.sshfs")


class MemoryLimit(NamedTuple):
    """One bound on the memory this process may still take."""

    source: str
    free_bytes: int


def probe_hardware(
    nvme_dirs: Sequence[Path] = (), *, device_name: str = "cpu", device_memory_bytes: int | None = None
) -> HardwareProfile:
    """Read the machine; a device without memory of its own (the CPU) shares that of the CPU."""
    cpu_memory_bytes = free_memory_bytes()
    return HardwareProfile(
        num_cores=count_cores(),
        cpu_memory_bytes=cpu_memory_bytes,
        device_name=device_name,
        device_memory_bytes=cpu_memory_bytes if device_memory_bytes is None else device_memory_bytes,
        nvme_free_bytes=nvme_free_bytes(nvme_dirs),
    )


def free_memory_bytes() -> int:
    """Bytes of the host's memory that this process may still take."""
    return least_free().free_bytes


def least_free() -> MemoryLimit:
    """The bound on the host's memory that leaves least."""
    return min(memory_limits(), key=lambda limit: limit.free_bytes)


def resident_bytes() -> tuple[int, int]:
    """Host memory that this process has now: all, and without files that it maps."""
    found = psutil.Process().memory_info()
    return int(found.rss), int(found.rss - found.shared)


def peak_resident_bytes(status: Path = _PROC_STATUS) -> int:
    """The most host memory that this process has had, since it began or since its peak was reset: VmHWM.

    `ru_maxrss` survives an exec, so a process would begin with the peak of the program that started it. Where the
    kernel has no VmHWM it is the most that the calls of this function have met.
    """
    for line in _read_text(status).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIB
    most_met = max(resident_bytes()[0], _peaks_met.get(os.getpid(), 0))
    _peaks_met[os.getpid()] = most_met
    return most_met


_peaks_met: dict[int, int] = {}
"""By process: a fork begins anew."""


def memory_limits(proc_cgroup: Path = _PROC_CGROUP, cgroup_root: Path = _CGROUP_ROOT) -> tuple[MemoryLimit, ...]:
    """Every bound that applies, the host's first; none is larger than the host's memory."""
    host = psutil.virtual_memory()
    limits = [MemoryLimit("host", host.available)]
    for directory in _cgroup_dirs("memory", proc_cgroup, cgroup_root):
        limit_bytes = _read_number(directory, "memory.max", "memory.limit_in_bytes")
        if limit_bytes is not None and limit_bytes < host.total:
            free_bytes = max(limit_bytes - _cgroup_used_bytes(directory), 0)
            limits.append(MemoryLimit(f"cgroup {directory}", min(free_bytes, host.available)))
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        free_bytes = max(address_space - psutil.Process().memory_info().vms, 0)
        limits.append(MemoryLimit("ulimit -v", min(free_bytes, host.available)))
    return tuple(limits)


def count_cores(proc_cgroup: Path = _PROC_CGROUP, cgroup_root: Path = _CGROUP_ROOT) -> int:
    """Cores this process may run on, under affinity and cgroup quotas; at least 1."""
    cores = len(os.sched_getaffinity(0))
    for directory in _cgroup_dirs("cpu", proc_cgroup, cgroup_root):
        quota, period = _cpu_quota(directory)
        if quota is not None and period:
            cores = min(cores, math.ceil(quota / period))
    return max(cores, 1)


@functools.cache
def cores_at_start() -> int:
    return count_cores()


def kernel_threads() -> int:
    """Threads of a kernel's call: torch's setting, but no more than a container's quota, which torch does not know."""
    return min(torch.get_num_threads(), cores_at_start())


def nvme_free_bytes(directories: Sequence[Path]) -> int:
    """Free bytes on the directories' disks, each counted once."""
    free_bytes = 0
    seen: set[int] = set()
    for directory in directories:
        existing = existing_parent(directory)
        device = existing.stat().st_dev
        if device not in seen:
            usage = os.statvfs(existing)
            free_bytes += usage.f_bavail * usage.f_frsize
        seen.add(device)
    return free_bytes


def supports_direct_io(directory: Path) -> bool:
    """Write and read one sector past the page cache, in an unnamed file. False if that raises an OSError."""
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file, mmap.mmap(-1, _SECTOR_BYTES) as page:
            fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            try:
                page[:] = b"z" * _SECTOR_BYTES
                written = os.pwritev(fd, [page], 0)
                page[:] = bytes(_SECTOR_BYTES)
                return written == os.preadv(fd, [page], 0) == page[:].count(b"z") == _SECTOR_BYTES
            finally:
                os.close(fd)
    except OSError:
        return False


def file_system_type(path: Path) -> str:
    """The type of the mount that holds `path`, such as "ext4"; "unknown" when none is listed."""
    resolved = existing_parent(path).resolve()
    try:
        mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    except OSError:
        return "unknown"
    holding = [place for place in (resolved, *resolved.parents) if place in mounts]
    return mounts[holding[0]] if holding else "unknown"


def file_system_problem(path: Path) -> tuple[str, str] | None:
    """Why the file system of `path` is a bad place for states, and what to do; None where nothing is known of it."""
    kind = file_system_type(path)
    if kind in _IN_MEMORY:
        return (
            f"{kind} is memory, not a disk: files fill what they are meant to relieve, and a reboot takes them",
            "choose a directory on a disk",
        )
    if kind in _REMOTE:
        return (
            f"{kind} is remote: locks, flushes and speed are the server's, and nothing here can vouch for them",
            "choose a directory on a local NVMe disk",
        )
    if kind == "overlay":
        return f"{kind} is a container's own layer, which goes with the container", "mount a volume and name it"
    return None


def is_remote(path: Path) -> bool:
    """True if another machine has the files."""
    return file_system_type(path) in _REMOTE


def memlock_limit_bytes() -> int | None:
    """Bytes this process may pin; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def huge_page_mode(path: Path = _HUGE_PAGES) -> str | None:
    """ "always", "madvise" or "never"; None where the kernel has no transparent huge pages."""
    text = _read_text(path)
    return text.partition("[")[2].partition("]")[0] or None


def find_compiler() -> str | None:
    """Path of the C++ compiler a build would use: $CXX, else the usual names."""
    names = [name for name in (os.environ.get("CXX"), *_COMPILERS) if name]
    return next((found for name in names if (found := shutil.which(name))), None)


def existing_parent(path: Path) -> Path:
    """`path`, or where it will be made: the nearest directory above it that is there."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _cgroup_dirs(controller: str, proc_cgroup: Path, cgroup_root: Path) -> Iterator[Path]:
    """Directories of this process's groups, innermost first, in both cgroup versions.

    A container may not show the path that the kernel names; then only the mounted root is left.
    """
    for line in _read_text(proc_cgroup).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mounts = [cgroup_root, cgroup_root / "unified"]
        elif controller in controllers.split(","):
            mounts = [cgroup_root / controller, cgroup_root / controllers]
        else:
            continue
        for mount in dict.fromkeys(mounts):
            inner = mount / path.lstrip("/")
            for directory in (inner, *inner.parents):
                if directory.is_dir():
                    yield directory
                if directory == mount:
                    break


def _cgroup_used_bytes(directory: Path) -> int:
    """Bytes in use that cannot be reclaimed by dropping page cache."""
    used = _read_number(directory, "memory.current", "memory.usage_in_bytes") or 0
    fields = dict(line.split(" ", 1) for line in _read_text(directory / "memory.stat").splitlines())
    # Version 1 counts the whole subtree under "total_" names.
    cache = sum(int(fields.get(f"total_{name}", fields.get(name, 0))) for name in ("inactive_file", "active_file"))
    return max(used - cache, 0)


def _cpu_quota(directory: Path) -> tuple[int | None, int | None]:
    words = _read_text(directory / "cpu.max").split()
    if len(words) == 2:
        return (None if words[0] == "max" else int(words[0])), int(words[1])
    quota = _read_number(directory, "cpu.cfs_quota_us")
    return (quota if quota and quota > 0 else None), _read_number(directory, "cpu.cfs_period_us")


def _read_number(directory: Path, *names: str) -> int | None:
    for name in names:
        text = _read_text(directory / name).strip()
        if text.lstrip("-").isdigit():
            return int(text)
    return None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
