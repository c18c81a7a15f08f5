"""Rounds of words between ranks of several machines: in pages inside of each, then one between their first ranks.

A round has one size, whatever ranks say. gloo ends the process for a message of another size, and ranks that go
different ways must hear each other. So each has room for some numbers beside the words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from zero_offload.base.host import host_empty, host_zeros
from zero_offload.runtime.ranks.group import Group, RankGroup, gather_few
from zero_offload.runtime.ranks.neighbours import NUMBERS_MAX, Words

_WORDS = 2
_WIDTH_MIN, _WIDTH_MAX, _ROUND_WORDS = 16, 128, 4096
"""Words of a rank in a round between machines, at least and at most; of all ranks together, where that allows it."""


class Levels:
    """The ranks of one model. Where no machine has several of them, there is one level."""

    def __init__(self, group: RankGroup) -> None:
        self._members = sorted(group.members)
        self._machines = group.machines
        self._group, self._firsts, self._near = group.agreement_group, group.firsts, group.near
        self.pages = group.channel
        """Those of all ranks, if one machine runs them."""
        width = max(_WIDTH_MIN, min(_WIDTH_MAX, _ROUND_WORDS // len(self._members)))
        self.most_numbers = NUMBERS_MAX if self.pages is not None else width - _WORDS
        """Numbers of a rank for which a round has room."""
        self._mine: Words = host_zeros(width, torch.int64).numpy()
        self._told: Words = self._mine.reshape(1, -1)
        """(ranks, width): all that was told last."""

    def tell(self, words: Sequence[int], numbers: Sequence[float] = ()) -> list[tuple[int, ...]]:
        """Every rank's two words, in the order of ranks; all tell theirs, and at most `most_numbers` numbers."""
        if self.pages is not None:
            return self.pages.tell(words, numbers)
        self._mine[:_WORDS] = words
        self._mine[_WORDS : _WORDS + len(numbers)].view(np.float64)[:] = numbers
        self._told = self._gather(self._mine)
        return list(map(tuple, self._told[:, :_WORDS].tolist()))

    def numbers(self, count: int) -> list[list[float]]:
        """Every rank's numbers of the last round, in which all told so many."""
        if self.pages is not None:
            return self.pages.numbers(count)
        found: list[list[float]] = self._told[:, _WORDS : _WORDS + count].view(np.float64).tolist()
        return found

    def many(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, in a round of their own. All have said before that they tell so many."""
        found: list[list[float]] = self._gather(np.array(numbers, np.float64).view(np.int64)).view(np.float64).tolist()
        return found

    def _gather(self, mine: Words) -> Words:
        """(ranks, n): every rank's words, (n,), in the order of ranks."""
        num_ranks, most = len(self._members), max(map(len, self._machines))
        if self.pages is not None or most == 1 or num_ranks * len(mine) > NUMBERS_MAX:
            return _gathered(mine, num_ranks, self._group)
        near = mine.reshape(1, -1) if self._near is None else self._near.gather(mine)
        every: Words = host_zeros((num_ranks, len(mine)), torch.int64).numpy()
        if self._firsts is not None:
            here = host_zeros((most, len(mine)), torch.int64).numpy()
            here[: len(near)] = near
            told = _gathered(here.reshape(-1), len(self._machines), self._firsts).reshape(len(self._machines), most, -1)
            for ranks, of_machine in zip(self._machines, told, strict=True):
                every[[self._members.index(rank) for rank in ranks]] = of_machine[: len(ranks)]
        return every if self._near is None else self._near.of_first(every.reshape(-1)).reshape(num_ranks, -1)


def _gathered(mine: Words, num_ranks: int, group: Group) -> Words:
    every = host_empty(num_ranks * len(mine), torch.int64)
    gather_few(every, torch.from_numpy(mine), group=group)
    found: Words = every.view(num_ranks, -1).numpy()
    return found
