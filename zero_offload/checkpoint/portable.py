"""Checkpoints: an immutable copy of all shards in a directory of its own, in the format of a generation.

`save` writes this rank's shards and the manifests; `SavedCheckpoint` reads them back, or a run's generation, for any
number of ranks and any placement, since every array is addressed by element of its section. Nothing in a checkpoint
is executed; every block is verified. A directory becomes a checkpoint with its last rename: before that, loading
refuses it.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zero_offload.base.errors import CapacityError, CheckpointError, ConfigError, StorageError
from zero_offload.base.host import host_empty
from zero_offload.base.types import SECTOR, Durability, StateFormat, StateKind, Tier
from zero_offload.checkpoint.clone import can_share, clone_blocks
from zero_offload.checkpoint.format import (
    Generation,
    StepRecord,
    check_fingerprint,
    reading,
    state_format_of,
    swap_file_name,
)
from zero_offload.checkpoint.generation import GenerationKeeper, Ranks
from zero_offload.checkpoint.history import History
from zero_offload.checkpoint.saved import CHECKPOINT_KIND, SavedGeneration, open_generation, open_in_turn
from zero_offload.hardware.kernels.formats import join_master, split_master
from zero_offload.plan.layout import SectionLayout, ShardLayout
from zero_offload.storage.files.directory import OR_KEEP_MORE, RunDirectory
from zero_offload.storage.files.engines import open_engine
from zero_offload.storage.files.swap_file import SwapFile
from zero_offload.storage.files.system import naming_errors
from zero_offload.storage.memory.arena import Arena
from zero_offload.storage.shards.shard import (
    Component,
    Shard,
    component_dtype,
    encode_array,
    is_state,
    master_components,
)
from zero_offload.storage.shards.store import ChunkSource, ShardStore

_ON_DISK = dict.fromkeys(StateKind, Tier.NVME)


def save(path: Path, layout: ShardLayout, store: ShardStore, ranks: Ranks, record: StepRecord) -> None:
    """Copy every shard of this rank to `path`, chunk by chunk, and make it a checkpoint. Collective.

    What rests on disk is shared with the checkpoint's files where they are on the same file system and it can.

    Raises CheckpointError when the directory holds one already, CapacityError, StorageError.
    """
    with _naming_path(path), contextlib.ExitStack() as cleanup:
        [directory] = open_in_turn([path], ranks, cleanup, _open_new, _join_new)
        keeper = GenerationKeeper([directory], layout, ranks, Durability.COMMIT)
        keeper.run_id = ranks.exchange.agree(keeper.run_id)
        with ranks.exchange.together():
            if ranks.rank == 0:
                if not History.read(directory).is_empty:
                    raise CheckpointError(
                        f"{path} holds a checkpoint already, and those never change; save to another path"
                    )
                keeper.begin(kind=CHECKPOINT_KIND)
        with ranks.exchange.together():
            engine = open_engine()
            cleanup.callback(engine.close)
            swap = SwapFile([directory], swap_file_name(ranks.rank), engine, zlib.crc32(keeper.run_id.encode()))
            copy = ShardStore(layout, [_ON_DISK] * len(layout.units), Arena(0), swap, num_slots=1)
            copy.lay_out(copy.shards)
            for source, target in zip(store.shards, copy.shards, strict=True):
                copy.add_states(target, source.states)
            shares = _create(swap, directory, store)
            cleanup.callback(swap.close)
            cleanup.callback(engine.close)  # before its files, whose numbers would soon stand for others
            for source, target in zip(store.shards, copy.shards, strict=True):
                if shares and _cloned(source, target):
                    copy.finish_update(target)
                else:
                    copy.write_components(target, _copy_chunks(store, source.layout))
            keeper.adopt(copy, swap)
        keeper.commit(record)
    with ranks.exchange.together():
        pass  # every rank has let go of the directory: the next to open it meets no lock


@contextlib.contextmanager
def _naming_path(path: Path) -> Iterator[None]:
    """What is wrong with the directory itself is mended by another `path=`: none of a run's settings names it."""
    try:
        yield
    except (ConfigError, CapacityError, StorageError) as error:
        if str(path) in str(error):
            error.args = (str(error).replace(OR_KEEP_MORE, "").replace("nvme=", "path="),)
        raise


def _open_new(path: Path) -> RunDirectory:
    with _naming_path(path):  # here: other ranks are told
        return RunDirectory.open(path)


def _join_new(path: Path) -> RunDirectory:
    with _naming_path(path):
        return RunDirectory.join(path)


