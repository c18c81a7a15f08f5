"""The tables of machines in docs/choose/hardware.md and README are what the planner says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.hardware_page import HEAD, PAGE, README, Row, for_readme, rows
from tests.helpers.pairwise import full

ROWS = [*rows(PAGE.read_text())]


@pytest.mark.parametrize(
    ("line", "row"),
    [pytest.param(*each, id=each[1].flags) if at == 0 else full(*each) for at, each in enumerate(ROWS)],
)
def test_a_row_is_what_is_planned(line: str, row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # such a GPU may have been measured here
    assert row.planned() == line


def test_readme_has_the_rows_of_the_page() -> None:
    assert len({row.machine for _, row in ROWS}) == PAGE.read_text().count(HEAD) >= 5
    assert for_readme(PAGE.read_text()) in README.read_text()
