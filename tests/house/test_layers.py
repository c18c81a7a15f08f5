"""The architecture in the package's listing. An entry imports from the entries above it, and no import is circular.
This holds between files, and between the parts of an entry, its files and folders.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import zero_offload

ROOT = Path(zero_offload.__file__).parent
ENTRIES = (
    "base",
    "hardware",
    "plan",
    "storage",
    "standins",
    "optim",
    "runtime",
    "checkpoint",
    "model",
    "nn",
    "integrations",
    "runs",
    "finetune",
    "cli",
)
"""Folders of the package, the lowest first; `nn` uses `base` alone. `__init__` is below those of `PROGRAMS`."""
SIBLINGS = {"optim", "runtime"}
"""Entries on one floor: neither imports the other."""
PROGRAMS = ("runs", "finetune", "cli")
"""Entries that use the public names."""


def sources() -> dict[str, str]:
    """The source of every module, by its dotted name within the package; a folder's `__init__` by the folder's name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path.read_text()
    return found


def imports_of(source: str, modules: Mapping[str, object]) -> Iterator[str]:
    """The modules of the package that a source imports, inside of functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            package, _, base = (node.module or "").partition(".")
            for alias in node.names if package == "zero_offload" else ():
                inner = f"{base}.{alias.name}" if base else alias.name
                yield inner if inner in modules else base or "__init__"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                package, _, base = alias.name.partition(".")
                if package == "zero_offload":
                    yield base or "__init__"


def problems(modules: Mapping[str, str]) -> list[str]:
    """Imports that point up, modules in no entry, and the first circles of files and of parts of an entry."""
    found, graph = [], {}
    parts: dict[str, set[str]] = {}
    for module, source in modules.items():
        graph[module] = {target for target in imports_of(source, modules) if target != module}
        entry = module.split(".")[0]
        if entry in ("__init__", "__main__"):
            continue
        if entry not in ENTRIES:
            found.append(f"{module} is in none of the entries {', '.join(ENTRIES)}")
            continue
        below = ("base",) if entry == "nn" else ENTRIES[: ENTRIES.index(entry)]
        below = tuple(each for each in below if not {entry, each} <= SIBLINGS)
        below += ("__init__",) if entry in PROGRAMS else ()
        for target in sorted(graph[module]):
            if target.startswith(f"{entry}.") and part_of(target) != part_of(module):
                parts.setdefault(part_of(module), set()).add(part_of(target))
            if target.split(".")[0] not in (entry, *below):
                found.append(f"{module} imports {target}; {entry} imports only from {', '.join(below) or 'itself'}")
    for title, each in (("imports", graph), ("parts", parts)):
        try:
            TopologicalSorter(each).prepare()
        except CycleError as error:
            found.append(f"a circle of {title}: " + " -> ".join(error.args[1]))
    return found


def part_of(module: str) -> str:
    """The file or folder of an entry that a module is in."""
    return ".".join(module.split(".")[:2])


def test_imports_point_down() -> None:
    assert problems(sources()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("storage.memory.arena", "from zero_offload.runtime.pass_tracker import PassTracker"),
        ("plan.memory", "from zero_offload.storage import memory"),
        ("base.types", "def f():\n    from zero_offload import offload"),
        ("optim.optimizers", "import zero_offload.runtime.pass_tracker"),
        ("runtime.pass_tracker", "from zero_offload.optim.optimizer import FusedOptimizer"),
        ("standins.guard", "from zero_offload.optim.optimizer import FusedOptimizer"),
        ("nn.cross_entropy", "from zero_offload.hardware.device import Device"),
        ("stray", "x = 1"),
        ("base.errors", "from zero_offload.base.config import x"),
        ("runs.progress", "from zero_offload.finetune.settings import FinetuneConfig"),
        ("finetune.fit.plan", "from zero_offload.finetune import run"),
    ],
)
def test_the_rule_finds_what_it_forbids(module: str, source: str) -> None:
    modules = {"base.config": "from zero_offload.base.errors import E", "base.errors": "", "storage.memory": ""}
    modules |= {"finetune.fit.job": "", "finetune.run": "from zero_offload.finetune.fit import job"}
    assert problems(modules) == []
    assert problems(modules | {module: source}) != []


@pytest.mark.parametrize("source", ["from zero_offload.base.errors import E", "from zero_offload.plan import memory"])
def test_the_rule_allows_what_it_should(source: str) -> None:
    assert problems({"base.errors": "", "plan.memory": "", "storage.shards.store": source}) == []


def test_programs_use_the_public_names() -> None:
    source = "import zero_offload as zo"
    assert problems({"__init__": "", "runs.trace": source}) == [] != problems({"__init__": "", "model.step": source})
