"""The rows of a shard: states that no kernel knows, packed parameter by parameter into one array of bytes.

Owns the directory at the array's begin: which parameter's state lies where, and the class of the optimizer that made
it. A parameter is known by its first element in the section, which stays when the model names it otherwise. The bytes
of a row are `optim/unitwise`'s. An array of zeros has no rows. The calls: `Rows` reads a directory; `room` says how
long an array has to be; `lay` writes a directory, after which the rows are written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from zero_offload.base.errors import IntegrityError
from zero_offload.base.host import host_tensor

_MAGIC = b"zo_rows\x01"
_HEAD = 16
"""Bytes of the magic number and the directory's length."""
_ALIGN = 64


class Row(NamedTuple):
    """One parameter's state in an array of rows."""

    begin: int
    nbytes: int
    kind: str
    """The optimizer's class: its module and name."""


def read_directory(read: Callable[[int, int], torch.Tensor], nbytes: int, where: str) -> Mapping[int, Row]:
    """The directory of an array of `nbytes`; `read` gives its bytes from one to another, (n,) uint8, host. Raises
    IntegrityError, with `where`, for an array that has none."""
    head = read(0, _HEAD).numpy().tobytes()
    if not any(head):
        return {}
    length = int.from_bytes(head[len(_MAGIC) :], "little")
    if not head.startswith(_MAGIC) or length > nbytes - _HEAD:
        raise _broken(where, "its first bytes are not those of a directory")
    try:
        directory = _directory(read(_HEAD, _HEAD + length).numpy().tobytes())
    except (ValueError, TypeError) as error:
        raise _broken(where, f"its directory cannot be read: {error}") from error
    for key, row in directory.items():
        begins_well = isinstance(row.begin, int) and row.begin % _ALIGN == 0 and row.begin >= _HEAD + length
        if not (begins_well and isinstance(row.nbytes, int) and 0 < row.nbytes <= nbytes - row.begin):
            raise _broken(where, f"the row of element {key} lies outside")
    return directory


@lru_cache(maxsize=256)
def _directory(text: bytes) -> Mapping[int, Row]:
    """As JSON has it; the same in each step."""
    return {int(key): Row(*row) for key, *row in json.loads(text)}


@dataclass(frozen=True)
class Rows:
    """An array of rows, (n,) uint8, host, and its directory."""

    array: torch.Tensor
    directory: Mapping[int, Row]
    """By the parameter's first element."""

    @classmethod
    def read(cls, array: torch.Tensor, where: str) -> Rows:
        """Raises IntegrityError as `read_directory`."""
        return cls(array, read_directory(lambda begin, end: array[begin:end], array.numel(), where))

    def sizes(self) -> dict[int, tuple[int, str]]:
        """As `lay` takes them."""
        return {key: (row.nbytes, row.kind) for key, row in self.directory.items()}

    def __contains__(self, key: int) -> bool:
        return key in self.directory

    def __getitem__(self, key: int) -> torch.Tensor:
        """(nbytes,) of a parameter's row; a view."""
        row = self.directory[key]
        return self.array[row.begin : row.begin + row.nbytes]


def room(rows: Mapping[int, tuple[int, str]]) -> int:
    """Bytes of an array of rows of these sizes and kinds, by the parameters' first elements."""
    directory = _laid(rows)
    return max((row.begin + _whole(row.nbytes) for row in directory.values()), default=_HEAD)


def lay(array: torch.Tensor, rows: Mapping[int, tuple[int, str]]) -> Rows:
    """Write the directory of rows of these sizes and kinds. The rows hold what was there before."""
    directory = _laid(rows)
    text = _text(directory)
    head = _MAGIC + len(text).to_bytes(_HEAD - len(_MAGIC), "little") + text
    array[: len(head)] = host_tensor(list(head), torch.uint8)
    return Rows(array, directory)


def _laid(rows: Mapping[int, tuple[int, str]]) -> dict[int, Row]:
    """The directory, whose length depends on the numbers in it: their room is that of the largest."""
    longest = {key: Row(1 << 50, nbytes, kind) for key, (nbytes, kind) in rows.items()}
    begin, directory = _whole(_HEAD + len(_text(longest))), dict[int, Row]()
    for key, (nbytes, kind) in rows.items():
        directory[key] = Row(begin, nbytes, kind)
        begin += _whole(nbytes)
    return directory


def _text(directory: Mapping[int, Row]) -> bytes:
    return json.dumps([[key, *row] for key, row in directory.items()], separators=(",", ":")).encode()


def _whole(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _broken(where: str, problem: str) -> IntegrityError:
    return IntegrityError(
        f"{where}: the optimizer's states were written by another version, or are damaged ({problem}). Load a "
        "checkpoint, or start over with existing='discard'"
    )
