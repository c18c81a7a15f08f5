"""What a disk and the memory of this machine do, taken between the turns of what is measured.

The disk: the better of fio, where it is installed, and O_DIRECT transfers on huge pages, which fio has only where some
are reserved and which read up to twice as fast. Training overwrites its files, so the first write, which takes fresh
blocks, does not count. The memory: a copy of a tensor by torch, counted both ways.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from zero_offload.base.types import GIB, MIB

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
    probes = [_direct_rate, _fio_rate] if shutil.which("fio") else [_direct_rate]
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


def _fio_rate(file: Path, direction: str, nbytes: int) -> float:
    options = f"--name=probe --filename={file} --rw={direction} --size={nbytes} --bs={PROBE_BLOCK_BYTES} "
    options += "--direct=1 --ioengine=libaio --iodepth=16 --iomem=mmaphuge --output-format=json"
    plain = options.replace(" --iomem=mmaphuge", "")  # without reserved huge pages fio refuses to start
    for arguments in (options, plain):
        done = subprocess.run(["fio", *arguments.split()], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return float(json.loads(done.stdout)["jobs"][0][direction]["bw_bytes"])
    raise SystemExit(f"fio failed in {file.parent}: {done.stderr.strip()}")


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
