"""No test of this folder may hang: an alarm ends it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

LIMIT_S = 240


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError(f"the test took more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
