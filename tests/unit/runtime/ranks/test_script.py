"""Calls that a step is expected to make: those that followed on such a step last."""

from __future__ import annotations

from collections.abc import Sequence

from zero_offload.runtime.ranks.script import Script

TRAIN = ("gather", "reduce", "step")
EVALUATE = ("gather", "gather", *TRAIN)


def make(script: Script, calls: Sequence[str], *, alike: bool = True) -> list[bool]:
    """A step of one rank, beside others that expect the same; for each call whether it was expected by all."""
    found = []
    for call in calls:
        found.append(script.expects(call))
        script.note(call)
    script.end(alike=script.forecast() > 0 and alike)
    return found


def test_a_step_is_expected_once_it_has_followed_on_itself() -> None:
    script = Script()
    assert [all(make(script, TRAIN)) for _ in range(5)] == [False, False, True, True, True]
    assert script.place.step == 5 and script.place.num_calls == 0


def test_a_rank_departs_once_and_announces_until_the_step_ends() -> None:
    script = Script()
    for _ in range(3):
        make(script, TRAIN)
    assert script.expects("gather") and not script.note("gather")
    assert not script.expects("gather") and script.note("gather")
    place = script.place
    assert not place.follows and place.num_calls == 2 and list(place.texts) == ["gather", "gather"]
    # So are calls that come next as before.
    assert not script.expects("reduce") and not script.note("reduce")


def test_a_further_call_after_the_last_one_departs() -> None:
    script = Script()
    for _ in range(3):
        make(script, TRAIN)
    for call in TRAIN:
        assert not script.note(call)
    assert script.note("step")


def test_steps_that_take_turns_are_known() -> None:
    script = Script()
    steps = [TRAIN, EVALUATE] * 4
    known = [all(make(script, calls)) for calls in steps]
    assert not any(known[:3]) and all(known[4:])


def test_the_last_step_that_followed_is_expected() -> None:
    script = Script()
    steps = [TRAIN, TRAIN, TRAIN, *[EVALUATE, TRAIN] * 3]
    known = [all(make(script, calls)) for calls in steps]
    assert known[2] and all(known[6:])


def test_a_step_in_between_is_announced_and_the_one_after_it_is_expected_anew() -> None:
    script = Script()
    for _ in range(3):
        make(script, TRAIN)
    assert make(script, EVALUATE) == [True, False, False, False, False]
    for _ in range(2):
        make(script, TRAIN)
    assert all(make(script, TRAIN))


def test_ranks_that_expect_other_calls_than_this_one() -> None:
    script = Script()
    for _ in range(3):
        make(script, TRAIN, alike=False)
    assert make(script, TRAIN) == [False] * 3
    assert all(make(script, TRAIN))


def test_all_begin_anew() -> None:
    script = Script()
    for _ in range(3):
        make(script, TRAIN)
    script.forget()
    assert [all(make(script, TRAIN)) for _ in range(3)] == [False, False, True]
