"""Steps whose times can be added up by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zero_offload.plan.hardware import Lane
from zero_offload.plan.lane_costs import NO_FETCH, Fetch, UnitCosts, UpdateCosts
from zero_offload.plan.passes import GradsOut, LaneClock, Lanes, Updates
from zero_offload.plan.timeline import Policy, Run
from zero_offload.telemetry.spans import Cause

IDLE = UnitCosts(
    forward_s=1.0,
    backward_s=2.0,
    buffer_bytes=0,
    first=NO_FETCH,
    again=NO_FETCH,
    delivered=False,
    reduce_s=0.0,
    late_reduce_s=0.0,
    grad_download_s=0.0,
    grad_write_s=0.0,
    grad_read_s=0.0,
    land_s=0.0,
    saved_out=NO_FETCH,
    update=UpdateCosts(),
    commit_s=0.0,
)
ALONE = UpdateCosts(pieces=1, host_s=3.0)


def lanes(*, turns: bool = False) -> Lanes:
    made = Lanes({lane: LaneClock() for lane in Lane})
    if turns:
        made[Lane.WRITE] = made[Lane.READ]
    return made


def policy(count: int, **changes: Any) -> Policy:
    usual = Policy(
        uses=tuple((index,) for index in range(count)),
        room_bytes=0,
        overlaps=False,
        in_backward=False,
        num_passes=1,
        by_unit=False,
        gathers_ahead=(False,) * count,
        hold_s=0.0,
        is_host=False,
    )
    return replace(usual, **changes)


def step_of(cost: UnitCosts, count: int, **changes: Any) -> tuple[float, dict[Cause, float]]:
    """Seconds of a step in the steady state, and what compute waited for."""
    run = Run([cost] * count, lanes(turns=changes.pop("turns", False)), policy(count, **changes))
    for _ in range(4):
        run.step()
    before = run.now
    run.forget_times()
    run.step()
    return run.now - before, run.exposed_s


def test_what_waits_for_nothing_is_its_compute() -> None:
    assert step_of(IDLE, 4) == (12.0, {})
    assert step_of(IDLE, 4, num_passes=3) == (36.0, {})


AWAY = replace(IDLE, backward_s=1.0, buffer_bytes=1, first=Fetch(read_s=1.0), again=Fetch(read_s=1.0))


@pytest.mark.parametrize(
    ("room", "step_s"),
    [
        (1, 8.0 + 6.0),  # each use but those at the turns of forward and backward waits for its read
        (2, 8.0),  # the next unit is read while one computes
        (4, 8.0),  # all stay
    ],
)
def test_units_are_read_ahead_as_far_as_frames_go(room: int, step_s: float) -> None:
    taken_s, waits = step_of(AWAY, 4, room_bytes=room)
    assert taken_s == step_s
    assert waits.get(Cause.PARAMS, 0.0) == step_s - 8.0


def test_a_slow_drive_is_waited_for_whatever_is_ahead() -> None:
    slow = replace(AWAY, again=Fetch(read_s=3.0))
    # With two frames a step reads units 2 and 3, then 1 and 0: two reads are waited for in part in each direction.
    taken_s, waits = step_of(slow, 4, room_bytes=2)
    assert taken_s == 8.0 + 4 * (3.0 - 1.0)
    assert waits == {Cause.PARAMS: 8.0}


def test_a_serial_update_comes_after_backward() -> None:
    cost = replace(IDLE, forward_s=2.0, backward_s=2.0, update=ALONE)
    assert step_of(cost, 2) == (4.0 + 4.0 + 6.0, {Cause.UPDATE: 6.0})


def test_an_update_beside_forward_is_waited_for_where_it_is_slower() -> None:
    cost = replace(IDLE, forward_s=2.0, backward_s=2.0, update=ALONE)
    # Backward ends at 0: units are new at 3 and 6; forwards are from 3 to 5 and from 6 to 8, backwards to 12.
    assert step_of(cost, 2, overlaps=True) == (12.0, {Cause.UPDATE: 4.0})
    quick = replace(cost, update=UpdateCosts(pieces=1, host_s=1.0))
    assert step_of(quick, 2, overlaps=True) == (8.0 + 1.0, {Cause.UPDATE: 1.0})


def test_an_update_in_backward_runs_beside_the_units_before() -> None:
    cost = replace(IDLE, forward_s=2.0, backward_s=2.0, update=UpdateCosts(pieces=1, host_s=1.0))
    # Unit 1 is new at 3, while unit 0 is in backward, which ends at 4; unit 0 is new at 5, and waited for.
    assert step_of(cost, 2, overlaps=True, in_backward=True) == (8.0 + 1.0, {Cause.UPDATE: 1.0})
    slow = replace(cost, forward_s=1.0, update=UpdateCosts(pieces=1, host_s=4.0))
    for count, is_full in ((8, False), (10, True)):
        # Backward is twice as fast as the update until the ring is full. Forward waits for its first unit.
        taken_s, waits = step_of(slow, count, overlaps=True, in_backward=True)
        assert taken_s == 2.0 + count * 4.0 + count * 1.0
        assert (Cause.GRADS in waits) == is_full


def test_the_update_reads_computes_and_writes_at_once() -> None:
    cost = replace(IDLE, update=UpdateCosts(pieces=4, read_s=2.0, host_s=1.0, write_s=2.0, is_staged=True))
    apart = Updates([cost], lanes(), {})
    apart.queue(0, 0.0)
    assert apart.until(0) == 2.25  # reads end at 0.5, 1, 1.5, 2; a piece is computed in 0.25
    assert apart.end() == 2.75  # and written in 0.5
    in_turn = Updates([cost], lanes(turns=True), {})
    in_turn.queue(0, 0.0)
    # Three reads, the first write, the fourth read, and the other writes.
    assert (in_turn.until(0), in_turn.end()) == (2.75, 4.0)


def test_no_more_chunks_are_under_way_than_have_staging() -> None:
    cost = replace(IDLE, update=UpdateCosts(pieces=6, read_s=0.6, host_s=0.6, write_s=60.0, is_staged=True))
    update = Updates([cost], lanes(), {})
    update.queue(0, 0.0)
    # The fifth chunk is opened when the first is written, at 10.2, before the third is computed; the sixth at 20.2,
    # before the fourth, the fifth and the sixth are.
    assert update.until(0) == pytest.approx(20.2 + 3 * 0.1)
    assert update.end() == pytest.approx(0.2 + 60.0)


def test_states_in_memory_wait_for_the_commit_before() -> None:
    cost = replace(IDLE, update=ALONE)
    update = Updates([cost, cost], lanes(), {1: 10.0})
    update.queue(0, 0.0)
    update.queue(1, 0.0)
    assert (update.until(0), update.until(1)) == (3.0, 13.0)


@pytest.mark.parametrize(("land_s", "units"), [(0.0, 2), (2.0, 2)])
def test_gradients_of_two_units_are_on_the_device(land_s: float, units: int) -> None:
    """One that backward makes, and one on its way to the host."""
    cost = replace(IDLE, forward_s=0.0, backward_s=1.0, grad_download_s=3.0, land_s=land_s)
    # Downloads end at 4, 7, 10, 13, 16; the third unit's backward begins when the first one's is over.
    assert step_of(cost, 5) == (16.0 + land_s, {Cause.GRADS: 3 * 5 + 1 - 5.0 + land_s})
    grads = GradsOut([cost] * 5, lanes())
    for unit in range(units):
        assert grads.room_s() == 0.0
        grads.add(unit, 1.0 + unit, adds=False)
    assert grads.room_s() == 4.0


def test_what_the_host_adds_is_in_staging_for_three_units() -> None:
    cost = replace(IDLE, grad_download_s=0.5, land_s=4.0)
    grads = GradsOut([cost] * 5, lanes())
    for unit in range(4):
        grads.add(unit, 1.0 + unit, adds=False)
    # They land at 5.5, 9.5, 13.5 and 17.5.
    assert grads.room_s() == 9.5


def test_a_gather_of_what_an_update_may_change_is_not_launched_ahead() -> None:
    gathered = replace(
        IDLE, forward_s=2.0, backward_s=2.0, buffer_bytes=1, first=Fetch(gather_s=1.0), again=Fetch(gather_s=1.0)
    )
    updated = replace(gathered, update=UpdateCosts(pieces=1, host_s=0.0))
    ahead = {"room_bytes": 3, "gathers_ahead": (True,) * 4}
    # Nothing is updated: with three frames a step fetches one unit in each direction, behind compute.
    assert step_of(gathered, 4, **ahead)[1] == {}
    # Beside an update each forward waits for its unit's gather.
    assert step_of(updated, 4, overlaps=True, **ahead)[1] == {Cause.PARAMS: 4.0}


def test_activations_come_back_while_the_unit_behind_computes() -> None:
    cost = replace(IDLE, saved_out=Fetch(read_s=2.0, keep_write_s=1.0))
    # Only the last unit's are waited for: nothing computes while they come. Reads take as long as a backward.
    assert step_of(cost, 3, hold_s=0.0) == (9.0 + 2.0, {Cause.ACTIVATIONS: 2.0})
    on_host = step_of(cost, 3, is_host=True)
    assert on_host == (9.0 + 2.0 + 3 * 1.0, {Cause.ACTIVATIONS: 5.0})  # a CPU waits until they are written


def test_a_commit_is_written_beside_the_rest_of_the_step() -> None:
    cost = replace(IDLE, update=UpdateCosts(pieces=1, host_s=0.5), commit_s=2.0)
    assert step_of(cost, 3) == (9.0 + 1.5, {Cause.UPDATE: 1.5})
    # Slower than the step, it is waited for by the update of what it has not written yet.
    slow = replace(cost, commit_s=5.0)
    taken_s, waits = step_of(slow, 3)
    assert taken_s == pytest.approx(3 * 5.0 + 0.5)
    assert waits[Cause.UPDATE] == pytest.approx(taken_s - 9.0)
