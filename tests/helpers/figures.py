"""Values of claims' results, by the keys that `claims.toml` gives for each figure of a page.

A key leads into one file of the claim's results, part by part, with ` > ` between them:

* into JSON by names of fields; into rows by their `name`, their `against`, and the field;
* into a table of a page of results by the first cell of a row and the heading of a column: the cell's first number;
* by words of such a page, with `#` in the place of the number.

Of a block with several claims a key begins with the claim's name. A key that leads to two values is an error.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from docs.extensions.claims import ROOT, Block, Claim, blocks

_NUMBER = r"\d[\d,]*(?:\.\d+)?"


def keys_of(path: Path = ROOT / "claims.toml") -> dict[str, dict[str, list[str]]]:
    """By page and marker: keys of the figures behind such markers, in their order."""
    keys: dict[str, dict[str, list[str]]] = tomllib.loads(path.read_text())["figures"]
    return keys


def figures_of(text: str) -> dict[str, list[tuple[int, str]]]:
    """By marker: lines and figures of a page, in their order."""
    found: dict[str, list[tuple[int, str]]] = {}
    for block in blocks(text):
        if block.marker == "claim" and block.figures():
            found.setdefault(", ".join(block.names), []).extend((block.begin + 1, each) for each in block.figures())
    return found


def value_of(key: str, claims: dict[str, Claim], names: list[str]) -> float:
    parts = key.split(" > ")
    if len(names) > 1:
        assert parts[0] in names, f"{key} does not begin with a claim of {names}"
        names, parts = parts[:1], parts[1:]
    found = {value for result in claims[names[0]].results for value in _values(result, parts)}
    assert len(found) == 1, f"{key} leads to {sorted(found)} in the results of {names[0]}"
    return found.pop()


def is_as_rounded(figure: str, value: float) -> bool:
    """Whether a page's figure is the value, in the unit of the file or in GiB of MiB."""
    text = re.match(_NUMBER, figure)
    assert text is not None
    shown, half = _number(text[0]), 0.5 / 10 ** len(text[0].partition(".")[2])
    return any(abs(value / scale - shown) <= half + 1e-9 for scale in (1, 1024))


@cache
def chapter(result: str) -> str:
    """Text of a file of results, or of the chapter of a page that it names."""
    path, _, anchor = result.partition("#")
    text = (ROOT / path).read_text()
    if not anchor:
        return text
    parts = re.split(r"^(?=#+ )", text, flags=re.MULTILINE)
    titles = [re.sub(r"[^\w -]", "", part.split("\n")[0]).strip().lower().replace(" ", "-") for part in parts]
    return parts[titles.index(anchor)]


def _values(result: str, parts: list[str]) -> Iterator[float]:
    text = chapter(result)
    if result.endswith(".json"):
        yield from _at(json.loads(text), parts)
    elif len(parts) == 1:
        words = re.escape(" ".join(parts[0].split())).replace(r"\#", f"({_NUMBER})")
        yield from map(_number, re.findall(words, " ".join(text.split())) if "#" in parts[0] else ())
    else:
        for table in (block for block in blocks(text) if block.lines and block.lines[0].startswith("|")):
            yield from _at(_rows(table), parts)


def _at(value: Any, parts: list[str]) -> Iterator[float]:
    if isinstance(value, list):
        rows = [row for row in value if parts and parts[0] in (row.get("name"), row.get("against"))]
        for each in [rows] if rows else value:
            yield from _at(each, parts[1:] if rows else parts)
    elif isinstance(value, dict) and parts and parts[0] in value:
        yield from _at(value[parts[0]], parts[1:])
    elif not parts and isinstance(value, int | float):
        yield float(value)


def _rows(table: Block) -> dict[str, dict[str, float]]:
    """Numbers of a table by the first cell of the row and the heading of the column."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.lines]
    return {
        row[0]: {
            heading: _number(number[0])
            for heading, cell in zip(lines[0], row, strict=True)
            if (number := re.search(_NUMBER, cell))
        }
        for row in lines[2:]
    }


def _number(text: str) -> float:
    return float(text.replace(",", ""))
