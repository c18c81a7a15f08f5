"""Commits and resumes the running generation: the swap files themselves, seen at one step.

Owns the order of a commit. First every write is complete, and flushed if asked for. Then come this rank's manifest, all
ranks' digests, and the global manifest by the first rank of each home. The commit point is its last one: only then the
older slots are free. `commit` runs on a thread of its own, behind forward and backward; everything else on the control
thread. Never deletes a file that no manifest of ours names. The calls: `look`, `spread`, `choose`, `agree` and
`gather_base` (create, resume or refuse); `start_run`, or `restore` one (where its files are cut anew: `prepare_recut`
and `commit`) and `tidy` what is left; `commit` per generation.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from zero_offload.base.alike import name_ranks
from zero_offload.base.errors import CheckpointError, ConfigError, IntegrityError
from zero_offload.base.spans import Track
from zero_offload.base.types import Durability, Existing
from zero_offload.checkpoint.base_record import (
    base_hashes,
    base_record,
    base_sections,
    open_base,
)
from zero_offload.checkpoint.file_list import ALWAYS, FileList, names_of
from zero_offload.checkpoint.format import (
    BASE,
    FORMAT,
    GENERATION_NAMES,
    HOMES,
    JOINT,
    Generation,
    History,
    StepRecord,
    check_divided_otherwise,
    check_fingerprint,
    check_found_by_name,
    fingerprint,
    generation_name,
    is_divided_otherwise,
    lies_elsewhere,
    rank_manifest_name,
    reading,
    sections_of,
    state_format_of,
    swap_file_name,
    thawed_as,
)
from zero_offload.checkpoint.homes import Homes
from zero_offload.checkpoint.joint import ALONE, CommitPart
from zero_offload.checkpoint.spread import HomeView, Spread, choose_spread
from zero_offload.plan.layout import ShardLayout
from zero_offload.storage.files.base_file import check_in_place
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.manifest import read_manifest, write_manifest
from zero_offload.storage.files.swap_file import Extent, SwapFile, extent_record
from zero_offload.storage.shards.shard import Component, Shard
from zero_offload.storage.shards.snapshot import Snapshot, Snapshots
from zero_offload.storage.shards.store import ShardStore

_log = logging.getLogger("zero_offload")


def _records(slot: Mapping[Component, Extent]) -> dict[str, Any]:
    return {component: extent_record(extent) for component, extent in slot.items()}


def read_rank_manifest(home: RunDirectory, generation: Generation, rank: int) -> dict[str, Any]:
    """The manifest that a rank wrote for a generation, verified."""
    with reading(str(home.path)):
        entry = generation.rank_entries[rank]
        payload = read_manifest(home, str(entry["manifest"]), str(entry["digest"]))
    if payload is None and generation.homes:
        raise _is_elsewhere(home, generation, [rank])
    if payload is None:
        raise IntegrityError(f"{home.path} lacks {entry['manifest']}, which {generation} names")
    return dict(payload)


def _is_elsewhere(home: RunDirectory, generation: Generation, ranks: Sequence[int]) -> CheckpointError:
    with reading(str(generation)):
        places = [f"{name_ranks(each['ranks'])} in {each['directory']} on {each['host']}" for each in generation.homes]
    return CheckpointError(
        f"{home.path} lacks the files of {name_ranks(ranks)}: {generation} is on drives of several machines, "
        f"{', '.join(places)}. A run goes on from there with all of them, in any order, and each with its directory in "
        "nvme=. To read it on one machine, copy the files of all into one directory"
    )


def stripe_weights_of(found: Generation, num_directories: int) -> tuple[float, ...]:
    """The directories' shares in a generation; empty where they are not known, which one alone need not be."""
    weights = found.payload.get("weights")
    valid = isinstance(weights, list) and len(weights) == num_directories
    if valid and all(type(weight) is float and 0 <= weight <= 1 for weight in weights or ()):
        return tuple(weights or ())
    return (1.0,) if num_directories == 1 else ()


class Publishes(Protocol):
    """Publishes generations beside training; see `checkpoint/publisher.py`."""

    is_busy: bool

    def is_due(self, step: int) -> bool: ...

    def begin(
        self, number: int, step: int, snapshots: Snapshots, aliases: Mapping[str, Sequence[str]], part: CommitPart
    ) -> None: ...

    def start(self, step: int) -> None: ...

    def shutdown(self) -> None: ...


