"""DeepSpeed's asynchronous I/O handle at every setting of a small grid; none where it is not installed."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from zero_offload.base.types import MIB

BLOCKS, DEPTHS, THREADS = (MIB, 8 * MIB), (16, 32), (1, 2)
ROUNDS = 3


class DeepSpeedAio:
    """Whole-file reads and writes from its locked buffers."""

    INSTALL = "apt-get install libaio-dev; DS_BUILD_OPS=0 pip install deepspeed ninja"

    def __init__(self, module: Any, file: Path, nbytes: int) -> None:
        self._file = str(file)
        self._nbytes = nbytes
        grid = itertools.product(BLOCKS, DEPTHS, THREADS)
        self._handles = [module.aio_handle(block, depth, False, True, threads) for block, depth, threads in grid]
        self._rates: dict[str, float] = {}

    @classmethod
    def load(cls, file: Path, nbytes: int) -> DeepSpeedAio | None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        try:
            from deepspeed.ops.op_builder import AsyncIOBuilder
        except ImportError:
            return None
        return cls(AsyncIOBuilder().load(verbose=False), file, nbytes)

    def best(self, op: str) -> float:
        """Bytes per second of the fastest setting, median of the rounds; "write" or "read"."""
        if not self._rates:
            self._measure()
        return self._rates[op]

    def _measure(self) -> None:
        best = {"write": 0.0, "read": 0.0}
        for handle in self._handles:
            buffer = handle.new_cpu_locked_tensor(self._nbytes, torch.empty(0, dtype=torch.uint8))
            seconds: dict[str, list[float]] = {"write": [], "read": []}
            for _ in range(ROUNDS):
                for op, call in (("write", handle.async_pwrite), ("read", handle.async_pread)):
                    began = time.perf_counter()
                    call(buffer, self._file, 0)
                    handle.wait()
                    seconds[op].append(time.perf_counter() - began)
            handle.free_cpu_locked_tensor(buffer)
            for op, taken in seconds.items():
                best[op] = max(best[op], self._nbytes / statistics.median(taken))
        os.unlink(self._file)
        self._rates = best
