"""Predictions of the last cycle of a kind for the next one, and the unit that leaves by them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from zero_offload.runtime.prefetcher import NEVER, Evictor, FetchSchedule
from zero_offload.runtime.units.unit import UnitState


def cycle(schedule: FetchSchedule, uses: list[int], kind: str = "grad") -> None:
    schedule.begin_cycle(kind)
    for unit in uses:
        schedule.used(unit)


def test_the_first_cycle_predicts_the_second() -> None:
    schedule = FetchSchedule()
    cycle(schedule, [0, 1, 2, 1, 0])
    assert schedule.num_departures == 5
    schedule.begin_cycle("grad")
    assert list(schedule.upcoming()) == [0, 1, 2]
    for position, unit in enumerate([0, 1, 2, 1, 0]):
        assert schedule.next_use[unit] == position
        schedule.used(unit)
    assert schedule.num_departures == 0 and list(schedule.upcoming()) == []


def test_kinds_do_not_disturb_each_other() -> None:
    schedule = FetchSchedule()
    cycle(schedule, [0, 1, 2, 2, 1, 0])
    cycle(schedule, [0, 2], "no_grad")
    schedule.begin_cycle("grad")
    assert schedule.uses == (0, 1, 2, 2, 1, 0)
    schedule.begin_cycle("no_grad")
    assert schedule.uses[: schedule.num_of_cycle] == (0, 2)
    assert schedule.first_uses("no_grad", 4) == (0, 2, 1, 3)


def test_a_forward_without_backward_is_expected_again() -> None:
    schedule = FetchSchedule()
    cycle(schedule, [0, 1, 2], "no_grad")
    schedule.begin_cycle("no_grad")
    assert schedule.repeats and list(schedule.upcoming()) == [0, 1, 2]
    schedule.used(0)
    schedule.used(1)
    assert list(schedule.upcoming()) == [2, 0, 1] and list(schedule.upcoming(this_cycle=True)) == [2]
    assert schedule.next_use == {0: 3, 1: 4, 2: 2}
    schedule.used(0)
    assert schedule.num_departures == 1, "a second use in this cycle was not predicted"
    schedule.used(2)
    assert schedule.num_departures == 1 and list(schedule.upcoming()) == [0, 1, 2]
    assert list(schedule.upcoming(this_cycle=True)) == []


def test_a_departure_is_counted_and_the_rest_kept() -> None:
    schedule = FetchSchedule()
    cycle(schedule, [0, 1, 2, 3])
    schedule.begin_cycle("grad")
    schedule.used(0)
    schedule.used(9)
    assert schedule.num_departures == 1 and schedule.next_use[1] == 1
    schedule.used(2)
    assert list(schedule.upcoming()) == [3]


def test_a_cycle_without_uses_changes_no_prediction() -> None:
    schedule = FetchSchedule()
    cycle(schedule, [0, 1])
    for _ in range(2):
        schedule.begin_cycle("grad")
    assert schedule.uses == (0, 1)


def test_first_uses_before_any_trace() -> None:
    schedule = FetchSchedule()
    assert schedule.first_uses("grad", 2) == (0, 1)
    cycle(schedule, [1, 0])
    assert schedule.first_uses("grad", 3) == (1, 0, 2), "the running cycle is all there is"
    assert schedule.next_use == {}


USES = st.lists(st.integers(0, 6), max_size=40)


@given(USES, USES)
def test_the_rest_of_a_cycle_is_known_wherever_it_is(uses: list[int], followed: list[int]) -> None:
    """Next uses are the first from the position on; units come once, in their order."""
    schedule = FetchSchedule()
    cycle(schedule, uses)
    schedule.begin_cycle("grad")
    for used in [*followed, None]:
        rest = [(position, unit) for position, unit in enumerate(uses) if position >= schedule.position]
        expected = {unit: position for position, unit in reversed(rest)}
        assert all(schedule.next_use.get(unit, NEVER) == expected.get(unit, NEVER) for unit in range(7))
        assert list(schedule.upcoming()) == sorted(expected, key=lambda unit: expected[unit])
        if used is not None:
            before = schedule.position
            schedule.used(used)
            assert schedule.position == (expected[used] + 1 if used in expected else before)


def arriving(index: int, *, in_use: bool = False) -> Any:
    uses = {"forward_uses": int(in_use), "backward_uses": 0, "gathered_uses": 0}
    unit = SimpleNamespace(index=index, resident=False, stays=False, lent=False, **uses)
    unit.move_to = lambda to: setattr(unit, "state", to)
    return unit


@given(USES, st.lists(st.integers(0, 7), unique=True), st.integers(0, 40), st.permutations(range(8)))
def test_the_unit_that_leaves_is_used_last(
    uses: list[int], unused: list[int], num_used: int, arrivals: list[int]
) -> None:
    """Of several with the same next use, the first of the model leaves, whichever came first."""
    schedule = FetchSchedule()
    cycle(schedule, uses)
    cycle(schedule, uses[:num_used])
    units = [arriving(index, in_use=index not in unused) for index in range(8)]
    nothing: Any = None
    evictor = Evictor(units, schedule, nothing, nothing, None, None, 1)
    for index in arrivals:
        evictor.arrived(units[index])
    victim = evictor.choose()
    if victim is None:
        assert not unused
        return
    furthest = max(schedule.next_use.get(index, NEVER) for index in unused)
    assert victim.index == min(index for index in unused if schedule.next_use.get(index, NEVER) == furthest)
    assert evictor.choose(furthest) is None and evictor.choose(furthest - 1) is victim


def test_units_that_are_away_are_not_looked_at() -> None:
    """A choice takes time by the units that memory holds, not by the layers of the model."""
    nothing: Any = None
    evictor = Evictor([nothing] * 5000, FetchSchedule(), nothing, nothing, None, None, 1)
    units = [arriving(index) for index in (7, 4999)]
    for unit in units:
        evictor.arrived(unit)
    assert evictor.unused() == units
    units[0].state = UnitState.AWAY
    assert evictor.choose() is units[1]


def test_first_uses_name_every_unit_once() -> None:
    schedule = FetchSchedule()
    assert schedule.first_uses("grad", 3) == (0, 1, 2)
    cycle(schedule, [2, 0, 2, 3])
    assert schedule.first_uses("grad", 5) == (2, 0, 3, 1, 4)
