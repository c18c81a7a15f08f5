"""The directories, engine, files and generations of one model, opened in the order that several ranks need.

The calls: `open`, and `create` once there is a store. To go on from a generation, `fill` with every shard in place,
then `finish_resume`. It commits a generation that was cut anew, and deletes the files that it replaces. `close` at the
end.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Container, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import CheckpointError
from zero_offload.base.events import Counters
from zero_offload.base.problems import warn_user
from zero_offload.base.threads import FirstError
from zero_offload.base.types import Durability, Existing, Tier
from zero_offload.checkpoint.base_record import base_sections
from zero_offload.checkpoint.format import Generation, StepRecord, swap_file_name, told_changes
from zero_offload.checkpoint.generation import GenerationKeeper
from zero_offload.checkpoint.homes import Homes, open_homes
from zero_offload.checkpoint.pieces import PieceExchange
from zero_offload.checkpoint.published import PublishedGeneration, PublishedName, PublishPlace, find_newest
from zero_offload.checkpoint.publisher import Publisher, Publishing
from zero_offload.checkpoint.saved_generation import SavedGeneration, take_directories
from zero_offload.checkpoint.spread import ShardsLackError, Spread
from zero_offload.checkpoint.verify import require_whole, verify
from zero_offload.hardware.probe import file_system_problem
from zero_offload.plan.layout import ShardLayout
from zero_offload.runtime.ranks.collectives import CommitGroup
from zero_offload.storage.files.base_files import BaseFiles
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.engine import EngineSettings, FileEngine
from zero_offload.storage.files.engines import PROBE_BYTES, WORTH_BYTES, open_engine, pick, shares
from zero_offload.storage.files.swap_file import SwapFile
from zero_offload.storage.memory.arena import Arena
from zero_offload.storage.shards.shard import Shard, planned_bytes
from zero_offload.storage.shards.store import ShardStore

_log = logging.getLogger("zero_offload")


class RunFiles:
    """The directories, engine, swap file and generations of one model; all None without a directory."""

    def __init__(self, base: BaseFiles) -> None:
        self.keeper: GenerationKeeper | None = None
        self.swap: SwapFile | None = None
        self.base = base
        """Files of others, which frozen shards rest in."""
        self.scratch: SwapFile | None = None
        """Activations: of no generation, and without a name."""
        self._reader: FileEngine | None = None
        self._saved: SavedGeneration | PublishedGeneration | None = None
        """The generation found, opened to be read."""
        self._earlier: SavedGeneration | PublishedGeneration | None = None
        """The generation found, if this run cuts its values anew."""
        self._published: PublishedGeneration | None = None
        """The generation found, if it was published."""
        self._others: list[RunDirectory] = []
        """Directories of the earlier run that are none of this one's; locked until `finish_resume` is over."""
        self._held = contextlib.ExitStack()
        self._opened = contextlib.ExitStack()
        """Closes all that is open, in the order that this needs."""

    @classmethod
    def open(
        cls,
        config: OffloadConfig,
        layout: ShardLayout,
        ranks: CommitGroup,
        errors: FirstError,
        counters: Counters,
    ) -> RunFiles:
        """An error on the way to or from a drive stops the run: `errors` gets it. `counters` get the bytes that move.
        Collective.
        """
        files = cls(BaseFiles(counters, errors.set, config.io_engine))
        files._opened.callback(files.base.close)
        try:
            if config.nvme_dirs:
                files._open(config, layout, ranks, errors, counters)
        except BaseException:
            files.close()
            raise
        return files

    def _open(
        self,
        config: OffloadConfig,
        layout: ShardLayout,
        ranks: CommitGroup,
        errors: FirstError,
        counters: Counters,
    ) -> None:
        directories, homes = open_homes(config.nvme_dirs, ranks, self._opened)
        if homes.is_first:
            _warn_of_file_systems(directories)
        durability = config.effective_durability
        if homes.are_several and durability is Durability.PROCESS:
            # A machine that starts again may have lost what it has not flushed, and with it the generation of all.
            durability = Durability.COMMIT
            if homes.is_first:
                _log.info("%s: drives of several machines: generations survive power loss", directories[0].path)
        keeper = GenerationKeeper(directories, layout, homes, durability)
        # Files are closed after the engine, which waits: a forward without a backward, or an error, leaves transfers
        # under way. The number of a closed descriptor soon stands for another file.
        self._opened.callback(self._close_files)
        place: PublishPlace | None = None
        # Which generation to go on from is looked up on each rank, then agreed on.
        if durability is not Durability.SCRATCH:
            with ranks.together():
                keeper.look(Existing(config.existing))
                place = _publish_place(config)
            # A generation that some rank names is one of the drives.
            looks = config.generation is None and config.existing != Existing.DISCARD.value
            may_look = place is not None and all(ranks.gather(looks))
            spread, lack = None, None
            try:
                spread = keeper.spread(config.generation)
            except ShardsLackError as error:
                if not may_look:
                    raise CheckpointError(str(error)) from None
                lack = error
            published = None
            if place is not None and may_look:
                published = _look_at(place, keeper, spread, lack, ranks)
            with ranks.together():
                keeper.choose(config.generation, spread, None if published is None else published.generation)
                if published is not None and keeper.found is published.generation:
                    self._published, keeper.published_as = published, published.where
            keeper.agree()
            keeper.gather_base()
            self.keeper = keeper
            if keeper.found is not None:
                self._meet(keeper.found, keeper, directories, homes)
            else:
                with ranks.together():
                    if homes.is_first:
                        keeper.start_run()
        moved_bytes = _state_bytes(layout)
        with ranks.together():
            settings = pick(config.io_engine, moved_bytes)
            engine = open_engine(settings, len(directories))
        self._opened.callback(engine.close)
        if homes.is_first:
            _log.info("%s: %s", directories[0].path, settings)
        weights = _shares(settings, directories, moved_bytes, homes)
        # Shares of a generation that was found stand: the places of its blocks follow from them.
        keeper.weights = keeper.weights or weights
        seed = zlib.crc32(keeper.run_id.encode())
        if Tier.NVME in config.activation_fractions:
            self.scratch = SwapFile(directories, "activations", engine, seed, weights, counters, errors.set)

        def on_error(error: Exception) -> None:
            keeper.explain(error)
            errors.set(error)

        if self.keeper is not None and place is not None:
            what = Publishing(place, config.publish_every, config.publish_keep)
            self.keeper.publisher = Publisher(what, ranks.another(), directories)
            self.keeper.publisher.start(0 if keeper.found is None else keeper.found.step)
            self._opened.callback(self.keeper.publisher.shutdown)
        name = swap_file_name(ranks.rank, keeper.edition)
        self.swap = SwapFile(directories, name, engine, seed, keeper.weights, counters, on_error)

    def _meet(
        self,
        found: Generation,
        keeper: GenerationKeeper,
        directories: list[RunDirectory],
        homes: Homes,
    ) -> None:
        """See that the generation found can be read, before anything is changed; announce what replaces it."""
        ranks = homes.ranks
        with ranks.together():
            paths = keeper.files.other_paths(found)
        self._opened.callback(self._held.close)
        self._others = take_directories(paths, homes, self._held)
        if self._published is not None:
            self._published.look_in(keeper.layout)
            self._saved = self._earlier = self._published
            with ranks.together():
                if homes.is_first:
                    keeper.prepare_recut(self._others)
            return
        if not (keeper.recuts or keeper.goes_back):
            return
        with ranks.together():
            places = _places_of(found, directories, self._others) if keeper.recuts else directories
            # With an engine of its own: io_uring keeps files that it has once known until it ends.
            self._reader = open_engine(num_drives=len(places))
            exchange = PieceExchange(homes, keeper.holders) if homes.are_several and keeper.recuts else None
            column = ranks.column_of(found.world_size)
            saved = self._saved = SavedGeneration(found, places, self._reader, keeper.explain, column, exchange)
            saved.look_in(keeper.layout)
            if keeper.goes_back:
                # Its slots are those that the newer generation's updates have not written over; or have.
                members = homes.members
                require_whole(verify(saved, keeper.ranks_here[members.index(ranks.rank) :: len(members)]))
            told = {} if exchange is None else saved.tell(exchange.mine())
        if exchange is not None:
            saved.hear(ranks.gather(told))
        if keeper.recuts:
            self._earlier = saved
            with ranks.together():
                if homes.is_first:
                    keeper.prepare_recut(self._others)

    @property
    def awaits(self) -> bool:
        """True if the generation found has parameters that the model has not got yet."""
        return self.keeper is not None and bool(self.keeper.awaited)

    @property
    def _lies_elsewhere(self) -> bool:
        return self._earlier is not None and self._earlier.lies_elsewhere

    @property
    def found(self) -> Generation | None:
        return None if self.keeper is None else self.keeper.found

    def lay_out(
        self, store: ShardStore, shards: Sequence[Shard], later: Container[int] = (), *, awaited: bool = True
    ) -> None:
        """Plan where these shards are in the files, unless the generation found says it; it has those `awaited`.

        Sections `later`, and those that the generation found has in a base, get their place when they are written.
        """
        if self.swap is not None and not (awaited and self.found is not None and self._earlier is None):
            is_found = awaited and self.found is not None and not self._lies_elsewhere
            in_base = base_sections(self.found) if is_found and self.found is not None else {}
            store.lay_out(shards, {each.layout.index for each in shards if each.layout.index in later} | set(in_base))

    def create(self, store: ShardStore, durability: Durability, later: Container[int] = ()) -> None:
        """Make the files as the store plans them, or open those of the generation found."""
        self.lay_out(store, store.shards, later)
        if self.swap is None:
            return
        if self.scratch is not None:
            self.scratch.create_scratch()
        if durability is Durability.SCRATCH:
            self.swap.create_scratch()
        elif self.found is not None and self._earlier is None:
            assert self.keeper is not None
            with self.keeper.explaining():
                self.swap.open_existing()
        else:
            self.swap.create()

    def fill(self, store: ShardStore, shards: Sequence[Shard], shard_index: int, ranks: CommitGroup) -> None:
        """Give these shards the values of the generation found; without one, nothing. Collective."""
        if self.found is not None:
            exchanging = nullcontext() if self._earlier is None else self._earlier.exchanging()
            with ranks.together(), exchanging:
                self._fill(store, shards, shard_index)

    def _fill(self, store: ShardStore, shards: Sequence[Shard], shard_index: int) -> None:
        assert self.keeper is not None
        if self._earlier is None:
            self.keeper.restore(shards, shard_index)
            return
        self._earlier.tell_conversion(self.keeper.layout)
        # Found by name, values of a base go to files of this run.
        resting = {} if self._lies_elsewhere else self._earlier.base_places(self.base)
        for shard in shards:
            if (spans := resting.get(shard.layout.index)) is not None:
                store.rest_in_base(shard, spans, shard_index)
                continue
            store.add_states(shard, self._earlier.states(shard.layout, shard_index))
            store.write_components(shard, self._earlier.source(shard.layout, shard_index))

    def finish_resume(self, ranks: CommitGroup) -> None:
        """Commit what was cut anew; then delete what this run does not lead on from. Collective.

        Nothing yet while the model lacks parameters of the generation found.
        """
        keeper, found = self.keeper, self.found
        if keeper is None or found is None or keeper.awaited:
            return
        if self._earlier is not None:
            same_ranks = found.world_size == ranks.world_size
            with ranks.together():
                keeper.rng = self._earlier.rng_of(ranks.rank) if same_ranks else None
                if same_ranks and not self._earlier.has(ranks.rank):
                    warn_user(
                        f"{found}: the files of rank {ranks.rank} are gone, and a twin's have its values. Its random "
                        "number generators are not restored"
                    )
            record = StepRecord.of(found, keeper.rng)
            keeper.commit(replace(record, resting=found.resting_in(keeper.layout)))
            if self._lies_elsewhere and found.changes and ranks.rank == 0:
                warn_user(f"{found} is of a model that had changed since it was offloaded: {told_changes(found)}")
        self._close_earlier()  # or the disk space of what is deleted now would not be free
        with ranks.together():
            if keeper.homes.is_first:
                keeper.tidy(self._others)
        self._others = []
        self._held.close()

    def close(self) -> None:
        """Wait for what is under way; close files and release locks. Closing twice is allowed."""
        self._opened.close()

    def _close_earlier(self) -> None:
        for part in (self._reader, self._saved):
            if part is not None:
                part.close()
        self._reader = self._saved = self._earlier = None

    def _close_files(self) -> None:
        self._close_earlier()
        for files in (self.scratch, self.swap):
            if files is not None:
                files.close()


