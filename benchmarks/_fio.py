"""fio on one file, with huge pages where the system has some: bytes per second and processor time."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zero_offload.base.types import MIB

INSTALL = "apt-get install fio"
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
BEST_OF = (("io_uring", 4), ("io_uring", 8), ("libaio", 4), ("libaio", 8), ("psync", 1))
"""Engines and depths that are tried."""


@dataclass(frozen=True)
class FioResult:
    bytes_per_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True)
class Job:
    """What fio does: "read", "write" or "rw" (half of each)."""

    rw: str
    block_bytes: int
    engine: str = "io_uring"
    depth: int = 4


def available() -> bool:
    return shutil.which("fio") is not None


@contextlib.contextmanager
def huge_pages(nbytes: int) -> Iterator[bool]:
    """Reserve huge pages for fio's buffers, which takes the right to; whether that went well."""
    before = HUGE_PAGES.read_text()
    try:
        HUGE_PAGES.write_text(str(int(before) + -(-nbytes // (2 * MIB))))
    except OSError:
        yield False
        return
    try:
        yield int(HUGE_PAGES.read_text()) * 2 * MIB >= nbytes
    finally:
        HUGE_PAGES.write_text(before)


def run(file: Path, job: Job, seconds: float, *, huge: bool) -> FioResult:
    """Raises SystemExit with fio's words when it fails."""
    arguments = [
        *("fio", "--name=bench", f"--filename={file}", f"--size={file.stat().st_size}", "--direct=1"),
        *(f"--rw={job.rw}", f"--bs={job.block_bytes}", f"--iodepth={job.depth}", f"--ioengine={job.engine}"),
        *("--time_based", f"--runtime={seconds}", "--output-format=json", "--randrepeat=1"),
        *(["--iomem=mmaphuge"] if huge else []),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed: {done.stderr.strip() or done.stdout.strip()}")
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    directions = [found["read"], found["write"]]
    nbytes = sum(each["io_bytes"] for each in directions)
    taken_s = max(each["runtime"] for each in directions) / 1e3
    cpu_s = (found["usr_cpu"] + found["sys_cpu"]) / 100 * found["job_runtime"] / 1e3
    return FioResult(nbytes / taken_s, cpu_s / nbytes * 1e9)


def best_job(file: Path, rw: str, block_bytes: int, seconds: float, *, huge: bool) -> Job:
    """The fastest of `BEST_OF`, by the better of two short trials each, in turns."""
    jobs = [Job(rw, block_bytes, engine, depth) for engine, depth in BEST_OF]
    trials = [(run(file, job, seconds / 2, huge=huge).bytes_per_s, job) for job in jobs * 2]
    return max(trials, key=lambda trial: trial[0])[1]
