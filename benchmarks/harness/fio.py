"""fio, where it is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

INSTALL = "apt-get install fio"


def is_installed() -> bool:
    return shutil.which("fio") is not None


def job(file: Path, rw: str, block_bytes: int, engine: str, depth: int, **more: object) -> list[str]:
    """The arguments of one job: `rw` is "read", "write" or "rw" (half of each)."""
    options = {"name": file.name, "filename": file, "rw": rw, "bs": block_bytes, "ioengine": engine, "iodepth": depth}
    return [f"--{name}={value}" for name, value in (options | more).items()]


def start(*jobs: list[str]) -> subprocess.Popen[str]:
    """fio with these jobs at once, past the page cache."""
    command = ["fio", "--output-format=json", "--direct=1", *(argument for each in jobs for argument in each)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Wait for the end; what fio reports of each job. Raises SystemExit with its words if it fails."""
    printed, complaints = process.communicate()
    # An interrupted fio has an exit code too, and all of its figures.
    jobs: list[dict[str, Any]] = json.loads(printed[printed.index("{") :])["jobs"] if "{" in printed else []
    if not jobs or any(each["error"] for each in jobs):
        raise SystemExit(f"fio ended with code {process.returncode}: {complaints.strip() or printed.strip()}")
    return jobs


def run(*jobs: list[str]) -> list[dict[str, Any]]:
    """`start`, then `finish`."""
    return finish(start(*jobs))
