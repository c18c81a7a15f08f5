"""Checksums beside another program's transfers: what it costs a drive that its bytes are summed, whoever moves them."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from zero_offload.storage.checksum import crc32c
from zero_offload.types import MIB

_PIECE_BYTES = MIB
_WAKE_S = 6e-5
"""What a short sleep takes longer than asked for."""


class ChecksumsBeside:
    """While entered: a thread sums `nbytes` of memory at `address`, over and over, so many bytes per second."""

    def __init__(self, address: int, nbytes: int, bytes_per_s: float) -> None:
        self._address = address
        self._nbytes = nbytes
        self._bytes_per_s = bytes_per_s
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checksums beside")

    def __enter__(self) -> ChecksumsBeside:
        self._thread.start()
        return self

    def __exit__(self, *exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        began, summed = time.perf_counter(), 0
        while not self._ends.is_set():
            crc32c(0, self._address + summed % self._nbytes, _PIECE_BYTES)
            summed += _PIECE_BYTES
            ahead_s = summed / self._bytes_per_s - (time.perf_counter() - began)
            if ahead_s > _WAKE_S:
                time.sleep(ahead_s - _WAKE_S)
