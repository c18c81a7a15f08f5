"""Rounds of words between ranks of several machines: in pages inside of each, then one between their first ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zero_offload.base.host import host_empty, host_tensor
from zero_offload.runtime.ranks.group import Group, RankGroup, gather_few
from zero_offload.runtime.ranks.neighbours import NUMBERS_MAX

_WORDS = 2


class Levels:
    """The ranks of one model. Where no machine has several of them, there is one level."""

    def __init__(self, group: RankGroup) -> None:
        self._members = sorted(group.members)
        self._machines = group.machines
        self._group, self._firsts, self._near = group.agreement_group, group.firsts, group.near
        self.pages = group.channel
        """Those of all ranks, if one machine runs them."""
        self._has_levels = max(map(len, self._machines)) > 1 and _WORDS * len(self._members) <= NUMBERS_MAX

    def tell(self, words: Sequence[int], numbers: Sequence[float] = ()) -> list[tuple[int, ...]]:
        """Every rank's two words, in the order of ranks; all tell theirs. `numbers` stay in the pages of all ranks."""
        if self.pages is not None:
            return self.pages.tell(words, numbers)
        if not self._has_levels:
            return _pairs(_gathered(words, len(self._members), self._group))
        near = [tuple(words)] if self._near is None else self._near.tell(words)
        flat: list[int] = []
        if self._firsts is not None:
            most = max(map(len, self._machines))
            here = [word for pair in near for word in pair]
            every = _gathered(here + [0] * (_WORDS * most - len(here)), len(self._machines), self._firsts)
            told = {
                rank: every[_WORDS * (number * most + place) :][:_WORDS]
                for number, ranks in enumerate(self._machines)
                for place, rank in enumerate(ranks)
            }
            flat = [word for rank in self._members for word in told[rank]]
        if self._near is not None:
            flat = self._near.of_first(flat, _WORDS * len(self._members))
        return _pairs(flat)


def _gathered(words: Sequence[int], num_ranks: int, group: Group) -> list[int]:
    mine = host_tensor(words, torch.int64)
    every = host_empty(num_ranks * len(words), torch.int64)
    gather_few(every, mine, group=group)
    found: list[int] = every.tolist()
    return found


def _pairs(flat: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(flat[i : i + _WORDS]) for i in range(0, len(flat), _WORDS)]
