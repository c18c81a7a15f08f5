from __future__ import annotations

import itertools

import pytest

from zero_offload.base.threads import FirstError
from zero_offload.plan.layout import UnitLayout
from zero_offload.runtime.units.unit import TRANSITIONS, Unit, UnitState


def unit_in(state: UnitState) -> Unit:
    unit = Unit(0, UnitLayout("blocks.3", ()), (), FirstError(), resident=False)
    unit.state = state
    return unit


@pytest.mark.parametrize(("start", "to"), list(itertools.product(UnitState, repeat=2)))
def test_only_listed_moves_are_legal(start: UnitState, to: UnitState) -> None:
    unit = unit_in(start)
    if to in TRANSITIONS[start]:
        unit.move_to(to)
        assert unit.state is to
    else:
        with pytest.raises(AssertionError, match=rf"blocks\.3: {start.value} cannot become {to.value}"):
            unit.move_to(to)
        assert unit.state is start


def test_an_illegal_move_tells_the_last_ones() -> None:
    unit = unit_in(UnitState.PRESENT)
    for state in (UnitState.AWAY, UnitState.AWAITING, UnitState.FETCHING, UnitState.PRESENT):
        unit.move_to(state)
    with pytest.raises(AssertionError, match="away -> awaiting -> fetching -> present"):
        unit.move_to(UnitState.FETCHING)


def test_every_state_can_be_reached_and_left() -> None:
    assert set(TRANSITIONS) == set(UnitState) == set().union(*TRANSITIONS.values())


def test_a_use_ends_once_also_where_the_unit_had_to_leave() -> None:
    unit = unit_in(UnitState.PRESENT)
    unit.forward_uses = 2
    unit.end_use(lambda section: True)
    unit.break_off()
    unit.end_use(lambda section: True)
    assert (unit.forward_uses, unit.broken_uses) == (0, 0)
    with pytest.raises(AssertionError, match=r"blocks\.3: a use has ended twice"):
        unit.end_use(lambda section: True)
