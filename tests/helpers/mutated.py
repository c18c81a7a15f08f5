"""Folders of which one value is another: wrong types, signs, sizes and depths in every field of a JSON file."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEEP = "a value of very deep JSON"
"""Stands for text that no reader takes."""
GONE = "a field that is left out"
VALUES: tuple[Any, ...] = (
    *(GONE, DEEP, None, True, -1, 0, 1, 3, 1.5, 10**6, 10**15, 10**30, float("nan"), float("inf"), -float("inf")),
    *("", "x", "64", "\ud800", [], [1], ["x"], [None], {}, {"a": 1}, [[[]]]),
)
_NESTED_MAX = 4
"""Entries of one object or list that are changed, where it has many: a vocabulary is the same everywhere."""


@dataclass(frozen=True)
class Mutation:
    """A file of a folder in which one field has another value."""

    file: str
    path: tuple[Any, ...]
    value: Any

    def __str__(self) -> str:
        shown = self.value if self.value in (DEEP, GONE) else ascii(self.value)
        return f"{self.file}: {'.'.join(map(str, self.path))} = {shown:.40}"

    def text(self, whole: Any) -> str:
        """The file's, which has `whole` without the change."""
        words = copy.deepcopy(whole)
        holder = words
        for key in self.path[:-1]:
            holder = holder[key]
        if self.value is GONE:
            del holder[self.path[-1]]
        else:
            holder[self.path[-1]] = self.value
        return json.dumps(words).replace(json.dumps(DEEP), "[" * 3000 + "]" * 3000)

    def apply(self, source: Path, target: Path) -> Path:
        """A new folder with the files of `source`, of which this one is changed."""
        linked(source, target, without=self.file)
        (target / self.file).write_text(self.text(json.loads((source / self.file).read_text())))
        return target


def linked(source: Path, target: Path, without: str = "") -> Path:
    """A folder with links to the files of another."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in source.iterdir():
        if file.name != without:
            os.link(file, target / file.name)
    return target


def mutations(folder: Path, file: str) -> Iterator[Mutation]:
    for path in _places(json.loads((folder / file).read_text())):
        for value in VALUES:
            if path or value is not GONE:
                yield Mutation(file, path, value)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if len(keys) > 40:
        keys = keys[:_NESTED_MAX]
    for key in keys:
        yield from _places(value[key], (*path, key))
