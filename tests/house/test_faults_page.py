"""docs/FAULTS.md names every fault of the list once, and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "FAULTS.md").read_text()
NUM_FAULTS = 57


def test_every_test_it_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not (ROOT / path).is_file() or f"def {test}(" not in (ROOT / path).read_text()
    ]
    assert missing == [] and len(named) > NUM_FAULTS


def test_every_fault_has_a_row_and_a_test() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(number) for number, *_ in rows] == list(range(1, NUM_FAULTS + 1))
    assert [number for number, *_, tests in rows if "::" not in tests] == []
