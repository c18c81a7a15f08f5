"""Which blocks of a model are trained in which step, where a few of them live at a time and the others rest.

Pure arithmetic of a step's number. The orders are those of two papers, the periods the defaults of their programs:
"random" is LISA's (Pan et al. 2024, arXiv 2403.17919; LMFlow), "ascending" and "descending" are BAdam's (Luo et al.
2024, arXiv 2404.02827; github.com/Ledzy/BAdam).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zero_offload.base.errors import ConfigError
from zero_offload.base.problems import list_problems

PERIODS = {"random": 20, "ascending": 50, "descending": 50}
"""By order, the steps of a turn where none are given."""
MASTERS = ("keep", "drop")
"""Whether a block that rests keeps its fp32 masters."""


@dataclass(frozen=True)
class BlockTurns:
    """So many of a model's blocks live at a time."""

    num_blocks: int
    num_live: int
    order: str = "random"
    """"random": drawn anew for each turn. "ascending" and "descending": one group of neighbours after the other, from
    the input or the output on, and again."""
    every: int = 0
    """Steps of a turn; 0: as many as the order's program has."""
    seed: int = 0
    master: str = "keep"
    """"drop": masters are rounded to the 16-bit values when a turn ends, and their room goes with the states."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise ConfigError(list_problems("blocks that take turns have", problems))

    def _problems(self) -> Iterator[str]:
        if not (_is_count(self.num_live) and 1 <= self.num_live < self.num_blocks):
            yield (
                f"{self.num_live!r} of {self.num_blocks} blocks are to live at a time; give a number from 1 to "
                f"{self.num_blocks - 1}, or train all of them"
            )
        if self.order not in PERIODS:
            yield f"order={self.order!r} is unknown; use {', '.join(PERIODS)}"
        if not (_is_count(self.every) and self.every >= 0):
            yield f"every={self.every!r} is not a whole number of steps from 0 up"
        if not isinstance(self.seed, int):
            yield f"seed={self.seed!r} is not a whole number"
        if self.master not in MASTERS:
            yield f"master={self.master!r} is unknown; use {' or '.join(MASTERS)}"

    @property
    def period(self) -> int:
        """Steps of a turn."""
        return self.every or PERIODS[self.order]

    def at(self, step: int) -> tuple[int, ...]:
        """The blocks that live in a step, counted from 0; by the seed and the step's number alone."""
        turn = step // self.period
        if self.order == "random":
            drawn = random.Random(f"{self.seed} {turn}").sample(range(self.num_blocks), self.num_live)
            return tuple(sorted(drawn))
        begin = turn % -(-self.num_blocks // self.num_live) * self.num_live
        group = range(begin, min(begin + self.num_live, self.num_blocks))
        return tuple(group if self.order == "ascending" else sorted(self.num_blocks - 1 - index for index in group))

    def never_live(self, num_steps: int) -> list[int]:
        """The blocks that so many steps do not train."""
        lived = {index for step in range(0, num_steps, self.period) for index in self.at(step)}
        return [index for index in range(self.num_blocks) if index not in lived]


def turns_text(turns: BlockTurns, most: int) -> str:
    """A line about blocks that take turns, of which `most` fit at a time."""
    how = {
        "random": "drawn anew",
        "ascending": "the next ones from the input on",
        "descending": "the next ones from the output on",
    }[turns.order]
    return (
        f"{turns.num_live} of {turns.num_blocks} blocks live at a time, {how} every {turns.period} steps; "
        f"{most or 'not even 1'} would fit"
    )


def most_live(num_blocks: int, fits: Callable[[int], bool]) -> int:
    """The largest number of blocks, fewer than all, with which a run fits; 0 where none does."""
    low, high = 0, num_blocks - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
