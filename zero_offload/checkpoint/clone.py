"""Blocks shared between two files instead of copied, where the file system can (btrfs, XFS made with reflinks).

Owns the system call and what its refusals mean. A shared block is copied by the file system when one of the files
writes to it, so neither sees the other's changes. The calls: `can_share` before the files are made, `clone_blocks`
for each extent, and a copy where either says no.
"""

from __future__ import annotations

import errno
import fcntl
import struct

import numpy as np

from zero_offload.base.errors import StorageError
from zero_offload.base.types import SECTOR
from zero_offload.hardware.kernels.checksums import reseeded
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.swap_file import Extent

FICLONERANGE = 0x4020940D
_RANGE = struct.Struct("=qQQQ")  # source descriptor, its offset, length, offset in the target
_CANNOT = (errno.EOPNOTSUPP, errno.EXDEV, errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ETXTBSY)
"""Another file system, or one that cannot share, or not these blocks: a copy serves."""


def can_share(source: Extent, directory: RunDirectory) -> bool:
    """Whether files in `directory` can share the blocks of an open file: tried on one sector."""
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
