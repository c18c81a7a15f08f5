"""The bytes of one rank as a table, by kind and by place: the one form in which a plan is printed, stored and compared.

Frozen values; never plans. `MemoryPlan.as_table` makes one. `plan`, `finetune --dry-run`, `train`, `zo.plan` and a
report print its `lines`; `run.json` and every `--json` have it as `planned`.

[Note: one memory on a CPU]
Where the CPU computes, the device and cpu tiers are the same memory: one place, one budget. `cpu_memory` bounds what
both tiers hold. `device_memory` bounds the units in flight, which are a part of that: the two are never added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_offload.base.types import StateKind, Tier, format_bytes

GPU, MEMORY, NVME = "gpu", "memory", "nvme"
PLACES = (GPU, MEMORY, NVME)
STATE_ROWS = {StateKind.PARAMS: "parameters", StateKind.GRADS: "gradients", StateKind.OPTIMIZER: "optimizer"}
GENERATIONS, IN_FLIGHT, ACTIVATIONS = "generations", "in flight", "activations"
REFERENCE, PROGRAM = "reference", "program"
ROWS = (*STATE_ROWS.values(), GENERATIONS, IN_FLIGHT, ACTIVATIONS, REFERENCE, PROGRAM)
TIER_PLACES = {Tier.DEVICE: GPU, Tier.CPU: MEMORY, Tier.NVME: NVME}
_NOT_STATES = (ACTIVATIONS, REFERENCE, PROGRAM)
_WORDS = {GENERATIONS: "kept for a resume", IN_FLIGHT: "in use and on the way", PROGRAM: "Python and libraries"}
"""Rows whose names say too little."""

Row = Mapping[str, int]


def place_of(tier: Tier, *, shared_memory: bool) -> str:
    """See [Note: one memory on a CPU]."""
    return MEMORY if shared_memory and tier is Tier.DEVICE else TIER_PLACES[tier]


def by_place(sizes: Mapping[Tier, int], *, shared_memory: bool) -> dict[str, int]:
    """Bytes by tier, added up by place."""
    found: dict[str, int] = {}
    for tier, nbytes in sizes.items():
        place = place_of(tier, shared_memory=shared_memory)
        found[place] = found.get(place, 0) + nbytes
    return found


@dataclass(frozen=True)
class PlanTable:
    """Bytes of one rank."""

    rows: Mapping[str, Row]
    """By what they are (some of `ROWS`, in that order), and by place; rows of zeros are left out."""
    available: Row
    """By place: what all rows together may take. Places without bytes are left out."""

    @classmethod
    def of(cls, rows: Mapping[str, Row], available: Row) -> PlanTable:
        found = {
            name: {place: nbytes for place, nbytes in rows[name].items() if nbytes} for name in ROWS if name in rows
        }
        used = {place for row in found.values() for place in row}
        return cls(
            {name: row for name, row in found.items() if row},
            {place: available.get(place, 0) for place in PLACES if available.get(place) or place in used},
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PlanTable:
        """Of what `to_dict` gave, as a JSON file has it."""
        return cls(values["rows"], values["available"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values: "rows", their "total" and what is "available", in bytes by place."""
        rows = {name: dict(row) for name, row in self.rows.items()}
        return {"rows": rows, "total": self.total, "available": dict(self.available)}

    @property
    def total(self) -> dict[str, int]:
        """By place."""
        return {place: sum(row.get(place, 0) for row in self.rows.values()) for place in self.available}

    @property
    def states(self) -> dict[str, int]:
        """By place, of what tiers hold, generations and buffers included: what `zo.stats` measures."""
        rows = [row for name, row in self.rows.items() if name not in _NOT_STATES]
        return {place: sum(row.get(place, 0) for row in rows) for place in self.available}

    @property
    def has_program(self) -> bool:
        """True if it counts the process too: then its total is comparable with the process's resident set."""
        return PROGRAM in self.rows

    def cells(self) -> list[list[str]]:
        """As text: a head, the rows, the total and what is available."""
        rows = [*self.rows.items(), ("total", self.total), ("available", self.available)]
        body = [
            [name, *("" if place not in row else format_bytes(row[place]) for place in self.available)]
            for name, row in rows
        ]
        return [["", *self.available], *body]

    def lines(self, title: str = "") -> Iterator[str]:
        """As a text table."""
        head, *rows = self.cells()
        lines = list(table_lines([[title, *head[1:]], *rows], left=0))
        width = max(map(len, lines))
        for line, (name, *_) in zip(lines, [head, *rows], strict=True):
            yield f"{line:<{width}}  {_WORDS[name]}" if name in _WORDS else line


def table_lines(rows: Sequence[Sequence[str]], left: int | None = None) -> Iterator[str]:
    """Columns as wide as their widest cell, of which one is flush left."""
    widths = [max(9, *map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            f"{cell:<{width}}" if index == left else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield f"  {'  '.join(cells)}".rstrip()


def shortage(where: str, needed: int, available: int) -> str:
    """Of a place that has too little."""
    missing = format_bytes(needed - available)
    return f"{where}: needs {format_bytes(needed)}, {format_bytes(available)} available, {missing} missing"
