"""One file of a base model, safetensors in a local folder, and what is known of its bytes.

Opens it to read only and locks nothing: any number of runs share it. Knows offsets, not tensors. `base_files.py` reads
blocks of it.

[Note: what is known of a base]
These files have no checksums. The first read of a block makes its CRC-32C. Every later read is verified against it,
also in a run that goes on from a generation, which keeps the checksums. Files must be alike before a generation is
resumed, or a copy of the folder takes the place of the first one. Compared are name, size, header (so the
names, dtypes, shapes and places of all tensors) and the bytes of two blocks. Two fine-tunes of one model differ in
these blocks. A file that differs elsewhere is found by the first read of a block that differs, if it was ever read
before. The time of a file's last change is recorded and not compared: a copy or a `touch` changes it, and no byte.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import mmap
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zero_offload.base.errors import IntegrityError, StorageError
from zero_offload.base.types import MIB, SECTOR
from zero_offload.hardware.kernels.checksums import crc32c
from zero_offload.storage.files.directory import DataFile
from zero_offload.storage.files.system import REAL, naming_errors

BLOCK_BYTES = MIB
"""The unit of checksums, counted from the start of a file. Never to be changed: generations keep checksums."""
LENGTH_NBYTES = 8
"""A safetensors file begins with the length of its header."""
HEADER_NBYTES_MAX = 100_000_000
"""The limit of the format."""
_NBYTES_MAX = 1 << 44
"""Of a file that a record may name: its checksums take memory."""

NEW_PLACE = 'call zo.load_pretrained(model, "its new place/") after zo.offload'
"""The remedy to type where a base has moved."""


class BaseFile:
    """One file of a base, and what is known of its bytes."""

    def __init__(self, path: Path, nbytes: int, mtime_ns: int, head: str) -> None:
        """`head`: the digest of the file up to its data."""
        self.path = path
        self.nbytes = nbytes
        self.mtime_ns = mtime_ns
        self.head = head
        self.crcs = np.zeros(-(-nbytes // BLOCK_BYTES), dtype=np.uint32)
        self.known = np.zeros(len(self.crcs), dtype=np.bool_)
        """Blocks that have a checksum."""
        self.problem = ""
        """Why it is not open, where it is to be read."""
        self._direct: DataFile | None = None
        self._buffered: DataFile | None = None
        self._opened: list[DataFile] = []
        """With those of earlier places, which reads under way may still use."""
        self._identity = (0, 0)

    @classmethod
    def open(cls, path: Path) -> BaseFile:
        """Raises StorageError and IntegrityError."""
        path = path.absolute()
        with contextlib.ExitStack() as undo:
            found = _open_to_read(path)
            undo.callback(found.close)
            info = REAL.fstat(found.fd)
            file = cls(path, info.st_size, info.st_mtime_ns, _head_of(found))
            file._buffered, file._identity = found, (info.st_dev, info.st_ino)
            file._direct = _open_direct(found) or found
            file._opened = file.descriptors
            undo.callback(file.close)
            for block in file.samples:
                file.crcs[block], file.known[block] = file._read_crc(block), True
            undo.pop_all()
        return file

    @property
    def samples(self) -> list[int]:
        """Blocks that are read when the file is opened."""
        return sorted({len(self.crcs) // 2, len(self.crcs) - 1}) if self.nbytes else []

    @property
    def fingerprint(self) -> str:
        """See [Note: what is known of a base]."""
        samples = [int(self.crcs[block]) for block in self.samples]
        return hashlib.sha256(f"{self.path.name} {self.nbytes} {self.head} {samples}".encode()).hexdigest()

    @property
    def is_open(self) -> bool:
        return self._buffered is not None and self._buffered.fd >= 0

    def open_at(self, path: Path) -> BaseFile:
        """The file of this name, which `become` takes over. Raises IntegrityError where it is not like this one."""
        there = BaseFile.open(path)
        try:
            self._check_alike(there)
        except BaseException:
            there.close()
            raise
        return there

    def become(self, there: BaseFile) -> None:
        """Be read where a file lies that is alike."""
        self.path, self.mtime_ns, self.problem = there.path, there.mtime_ns, ""
        self._direct, self._buffered, self._identity = there._direct, there._buffered, there._identity
        self._opened += there._opened

    def _check_alike(self, other: BaseFile) -> None:
        differ = "size" if self.nbytes != other.nbytes else "header" if self.head != other.head else ""
        for block in self.samples if not differ else ():
            if self.known[block] and self.crcs[block] != other.crcs[block]:
                differ = f"content (block {block + 1} of {len(self.crcs)})"
        if differ:
            raise IntegrityError(
                f"{other.path} is not the file that was read before as {self.path}: it has another {differ}"
            )

    def fds(self, block: int) -> tuple[int, int]:
        """The descriptor to read a block by, and its bytes. O_DIRECT takes whole sectors only."""
        assert self._direct is not None and self._buffered is not None
        nbytes = min(BLOCK_BYTES, self.nbytes - block * BLOCK_BYTES)
        return (self._direct if nbytes % SECTOR == 0 else self._buffered).fd, nbytes

    @property
    def descriptors(self) -> list[DataFile]:
        return [each for each in (self._direct, self._buffered) if each is not None]

    def check_is(self, fd: int) -> None:
        """Raise IntegrityError unless a descriptor by which the header was read is this file's."""
        info = REAL.fstat(fd)
        if (info.st_dev, info.st_ino) != self._identity:
            raise IntegrityError(
                f"{self.path} was replaced by another file after its header was read; call zo.load_pretrained again, "
                "on a model that is built anew"
            )

    def what_changed(self) -> str:
        """A clause about the file that has this name now; empty where it is still the open file."""
        try:
            info = os.stat(self.path)
        except OSError as error:
            return f"cannot be found any more ({error.strerror})"
        if (info.st_dev, info.st_ino) != self._identity:
            return "was replaced by another file"
        return self.what_became_of_size(info)

    def what_became_of_size(self, info: os.stat_result | None = None) -> str:
        assert self._buffered is not None
        size = (info or REAL.fstat(self._buffered.fd)).st_size
        return "" if size == self.nbytes else f"has {size} bytes now, and had {self.nbytes}"

    def _read_crc(self, block: int) -> int:
        assert self._buffered is not None
        nbytes = self.fds(block)[1]
        with naming_errors("read", self.path):
            content = os.pread(self._buffered.fd, nbytes, block * BLOCK_BYTES)
        if len(content) < nbytes:
            raise IntegrityError(f"{self.path} has become shorter while it was read; get it again")
        return crc32c(np.frombuffer(content, dtype=np.uint8).ctypes.data, nbytes)

    def close(self) -> None:
        for each in self._opened:
            each.close()

    # Records

    @property
    def record(self) -> dict[str, Any]:
        """The file's record in a generation, the same on all ranks."""
        samples = {str(block): int(self.crcs[block]) for block in self.samples if self.known[block]}
        return {
            "path": str(self.path),
            "nbytes": self.nbytes,
            "mtime_ns": self.mtime_ns,
            "head": self.head,
            "samples": samples,
        }

    @property
    def hashes(self) -> dict[str, str]:
        """The checksums that this rank knows."""
        known = self.known.copy()
        return {"known": _text(np.packbits(known)), "crcs": _text(self.crcs[known].astype("<u4"))}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> BaseFile:
        """Not open yet. Raises ValueError and its like for what is not such a record."""
        if not 0 < (nbytes := int(record["nbytes"])) < _NBYTES_MAX:
            raise ValueError(f"a file of {nbytes} bytes")
        file = cls(Path(record["path"]), nbytes, int(record["mtime_ns"]), str(record["head"]))
        file.problem = "is not open"
        for block, crc in record["samples"].items():
            file.crcs[int(block)], file.known[int(block)] = int(crc), True
        return file

    def learn(self, hashes: Mapping[str, str]) -> None:
        """Take checksums that were made before. Raises IntegrityError where one contradicts what is known."""
        known = np.unpackbits(_array(hashes["known"], "u1"), count=len(self.crcs)).astype(np.bool_)
        crcs = np.zeros_like(self.crcs)
        crcs[known] = _array(hashes["crcs"], "<u4")
        if (differ := known & self.known & (crcs != self.crcs)).any():
            raise IntegrityError(
                f"{self.path}: two records of its {int(differ.argmax()) + 1}. MiB contradict each other, so it has "
                "changed between two reads; get the file again as it was"
            )
        self.crcs[known] = crcs[known]
        self.known |= known