class GenerationKeeper:
    """The generations of one run in its directories."""

    def __init__(
        self,
        directories: Sequence[RunDirectory],
        layout: ShardLayout,
        homes: Homes,
        durability: Durability,
    ) -> None:
        self._directories = tuple(directories)
        self.layout = layout
        self.homes = homes
        self._ranks = homes.ranks
        self._durability = durability
        self.files = FileList(directories, durability)
        self._store: ShardStore | None = None
        self._swap: SwapFile | None = None
        self._number = 0
        self._existing: Existing | None = None
        self._history: History | None = None
        self._calls: list[int] = []
        """How many sections there were before each further call of zo.offload."""
        self._has_changed = False
        """True if the model has lost or renamed parameters since the generation found."""
        self.lies_elsewhere = False
        """True if the generation found has parameters in other places than the model."""
        self.goes_back = False
        """True if something in the directories may be newer than the generation found."""
        self.edition = 0
        """How often the run was cut anew; names its swap files."""
        self.run_id = uuid.uuid4().hex
        """Seeds the checksums; ranks agree on one before they allocate."""
        self.found: Generation | None = None
        """The generation to resume from, if there is one."""
        self.weights: tuple[float, ...] = ()
        """The directories' shares, which say where blocks lie; a generation that was found has its own."""
        self.recuts = False
        """True if that was cut for other ranks or directories than these."""
        self.holders: dict[int, int] = {}
        """For each rank of it whose files are here, the first rank of a home that has them."""
        self._elsewhere: Generation | None = None
        """The generation found, as another home has it."""
        self.publisher: Publishes | None = None
        """Where generations are published."""
        self.published_as = ""
        """The checkpoint that the generation found was published as; empty where drives had it."""
        self._base_parts: list[Any] = []
        """Of each rank's manifest in it, the base's part."""
        self.rng: dict[str, Any] | None = None
        """This rank's random number generators in it; None where it has none for this rank."""

    @property
    def _home(self) -> RunDirectory:
        """Where the manifests are."""
        return self._directories[0]

    @property
    def resumes(self) -> bool:
        """True if the run goes on from what there is."""
        return self._existing is Existing.RESUME

    def look(self, existing: Existing) -> None:
        """See what the directory holds. Raises ConfigError when it may not be used."""
        self._existing = existing
        self.files.load()
        self.files.check_kind()
        if existing is Existing.DISCARD:
            return self.files.check_strangers()  # else whatever it holds, damaged or not
        self._history = History.read(self._home)

    def spread(self, number: int | None) -> Spread | None:
        """The generation to go on from, the newest or that of this number, and which homes have its files. None where
        there is none, or a machine discards what it has. Collective.

        A commit that was cut between its homes left a generation in some of them, whose number was used again perhaps.
        So generations are one by what they consist of; see `choose_spread`. Raises CheckpointError where there are some
        and none is whole, and IntegrityError where a manifest is damaged: that one may be the newest.
        """
        history, homes = self._history, self.homes
        mine: HomeView | None = None
        with self._ranks.together():
            if history is not None:
                if number is None:
                    history.check()
                is_used = homes.are_several and bool(history.damaged or self.files.committed)
                mine = HomeView.of(homes.own_name, self._home, history, is_used=is_used, is_alone=not homes.are_several)
        # The same words on all ranks, so the same choice and the same errors.
        found = [view for _, view in homes.gather(mine) if view is not None]
        if 0 < len(found) < len(homes.all_firsts):
            raise CheckpointError(
                f"existing='discard' on some machines, and on others not: {'; '.join(map(str, found))}. Give all "
                "ranks the same existing="
            )
        spread = choose_spread(found, self._ranks.num_columns, number)
        if spread is None:
            return None
        self.holders = {rank: homes.all_firsts[home] for rank, home in spread.holders.items()}
        for view in found:
            left = max((kept.number for kept in view.kept.values()), default=0)
            if spread.identity not in view.kept and left and homes.is_first and view.name == homes.own_name:
                _log.info("%s; the run goes on from %s", view, spread.kept.text)
        self._elsewhere = None
        if any(spread.identity not in view.kept for view in found):
            source = self.holders[min(spread.holders)]
            own = self._own(spread)
            text = json.dumps(None if own is None else dict(own.payload))
            payload = json.loads(self._ranks.agree(text, source))
            # Directories of another machine are none of this one's, whatever they are called.
            self._elsewhere = Generation.parse(payload | {"directories": []}, spread.kept.text)
        return spread

    def _own(self, spread: Spread) -> Generation | None:
        """The generation chosen, as this home has it."""
        history = self._history
        found = () if history is None else history.generations.values()
        return next((each for each in found if each.identity == spread.identity), None)

    def choose(self, number: int | None, spread: Spread | None, published: Generation | None = None) -> None:
        """Go on from the generation that `spread` gave, or else from a published one; `number` is that which the user
        has named.

        Raises ConfigError, CheckpointError or IntegrityError when it may not be used.
        """
        if self._history is None:
            return None
        own = None if spread is None else self._own(spread)
        found = own or (self._elsewhere if spread is not None else None)
        if found is None and number is not None:
            self._history.choose(number)  # which raises
        found = found or published
        if found is None:
            # It goes on with the run that is there, if only by name: others may have been committed with it.
            self.run_id = self.files.run_id or self.run_id
            return self.files.check_strangers()
        if self._existing is Existing.REFUSE:
            where = str(self._home.path)
            if own is None:
                where = "another machine" if spread is not None else "publish="
            raise ConfigError(
                f"{where} holds a generation: step {found.step}, committed {found.committed_at}. "
                "Go on with existing='resume', overwrite it with existing='discard', or use another directory"
            )
        with reading(str(self._home.path)):
            self.layout = thawed_as(found, self.layout)
            is_divided_so = found is not published or not is_divided_otherwise(found, self.layout)
            self.lies_elsewhere = not is_divided_so or lies_elsewhere(found, self.layout)
            if not is_divided_so:
                check_divided_otherwise(found, self.layout)
            elif self.lies_elsewhere:
                check_found_by_name(found, self.layout, str(self._home.path))
            else:
                check_fingerprint(found.payload.get("params"), self.layout, str(self._home.path), found.calls)
        if found is not published and found.world_size % self._ranks.num_columns:
            raise CheckpointError(
                f"{self._home.path} was written by {found.world_size} ranks, which do not hold the model in "
                f"{self._ranks.num_columns} parts, as this run's do. Use the same number of tensor-parallel ranks"
            )
        self.found, self.run_id, self.edition, self._number = found, found.run_id, found.edition, found.number
        self.goes_back = own is not None and not self._history.is_newest(found)
        self.recuts = self.holders.get(self._ranks.rank) != self._here or self._is_cut_otherwise(found)
        if self.recuts:
            here = self._history.generations.values()
            self.files.check_strangers(here)
            self.edition = 1 + max(each.edition for each in (found, *here))
        else:
            self.weights = stripe_weights_of(found, len(self._directories))

    @property
    def _here(self) -> int:
        """The first rank of this home."""
        return self.homes.firsts[self._ranks.rank]

    @property
    def ranks_here(self) -> list[int]:
        """The ranks of the generation found whose files this home has."""
        return [rank for rank, first in self.holders.items() if first == self._here]

    def _is_cut_otherwise(self, found: Generation) -> bool:
        if self.lies_elsewhere:
            return True
        if found.payload.get("format") != FORMAT or state_format_of(found) is not self.layout.state_format:
            return True
        if (found.world_size, found.num_shards) != (self._ranks.world_size, self.layout.num_shards):
            return True
        if len(found.directories) != len(self._directories) or not stripe_weights_of(found, len(self._directories)):
            return True
        # With other paths it may have been moved, or a drive replaced by another: which directory has the files?
        for place, path in enumerate(map(Path, found.directories)):
            directory = self._directories[place]
            if path == directory.path or not path.is_dir():
                continue
            in_other_order = any(path.samefile(each.path) for each in self._directories if each is not directory)
            if in_other_order or swap_file_name(0, found.edition) not in directory.names():
                return True
        return False

    @property
    def awaited(self) -> list[str]:
        """Parameters of the generation found that the model has not got yet: a further zo.offload adopts them."""
        if self.found is None or self._number != self.found.number or self._has_changed or self.lies_elsewhere:
            return []
        return self.found.names[sum(len(section.params) for section in self.layout.sections) :]

    def check_growth(self, layout: ShardLayout) -> ShardLayout:
        """The layout as a generation that awaits further parameters has it. Raises CheckpointError where it awaits
        others than these."""
        if self.found is not None and self.awaited:
            where = str(self._home.path)
            with reading(where):
                layout = thawed_as(self.found, layout)
                check_fingerprint(self.found.payload.get("params"), layout, where, self.found.calls)
        return layout

    def grow(self, layout: ShardLayout) -> None:
        """The store has further shards, and this is the layout of all."""
        self._calls.append(len(self.layout.sections))
        self.layout = layout

    def relayout(self, layout: ShardLayout) -> None:
        """Sections of the store are laid out anew: the next generation has them so."""
        self.layout = layout

    def change(self, layout: ShardLayout) -> None:
        """The model has changed."""
        self._has_changed = True
        self.layout = layout

    def shrink(self, layout: ShardLayout) -> None:
        """It has lost them again."""
        self._calls.pop()
        self.layout = layout

    def agree(self) -> None:
        """All ranks found the same, and have one run id. Collective."""
        if self.homes.are_several:
            self._agree_between_homes()
        number = None if self.found is None else self.found.number
        mine = [number, self.edition, self.recuts, self.goes_back]
        run_id, *first = json.loads(self._ranks.agree(json.dumps([self.run_id, *mine])))
        with self._ranks.together():
            if mine != first:
                ours, theirs = (
                    "no generation" if each is None else f"generation {each}" for each in (number, first[0])
                )
                existing = "" if self._existing is None else f" (existing={self._existing.value!r})"
                raise CheckpointError(
                    f"{self._home.path}: rank {self._ranks.rank}{existing} goes on from {ours}, rank 0 from {theirs}. "
                    f"Give all ranks the same generation= and the same directories, in which they see "
                    "the same manifests"
                )
        self.run_id = run_id

    def _agree_between_homes(self) -> None:
        """All homes do the work that one of them needs. Collective."""
        words = self._ranks.gather([self.recuts, self.edition, self.goes_back])
        self.recuts = any(recuts for recuts, _, _ in words)
        self.edition = max(edition for _, edition, _ in words)
        self.goes_back = any(goes_back for _, _, goes_back in words)

    def gather_base(self) -> None:
        """Hear from each rank what its manifest of the generation found says of the base. Collective."""
        has_base = self.found is not None and not self.recuts and bool(base_sections(self.found))
        with self._ranks.together():
            mine = {BASE: self.rank_payload()[BASE]} if has_base else {}
        self._base_parts = self._ranks.gather(mine) if has_base else []

    def start_run(self, **facts: Any) -> None:
        """Delete the files of an earlier run, and announce this one's; for the first rank of a home."""
        self.files.remove_all()
        self.files.announce(self.run_id, self._names, **facts)

    def prepare_recut(self, others: Sequence[RunDirectory]) -> None:
        """Make room for files beside those of the generation found, and announce both; for the first rank of a home.

        `others` are directories that the run had and has no more.
        """
        assert self._history is not None
        needed = set().union(*(each.file_names() for each in self._history.generations.values()))
        self.files.keep_only(needed, others, self._history.generations.values())
        self.files.announce(self.run_id, {*self._names, *needed}, others)

    def tidy(self, others: Sequence[RunDirectory]) -> None:
        """Delete what this run does not lead on from: newer generations, and files of another cut. For the first
        rank of a home."""
        assert self.found is not None and self._history is not None
        generations = self._history.generations
        if self.recuts:
            last = {generation_name(self._number)}
        else:
            # An older generation that lies in the same files can be gone back to.
            kept = [each for each in generations.values() if each.number <= self.found.number][:2]
            last = {name for name, each in generations.items() if each in kept and each.edition == self.edition}
        # First the manifests, so that a crash in between leaves none that names what is gone.
        self.files.remove_manifests([name for name in (*generations, *self._history.damaged) if name not in last])
        if others or set(self.files.announced()) != {*self._names, *ALWAYS}:
            self.files.keep_only(self._names, others, generations.values())
            self.files.announce(self.run_id, self._names)
        self.files.note_present()

    @property
    def _names(self) -> list[str]:
        return names_of(self._ranks.world_size, self.edition)

    def adopt(self, store: ShardStore, swap: SwapFile) -> None:
        """Use these shards from now on; the swap file is there."""
        self._store, self._swap = store, swap
        if self.found is None or self.recuts:
            # Once is enough for its name; a commit flushes its bytes, and the names of the first directory only.
            self.files.flush_names()

    # Resume

    def rank_payload(self) -> dict[str, Any]:
        """This rank's manifest of the generation found, verified."""
        assert self.found is not None
        with self.explaining():
            return read_rank_manifest(self._home, self.found, self._ranks.rank)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Errors of damage in the generation found get the remedy to type."""
        try:
            yield
        except IntegrityError as error:
            self.explain(error)
            raise

    def explain(self, error: Exception) -> None:
        """Add to an error of damage what to type; after the next commit there is nothing to go back to."""
        if isinstance(error, IntegrityError) and self.found is not None and self._number == self.found.number:
            assert self._history is not None
            remedy = self._history.remedy(self.found)
            if remedy and remedy not in str(error):
                error.args = (f"{error}. {remedy}",)

    def restore(self, shards: Sequence[Shard], shard_index: int) -> None:
        """Point these shards at the committed slots, or at the base; what rests in memory is read into it."""
        assert self._store is not None and self._swap is not None and self.found is not None
        payload = self.rank_payload()
        sections, known = payload.get("sections"), sections_of(self.found)
        if not isinstance(sections, list) or len(sections) != len(known):
            raise IntegrityError(f"the rank manifest in {self._home.path} does not list every section")
        resting = base_sections(self.found)
        own = [shard for shard in shards if shard.layout.index not in resting]
        with self.explaining(), reading(str(self._home.path)):
            for shard in own:
                entry = sections[shard.layout.index]
                self._store.restore(shard, entry["slot"], entry["components"], entry.get("spare"))
            # Before anything is allocated: it goes where no extent is known to be.
            for section, entry in zip(known, sections, strict=True):
                is_known = section.index < len(self._store.shards) or self._store.has_reserved(section.index)
                if not is_known and section.index not in resting:
                    layout = replace(section, shard_numel=entry["shard_numel"], num_shards=self.found.num_shards)
                    self._store.reserve(layout, entry["slot"], entry["components"], entry.get("spare"))
        if len(own) < len(shards):
            places = open_base(self._store.base, self.found, self._base_parts)
            for shard in shards:
                if (spans := places.get(shard.layout.index)) is not None:
                    self._store.rest_in_base(shard, spans, shard_index)
        for shard in own:
            self._store.load_memory(shard, shard.current)
        self._flush_found(self._swap)
        for shard in own:
            shard.committed = shard.current
        self.rng = payload.get("rng")

    def _flush_found(self, swap: SwapFile) -> None:
        """Make what was found survive power loss before the slots of the generation before it are written to.

        It may be in the page cache only: its run was killed between a rename and the flush, or promised less.
        """
        if self._durability is not Durability.COMMIT:
            return
        assert self.found is not None
        swap.sync()
        # The older one's too: torn, it would be in doubt which of the two is the newest.
        own = {rank_manifest_name(self._ranks.rank, number) for number in (0, 1)} | set(GENERATION_NAMES)
        self._home.sync([name for name in self._home.names() if name in own])
        self.files.flush_names()
        self.files.flush_paths()

    # Commit

    def commit(self, record: StepRecord, snapshot: Snapshot | None = None, part: CommitPart = ALONE) -> None:
        """Make the states of a snapshot, by default the shards' now, the next generation; `part` of those of several
        models.

        Raises StorageError. The generation before stays if the error came before the global manifest was renamed.
        """
        assert self._store is not None and self._swap is not None
        spans = self._store.counters.spans
        opened = spans.open(Track.COMMIT, f"step {record.step}")
        with self._store.counters.timed("commit_s"):
            self._commit(record, snapshot or self._store.snapshots.take(), part)
        spans.close(opened)
        self._store.snapshots.end()

    def _commit(self, record: StepRecord, snapshot: Snapshot, part: CommitPart) -> None:
        assert self._store is not None and self._swap is not None
        ranks, number = self._ranks, self._number + 1
        part.begin(self._home.path, self.run_id, number)
        with ranks.together():
            self._store.snapshots.write(snapshot)
            if self._durability is Durability.COMMIT:
                self._swap.sync()
            name = rank_manifest_name(self._ranks.rank, number)
            digest = write_manifest(self._home, name, self._rank_payload(snapshot.slots, record), self._durability)
            # Last: what has lost its name until now would make a generation that no start finds.
            self._swap.check_in_place()
            check_in_place(self._store.base_files)
        publisher = self.publisher
        is_due = publisher is not None and ranks.rank == 0 and publisher.is_due(record.step)
        words = ranks.gather_digests(f"{digest}{record.step:016x}{int(is_due)}")
        digests, steps = [word[:-17] for word in words], [int(word[-17:-1], 16) for word in words]
        if len({*steps}) > 1:
            raise CheckpointError(
                f"the ranks are about to commit different steps: {steps} (rank 0 first); "
                "call step() and zo.commit equally often on every rank. The generation before stays"
            )
        with ranks.together():
            joint = part.before_point() or record.joint
            if self.homes.is_first:
                payload = self._global_payload(number, digests, record) | ({JOINT: joint} if joint else {})
                write_manifest(self._home, generation_name(number), payload, self._durability)
        # Decided: it is in all homes, and each says so from now on.
        with ranks.together():
            if self.homes.is_first:
                self.files.note_committed(payload[BASE])
        if part.after_point(words[0][-1] == "1") and publisher is not None:
            specs = [piece.spec for section in self.layout.sections for piece in section.params]
            aliases = {spec.name: spec.aliases for spec in specs if spec.aliases}
            publisher.begin(number, record.step, self._store.snapshots, aliases, part)
        self._number = number
        self._store.mark_committed(snapshot.slots)

    def _rank_payload(self, slots: Sequence[int], record: StepRecord) -> dict[str, Any]:
        assert self._store is not None
        sections = []
        for shard, slot in zip(self._store.shards, slots, strict=True):
            has_slot = shard.base is None and bool(shard.slots)
            components = _records(shard.slots[slot]) if has_slot else {}
            entry = {"slot": slot, "shard_numel": shard.layout.shard_numel, "components": components}
            if has_slot and not shard.layout.trainable and len(shard.slots) > 1:
                entry["spare"] = _records(shard.slots[1 - slot])
            sections.append(entry)
        return {
            "run_id": self.run_id,
            "number": self._number + 1,
            "step": record.step,
            "rng": record.rng,
            "sections": sections,
            BASE: base_hashes(self._store),
        }

    def _global_payload(self, number: int, digests: Sequence[str], record: StepRecord) -> dict[str, Any]:
        assert self._store is not None
        changed = {"num_sections": len(self.layout.sections), "changes": [asdict(each) for each in record.changes]}
        return {
            "run_id": self.run_id,
            "format": FORMAT,
            "states": self.layout.state_format.name.lower(),
            "number": number,
            "edition": self.edition,
            "step": record.step,
            "world_size": self._ranks.world_size,
            **({HOMES: self.homes.describe()} if self.homes.are_several else {}),
            "num_shards": self.layout.num_shards,
            "committed_at": time.strftime("%Y-%m-%d %H:%M:%S"),
            "directories": [str(directory.path) for directory in self._directories],
            "weights": list(self.weights) or [1 / len(self._directories)] * len(self._directories),
            "params": fingerprint(self.layout),
            BASE: base_record(self._store),
            # A model that has changed is resumed in one call, whatever calls there were.
            "calls": [] if record.changes else self._calls,
            **(changed if record.changes else {}),
            "param_steps": record.param_steps,
            **({"thawed": list(record.thawed)} if record.thawed else {}),
            **({"resting": list(record.resting)} if record.resting else {}),
            "optimizer": record.optimizer,
            "extra": record.extra,
            "scaler": record.scaler,
            "buffers": record.buffers,
            "buffer_forms": record.buffer_forms,
            **({"beside": dict(record.beside)} if record.beside else {}),
            "about": record.about,
            "ended_by": record.ended_by,
            "ranks": [
                {"manifest": rank_manifest_name(rank, number), "digest": digest} for rank, digest in enumerate(digests)
            ],
        }