def _create(swap: SwapFile, directory: RunDirectory, store: ShardStore) -> bool:
    """Make the checkpoint's file; whether it can share blocks with the run's."""
    resting = next((shard for shard in store.shards if shard.on_disk), None)
    if resting is None or not can_share(next(iter(resting.slots[resting.current].values())), directory):
        swap.create()
        return False
    # Blocks that are shared take no space, so none is reserved for them.
    file = directory.create_file(swap.name, SECTOR)
    try:
        with naming_errors("make", file.path):
            os.ftruncate(file.fd, max(swap.nbytes, SECTOR))
    finally:
        file.close()
    swap.open_existing()
    return True


def _cloned(source: Shard, target: Shard) -> bool:
    """Whether the blocks of a shard that rests on disk could be shared with the checkpoint's file."""
    if not source.on_disk:
        return False
    source.settle()
    there, here = source.slots[source.current], target.slots[target.current]
    return all(there[each].written.any() and clone_blocks(there[each], extent) for each, extent in here.items())


def _recut_master(half: torch.Tensor, residual: torch.Tensor, dtype: torch.dtype) -> dict[Component, torch.Tensor]:
    """The same master with a residual of another dtype."""
    master, other = host_empty(half.numel(), torch.float32), host_empty(half.numel(), dtype)
    join_master(half, residual, master)
    split_master(master, half, other)
    return {Component.VALUE: half, Component.RESIDUAL: other}


def _copy_chunks(store: ShardStore, layout: SectionLayout) -> ChunkSource:
    shard, rows = store.shards[layout.index], {begin: row for row, (begin, _) in enumerate(layout.chunks())}

    def source(component: Component, begin: int, end: int) -> torch.Tensor:
        return store.read_chunk(shard, component, rows[begin])

    return source


class SavedCheckpoint:
    """A checkpoint, or a generation of a run, opened to be loaded into a model; use `open`."""

    def __init__(self, saved: SavedGeneration, first_rank: int) -> None:
        """`first_rank` wrote shard 0 of our part of the model."""
        self._saved = saved
        self._first_rank = first_rank

    @property
    def generation(self) -> Generation:
        return self._saved.generation

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, layout: ShardLayout, ranks: Ranks) -> Iterator[SavedCheckpoint]:
        """Check that `path` belongs to this model, and open its files. Collective.

        A run's directory is locked meanwhile: LockError where one is at work.
        """
        with ranks.exchange.together():
            if not path.is_dir():
                raise CheckpointError(f"{path} is not a directory; name one that zo.save_checkpoint has written")
        with contextlib.ExitStack() as cleanup:
            generation, directories = open_generation(path, ranks, cleanup)
            with ranks.exchange.together():
                with reading(str(path)):
                    check_fingerprint(generation.payload.get("params"), layout, str(path))
                engine = open_engine(num_drives=len(directories))
                cleanup.callback(engine.close)
                saved = SavedGeneration(generation, directories, engine)
                cleanup.callback(saved.close)
            cleanup.callback(engine.close)  # before its files
            yield cls(saved, ranks.first_of_column(generation.world_size))

    def source(self, layout: SectionLayout, shard_index: int) -> ChunkSource:
        """Feeds `ShardStore.write_components` with elements of the shard `shard_index` of a section."""
        offset, saved = shard_index * layout.shard_numel, self._saved.sections[layout.index]

        def read(component: Component, begin: int, end: int) -> torch.Tensor:
            dtype = torch.float32 if is_state(component) else component_dtype(saved, component)
            out = host_empty(end - begin, dtype)
            self._saved.read(self._first_rank, layout.index, component, offset + begin, out)
            return out

        def source(component: Component, begin: int, end: int) -> torch.Tensor:
            if is_state(component):
                return encode_array(layout, component, read(component, begin, end))
            if Component.RESIDUAL not in master_components(layout) or saved.state_format is layout.state_format:
                return read(component, begin, end)
            half, residual = read(Component.VALUE, begin, end), read(Component.RESIDUAL, begin, end)
            return _recut_master(half, residual, component_dtype(layout, Component.RESIDUAL))[component]

        return source

    def tell_conversion(self, layout: ShardLayout) -> None:
        """Say so, if states do not rest as they did."""
        before, now = state_format_of(self.generation), layout.state_format
        if before is not now:
            loss = "exactly" if before is not StateFormat.FP32 and now is StateFormat.FP32 else "rounded to the nearest"
            warnings.warn(
                f"{self.generation}: optimizer states are converted from {before.name.lower()} to {now.name.lower()}, "
                f"{loss}; precision=zo.Precision(states={before.name.lower()!r}) would keep them as they are",
                stacklevel=4,
            )

    def states(self, layout: SectionLayout) -> list[Component]:
        """What optimizers kept of a section."""
        return self._saved.states(self._first_rank, layout.index)

    def rng_of(self, rank: int) -> dict[str, Any] | None:
        """A rank's random number generators."""
        rng: dict[str, Any] | None = self._saved.payload(rank).get("rng")
        return rng
