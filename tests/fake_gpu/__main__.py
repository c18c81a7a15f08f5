"""`python -m tests.fake_gpu PYTEST_ARGUMENTS`: pytest in a process with the device; with a socket's number in
FAKE_GPU_SOCKET, the tests whose names come by it."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.fake_gpu import device


class _OnDemand:
    """Runs the tests that another pytest asks for, and sends back their reports."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        from _pytest.runner import runtestprotocol

        items = {item.nodeid: item for item in session.items}
        hook = session.config.hook
        with self._connection:
            while (asked := self._receive()) is not None:
                name, next_name = asked
                reports = runtestprotocol(items[name], log=False, nextitem=items.get(next_name))
                told = [hook.pytest_report_to_serializable(config=session.config, report=report) for report in reports]
                self._connection.send(told)
        return True

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            return None


def main() -> int:
    device.load()
    socket = os.environ.pop("FAKE_GPU_SOCKET", None)
    plugins = [] if socket is None else [_OnDemand(Connection(int(socket)))]
    return int(pytest.main(sys.argv[1:], plugins))


if __name__ == "__main__":
    sys.exit(main())
