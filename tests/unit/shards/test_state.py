from __future__ import annotations

import itertools

import pytest

from zero_offload.shards.state import TRANSITIONS, StateTracker, UnitState


@pytest.mark.parametrize(("start", "to"), list(itertools.product(UnitState, repeat=2)))
def test_only_listed_moves_are_legal(start: UnitState, to: UnitState) -> None:
    tracker = StateTracker("blocks.3", start)
    if to in TRANSITIONS[start]:
        tracker.advance(to)
        assert tracker.state is to
    else:
        with pytest.raises(AssertionError, match=rf"blocks\.3: {start.value} cannot become {to.value}"):
            tracker.advance(to)
        assert tracker.state is start


def test_an_illegal_move_tells_the_last_ones() -> None:
    tracker = StateTracker("u")
    for state in (UnitState.AWAITING, UnitState.FETCHING, UnitState.PRESENT):
        tracker.advance(state)
    with pytest.raises(AssertionError, match="away -> awaiting -> fetching -> present"):
        tracker.advance(UnitState.FETCHING)


def test_every_state_can_be_reached_and_left() -> None:
    assert set(TRANSITIONS) == set(UnitState) == set().union(*TRANSITIONS.values())