def _publish_place(config: OffloadConfig) -> PublishPlace | None:
    """Where generations are published. Raises ConfigError."""
    if config.publish is None:
        return None
    place = PublishPlace.of(str(config.publish))
    Publisher.check_free(place)
    return place


def _look_at(
    place: PublishPlace,
    keeper: GenerationKeeper,
    spread: Spread | None,
    lack: ShardsLackError | None,
    ranks: CommitGroup,
) -> PublishedGeneration | None:
    """The newest published checkpoint, where drives have no generation that is whole: `lack` says why. Collective."""
    text = ""
    with ranks.together():
        kept, newest, missing = None if spread is None else spread.kept, None, ""
        if ranks.rank == 0 and kept is not None:
            newest = place.newest()
        elif ranks.rank == 0:
            newest, missing = find_newest(place)
        if missing and newest is None:
            raise CheckpointError(
                f"{'' if lack is None else f'{lack}. '}{missing}, and a start goes on from checkpoints of all models "
                "of a commit. Put it back; or begin anew, with another publish= or existing='discard'"
            )
        if missing:
            warn_user(f"{missing}: {newest} counts")
        if newest is not None and kept is not None and newest.is_of(kept.run_id) and newest.step > kept.step:
            warn_user(
                f"{place.path_of(newest)} is newer than {kept.text}, from which the run goes on: the newest that is on "
                "the drives here. Do other machines have more? To go on from the checkpoint begin in an empty directory"
            )
        text = "" if newest is None else str(newest)
    text = ranks.agree(text)
    name = PublishedName.parse(text)
    if name is None and lack is not None:
        raise CheckpointError(f"{lack}. publish={place.root} has no whole checkpoint either") from lack
    if name is None or spread is not None:
        return None
    with ranks.together():
        published = PublishedGeneration.open(place, name, ranks.column)
    if ranks.rank == 0 and keeper.resumes:
        why = "no generation is on the drives that are here" if lack is None else str(lack).partition(". Start the")[0]
        warn_user(f"{why}: the run goes on from {published.where}, step {published.generation.step}")
    return published


