"""The directories of each machine: which ranks keep their files in one place, and who looks after it.

A run whose machines have drives of their own has a home on each. There are a lock, a `run.json`, swap files and
manifests of the ranks there, and the manifest of the generation. Machines that see one directory share a home. That is
found out, not asked: the lock's file has a text that no two runs write. Homes of one run have one generation. A commit
is decided when the manifest of the generation is in all of them; see `GenerationKeeper`. The calls: `open_homes`, then
`Homes`.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_offload.base.errors import ConfigError, LockError, StorageError
from zero_offload.hardware.device import machine_name
from zero_offload.runtime.ranks.collectives import CommitGroup
from zero_offload.storage.files.directory import RunDirectory


@dataclass(frozen=True)
class Homes:
    """The home of each rank, by the first rank that keeps its files there."""

    ranks: CommitGroup
    firsts: tuple[int, ...]
    hosts: tuple[str, ...]
    """The machine of each rank, for messages."""
    paths: tuple[str, ...]
    """The first directory of each rank, for messages."""

    @classmethod
    def one(cls, ranks: CommitGroup, path: Path) -> Homes:
        """The same directory for all ranks."""
        size = ranks.world_size
        return cls(ranks, (0,) * size, ("",) * size, (str(path),) * size)

    @property
    def are_several(self) -> bool:
        return len(set(self.firsts)) > 1

    @property
    def is_first(self) -> bool:
        """True for the rank that writes what belongs to all ranks of this home."""
        return self.firsts[self.ranks.rank] == self.ranks.rank

    @property
    def members(self) -> list[int]:
        """The ranks of this home."""
        return self.members_of(self.firsts[self.ranks.rank])

    def members_of(self, first: int) -> list[int]:
        """The ranks of the home whose first rank this is."""
        return [rank for rank, each in enumerate(self.firsts) if each == first]

    @property
    def all_firsts(self) -> list[int]:
        """The first rank of each home, in the order of `gather`."""
        return sorted(set(self.firsts))

    def of_first(self, word: Any) -> Any:
        """The word, a value of JSON, of the first rank here. Collective over all homes."""
        return self.ranks.gather(word)[self.firsts[self.ranks.rank]]

    def gather(self, word: Any) -> list[tuple[str, Any]]:
        """The name of each home, which two may have, and the word of its first rank. Collective."""
        words = self.ranks.gather(word)
        return [(self.name(first), words[first]) for first in self.all_firsts]

    @property
    def own_name(self) -> str:
        return self.name(self.firsts[self.ranks.rank])

    def name(self, rank: int) -> str:
        return f"{self.paths[rank]} on {self.hosts[rank]}"

    def describe(self) -> list[dict[str, Any]]:
        """Each home, as manifests say it: where the files of other ranks are, and which ranks' are here."""
        return [
            {
                "host": self.hosts[first],
                "directory": self.paths[first],
                "ranks": [rank for rank, each in enumerate(self.firsts) if each == first],
                "is_here": first == self.firsts[self.ranks.rank],
            }
            for first in self.all_firsts
        ]


def open_homes(
    paths: Sequence[Path], ranks: CommitGroup, cleanup: contextlib.ExitStack
) -> tuple[list[RunDirectory], Homes]:
    """Open and lock the directories of a run on each machine. Collective.

    Raises ConfigError where ranks of one machine have different directories.
    """
    machines = ranks.gather([machine_name(), socket.gethostname(), str(paths[0])])
    leaders = [rank for rank, (name, *_) in enumerate(machines) if name not in [each for each, *_ in machines[:rank]]]
    leader = next(rank for rank in leaders if machines[rank][0] == machines[ranks.rank][0])
    opened: list[RunDirectory] = []
    texts: list[Any] = [None] * ranks.world_size
    """The locks of each rank that has opened its directories."""

    def take(wants: bool, open_one: Callable[[Path], RunDirectory]) -> None:
        with ranks.together():
            for path in paths if wants else ():
                opened.append(open_one(path))
                cleanup.callback(opened[-1].close)
        texts[:] = ranks.gather([each.holder.decode(errors="replace") for each in opened] or None)

    for each in leaders:
        is_mine = each == ranks.rank
        # Where another machine's rank has opened the same directories, its locks are to be seen.
        take(is_mine, RunDirectory.join if is_mine and _are_held(paths, texts) else RunDirectory.open)
    take(ranks.rank != leader, RunDirectory.join)
    with ranks.together():
        if texts[ranks.rank] != texts[leader]:
            theirs = [str(each) for each in paths]
            raise ConfigError(
                f"nvme={theirs} are not the directories of rank {leader} on this machine, which begin with "
                f"{machines[leader][2]}; give all ranks of a machine the same ones in the same order"
            )
    firsts = tuple(texts.index(text) for text in texts)
    _, hosts, directories = zip(*machines, strict=True)
    return opened, Homes(ranks, firsts, hosts, directories)


def _are_held(paths: Sequence[Path], texts: Sequence[Any]) -> bool:
    """True if ranks of this run on another machine have these directories open already."""
    try:
        with contextlib.ExitStack() as stack:
            seen = [stack.enter_context(RunDirectory.join(path)) for path in paths]
            return [each.holder.decode(errors="replace") for each in seen] in texts
    except (StorageError, ConfigError, LockError):
        return False
