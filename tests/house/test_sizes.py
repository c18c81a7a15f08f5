"""Files, functions, classes and constructors stay small enough to read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from zero_offload import errors

ROOT = Path(errors.__file__).parent
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
METHODS_MAX = 20
CONSTRUCTOR_ARGS_MAX = 6
MIRRORS_OF_TORCH = ("Adam", "AdamW", "Adagrad", "SGD", "TiledLinear")
"""Drop-in for a torch class: its constructor's arguments are not ours to choose."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def too_large(source: str) -> Iterator[str]:
    num_lines = len(source.splitlines())
    if num_lines > FILE_LINES_MAX:
        yield f"the file has {num_lines} lines, at most {FILE_LINES_MAX}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"{node.name} (line {node.lineno}) has {length} lines, at most {FUNCTION_LINES_MAX}"
        if isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, Function)]
            if len(methods) > METHODS_MAX:
                yield f"{node.name} has {len(methods)} methods, at most {METHODS_MAX}"
            for method in methods if node.name not in MIRRORS_OF_TORCH else ():
                if method.name == "__init__" and (count := _count_args(method)) > CONSTRUCTOR_ARGS_MAX:
                    yield f"{node.name}() takes {count} arguments, at most {CONSTRUCTOR_ARGS_MAX}"


def _count_args(function: Function) -> int:
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1  # less self


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    assert list(too_large(path.read_text())) == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\n" * 401, "401 lines"),
        ("def f():\n" + "    x = 1\n" * 70, "f (line 1) has 71 lines"),
        ("class C:\n" + "".join(f"    def f{i}(self): ...\n" for i in range(21)), "C has 21 methods"),
        ("class C:\n    def __init__(self, a, b, c, d, *, e, f, g): ...\n", "C() takes 7 arguments"),
    ],
)
def test_the_rule_finds_what_is_too_large(source: str, words: str) -> None:
    (found,) = too_large(source)
    assert words in found


def test_the_rule_allows_the_limits() -> None:
    function = "def f():\n" + "    x = 1\n" * 69
    methods = "".join(f"    def f{i}(self): ...\n" for i in range(19))
    constructor = "class C:\n    def __init__(self, a, b, c, d, e, f): ...\n"
    assert list(too_large(function + constructor + methods)) == []
    assert list(too_large("x = 1\n" * 400)) == []
