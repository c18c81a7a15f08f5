"""Rates of a disk and of this machine's memory, taken between the turns of a measurement; and a busy disk.

The disk: the better of fio, where it is installed, and O_DIRECT transfers on huge pages. These read up to twice as
fast, and fio has them only where some are reserved. Training overwrites its files, so the first write, which takes
fresh blocks, does not count. The memory: a copy of a tensor by torch, counted both ways.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from harness import fio

from zero_offload.base.types import GIB, MIB

LOAD_BLOCK_BYTES, LOAD_DEPTH, LONG_S = 2 * MIB, 4, 3600
START_S = 1
"""Until fio is at work, and can be told to end."""
PROBE_BYTES, PROBE_BLOCK_BYTES, PROBE_THREADS = GIB, 4 * MIB, 4


class Rates(NamedTuple):
    read_bytes_per_s: float
    write_bytes_per_s: float

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """One after the other: a disk shares its bandwidth between both."""
        return read_bytes / self.read_bytes_per_s + written_bytes / self.write_bytes_per_s


def median_rates(taken: Sequence[Rates]) -> Rates:
    return Rates(
        statistics.median(rate.read_bytes_per_s for rate in taken),
        statistics.median(rate.write_bytes_per_s for rate in taken),
    )


def disk_rates(directory: Path, nbytes: int = PROBE_BYTES) -> Rates:
    file = directory / "probe"
    probes = [_direct_rate, _fio_rate] if fio.is_installed() else [_direct_rate]
    try:
        _direct_rate(file, "write", nbytes)
        write_rate = max(probe(file, "write", nbytes) for probe in probes)
        return Rates(max(probe(file, "read", nbytes) for probe in probes), write_rate)
    finally:
        file.unlink(missing_ok=True)


def memory_rate(nbytes: int = PROBE_BYTES) -> float:
    """Bytes per second, read or written."""
    source = torch.ones(nbytes // 8)
    target = torch.zeros_like(source)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times)


@contextlib.contextmanager
def busy_disk(directory: Path, wanted: Rates) -> Iterator[list[Rates]]:
    """fio reads and writes at these rates inside; afterwards the list has the rates that it kept.

    In files of its own, written once before: training overwrites its files, so fresh blocks do not count.
    """
    reads, writes = directory / "load-read", directory / "load-write"
    kept: list[Rates] = []

    def job(file: Path, direction: str, **more: object) -> list[str]:
        return fio.job(file, direction, LOAD_BLOCK_BYTES, "io_uring", LOAD_DEPTH, size=PROBE_BYTES, **more)

    try:
        fio.run(job(reads, "write"), job(writes, "write"))
        load = fio.start(
            job(reads, "read", time_based=1, runtime=LONG_S, rate=round(wanted.read_bytes_per_s)),
            job(writes, "write", time_based=1, runtime=LONG_S, rate=round(wanted.write_bytes_per_s)),
        )
        try:
            time.sleep(START_S)
            yield kept
        finally:
            load.send_signal(signal.SIGINT)
            reading, writing = fio.finish(load)
        kept.append(Rates(reading["read"]["bw_bytes"], writing["write"]["bw_bytes"]))
    finally:
        reads.unlink(missing_ok=True)
        writes.unlink(missing_ok=True)


def _fio_rate(file: Path, direction: str, nbytes: int) -> float:
    job = fio.job(file, direction, PROBE_BLOCK_BYTES, "libaio", 16, size=nbytes)
    try:
        (found,) = fio.run([*job, "--iomem=mmaphuge"])
    except SystemExit:  # without reserved huge pages fio refuses to start
        (found,) = fio.run(job)
    return float(found[direction]["bw_bytes"])


def _direct_rate(file: Path, direction: str, nbytes: int) -> float:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    blocks = mmap.mmap(-1, PROBE_THREADS * PROBE_BLOCK_BYTES)
    blocks.madvise(mmap.MADV_HUGEPAGE)
    blocks.write(os.urandom(len(blocks)))

    def transfer(thread: int) -> None:
        start = thread * PROBE_BLOCK_BYTES
        with memoryview(blocks)[start : start + PROBE_BLOCK_BYTES] as block:
            for offset in range(start, nbytes, PROBE_THREADS * PROBE_BLOCK_BYTES):
                if direction == "write":
                    os.pwritev(descriptor, [block], offset)
                else:
                    os.preadv(descriptor, [block], offset)

    try:
        started = time.perf_counter()
        with ThreadPoolExecutor(PROBE_THREADS) as pool:
            list(pool.map(transfer, range(PROBE_THREADS)))
        return nbytes / (time.perf_counter() - started)
    finally:
        os.close(descriptor)
        blocks.close()
