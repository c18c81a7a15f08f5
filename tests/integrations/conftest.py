"""An offloaded model inside the tools that people use, compared with the same run of the plain model.

`make test-tools` installs the tools at their pinned versions and runs this folder; `make test` leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.tools import reset_accelerate


@pytest.fixture(autouse=True)
def _own_accelerate() -> Iterator[None]:
    yield
    reset_accelerate()
