"""Ranks of one machine: words in memory that all of them map, and buffers read where they are.

A message through sockets wakes three threads on its way, and every byte is copied twice. Here a rank writes its words
into a page of its own, posts the number of its turn, and spins a little until the others have posted theirs. Bulk data
is read from the other's memory (process_vm_readv, one copy). A system may forbid either (containers, Yama's
ptrace_scope), or the native library be missing: `Neighbourhood` tries all once, all ranks learn of all results, and who
cannot be reached is left to sockets. Control thread only.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from zero_offload import native
from zero_offload.runtime.ranks.watch import Place, time_limit

_PAGE_WORDS = 512
_NUM_CHANNELS = 4
_POSTED, _READ, _LEFT = 0, 1, 2
"""Words of a page. Two hold a turn: the last that was told; the last whose buffers of others are read no more. The
third says that there will be no other."""
_SLOTS = (8, 256)
"""Turns alternate: a rank posts turn k + 2 after all have posted k + 1, and so have heard k."""
WORDS_MAX = _SLOTS[1] - _SLOTS[0]
_LOOK_EVERY_S = 0.1

Words = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Page:
    """One rank's words in one channel."""

    rank: int
    """The program's number."""
    place: Place
    words: Words

    def address(self, word: int) -> int:
        return int(self.words.ctypes.data) + 8 * word


