"""Tables of docs/choose/hardware.md: the planner's figures for models on machines by name.

A section's first command has the machine; a row's first cell has the flags of the model. `python -m
tests.helpers.hardware_page` writes the other cells, and README's table, which has some of the rows.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zero_offload.base.types import GIB
from zero_offload.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "choose" / "hardware.md"
README = ROOT / "README.md"
HEAD = "| flags | trains | s a step | tokens/s | GPU, GiB | memory, GiB | drives, GiB | a drive lasts |"


@dataclass(frozen=True)
class Row:
    """A model on a machine."""

    machine: str
    """Heading of its section."""
    flags: str
    """Of the machine and the model."""
    model: str
    """Those of the model alone."""
    words: str

    def planned(self) -> str:
        """The row, by a plan that is made now."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = main(["plan", *self.flags.split(), "--json"])
        assert code == 0, f"{self.flags}: exit code {code}"
        plan = json.loads(printed.getvalue())
        total = plan["planned"]["total"]
        memory = " | ".join(f"{total.get(place, 0) / GIB:.0f}" for place in ("gpu", "memory", "nvme"))
        life = f"{plan['drive_life_days']:.0f} days" if plan["drive_life_days"] < 360 else "a year or more"
        speed = f"{plan['step_s']:.1f} | {plan['tokens_per_s']:,.0f}"
        return f"| `{self.model}` | {self.words} | {speed} | {memory} | {life} |"


def rows(text: str) -> Iterator[tuple[str, Row]]:
    """Each row of the page as it stands, and what it is made of."""
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = section.split("\n", 1)[0]
        for machine in re.findall(r"^zero-offload plan (--gpu .*?)(?: --model .*)?$", section, re.MULTILINE)[:1]:
            for line, model, words in re.findall(r"^(\| `(--model [^`]+)` \| ([^|]+) \| .*)$", section, re.MULTILINE):
                yield line, Row(title, f"{machine} {model}", model, words.strip())


def for_readme(text: str) -> str:
    """README's table, made of the page's: a row for each machine."""
    machines: dict[str, list[str]] = {}
    for line, row in rows(text):
        machines.setdefault(row.machine, []).append(f"{row.words}: {line.split('|')[4].strip()}")
    lines = [f"| {machine} | {'; '.join(found)} |" for machine, found in machines.items()]
    return "\n".join(["| machine | trains, tokens/s |", "|---|---|", *lines])


def write() -> None:
    found, rest = "", PAGE.read_text()
    for line, row in [*rows(rest)]:  # rows of two machines may read alike
        before, _, rest = rest.partition(line)
        found += before + row.planned()
    text = found + rest
    PAGE.write_text(text)
    table = re.compile(r"\| machine \| trains, tokens/s \|\n(?:\|.*\n)+")
    README.write_text(table.sub(lambda _: for_readme(text) + "\n", README.read_text()))


if __name__ == "__main__":
    write()
