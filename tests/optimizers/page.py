"""docs/OPTIMIZERS.md, made of the results that `python -m tests.optimizers` keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "OPTIMIZERS.md"
HEAD = """# Optimizers of others

After this page you know which optimizers `zo.unitwise` steps, what they keep, and what a step costs.

`python -m tests.optimizers` tries each class of ten packages and writes this page. How to use them: \
[optimizers](use/optimizers.md).

| column | says |
|---|---|
| grade | *elementwise* and *separable* classes step section by section. A *coupled* one needs `units="all"`. An \
*unproven* one is refused |
| bytes | of states, per element of a matrix of 4,096 by 4,096, by a step without memory; a dash where that fails |
| cpu, nvme | after each of five steps, or more until one moves, the weights of a small model have the bits of the \
plain optimizer: with everything in memory, and everything on a drive |
| cost | processor time of an update in memory over that of the plain optimizer, one thread. It is of four \
matrices of 1,536 by 1,536, of separable classes 768 by 768. [Larger ones](../benchmarks/results/README.md) cost less |

A number in the last column is that of a remark below.
"""
KINDS = ("elementwise", "separable", "coupled", "unproven", "error")


def load() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def text(results: dict[str, Any]) -> str:
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    rows = results["rows"]
    yield from HEAD.splitlines()
    yield ""
    yield f"Versions: {', '.join(_versions(rows))}. Tried on {results['date']} with Python {results['python']}."
    yield ""
    yield "| grade | classes | bits in memory | bits on a drive |"
    yield "|---|---|---|---|"
    for kind in KINDS:
        of_kind = [row for row in rows if row["grade"] == kind]
        counts = [
            f"{sum(row.get(tier) == 'yes' for row in of_kind)} of {tried}"
            if (tried := sum(tier in row and not _is_refused(row) for row in of_kind))
            else "–"
            for tier in ("cpu", "nvme")
        ]
        yield f"| {_word(kind)} | {len(of_kind)} | {counts[0]} | {counts[1]} |"
    remarks: dict[str, int] = {}
    for module in dict.fromkeys(row["module"] for row in rows):
        yield from ("", f"## {module}", "")
        yield "| class | grade | bytes | cpu | nvme | cost | |"
        yield "|---|---|---|---|---|---|---|"
        for row in rows:
            if row["module"] == module:
                yield _cells(row, remarks)
    yield from ("", "## Remarks", "", "| | |", "|---|---|")
    yield from (f"| {number} | {remark} |" for remark, number in remarks.items())
    yield from ("", "## Traps", "", TRAPS, "")
    yield "| an optimizer that couples parameters, or seems to | verdict |"
    yield "|---|---|"
    yield from (f"| {name} | {_escaped(verdict)} |" for name, verdict in results["traps"].items())


TRAPS = "The test of a class has to see these, which a short test takes for separable, or for coupled."


def _versions(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = {row["module"]: row["version"] for row in rows}
    return [f"{module} {version}" for module, version in found.items()]


def _is_refused(row: dict[str, Any]) -> bool:
    """True if no argument of `zo.unitwise` lets it step."""
    return str(row.get("cpu")).startswith(("NotByUnitsError", "ConfigError"))


def _word(kind: str) -> str:
    return "not built" if kind == "error" else kind


def _cells(row: dict[str, Any], remarks: dict[str, int]) -> str:
    def remark(text: str) -> str:
        return str(remarks.setdefault(_escaped(text), len(remarks) + 1))

    numbers = []
    if row["grade"] in ("coupled", "unproven", "error"):
        numbers.append(remark(row["reason"]))
    if row.get("beyond"):
        numbers.append(remark(f"beyond step {row['steps']}: {row['beyond']}"))
    if row.get("in_order"):
        numbers.append(remark("sections in the order of groups would have the bits of a joint step"))
    if row["model"] != "matrices, vectors, convolutions" and row["grade"] != "error":
        numbers.append(remark(f"of {row['model']}"))
    is_refused = _is_refused(row)
    cells = []
    for column in ("bytes", "cpu", "nvme", "cost"):
        value = None if is_refused else row.get(column)
        if isinstance(value, str) and value != "yes":
            numbers.append(remark(f"{'bytes' if column == 'bytes' else column}: {value}"))
            value = "–" if column in ("bytes", "cost") else "no"
        cells.append("–" if value is None else str(value))
    name = row["name"].removeprefix(f"{row['module']}.")
    return f"| {_escaped(name)} | {_word(row['grade'])} | {' | '.join(cells)} | {', '.join(numbers)} |"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
