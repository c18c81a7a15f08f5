"""The main crash test: after a power loss or a kill at any operation, a run goes on from one committed step, whole.

The code of commits and resumes is the real one, on a disk in memory (`tests/helpers/crashfs.py`). A recovery is bad if
anything is raised, or if a state of any rank is not bit for bit that of the step found. It is also bad if a step that
had been reported is gone, or if the next commit does not last. `pytest -m full -s` tries every operation and prints the
rows of a table.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.crash_run import Crash, History, Plan, Setup, Tally, explore, play
from tests.helpers.crashfs import CrashFS
from zero_offload.base.types import Durability

NUM_STEPS = 6
COMMIT, PROCESS = Setup(Durability.COMMIT), Setup(Durability.PROCESS)
STRIPED = ("/a/run", "/b/run")
FULL_SEEDS = range(20)

SETUPS = [
    COMMIT,
    replace(COMMIT, interval=3),
    replace(COMMIT, world_size=2),
    replace(COMMIT, world_size=2, interval=3),
    replace(COMMIT, world_size=2, own_drives=True),
    replace(COMMIT, tiers="disk", directories=STRIPED),
    replace(COMMIT, world_size=2, interval=3, tiers="disk", directories=STRIPED),
    PROCESS,
    replace(PROCESS, interval=3),
    replace(PROCESS, world_size=2),
    replace(PROCESS, world_size=2, interval=3),
    replace(PROCESS, tiers="disk", directories=STRIPED),
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
def test_a_crash_leaves_one_committed_step(setup: Setup) -> None:
    crash = _crash(setup)
    seeds = range(7) if crash is Crash.POWER else range(3)
    _check(setup, explore(_history(setup), Plan(crash, seeds, every=7 if setup.world_size == 1 else 23)))


@pytest.mark.parametrize("setup", [COMMIT, PROCESS], ids=str)
def test_a_crash_after_a_crash(setup: Setup) -> None:
    crash = _crash(setup)
    then = Plan(crash, range(4), every=5)
    _check(f"{setup}, twice", explore(_history(setup), Plan(crash, range(1, 3), every=37, then=then)))


@pytest.mark.full
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_every_crash(setup: Setup) -> None:
    _check(setup, explore(_history(setup), Plan(_crash(setup), FULL_SEEDS)))


@pytest.mark.full
@pytest.mark.parametrize("setup", [each for each in SETUPS if each.world_size == 2], ids=str)
def test_every_crash_in_other_orders_of_the_ranks(setup: Setup) -> None:
    tally = Tally()
    for seed in range(1, 5):
        tally.add(explore(_history(setup, seed), Plan(_crash(setup), range(8), every=3)))
    _check(f"{setup}, 4 other orders", tally)


@pytest.mark.full
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_every_crash_after_some_crash(setup: Setup) -> None:
    crash = _crash(setup)
    then = Plan(crash, range(6), every=setup.world_size)
    plan = Plan(crash, range(8), every=2, then=then, then_every=20 * setup.world_size)
    _check(f"{setup}, twice", explore(_history(setup), plan))


@pytest.mark.full
@pytest.mark.parametrize("setup", [each for each in SETUPS if each.durability is Durability.COMMIT], ids=str)
def test_every_kill_followed_by_a_power_loss(setup: Setup) -> None:
    then = Plan(Crash.POWER, range(6), every=setup.world_size)
    tally = explore(_history(setup), Plan(Crash.KILL, range(2), then=then, then_every=3 * setup.world_size**2))
    _check(f"{setup}, kill -9 and then power", tally)
