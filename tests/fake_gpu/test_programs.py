"""Programs of README, docs and examples, as they stand, on a machine with a GPU: those that use torch alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import programs

pytestmark = pytest.mark.usefixtures("late")

CHAPTERS = [
    (page, chapter)
    for page, given in programs.GIVEN.items()
    for chapter in given
    if (page, chapter) not in programs.OF_TOOLS
]


@pytest.mark.parametrize(("page", "chapter"), CHAPTERS)
def test_a_chapter(page: str, chapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    programs.run_page(page, chapter)


@pytest.mark.parametrize("name", programs.PLAIN_EXAMPLES)
def test_an_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    programs.run_example(name)
