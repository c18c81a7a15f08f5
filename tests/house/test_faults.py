"""The faults of tests/faults can be applied to the source as it is, and their tests exist."""

from __future__ import annotations

from pathlib import Path

from tests.faults.__main__ import PAGE, missing_texts, page
from tests.faults.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]


def test_every_text_is_in_the_source_once() -> None:
    problems = [f"{fault.behaviour}: {text}" for fault in FAULTS for text in missing_texts(fault)]
    assert not problems, "point tests/faults/faults.py at the lines that do this now:\n" + "\n".join(problems)


def test_every_test_exists() -> None:
    named = {test.split("[")[0] for fault in FAULTS for test in fault.test.split()}
    for path, _, name in (test.partition("::") for test in named):
        assert (ROOT / path).is_file() and f"def {name}" in (ROOT / path).read_text(), f"{path}::{name}"


def test_the_page_has_them() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.faults --page"
