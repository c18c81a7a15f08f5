from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero_offload.plan.schedule import NEVER, AccessTrace, FetchSchedule


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
        assert schedule.next_use(unit) == position
        schedule.used(unit)
    assert schedule.num_departures == 0 and list(schedule.upcoming()) == []


def test_kinds_do_not_disturb_each_other() -> None:
    schedule = FetchSchedule()
    cycle(schedule, [0, 1, 2, 2, 1, 0])
    cycle(schedule, [0, 2], "no_grad")
    schedule.begin_cycle("grad")
    assert schedule.trace.uses == (0, 1, 2, 2, 1, 0)
    schedule.begin_cycle("no_grad")
    assert schedule.trace.uses == (0, 2)
    assert schedule.first_uses("no_grad", 4) == (0, 2, 1, 3)


def test_a_departure_is_counted_and_the_rest_kept() -> None:
    schedule = FetchSchedule()
    cycle(schedule, [0, 1, 2, 3])
    schedule.begin_cycle("grad")
    schedule.used(0)
    schedule.used(9)
    assert schedule.num_departures == 1 and schedule.next_use(1) == 1
    schedule.used(2)
    assert list(schedule.upcoming()) == [3]


def test_a_cycle_without_uses_changes_no_prediction() -> None:
    schedule = FetchSchedule()
    cycle(schedule, [0, 1])
    for _ in range(2):
        schedule.begin_cycle("grad")
    assert schedule.trace.uses == (0, 1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_the_victim_is_used_last(uses: list[int], data: st.DataObject) -> None:
    schedule = FetchSchedule()
    cycle(schedule, uses)
    cycle(schedule, uses[: data.draw(st.integers(0, len(uses)))])
    candidates = data.draw(st.lists(st.integers(0, 7), unique=True))
    victim = schedule.victim(candidates)
    if candidates:
        assert victim is not None and schedule.next_use(victim) == max(map(schedule.next_use, candidates))
        later_than = schedule.next_use(victim)
        assert schedule.victim(candidates, later_than) is None
    else:
        assert victim is None


def test_first_uses_before_any_trace() -> None:
    schedule = FetchSchedule()
    assert schedule.first_uses("grad", 2) == (0, 1)
    cycle(schedule, [1, 0])
    assert schedule.first_uses("grad", 3) == (1, 0, 2), "the running cycle is all there is"
    assert schedule.next_use(1) == NEVER


USES = st.lists(st.integers(0, 6), max_size=40)


@given(USES, st.integers(0, 6), st.integers(0, 45))
def test_next_use_is_the_first_at_or_after_the_position(uses: list[int], unit: int, position: int) -> None:
    found = AccessTrace(tuple(uses)).next_use(unit, position)
    expected = [i for i, used in enumerate(uses) if i >= position and used == unit]
    assert found == (expected[0] if expected else NEVER)


@given(USES, st.integers(0, 45))
def test_upcoming_units_come_once_in_order_of_next_use(uses: list[int], position: int) -> None:
    trace = AccessTrace(tuple(uses))
    found = list(trace.upcoming(position))
    assert found == sorted(set(uses[position:]), key=lambda unit: trace.next_use(unit, position))


def test_first_uses_name_every_unit_once() -> None:
    assert AccessTrace((2, 0, 2, 3)).first_uses(5) == (2, 0, 3, 1, 4)
    assert AccessTrace().first_uses(3) == (0, 1, 2)
