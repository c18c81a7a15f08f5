"""No test of this folder may hang: an alarm ends it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

LIMIT_S = 240
FULL_LIMIT_S = 3600


@pytest.fixture(autouse=True)
def _no_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    limit_s = LIMIT_S if request.node.get_closest_marker("full") is None else FULL_LIMIT_S

    def ring(*_: object) -> None:
        raise TimeoutError(f"the test took more than {limit_s} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(limit_s)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
