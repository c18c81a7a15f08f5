"""Checkpoints: an immutable copy of all shards in a directory of its own, in the format of a generation.

`save` writes this rank's shards and the manifests; `SavedCheckpoint` reads them back for any number of ranks and
any placement, since every array is addressed by element of its section. Nothing in a checkpoint is executed; every
block is verified. A directory becomes a checkpoint with its last rename: before that, loading refuses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zero_offload.checkpoint.format import (
    GENERATION_NAME,
    Generation,
    StepRecord,
    check_fingerprint,
    reading,
    swap_file_name,
)
from zero_offload.checkpoint.generation import GenerationKeeper, Ranks
from zero_offload.config import Durability
from zero_offload.errors import CheckpointError, IntegrityError
from zero_offload.memory.arena import Arena, Region
from zero_offload.plan.layout import CHUNK_NUMEL, SectionLayout, ShardLayout
from zero_offload.shards.disk import DiskArrays
from zero_offload.shards.shard import Component, component_dtype, components_of
from zero_offload.shards.store import ChunkSource, ShardStore
from zero_offload.storage.directory import RunDirectory
from zero_offload.storage.engine import FileEngine, open_engine
from zero_offload.storage.manifest import read_manifest
from zero_offload.storage.swap_file import Extent, SwapFile
from zero_offload.telemetry.events import Counters
from zero_offload.types import StateKind, Tier

_BLOCK_BYTES_MAX = CHUNK_NUMEL * 8  # no dtype that is laid out is wider
_ON_DISK = dict.fromkeys(StateKind, Tier.NVME)


def save(path: Path, layout: ShardLayout, store: ShardStore, ranks: Ranks, record: StepRecord) -> None:
    """Copy every shard of this rank to `path`, chunk by chunk, and make it a checkpoint. Collective.

    Raises CheckpointError when the directory holds one already, CapacityError, StorageError.
    """
    with contextlib.ExitStack() as cleanup:
        directory = cleanup.enter_context(_open_directory(path, ranks))
        keeper = GenerationKeeper([directory], layout, ranks, Durability.COMMIT)
        keeper.run_id = ranks.exchange.agree(keeper.run_id)
        with ranks.exchange.together():
            if ranks.rank == 0:
                if read_manifest(directory, GENERATION_NAME) is not None:
                    raise CheckpointError(
                        f"{path} holds a checkpoint already, and those never change; save to another path"
                    )
                keeper.remove_old()
                keeper.announce([swap_file_name(rank) for rank in range(ranks.world_size)])
        with ranks.exchange.together():
            engine = open_engine()
            cleanup.callback(engine.close)
            swap = SwapFile([directory], swap_file_name(ranks.rank), engine, zlib.crc32(keeper.run_id.encode()))
            copy = ShardStore(layout, [_ON_DISK] * len(layout.units), Arena(0), swap, num_slots=1)
            swap.create()
            cleanup.callback(swap.close)
            for source, target in zip(store.shards, copy.shards, strict=True):
                copy.write_components(target, _copy_chunks(store, source.layout))
        keeper.adopt(copy, swap)
        keeper.commit(record)
    with ranks.exchange.together():
        pass  # every rank has let go of the directory: whoever opens it next does not meet a lock


def _open_directory(path: Path, ranks: Ranks) -> RunDirectory:
    """Rank 0 makes and locks it; the others join once it is there."""
    with ranks.exchange.together():
        if ranks.rank == 0:
            directory = RunDirectory.open(path)
    with ranks.exchange.together():
        if ranks.rank != 0:
            directory = RunDirectory.join(path)
    return directory


def _copy_chunks(store: ShardStore, layout: SectionLayout) -> ChunkSource:
    shard, rows = store.shards[layout.index], {begin: row for row, (begin, _) in enumerate(layout.chunks())}

    def source(component: Component, begin: int, end: int) -> torch.Tensor:
        return store.read_chunk(shard, component, rows[begin])

    return source


class SavedCheckpoint:
    """A checkpoint opened for reading; use `open`."""

    def __init__(self, directory: RunDirectory, engine: FileEngine, ranks: Ranks) -> None:
        self.directory = directory
        self._engine = engine
        payload = read_manifest(directory, GENERATION_NAME)
        if payload is None:
            raise CheckpointError(
                f"{directory.path} is no checkpoint: it has no {GENERATION_NAME}. Name a directory that "
                "zo.save_checkpoint has written"
            )
        self.generation = Generation.parse(payload)
        with reading(str(directory.path)):
            self.ranks = [self._rank_payload(entry) for entry in payload["ranks"]]
        self._first = ranks.first_of_column(self.generation.world_size)
        """The rank that wrote shard 0 of our part of the model."""
        self._swaps: list[SwapFile] = []
        self._disks: list[DiskArrays] = []
        self._extents: list[dict[tuple[int, Component], Extent]] = []
        self._staging: Region = Arena(0).allocate(_BLOCK_BYTES_MAX)

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, layout: ShardLayout, ranks: Ranks) -> Iterator[SavedCheckpoint]:
        """Check that `path` belongs to this model, and open its files."""
        if not path.is_dir():
            raise CheckpointError(f"{path} is no directory; name one that zo.save_checkpoint has written")
        with contextlib.ExitStack() as cleanup:
            directory = cleanup.enter_context(RunDirectory.look(path))
            engine = open_engine()
            cleanup.callback(engine.close)
            saved = cls(directory, engine, ranks)
            cleanup.callback(saved._close)
            with reading(str(path)):
                check_fingerprint(saved.generation.payload.get("params"), layout, str(path))
                saved._open_files(layout)
            yield saved

    def source(self, layout: SectionLayout, shard_index: int) -> ChunkSource:
        """Feeds `ShardStore.write_components` with elements of the shard `shard_index` of a section."""
        offset = shard_index * layout.shard_numel

        def source(component: Component, begin: int, end: int) -> torch.Tensor:
            out = torch.zeros(end - begin, dtype=component_dtype(layout, component))
            self._read(layout, component, offset + begin, out)
            return out

        return source

    def _read(self, layout: SectionLayout, component: Component, begin: int, out: torch.Tensor) -> None:
        """Fill `out` with section elements from `begin` on; what was never saved (padding) stays zero."""
        for shard, extents in enumerate(self._extents):
            saved = self._saved_layout(layout, shard)
            start_of_shard = shard * saved.shard_numel
            for row, (low, high) in enumerate(saved.chunks()):
                first = max(start_of_shard + low, begin)
                last = min(start_of_shard + high, begin + out.numel())
                if first < last:
                    extent = extents[layout.index, component]
                    block = self._disks[shard].read_block(extent, row, out.dtype, self._staging)
                    offset = first - start_of_shard - low
                    out[first - begin : last - begin] = block[offset : offset + last - first]

    def _rank_payload(self, entry: Any) -> dict[str, Any]:
        payload = read_manifest(self.directory, str(entry["manifest"]), str(entry["digest"]))
        if payload is None:
            raise IntegrityError(f"{self.directory.path} lacks {entry['manifest']}, which its manifest names")
        return dict(payload)

    def _saved_layout(self, layout: SectionLayout, shard: int) -> SectionLayout:
        numel = self.ranks[self._first + shard]["sections"][layout.index]["shard_numel"]
        if type(numel) is not int or not 0 < numel <= 2**48:
            raise IntegrityError(f"{self.directory.path}: section {layout.index} has shard_numel {numel!r}")
        return dataclasses.replace(layout, shard_numel=numel, num_shards=self.generation.num_shards)

    def _open_files(self, layout: ShardLayout) -> None:
        seed = zlib.crc32(self.generation.run_id.encode())
        for shard in range(self.generation.num_shards):
            swap = SwapFile([self.directory], swap_file_name(self._first + shard), self._engine, seed)
            self._extents.append(self._plan_extents(swap, layout, shard))
            swap.open_existing()
            self._swaps.append(swap)
            self._disks.append(DiskArrays(swap, Counters()))

    def _plan_extents(self, swap: SwapFile, layout: ShardLayout, shard: int) -> dict[tuple[int, Component], Extent]:
        extents = {}
        for section in layout.sections:
            entry = self.ranks[self._first + shard]["sections"][section.index]
            saved = self._saved_layout(section, shard)
            for component in components_of(section):
                name = f"section {section.index} {component.value}.{entry['slot']}"
                extent = swap.allocate(name, saved.block_sizes(component_dtype(section, component)))
                swap.restore(extent, entry["components"].get(component.value))
                extents[section.index, component] = extent
        return extents

    def _close(self) -> None:
        for swap in self._swaps:
            swap.close()
