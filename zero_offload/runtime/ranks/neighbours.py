"""Ranks of one machine tell each other words in pages that all of them map. `NearBytes` has pages for bytes.

A message through sockets wakes three threads on its way. Here a rank writes its words into its own page and posts the
number of its turn. Who needs the others' words spins a little until they have posted theirs. A rank may post some turns
before it hears those of the others (`TURNS_AHEAD`). A system may forbid shared pages (containers), or the native
library may be missing: `open_channel` tries once, and all ranks learn of the result. Control thread only.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from zero_offload.base.alike import name_ranks
from zero_offload.hardware import native
from zero_offload.runtime.ranks import sockets
from zero_offload.runtime.ranks.watch import ErrorReport, RankProcess, StoppedProcesses, time_limit

TURNS_AHEAD = 16
"""A rank posts turn k + 16 after it has heard turn k of all others."""
_TURNS_KEPT = 4 * TURNS_AHEAD
"""A rank has heard k - 16 when it posts k, so all others have posted that, and heard k - 32. A parting skips 16 turns
at once."""
NUMBERS_MAX = 1 << 14
"""Numbers that one turn may have. Memory is taken when it is first used."""

_POSTED, _LEFT = 0, 1
"""Words of a page: the last turn that was told; 1 if no other follows."""
_WORDS, _TEXT_WORDS, _REPORT_WORDS = 2, 32, 512
"""Of a turn; of its text, and of an error, in UTF-8."""
_SLOTS = 8
_TEXTS = _SLOTS + _TURNS_KEPT * _WORDS
_REPORT = _TEXTS + _TURNS_KEPT * _TEXT_WORDS
_NUMBERS = _REPORT + _REPORT_WORDS
"""Two places, which turns with numbers take by turns: each of these turns is heard before the next one is posted."""
_PAGE_WORDS = _NUMBERS + 2 * NUMBERS_MAX
_LOOK_EVERY_S = 0.1

Words = npt.NDArray[np.int64]
Numbers = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True)
class Page:
    """One rank's words."""

    rank: int
    """The program's number."""
    place: RankProcess
    words: Words

    def address(self, word: int) -> int:
        return int(self.words.ctypes.data) + 8 * word

    def post(self, word: int, value: int) -> None:
        """Write a word; who waits for it sees all that was written before."""
        native.word_post(self.address(word), value)

    def put_text(self, at: int, num_words: int, text: str) -> None:
        """The text, or as much as there is room for, its length first."""
        written = text.encode()[: (num_words - 1) * 8]
        self.words[at] = len(written)
        self.words[at + 1 : at + num_words].view(np.uint8)[: len(written)] = np.frombuffer(written, np.uint8)

    def text(self, at: int, num_words: int) -> str:
        written = self.words[at + 1 : at + num_words].view(np.uint8)[: int(self.words[at])]
        return written.tobytes().decode(errors="ignore")

    def numbers(self, turn: int, count: int) -> npt.NDArray[np.float64]:
        """The place of a turn that has so many numbers."""
        at = _numbers_at(turn)
        return self.words[at : at + count].view(np.float64)


def _slot(turn: int) -> int:
    return _SLOTS + turn % _TURNS_KEPT * _WORDS


def _numbers_at(turn: int) -> int:
    return _NUMBERS + turn % 2 * NUMBERS_MAX


def _text(turn: int) -> int:
    return _TEXTS + turn % _TURNS_KEPT * _TEXT_WORDS


