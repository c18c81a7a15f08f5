"""`zero-offload doctor`: what this machine has, and a fix for every problem; of a run, whether its base is there.

Owns what counts as a problem. Never changes the machine. `examine` gives the checks as values.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from zero_offload.base.errors import CapacityError, ZeroOffloadError
from zero_offload.base.types import GIB, format_bytes, user_path
from zero_offload.checkpoint.file_list import reusable_bytes
from zero_offload.hardware import device, native, probe, rates
from zero_offload.hardware.accelerators import ACCELERATORS
from zero_offload.hardware.device import read_memory
from zero_offload.hardware.kernels import choice
from zero_offload.plan.memory import margin_bytes
from zero_offload.runs.locate import base_of, base_text
from zero_offload.storage.files.directory import check_private
from zero_offload.storage.files.engines import io_uring_problem
from zero_offload.storage.memory import arena

TORCH_MIN = (2, 10)
MEMORY_MIN_BYTES = 2 * GIB
DISK_MIN_BYTES = 10 * GIB


class Status(StrEnum):
    """How a check went."""

    OKAY = "OKAY"
    WARNING = "WARNING"  # it works, but slower or with less
    FAIL = "FAIL"  # it does not work


@dataclass(frozen=True)
class Check:
    """One line of the report; `fix` is what to type, empty when all is well."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def run(args: argparse.Namespace) -> int:
    checks = examine(args.nvme, args.run_dir)
    works = all(check.status is not Status.FAIL for check in checks)
    if args.json:
        print(json.dumps({"ok": works, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for check in checks:
            print(f"{f'[{check.status.value}]':<9} {check.name}: {check.detail}")
            if check.fix:
                print(f"{'':<9} fix: {check.fix}")
    return 0 if works else CapacityError.exit_code


def examine(nvme_dirs: Sequence[Path], run_dir: Path | None = None) -> tuple[Check, ...]:
    """Every check of this machine, of the given directories, and of the base of a run."""
    checks = [*_check_software(), *_check_host(), *_check_device()]
    for directory in nvme_dirs:
        checks += _check_directory(user_path(directory))
    if run_dir is not None:
        checks.append(_check_base(user_path(run_dir)))
    return tuple(checks)


def _unless(problem: str | None, name: str, detail: str, fix: str) -> Check:
    """OKAY with `detail`, or a warning that names the problem."""
    return Check(name, Status.OKAY, detail) if problem is None else Check(name, Status.WARNING, problem, fix)


def _check_software() -> Iterator[Check]:
    yield Check("python", Status.OKAY, f"{platform.python_version()} ({sys.executable})")
    version = importlib.metadata.version("torch")
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < TORCH_MIN:
        yield Check("torch", Status.FAIL, f"{version} is too old", "pip install --upgrade torch")
    else:
        yield Check("torch", Status.OKAY, version)
    if (problem := _native_problem()) is not None:
        yield Check("native library", *problem, "make native, or: pip install -e .")
    else:
        yield Check("native library", Status.OKAY, f"loaded, kernels for {native.isa().name.lower()}")
    try:
        yield Check("kernels", Status.OKAY, choice.description())
    except ZeroOffloadError as error:
        yield Check("kernels", Status.FAIL, f"none run: {error}", "see the native library")
    compiler = probe.find_compiler()
    fix = "install g++ (for example: apt install g++), needed only to build from source"
    yield _unless("no C++ compiler" if compiler is None else None, "compiler", compiler or "", fix)


def _native_problem() -> tuple[Status, str] | None:
    """The reason why the native library cannot be used."""
    try:
        missing = native.missing()
    except ZeroOffloadError as error:
        return Status.FAIL, str(error)
    return None if missing is None else (Status.WARNING, missing)


def _check_host() -> Iterator[Check]:
    """Cores, memory and pages, io_uring."""
    yield Check("cpu", Status.OKAY, f"{probe.count_cores()} of {os.cpu_count()} cores usable")
    limit = min(probe.memory_limits(), key=lambda limit: limit.free_bytes)
    detail = f"{format_bytes(limit.free_bytes)} available (limited by {limit.source})"
    fix = "stop other programs, raise the limit, or place states on NVMe: optimizer='nvme', params='nvme'"
    yield _unless(detail if limit.free_bytes < MEMORY_MIN_BYTES else None, "memory", detail, fix)
    memlock = probe.memlock_limit_bytes()
    yield Check("memlock", Status.OKAY, "unlimited" if memlock is None else format_bytes(memlock))
    mode = probe.huge_page_mode()
    problem = None if mode in ("always", "madvise") else mode or "not supported by this kernel"
    fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    yield _unless(problem, "huge pages", mode or "", fix)
    problem = None if arena.moves_pages() else "not supported by this system"
    fix = "Linux 5.7 or later, not in gVisor; until then each fetch fills new pages with zeros first"
    yield _unless(problem, "moving pages", "parameters are fetched into memory that was used before", fix)
    if _native_problem() is not None:
        fix = "build the native library; until then aiofiles serves"
        yield Check("io_uring", Status.WARNING, "needs the native library", fix)
    else:
        fix = "none is needed, threads serve; or sysctl kernel.io_uring_disabled=0, or a seccomp profile that allows it"
        yield _unless(io_uring_problem(), "io_uring", "available", fix)


def _check_device() -> Iterator[Check]:
    """The compute device, and the rates of a GPU that plans know."""
    compute = device.compute_device()
    detail, memory = device.describe_device(), read_memory(compute.torch_device)
    if memory is not None:
        margin = format_bytes(margin_bytes(memory.total, 1, is_measured=True))
        detail += f"; parameters may take what a first step leaves of it, less {margin}, or device_memory"
    yield Check("device", Status.OKAY, detail)
    if compute.is_host:
        return
    table = rates.load().device(compute.name)
    if not table:
        fix = "zero-offload bench --device"
        yield Check("device rates", Status.OKAY, "not measured: plans assume those of a published run", fix)
        return
    trains = max(table["training_flops"].values()) / 1e12
    copies = table["both_bytes_per_s"] / 1e9
    detail = f"measured {table['taken']}: trains at {trains:.3g} TFLOPS, copies {copies:.3g} GB/s each way"
    if table["host_memory"] == "pageable":
        registry = ACCELERATORS[compute.torch_device.type].host_memory
        fix = f"{registry.advice}; then zero-offload bench --device" if registry is not None else ""
        yield Check("device rates", Status.WARNING, f"{detail}, through pageable memory: the driver pinned none", fix)
        return
    yield Check("device rates", Status.OKAY, detail)


def _check_base(run_dir: Path) -> Check:
    """The files that frozen weights of a run are read from."""
    base = base_of(run_dir)
    if base is None:
        return Check("base", Status.OKAY, "none: all weights are in the run's own files")
    if base.problem:
        fix = f"put {base.folder} back as it was; a link to a copy serves too: ln -s COPY {base.folder}"
        return Check("base", Status.FAIL, base.problem, fix)
    if base.written:
        fix = f"zero-offload verify {run_dir} reads all that the run has read"
        return Check("base", Status.WARNING, f"{base_text(base)}; {base.written} was written since", fix)
    return Check("base", Status.OKAY, base_text(base))


def _check_directory(path: Path) -> Iterator[Check]:
    name = f"directory {path}"
    existing = probe.existing_parent(path.absolute())
    try:
        if existing == path.absolute():
            check_private(path, path.lstat())
    except ZeroOffloadError as error:
        yield Check(name, Status.FAIL, str(error), "name a directory of your own, or correct this one as it says")
        return
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        fix = f"choose another directory, or give user {os.geteuid()} the right to write to {existing}"
        yield Check(name, Status.FAIL, f"{existing} is not writable", fix)
        return
    yield Check(name, Status.OKAY, "writable" if existing == path.absolute() else "will be created")
    problem, fix = probe.file_system_problem(existing) or (None, "")
    yield _unless(problem, "file system", probe.file_system_type(existing), fix)
    problem = None if probe.supports_direct_io(existing) else "not supported here"
    fix = "use a local ext4 or xfs disk; until then transfers pass through the page cache"
    yield _unless(problem, "direct I/O", "supported", fix)
    free_bytes = probe.nvme_free_bytes([path]) + reusable_bytes([path])
    detail = f"{format_bytes(free_bytes)} free"
    problem = detail if free_bytes < DISK_MIN_BYTES else None
    yield _unless(problem, "disk space", detail, "free some, or choose a larger disk")
