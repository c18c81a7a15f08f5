"""Claims of pages and their sources: `claims.toml` has them, and a marker in front of a block names one.

`<!-- claim: NAME -->` covers the block behind it, up to the next empty line. `<!-- figures: KIND -->` says that figures
of the block are not measured. Both are comments of HTML, which no page shows. The site writes below a block of a claim
when and where it was measured.

[Note: figures]
A figure is a number with a unit of time, rate, memory or ratio. In tables it is also a decimal fraction that fills a
cell, and a number whose row or column begins with a unit. Code, headings, and addresses of links have none.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "planned": "by the planner, whose words say so",
    "counted": "by arithmetic that the page shows or names",
    "set": "a setting, a definition, or a size in an example",
    "published": "by others, with the source",
}
"""Figures that are not measured, and where they are from."""
RECORDS = {"docs/TEST-ALL.md", "docs/STAGES.md", "docs/VERSIONS.md", "docs/ZOO.md", "docs/OPTIMIZERS.md"}
"""Pages to which claims lead: each says itself what ran, when and where."""

_UNIT = r"(?:ns|us|ms|s|seconds?|minutes?|hours?|[KMGT]i?B(?:/s)?|TFLOPS?(?:/s)?|tokens/s|%)(?![\w/])"
_FIGURE = re.compile(rf"(?<![\w.-])\d[\d,.]*(?: ?{_UNIT}|(?<=\.\d)\d* of\b| times (?:the|its|as|what|those)\b)")
_HEADING = re.compile(rf"(?<![\w.'-]){_UNIT}")
_CELL = re.compile(r"\d[\d,]*(?:\.\d+)?")
_MARKER = re.compile(r"<!-- (claim|figures): ([\w, -]+?) -->$")


@dataclass(frozen=True)
class Claim:
    """A statement that was measured or checked."""

    kind: str
    """"measured" or "checked"."""
    text: str
    script: str
    """The command that repeats it."""
    results: list[str]
    """Files, some with a chapter, that have the figures."""
    commit: str
    """Of the run; of the oldest records, the commit that brought them."""
    date: str
    machine: str
    paths: list[str]
    """Code that the claim is about."""

    def note(self, page: Path) -> str:
        """The line below a block, in Markdown."""
        record = os.path.relpath(ROOT / self.results[0], page.parent)
        where = f"{self.date} on {self.machine}, [commit {self.commit}]({record})"
        return f"{self.kind.capitalize()} {where}. Again: `{self.script}`"


@dataclass(frozen=True)
class Block:
    """Lines without an empty one between them, and the marker in front."""

    begin: int
    """Number of its first line, from 0 on."""
    lines: tuple[str, ...]
    marker: str
    """"claim", "figures" or ""."""
    names: tuple[str, ...]
    """Of claims, or the kind of figures."""

    def figures(self) -> list[str]:
        """[Note: figures] In the order of the page."""
        lines = [re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>", " ", line) for line in self.lines]
        if not lines[0].startswith("|"):
            return [match.group() for line in lines for match in _FIGURE.finditer(line)]
        found = []
        headings, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
        for row in [headings, *rows]:
            for heading, cell in zip(headings, row, strict=True):
                has_unit = row is not headings and (_HEADING.search(heading) or _HEADING.search(row[0]))
                number = _CELL.match(cell)
                if figures := [match.group() for match in _FIGURE.finditer(cell)]:
                    found += figures
                elif number and (has_unit or ("." in cell and number.group() == cell)):
                    found.append(cell)
        return found


def load(path: Path = ROOT / "claims.toml") -> dict[str, Claim]:
    """Claims by name. A field that is missing or unknown is a TypeError."""
    found: dict[str, Any] = tomllib.loads(path.read_text())
    return {
        name: Claim(kind, **{key: str(value) if key == "date" else value for key, value in claim.items()})
        for kind in ("measured", "checked")
        for name, claim in found[kind].items()
    }


def blocks(text: str) -> Iterator[Block]:
    """Blocks of a page. Code and headings are left out."""
    lines: list[str] = []
    begin, in_code = 0, False
    marker: tuple[str, tuple[str, ...]] = ("", ())
    for number, line in enumerate([*text.splitlines(), ""]):
        is_fence = line.lstrip().startswith("```")
        match = _MARKER.match(line)
        if in_code or is_fence or not line.strip() or line.startswith("#") or match:
            if lines or marker[0]:
                yield Block(begin, tuple(lines), *marker)
            lines, marker = [], ("", ())
            in_code ^= is_fence
        else:
            begin = begin if lines else number
            lines.append(line)
        if match:
            begin, marker = number + 1, (match[1], tuple(match[2].split(", ")))


def with_notes(text: str, page: Path) -> str:
    """The page with a note below each block of a claim."""
    claims = load()
    lines = text.splitlines()
    for block in reversed([*blocks(text)]):
        if block.marker == "claim":
            end = block.begin + len(block.lines)
            lines[end:end] = [line for name in block.names for line in ("", "{.claim}", claims[name].note(page))]
    return "\n".join(lines) + "\n"


def _read(app: Any, docname: str, content: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    app.env.note_dependency(str(ROOT / "claims.toml"), docname=docname)
    content[0] = with_notes(content[0], page)


def setup(app: Any) -> dict[str, bool]:
    # Before `links`, which moves links to pages outside of docs/.
    app.connect("source-read", _read, priority=400)
    return {"parallel_read_safe": True}
