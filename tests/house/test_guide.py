"""docs/GUIDE.md has every setting with its default and every public name; links between the pages lead somewhere."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import zero_offload as zo
from zero_offload.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "GUIDE.md").read_text()
README = (ROOT / "README.md").read_text()


def test_every_setting_has_a_row_with_its_default() -> None:
    settings = GUIDE[GUIDE.index("## Settings") : GUIDE.index("## Tiers")]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", settings, re.MULTILINE)
    assert rows == [(field.name, repr(field.default).replace("'", '"')) for field in fields(zo.OffloadConfig)]


def test_every_public_call_is_explained() -> None:
    calls = [name for name in zo.__all__ if not name.endswith("Error")]
    assert [name for name in calls if not re.search(rf"\bzo\.{name}\b", README + GUIDE)] == []


def test_links_lead_to_chapters() -> None:
    chapters = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", GUIDE, re.M)
    }
    named = re.findall(r"\]\((?:docs/GUIDE\.md)?#([\w-]+)\)", README + GUIDE)
    assert set(named) - chapters == set() and len(named) > len(chapters)


def test_links_between_pages_lead_to_files() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())]
    assert [f"{page}: {link}" for page, link in links if not (page.parent / link).is_file()] == []
    assert len(links) > len(pages)


def test_the_plan_that_is_shown_is_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a machine by name, so that it is the same on every one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # such a GPU may have been measured here
    shown = GUIDE[GUIDE.index("$ zero-offload plan") :]
    command, expected = shown[: shown.index("```")].split("\n", 1)
    assert main(command.split()[2:]) == 0
    assert capsys.readouterr().out == expected
