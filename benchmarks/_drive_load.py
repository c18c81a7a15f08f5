"""A drive that is busy: fio moves bytes at a given pace while something else is timed."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _disk_rates import PROBE_BYTES, Rates

_BLOCK_BYTES, _DEPTH, _LONG_S = 2 << 20, 4, 3600
_START_S = 1
"""Until fio is at work, and can be told to end."""


@contextmanager
def moving(directory: Path, wanted: Rates) -> Iterator[list[Rates]]:
    """fio reads and writes at these rates inside; afterwards the list has those that it kept.

    In files of its own, written once before: training overwrites its files, so fresh blocks do not count.
    """
    reads, writes = directory / "load-read", directory / "load-write"
    kept: list[Rates] = []
    try:
        _finish(_fio(_job(reads, "write"), _job(writes, "write")))
        paced = ["--time_based", f"--runtime={_LONG_S}"]
        load = _fio(
            [*_job(reads, "read"), *paced, f"--rate={wanted.read_bytes_per_s:.0f}"],
            [*_job(writes, "write"), *paced, f"--rate={wanted.write_bytes_per_s:.0f}"],
        )
        try:
            time.sleep(_START_S)
            yield kept
        finally:
            load.send_signal(signal.SIGINT)
            reading, writing = _finish(load)
        kept.append(Rates(reading["read"]["bw_bytes"], writing["write"]["bw_bytes"]))
    finally:
        reads.unlink(missing_ok=True)
        writes.unlink(missing_ok=True)


def _job(file: Path, direction: str) -> list[str]:
    return [f"--name={file.name}", f"--filename={file}", f"--rw={direction}", f"--size={PROBE_BYTES}"]


def _fio(*jobs: list[str]) -> subprocess.Popen[str]:
    options = ["--direct=1", "--ioengine=io_uring", f"--iodepth={_DEPTH}", f"--bs={_BLOCK_BYTES}"]
    command = ["fio", "--output-format=json", *options, *(argument for job in jobs for argument in job)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _finish(fio: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What it says of each job."""
    printed, _ = fio.communicate()
    if "{" not in printed:
        raise SystemExit(f"fio ended with code {fio.returncode}; its error is above")
    jobs: list[dict[str, Any]] = json.loads(printed[printed.index("{") :])["jobs"]
    return jobs
