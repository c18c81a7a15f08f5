from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero_offload.plan.trace import NEVER, AccessTrace

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
