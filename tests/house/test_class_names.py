"""A class name stands once in the package, so that a name says which class is meant. An underscore in front of it does
not make it another name."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable

import pytest

from tests.house.test_layers import sources


def names_twice(sources: Iterable[str]) -> list[str]:
    """Names of classes that are defined more than once, without underscores in front."""
    names = Counter(
        node.name.lstrip("_")
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def test_class_names_are_unique() -> None:
    assert names_twice(sources().values()) == []


@pytest.mark.parametrize("second", ["class Place: ...", "class _Place: ...", "def make():\n    class Place: ..."])
def test_the_rule_finds_a_name_that_stands_twice(second: str) -> None:
    assert names_twice(["class Place: ...", second]) == ["Place"]


def test_the_rule_allows_different_names() -> None:
    assert names_twice(["class Place: ...\nclass Places: ...", "Place = 1"]) == []
