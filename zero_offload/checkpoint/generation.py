"""Commits and resumes the running generation: the swap files themselves, seen at one step.

Owns the order of a commit: every write complete, flushed if asked for, this rank's manifest, all ranks' digests,
the global manifest by rank 0 (the commit point), and only then the older slots are free. `commit` runs on
the update worker, behind forward and backward; everything else on the control thread. Never deletes a file
that no manifest of ours names. The calls: `prepare` (create, resume or refuse), `restore` if there is something
to resume, `commit` per generation.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from zero_offload.checkpoint.format import (
    GENERATION_NAME,
    RUN_NAME,
    Generation,
    StepRecord,
    check_fingerprint,
    fingerprint,
    rank_manifest_name,
    reading,
)
from zero_offload.config import Durability, Existing
from zero_offload.errors import CheckpointError, ConfigError, IntegrityError, ZeroOffloadError
from zero_offload.plan.layout import ShardLayout
from zero_offload.shards.shard import Component, components_of
from zero_offload.shards.store import ShardStore
from zero_offload.storage.directory import RunDirectory
from zero_offload.storage.manifest import read_manifest, write_manifest
from zero_offload.storage.swap_file import SwapFile, extent_record


class Exchange(Protocol):
    """What a commit needs of the other ranks."""

    def agree(self, text: str) -> str: ...

    def gather_digests(self, digest: str) -> list[str]: ...

    def all_come(self) -> bool: ...

    def together(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Ranks:
    """Who takes part, and how they talk on the worker's thread."""

    rank: int
    world_size: int
    exchange: Exchange
    column: int = 0
    num_columns: int = 1
    """Parts of the model; ranks are numbered column after column."""

    def first_of_column(self, world_size: int) -> int:
        """The first rank that holds this part in a run of so many ranks."""
        return self.column * (world_size // self.num_columns)


def _announced(home: RunDirectory) -> list[str]:
    """The files of the run whose manifests are in `home`."""
    run = read_manifest(home, RUN_NAME) or {}
    return [name for name in run.get("files", []) if isinstance(name, str)]


def reusable_bytes(paths: Sequence[Path]) -> int:
    """Disk space that the files of an earlier run hold: a run that resumes or discards it needs no other."""
    with contextlib.ExitStack() as stack:
        try:
            directories = [stack.enter_context(RunDirectory.look(path)) for path in paths]
            names = _announced(directories[0]) if directories else []
        except ZeroOffloadError:
            return 0  # opening them for the run says what is wrong
        return sum(directory.measure(names) for directory in directories)


class GenerationKeeper:
    """The generations of one run in its directories."""

    def __init__(
        self,
        directories: Sequence[RunDirectory],
        layout: ShardLayout,
        ranks: Ranks,
        durability: Durability,
    ) -> None:
        self._directories = tuple(directories)
        self._layout = layout
        self._ranks = ranks
        self._durability = durability
        self._store: ShardStore | None = None
        self._swap: SwapFile | None = None
        self._number = 0
        self.run_id = uuid.uuid4().hex
        """Seeds the checksums; ranks agree on one before they allocate."""
        self.found: Generation | None = None
        """The generation to resume from, if there is one."""
        self.weights: tuple[float, ...] = ()
        """The directories' shares, which say where blocks lie; a generation that was found brings its own."""

    @property
    def _home(self) -> RunDirectory:
        """Where the manifests are."""
        return self._directories[0]

    def look(self, existing: Existing) -> None:
        """See what the directory holds. Raises ConfigError or CheckpointError when it may not be used."""
        if existing is Existing.DISCARD:
            return  # whatever it holds, damaged or not
        payload = read_manifest(self._home, GENERATION_NAME)
        if payload is None:
            return
        found = Generation.parse(payload)
        if existing is Existing.REFUSE:
            raise ConfigError(
                f"{self._home.path} holds a generation: step {found.step}, committed {found.committed_at}. "
                "Go on with existing='resume', overwrite it with existing='discard', or use another directory"
            )
        with reading(str(self._home.path)):
            self._check(found)
        self.found, self.run_id = found, found.run_id
        self.weights = self._weights_of(found)

    def _check(self, found: Generation) -> None:
        where = str(self._home.path)
        check_fingerprint(found.payload.get("params"), self._layout, where)
        if (found.world_size, found.num_shards) != (self._ranks.world_size, self._layout.num_shards):
            raise CheckpointError(
                f"{where} was written by {found.world_size} ranks ({found.num_shards} shards), this run has "
                f"{self._ranks.world_size} ({self._layout.num_shards}). Resume with the same ranks, then use "
                "zo.save_checkpoint and zo.load_checkpoint, which reshard"
            )
        if len(found.payload.get("directories", ())) != len(self._directories):
            raise CheckpointError(
                f"{where} is striped over {len(found.payload['directories'])} directories, this run names "
                f"{len(self._directories)}; give the same ones in the same order: "
                f"{found.payload['directories']}"
            )

    def _weights_of(self, found: Generation) -> tuple[float, ...]:
        weights = found.payload.get("weights")
        valid = isinstance(weights, list) and len(weights) == len(self._directories)
        if not valid or not all(type(weight) is float and 0 <= weight <= 1 for weight in weights or ()):
            raise IntegrityError(
                f"{GENERATION_NAME} in {self._home.path} has no valid shares of its directories; "
                "load a checkpoint, or start over with existing='discard'"
            )
        return tuple(weights or ())

    def remove_old(self) -> None:
        """Delete the files of an earlier run that its manifest names; rank 0 only."""
        names = _announced(self._home)
        # The commit point goes first: a crash in between must not leave it pointing at nothing. The list of
        # files goes last, with its directory.
        self._home.remove([GENERATION_NAME])
        for directory in reversed(self._directories):
            directory.remove(names)

    def announce(self, names: Sequence[str]) -> None:
        """Write down which files this run will make, before it makes them; rank 0 only."""
        manifests = [rank_manifest_name(r, n) for r in range(self._ranks.world_size) for n in (0, 1)]
        payload = {"run_id": self.run_id, "files": [*names, *manifests, GENERATION_NAME, RUN_NAME]}
        write_manifest(self._home, RUN_NAME, payload, self._durability)

    def adopt(self, store: ShardStore, swap: SwapFile) -> None:
        """Use these shards from now on."""
        self._store, self._swap = store, swap

    # Resume

    def rank_payload(self) -> dict[str, Any]:
        """This rank's manifest of the generation found, verified."""
        assert self.found is not None
        ranks = self.found.payload.get("ranks")
        if not isinstance(ranks, list) or len(ranks) != self._ranks.world_size:
            raise IntegrityError(f"{GENERATION_NAME} in {self._home.path} names no manifest per rank")
        with reading(str(self._home.path)):
            entry = ranks[self._ranks.rank]
            payload = read_manifest(self._home, str(entry["manifest"]), str(entry["digest"]))
        if payload is None:
            raise IntegrityError(f"{self._home.path} lacks {entry['manifest']}, which its generation names")
        return dict(payload)

    def restore(self, payload: dict[str, Any]) -> None:
        """Point every shard at the committed slots; what rests in memory is read into it."""
        assert self._store is not None and self._swap is not None and self.found is not None
        sections = payload.get("sections")
        if not isinstance(sections, list) or len(sections) != len(self._store.shards):
            raise IntegrityError(f"the rank manifest in {self._home.path} does not list every section")
        slots = []
        for shard, entry in zip(self._store.shards, sections, strict=True):
            with reading(str(self._home.path)):
                slot = entry["slot"]
                self._store.ensure_slot(shard, slot)
                for component in components_of(shard.layout):
                    self._swap.restore(shard.slots[slot][component], entry["components"][component.value])
            shard.current = slot
            slots.append(slot)
        for shard in self._store.shards:
            self._store.load_memory(shard, shard.current)
        self._store.mark_committed(slots)
        self._number = self.found.number

    # Commit

    def commit(self, record: StepRecord) -> None:
        """Make the shards' state now the next generation. Raises StorageError; the last one then stays."""
        assert self._store is not None and self._swap is not None
        with self._store.counters.timed("commit_s"):
            self._commit(record, self._store, self._swap)

    def _commit(self, record: StepRecord, store: ShardStore, swap: SwapFile) -> None:
        exchange, number = self._ranks.exchange, self._number + 1
        with exchange.together():
            slots = [store.snapshot(shard) for shard in store.shards]
            if self._durability is Durability.COMMIT:
                swap.sync()
            name = rank_manifest_name(self._ranks.rank, number)
            digest = write_manifest(self._home, name, self._rank_payload(slots, record), self._durability)
        digests = exchange.gather_digests(digest)
        with exchange.together():
            if self._ranks.rank == 0:
                payload = self._global_payload(number, digests, record)
                write_manifest(self._home, GENERATION_NAME, payload, self._durability)
        self._number = number
        store.mark_committed(slots)

    def _rank_payload(self, slots: Sequence[int], record: StepRecord) -> dict[str, Any]:
        assert self._store is not None
        sections = []
        for shard, slot in zip(self._store.shards, slots, strict=True):
            components: dict[Component, Any] = shard.slots[slot]
            entries = {component.value: extent_record(extent) for component, extent in components.items()}
            sections.append({"slot": slot, "shard_numel": shard.layout.shard_numel, "components": entries})
        return {"run_id": self.run_id, "step": record.step, "rng": record.rng, "sections": sections}

    def _global_payload(self, number: int, digests: Sequence[str], record: StepRecord) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "number": number,
            "step": record.step,
            "world_size": self._ranks.world_size,
            "num_shards": self._layout.num_shards,
            "committed_at": time.strftime("%Y-%m-%d %H:%M:%S"),
            "directories": [str(directory.path) for directory in self._directories],
            "weights": list(self.weights) or [1 / len(self._directories)] * len(self._directories),
            "params": fingerprint(self._layout),
            "param_steps": record.param_steps,
            "optimizer": record.optimizer,
            "extra": record.extra,
            "scaler": record.scaler,
            "ranks": [
                {"manifest": rank_manifest_name(rank, number), "digest": digest} for rank, digest in enumerate(digests)
            ],
        }
