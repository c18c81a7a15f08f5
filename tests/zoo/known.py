"""`known.toml`: families that do not train here, and outcomes of checks that do not hold, each with its reason."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

PATH = Path(__file__).parent / "known.toml"


@dataclass(frozen=True)
class Reason:
    """Why some families differ in one thing."""

    check: str
    """Empty where the families do not train."""
    says: str
    """A part of the outcome."""
    whose: str
    reason: str
    families: tuple[str, ...]


@functools.cache
def reasons() -> tuple[Reason, ...]:
    tables = tomllib.loads(PATH.read_text())
    return tuple(
        Reason(each.get("check", ""), each["says"], each["whose"], each["reason"], tuple(each["families"]))
        for each in tables["reason"]
    )


def known(family: str, check: str = "") -> Reason | None:
    found = [each for each in reasons() if each.check == check and family in each.families]
    assert len(found) < 2, f"{family}, {check or 'training'}: {len(found)} reasons in {PATH.name}"
    return found[0] if found else None
