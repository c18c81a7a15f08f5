"""Bytes that ranks of one machine leave for each other in pages that all of them map.

A message through sockets is copied into the kernel and out again, and wakes a thread on each side. Here a rank puts its
bytes down once, and the others read them where they lie. It never waits for room: where others have not taken what lies
there, it says so, and the bytes go as messages. The calls, per exchange: `begin`, `put` on one or two lanes, `take` for
each other rank and lane, `end`. Exchanges are numbered alike on all ranks. A further thread may put.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from zero_offload.plan.memory import NEAR_ROOM
from zero_offload.runtime.ranks.neighbours import Neighbours, Page, open_pages

_TAKEN = 2
"""Word of a page: this rank has ended all exchanges with numbers up to that."""
_HEAD, _SLOTS, _LANES, _SLOT_WORDS = 8, 1024, 2, 3
"""Of an exchange and lane: its number, the tag of the bytes, and where they lie."""
_HEAD_WORDS = _HEAD + _SLOTS * _LANES * _SLOT_WORDS
_ALIGNED = 64
_NOWHERE = -1
_LOOK_EVERY_S = 0.05


class _Flight:
    """An exchange that is under way. Where it is dropped without an end, none of its bytes are taken any more."""


class NearBytes(Neighbours):
    """Pages for bytes. Members are told by their number among all ranks of the exchange."""

    def __init__(self, pages: Sequence[Page], index: int, numbers: Sequence[int]) -> None:
        super().__init__(pages, index)
        self._page_of = dict(zip(numbers, pages, strict=True))
        self._bytes_of = {
            number: torch.from_numpy(page.words[_HEAD_WORDS:]).view(torch.uint8)
            for number, page in self._page_of.items()
        }
        self._room = self._bytes_of[numbers[index]]
        self._puts = threading.Lock()
        self._held: list[tuple[int, int, int]] = []
        """Begin and end of what lies in the room, in their order, and the exchange whose bytes these are."""
        self._open: weakref.WeakValueDictionary[int, _Flight] = weakref.WeakValueDictionary()
        self._last = 0
        self._why = ""
        """The error by which this rank hands nothing on any more; empty while it does."""

    def begin(self, number: int) -> _Flight:
        """Numbers ascend."""
        self._last = number
        flight = self._open[number] = _Flight()
        return flight

    def end(self, number: int) -> None:
        """This rank needs nothing of the exchange any more."""
        self._open.pop(number, None)
        # By a post: on processors that reorder, a plain store may be seen before the reads of the bytes are over.
        self._mine.post(_TAKEN, min(self._open, default=self._last + 1) - 1)

    def put(self, number: int, lane: int, tag: int, pieces: Sequence[torch.Tensor]) -> bool:
        """Lay down `pieces`, (nbytes,) uint8, one behind the other. False if there is no room: others learn that, and
        wait for messages."""
        with self._puts:
            at = begin = self._place(sum(piece.numel() for piece in pieces), number)
        if at != _NOWHERE:
            for piece in pieces:
                end = begin + piece.numel()
                self._room[begin:end].copy_(piece)
                begin = end
        slot = _slot(number, lane)
        self._mine.words[slot + 1 : slot + 3] = tag, at
        self._mine.post(slot, number)
        return at != _NOWHERE

    def take(self, member: int, number: int, lane: int, tag: int) -> torch.Tensor | None:
        """The bytes of that rank, (nbytes and more,) uint8, to be read until `end`; None if messages come.

        Bytes with another tag are never taken. Raises RuntimeError, as a collective does, for a rank that does not
        come.
        """
        page, slot = self._page_of[member], _slot(number, lane)
        self._wait_until(page, slot, number)
        deadline = time.monotonic() + self._limit_s
        while page.words[slot + 1] != tag:  # that rank goes another way, and connections end
            time.sleep(_LOOK_EVERY_S)
            self._look_after(slot, number + 1, deadline)
        at = int(page.words[slot + 2])
        return None if at == _NOWHERE else self._bytes_of[member][at:]

    def give_up(self, why: str) -> None:
        """This rank hands nothing on any more: waits for it end, here and on its neighbours. Any thread may call."""
        self._why = why
        self.leave()

    def _look_after(self, word: int, at_least: int, deadline: float) -> None:
        if self._why:
            raise RuntimeError(self._why)
        super()._look_after(word, at_least, deadline)

    def _place(self, nbytes: int, number: int) -> int:
        """The first place with room for so many bytes: where little is under way, the same memory is used again."""
        taken = min(int(page.words[_TAKEN]) for page in self._others)
        self._held = [each for each in self._held if each[2] > taken]
        begin = 0
        for used, end, _ in self._held:
            if begin + nbytes <= used:
                break
            begin = -(-end // _ALIGNED) * _ALIGNED
        if begin + nbytes > NEAR_ROOM:
            return _NOWHERE
        self._held = sorted([*self._held, (begin, begin + nbytes, number)])
        return begin


def _slot(number: int, lane: int) -> int:
    return _HEAD + (number % _SLOTS * _LANES + lane) * _SLOT_WORDS


def open_near_bytes(
    group: dist.ProcessGroup | None, members: Sequence[int]
) -> tuple[NearBytes | None, list[list[int]]]:
    """Pages of those of the program's ranks `members` that this machine runs, and the members of each machine, by
    number. Collective over `group`, which are the same ranks, ascending."""
    pages, machines = open_pages(group, members, _HEAD_WORDS + NEAR_ROOM // 8)
    numbers = {rank: number for number, rank in enumerate(members)}
    near = None
    if len(pages) > 1:
        index = [page.rank for page in pages].index(dist.get_rank())
        near = NearBytes(pages, index, [numbers[page.rank] for page in pages])
    return near, [[numbers[rank] for rank in ranks] for ranks in machines]
