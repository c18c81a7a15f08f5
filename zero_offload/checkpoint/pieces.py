"""Pieces of a generation that lie on another machine's drive: a rank there reads them and sends them.

Owns the rounds in which ranks do so, while a generation is cut anew. In each, every rank says which pieces it needs
next, a chunk of an array at most. It sends those that others need from its machine. Bytes go over the group of commits,
with a checksum. Reads no file itself: the ranks' reading is given. The calls, on all ranks: `open`,
and inside of it `fetch` for what a rank writes next. A rank that needs no more answers the others at the end of `open`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from zero_offload.base.errors import IntegrityError, RankError
from zero_offload.base.host import host_empty, host_tensor, host_zeros
from zero_offload.checkpoint.homes import Homes
from zero_offload.hardware.kernels.checksums import crc32c_of_tensor
from zero_offload.runtime.ranks.watch import raise_first, report_of

_NOTE = 16
"""Bytes before a piece: its checksum, and whether it could be read."""


class Piece(NamedTuple):
    """Elements of a chunk of one array, as one rank has it."""

    rank: int
    section: int
    component: str
    row: int
    begin: int
    end: int


class PieceExchange:
    """The exchange of pieces between the ranks of a run."""

    def __init__(self, homes: Homes, holders: Mapping[int, int]) -> None:
        """`holders`: for each rank of the generation whose files are here, the first rank of a home that has them."""
        self._homes, self._ranks, self._holders = homes, homes.ranks, holders
        self._read: Callable[[Piece], torch.Tensor] | None = None
        """Reads a piece of this machine; (end - begin,), host. None while no exchange is open."""
        self._failure: Exception | None = None
        """The error of a read for others."""
        self._is_over = False
        """True if an error has ended it on all ranks."""

    def reader_of(self, rank: int) -> int:
        """The rank of this run that reads the files of a rank of the generation."""
        members = self._homes.members_of(self._holders[rank])
        return members[rank % len(members)]

    def has(self, rank: int) -> bool:
        """True if some machine has the files of this rank."""
        return rank in self._holders

    def is_here(self, rank: int) -> bool:
        """True if this machine has them."""
        return self._holders.get(rank) == self._homes.firsts[self._ranks.rank]

    def mine(self) -> list[int]:
        """The ranks whose files this one reads for others."""
        return [rank for rank in self._holders if self.reader_of(rank) == self._ranks.rank]

    @contextmanager
    def open(self, read: Callable[[Piece], torch.Tensor]) -> Iterator[None]:
        """Inside, `fetch` works, as often as each rank likes. Succeeds on all ranks, or raises on all. Collective."""
        self._read = read
        try:
            yield
            while self._round([], is_done=True):
                pass
        except Exception as error:
            if not self._is_over and not isinstance(error, RankError):
                self._is_over = True
                self._ranks.gather([False, [], report_of(error)])
            raise
        finally:
            self._read = None

    def fetch(self, pieces: Sequence[tuple[Piece, torch.dtype]]) -> dict[Piece, torch.Tensor]:
        """The elements of these, from other machines. Collective: ranks call it in turn with the others."""
        found = {
            piece: host_empty(_NOTE + (piece.end - piece.begin) * dtype.itemsize, torch.uint8)
            for piece, dtype in pieces
        }
        self._round(list(found.items()), is_done=False)
        values = {}
        for piece, dtype in pieces:
            note, payload = found[piece][:_NOTE].view(torch.int64).tolist(), found[piece][_NOTE:]
            if not note[1]:
                self._round([], is_done=False)  # which raises what its reader has met
            if note[0] != crc32c_of_tensor(payload):
                raise IntegrityError(
                    f"rank {piece.rank}'s {piece.component} of section {piece.section} came from rank "
                    f"{self.reader_of(piece.rank)} with other bytes than it has read there (their checksum differs); "
                    "start again, and see whether the network or memory is at fault"
                )
            values[piece] = payload.view(dtype)
        return values

    def _round(self, wanted: Sequence[tuple[Piece, torch.Tensor]], *, is_done: bool) -> bool:
        """Ranks exchange what they need; True unless all are done. Raises the first error of a rank."""
        if self._failure is not None:
            raise self._failure
        words = self._ranks.gather([is_done, [[*piece, target.nbytes] for piece, target in wanted], None])
        reports = [report for _, _, report in words]
        self._is_over = any(report is not None for report in reports)
        raise_first(None, enumerate(reports))
        self._ranks.ship([(self.reader_of(piece.rank), target) for piece, target in wanted], self._sent(words))
        return not all(done for done, _, _ in words)

    def _sent(self, words: Sequence[Any]) -> Iterator[tuple[int, int, torch.Tensor]]:
        for rank, (_, pieces, _) in enumerate(words):
            for number, (*place, nbytes) in enumerate(pieces):
                piece = Piece(*place)
                if self.reader_of(piece.rank) == self._ranks.rank:
                    yield rank, number, self._packed(piece, nbytes)

    def _packed(self, piece: Piece, nbytes: int) -> torch.Tensor:
        """A piece as it is sent. After an error, bytes that say so: the next round has the error itself."""
        assert self._read is not None
        try:
            values = self._read(piece).contiguous().view(torch.uint8)
        except Exception as error:
            self._failure = self._failure or error
            return host_zeros(nbytes, torch.uint8)
        note = host_tensor([crc32c_of_tensor(values), 1], torch.int64).view(torch.uint8)
        return torch.cat([note, values])
