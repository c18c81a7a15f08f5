"""Unit tests use what a module offers: names without an underscore. So the inside can change without them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parents[1] / "unit"
FOREIGN = frozenset({"torch", "os", "sys", "atexit", "numba", "FunctionIdentity"})
"""Modules and classes of others, whose underscores are not ours to choose."""
FOREIGN_NAMES = frozenset({"_version", "_cdata", "_replace", "_asdict", "_fields"})
"""Of tensors, storages and named tuples."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in FOREIGN_NAMES


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_names(source: str) -> Iterator[str]:
    """Private names of the package that a test reads, imports, or sets by `setattr`; its own classes' it may."""
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and root_of(node) in ("self", "cls")
    }
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Attribute) and root_of(node) not in FOREIGN:
            found = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zero_offload"):
            found = [alias.name for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("setattr")
            and root_of(node.args[0]) not in FOREIGN
        ):
            words = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            found = [str(word).rpartition(".")[2] for word in words]
        yield from (f"line {node.lineno}: {name}" for name in found if is_private(name) and name not in own)


def test_unit_tests_use_no_private_names() -> None:
    found = [
        f"{path.relative_to(UNIT)}, {text}"
        for path in sorted(UNIT.rglob("*.py"))
        for text in private_names(path.read_text())
    ]
    assert not found, "\n".join([f"{len(found)} private names; test by what the module offers:", *found])


@pytest.mark.parametrize(
    "source",
    [
        "store._shards",
        "owner(model)._updates.run",
        "from zero_offload.storage.files.directory import Directory, _OPEN",
        "patch.setattr(module, '_limit', 3)",
        "monkeypatch.setattr('zero_offload.hardware.probe._cores', 3)",
    ],
)
def test_the_rule_finds_what_it_forbids(source: str) -> None:
    assert list(private_names(source))


@pytest.mark.parametrize(
    "source",
    [
        "class Own:\n    def __init__(self):\n        self._kept = 1\n\nOwn()._kept",
        "tensor._version, storage._cdata, found._replace(peak=1), torch._C._x(), os._exit(0)",
        "from torch.utils._pytree import tree_leaves",
        "model.__class__",
    ],
)
def test_the_rule_allows_what_is_legal(source: str) -> None:
    assert not list(private_names(source))
