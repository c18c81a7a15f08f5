"""Publishes generations of a run as checkpoints, on a thread of its own, while training goes on.

Owns when a generation is due, and which older checkpoints go. The generation is held from its commit until it has been
read: `Snapshots.hold` keeps its slots. A checkpoint is written, read back, made whole, and only then do older ones go.
A failure is a warning: training has its own generations. Ranks talk over a group of their own. The calls, on the
commit's thread of all ranks: `is_due` on the first rank, then `begin`; `shutdown` at the end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero_offload.base.errors import RankError, ZeroOffloadError
from zero_offload.base.problems import warn_user
from zero_offload.base.threads import FirstError
from zero_offload.base.types import parse_seconds
from zero_offload.checkpoint.format import Generation, generation_name
from zero_offload.checkpoint.published import PublishedName, PublishPlace, finish, write_parts
from zero_offload.checkpoint.saved_generation import SavedGeneration
from zero_offload.optim.worker import Worker
from zero_offload.runtime.ranks.collectives import CommitGroup
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.engines import open_engine
from zero_offload.storage.files.manifest import read_manifest
from zero_offload.storage.shards.snapshot import Snapshots

_log = logging.getLogger("zero_offload")
_WHAT = "a published checkpoint"


@dataclass(frozen=True)
class Publishing:
    """The wishes of a run: where, how often, and how many stay."""

    place: PublishPlace
    every: int | str
    """Optimizer steps, or a duration."""
    keep: int


class Publisher:
    """The publishing of one model."""

    def __init__(self, what: Publishing, ranks: CommitGroup, directories: Sequence[RunDirectory]) -> None:
        self._what, self._ranks, self._directories = what, ranks, directories
        self._step = 0
        """That of the last checkpoint, or with which the run began."""
        self._began_s = time.monotonic()
        # With a first error of its own: training goes on after one here.
        self._worker = Worker(FirstError(), "zero_offload-publish")
        self.is_busy = False
        """True while a generation is held."""

    def start(self, step: int) -> None:
        """The run goes on from here."""
        self._step = step

    def is_due(self, step: int) -> bool:
        every = self._what.every
        if self.is_busy:
            return False
        if isinstance(every, int):
            return step >= self._step + every
        return time.monotonic() - self._began_s >= parse_seconds(every)

    def begin(self, number: int, step: int, snapshots: Snapshots, aliases: Mapping[str, Sequence[str]]) -> None:
        """Generation `number` is decided, and its commit not over yet: publish it, with these further names of tied
        parameters."""
        self._step, self._began_s, self.is_busy = step, time.monotonic(), True
        snapshots.hold()

        def publish() -> None:
            try:
                self._publish(number, aliases)
            except Exception as error:
                self._tell(step, error)
            finally:
                snapshots.release()
                self.is_busy = False

        self._worker.submit(publish)

    def _tell(self, step: int, error: Exception) -> None:
        if self._ranks.rank and isinstance(error, ZeroOffloadError):
            return  # the first rank has it too
        warn_user(
            f"step {step} is not published: {error}. Training goes on, and its own generations are whole. The next try "
            f"comes in {self._what.every}{' steps' * isinstance(self._what.every, int)}: see that there is room in "
            f"publish={self._what.place.root}, or lower publish_keep={self._what.keep}"
        )

    def _publish(self, number: int, aliases: Mapping[str, Sequence[str]]) -> None:
        ranks, place, home = self._ranks, self._what.place, self._directories[0]
        began_s = time.monotonic()
        text = ""
        with ranks.together(_WHAT):
            payload = read_manifest(home, generation_name(number))
            assert payload is not None, f"generation {number} is held"
            generation = Generation.parse(payload, generation_name(number))
            if ranks.rank == 0:
                text = str(self._make_room(generation))
        name = PublishedName.parse(ranks.agree(text))
        assert name is not None
        try:
            with contextlib.ExitStack() as cleanup, ranks.together(_WHAT):
                place.check_there(name)
                engine = open_engine(num_drives=len(self._directories))
                cleanup.callback(engine.close)
                saved = SavedGeneration(generation, self._directories, engine)
                cleanup.callback(saved.close)
                cleanup.callback(engine.close)  # before its files
                mine = write_parts(place, name, saved, ranks.rank)
            written = ranks.gather(mine)
            with ranks.together(_WHAT):
                if ranks.rank == 0:
                    finish(place, name, generation, written, aliases)
        except ZeroOffloadError as error:
            if ranks.rank == 0 and not isinstance(error, RankError):
                with contextlib.suppress(ZeroOffloadError):
                    place.remove(name)
            raise
        if ranks.rank == 0:
            _log.info("%s published in %.1f s", place.path_of(name), time.monotonic() - began_s)
            self._remove_older(name)

    def _make_room(self, generation: Generation) -> PublishedName:
        """Delete what a run that ended has left half-written; make the directory of the next checkpoint."""
        place = self._what.place
        there = place.names()
        for each in there:
            if each.is_of(generation.run_id) and not place.is_whole(each):
                place.remove(each)
        name = PublishedName.of(1 + max((each.sequence for each in there), default=0), generation)
        place.make(name)
        return name

    def _remove_older(self, newest: PublishedName) -> None:
        """Checkpoints of this run go that are more than it keeps."""
        place = self._what.place
        own = [each for each in place.names() if each.run == newest.run and place.is_whole(each)]
        for each in own[self._what.keep :]:
            place.remove(each)

    def shutdown(self) -> None:
        """Wait for what is under way."""
        self._worker.shutdown()
