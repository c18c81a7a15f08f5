"""Each third-party or delicate facility is used in its own place and nowhere else."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import zero_offload

ROOT = Path(zero_offload.__file__).parent

OWNERS: dict[str, frozenset[str]] = {
    "psutil": frozenset({"hardware/probe.py"}),
    "torch.cuda": frozenset({"hardware/accelerators.py"}),
    "matplotlib": frozenset({"runs/report/picture.py"}),
    "ctypes.CDLL": frozenset({"hardware/native.py", "storage/memory/heap.py", "storage/memory/arena.py"}),
    "ctypes.string_at": frozenset(
        {"storage/memory/access.py", "storage/memory/exchange.py"}
    ),  # objects of torch's, in C++
    "resource.getrusage": frozenset({"storage/memory/heap.py"}),  # page faults; its ru_maxrss is the launcher's too
    "numba": frozenset({"hardware/kernels/fallback/numba_words.py"}),
    "triton": frozenset(
        {
            "hardware/kernels/triton_sums.py",
            "hardware/kernels/triton_update.py",
        }
    ),
    "torch.distributed.checkpoint": frozenset({"standins/checkpointed.py", "checkpoint/published.py"}),
    "fsspec": frozenset({"checkpoint/published.py"}),
    "aiofiles": frozenset({"storage/files/aiofiles_engine.py"}),
}


def dotted_names(source: str) -> Iterator[str]:
    """Every imported or used dotted name, with import aliases resolved."""
    tree = ast.parse(source)
    aliases = aliases_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and (path := path_of(node)):
            yield resolved(path, aliases)


def aliases_of(tree: ast.AST) -> dict[str, str]:
    """The meaning of each imported name."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return aliases


def resolved(path: str, aliases: dict[str, str]) -> str:
    head, dot, rest = path.partition(".")
    return f"{aliases.get(head, head)}{dot}{rest}"


def path_of(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := path_of(node.value)):
        return f"{base}.{node.attr}"
    return None


@functools.cache
def names_in(source: str) -> frozenset[str]:
    return frozenset(dotted_names(source))


def uses(source: str, facility: str) -> bool:
    return any(name == facility or name.startswith(f"{facility}.") for name in names_in(source))


@pytest.mark.parametrize("facility", OWNERS)
def test_only_the_owners_use_it(facility: str) -> None:
    users = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if uses(path.read_text(), facility)}
    assert users == OWNERS[facility]


@pytest.mark.parametrize(
    ("source", "facility"),
    [
        ("import psutil", "psutil"),
        ("from psutil import Process", "psutil"),
        ("import torch\ntorch.cuda.is_available()", "torch.cuda"),
        ("import torch as t\nt.cuda.Stream()", "torch.cuda"),
        ("from torch import cuda", "torch.cuda"),
        ("from torch.cuda import Stream", "torch.cuda"),
        ("import ctypes as C\nC.CDLL(None)", "ctypes.CDLL"),
        ("from ctypes import CDLL", "ctypes.CDLL"),
        ("def f():\n    from matplotlib.figure import Figure", "matplotlib"),
    ],
)
def test_the_rule_finds_every_spelling(source: str, facility: str) -> None:
    assert uses(source, facility)


@pytest.mark.parametrize(
    "source",
    ["import torch\ntorch.cpu.Stream()", "# torch.cuda\nx = 'torch.cuda'", "import ctypes\nctypes.memmove"],
)
def test_the_rule_leaves_the_rest_alone(source: str) -> None:
    assert not any(uses(source, facility) for facility in OWNERS)
