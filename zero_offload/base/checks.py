"""Whether invariants are checked that take more than a comparison of numbers.

A cheap invariant is an `assert` where it holds. A dear one is behind `if DEAR_CHECKS:`. The tests set
ZERO_OFFLOAD_CHECK=1; the processes that they start inherit it.
"""

from __future__ import annotations

import os

DEAR_CHECKS = os.environ.get("ZERO_OFFLOAD_CHECK") == "1"
