"""docs/GUIDE.md has every setting with its default and every public name; links between the pages lead somewhere."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

import zero_offload as zo
from tests.helpers import programs
from zero_offload.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "GUIDE.md").read_text()
README = (ROOT / "README.md").read_text()
PAGES = ("LORA-AND-QUANTIZATION.md", "MOE.md", "DIFFUSION.md", "INFERENCE.md")


def test_every_setting_has_a_row_with_its_default() -> None:
    settings = GUIDE[GUIDE.index("## Settings") : GUIDE.index("## Tiers")]
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", settings, re.MULTILINE)
    assert rows == [(field.name, repr(field.default).replace("'", '"')) for field in fields(zo.OffloadConfig)]


def test_every_public_call_is_explained() -> None:
    calls = [name for name in zo.__all__ if not name.endswith("Error")]
    text = README + GUIDE + "".join((ROOT / "docs" / name).read_text() for name in PAGES)
    assert [name for name in calls if not re.search(rf"\bzo\.{name}\b", text)] == []


def chapters_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_links_lead_to_chapters() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    links = [
        (page, page.parent / file if file else page, anchor)
        for page in pages
        for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([\w-]+)\)", page.read_text())
    ]
    assert [f"{page}: {to}#{anchor}" for page, to, anchor in links if anchor not in chapters_of(to)] == []
    assert len({anchor for _, to, anchor in links if to.name == "GUIDE.md"}) > 20


@pytest.mark.parametrize("name", PAGES)
def test_pages_of_their_own_are_found(name: str) -> None:
    assert f"](docs/{name})" in README and f"]({name})" in GUIDE


def test_links_between_pages_lead_to_files() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())]
    assert [f"{page}: {link}" for page, link in links if not (page.parent / link).is_file()] == []
    assert len(links) > len(pages)


def test_every_program_is_run_or_listed() -> None:
    """By test_programs.py and test_programs_of_tools.py of tests/fake_gpu; on a CPU by test_pages.py."""
    for page, given in programs.GIVEN.items():
        found = Counter(block.chapter for block in programs.blocks(page))
        assert found == {chapter: len(each) for chapter, each in given.items()}, page
    assert programs.GIVEN["docs/GUIDE.md"].keys() >= programs.OF_TOOLS
    assert {f"docs/{name}" for name in PAGES} == {*programs.pages_of_tools()}
    named = {*programs.PLAIN_EXAMPLES, *programs.ARGUMENTS, *programs.EXAMPLES_NOT_RUN}
    assert named <= {*programs.EXAMPLES}
    commands = [command for page in programs.PAGES for command in programs.commands(page)]
    assert all(any(re.match(pattern, command) for command in commands) for pattern in programs.NOT_RUN)
    strange = [each for each in commands if programs.reason(each) is None and not each.startswith("zero-offload ")]
    assert strange == []


def test_the_plan_that_is_shown_is_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a machine by name, so that it is the same on every one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # such a GPU may have been measured here
    shown = GUIDE[GUIDE.index("$ zero-offload plan") :]
    command, expected = shown[: shown.index("```")].split("\n", 1)
    assert main(command.split()[2:]) == 0
    assert capsys.readouterr().out == expected
