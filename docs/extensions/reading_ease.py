"""Flesch-Kincaid grades of pages, printed at the end of a build.

The grade is 0.39 words per sentence + 11.8 syllables per word - 15.59 (Kincaid et al. 1975): years of school that a
reader needs. Code, tables and addresses of links are left out. Syllables are groups of vowels, without a silent "e".
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
_LEFT_OUT = re.compile(r"^ *```.*?^ *```$|^ *[|#].*?$|<[^>]+>|!\[[^\]]*\]\([^)]*\)", re.MULTILINE | re.DOTALL)


def prose(text: str) -> str:
    """The words of a page that are read as sentences."""
    text = re.sub(r"^ *\d+\. ", "", _LEFT_OUT.sub("", text), flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"`[^`]+`", "code", text)


def syllables(word: str) -> int:
    word = word.lower()
    count = len(re.findall(r"[aeiouy]+", word))
    if re.search(r"[^aeiouyl]es?$|[^aeiouytd]ed$", word) and count > 1:
        count -= 1
    return max(count, 1)


def grade(text: str) -> float:
    """The Flesch-Kincaid grade of a page."""
    found = prose(text)
    words = re.findall(r"[A-Za-z][A-Za-z'-]*", found)
    sentences = len(re.findall(r"[.!?](?=\s|$|[*\"')])", found)) or 1
    if not words:
        return 0.0
    return 0.39 * len(words) / sentences + 11.8 * sum(map(syllables, words)) / len(words) - 15.59


def _print(app: object, error: Exception | None) -> None:
    if error is None:
        pages = [page for page in sorted(DOCS.rglob("*.md")) if "decisions" not in page.parts]
        for page in pages:
            print(f"reading grade {grade(page.read_text()):4.1f}  {page.relative_to(DOCS)}")


def setup(app: object) -> dict[str, bool]:
    app.connect("build-finished", _print)  # type: ignore[attr-defined]
    return {"parallel_read_safe": True}
