"""Models that are committed together go on from one commit, all of them, whatever breaks off."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.crash_run import Crash, History, Plan, Setup, Tally, explore, play
from tests.helpers.crashfs import CrashFS
from zero_offload.base.types import Durability

NUM_STEPS = 3
TWO = Setup(Durability.COMMIT, num_models=2)
SETUPS = [
    TWO,
    replace(TWO, durability=Durability.PROCESS),
    replace(TWO, tiers="disk", directories=("/a/run", "/b/run")),
    replace(TWO, num_models=3, durability=Durability.PROCESS),
]


def _history(setup: Setup, seed: int = 0) -> History:
    history = play(CrashFS(), setup, NUM_STEPS, seed)
    assert history.errors == []
    assert history.reported[-1][1] == NUM_STEPS
    return history


def _crash(setup: Setup) -> Crash:
    """The worst that the durability promises to survive."""
    return Crash.POWER if setup.durability is Durability.COMMIT else Crash.KILL


def _check(name: object, tally: Tally) -> None:
    print(tally.row(str(name)))
    assert tally.cases > 0
    assert tally.bad == 0, tally.first_bad


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_crash_leaves_all_models_at_one_commit(setup: Setup) -> None:
    _check(setup, explore(_history(setup), Plan(_crash(setup), range(2), every=7)))


@pytest.mark.full
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_every_crash_in_other_orders(setup: Setup) -> None:
    for seed in range(1, 4):
        _check(setup, explore(_history(setup, seed), Plan(_crash(setup), range(4))))


@pytest.mark.full
@pytest.mark.parametrize("setup", SETUPS[:2], ids=str)
def test_a_crash_after_a_crash(setup: Setup) -> None:
    crash = _crash(setup)
    then = Plan(crash, range(3), every=3)
    _check(f"{setup}, twice", explore(_history(setup), Plan(crash, range(2), every=11, then=then, then_every=5)))
