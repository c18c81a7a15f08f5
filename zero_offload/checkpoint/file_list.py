"""`run.json` names the files that a run may make, before it makes them, so that deleting goes by that list only. It
also names the manifests of its generations, once they are made, so that a resume knows when one is missing.

Owns that manifest and every deletion of a run's files. Never decides which generation is kept, and never deletes in a
directory that the run has not recorded as its own. The calls: `check_kind` and `check_strangers` before anything is
changed; `announce` before files are made. `note_committed` after a commit; `remove_all` for a run that is discarded.
`remove_manifests`, then `keep_only`, for remains of an earlier cut of the run, or of a start that broke off.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_offload.base.errors import ConfigError, IntegrityError, ZeroOffloadError
from zero_offload.base.types import Durability, HardwareProfile
from zero_offload.checkpoint.format import (
    BASE,
    CHECKPOINT_KIND,
    COMMITTED,
    GENERATION_NAMES,
    RUN_NAME,
    SWAP_NAME,
    Generation,
    rank_manifest_name,
    swap_file_name,
)
from zero_offload.storage.files.directory import RunDirectory, hold_directory, sync_path
from zero_offload.storage.files.manifest import read_manifest, write_manifest

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
            # Directories that a run is to be striped over now need not be there yet.
            directories = [stack.enter_context(RunDirectory.look(path)) for path in paths if path.exists()]
            names = _texts(read_manifest(directories[0], RUN_NAME) or {}, "files") if directories else []
        except ZeroOffloadError:
            return 0  # opening them for the run says what is wrong
        return sum(directory.measure(names) for directory in directories)


def count_reusable(hardware: HardwareProfile, paths: Sequence[Path]) -> HardwareProfile:
    """The machine as a run sees it that goes on, or starts anew, in these directories."""
    return replace(hardware, nvme_free_bytes=hardware.nvme_free_bytes + reusable_bytes(paths))


def _texts(run: Mapping[str, Any], what: str) -> list[str]:
    """The "files" or "directories" that a `run.json` names."""
    return [name for name in run.get(what, []) if isinstance(name, str)]


def _is_home(directory: RunDirectory) -> bool:
    """True if a run, or a checkpoint, has its manifests here."""
    return not ALWAYS.isdisjoint(directory.names())


class FileList:
    """The list of one run; `directories` are its own, and the first one has the manifests."""

    def __init__(self, directories: Sequence[RunDirectory], durability: Durability) -> None:
        self._directories = tuple(directories)
        self._home = directories[0]
        self._durability = durability
        self._said: dict[str, Any] = {}
        """The content of `run.json`; nothing where it is damaged or missing."""
        self._damage: IntegrityError | None = None

    def announce(self, run_id: str, names: Collection[str], others: Sequence[RunDirectory] = (), **facts: Any) -> None:
        """Write down which files there may be, and in which directories; `facts` are said of the run as a whole."""
        self._said = {
            "run_id": run_id,
            "files": sorted({*names, *ALWAYS}),
            "directories": [str(each.path) for each in (*self._directories, *others)],
            COMMITTED: self.committed,
            **{key: self._said[key] for key in (BASE,) if key in self._said},
        } | facts
        self.flush_paths()
        self._write()

    def _write(self) -> None:
        write_manifest(self._home, RUN_NAME, self._said, self._durability)

    @property
    def committed(self) -> list[str]:
        """Names of the generations' manifests that there are."""
        return list(self._said.get(COMMITTED, []))

    def note_committed(self, base: Mapping[str, Any] | None) -> None:
        """Record the generations that there are, once a commit is complete, and the base that the last one rests on.
        Warn of files that others have deleted meanwhile.

        Each name is made once, so later commits write nothing here. A checkpoint has one generation: without it, it is
        none.
        """
        named = {} if base is None else {BASE: {key: base[key] for key in ("folder", "fingerprint")}}
        is_new = self._said.pop(BASE, None) != named.get(BASE)
        self._said |= named
        if self._said.get("kind") == CHECKPOINT_KIND:
            if is_new:
                self._write()
            return
        present = self._home.names()
        if gone := [name for name in (RUN_NAME, *self.committed) if name not in present]:
            warnings.warn(
                f"{self._home.path}: others deleted {', '.join(gone)} while this run was using the directory. The "
                "generation that was committed just now is whole; leave the files of a run alone",
                stacklevel=2,
            )
        self.note_present(RUN_NAME in gone or is_new)

    def note_present(self, anew: bool = False) -> None:
        """Record the generations that there are.

        A name goes in after its manifest was made and out before that is deleted: others deleted what is in and not
        there.
        """
        present = self._home.names()
        committed = [name for name in GENERATION_NAMES if name in present]
        if anew or committed != self.committed:
            self._say(committed)

    def _say(self, committed: Sequence[str]) -> None:
        self._said[COMMITTED] = list(committed)
        self._write()

    def load(self) -> None:
        """Read what `run.json` says of an earlier run. Damage is an error only for callers that delete by it."""
        self._said, self._damage = {}, None
        try:
            self._said = read_manifest(self._home, RUN_NAME) or {}
        except IntegrityError as error:
            self._damage = error

    @property
    def run_id(self) -> str:
        """Of the earlier run; empty where none is known."""
        found = self._said.get("run_id")
        return found if isinstance(found, str) else ""

    def announced(self, what: str = "files") -> list[str]:
        """The texts of `run.json` under a key."""
        return _texts(self._said, what)

    def check_kind(self) -> None:
        """Raise ConfigError when the first directory is a checkpoint."""
        if self._said.get("kind") == CHECKPOINT_KIND:
            raise ConfigError(
                f"{self._home.path} holds a checkpoint, and those never change. Load it with "
                "zo.load_checkpoint(model, optimizer, path) and name another directory in nvme=; "
                f"to delete it: zero-offload clean {self._home.path}"
            )

    def check_strangers(self, generations: Iterable[Generation] = ()) -> None:
        """Raise ConfigError when a directory beside the first has files of another run: what is there is not ours.

        Of a swap file that is so unless `run.json`, or one of these generations, names the directory.
        """
        listed = self._recorded(generations)
        for directory in self._directories[1:]:
            strange = sorted(ALWAYS.intersection(directory.names()))
            if directory not in listed:
                strange += filter(SWAP_NAME.fullmatch, directory.names())
            if strange:
                raise ConfigError(
                    f"{directory.path} holds {strange[0]}, which the run in {self._home.path} has not written. Name "
                    "another directory in nvme=. If a run is striped over these, name the directory with its run.json "
                    "first. To delete the other run, where its run.json is in there, type: zero-offload clean "
                    f"{directory.path}. Without a run.json the file is left over: delete it by hand"
                )

    def _recorded(self, generations: Iterable[Generation]) -> list[RunDirectory]:
        """Those of this run's directories that the earlier one recorded as its own; the first has its manifests."""
        paths = {*map(Path, self.announced("directories"))}.union(
            *(map(Path, each.directories) for each in generations)
        )
        there = [path for path in paths if path.is_dir()]

        def is_recorded(path: Path) -> bool:
            return path in paths or any(map(path.samefile, there))

        return [each for each in self._directories if each is self._home or is_recorded(each.path)]

    def other_paths(self, found: Generation | None) -> list[Path]:
        """Directories of the earlier run, and of this generation's, that exist and are none of this run's."""
        own = [directory.path for directory in self._directories]
        paths: list[Path] = []
        written = found.directories if found is not None else []
        for home, *rest in filter(None, (written, self.announced("directories"))):
            # A copy of a run names the directories of its original, which are none of ours.
            if Path(home).is_dir() and own[0].samefile(home):
                paths += [path for path in map(Path, rest) if path.is_dir()]
        return [path for path in dict.fromkeys(paths) if not any(path.samefile(each) for each in own)]

    def remove_all(self) -> None:
        """Delete the files of an earlier run that its manifest names, in the directories that it names; `announce`
        follows.

        Raises IntegrityError when it is damaged, and LockError when another run has one of the directories.
        """
        self.load()
        if self._damage is not None:
            reason = str(self._damage).rpartition("; ")[0]
            raise IntegrityError(
                f"{reason}; existing='discard' deletes the files of an earlier run by this list, and deletes nothing "
                f"now. Resume once with existing='resume', which writes the list anew, or delete {self._home.path} by "
                "hand"
            ) from self._damage
        names = self.announced()
        with contextlib.ExitStack() as held:
            others = [held.enter_context(hold_directory(path)) for path in self.other_paths(None)]
            # The commit points go first: a crash in between must not leave them pointing at nothing. The list of
            # files stays until `announce` replaces it: unknown names would keep the next run from making its own.
            self._unlist(GENERATION_NAMES)
            self._home.remove(GENERATION_NAMES)
            self.flush_names()
            self._remove([name for name in names if name != RUN_NAME], [*others, *self._recorded(())])
            self._said = {}

    def _unlist(self, names: Collection[str]) -> None:
        """Take manifests that are about to be deleted off the list: a crash before that is over must not look like a
        loss."""
        if not set(self.committed).isdisjoint(names):
            self._say([name for name in self.committed if name not in names])

    def _remove(self, names: Sequence[str], directories: Sequence[RunDirectory]) -> None:
        """Delete these names, for good, before `run.json` names them no more. Other runs' homes are passed over."""
        for directory in directories:
            if directory is not self._home and _is_home(directory):
                continue
            directory.remove(names)
            if self._durability is Durability.COMMIT:
                directory.sync()

    def remove_manifests(self, names: Sequence[str]) -> None:
        """Delete generations' manifests, for good, before anything that they name is touched."""
        if names:
            self._unlist(names)
            self._home.remove(names)
            if self._durability is Durability.COMMIT:
                self._home.sync()

    def flush_names(self) -> None:
        """Names made and removed until now are on the medium when this returns, where power loss is promised."""
        if self._durability is Durability.COMMIT:
            for directory in self._directories:
                directory.sync()

    def flush_paths(self) -> None:
        """Flush the names that lead to the directories: power loss that takes one takes the commits in it."""
        if self._durability is Durability.COMMIT:
            for directory in self._directories:
                sync_path(directory)

    def keep_only(
        self, names: Collection[str], others: Sequence[RunDirectory], generations: Iterable[Generation]
    ) -> None:
        """Delete what is announced and not among these, where `run.json` or one of these generations says."""
        stale = sorted(set(self.announced()) - {*names, *ALWAYS})
        self._remove(stale, [*others, *self._recorded(generations)])
