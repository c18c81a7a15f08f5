"""Which generation the machines of a run go on from, and which of them have the files of each of its ranks.

Each home says what it has: its generations, and the digests of the ranks' manifests there (`HomeView`). A generation is
whole if the homes that are here have each of its shards, of some rank at least. Ranks of a hybrid mesh that hold the
same shard are twins. Where a home has ranks' files of a generation and not its manifest, that commit was cut. Pure:
words of homes in, a choice or an error out. The calls: `HomeView.of` on each home, then `choose_spread` of all views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_offload.base.alike import name_ranks
from zero_offload.base.errors import CheckpointError
from zero_offload.checkpoint.format import RANK_MANIFEST, History, rank_manifest_name, reading
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.manifest import recorded_digest


@dataclass(frozen=True)
class Kept:
    """A generation as one home has it."""

    number: int
    step: int
    run_id: str
    text: str
    num_ranks: int
    num_shards: int
    digests: Sequence[str]
    """Digests of the ranks' manifests."""
    ranks: Sequence[int]
    """The ranks whose files are here, by its record."""
    homes: Sequence[Mapping[str, Any]]
    """All homes that it was written in; none where that was one."""

    def twins(self, num_columns: int) -> Iterator[range]:
        """The ranks that hold each shard of each part of the model."""
        size = self.num_ranks // num_columns
        for first in range(0, self.num_ranks, size):
            for shard in range(self.num_shards):
                yield range(first + shard, first + size, self.num_shards)

    def place_of(self, rank: int) -> str:
        """The home of a rank when it was written."""
        found = (f"{each['directory']} on {each['host']}" for each in self.homes if rank in each["ranks"])
        return next(found, "a directory that it does not name")


@dataclass(frozen=True)
class HomeView:
    """The word of one home."""

    name: str
    kept: Mapping[str, Kept]
    """Its generations, by `Generation.identity`."""
    manifests: Mapping[str, str]
    """Digests of the ranks' manifests that are there, by name."""
    is_used: bool
    """True if generations were made there, whatever is left of them."""

    @classmethod
    def of(cls, name: str, home: RunDirectory, history: History, *, is_used: bool, is_alone: bool) -> HomeView:
        """`is_alone`: the run has no other home."""
        kept = {}
        for each in history.generations.values():
            with reading(str(each)):
                if each is not history.unfinished:
                    kept[each.identity] = Kept(
                        each.number, each.step, each.run_id, str(each), each.world_size, each.num_shards,
                        [str(entry["digest"]) for entry in each.rank_entries], each.ranks_in(()), each.homes,
                    )  # fmt: skip
        # Of a generation that was never anywhere else, all files are here.
        needs_digests = not is_alone or any(each.homes for each in kept.values())
        names = filter(RANK_MANIFEST.fullmatch, home.names() if needs_digests else ())
        return cls(name, kept, {each: recorded_digest(home, each) for each in names}, is_used)

    def has(self, rank: int, identity: str, kept: Kept) -> bool:
        """True if a rank's files of a generation are here, or should be."""
        mine = self.kept.get(identity)
        by_record = mine is not None and rank in mine.ranks
        return by_record or self.manifests.get(rank_manifest_name(rank, kept.number)) == kept.digests[rank]

    def __str__(self) -> str:
        numbers = sorted((each.number for each in self.kept.values()), reverse=True)
        return f"{self.name} has {', '.join(map(str, numbers)) or 'none'}"


@dataclass(frozen=True)
class Spread:
    """A generation that is whole on the drives that are here."""

    identity: str
    kept: Kept
    holders: Mapping[int, int]
    """For each rank whose files are here, the number of a home that has them."""


class ShardsLackError(CheckpointError):
    """No generation is whole on the drives that are here."""


def choose_spread(views: Sequence[HomeView], num_columns: int, number: int | None) -> Spread | None:
    """The newest generation that is whole, or that of this number; None where no home has such.

    Raises CheckpointError where there are generations and none of them is whole, and where homes are of several runs.
    """
    known = {identity: kept for view in views for identity, kept in view.kept.items()}
    runs = {kept.run_id: view for view in views for kept in view.kept.values()}
    if len(runs) > 1:
        raise CheckpointError(
            f"the machines have generations of {len(runs)} runs: {'; '.join(map(str, runs.values()))}. Name the "
            "directories of one run in nvme=, or clear the others: zero-offload clean DIR"
        )
    newest_first = sorted(known.items(), key=lambda each: -each[1].number)
    if number is not None:
        newest_first = [each for each in newest_first if each[1].number == number]
        if not newest_first:
            return None
    whole, lacking = list[Spread](), dict[str, list[int]]()
    for identity, kept in newest_first:
        holders: dict[int, int] = {}
        for rank in range(kept.num_ranks):
            holder = next((i for i, view in enumerate(views) if view.has(rank, identity, kept)), None)
            if holder is not None:
                holders[rank] = holder
        is_cut = any(identity not in views[holder].kept for holder in holders.values())
        missing = [rank for twins in kept.twins(num_columns) if not holders.keys() & set(twins) for rank in twins]
        if missing:
            lacking[identity] = missing
        elif not is_cut:
            whole.append(Spread(identity, kept, holders))
    if not whole and (lacking or any(view.is_used for view in views)):
        raise _nothing_is_whole(views, known, lacking, number)
    if whole[1:] and whole[0].kept.number == whole[1].kept.number:
        raise CheckpointError(
            f"machines have gone on apart from each other, and each has a generation {whole[0].kept.number} of its "
            f"own: {'; '.join(map(str, views))}. Keep one: on the others zero-offload clean DIR"
        )
    return whole[0] if whole else None


def _nothing_is_whole(
    views: Sequence[HomeView], known: Mapping[str, Kept], lacking: Mapping[str, Sequence[int]], number: int | None
) -> ShardsLackError:
    here = "; ".join(map(str, views))
    what = "no generation" if number is None else f"no generation {number}"
    identity = next(iter(lacking), None)
    if identity is None:
        lacks = ""
    else:
        kept, missing = known[identity], lacking[identity]
        places = dict.fromkeys(map(kept.place_of, missing))
        lacks = f"{kept.text} lacks the files of {name_ranks(missing)}, which were in {' and '.join(places)}. "
    return ShardsLackError(
        f"{what} is whole on the drives that are here. {lacks}{here}. Start the machine that has the rest too. Where "
        "its drive was exchanged or emptied, load a checkpoint into an empty directory; to start over, "
        "existing='discard'"
    )