class Neighbours:
    """Pages of some ranks of this machine."""

    def __init__(self, pages: Sequence[Page], index: int) -> None:
        """`pages[index]` is this rank's."""
        self._pages, self._mine = pages, pages[index]
        self._others = [page for page in pages if page is not self._mine]
        self._stopped = StoppedProcesses()
        self._limit_s = time_limit().total_seconds()
        self._num_ends = sockets.num_ends

    def leave(self) -> None:
        """This rank posts nothing more: ranks that wait for it learn so at once."""
        self._mine.words[_LEFT] = 1

    def _wait_until(self, page: Page, word: int, at_least: int) -> None:
        """Return when that word of the page is at least so large.

        Raises RuntimeError, as a collective does, for a rank that does not come.
        """
        if not _is_reached(page, word, at_least):
            deadline = time.monotonic() + self._limit_s
            while not _is_reached(page, word, at_least):
                self._look_after(word, at_least, deadline)

    def _look_after(self, word: int, at_least: int, deadline: float) -> None:
        # All of them: a late rank may itself wait for a rank that is gone, which may have posted before.
        for page in self._others:
            is_gone = page.place.state() == "gone"
            if (is_gone or page.words[_LEFT]) and not _is_reached(page, word, at_least):
                raise RuntimeError(f"rank {page.rank} is gone" if is_gone else f"rank {page.rank} has left")
        if stopped := self._stopped.among({page.rank: page.place for page in self._others}):
            raise RuntimeError(f"{name_ranks(stopped)} stopped")
        if sockets.num_ends > self._num_ends:
            raise RuntimeError("connections between ranks have ended")
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out after {self._limit_s:g} s")


def _is_reached(page: Page, word: int, at_least: int) -> bool:
    return native.word_wait(page.address(word), at_least, _LOOK_EVERY_S)


class Channel(Neighbours):
    """Turns of some ranks: turn k of one meets turn k of all others."""

    def __init__(self, pages: Sequence[Page], index: int) -> None:
        super().__init__(pages, index)
        self._turn = self._num_with_numbers = 0

    def post(self, words: Sequence[int], text: str = "", numbers: Numbers = (), report: ErrorReport = None) -> None:
        """Take the next turn, with one or two words. It waits for no other rank."""
        self._turn += 1
        slot = _slot(self._turn)
        self._mine.words[slot : slot + len(words)] = words
        self._mine.put_text(_text(self._turn), _TEXT_WORDS, text)
        if report is not None:
            self._mine.put_text(_REPORT, _REPORT_WORDS, "\n".join(report))
        if len(numbers):
            self._num_with_numbers += 1
            self._mine.numbers(self._num_with_numbers, len(numbers))[:] = numbers
        self._mine.post(_POSTED, self._turn)

    def tell(self, words: Sequence[int], numbers: Numbers = ()) -> list[tuple[int, ...]]:
        """Every rank's words of the next turn."""
        self.post(words, numbers=numbers)
        self.wait(self._turn)
        return self.words(self._turn)

    def gather(self, mine: Words) -> Words:
        """(ranks, n): every rank's words, (n,), in a turn of their own."""
        self.tell((0, 0), mine.view(np.float64))
        return np.stack([page.numbers(self._num_with_numbers, len(mine)).view(np.int64) for page in self._pages])

    def of_first(self, words: Words) -> Words:
        """(n,): the first rank's words, on all ranks, in a turn of their own."""
        self.tell((0, 0), words.view(np.float64))
        return self._pages[0].numbers(self._num_with_numbers, len(words)).view(np.int64).copy()

    def wait(self, turn: int) -> None:
        """Return when all ranks have taken that turn.

        Raises RuntimeError, as a collective does, for a rank that does not come.
        """
        for page in self._others:
            self._wait_until(page, _POSTED, turn)

    def words(self, turn: int) -> list[tuple[int, ...]]:
        """Every rank's words of one of the last turns, which all have taken."""
        slot = _slot(turn)
        return [tuple(page.words[slot : slot + _WORDS].tolist()) for page in self._pages]

    def texts(self, turn: int) -> list[tuple[str, ErrorReport]]:
        """Every rank's text of one of the last turns, which all have taken, and the last error that each has told."""
        found = []
        for page in self._pages:
            name, _, text = page.text(_REPORT, _REPORT_WORDS).partition("\n")
            found.append((page.text(_text(turn), _TEXT_WORDS), (name, text) if name else None))
        return found

    def numbers(self, count: int) -> list[list[float]]:
        """Every rank's numbers of the last turn that had some, which all have taken."""
        return [page.numbers(self._num_with_numbers, count).tolist() for page in self._pages]

    def skip_to(self, turn: int) -> None:
        """The turn after that is the next one, on all ranks."""
        self._turn = turn
        self.begin_numbers()

    def begin_numbers(self) -> None:
        """All ranks have heard all turns that had numbers, perhaps of some of them alone."""
        self._num_with_numbers = 0

    def late(self) -> list[int]:
        """Ranks that have not taken this rank's turn yet. Any thread may ask."""
        return [page.rank for page in self._others if page.words[_POSTED] < self._turn]


