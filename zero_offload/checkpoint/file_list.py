"""`run.json`: which files a run may make, written before it makes them, so that deleting goes by that list only.

Owns that manifest and every deletion of a run's files. Never decides which generation is kept. The calls: `announce`
before files are made; `remove_all` for a run that is discarded; `remove_manifests`, then `keep_only`, for what an
earlier cut of the run, or a start that broke off, has left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from zero_offload.checkpoint.format import (
    GENERATION_NAMES,
    RUN_NAME,
    Generation,
    rank_manifest_name,
    swap_file_name,
)
from zero_offload.config import Durability
from zero_offload.errors import IntegrityError, ZeroOffloadError
from zero_offload.storage.directory import RunDirectory, sync_path
from zero_offload.storage.manifest import read_manifest, write_manifest

ALWAYS = frozenset({*GENERATION_NAMES, RUN_NAME})
"""Files that every run announces."""


def names_of(world_size: int, edition: int) -> list[str]:
    """Files that so many ranks make in one cut of the run."""
    ranks = range(world_size)
    manifests = [rank_manifest_name(rank, number) for rank in ranks for number in (0, 1)]
    return [swap_file_name(rank, edition) for rank in ranks] + manifests


def reusable_bytes(paths: Sequence[Path]) -> int:
    """Disk space that the files of an earlier run hold: a run that resumes or discards it needs no other."""
    with contextlib.ExitStack() as stack:
        try:
            directories = [stack.enter_context(RunDirectory.look(path)) for path in paths]
            names = _announced(directories[0]) if directories else []
        except ZeroOffloadError:
            return 0  # opening them for the run says what is wrong
        return sum(directory.measure(names) for directory in directories)


def _announced(home: RunDirectory, what: str = "files") -> list[str]:
    """The files, or the directories, of the run whose manifests are in `home`."""
    run = read_manifest(home, RUN_NAME) or {}
    return [name for name in run.get(what, []) if isinstance(name, str)]


class FileList:
    """The list of one run; `directories` are its own, and the first one has the manifests."""

    def __init__(self, directories: Sequence[RunDirectory], durability: Durability) -> None:
        self._directories = tuple(directories)
        self._home = directories[0]
        self._durability = durability

    def announce(self, run_id: str, names: Collection[str], others: Sequence[RunDirectory] = (), **facts: Any) -> None:
        """Write down which files there may be, and in which directories; `facts` are said of the run as a whole."""
        payload = {
            "run_id": run_id,
            "files": sorted({*names, *ALWAYS}),
            "directories": [str(each.path) for each in (*self._directories, *others)],
        }
        self.flush_paths()
        write_manifest(self._home, RUN_NAME, payload | facts, self._durability)

    def announced(self, what: str = "files") -> list[str]:
        """What `run.json` says now; nothing where it is damaged: a generation needs no list to be gone on from."""
        try:
            return _announced(self._home, what)
        except IntegrityError:
            return []

    def other_paths(self, found: Generation) -> list[Path]:
        """Directories of the run that wrote this generation, as far as they exist, that are none of this run's."""
        own = [directory.path for directory in self._directories]
        paths: list[Path] = []
        for home, *rest in filter(None, (found.directories, self.announced("directories"))):
            # A copy of a run names the directories of its original, which are none of ours.
            if Path(home).is_dir() and own[0].samefile(home):
                paths += [path for path in map(Path, rest) if path.is_dir()]
        return [path for path in dict.fromkeys(paths) if not any(path.samefile(each) for each in own)]

    def remove_all(self) -> None:
        """Delete the files of an earlier run that its manifest names."""
        names = _announced(self._home)
        # The commit points go first: a crash in between must not leave them pointing at nothing. The list of
        # files goes last: names that nobody knows any more would keep the next run from making its own.
        self._home.remove(GENERATION_NAMES)
        self.flush_names()
        for directory in self._directories:
            directory.remove(name for name in names if name != RUN_NAME)
        self.flush_names()
        self._home.remove([RUN_NAME])

    def remove_manifests(self, names: Sequence[str]) -> None:
        """Delete generations' manifests, for good, before anything that they name is touched."""
        if names:
            self._home.remove(names)
            if self._durability is Durability.COMMIT:
                self._home.sync()

    def flush_names(self) -> None:
        """Where power loss is promised: names made and removed until now are on the medium when this returns."""
        if self._durability is Durability.COMMIT:
            for directory in self._directories:
                directory.sync()

    def flush_paths(self) -> None:
        """The same of the names that lead to the directories: a commit in one that power loss takes would be none."""
        if self._durability is Durability.COMMIT:
            for directory in self._directories:
                sync_path(directory)

    def keep_only(self, names: Collection[str], others: Sequence[RunDirectory]) -> None:
        """Delete what is announced and not among these."""
        stale = sorted(set(self.announced()) - {*names, *ALWAYS})
        for directory in (*others, *self._directories):
            directory.remove(stale)
