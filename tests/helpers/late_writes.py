"""Commits that wait for the test, and writes that take place when they are waited for, with the bytes of that moment.

Memory that changes before its write was waited for is then written changed. A checksum does not notice that: the file
has other states than it should.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from zero_offload.storage.files.swap_file import SwapFile, Transfer
from zero_offload.storage.shards.snapshot import Snapshot, Snapshots


class LateWrite:
    """Stands in for a `Transfer`."""

    arrived = False

    def __init__(self, launch: Callable[[], Transfer]) -> None:
        self._launch = launch
        self._lock = threading.Lock()
        self._transfer: Transfer | None = None

    def wait(self) -> None:
        with self._lock:
            if self._transfer is None:
                self._transfer = self._launch()
            self._transfer.wait()

    def done(self) -> bool:
        return self._transfer is not None and self._transfer.done()


def make_writes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    write = SwapFile.launch_write

    def late(*args: Any) -> Any:
        return LateWrite(lambda: write(*args))

    monkeypatch.setattr(SwapFile, "launch_write", late)


class Gate:
    """Commits pass one by one, when they are let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._passes = threading.Semaphore(0)
        write = Snapshots.write

        def held(snapshots: Snapshots, snapshot: Snapshot) -> None:
            assert self._passes.acquire(timeout=60), "the test forgot a commit"
            write(snapshots, snapshot)

        monkeypatch.setattr(Snapshots, "write", held)

    def let_pass(self) -> None:
        self._passes.release()
