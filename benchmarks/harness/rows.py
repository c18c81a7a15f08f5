"""The rows that every benchmark prints and writes: ours, theirs, their ratio, and what it is to reach."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def row(name: str, ours: float, unit: str, against: str, theirs: float, reach: float) -> Row:
    """One comparison; met when ours / theirs is at most `reach`."""
    made: Row = {"name": name, "ours": ours, "unit": unit, "against": against, "theirs": theirs}
    return made | {"ratio": ours / theirs, "reach": reach, "ok": ours / theirs <= reach}


def missing(name: str, ours: float, unit: str, against: str, reach: float) -> Row:
    """A comparison whose other side is not installed here."""
    made: Row = {"name": name, "ours": ours, "unit": unit, "against": against, "theirs": None}
    return made | {"ratio": None, "reach": reach, "ok": None}


def ungraded(name: str, ours: float, unit: str, against: str, theirs: float, reach: float) -> Row:
    """A comparison that was measured where its bar does not apply; `against` says why."""
    return row(name, ours, unit, against, theirs, reach) | {"ok": None}


def show(rows: Sequence[Row]) -> None:
    for each in rows:
        if each["theirs"] is None:
            print(f"{each['name']:<46} {each['ours']:9.3f} {each['unit']:<4} / not measured  [{each['against']}]")
            continue
        met = {True: "ok", False: "MISSED", None: "not graded"}[each["ok"]]
        verdict = f"{each['ratio']:.2f} (reach {each['reach']:g}) {met}"
        figures = f"{each['ours']:9.3f} {each['unit']:<4} / {each['theirs']:9.3f} = {verdict}"
        print(f"{each['name']:<46} {figures}  [{each['against']}]")


def write(rows: Sequence[Row], path: Path | None) -> None:
    """As JSON, where `--json` names a file."""
    if path is not None:
        path.write_text(json.dumps(rows, indent=1) + "\n")
