"""A file imports only from lower layers, or from its own folder."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from zero_offload import errors

ROOT = Path(errors.__file__).parent
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "abi",
        "errors",
        "types",
        "host",
        "ends",
        "problems",
        "config",
        "precision",
        "startup",
        "threads",
        "telemetry.events",
        "telemetry.spans",
        "telemetry.stats",
        "telemetry.breakdown",
    ),
    ("native", "accelerators", "plan"),
    ("kernels",),
    ("probe", "device", "device_memory", "memory", "rates", "storage"),
    ("shards",),
    ("runtime", "optim", "checkpoint"),
    (
        "deferred",
        "backward_updates",
        "commits",
        "inputs",
        "move_in",
        "offload",
        "run_files",
        "model_end",
        "model_runtime",
        "optimizer_states",
        "param_access",
        "param_places",
        "same_model",
        "step",
        "updates",
    ),
    (
        "__init__",
        "__main__",
        "api",
        "gathered",
        "integrations",
        "pretrained",
        "saving",
        "cli",
        "recipes",
        "nn",
        "telemetry.profile",
        "telemetry.report",
    ),
)
LAYER_OF = {part: layer for layer, parts in enumerate(LAYERS) for part in parts}
FAMILIES = (0, 6, 7)  # files of these layers may import each other: words, the tying object, faces
RUNTIME = (
    "ranks",
    "units",
    "saved",
    "life",
    "loans",
    "eviction",
    "memory_pool",
    "graphs",
    "room",
    "residency",
    "grads",
    "inputs",
    "scope",
    "session",
    "accumulate",
    "hooks",
)
"""The order inside of `runtime`, which is the largest part: each imports only from what stands before it."""
WORDS_ONLY = ("nn",)
"""Ordinary torch code, which must work without the rest: it knows the words of layer 0 and nothing else."""


def module_names() -> list[str]:
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py"))


def part_of(module: str) -> str | None:
    """The folder or file of the table that `module` belongs to; None for a folder's bare `__init__`."""
    if module in LAYER_OF:
        return module
    head = module.split(".")[0]
    return head if head in LAYER_OF else None


def imports_of(module: str, source: str, modules: frozenset[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} uses a relative import"
            if node.module is None or node.module.split(".")[0] != "zero_offload":
                continue
            base = node.module.removeprefix("zero_offload").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                is_module = inner in modules or f"{inner}.__init__" in modules
                yield inner if is_module else base or "__init__"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "zero_offload":
                    yield alias.name.removeprefix("zero_offload").removeprefix(".") or "__init__"


def patterns_of(row: str) -> Iterator[str]:
    """Of a row of the table in docs/ARCHITECTURE.md: names after a folder are in it; a folder alone is all of it."""
    folder, alone = "", False
    for name in [*re.findall(r"`([^`]+)`", row), "/"]:
        if name.endswith("/"):
            if alone:
                yield folder + "*"
            folder, alone = name, True
        elif "/" in name:
            yield name
        else:
            yield folder + name
            alone = False


def violations(module: str, source: str, modules: frozenset[str]) -> list[str]:
    part = part_of(module)
    if part is None:
        return [f"{module} belongs to no layer"] if source.strip() else []
    found = []
    for target in imports_of(module, source, modules):
        other = part_of(target)
        if other is None:
            found.append(f"{module} imports {target}, which belongs to no layer")
        elif other != part and not _may_import(part, LAYER_OF[other]):
            found.append(f"{module} (layer {LAYER_OF[part]}) imports {target} (layer {LAYER_OF[other]})")
    return found


def _may_import(part: str, other: int) -> bool:
    layer = LAYER_OF[part]
    if part in WORDS_ONLY:
        return other == 0
    # Siblings outside the families meet one layer up.
    return other < layer or (other == layer and layer in FAMILIES)


def source_of(module: str) -> str:
    return (ROOT / f"{module.replace('.', '/')}.py").read_text()


def out_of_order(module: str, source: str, modules: frozenset[str]) -> list[str]:
    """Parts of `runtime` that a file of it imports though they do not come before its own."""
    own = module.split(".")[1]
    before = RUNTIME[: RUNTIME.index(own)] if own in RUNTIME else ()
    targets = [target for target in imports_of(module, source, modules) if target.startswith("runtime.")]
    return [f"{module} imports {each}" for each in targets if each.split(".")[1] not in (own, *before)]


def test_imports_point_down() -> None:
    names = module_names()
    modules = frozenset(names)
    found = [problem for name in names for problem in violations(name, source_of(name), modules)]
    found += [
        problem
        for name in names
        if name.startswith("runtime.")
        for problem in out_of_order(name, source_of(name), modules)
    ]
    assert not found, "\n".join(found)


MODULES = frozenset({"types", "config", "storage.engine", "memory.pages", "shards.store", "plan.memory"})


FORBIDDEN = [
    ("storage.engine", "from zero_offload.memory.pages import x"),
    ("plan.memory", "from zero_offload.storage import engine"),
    ("memory.pages", "import zero_offload.shards.store"),
    ("types", "def f():\n    from zero_offload import offload"),
    ("optim.adam", "from zero_offload.runtime.units.unit import Unit"),
    ("runtime.units.unit", "import zero_offload as zo"),
    ("nn.cross_entropy", "from zero_offload.shards.store import ShardStore"),
    ("nn.cross_entropy", "from zero_offload.recipes import gpt"),
    ("stray", "x = 1"),
    ("stray.inner", "x = 1"),
]
LEGAL = [
    ("storage.engine", "from zero_offload.storage.directory import x\nfrom zero_offload.plan import memory"),
    ("config", "from zero_offload.types import Tier"),
    ("nn.cross_entropy", "from zero_offload.types import MIB"),
    ("__init__", "from zero_offload import nn as nn"),
    ("cli.train", "import zero_offload as zo\nfrom zero_offload.recipes import gpt"),
]


def test_the_rule_finds_what_it_forbids_and_nothing_else() -> None:
    assert [module for module, source in FORBIDDEN if not violations(module, source, MODULES)] == []
    assert [violations(module, source, MODULES) for module, source in LEGAL] == [[]] * len(LEGAL)
    assert out_of_order("runtime.units.unit", "from zero_offload.runtime.hooks import x", frozenset({"runtime.hooks"}))


def test_the_architecture_names_every_file() -> None:
    text = (ROOT.parent / "docs" / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| \d \| (.*?) \|", text, re.MULTILINE)
    patterns = [pattern for row in rows for pattern in patterns_of(row)]
    files = [str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.rglob("*.py")]
    files = [file for file in files if not file.endswith(("/__init__", "__main__"))]
    assert [file for file in files if not any(fnmatch(file, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(fnmatch(file, pattern) for file in files)] == []
