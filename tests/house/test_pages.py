"""Pages of docs have every public name and setting, begin with their use, and are short; their links lead somewhere."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

import zero_offload as zo
from docs.extensions.fields import field_texts
from docs.extensions.reading_ease import grade
from tests.helpers import programs
from tests.house.test_sentences import paragraphs
from zero_offload.cli.main import main
from zero_offload.finetune.pretrain.settings import TrainConfig
from zero_offload.finetune.settings import FinetuneConfig

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(DOCS)): path.read_text()
    for path in sorted(DOCS.rglob("*.md"))
    if path.parent.name != "decisions"
}
README = (ROOT / "README.md").read_text()
SHOWN = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
WORDS_MAX = 80
GRADE_MAX = 9.0
OF_TOOLS = {
    *(f"docs/use/{name}.md" for name in ("lora-and-quantization", "moe", "diffusion", "inference")),
    *(f"docs/start/{name}.md" for name in ("trainer", "lightning")),
}
"""Pages that are one program."""

_CODE_BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("config", [zo.OffloadConfig, zo.Precision, FinetuneConfig, TrainConfig])
def test_every_setting_has_a_text(config: type) -> None:
    assert [field.name for field in fields(config) if field.name not in field_texts(config)] == []  # type: ignore[arg-type]
    assert f".{config.__name__}\n" in PAGES["reference/settings.md"]


def test_every_public_name_has_its_text_on_an_api_page() -> None:
    api = "".join(text for name, text in PAGES.items() if name.startswith("reference/api/"))
    named = re.findall(r"auto(?:function|class|exception):: zero_offload\.(\w+)$", api, re.MULTILINE)
    assert sorted(named) == sorted(zo.__all__)


def test_every_public_call_is_explained() -> None:
    calls = [name for name in zo.__all__ if not name.endswith("Error")]
    text = README + "".join(PAGES.values())
    assert [name for name in calls if not re.search(rf"\bzo\.{name}\b", text)] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_its_use(page: str) -> None:
    assert re.match(r"# .+\n\n(After th(is page|ese pages) you (can|know) )", PAGES[page])


@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
def test_blocks_of_prose_are_short(page: str) -> None:
    """Code counts as one word, and addresses of links not at all."""
    text = (DOCS / page).read_text()
    counts = {
        f"line {line + 1}: {block[:60]}": count
        for line, block in paragraphs(text)
        if (count := num_words(block)) > WORDS_MAX
    }
    assert counts == {}


def num_words(block: str) -> int:
    plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`+[^`]+`+", "code", block))
    return sum(1 for word in plain.split() if re.search(r"\w", word))


def test_a_long_block_is_found() -> None:
    assert num_words("a `b c` [d e](f/g.md)") == 4
    assert num_words("word " * (WORDS_MAX + 1)) > WORDS_MAX


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("start/")])
def test_first_pages_are_easy_to_read(page: str) -> None:
    assert grade(PAGES[page]) <= GRADE_MAX


def test_grades_grow_with_words_and_syllables() -> None:
    easy, hard = "The run goes on. It is fast.", "Heterogeneous accelerators necessitate sophisticated orchestration."
    assert grade(easy) < 3 < 12 < grade(hard)
    assert grade(f"{easy}\n\n```py\n{hard}\n```\n\n| {hard} |\n") == grade(easy)


def test_texts_of_errors_are_those_of_the_code() -> None:
    """Codes in the first cells of the troubleshooting page, part by part where they have dots."""
    nodes = [node for path in (ROOT / "zero_offload").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    said = "\n".join(filter(None, map(text_of, nodes)))
    cells = re.findall(r"^\| (.*?) \| ", PAGES["read/troubleshooting.md"], re.MULTILINE)
    parts = [part.strip() for cell in cells for code in re.findall(r"`([^`]+)`", cell) for part in code.split("...")]
    assert [part for part in parts if len(part) > 6 and part not in said] == []
    assert sum(len(part) > 6 for part in parts) > 30
    classes = [name for name in zo.__all__ if name.endswith("Error")]
    assert [name for name in classes if f"`{name}`" not in cells] == []


def test_drawings_are_shown_and_have_colours_for_light_and_dark() -> None:
    shown = "".join(PAGES.values())
    drawings = sorted((DOCS / "drawings").glob("*.svg"))
    assert drawings and [path.name for path in drawings if f"drawings/{path.name})" not in shown] == []
    for path in drawings:
        text = path.read_text()
        light, _, dark = text.partition("@media (prefers-color-scheme: dark)")
        used = {name for words in re.findall(r'class="([\w ]+)"', text) for name in words.split()}
        filled = {name for name in used if re.search(rf"\.{name} {{ fill: #", light)}
        assert filled and [name for name in filled if f".{name} {{ fill: #" not in dark] == [], path


def text_of(node: ast.AST) -> str | None:
    """The text of a literal; where values stand is not known."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else "\0" for each in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def chapters_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.+)$", _CODE_BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def links_of(page: Path) -> list[tuple[str, str]]:
    """Files and anchors that a page leads to."""
    return re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([\w.-]+))?\)", _CODE_BLOCK.sub("", page.read_text()))


def test_links_lead_to_files_and_chapters() -> None:
    links = [(page, page.parent / file if file else page, anchor) for page in SHOWN for file, anchor in links_of(page)]
    assert [f"{page}: {to}" for page, to, _ in links if not to.is_file()] == []
    anchors = [(page, to, anchor) for page, to, anchor in links if anchor]
    assert [f"{page}: {to}#{anchor}" for page, to, anchor in anchors if anchor not in chapters_of(to)] == []
    assert len(links) > 3 * len(PAGES) and len(anchors) > 20


def test_every_program_is_run_or_listed() -> None:
    """By test_programs.py and test_programs_of_tools.py of tests/fake_gpu; on a CPU by test_pages.py."""
    for page, given in programs.GIVEN.items():
        found = Counter(block.chapter for block in programs.blocks(page))
        assert found == {chapter: len(each) for chapter, each in given.items()}, page
    assert {(page, chapter) for page, given in programs.GIVEN.items() for chapter in given} >= programs.OF_TOOLS
    assert {*programs.pages_of_tools()} == OF_TOOLS
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
    page = PAGES["choose/plan.md"]
    shown = page[page.index("$ zero-offload plan") :]
    command, expected = shown[: shown.index("```")].split("\n", 1)
    assert main(command.split()[2:]) == 0
    assert capsys.readouterr().out == expected