def _places_of(found: Generation, own: list[RunDirectory], others: list[RunDirectory]) -> list[RunDirectory]:
    """The directories that an earlier run was striped over, in its order."""
    places = [own[0]]
    for path in map(Path, found.directories[1:]):
        here = [each for each in (*own, *others) if path.is_dir() and path.samefile(each.path)]
        if not here:
            raise CheckpointError(
                f"{found} is striped over {len(found.directories)} directories, of which {path} cannot be found. "
                "Mount it where it was, or name all of them in nvme=, in their order"
            )
        places += here[:1]
    return places


def _state_bytes(layout: ShardLayout) -> int:
    """Bytes of one rank's shards, with all that an update changes: about what a step writes at most."""
    return sum(map(planned_bytes, layout.sections))


def _shares(
    settings: EngineSettings, directories: list[RunDirectory], moved_bytes: int, homes: Homes
) -> tuple[float, ...]:
    """The share of each directory in a stripe. One rank of each machine measures while the others wait: all there see
    the same drives. Files that may be deleted are deleted already.
    """
    found: tuple[float, ...] = ()
    with homes.ranks.together():
        if homes.is_first:
            scratch = None
            if len(directories) > 1 and moved_bytes >= WORTH_BYTES:
                scratch = Arena(0).allocate(PROBE_BYTES)
            found = shares(settings, directories, 2 * moved_bytes * len(homes.members), scratch)
    return tuple(homes.of_first(found))


def _warn_of_file_systems(directories: list[RunDirectory]) -> None:
    """They are used all the same: checksums, locks and the order of commits are kept there too."""
    for directory in directories:
        if problem := file_system_problem(directory.path):
            warn_user(f"{directory.path}: {'; '.join(problem)}")
