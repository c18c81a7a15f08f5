"""Which blocks live in a step: by seed and step alone, in the orders of LISA and BAdam."""

from __future__ import annotations

from typing import Any

import pytest

import zero_offload as zo
from zero_offload.plan.turns import BlockTurns, most_live


def turns_of(num_steps: int, *args: Any) -> list[tuple[int, ...]]:
    turns = BlockTurns(*args)
    return [turns.at(step) for step in range(num_steps)]


def test_neighbours_take_turns_from_either_end() -> None:
    assert turns_of(8, 5, 2, "ascending", 2) == [(0, 1)] * 2 + [(2, 3)] * 2 + [(4,)] * 2 + [(0, 1)] * 2
    assert turns_of(8, 5, 2, "descending", 2) == [(3, 4)] * 2 + [(1, 2)] * 2 + [(0,)] * 2 + [(3, 4)] * 2


def test_a_drawn_turn_follows_from_seed_and_step() -> None:
    drawn = turns_of(300, 6, 2, "random", 3, 7)
    turns = drawn[::3]
    assert drawn == [turn for turn in turns for _ in range(3)]
    assert turns == [BlockTurns(6, 2, "random", 3, 7).at(step) for step in range(0, 300, 3)]
    assert all(len({*turn}) == 2 and turn == tuple(sorted(turn)) for turn in turns)
    assert len({*turns}) == 15 and turns != turns_of(300, 6, 2, "random", 3, 8)[::3]


def test_periods_are_those_of_the_programs() -> None:
    assert [BlockTurns(4, 1, order).period for order in ("random", "ascending", "descending")] == [20, 50, 50]


def test_blocks_that_a_short_run_leaves_out() -> None:
    assert BlockTurns(5, 2, "ascending", 3).never_live(6) == [4]
    assert BlockTurns(5, 2, "ascending", 3).never_live(7) == []


def test_the_most_that_fits() -> None:
    for limit in range(9):
        tried: list[int] = []
        assert most_live(9, lambda num, limit=limit, tried=tried: tried.append(num) or num <= limit) == min(limit, 8)
        assert all(0 < num < 9 for num in tried) and len(tried) < 5


def test_all_problems_come_at_once() -> None:
    with pytest.raises(zo.ConfigError, match="3 problems") as error:
        BlockTurns(4, 4, "up", -1)
    for text in ("4 of 4 blocks", "order='up'", "every=-1"):
        assert text in str(error.value)
    with pytest.raises(zo.ConfigError, match="True of 4 blocks"):
        BlockTurns(4, True)
