from __future__ import annotations

import os
import resource
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import torch

import zero_offload as zo
from zero_offload.base.types import GIB, MIB
from zero_offload.hardware import probe

Host = namedtuple("Host", "total available")


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    machine = Host(total=64 * GIB, available=40 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    return machine


def write_group(directory: Path, **files: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text + "\n")


def free_bytes(tmp_path: Path, proc: str) -> int:
    (tmp_path / "proc").write_text(proc)
    return min(limit.free_bytes for limit in probe.memory_limits(tmp_path / "proc", tmp_path / "cgroup"))


def test_cgroup_v2_counts_every_ancestor_and_not_the_page_cache(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write_group(root / "a/b", memory__max="max", memory__current="0")
    write_group(
        root / "a",
        memory__max=str(8 * GIB),
        memory__current=str(6 * GIB),
        memory__stat=f"anon {2 * GIB}\ninactive_file {3 * GIB}\nactive_file {GIB}",
    )
    assert free_bytes(tmp_path, "0::/a/b\n") == 6 * GIB


def test_cgroup_v1_counts_every_ancestor(tmp_path: Path) -> None:
    root = tmp_path / "cgroup/memory"
    write_group(root / "a", memory__limit_in_bytes=str(9223372036854771712))
    write_group(
        root,
        memory__limit_in_bytes=str(4 * GIB),
        memory__usage_in_bytes=str(3 * GIB),
        memory__stat=f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}",
    )
    assert free_bytes(tmp_path, "4:cpu:/x\n3:memory:/a\n") == 3 * GIB


def test_a_path_hidden_by_the_container_leaves_the_mounted_root(tmp_path: Path) -> None:
    write_group(tmp_path / "cgroup", memory__max=str(2 * GIB), memory__current=str(GIB))
    assert free_bytes(tmp_path, "0::/not/visible\n") == GIB


def test_the_host_bounds_all(tmp_path: Path, host: Host) -> None:
    write_group(tmp_path / "cgroup", memory__max=str(63 * GIB), memory__current="0")
    assert free_bytes(tmp_path, "0::/\n") == host.available
    assert free_bytes(tmp_path, "") == host.available


def test_an_exhausted_group_has_nothing_left(tmp_path: Path) -> None:
    write_group(tmp_path / "cgroup", memory__max=str(GIB), memory__current=str(2 * GIB))
    assert free_bytes(tmp_path, "0::/\n") == 0


def test_address_space_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = psutil.Process().memory_info().vms
    monkeypatch.setattr(resource, "getrlimit", lambda which: (used + 100 * MIB, used + 100 * MIB))
    assert 0 < free_bytes(tmp_path, "") <= 101 * MIB


@pytest.mark.parametrize(
    ("files", "most"),
    [({"cpu__max": "100000 100000"}, 1), ({"cpu__max": "max 100000"}, 10**6)],
)
def test_cpu_quota(tmp_path: Path, files: dict[str, str], most: int) -> None:
    write_group(tmp_path / "cgroup", **files)
    (tmp_path / "proc").write_text("0::/\n")
    cores = probe.count_cores(tmp_path / "proc", tmp_path / "cgroup")
    assert cores == min(most, len(os.sched_getaffinity(0)))


def test_probe_hardware_on_the_cpu(tmp_path: Path) -> None:
    profile = probe.probe_hardware([tmp_path / "not" / "yet"])
    assert profile.device_name == "cpu"
    assert profile.device_memory_bytes == profile.cpu_memory_bytes <= 40 * GIB
    assert 0 < profile.nvme_free_bytes <= os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize


def test_probe_hardware_with_a_device() -> None:
    profile = probe.probe_hardware(device_name="H200", device_memory_bytes=7 * GIB)
    assert (profile.device_name, profile.device_memory_bytes) == ("H200", 7 * GIB)
    assert profile.nvme_free_bytes == 0


def test_one_disk_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((1, 1000, 0, 0, 5, 0, 0, 0, 0, 0)))
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    (first / "file").write_bytes(b"x" * MIB)  # whether it may be overwritten, the run's list of files says
    assert probe.nvme_free_bytes([first, second]) == 5000


def test_direct_io_leaves_nothing_behind(tmp_path: Path) -> None:
    answer = probe.supports_direct_io(tmp_path)
    assert list(tmp_path.iterdir()) == []
    try:
        fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    except OSError:
        assert not answer
    else:
        os.close(fd)
        assert answer


def test_direct_io_in_a_missing_directory(tmp_path: Path) -> None:
    assert not probe.supports_direct_io(tmp_path / "missing")


def test_file_system_type() -> None:
    assert probe.file_system_type(Path("/proc/self")) == "proc"
    assert probe.file_system_type(Path("/proc/does/not/exist")) == "proc"


@pytest.mark.parametrize(
    ("text", "mode"), [("always [madvise] never\n", "madvise"), ("[always] madvise never\n", "always")]
)
def test_huge_page_mode(tmp_path: Path, text: str, mode: str) -> None:
    (tmp_path / "enabled").write_text(text)
    assert probe.huge_page_mode(tmp_path / "enabled") == mode
    assert probe.huge_page_mode(tmp_path / "missing") is None


def test_find_compiler_prefers_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "my-cxx"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert probe.find_compiler() == str(compiler)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probe.find_compiler() is None


def test_the_peak_is_that_of_this_process(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t 9000 kB\nVmHWM:\t  1234 kB\nVmRSS:\t  1000 kB\n")
    assert probe.peak_resident_bytes(status) == 1234 << 10


def test_without_a_peak_of_the_kernel_it_is_the_most_that_was_met(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = iter([5, 9, 7])
    monkeypatch.setattr(probe, "resident_bytes", lambda: (next(sizes) << 40, 0))
    assert [probe.peak_resident_bytes(tmp_path / "none") >> 40 for _ in range(3)] == [5, 9, 9]


def test_stats_have_the_peak_of_the_kernel() -> None:
    model = torch.nn.Linear(4, 4)
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    ballast = bytearray(b"x" * (64 << 20))
    held = zo.stats(model).peak_rss_bytes
    del ballast
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    zo.close(model)
    assert held - probe.peak_resident_bytes() > 32 << 20