class Channel:
    """Turns of some ranks, by their number in `pages`: turn k of one meets turn k of all others."""

    at_once = True

    def __init__(self, pages: Sequence[Page], index: int) -> None:
        self._pages, self.num_ranks, self.index = pages, len(pages), index
        self._mine = pages[index]
        self._others = [page for page in pages if page is not self._mine]
        self._turn = 0
        self._limit_s = time_limit().total_seconds()

    def tell(self, words: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's words of this turn, as many as mine. Blocking."""
        slot = _SLOTS[(self._turn + 1) % 2]
        self._mine.words[slot : slot + len(words)] = words
        self._turn += 1
        native.word_post(self._mine.address(_POSTED), self._turn)
        self._wait(_POSTED, self._turn)
        return [tuple(page.words[slot : slot + len(words)].tolist()) for page in self._pages]

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Callable[[], None]:
        """sent[i] is read by rank i, whose part is in received[i] at once; the wait is for others to have read ours."""
        try:
            offers = self.tell([word for tensor in sent for word in (tensor.data_ptr(), tensor.nbytes)])
            for step in range(1, self.num_ranks):
                rank = (self.index + step) % self.num_ranks
                self._read(self._pages[rank], offers[rank][2 * self.index :][:2], received[rank])
        finally:
            # Ctrl-C, too: others wait for this.
            native.word_post(self._mine.address(_READ), self._turn)
        turn = self._turn
        return lambda: self._wait(_READ, turn)

    def _read(self, page: Page, offer: Sequence[int], into: torch.Tensor) -> None:
        address, nbytes = offer
        if nbytes != into.nbytes:
            raise RuntimeError(f"rank {page.rank} sends {nbytes} bytes where {into.nbytes} are expected")
        native.peer_read(page.place.pid, address, into.data_ptr(), nbytes)

    def _wait(self, word: int, at_least: int) -> None:
        """Raises RuntimeError, as a collective does, for a rank that does not come."""
        deadline = time.monotonic() + self._limit_s
        for page in self._others:
            while not native.word_wait(page.address(word), at_least, _LOOK_EVERY_S):
                # Any of them: who comes late may be waiting for one that is gone. It may have come before it went.
                for other in self._others:
                    is_gone = other.place.state() == "gone"
                    if is_gone or other.words[_LEFT]:
                        if native.word_wait(other.address(word), at_least, _LOOK_EVERY_S):
                            continue
                        raise RuntimeError(f"rank {other.rank} is gone" if is_gone else f"rank {other.rank} has left")
                if time.monotonic() > deadline:
                    raise RuntimeError(f"timed out after {self._limit_s:g} s")


@dataclass(frozen=True)
class _Offer:
    """What a rank lets others look for."""

    rank: int
    place: Place
    fd: int
    secret: int
    address: int
    """Of the secret, in its own memory."""


class Neighbourhood:
    """Which of some ranks can reach each other without sockets."""

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int]) -> None:
        """Collective over `group`, of the program's ranks `members`."""
        rank = dist.get_rank()
        self._rank = rank
        self._num_channels = 0
        fd, mine = _make_pages()
        try:
            secret = np.array([secrets.randbits(62)])
            mine[0] = secret[0]
            offer = _Offer(rank, Place.here(), fd, int(secret[0]), int(secret.ctypes.data))
            offers = _all_gather(offer, group, len(members))
            self._words = {rank: mine}
            self._places = {each.rank: each.place for each in offers}
            readable = {each.rank for each in offers if each.rank != rank and self._find(each)}
            seen = set(self._words)
            # Nobody closes what another still looks for, and no turn is posted over a secret.
            table = _all_gather((rank, seen, readable | {rank}), group, len(members))
            mine[0] = 0
            # Nobody counts a turn before all have taken their secret away.
            dist.barrier(group)
        finally:
            if fd >= 0:
                os.close(fd)
        self._seen = {each: seen for each, seen, _ in table}
        self._readable = {each: readable for each, _, readable in table}

    def channel(self, members: Sequence[int], *, reads: bool) -> Channel | None:
        """The next channel, between these ranks; None if sockets must do. All ranks ask in the same order.

        With `reads` it can `exchange`.
        """
        reach = self._readable if reads else self._seen
        number, self._num_channels = self._num_channels, self._num_channels + 1
        assert number < _NUM_CHANNELS
        if 2 * len(members) > WORDS_MAX or any(not set(members) <= reach[member] for member in members):
            return None
        pages = [
            Page(member, self._places[member], self._words[member][number * _PAGE_WORDS : (number + 1) * _PAGE_WORDS])
            for member in members
        ]
        return Channel(pages, list(members).index(self._rank))

    def leave(self) -> None:
        """Whoever waits for this rank in a channel waits in vain."""
        for number in range(self._num_channels):
            self._words[self._rank][number * _PAGE_WORDS + _LEFT] = 1

    def _find(self, offer: _Offer) -> bool:
        """Map another rank's pages, if it can be done; says whether its memory can be read as well."""
        here = Place.here()
        # Without the library nothing here can post a word or wait for one.
        if offer.place[:2] != here[:2] or not native.available():
            return False
        try:
            with open(f"/proc/{offer.place.pid}/fd/{offer.fd}", "r+b", buffering=0) as file:
                words = _map(file.fileno())
        except (OSError, ValueError):
            return False
        if words[0] != offer.secret:
            return False
        self._words[offer.rank] = words
        found = np.zeros(1, dtype=np.int64)
        try:
            native.peer_read(offer.place.pid, offer.address, int(found.ctypes.data), 8)
        except RuntimeError:
            return False
        return bool(found[0] == offer.secret)


def _make_pages() -> tuple[int, Words]:
    """A file without a name, and its memory; where the system has no such file, -1 and memory that nobody finds."""
    try:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("zero_offload ranks")
        else:  # a Python that was built for an old C library
            fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:
        return -1, np.zeros(_NUM_CHANNELS * _PAGE_WORDS, dtype=np.int64)
    os.ftruncate(fd, _NUM_CHANNELS * _PAGE_WORDS * 8)
    return fd, _map(fd)


def _map(fd: int) -> Words:
    return np.frombuffer(mmap.mmap(fd, _NUM_CHANNELS * _PAGE_WORDS * 8), dtype=np.int64)


def _all_gather(mine: Any, group: dist.ProcessGroup, num_ranks: int) -> list[Any]:
    every: list[Any] = [None] * num_ranks
    dist.all_gather_object(every, mine, group=group)
    return every
