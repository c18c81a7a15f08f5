"""The Python of README and the pages of docs runs as it stands on a CPU. tests/fake_gpu runs it on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import programs


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", programs.pages_of_tools())
def test_a_page(page: str) -> None:
    programs.run_page(page)


@pytest.mark.parametrize(
    ("page", "chapter"), [(page, each) for page in programs.GIVEN for each in programs.GIVEN[page]]
)
def test_a_chapter(page: str, chapter: str) -> None:
    programs.run_page(page, chapter)
