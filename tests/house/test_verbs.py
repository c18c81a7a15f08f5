"""ARCHITECTURE's table gives each verb one meaning: methods use its verbs, and no other word for the same act."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.test_layers import sources

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ARCHITECTURE.md"
INSTEAD = {
    "abandon": "cancel",
    "await": "wait",
    "bring": "fetch, upload or download",
    "give_back": "release",
    "settle": "finish",
}
"""By a word that the table has no place for: the verb of the table."""


def verbs() -> set[str]:
    table = PAGE.read_text().partition("## Verbs")[2].partition("\n## ")[0]
    return {verb for row in re.findall(r"^\| ([a-z_, ]+) \|", table, re.M) for verb in row.split(", ")} - {"verbs"}


def methods(source: str) -> Iterator[str]:
    for each in ast.walk(ast.parse(source)):
        if isinstance(each, ast.ClassDef):
            yield from (f"{each.name}.{node.name}" for node in each.body if isinstance(node, ast.FunctionDef))


def begins_with(method: str, verb: str) -> bool:
    return f"{method.partition('.')[2].lstrip('_')}_".startswith(f"{verb}_")


def other_words(source: str) -> Iterator[str]:
    """Methods that begin with a word of `INSTEAD`."""
    for method in methods(source):
        yield from (f"{method}: {verb}" for word, verb in INSTEAD.items() if begins_with(method, word))


def test_methods_have_no_second_word_for_an_act() -> None:
    assert {module: found for module, source in sources().items() if (found := list(other_words(source)))} == {}


def test_every_verb_of_the_table_is_in_use() -> None:
    names = [method for source in sources().values() for method in methods(source)]
    unused = {verb for verb in verbs() if not any(begins_with(name, verb) for name in names)}
    assert len(verbs()) > 20 and not unused


@pytest.mark.parametrize("name", ["await_writes", "_bring", "give_back"])
def test_the_rule_finds_a_second_word(name: str) -> None:
    assert list(other_words(f"class Part:\n    def {name}(self) -> None: ..."))


def test_the_rule_allows_words_that_begin_alike() -> None:
    assert not list(other_words("class Part:\n    def awaits_more(self) -> bool: ..."))
