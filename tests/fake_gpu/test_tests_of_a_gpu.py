"""The tests for a real GPU (tests/gpu) pass on the fake one, as far as it can do what they ask."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_they_pass() -> None:
    command = [sys.executable, "-m", "tests.fake_gpu", "tests/gpu/test_placements.py"]
    done = subprocess.run([*command, "-q", "-p", "no:cacheprovider"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 20, done.stdout[-500:]
