"""Few rows of a large matrix, in which every two values of two different factors meet."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

Row = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]


def all_rows(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Greedy: each row starts from an uncovered pair and takes, factor by factor, what covers the most."""
    uncovered: dict[Pair, None] = {}
    for a, b in itertools.combinations(factors, 2):
        for i, j in itertools.product(range(len(factors[a])), range(len(factors[b]))):
            uncovered[(a, i), (b, j)] = None
    rows = []
    while uncovered:
        chosen = dict(next(iter(uncovered)))
        for name, values in factors.items():
            if name not in chosen:
                chosen[name] = max(range(len(values)), key=lambda i: _new_pairs(name, i, chosen, factors, uncovered))
        for pair in itertools.combinations(((name, chosen[name]) for name in factors), 2):
            uncovered.pop(pair, None)
        rows.append({name: factors[name][chosen[name]] for name in factors})
    return rows


def full(*values: Any) -> Any:
    """A case of `make nightly` alone."""
    return pytest.param(*values, marks=pytest.mark.full)


def in_pairs(*, indirect: Sequence[str] = (), **factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by all rows, of which those that bring no new pair are marked `full`.

    `indirect`: factors that are parameters of fixtures of that name.
    """
    return _all_but(pairwise(factors), factors, indirect)


def in_turn(*, indirect: Sequence[str] = (), **factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by all rows, of which only as many are not marked `full` as the longest factor has values.

    Each value is in one of them. For factors that do not depend on each other. `indirect`: as above.
    """
    count = max(map(len, factors.values()))
    few: list[Row] = [{} for _ in range(count)]
    for shift, (name, values) in enumerate(factors.items()):
        for i, row in enumerate(few):
            # Factors of one length drift apart, or the same two values would always meet.
            row[name] = values[(i + shift * (i // len(values))) % len(values)]
    return _all_but(few, factors, indirect)


def _all_but(few: Sequence[Row], factors: Mapping[str, Sequence[Any]], indirect: Sequence[str]) -> pytest.MarkDecorator:
    cases = [pytest.param(*row.values()) if row in few else full(*row.values()) for row in all_rows(factors)]
    return pytest.mark.parametrize(tuple(factors), cases, indirect=indirect, ids=_name)


def _name(value: Any) -> str | None:
    """In the name of a case; None where pytest has a good one."""
    if isinstance(value, enum.Enum):
        return value.name
    return str(value) if isinstance(value, dict | tuple) else None


def _new_pairs(
    name: str, index: int, chosen: Mapping[str, int], factors: Mapping[str, Any], uncovered: Mapping[Pair, None]
) -> int:
    order = list(factors)
    count = 0
    for other, other_index in chosen.items():
        pair = ((name, index), (other, other_index))
        if order.index(other) < order.index(name):
            pair = (pair[1], pair[0])
        count += pair in uncovered
    return count


def label(row: Row) -> str:
    return " ".join(f"{name}={value}" for name, value in row.items())