def _text(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: str) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)


def _open_to_read(path: Path) -> DataFile:
    with naming_errors("open", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    info = REAL.fstat(fd)
    file = DataFile(fd, path, info.st_size, REAL)
    if not stat.S_ISREG(info.st_mode):
        file.close()
        raise StorageError(f"{path} is not a file; name a folder of safetensors files")
    return file


def _head_of(file: DataFile) -> str:
    """The digest of a safetensors file up to its data."""
    with naming_errors("read", file.path):
        nbytes = int.from_bytes(os.pread(file.fd, LENGTH_NBYTES, 0), "little")
        return hashlib.sha256(os.pread(file.fd, LENGTH_NBYTES + min(nbytes, HEADER_NBYTES_MAX), 0)).hexdigest()


def _open_direct(file: DataFile) -> DataFile | None:
    """The same file past the page cache; None where its file system refuses that, at once or with the first read."""
    try:
        fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None
    direct = DataFile(fd, file.path, file.nbytes, REAL)
    with naming_errors("read", file.path):
        try:
            os.preadv(fd, [mmap.mmap(-1, SECTOR)], 0)
        except OSError as error:
            direct.close()
            if error.errno != errno.EINVAL:
                raise
            return None
    return direct


class Stretch(NamedTuple):
    """[begin, end) of an array, and the host memory that it goes to."""

    begin: int
    end: int
    address: int


@dataclass(frozen=True)
class BaseSpan:
    """Bytes [begin, begin + nbytes) of a section, and where they lie in a file."""

    begin: int
    nbytes: int
    file: BaseFile
    offset: int

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


def check_in_place(files: Iterable[BaseFile]) -> None:
    """Raise IntegrityError unless the names of these files lead to what is open: a generation is about to name them."""
    for file in files:
        if what := file.what_changed():
            raise changed_error(file, what)


def changed_error(file: BaseFile, what: str) -> IntegrityError:
    return IntegrityError(
        f"{file.path}, a file of the base that this model reads in place, {what}. Put the file back as it was "
        f"({file.nbytes} bytes), or, if a copy of the folder is elsewhere, {NEW_PLACE} with existing='resume'. With "
        "another base a run starts over: existing='discard'"
    )


def missing_text(files: Sequence[BaseFile]) -> str:
    """The error text for files that are to be read and are not there."""
    first = files[0]
    more = f" and {len(files) - 1} more files" if files[1:] else ""
    return (
        f"the base of this model lies in {first.path}{more}, and cannot be read there: {first.problem}. "
        f"If its folder is somewhere else now, {NEW_PLACE}"
    )


def fingerprint_of(files: Iterable[BaseFile]) -> str:
    """The fingerprint of a base; see [Note: what is known of a base]."""
    return hashlib.sha256(" ".join(sorted(file.fingerprint for file in files)).encode()).hexdigest()
