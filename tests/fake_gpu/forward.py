"""Tests of this folder run in another pytest process, which has the device; their reports are shown here.

Each pytest process (a worker of xdist, or the only one) starts one such process when its first test of the folder is
due. If that dies, the test that it ran has failed, and the next test starts another one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
DEADLINE = 0.9
"""Of the time after which pytest ends its own process. A device that deadlocks would stop the run for good."""


class DeviceProcess:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._deadline_s = DEADLINE * float(config.getini("faulthandler_timeout")) or None
        self._process: subprocess.Popen[bytes] | None = None
        self._num_started = 0

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[Any]:
        """The reports of an item."""
        try:
            if self._process is None:
                self._start()
            is_next_here = nextitem is not None and FOLDER in nextitem.path.parents
            self._connection.send((item.nodeid, nextitem.nodeid if nextitem and is_next_here else None))
            if not self._connection.poll(self._deadline_s):
                return self._failure(item, f"took longer than {self._deadline_s} s")
            told = self._connection.recv()
        except (EOFError, OSError):
            return self._failure(item, "ended the process")
        hook = self._config.hook
        reports = [hook.pytest_report_from_serializable(config=self._config, data=each) for each in told]
        for report in reports:
            report.nodeid = item.nodeid
        return reports

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        option = self._config.option
        arguments = [str(FOLDER), "-m", "", "-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:xdist"]
        arguments += [f"--rootdir={self._config.rootpath}", f"--capture={option.capture}"]
        arguments += ["-o", "faulthandler_timeout=0"]
        if option.basetemp is not None:
            arguments.append(f"--basetemp={option.basetemp}-device{self._num_started}")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fake_gpu", *arguments],
            cwd=self._config.rootpath,
            env=os.environ | {"FAKE_GPU_SOCKET": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
        )
        self._num_started += 1
        theirs.close()
        self._connection = Connection(ours.detach())

    def _failure(self, item: pytest.Item, what: str) -> list[pytest.TestReport]:
        assert self._process is not None
        if self._process.poll() is None:
            # faulthandler writes where its threads are.
            self._process.send_signal(signal.SIGABRT)
        status = self._process.wait()
        self.close()
        message = f"{item.nodeid} {what} (exit status {status}; its output is above)"
        call = pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")
        return [call, pytest.TestReport(item.nodeid, item.location, {}, "passed", None, "teardown")]

    def close(self) -> None:
        if self._process is None:
            return
        self._connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
