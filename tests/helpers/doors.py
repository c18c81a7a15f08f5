"""The table of doors in docs/COMPATIBILITY.md, made of the marks of tests that show them.

A door is a way into a model and out of it: a load, a save, and what was done between them. A test that shows one has
the mark `door(library, load=, between=, save=, outcome=, instead=)`, whose words are a row of the table. Marks are read
from sources, so that no library is imported. `python -m tests.helpers.doors` writes the table.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "COMPATIBILITY.md"
RIGHT, REFUSED, LOST = OUTCOMES = ("right", "refused", "lost")
"""How an outcome begins. Behind a colon may stand what is refused, or lost."""
BESIDE = {
    "compressed-tensors": "0.20.1",
    "deepspeed": "0.19.8",
    "gguf": "0.19.0",
    "gptqmodel": "7.7.0",
    "sentence-transformers": "6.2.0",
    "timm": "1.0.31",
}
"""Libraries that `make test-tools` does not install: their tests are skipped where they are not there."""
HEADING = "## Doors"
HEAD = f"""{HEADING}

Ways into a model and out of it: load, do nothing or what the third column says, save, and compare. A right door has \
all names and values. A refused one ends in an error that names the door that is right.

A lost one loses something in \
the library without an error, and its test fails when a version mends it. Calls of `zo` are ours. Versions are those \
of `constraints.txt`. Tests of {", ".join(f"{name} {version}" for name, version in BESIDE.items())} are skipped where \
these are not installed.
"""


@dataclass(frozen=True, order=True)
class Door:
    """A row of the table."""

    library: str
    """Whose calls it is about; several by commas."""
    load: str
    between: str
    save: str
    outcome: str
    instead: str
    """The door that is right, where this one is not."""
    test: str = ""


def doors() -> list[Door]:
    """Of all tests, in the order of the table."""
    return sorted(door for path in sorted((ROOT / "tests").rglob("test_*.py")) for door in _of(path))


def _of(path: Path) -> Iterator[Door]:
    source = path.read_text()
    for test in ast.walk(ast.parse(source)) if "mark.door(" in source else ():
        for mark in test.decorator_list if isinstance(test, ast.FunctionDef) else ():
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.door":
                words = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
                found = {field.name: words.pop(field.name, "") for field in fields(Door)[1:-1]}
                assert not words, f"{path}: {words} are no columns of the table"
                yield Door(ast.literal_eval(mark.args[0]), **found, test=f"{path.relative_to(ROOT)}::{test.name}")


def versions() -> dict[str, str]:
    """Of the libraries that doors may be about."""
    pins = re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    return dict(pins) | BESIDE


def kind_of(door: Door) -> str:
    return door.outcome.partition(":")[0]


def lines(found: Iterable[Door]) -> Iterator[str]:
    rows, pins = list(found), versions()
    yield HEAD
    counts = Counter(map(kind_of, rows))
    yield f"Of {len(rows)} doors " + ", ".join(f"{counts[kind]} are {kind}" for kind in OUTCOMES) + "."
    yield ""
    yield "| library | load by | between | save by | outcome | instead | test |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        named = ", ".join(f"{name} {pins[name]}" for name in row.library.split(", "))
        cells = (named, row.load, row.between, row.save, row.outcome, row.instead, f"`{row.test}`")
        yield f"| {' | '.join(cell or '–' for cell in cells)} |"


def page() -> str:
    """The page as it should be."""
    return PAGE.read_text().partition(f"\n{HEADING}\n")[0].rstrip("\n") + "\n\n" + "\n".join(lines(doors())) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
