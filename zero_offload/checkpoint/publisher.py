"""Publishes generations of a run as checkpoints, on a thread of its own, while training goes on.

Owns when a generation is due, and which older checkpoints go. The generation is held from its commit until it has been
read: `Snapshots.hold` keeps its slots. A checkpoint is written, read back, made whole, and only then do older ones go.
Of models that are committed together the lead's publisher does that for all, one after the other. All are whole before
any older one goes, and none of them counts before (`published.find_newest`). A failure is a warning: training has its
own generations. Ranks talk over a group of their own. The calls, on the commit's thread of all ranks: `is_due` on the
first rank, then `begin`; `shutdown` at the end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero_offload.base.errors import ConfigError, RankError, ZeroOffloadError
from zero_offload.base.problems import warn_user
from zero_offload.base.threads import FirstError, Monitor
from zero_offload.base.types import parse_seconds
from zero_offload.checkpoint.format import Generation, generation_name
from zero_offload.checkpoint.joint import CommitPart
from zero_offload.checkpoint.published import (
    PublishedName,
    PublishedPartner,
    PublishPlace,
    finish,
    missing_beside,
    write_parts,
)
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


@dataclass(frozen=True)
class HeldGeneration:
    """A generation that is decided, and held until it is published."""

    publisher: Publisher
    number: int
    step: int
    aliases: Mapping[str, Sequence[str]]
    """Further names of tied parameters."""
    snapshots: Snapshots

    def release(self) -> None:
        self.publisher.note_idle()
        self.snapshots.release()


class Publisher:
    """The publishing of one model."""

    _here: weakref.WeakValueDictionary[str, Publisher] = weakref.WeakValueDictionary()
    """The publishers of this process, by their places."""

    def __init__(self, what: Publishing, ranks: CommitGroup, directories: Sequence[RunDirectory]) -> None:
        self._what, self._ranks, self._directories = what, ranks, directories
        self._step = 0
        """That of the last checkpoint, or with which the run began."""
        self._began_s = time.monotonic()
        # With a first error of its own: training goes on after one here.
        self._worker = Worker(FirstError(), "zero_offload-publish")
        self._changed = Monitor()
        self.is_busy = False
        """True while a generation is held."""
        self._here[what.place.absolute] = self

    @classmethod
    def check_free(cls, place: PublishPlace) -> None:
        """Raise ConfigError where another model publishes there: a start would find the newest of either."""
        if place.absolute in cls._here:
            raise ConfigError(
                f"publish={place.root} is where another model of this program publishes. Give each model a place of "
                f"its own, as publish={place.path_of('student')!r} and publish={place.path_of('average')!r}"
            )

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

    def begin(
        self, number: int, step: int, snapshots: Snapshots, aliases: Mapping[str, Sequence[str]], part: CommitPart
    ) -> None:
        """Generation `number` is decided, and its commit not over yet: publish it, with these further names of tied
        parameters. Other models of the commit do so too."""
        snapshots.hold()
        self._step, self._began_s, self.is_busy = step, time.monotonic(), True
        part.publish(HeldGeneration(self, number, step, aliases, snapshots), self._submit)

    def note_idle(self) -> None:
        """Nothing is held any more."""
        with self._changed.lock:
            self.is_busy = False
            self._changed.notify()

    def _submit(self, held: Sequence[HeldGeneration]) -> None:
        """Publish these, of this model and of those that were committed with it."""

        def publish() -> None:
            try:
                self._publish(held)
            except Exception as error:
                self._tell(held[0].step, error)
            finally:
                for each in held:
                    each.release()

        self._worker.submit(publish)

    def _tell(self, step: int, error: Exception) -> None:
        if self._ranks.rank and isinstance(error, ZeroOffloadError):
            return  # the first rank has it too
        warn_user(
            f"step {step} is not published: {error}. Training goes on, and its own generations are whole. The next try "
            f"comes in {self._what.every}{' steps' * isinstance(self._what.every, int)}: see that there is room in "
            f"publish={self._what.place.root}, or lower publish_keep={self._what.keep}"
        )

    def _publish(self, held: Sequence[HeldGeneration]) -> None:
        ranks, began_s = self._ranks, time.monotonic()
        texts = list[str]()
        with ranks.together(_WHAT):
            generations = [each.publisher._read(each.number) for each in held]
            if ranks.rank == 0:
                texts = [
                    str(each.publisher._make_room(generation))
                    for each, generation in zip(held, generations, strict=True)
                ]
        names = [found for each in json.loads(ranks.agree(json.dumps(texts))) if (found := PublishedName.parse(each))]
        places = [(each.publisher._what.place, name) for each, name in zip(held, names, strict=True)]
        try:
            for each, generation, mine in zip(held, generations, places, strict=True):
                partners = [PublishedPartner.of(mine[0], *other) for other in places if other is not mine]
                each.publisher._write(generation, mine[1], each.aliases, partners)
        except ZeroOffloadError as error:
            if ranks.rank == 0 and not isinstance(error, RankError):
                for place, name in places:
                    with contextlib.suppress(ZeroOffloadError):
                        place.remove(name)
            raise
        if ranks.rank == 0:
            where = " and ".join(place.path_of(name) for place, name in places)
            _log.info("%s published in %.1f s", where, time.monotonic() - began_s)
            # Not before all are whole: of models that were committed together, the older ones count until then.
            for each, (_, name) in zip(held, places, strict=True):
                each.publisher._remove_older(name)

    def _read(self, number: int) -> Generation:
        payload = read_manifest(self._directories[0], generation_name(number))
        assert payload is not None, f"generation {number} is held"
        return Generation.parse(payload, generation_name(number))

    def _write(
        self,
        generation: Generation,
        name: PublishedName,
        aliases: Mapping[str, Sequence[str]],
        partners: Sequence[PublishedPartner],
    ) -> None:
        """Write a whole checkpoint, and read it back. Collective."""
        ranks, place = self._ranks, self._what.place
        with contextlib.ExitStack() as cleanup, ranks.together(_WHAT):
            place.check_there(name)
            engine = open_engine(num_drives=len(self._directories))
            cleanup.callback(engine.close)
            column = ranks.column_of(generation.world_size)
            saved = SavedGeneration(generation, self._directories, engine, column=column)
            cleanup.callback(saved.close)
            cleanup.callback(engine.close)  # before its files
            mine = write_parts(place, name, saved, (ranks.rank, ranks.num_columns))
        written = ranks.gather(mine)
        with ranks.together(_WHAT):
            if ranks.rank == 0:
                finish(place, name, generation, written, aliases, partners)

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
        """Checkpoints of this run go that are older than those which it keeps, and which count."""
        place, left = self._what.place, self._what.keep
        for each in place.names():
            if each.run == newest.run and place.is_whole(each):
                if left <= 0:
                    place.remove(each)
                elif each == newest or _counts(place, each):
                    left -= 1

    def shutdown(self) -> None:
        """Wait for what is under way."""
        self._changed.wait_for(lambda: not self.is_busy)
        self._worker.shutdown()
        if self._here.get(where := self._what.place.absolute) is self:
            del self._here[where]


def _counts(place: PublishPlace, name: PublishedName) -> bool:
    """True if a start could go on from a whole checkpoint, as far as can be seen without its parts."""
    try:
        return not missing_beside(place, name)
    except ZeroOffloadError:
        return False
