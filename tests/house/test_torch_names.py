"""Every name that the package takes from modules of torch exists in the torch that is installed.

Many are private, and a release may drop them: this says which ones are missing, all at once.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def names_in(source: str) -> Iterator[str]:
    """Dotted names that begin at an import of torch, as far as they are written out."""
    nodes = list(ast.walk(ast.parse(source)))
    known: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            known |= {each.asname or "torch": each.name if each.asname else "torch" for each in of_torch(node.names)}
            yield from (each.name for each in of_torch(node.names))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            yield from (f"{node.module}.{each.name}" for each in node.names)
    for node in nodes:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(target, ast.Name) and value is not None and (name := dotted(value, known)):
            known[target.id] = name
    yield from filter(None, (dotted(node, known) for node in nodes if isinstance(node, ast.Attribute)))


def of_torch(names: list[ast.alias]) -> list[ast.alias]:
    return [each for each in names if each.name.split(".")[0] == "torch"]


def dotted(node: ast.expr, known: Mapping[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join((known[node.id], *parts)) if parts and isinstance(node, ast.Name) and node.id in known else None


def exists(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_names_of_torch_exist() -> None:
    missing = {}
    for path in sorted((ROOT / "zero_offload").rglob("*.py")):
        if names := {name for name in names_in(path.read_text()) if not exists(name)}:
            missing[str(path.relative_to(ROOT))] = sorted(names)
    assert not missing


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._gone()",
        "from torch import _gone",
        "from torch.utils import _pytree as tree\ntree._gone",
        "import torch\nfrom typing import Any\nautograd: Any = torch._C._autograd\nautograd._gone()",
    ],
)
def test_a_missing_name_is_seen(source: str) -> None:
    assert [name for name in names_in(source) if not exists(name)]