@dataclass(frozen=True)
class _PageAddress:
    """Where other ranks look for a rank's page, and the first word by which they know it."""

    rank: int
    place: RankProcess
    fd: int
    secret: int


def open_channel(group: dist.ProcessGroup, members: Sequence[int]) -> tuple[Channel | None, list[list[int]]]:
    """A channel between those of the program's ranks `members` that this machine runs; and as `open_pages`.

    A rank that is alone there has no channel.
    """
    pages, machines = open_pages(group, members, _PAGE_WORDS)
    return (Channel(pages, _index(pages)) if len(pages) > 1 else None), machines


def open_pages(
    group: dist.ProcessGroup | None, members: Sequence[int], num_words: int
) -> tuple[list[Page], list[list[int]]]:
    """Pages of those of the program's ranks `members` that this machine runs, and the ranks of each machine.

    Where ranks of a machine cannot map each other's pages, each counts as a machine. Collective over `group`, which are
    the same ranks, ascending.
    """
    rank = dist.get_rank()
    fd, mine = _make_page(num_words)
    try:
        secret = secrets.randbits(62)
        mine[0] = secret
        offers = _all_gather(_PageAddress(rank, RankProcess.here(), fd, secret), group, len(members))
        pages = {each.rank: mine if each.rank == rank else _find(each, num_words) for each in offers}
        # No rank closes a file that another still looks for, nor posts a turn over its secret.
        reached = _all_gather({each for each, words in pages.items() if words is not None}, group, len(members))
        mine[0] = 0
        # No rank counts a turn before all have taken their secret away.
        dist.barrier(group)
    finally:
        if fd >= 0:
            os.close(fd)
    by_machine: dict[tuple[str, str], list[int]] = {}
    for offer in offers:
        by_machine.setdefault((offer.place.host, offer.place.namespace), []).append(offer.rank)
    reaches = dict(zip(members, reached, strict=True))
    machines = [
        part
        for ranks in by_machine.values()
        for part in ([ranks] if all(reaches[each] >= set(ranks) for each in ranks) else [[each] for each in ranks])
    ]
    (here,) = (ranks for ranks in machines if rank in ranks)
    places = {each.rank: each.place for each in offers}
    return [Page(each, places[each], words) for each in here if (words := pages[each]) is not None], machines


def _index(pages: Sequence[Page]) -> int:
    return [page.rank for page in pages].index(dist.get_rank())


def _find(offer: _PageAddress, num_words: int) -> Words | None:
    """Map another rank's page, if the system lets this process."""
    # Without the library nothing here can post a word or wait for one.
    if offer.place[:2] != RankProcess.here()[:2] or not native.available():
        return None
    try:
        with open(f"/proc/{offer.place.pid}/fd/{offer.fd}", "r+b", buffering=0) as file:
            words = _map(file.fileno(), num_words)
    except (OSError, ValueError):
        return None
    return words if words[0] == offer.secret else None


def _make_page(num_words: int) -> tuple[int, Words]:
    """A file without a name, and its memory; -1 and memory of this process alone where the system has no such file."""
    try:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("zero_offload ranks")
        else:  # a Python that was built for an old C library
            fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:
        return -1, np.zeros(num_words, dtype=np.int64)
    os.ftruncate(fd, num_words * 8)
    return fd, _map(fd, num_words)


def _map(fd: int, num_words: int) -> Words:
    return np.frombuffer(mmap.mmap(fd, num_words * 8), dtype=np.int64)


def _all_gather(mine: Any, group: dist.ProcessGroup | None, num_ranks: int) -> list[Any]:
    every: list[Any] = [None] * num_ranks
    dist.all_gather_object(every, mine, group=group)
    return every
