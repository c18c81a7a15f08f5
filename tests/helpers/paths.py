"""The paths of docs/ARCHITECTURE.md, and the calls that a program makes of the functions that they name.

In a path `Class.method` and `function()` are calls, in the order of their first times. A name in parentheses stands for
a call of other cases.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zero_offload

ROOT = Path(zero_offload.__file__).parent
PAGE = Path(__file__).resolve().parents[2] / "docs" / "ARCHITECTURE.md"
_CALL = re.compile(r"(?<![\w./])(?:([A-Z]\w*)\.([a-z_]\w*)|([a-z_]\w*)\(\))(?![\w.])")


def paths(page: str) -> dict[str, str]:
    """The text of each path, by its heading."""
    return dict(re.findall(r"^## ([^\n]*)\n\n(?:[^\n#`][^\n]*\n+)*?```\n(.*?)^```", page, re.MULTILINE | re.DOTALL))


def calls_in(path: str) -> list[str]:
    """The names of the calls of a path, in order."""
    while (shorter := re.sub(r"\((?!\))[^()]*(?:\(\)[^()]*)*\)", " ", path)) != path:
        path = shorter
    return [match[0] for match in _CALL.finditer(path)]


def named_in(path: str) -> list[str]:
    """The names of the calls, those in parentheses among them."""
    return [match[0] for match in _CALL.finditer(path)]


PATHS = paths(PAGE.read_text())


@functools.cache
def defined() -> dict[str, list[str]]:
    """The modules that define a class or a function, by its name; those that define its subclasses, by `(its name)`."""
    found: dict[str, list[str]] = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for name, bases in re.findall(r"^(?:class|def) (\w+)(?:\((.*)\):$)?", path.read_text(), re.MULTILINE):
            for each in (name, *(f"({base})" for base in re.findall(r"\w+", bases))):
                found.setdefault(each, []).append(module)
    return found


def places_of(name: str) -> list[tuple[Any, str]]:
    """The classes, or modules, that have a function of this name; raises AssertionError if there is none."""
    owner, _, attribute = name.removesuffix("()").rpartition(".")
    found = [(each, attribute) for each in kinds_of(owner) if attribute in vars(each)] if owner else []
    functions = [] if owner else [vars(importlib.import_module(home))[attribute] for home in homes_of(attribute)]
    for module in list(sys.modules.values()) if functions else ():
        if module.__name__.startswith("zero_offload"):  # each import of it, by whatever name
            found += [(module, key) for key, value in vars(module).items() if any(value is each for each in functions)]
    assert found, f"{name} is in docs/ARCHITECTURE.md and not in the package"
    return found


def homes_of(name: str) -> list[str]:
    """The modules that define this class or function."""
    return defined().get(name, [])


def kinds_of(name: str) -> list[type]:
    """The classes of this name, and all that extend them."""
    found: list[type] = []
    for home in homes_of(name):
        kind = getattr(importlib.import_module(home), name)
        for module in defined().get(f"({name})", []):
            importlib.import_module(module)
        found += [kind, *_subclasses(kind)]
    return found


def has_member(name: str) -> bool:
    """True if a class of the package has this method or attribute."""
    owner, _, attribute = name.partition(".")
    for home in homes_of(owner):
        source = (ROOT.parent / Path(*home.split("."))).with_suffix(".py").read_text()
        body = re.split(rf"^class {owner}\b", source, flags=re.MULTILINE)[1]
        body = re.split(r"^(?:class|def|@)\b", body, flags=re.MULTILINE)[0]
        if re.search(rf"^    (?:def )?{attribute}\b|\bself\.{attribute}\b", body, re.MULTILINE):
            return True
    return False


def _subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


@contextlib.contextmanager
def following(names: list[str]) -> Iterator[list[str]]:
    """Calls of these, on all threads, are added to the list that comes, as they begin."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in dict.fromkeys(names):
            for owner, attribute in places_of(name):
                given = vars(owner)[attribute]
                is_kind = isinstance(given, staticmethod | classmethod)
                told = _told(given.__func__ if is_kind else given, name, seen)
                patch.setattr(owner, attribute, type(given)(told) if is_kind else told)
        yield seen


def _told(function: Callable[..., Any], name: str, seen: list[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return function(*args, **kwargs)

    return told


def out_of_order(names: list[str], seen: list[str]) -> list[str]:
    """Where calls differ from a path; a name that stands in it twice is looked for behind the one before it."""
    found, at = [], -1
    for name in names:
        begin = at + 1 if names.count(name) > 1 else 0
        if name not in seen[begin:]:
            found.append(f"{name} is not called" + (" again" if name in seen else ""))
            continue
        place = seen.index(name, begin)
        if place < at:
            found.append(f"{name} is called before {seen[at]}")
        at = max(at, place)
    return found
