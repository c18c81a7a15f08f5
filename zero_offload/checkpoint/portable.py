"""Checkpoints: an immutable copy of all shards in a directory of its own, in the format of a generation.

`save` writes this rank's shards and the manifests; `SavedGeneration` reads them back. A directory becomes a checkpoint
with its last rename: before that, loading refuses it.

Where the file system can (btrfs, XFS made with reflinks), blocks are shared between the run's file and the checkpoint's
instead of copied. A shared block is copied by the file system when one of the files writes to it, so neither sees the
other's changes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from zero_offload.base.errors import CapacityError, CheckpointError, ConfigError, StorageError
from zero_offload.base.types import SECTOR, Durability, StateKind, Tier
from zero_offload.checkpoint.format import CHECKPOINT_KIND, History, StepRecord, swap_file_name
from zero_offload.checkpoint.generation import GenerationKeeper
from zero_offload.checkpoint.homes import Homes
from zero_offload.checkpoint.saved_generation import open_in_turn
from zero_offload.hardware.kernels.checksums import reseeded
from zero_offload.plan.layout import CHUNK_NUMEL, ShardLayout
from zero_offload.runtime.ranks.collectives import CommitGroup
from zero_offload.storage.files.directory import OR_KEEP_MORE, RunDirectory
from zero_offload.storage.files.engines import open_engine
from zero_offload.storage.files.swap_file import Extent, SwapFile
from zero_offload.storage.files.system import naming_errors
from zero_offload.storage.memory.arena import Arena
from zero_offload.storage.shards.shard import Component, Shard
from zero_offload.storage.shards.store import ShardStore

FICLONERANGE = 0x4020940D
_RANGE = struct.Struct("=qQQQ")  # source descriptor, its offset, length, offset in the target
_CANNOT = (errno.EOPNOTSUPP, errno.EXDEV, errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ETXTBSY)
"""Another file system, or a system that cannot share, or not these blocks: a copy serves."""
_ON_DISK = dict.fromkeys(StateKind, Tier.NVME)


def save(path: Path, layout: ShardLayout, store: ShardStore, ranks: CommitGroup, record: StepRecord) -> None:
    """Copy every shard of this rank to `path`, chunk by chunk, and make it a checkpoint. Collective.

    Bytes on disk are shared with the checkpoint's files, where both are on the same file system and it can share.

    Raises CheckpointError when the directory holds one already, CapacityError, StorageError.
    """
    with _naming_path(path), contextlib.ExitStack() as cleanup:
        [directory] = open_in_turn([path], ranks, cleanup, _open_new, _join_new, is_first=ranks.rank == 0)
        texts = ranks.gather(directory.holder.decode(errors="replace"))
        with ranks.together():
            if texts[ranks.rank] != texts[0]:
                raise _is_not_shared(path)
        # The first rank alone decides whether the directory may be used; all meet its error.
        keeper = GenerationKeeper([directory], layout, Homes.one(ranks, directory.path), Durability.COMMIT)
        keeper.run_id = ranks.agree(keeper.run_id)
        with ranks.together():
            if ranks.rank == 0:
                if not History.read(directory).is_empty:
                    raise CheckpointError(
                        f"{path} holds a checkpoint already, and those never change; save to another path"
                    )
                keeper.start_run(kind=CHECKPOINT_KIND)
        with ranks.together():
            # A second store with one slot per shard, whose swap file is the checkpoint's.
            engine = open_engine()
            cleanup.callback(engine.close)
            swap = SwapFile([directory], swap_file_name(ranks.rank), engine, zlib.crc32(keeper.run_id.encode()))
            copy = ShardStore(layout, [_ON_DISK] * len(layout.units), Arena(0), swap, num_slots=1, base=store.base)
            empty = [shard.layout.index for shard in store.shards if shard.base is not None or not shard.layout.params]
            copy.lay_out(copy.shards, empty)
            for source, target in zip(store.shards, copy.shards, strict=True):
                copy.add_states(target, source.states)
                target.base = source.base
            shares = _create(swap, directory, store)
            cleanup.callback(swap.close)
            cleanup.callback(engine.close)  # before its files, whose numbers would soon stand for others
            for source, target in zip(store.shards, copy.shards, strict=True):
                if target.layout.index in empty:
                    continue
                if shares and _cloned(source, target):
                    copy.finish_update(target)
                else:
                    copy.write_components(target, partial(_read_chunk, store, source))
            # The manifest names the copy once all ranks have written theirs.
            keeper.adopt(copy, swap)
        keeper.commit(record)
    with ranks.together():
        pass  # every rank has let go of the directory: the next to open it meets no lock


@contextlib.contextmanager
def _naming_path(path: Path) -> Iterator[None]:
    """Errors of the directory itself name `path=` as the remedy: none of a run's settings names it."""
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
    if not path.is_dir():
        raise _is_not_shared(path)
    with _naming_path(path):
        return RunDirectory.join(path)


def _is_not_shared(path: Path) -> StorageError:
    return StorageError(
        f"{path} on {socket.gethostname()} is not the directory that rank 0 has made under this name. Name one that "
        "all machines see, such as a mount of a network file system"
    )


def _create(swap: SwapFile, directory: RunDirectory, store: ShardStore) -> bool:
    """Make the checkpoint's file. True if it can share blocks with the run's."""
    resting = next((shard for shard in store.shards if shard.on_disk and shard.slots), None)
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
    """True if the blocks of a shard that rests on disk could be shared with the checkpoint's file."""
    if not source.on_disk or not source.slots:
        return False
    source.wait_for_writes()
    there, here = source.slots[source.current], target.slots[target.current]
    return all(there[each].written.any() and clone_blocks(there[each], extent) for each, extent in here.items())


def _read_chunk(store: ShardStore, shard: Shard, component: Component, begin: int, end: int) -> torch.Tensor:
    return store.read_chunk(shard, component, begin // CHUNK_NUMEL)


def can_share(source: Extent, directory: RunDirectory) -> bool:
    """True if files in `directory` can share the blocks of an open file: tried on one sector."""
    trial = directory.create_scratch(SECTOR)
    try:
        return _share(source, source.blocks[0], trial.fd, 0, SECTOR)
    finally:
        trial.close()


def clone_blocks(source: Extent, target: Extent) -> bool:
    """Let every block of `target` share the storage of `source`'s; False where the file system cannot.

    Nothing is read: a block that is damaged stays so, and fails its checksum wherever it is read. Both files are open.
    Raises StorageError when a drive fails.
    """
    rows = list(zip(source.blocks, target.blocks, strict=True))
    for there, here in rows:
        assert there["nbytes"] == here["nbytes"]
        if not _share(source, there, int(here["fd"]), int(here["offset"]), int(there["nbytes"])):
            return False
    for there, here in rows:
        here["crc"] = reseeded(int(there["crc"]), int(there["seed"]), int(here["seed"]), int(there["nbytes"]))
    target.written[:] = True
    return True


def _share(source: Extent, block: np.void, fd: int, offset: int, nbytes: int) -> bool:
    argument = _RANGE.pack(block["fd"], block["offset"], nbytes, offset)
    try:
        fcntl.ioctl(fd, FICLONERANGE, argument)
    except OSError as error:
        if error.errno in _CANNOT:
            return False
        raise StorageError(
            f"sharing {nbytes} bytes of {source.name} with a checkpoint failed: {error.strerror} "
            f"(errno {error.errno}); free space there, or save to another file system"
        ) from error
    return True
