"""An offloaded model inside the tools that people use, compared with the same run of the plain model.

`make test-tools` installs the tools at their pinned versions and runs this folder; `make test` leaves it out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.helpers.tools import reset_accelerate


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Tools put ranks and ports into the environment, and accelerate keeps a state."""
    with mock.patch.dict(os.environ):
        yield
    reset_accelerate()
