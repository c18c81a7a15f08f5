"""Checksums beside another program's transfers: what it costs a drive that its bytes are summed, whoever moves them."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from zero_offload.base.types import MIB
from zero_offload.hardware.kernels.checksums import crc32c

_PIECE_BYTES = MIB
_WAKE_S = 6e-5
"""What a short sleep takes longer than asked for."""


class ChecksumsBeside:
    """While entered: a thread sums `nbytes` of memory at `address`, over and over, so many bytes per second."""

    def __init__(self, address: int, nbytes: int, bytes_per_s: float) -> None:
        self._address = address
        self._nbytes = nbytes
        self._bytes_per_s = bytes_per_s
        self._cpu_s, self._summed = 0.0, 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checksums beside")

    def __enter__(self) -> ChecksumsBeside:
        self._thread.start()
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._ends.set()
        self._thread.join()

    @property
    def cpu_s_per_gb(self) -> float:
        """Processor time of the sums alone, per 10^9 bytes; after the end."""
        return self._cpu_s / self._summed * 1e9

    def _run(self) -> None:
        began = time.perf_counter()
        while not self._ends.is_set():
            cpu = time.thread_time()
            crc32c(self._address + self._summed % self._nbytes, _PIECE_BYTES)
            self._cpu_s += time.thread_time() - cpu
            self._summed += _PIECE_BYTES
            ahead_s = self._summed / self._bytes_per_s - (time.perf_counter() - began)
            if ahead_s > _WAKE_S:
                time.sleep(ahead_s - _WAKE_S)
