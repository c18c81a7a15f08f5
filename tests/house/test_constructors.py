"""A constructor takes few values: further ones come as one frozen value, such as `model.foundation.Foundation`.

An optimizer that torch has too takes torch's arguments.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import torch

from tests.house.test_layers import sources

MOST = 8


def long_constructors(source: str) -> Iterator[str]:
    """Classes of which `__init__` takes more than `MOST` beside `self`; a record's fields are the value themselves."""
    for each in ast.walk(ast.parse(source)):
        if isinstance(each, ast.ClassDef) and not hasattr(torch.optim, each.name):
            for method in each.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    args = method.args
                    if len(args.posonlyargs + args.args + args.kwonlyargs) - 1 > MOST:
                        yield each.name


def test_no_constructor_takes_many_values() -> None:
    assert {module: found for module, source in sources().items() if (found := list(long_constructors(source)))} == {}


@pytest.mark.parametrize(("star", "count"), [("", MOST), ("", MOST + 1), ("*, ", MOST + 1)])
def test_the_rule_counts_parameters(star: str, count: int) -> None:
    names = ", ".join(f"v{number}: int = 0" for number in range(count))
    source = f"class Many:\n    def __init__(self, {star}{names}) -> None: ..."
    assert list(long_constructors(source)) == ["Many"] * (count > MOST)
