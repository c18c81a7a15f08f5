"""Docstrings, comments and pages have short sentences with a noun as subject.

[Note: sentences]
A sentence ends at a full stop, a question mark or an exclamation mark, and at a colon before anything but a small
letter. Code in backquotes counts as one word. Code blocks, headings, tables and lines with arrows are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS_MAX = 25
PLACES = (
    "zero_offload",
    "benchmarks",
    "examples",
    "tests",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "STATUS.md",
)

_COMMENT = re.compile(r"(?:^\s*|  )#[#:]?(?: |$)(.*)$")
_CODE = re.compile(r"`+[^`]+`+")
_END = re.compile(r"(?:(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)|(?<=:)(?=\s+[^a-z\s]))[\"')*_]*\s+")
_BEGINS_WITH_WHAT = re.compile(r"[\"'(*_]*What('s)?\s")
_FORBIDDEN = re.compile(r"\b(whoever|somebody|as ever|ones? that|is no [a-z]+)\b", re.IGNORECASE)
_ALLOWED = re.compile(r"\bis no (longer|more|less|\w+er)\b|\bthere is no\b", re.IGNORECASE)
_ITEM = re.compile(r"([*+-]|\d+\.)\s")
_NOT_PROSE = re.compile(r"```|<!--|\[Note:|[|#>=]|.*(->|\S {3,}\S)")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings and comments of a Python file, each with its line; comments in successive lines are one text."""
    of_strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
            of_strings.update(range(node.lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    found: dict[int, str] = {}
    end = -1
    for number, line in enumerate(source.split("\n"), 1):
        if (match := _COMMENT.search(line)) and number not in of_strings:
            is_alone, text = not match.start(), match.group(1)
            if is_alone and number == end + 1:
                found[next(reversed(found))] += f"\n{text}"
            else:
                found[number] = text
            end = number if is_alone else -1
    yield from found.items()


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and items of lists, each in one line, with the number of its first line from 0 on."""
    lines: list[str] = []
    begin, in_code = 0, False
    for number, line in enumerate([*map(str.strip, text.splitlines()), ""]):
        in_code ^= line.startswith("```")
        is_prose = bool(line) and not in_code and not _NOT_PROSE.match(line)
        item = _ITEM.match(line)
        if lines and (item or not is_prose):
            yield begin, " ".join(lines)
            lines = []
        if is_prose:
            begin = begin if lines else number
            lines.append(line[item.end() :] if item else line)


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph. Code is left as it is, whatever marks it has."""
    codes: list[str] = []

    def take(match: re.Match[str]) -> str:
        codes.append(match.group())
        return f"`{len(codes) - 1}`"

    parts = _END.split(_CODE.sub(take, paragraph))
    return [re.sub(r"`(\d+)`", lambda match: codes[int(match.group(1))], part).strip() for part in parts]


def faults_of(sentence: str) -> Iterator[str]:
    """Rules that a sentence breaks."""
    plain = re.sub(r"\]\([^)]*\)", "]", _CODE.sub("code", sentence))
    if _BEGINS_WITH_WHAT.match(sentence) and "?" not in sentence:
        yield "begins with What"
    if found := _FORBIDDEN.search(_ALLOWED.sub("", plain)):
        yield f"has {found.group()!r}"
    if (count := sum(1 for word in plain.split() if re.search(r"\w", word))) > WORDS_MAX:
        yield f"has {count} words"


def faults(path: Path) -> Iterator[str]:
    source = path.read_text()
    for line, text in texts(source) if path.suffix == ".py" else [(1, source)]:
        for number, paragraph in paragraphs(text):
            for sentence in sentences(paragraph):
                for fault in faults_of(sentence):
                    yield f"{path.relative_to(ROOT)}:{line + number} {fault}: {sentence}"


@pytest.mark.parametrize("place", PLACES)
def test_sentences_are_short_and_have_a_subject(place: str) -> None:
    where = ROOT / place
    files = [where] if where.is_file() else sorted([*where.rglob("*.py"), *where.rglob("*.md")])
    found = [fault for each in files for fault in faults(each)]
    assert not found, "\n".join([f"{len(found)} sentences to rewrite (CONTRIBUTING.md):", *found])


@pytest.mark.parametrize(
    "sentence",
    [
        "What a commit needs.",
        "**What stays.** Norms.",
        "A model that is no module.",
        "The one that waits.",
        "Whoever waits is told.",
        "A unit leaves, and then " + "its frames go to another unit, " * 4,
    ],
)
def test_the_rules_find_what_they_forbid(sentence: str) -> None:
    assert [fault for each in sentences(sentence) for fault in faults_of(each)]


@pytest.mark.parametrize(
    "sentence",
    [
        "What does a commit need?",
        "There is no room.",
        "It is no longer used.",
        "The calls: `a one that` and `b`. " * 9,
        "A unit leaves. " * 9,
    ],
)
def test_the_rules_allow_what_is_legal(sentence: str) -> None:
    assert not [fault for each in sentences(sentence) for fault in faults_of(each)]


def test_texts_are_docstrings_and_comments() -> None:
    source = '"""One.\n\nTwo\nthree."""\n\n# Four\n# five.\nx = 1  # Six.\n# Seven.\ny = """\n# Eight."""\n'
    found = [paragraph for _, text in texts(source) for _, paragraph in paragraphs(text)]
    assert found == ["One.", "Two three.", "Four five.", "Six.", "Seven."]
